"""Any ``nn.Module`` as a pure function of its parameters.

``functionalize(module)`` gives ``Functional(params, buffers, apply)``. What is new
against ``torch.func.functional_call``: the parameters come as a tree whose stacks of
layers are :class:`zfunc.Layers`, and during ``apply`` each layer runs through
:func:`zfunc.layer`, so that a transform can gather, cast, drop, recompute or
profile it, in unmodified Hugging Face models too.
"""

from __future__ import annotations

import copy
import functools
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from zfunc.engine import context
from zfunc.engine.passes import enter
from zfunc.engine.recomputation import taken
from zfunc.errors import PlacementError
from zfunc.modules.binding import Template, TemplatePool, skeleton
from zfunc.modules.compilation import check_split, compile_of, compiles
from zfunc.modules.module_checks import check_module
from zfunc.modules.parameters import Parameters
from zfunc.modules.rehearsed import rehearsed
from zfunc.modules.split_modules import check_outputs
from zfunc.modules.split_params import splitting_of
from zfunc.modules.swapping import misfit
from zfunc.modules.units import Choice, dissect
from zfunc.operators.parts import splits_now
from zfunc.ranks.comm import Group
from zfunc.trees import tree

__all__ = ["Functional", "functionalize"]

_META_NOTE = (
    "zfunc: the module ran into a tensor on meta. A parameter or buffer was reached in another way "
    "than as an attribute of its module (a plain list of parameters, a closure, a cache built in "
    "__init__). Use nn.ParameterList / register_buffer, or read it from self in forward."
)

_COPY_NOTE = (
    "zfunc: this step splits its leaves over ranks, and these params do not say that they are "
    "parts. Copies of leaves (x * 2, x.bfloat16()) do not know: give apply() the params as the "
    "loss gets them."
)

_NOTHING: AbstractContextManager[Any] = nullcontext()


