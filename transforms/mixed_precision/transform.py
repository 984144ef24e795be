"""``precision``: compute in 16 bits, keep and update the parameters in full precision.

Law: ``unplace(precision(f)(place(s), b))`` is what the plain mixed-precision loop makes
of ``s``: parameters cast to ``compute``, the loss and its gradients taken there, the
optimizer run on the state's own parameters and the gradients in their dtype. On one
rank bitwise, so the bounds are those of 16-bit arithmetic and nothing else.
``unplace(place(s)) == s``, bitwise.

The state's parameters are the *masters*. ``place`` moves them beside the optimizer state and puts
16-bit copies in their entry. Inside the step it is the other way round. The optimizer, ``zf.tree``
and averages see the masters; only what enters a loss is 16-bit. Under ``shard`` the masters are
sharded like the moments, from stage 1 on. The copies are sharded like the parameters, at stage 3,
and are gathered in 16 bits.

Gradients are summed over ranks and microbatches in ``reduce``. If one of them is not finite on any
rank, all ranks leave the step out. Then every entry of the state stays what it was, except ``step``
and ``key``: these count data and randomness, not updates. The optimizer's own count stays, and with
it its schedule.

A GPU runs behind the host, which would have to wait to learn of an overflow. With a dynamic loss
scale it waits, once a step. Otherwise nobody reads the flag. The GPU itself keeps the old state,
while counts on the host go on. If the step donates the old state, it cannot be kept: then the
gradients count as zeros.

Source: Micikevicius et al., Mixed Precision Training, 2018,
https://arxiv.org/abs/1710.03740.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import optree
import torch
from torch import Tensor

from zfunc.engine import carried, context
from zfunc.engine.communication import communication, uncut
from zfunc.engine.context import Context
from zfunc.engine.entries import ROLES, Entries, Roles
from zfunc.engine.hooks import Gradients, LayerInfo, Order, Pending
from zfunc.engine.placement import layout_for
from zfunc.engine.primitives import Mean
from zfunc.engine.products import SHORT, products
from zfunc.engine.step import Differentiate, Transform, transform_of
from zfunc.engine.unit_info import Ready, UnitInfo
from zfunc.errors import PlacementError
from zfunc.layout.cutting import make_layout, settle_origin
from zfunc.layout.low_bits import refuse_low_bits
from zfunc.layout.pool import pool
from zfunc.layout.readable import Readable
from zfunc.layout.replicated import Replicated
from zfunc.optim.loss_scaling import DynamicScale, next_scale
from zfunc.transforms.mixed_precision.masters import Mastered, Masters, recast, returned
from zfunc.trees import tree
from zfunc.trees.nodes import NAMESPACE, OPAQUE

__all__ = ["Precision", "precision"]

NAME = "precision"
KEPT = ("step", "key")  # entries that go on in a step that is left out


@dataclass(frozen=True)
class Precision(Transform):
    """See :func:`precision`."""

    compute: torch.dtype = torch.bfloat16
    reduce_dtype: torch.dtype = torch.float32
    loss_scale: DynamicScale | float | None = None
    roles: Roles = ROLES

    position: ClassVar[int] = Order.PRECISION
    before_gather: ClassVar[bool] = True
    name: ClassVar[str] = NAME

    def __repr__(self) -> str:
        compute, reduce = self._dtypes
        scale = "" if self.loss_scale is None else f", loss_scale={self.loss_scale}"
        return f"precision(compute={compute}, reduce={reduce}{scale})"

    @property
    def _dtypes(self) -> list[str]:
        return [str(x).removeprefix("torch.") for x in (self.compute, self.reduce_dtype)]

    def obstacle(self) -> str | None:
        if isinstance(self.loss_scale, DynamicScale):
            return (
                "asks on the host whether a gradient has overflowed; bfloat16 needs no loss scale"
            )
        return None

    def __post_init__(self) -> None:
        for what, dtype in (("compute", self.compute), ("reduce", self.reduce_dtype)):
            if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise ValueError(
                    f"precision({what}={dtype!r}): expected a floating-point torch.dtype, such as "
                    "torch.bfloat16"
                )
        if isinstance(self.loss_scale, float) and not 0 < self.loss_scale < float("inf"):
            raise ValueError(
                f"precision(loss_scale={self.loss_scale!r}): expected a positive number, "
                '"dynamic", an optim.DynamicScale or None'
            )

    # How the state is represented

    def place(self, state: Any) -> Any:
        entries = Entries(state)
        names, home = self._named(entries, "params"), self._home(entries)
        masters = {name: entries[name] for name in names}
        refuse_low_bits(
            masters,
            "precision",
            "Leave precision out: products with low bits round their inputs themselves. The rest "
            "of the module can be bfloat16 before it is functionalized.",
        )
        found = [x for x in tree.leaves(masters) if isinstance(x, Tensor)]
        if found and all(x.dtype in SHORT for x in found):
            raise PlacementError(
                f"every parameter is {found[0].dtype} or alike already: precision takes the "
                "state's own parameters for the masters that the optimizer updates. Build the "
                "state from float32 ones: zf.tree.map(lambda p: p.float(), params)."
            )
        for name in names:
            entries[name] = tree.map(self._cast_once, entries[name])
        entries[home] = Mastered(entries[home], masters)
        state = entries.rebuild()
        if isinstance(self.loss_scale, DynamicScale):
            state = carried.put(state, NAME, self.loss_scale.init())
        return state

    @property
    def _fixed_scale(self) -> float:
        return self.loss_scale if isinstance(self.loss_scale, float) else 1.0

    def _cast_once(self, leaf: Any) -> Any:
        if not (isinstance(leaf, Tensor) and leaf.is_floating_point()):
            return leaf
        return settle_origin(leaf.to(self.compute, copy=True), leaf.dtype)

    def unplace(self, state: Any) -> Any:
        return self._opened(state)[1]

    def parts(self, placed: Any) -> list[Any]:
        entries = Entries(placed)
        names = self._named(entries, "params")
        for name in entries.names:
            if name not in names:
                entries[name] = None
        return [self._opened(placed)[1], entries.rebuild()]

    def check(self, state: Any) -> None:
        entries = Entries(state)
        if not isinstance(entries[self._home(entries)], Mastered):
            raise PlacementError(
                f"the state's {self._home(entries)!r} has no master parameters beside it: this "
                f"state is not one that {self!r} has placed. Call state = step.place(full_state) "
                "first; a state of another step becomes full by that step's `unplace`."
            )
        for name in self._named(entries, "params"):
            if (dtype := _dtype_of(entries[name])) not in (None, self.compute):
                raise PlacementError(
                    f"state entry {name!r} is {dtype}, so another precision than {self!r} has "
                    f"placed it, which computes in {self.compute}. `unplace` it with the step that "
                    "placed it, and `place` the result here."
                )
        dynamic, scaled = isinstance(self.loss_scale, DynamicScale), NAME in carried.held(entries)
        if dynamic != scaled:
            raise PlacementError(
                f"the state carries {'a' if scaled else 'no'} dynamic loss scale, so another "
                f"precision than {self!r} has placed it. `unplace` it with the step that placed "
                "it, and `place` the result here."
            )

    def _named(self, entries: Entries, role: str) -> list[str]:
        return self.roles.found(role, entries, self.name)

    def _home(self, entries: Entries) -> str:
        """The entry that holds the masters."""
        return self._named(entries, "opt_state")[0]

    def _opened(self, state: Any) -> tuple[Any, Any]:
        """The carried scale, and the state with the masters as its parameters."""
        self.check(state)
        scale, state = carried.take(state, NAME)
        entries = Entries(state)
        home = self._home(entries)
        mastered = entries[home]
        entries[home] = mastered.inner
        for name, master in mastered.masters.items():
            entries[name] = master
        return scale, entries.rebuild()

    # One call

    def configure(self, running: Context, state: Any) -> None:
        running.compute = self.compute
        over = communication(running)
        if over.layout_for is uncut:
            memo = running.memo.setdefault("layouts", {})
            over.layout_for = lambda params: (layout_for(params, 1, memo, make_layout), False)

    def open(self, state: Any) -> Any:
        running = context.current()
        assert running is not None
        scale, opened = self._opened(state)
        low, high = Entries(state), Entries(opened)
        running.notes[NAME] = Masters(
            state=opened,
            masters={name: high[name] for name in self._named(high, "params")},
            lows={name: low[name] for name in self._named(low, "params")},
            scale=scale.scale if scale is not None else torch.tensor(self._fixed_scale),
            carried=scale,
        )
        return opened

    def enter(self, value: Pending, unit: UnitInfo) -> Pending:
        """What is stored in full precision is cast before it is gathered."""
        return Ready([_cast(x, self.compute) for x in value.wait()])

    def leave(self, value: Pending, unit: UnitInfo) -> Pending:
        """Gradients are summed in ``reduce``."""

        def wide(x: Tensor) -> Tensor:
            if x.dtype == self.reduce_dtype:
                return x
            return pool().take(x.numel(), self.reduce_dtype, x.device).copy_(x)

        return Ready([wide(x) for x in value.wait()])

    def layer(self, call: Callable[..., Any], info: LayerInfo) -> Callable[..., Any]:
        """A layer's floating-point inputs are ``compute``; 0-d ones decide no dtype."""

        def run(*xs: Any, **kw: Any) -> Any:
            given: Any = (xs, kw)
            if any(map(wide, optree.tree_leaves(given, namespace=NAMESPACE))):
                given = optree.tree_map(
                    lambda x: x.to(self.compute) if wide(x) else x,
                    given,
                    none_is_leaf=True,
                    namespace=NAMESPACE,
                )
            with products(self.compute):
                return call(*given[0], **given[1])

        def wide(x: Any) -> bool:
            return (
                isinstance(x, Tensor)
                and x.ndim > 0
                and x.is_floating_point()
                and x.dtype != self.compute
            )

        return run

    def differentiate(self, call: Differentiate, running: Context) -> Differentiate:
        """16-bit parameters in, gradients of the masters out, unscaled and looked at."""

        def run(asked: Gradients) -> tuple[tuple[Tensor, Any], Any]:
            notes: Masters = running.notes[NAME]
            seed = None if notes.factor == 1 else notes.scale
            low = replace(
                asked,
                loss_fn=self._computing(asked.loss_fn, asked.has_aux),
                params=notes.lowered(asked.params),
                seed=seed,
            )
            out, scaled = call(low)
            grads = notes.raised(scaled, asked.params)
            own = self.compute != self.reduce_dtype  # then `leave` has copied them
            return out, notes.look(grads, running, scaled, own)

        return run

    def evaluate(self, call: Callable[..., Any], running: Context) -> Callable[..., Any]:
        def run(fn: Callable[..., Any], params: Any, args: Any, kwargs: Any) -> Any:
            lowered = running.notes[NAME].lowered(params)
            with products(self.compute):
                return call(fn, lowered, args, kwargs)

        return run

    def _computing(self, loss_fn: Callable[..., Any], has_aux: bool) -> Callable[..., Any]:
        @functools.wraps(loss_fn)
        def run(*args: Any, **kwargs: Any) -> Any:
            with products(self.compute):
                out = loss_fn(*args, **kwargs)
                if not has_aux:
                    return _widened(out)
                if isinstance(out, tuple) and len(out) == 2:
                    return _widened(out[0]), out[1]
                return out

        return run

    def finish(self, old: Any, out: Any) -> Any:
        running = context.current()
        assert running is not None
        notes: Masters = running.notes[NAME]
        if isinstance(out, tuple) and out and type(out[0]) is type(old):
            metrics = [
                {**x, **notes.metrics()} if i == 0 and type(x) is dict else x
                for i, x in enumerate(out[1:])
            ]
            return (self._closed(out[0], notes), *metrics)
        return self._closed(out, notes) if type(out) is type(old) else out

    def _closed(self, new: Any, notes: Masters) -> Any:
        """A state that the function returned, in this transform's representation."""
        running = context.current()
        assert running is not None
        entries = Entries(new)
        if any(name not in entries for name in notes.masters):
            return new  # a dict that is no state: metrics alone, say
        home, masters = self._home(entries), {}
        notes.settle()
        if notes.overflow:
            notes.revert(entries, KEPT)
        elif notes.unseen is not None and running.donation is None:
            notes.hold(entries, KEPT, ours=(home, *notes.masters))
        for name, old in notes.masters.items():
            masters[name] = returned(old, entries[name])
            entries[name] = recast(notes.lows[name], old, masters[name])
        entries[home] = Mastered(entries[home], masters)
        state = entries.rebuild()
        scale = notes.carried
        if scale is not None and isinstance(self.loss_scale, DynamicScale):
            if notes.overflow is not None:
                scale = next_scale(scale, notes.overflow, self.loss_scale, notes.leaf)
            state = carried.put(state, NAME, scale)
        return state

    # What it says of itself

    def expect(self, state: Any, memo: dict[Any, Any]) -> None:
        memo["reduce dtype"] = self.reduce_dtype

    def describe(self, memo: Mapping[Any, Any]) -> list[str]:
        compute, reduce = self._dtypes
        rules = self.loss_scale
        scale = f"{rules:g}" if isinstance(rules, float) else str(rules or "none")
        return [
            f"precision: layers compute in {compute}, gradients are summed in {reduce}, masters "
            f"lie beside the optimizer state; loss scale: {scale}"
        ]


