"""Functions of torch of which more than shapes counts, or less.

What depends on no number of a ghost is known, and code outside layers may look at it:
``zeros_like``, a mask that takes a ghost's dtype. What looks at numbers is refused. Masks that are
here decide shapes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import Distribution
from torch.utils.hooks import RemovableHandle

from zfunc.ranks.comm import Group, Handle
from zfunc.ranks.connected import ConnectedGroup
from zfunc.rehearsal.ghosts import (
    RULES,
    RUN,
    Ghost,
    Recipe,
    computed,
    form_of,
    ghost_like,
    in_function,
    refusal,
    settle,
)
from zfunc.rehearsal.shapes import Arguments, outcome
from zfunc.rehearsal.sites import caller

__all__ = ["nothing_sent"]

Rule = Callable[[Any, Any, dict[str, Any]], Any]


def rule(*names: str, of: tuple[Any, ...] = (Tensor, torch, F)) -> Callable[[Rule], Rule]:
    """A decorator: what becomes of functions with these names."""

    def register(found: Rule) -> Rule:
        for name in names:
            for owner in of:
                if (func := getattr(owner, name, None)) is not None:
                    RULES[func] = found
        return found

    return register


def stand_in(x: Tensor) -> Tensor:
    """A real tensor like a ghost, of one element."""
    if type(x) is not Ghost:
        return x
    return torch.zeros((), dtype=x.dtype, device=x.device).expand(x.shape)


# --- looks at numbers ----------------------------------------------------------------------------

_LOOKS = "item tolist numpy __bool__ __int__ __float__ __complex__ __index__ is_nonzero __array__"
_LOOKS += " __contains__ nonzero argwhere unique unique_consecutive equal allclose"


@rule(*_LOOKS.split())
def _looks(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    return _on_numbers(
        func,
        args,
        kwargs,
        "it looks at its numbers. Look at them inside a layer, decide by what the batch holds, "
        "or compute without a branch (torch.where)",
    )


_VALIDATING = {f.__code__ for f in (Distribution.__init__, Distribution._validate_sample)}


@rule("__bool__", of=(Tensor,))
def _true(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Whether the arguments of a ``torch.distributions.Normal``, say, are in range is looked at
    where their numbers are."""
    frame = caller()
    validates = frame is not None and frame.f_code in _VALIDATING
    return True if validates and type(settle(args[0])) is Ghost else _looks(func, args, kwargs)