@dataclass(frozen=True, eq=False, repr=False)
class Functional:
    """A module without its state: ``apply`` is a pure function of ``params`` and ``buffers``.

    Attributes:
        buffers: name -> tensor, non-persistent ones included.
        config: the module's ``config`` (Hugging Face), or None.
    """

    buffers: dict[str, Tensor]
    config: Any
    _name: str
    _train: bool | None
    _pool: TemplatePool = field(repr=False)
    _parameters: Parameters = field(repr=False)

    @property
    def params(self) -> Any:
        """Nested dict of tensors under the names of ``named_parameters()``, tied ones once.

        Each stack of layers in it is a ``zf.Layers``. They share the memory of the module's
        parameters, and none is tracked by autograd. Those of which the module had
        ``requires_grad=False`` are frozen (:attr:`frozen`).

        They are held until a step has placed them, which makes a copy: ``step.place(...)`` is how
        the full parameters leave memory. From then on they are found as long as anybody else
        holds the module or them.

        Raises:
            PlacementError: a step has placed them, and nobody holds them.
        """
        return self._parameters.tree()

    def apply(
        self,
        params: Any,
        /,
        *args: Any,
        buffers: dict[str, Tensor] | None = None,
        mutable: bool = False,
        train: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run the module on these parameters.

        Args:
            params: a tree like ``self.params``, plain or placed.
            *args, **kwargs: the module's own.
            buffers: values for all buffers; by default ``self.buffers``.
            mutable: also return what the call made of the buffers. They are never
                changed in place, and without ``mutable`` changes are dropped.
            train: the mode for this call; None leaves every submodule in its own, and warns once
                if dropout is off in one that is differentiated.

        Returns:
            What the module returns; with ``mutable``, ``(output, new_buffers)``.

        Raises:
            PlacementError: ``params`` or ``buffers`` do not fit the module; the leaves
                that differ are named. The module writes to a parameter in place.
        """
        entered, running = enter(params), context.current()
        given, sources = self._buffers(buffers, running)
        mode = self._train if train is None else train
        pool, ranks = self._parts(params)
        asked = mode is None and pool.dropout.open
        watched = pool.dropout.watched(entered) if asked else _NOTHING
        # The first call: the module leaves its parameters alone.
        around = pool.first.watched(entered) if pool.first.open else _NOTHING
        with pool.lend() as template, watched, around, taken(template), rehearsed(template):
            _bind(template, entered, sources, mode, ranks)
            out = _call(template, args, kwargs)
            return (out, _restored(template.new_buffers(), sources, given)) if mutable else out

    @contextmanager
    def held(
        self,
        params: Any,
        /,
        *,
        buffers: dict[str, Tensor] | None = None,
        train: bool | None = None,
    ) -> Iterator[Callable[..., Any]]:
        """A block in which the module runs often on the same parameters: they are bound once.

        Args:
            params, buffers, train: see :meth:`apply`; what calls make of buffers is dropped.

        Yields:
            ``call(*args, **kwargs)``, which returns what ``apply`` with these parameters would.
            One call at a time, and none after the block.

        >>> model = functionalize(nn.Linear(2, 1))
        >>> with model.held({"weight": torch.ones(1, 2), "bias": torch.zeros(1)}) as call:
        ...     call(torch.ones(2)).item(), call(torch.zeros(2)).item()
        (2.0, 0.0)
        """
        entered = enter(params)
        _, sources = self._buffers(buffers, context.current())
        pool, ranks = self._parts(params)
        around = pool.first.watched(entered) if pool.first.open else _NOTHING
        with pool.lend() as template, around:
            _bind(template, entered, sources, self._train if train is None else train, ranks)

            def call(*args: Any, **kwargs: Any) -> Any:
                template.renew()
                with taken(template):
                    return _call(template, args, kwargs)

            yield call

    def pure(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """``fn(model, ...)``, written for a module, as the pure function ``fn(params, ...)``.

        Args:
            fn: calls its first argument, and does no more with it.

        Returns:
            ``fn`` with :meth:`apply` on the parameters that it is given in the place of the model.

        >>> model = functionalize(nn.Linear(2, 1))
        >>> loss_fn = model.pure(lambda model, x: model(x).square().mean())
        >>> loss_fn({"weight": torch.ones(1, 2), "bias": torch.zeros(1)}, torch.ones(2)).item()
        4.0
        """

        @functools.wraps(fn)
        def run(params: Any, *args: Any, **kwargs: Any) -> Any:
            return fn(functools.partial(self.apply, params), *args, **kwargs)

        return run

    def _parts(self, params: Any) -> tuple[TemplatePool, Group | None]:
        """Copies of the module for such params: of what each rank has if they are split."""
        found = splitting_of(params)
        if found is None:
            return self._pool, None
        check_split(self._pool.fuses)
        plan, ranks = found
        return self._pool.split(plan, ranks.rank), ranks

    def fused(self, fuse: Callable[[nn.Module], None]) -> Functional:
        """The same function, run by copies of the module that ``fuse`` has been let loose on.

        Args:
            fuse: gives submodules another ``forward`` of the same meaning, in place.
        """
        return replace(self, _pool=self._pool.fused(fuse))

    def to_module(self, params: Any, buffers: dict[str, Tensor] | None = None) -> nn.Module:
        """A real module with copies of these values; tied weights are tied again.

        Args:
            params: a tree like ``self.params``; a placed one is gathered (a collective).
            buffers: by default ``self.buffers``.
        """
        (sources, _), anatomy = self._buffers(buffers, None), self._pool.anatomy
        full = tree.full(params)
        values = tree.flatten_names(full)
        shapes = {name: getattr(x, "shape", None) for name, x in values.items()}
        if shapes != {leaf.name: leaf.shape for leaf in anatomy.leaves}:
            raise misfit(full, anatomy.leaves, self._name)
        memo: dict[int, Any] = {}
        modules = dict(self._pool.skeleton.named_modules())
        for leaf in anatomy.leaves:
            home, attribute = leaf.homes[0]
            p = nn.Parameter(values[leaf.name], requires_grad=leaf.requires_grad)
            memo[id(modules[home]._parameters[attribute])] = p
        for leaf in anatomy.buffers:
            home, attribute = leaf.homes[0]
            memo[id(modules[home]._buffers[attribute])] = sources[leaf.name].detach().clone()
        return copy.deepcopy(self._pool.skeleton, memo)

    @property
    def frozen(self) -> tuple[str, ...]:
        """Names of the parameters that required no gradient when they were functionalized.

        ``params`` says so by its structure: they get no gradient, no moments and no update.
        """
        return self._pool.anatomy.frozen

    @property
    def signature(self) -> inspect.Signature:
        """That of the module's ``forward``."""
        return inspect.signature(self._pool.skeleton.forward)

    def _buffers(
        self, given: dict[str, Tensor] | None, running: context.Context | None
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Those of a call, and the same as the running step computes: persistent floats in 16 bits
        under ``precision``.

        Statistics of norms and what is not saved (rotary tables) stay as they are.
        """
        buffers = self.buffers if given is None else given
        if given is not None and given.keys() != self.buffers.keys():
            missing = sorted(self.buffers.keys() - buffers.keys())
            extra = sorted(buffers.keys() - self.buffers.keys())
            raise PlacementError(
                f"these buffers do not fit {self._name}: missing {missing[:5]}, "
                f"unexpected {extra[:5]}. Pass {{**functional.buffers, ...}}."
            )
        dtype = None if running is None else running.compute
        if dtype is None:
            return buffers, buffers
        return buffers, {
            name: x.to(dtype) if name in self._constants and x.is_floating_point() else x
            for name, x in buffers.items()
        }

    @functools.cached_property
    def _constants(self) -> frozenset[str]:
        """Names of the buffers that are saved with the module and are no statistics."""
        modules = dict(self._pool.skeleton.named_modules())
        return frozenset(
            leaf.name
            for leaf in self._pool.anatomy.buffers
            if not any(
                attribute in modules[home]._non_persistent_buffers_set
                or attribute in ("running_mean", "running_var")
                for home, attribute in leaf.homes
            )
        )

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise ``TypeError``: which parameters?"""
        raise TypeError(
            f"{self._name} is functionalized: it holds no parameters to run on. Write "
            "model.apply(params, *inputs), in a step model.apply(state.params, *inputs); "
            "model.to_module(params) is a module that can be called."
        )

    def __repr__(self) -> str:
        anatomy = self._pool.anatomy
        numel = sum(leaf.shape.numel() for leaf in anatomy.leaves)
        stacks = ", ".join(
            f"{'.'.join(map(str, path)) or 'itself'} x {n}" for path, n in anatomy.stacks.items()
        )
        fused = _fusible(self._pool.skeleton) if _fuse in self._pool.fuses else {}
        parts = "".join(f", fused: {name} x {n}" for name, n in fused.items())
        return (
            f"Functional({self._name}: {numel:,} parameters in {len(anatomy.leaves)} leaves, "
            f"layers: {stacks or 'none'}{', compiled' * compiles(self._pool.fuses)}, "
            f"{len(self.buffers)} buffers{parts})"
        )


def _bind(
    template: Template,
    entered: Any,
    sources: dict[str, Tensor],
    mode: bool | None,
    ranks: Group | None,
) -> None:
    try:
        template.bind(entered, sources, mode, ranks)
    except PlacementError as error:
        if ranks is None and splits_now():
            error.add_note(_COPY_NOTE)
        raise


def _call(template: Template, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if (plan := template.pool.plan) is not None:
        check_outputs(plan, kwargs)
    try:
        return template.module(*args, **kwargs)
    except (RuntimeError, NotImplementedError) as error:
        if "meta" in str(error):
            error.add_note(_META_NOTE)
        raise


def _restored(
    new: dict[str, Tensor], used: dict[str, Tensor], given: dict[str, Tensor]
) -> dict[str, Tensor]:
    """New buffers in the dtypes of those given; one that the call left alone is the given one."""
    out = {}
    for name, x in new.items():
        was = given[name]
        if used[name] is was:
            out[name] = x
        elif x is used[name]:
            out[name] = was
        else:
            out[name] = x.to(was.dtype)
            if x.shape == was.shape:  # decided where they are: the host would have to wait
                out[name] = torch.where((x == used[name]).all(), was, out[name])
    return out


def functionalize(
    module: nn.Module,
    units: Choice = None,
    train: bool | None = None,
    *,
    fuse: bool = False,
    compile: bool | Mapping[str, Any] = False,
) -> Functional:
    """Turn a module into a pure function of its parameters.

    The module is not changed, and may be deleted: only the memory of its parameters
    and buffers is shared (no copy is made), its code is copied.

    Args:
        module: any ``nn.Module``, an unmodified Hugging Face model included.
        units: which submodules are layers, the units of gather, offload, drop and
            recompute. By default the children of the outermost ``nn.ModuleList`` and
            ``nn.Sequential``. A predicate ``(name, module) -> bool`` or patterns such
            as ``"encoder.block*"`` choose others; the outermost matches count. One
            that is no child of a list becomes a stack of one, under its own name.
        train: the mode in which ``apply`` runs the module; by default every submodule
            keeps the one that it is in now.
        fuse: let kernels take over norms, activations, rotary positions and losses of known
            module types (``zfunc.huggingface.fusion``): of unmodified Hugging Face models what is
            written like parts of Llama, Gemma, Phi-3, GLM, GPT-NeoX, Cohere, OLMo, T5 or BERT,
            under whatever name; ``nn.LayerNorm``, ``nn.RMSNorm``, ``nn.GELU``. Numbers are
            the same but for rounding. On a CPU their torch twins run. Unknown types are left
            alone; if there is no known one, a warning says so.
        compile: let ``torch.compile`` compile each layer, ``fullgraph`` unless said otherwise; a
            dict has its keywords. Layers of one kind share a graph. What is outside of layers
            (embeddings, heads) stays as it is, and so do layers that fill a cache of keys.

    Returns:
        A :class:`Functional`.

    Raises:
        PlacementError: a parameter that is not floating-point, has no shape yet or is
            sharded already, or has hooks; a module wrapped for data parallelism; a layer that is
            compiled, or an embedding with ``max_norm``; ``units`` that match nothing.
        TypeError: ``compile`` is neither a bool nor a dict.
        ValueError: ``compile``, of a module without layers.

    >>> import torch
    >>> model = functionalize(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)))
    >>> sorted(tree.flatten_names(model.params))
    ['0.bias', '0.weight', '2.bias', '2.weight']
    >>> model.apply(model.params, torch.ones(2, 3)).shape
    torch.Size([2, 1])
    """
    if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise PlacementError(
            f"functionalize() got a {type(module).__name__}. Give it the module inside "
            "(module.module); zf.shard does the data parallelism."
        )
    check_module(module)
    anatomy, name = dissect(module, units), type(module).__name__
    bare = skeleton(module)
    _switch_off_checkpointing(bare)
    compiled = compile_of(compile, anatomy)
    fused = _fusible(bare) if fuse else {}
    if fuse and not fused:
        warnings.warn(
            f"functionalize(fuse=True) found nothing in {name} that a kernel "
            "takes over; it runs as it is.",
            stacklevel=2,
        )
    return Functional(
        buffers={name: b.detach() for name, b in module.named_buffers()},
        config=getattr(module, "config", None),
        _name=name,
        _train=train,
        _pool=TemplatePool(bare, anatomy, (*[_fuse] * bool(fused), *filter(None, [compiled]))),
        _parameters=Parameters(name, anatomy, dict(module.named_parameters())),
    )


def _fuse(module: nn.Module) -> None:
    from zfunc.huggingface import fusion  # kernels are imported where they are asked for

    fusion.fuse(module)


def _fusible(module: nn.Module) -> dict[str, int]:
    from zfunc.huggingface import fusion

    return fusion.fusible(module)


def _switch_off_checkpointing(module: nn.Module) -> None:
    """A module's own recomputation would run after its parameters have been taken out."""
    found = [
        part for part in module.modules() if getattr(part, "gradient_checkpointing", None) is True
    ]
    for part in found:
        part.__dict__["gradient_checkpointing"] = False
    if found:
        warnings.warn(
            f"{type(module).__name__} checkpoints itself (gradient_checkpointing), which is now "
            "switched off in the functionalized copy. Wrap the step instead: zf.remat(step).",
            stacklevel=3,
        )