def _dtype_of(params: Any) -> torch.dtype | None:
    """In which the first parameter is stored, as are all."""
    first = next(iter(optree.tree_iter(params, namespace=OPAQUE)), None)
    if isinstance(first, Replicated):
        return next((x.dtype for x in first.held()), None)
    if isinstance(first, Readable):
        return next((flat.dtype for flat in first.layout.flats), None)
    return first.dtype if isinstance(first, Tensor) else None


def _cast(x: Any, dtype: torch.dtype) -> Any:
    return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x


def _widened(loss: Any) -> Any:
    """A 16-bit loss as an fp32 one."""
    if isinstance(loss, Mean):
        return Mean(_widened(loss.total), loss.count)
    return loss.float() if isinstance(loss, Tensor) and loss.dtype in SHORT else loss


@transform_of
def precision(
    compute: torch.dtype = torch.bfloat16,
    reduce: torch.dtype = torch.float32,
    loss_scale: DynamicScale | float | str | None = None,
    roles: Mapping[str, str] | None = None,
) -> Precision:
    """Compute in 16 bits; parameters are updated in the precision that the state has.

    Call it as ``precision(step, compute=torch.float16, loss_scale="dynamic")`` or as the
    decorator ``@precision(...)``.

    Args:
        compute: dtype of the parameters, of floating-point inputs of layers and of the
            model's persistent floating-point buffers, statistics of norms excepted.
        reduce: dtype in which gradients are summed over ranks and microbatches.
        loss_scale: what the loss is multiplied by on the way back: nothing, a number,
            ``"dynamic"``, or an ``optim.DynamicScale`` with rules of your own.
        roles: which entries of the state are ``"params"`` and ``"opt_state"``, beside
            those of that name.

    Returns:
        A :class:`~zfunc.Step`. Where the step returns metrics, a dict, ``loss_scale``
        (0-d fp32) and ``overflow`` (0-d bool) are among them, and in a step that was left
        out ``overflow_leaf``, the path of the first gradient that is not finite (on a GPU only
        with a dynamic scale: it takes one more wait).

    Raises:
        ValueError: a dtype that is not floating-point, a scale that is not positive.
        CompositionError: the step has a precision already.
    """
    scale: Any = DynamicScale() if loss_scale == "dynamic" else loss_scale
    if isinstance(scale, str):
        raise ValueError(f'precision(loss_scale={scale!r}): expected "dynamic", a number or None')
    if isinstance(scale, int | float):
        scale = float(scale)
    return Precision(compute, reduce, scale, Roles.of(roles))