@rule("_make_dual", "_unpack_dual", of=(torch,))
def _dual(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Forward-mode differentiation without ``torch.func``, which unwraps what it is given."""
    if torch._C._functorch.maybe_current_level() is not None:
        return computed(func, args, kwargs)
    why = "it has no tangent here. Do that inside a layer (torch.autograd.forward_ad)"
    return _on_numbers(func, args, kwargs, why)


def _on_numbers(func: Any, args: Any, kwargs: dict[str, Any], why: str) -> Any:
    run = RUN.get()
    ghosts = [x for x in map(settle, (*args, *kwargs.values())) if type(x) is Ghost]
    if not ghosts:
        return func(*args, **kwargs)
    if run is not None and run.used(func, ghosts, False, False):
        return func(*args, **kwargs)
    raise refusal(func, why)


_MEMORY = "data_ptr untyped_storage storage share_memory_ __reduce_ex__ __deepcopy__ __dlpack__"
_MEMORY += " backward set_ resize_ pin_memory to_sparse"


@rule(*_MEMORY.split(), of=(Tensor,))
def _memory(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    why = "it has no memory here. Do that inside a layer, or behind the step"
    return _on_numbers(func, args, kwargs, why)


RULES[Tensor.data.__set__] = _memory  # type: ignore[attr-defined]
for _name in ("_local_scalar_dense", "nonzero", "equal", "item", "is_nonzero"):
    RULES[getattr(torch.ops.aten, _name)] = _looks


# --- depends on no number ------------------------------------------------------------------------


@rule("zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full", "new_tensor")
def _of_nothing(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Outside layers and functions, where it may go anywhere, whoever needs it makes it."""
    run, x = RUN.get(), args[0]
    several = any(type(y) is Ghost for y in (*args[1:], *kwargs.values()))
    if several or run is None or run.within >= 0 or in_function():
        return computed(func, args, kwargs)
    given = Arguments(func, args, kwargs, form_of)
    found: Any = outcome(func, args, kwargs, given, form_of)
    recipe = Recipe(func, (stand_in(x), *args[1:]), kwargs, ())
    device = given.device or x.device
    return ghost_like(found.result.shape, device, run.chunk, False, frozenset(), recipe)


@rule("expand_as", "view_as", "reshape_as", "type_as", "is_same_size", of=(Tensor,))
def _like_other(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if type(args[0]) is Ghost:
        return computed(func, args, kwargs)
    return func(args[0], *map(stand_in, args[1:]), **kwargs)


@rule("to", of=(Tensor,))
def _to(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    x, *rest = args
    named = {k: kwargs[k] for k in kwargs if k != "device"}
    if type(x) is not Ghost:
        return func(x, *map(_device_or_stand_in, rest), **kwargs)
    every: list[Any] = [*rest, *kwargs.values()]
    other = next((a for a in every if isinstance(a, Tensor)), None)
    if other is not None:
        return _to(func, (x, other.device, other.dtype), {})
    device = next((a for a in every if isinstance(a, str | torch.device)), None)
    plain = [a for a in rest if not isinstance(a, str | torch.device)]
    if device is None or _concrete(device) == x.device:
        return computed(func, (x, *plain), named) if plain or named else x
    return computed(func, (x, _concrete(device), *plain), named | {"copy": True})


def _device_or_stand_in(x: Any) -> Any:
    return stand_in(x) if isinstance(x, Tensor) else x


def _concrete(device: str | torch.device) -> torch.device:
    found = torch.device(device)
    index: int | None = found.index
    if found.type == "cuda" and index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return found


@rule("cpu", "cuda", of=(Tensor,))
def _moved(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    device = (
        "cpu" if func is Tensor.cpu else (*args[1:2], kwargs.get("device"), "cuda")[0] or "cuda"
    )
    return args[0].to(device)


@rule("as_subclass", of=(Tensor,))
def _of_a_class(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Only a real one can be of another class, which may do anything."""
    run, x = RUN.get(), args[0]
    if (*args[1:], *kwargs.values())[0] is Tensor:
        return x.view_as(x)
    if run is not None and run.used(func, [x], False, False):
        return func(*args, **kwargs)
    raise refusal(func, "it becomes one of a class of its own. Do that inside a layer")


@rule("__iter__", of=(Tensor,))
def _iterated(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    return iter(args[0].unbind(0))


# --- gradients -----------------------------------------------------------------------------------


@rule("requires_grad_", of=(Tensor,))
def _require(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    x = args[0]
    x.tracked = bool((*args[1:], *kwargs.values(), True)[0])
    return x


def _set_required(func: Any, args: Any, kwargs: dict[str, Any]) -> None:
    args[0].tracked = bool(args[1])


RULES[Tensor.requires_grad.__get__] = lambda func, args, kwargs: args[0].needs  # type: ignore[attr-defined]
RULES[Tensor.requires_grad.__set__] = _set_required  # type: ignore[attr-defined]
RULES[Tensor._version.__get__] = lambda func, args, kwargs: args[0].memory.version  # type: ignore[attr-defined]
RULES[Tensor.grad.__get__] = lambda func, args, kwargs: None  # type: ignore[union-attr]


class _NoHook:
    """The handle of a hook on a value whose gradient is elsewhere."""

    def remove(self) -> None:
        pass


class _NoNode:
    """In the place of a node of autograd: ``nn.Module`` asks for one to hang its hooks on."""

    next_functions = ()

    def __init__(self, func: Any) -> None:
        self.func = func

    def name(self) -> str:
        return "BackwardHookFunctionBackward"

    def register_hook(self, hook: Callable[..., Any]) -> _NoHook:
        """Inside a layer whoever computes it has the hook."""
        run = RUN.get()
        if run is None or run.within < 0:
            raise refusal(
                self.func,
                "a hook (register_full_backward_hook, say) is called in backward, and outside of "
                "the layers no stage has all of that. Hang it on a module that a layer calls",
            )
        return _NoHook()

    register_prehook = register_hook


def _node(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    return _NoNode(func) if args[0].needs else None


RULES[Tensor.grad_fn.__get__] = _node  # type: ignore[union-attr]


@rule("register_hook", of=(Tensor,))
def _hook(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Who computes the value has the hook: also who makes it here of parameters, later on."""
    x, hook = args if len(args) > 1 else (*args, kwargs["hook"])
    if (run := RUN.get()) is not None and run.within < 0:
        run.hooked(x)
    hooks = x.__dict__.setdefault("hooks", OrderedDict())
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


@rule("register_post_accumulate_grad_hook", "retain_grad", of=(Tensor,))
def _no_hook(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    return _NoHook()


@rule("grad", of=(torch.autograd,))
def _nested(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    run = RUN.get()
    if run is None or run.within < 0:
        raise refusal(func, "no stage has the whole way of its gradient. Do that inside a layer")
    inputs = args[1] if len(args) > 1 else kwargs["inputs"]
    inputs = (inputs,) if isinstance(inputs, Tensor) else inputs
    found = map(torch.empty_like, inputs)
    within = torch._C._functorch.maybe_current_level() is not None  # torch.func asks for it itself
    return tuple(found) if within else tuple(x.requires_grad_() for x in found)


# --- masks that are here decide shapes -----------------------------------------------------------


@rule("__getitem__", "__setitem__", of=(Tensor,))
def _indexed(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    x, index, *value = args
    return computed(func, (x, _with_numbers(index), *value), kwargs)


@rule("index", "index_put", "index_put_", of=(torch.ops.aten,))
def _index_below(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    x, index, *value = args
    return computed(func, (x, _with_numbers(list(index)), *value), kwargs, below=True)


@rule("index_put", "index_put_", of=(Tensor, torch))
def _index_put(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    x, index, *value = args
    return computed(func, (x, _with_numbers(tuple(index)), *value), kwargs)


def _with_numbers(index: Any) -> Any:
    """An index with the places that masks choose, in the place of masks."""
    if isinstance(index, tuple | list):
        if not any(isinstance(x, Tensor | tuple | list) for x in index):
            return index
        parts = [part for x in index for part in _places(x)]
        return type(index)(parts)
    found = _places(index)
    return found[0] if len(found) == 1 else tuple(found)


def _places(x: Any) -> list[Any]:
    if not isinstance(x, Tensor) or type(settle(x)) is Ghost:
        return [x]
    if x.dtype in (torch.bool, torch.uint8):
        return list(x.nonzero(as_tuple=True)) if x.dim() else [bool(x)]
    return [int(x)] if x.dim() == 0 else [x]


@rule("masked_select")
def _selected(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    x, mask = list(args) + list(kwargs.values())
    if type(settle(mask)) is Ghost:
        return _looks(func, args, kwargs)
    shape = torch.broadcast_shapes(x.shape, mask.shape)
    return x.expand(shape)[mask.expand(shape)]


@rule("repeat_interleave")
def _repeated(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    x, repeats = args[0], args[1] if len(args) > 1 else kwargs["repeats"]
    if (
        isinstance(repeats, Tensor)
        and type(settle(repeats)) is not Ghost
        and "output_size" not in kwargs
    ):
        dim = args[2] if len(args) > 2 else kwargs.get("dim")
        many = x.numel() if dim is None else x.shape[dim]
        total = int(repeats.sum()) * (many if repeats.numel() == 1 else 1)
        kwargs = {**kwargs, "output_size": total}
    return computed(func, args, kwargs)


# --- statistics that no version counts -----------------------------------------------------------


@rule("batch_norm", "instance_norm", of=(F,))
def _with_statistics(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    x, mean, variance = (*args, None, None)[:3]
    mean, variance = kwargs.get("running_mean", mean), kwargs.get("running_var", variance)
    flag = "training" if func is F.batch_norm else "use_input_stats"
    trains = (*args[5:6], kwargs.get(flag, func is F.instance_norm))[0]
    out = computed(func, args, kwargs)
    for kept in (mean, variance):
        if trains and kept is not None:
            kept.mul_(torch.empty_like(x[0, 0].flatten()[0]))  # now it is not known here
    return out


# --- collectives ---------------------------------------------------------------------------------


def nothing_sent(
    group: Group,
    kind: str,
    label: str,
    what: tuple[Any, ...],
    data: Tensor,
    args: tuple[Any, ...],
    then: Callable[[Any], Any] | None = None,
) -> Handle[Any]:
    """A collective of which only the shapes of results count: nobody is told of it."""
    result = _SHAPED[kind](group, *args)
    return Handle(result if then is None else then(result))


def _own_segment(group: Group, full: Tensor, cuts: Any, out: Tensor | None) -> Tensor:
    own = full[cuts[group.rank] : cuts[group.rank + 1]]
    return own.clone() if out is None else out.copy_(own)


def _exchanged(group: Group, chunks: list[Tensor], sizes: list[int]) -> list[Tensor]:
    return [chunks[group.rank].sum().expand(size).clone() for size in sizes]


_SHAPED: dict[str, Callable[..., Any]] = {
    "all_gather": lambda group, full, cuts: full,
    "reduce_scatter": _own_segment,
    "all_reduce": lambda group, flat: flat,
    "all_to_all": _exchanged,
    "broadcast": lambda group, flat, src: flat,
}
RULES[ConnectedGroup._issue] = lambda func, args, kwargs: nothing_sent(*args, **kwargs)
