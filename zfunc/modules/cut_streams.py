"""A stream of which each rank has some positions, outside of the layers that run on them.

To the code of a module it is the whole stream: it has its shape. Layers and submodules that run on
positions take those of their rank. Sums and products with numbers or with the like of it, casts and
dropout are done on positions. Whatever else looks at it gets all of them, put together.

Outside of layers what is whole is alike on all ranks, and so is its gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils._pytree as torch_pytree
from torch import Tensor

from zfunc.errors import PlacementError
from zfunc.modules.lazy import METADATA
from zfunc.operators.conjugates import (
    FORWARD,
    copied,
    cut_positions,
    gathered_positions,
    joined_positions,
    made_once,
    scattered_positions,
    summed,
)
from zfunc.operators.randomness import apart
from zfunc.ranks.comm import Group
from zfunc.trees.inside import inside_function
from zfunc.trees.memory import current

__all__ = [
    "LEAVES",
    "POSITIONS",
    "CutStream",
    "cut_stream",
    "drawing_apart",
    "summand_stream",
    "without_cuts",
]

LEAVES, POSITIONS = "tensor whole leaves", "tensor positions"
DIM = -2  # of positions


class CutStream(Tensor):
    """All positions of a stream ``[..., s, w]`` to those who ask for its shape.

    Attributes:
        ranks: those that have the other positions.
    """

    ranks: Group
    _own: Tensor | None
    _parts: Tensor | None
    _every: Tensor | None
    _label: str
    _versions: tuple[int, int]  # of the last two, when they were looked at

    @property
    def length(self) -> int:
        """How many positions all ranks have."""
        return self.shape[DIM]

    def local(self) -> Tensor:
        """This rank's positions: ``[..., s / T, w]``."""
        self._settle()
        if self._own is None:
            assert self._parts is not None
            self._own = scattered_positions(self._parts, self.ranks, DIM, self._label)
            self._note()
        return self._own

    def whole(self) -> Tensor:
        """All positions, for code that does the same on all ranks."""
        self._settle()
        if self._every is None:
            if self._own is None:
                assert self._parts is not None
                self._every = summed(self._parts, self.ranks, self._label)
            else:
                self._every = joined_positions(self._own, self.ranks, self.length, DIM)
            self._note()
        return self._every

    def _settle(self) -> None:
        """What was written into all positions is in this rank's, and the other way round."""
        own, every = self._versions
        if self._every is not None and self._every._version != every:
            self._own, self._parts = cut_positions(self._every, self.ranks, DIM), None
        elif self._own is not None and self._own._version != own:
            self._every = None
        self._note()

    def _note(self) -> None:
        self._versions = _version(self._own), _version(self._every)

    def gathered(self, label: str = FORWARD) -> Tensor:
        """All positions, for work in parts: gradients of ranks add up."""
        own, ranks, length = self.local(), self.ranks, self.length
        key = ("positions", ranks, length)
        return made_once(own, key, lambda: gathered_positions(own, ranks, length, DIM, label))

    def written(self, own: Tensor) -> CutStream:
        """The same stream, in which something has been written."""
        self._own, self._parts, self._every = own, None, None
        self._note()
        return self

    @property
    def source(self) -> Tensor:
        """Whatever it is made of now."""
        self._settle()
        found = self._own if self._own is not None else self._parts
        assert found is not None
        return found

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in _LIKE_SOURCE:
            return func(args[0].source)
        torch_pytree.tree_map_only(CutStream, _check_place, (args, kwargs))
        rule = _RULES.get(func)
        found = None if rule is None else rule(func, args, kwargs)
        if found is not None:
            return found
        args, kwargs = torch_pytree.tree_map_only(CutStream, CutStream.whole, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise PlacementError(f"{func} met a stream that is cut along positions. " + _REMEDY)


_REMEDY = (
    "A torch.autograd.Function, or torch.utils.checkpoint around a layer, takes it as it is. "
    "Recompute by zf.remat(step), pass it `x.clone()`, or leave out sequence=True."
)


def _check_place(x: CutStream) -> None:
    """Raise ``PlacementError`` where what is done leaves no trace in the graph."""
    if x.source.requires_grad and inside_function():
        raise PlacementError(
            "a stream that is cut along positions was given to a torch.autograd.Function outside "
            "of a layer, so its gradient would be lost. " + _REMEDY
        )


def cut_stream(own: Tensor, ranks: Group, length: int) -> CutStream:
    """The stream of which this rank has these positions."""
    shape = (*own.shape[:DIM], length, *own.shape[DIM + 1 :])
    return _made(own, shape, ranks, own=own)


def summand_stream(parts: Tensor, ranks: Group, label: str) -> CutStream:
    """The stream that is a sum over ranks; it is made when somebody looks at it.

    Args:
        parts: this rank's summand, of all positions.
        ranks: the group.
        label: names the sum in errors and ledgers.
    """
    return _made(parts, parts.shape, ranks, parts=parts, label=label)


def _made(
    like: Tensor,
    shape: Any,
    ranks: Group,
    own: Tensor | None = None,
    parts: Tensor | None = None,
    label: str = "",
) -> CutStream:
    made: CutStream = Tensor._make_wrapper_subclass(
        CutStream, shape, dtype=like.dtype, device=like.device
    )
    made.ranks, made._own, made._parts, made._every, made._label = ranks, own, parts, None, label
    made._note()
    return made


def _version(x: Tensor | None) -> int:
    return -1 if x is None else x._version


def without_cuts(out: Any) -> Any:
    """What a module returns, with plain tensors: all positions of streams that are cut."""
    if isinstance(out, CutStream):
        return out.whole()
    if isinstance(out, tuple | list) and any(isinstance(x, CutStream) for x in out):
        return torch_pytree.tree_map_only(CutStream, CutStream.whole, out)
    if isinstance(out, Mapping):
        for key, x in list(out.items()):
            if (new := without_cuts(x)) is not x:
                out[key] = new  # type: ignore[index]
    return out


def drawing_apart(ranks: Group) -> Any:
    """A block whose random numbers are this rank's own, if the state has a key for them."""
    running = current()
    keyed = running is not None and running.key is not None  # type: ignore[attr-defined]
    return apart(ranks) if keyed and ranks.size > 1 else nullcontext()


# --- what is done on positions -----------------------------------------------------------------

Rule = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


def _beside(x: CutStream, other: Any) -> Any:
    """What of an operand goes with this rank's positions of ``x``; None if it does not fit."""
    if isinstance(other, CutStream):
        return other.local() if other.shape == x.shape else None
    if not isinstance(other, Tensor):
        return other
    try:
        fits = torch.broadcast_shapes(x.shape, other.shape) == x.shape
    except RuntimeError:  # let torch itself say so
        return None
    if not fits:
        return None
    if other.dim() >= -DIM and other.shape[DIM] == x.length:
        return cut_positions(other, x.ranks, DIM, POSITIONS)
    return copied(other, x.ranks, LEAVES)


def _binary(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CutStream | None:
    """Sums and products, elementwise."""
    if len(args) != 2 or kwargs.keys() - {"alpha"}:
        return None
    x = next(x for x in args if isinstance(x, CutStream))
    operands = [_beside(x, other) for other in args]
    if any(other is None for other in operands):
        return None
    return cut_stream(func(*operands, **kwargs), x.ranks, x.length)


def _in_place(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CutStream | None:
    """Into the stream itself; whoever has it sees that."""
    x = args[0]
    if not isinstance(x, CutStream) or func not in _WRITES:
        return None
    made = _binary(_WRITES[func], args, kwargs)
    return None if made is None or made.dtype != x.dtype else x.written(made.local())


def _unary(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CutStream | None:
    """Casts."""
    x, *others = args
    if not isinstance(x, CutStream) or any(isinstance(y, Tensor) for y in others):
        return None
    own = func(x.local(), *others, **kwargs)
    return x if own is x.local() else cut_stream(own, x.ranks, x.length)


def _dropped(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CutStream | None:
    x = args[0] if args else None
    if not isinstance(x, CutStream) or kwargs.get("inplace") or True in args[3:]:
        return None
    with drawing_apart(x.ranks):
        return cut_stream(func(x.local(), *args[1:], **kwargs), x.ranks, x.length)


def _itself(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CutStream | None:
    """Every index of every dimension, or the shape that it has."""
    x, *asked = args
    if not isinstance(x, CutStream) or kwargs:
        return None
    if func is Tensor.__getitem__:
        keys = asked[0] if isinstance(asked[0], tuple) else (asked[0],)
        return x if len(keys) <= x.dim() and all(map(_every, keys)) else None
    shape = asked[0] if len(asked) == 1 and not isinstance(asked[0], int) else asked
    return x if _resolved(shape, x.numel()) == tuple(x.shape) else None


def _every(key: Any) -> bool:
    full = isinstance(key, slice) and key.stop is None and not key.start
    return full and key.step in (None, 1)


def _resolved(shape: Any, numel: int) -> tuple[int, ...] | None:
    if isinstance(shape, torch.dtype) or not all(isinstance(n, int) for n in shape):
        return None
    known = math.prod(n for n in shape if n != -1)
    return tuple(numel // known if n == -1 and known else n for n in shape)


_BINARY = [
    *(torch.add, torch.sub, torch.mul, torch.div),
    *(Tensor.add, Tensor.sub, Tensor.mul, Tensor.div),
    *(Tensor.__add__, Tensor.__radd__, Tensor.__sub__, Tensor.__rsub__),
    *(Tensor.__mul__, Tensor.__rmul__, Tensor.__truediv__),
]
_WRITES = {
    Tensor.__iadd__: torch.add,
    Tensor.__isub__: torch.sub,
    Tensor.__imul__: torch.mul,
    Tensor.__itruediv__: torch.div,
    Tensor.add_: torch.add,
    Tensor.sub_: torch.sub,
    Tensor.mul_: torch.mul,
    Tensor.div_: torch.div,
}
_UNARY = [
    *(Tensor.to, Tensor.type, Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16),
    *(Tensor.contiguous, Tensor.detach),
]
_RULES: dict[Any, Rule] = {
    **dict.fromkeys(_BINARY, _binary),
    **dict.fromkeys(_WRITES, _in_place),
    **dict.fromkeys(_UNARY, _unary),
    **dict.fromkeys((F.dropout, torch.dropout), _dropped),
    **dict.fromkeys((Tensor.__getitem__, Tensor.view, Tensor.reshape), _itself),
}
_LIKE_SOURCE = {Tensor.requires_grad.__get__, Tensor.is_leaf.__get__}  # type: ignore[attr-defined]
