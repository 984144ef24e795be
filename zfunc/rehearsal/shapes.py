"""What a function of torch gives, from shapes alone; found out once for each signature.

The function runs on ``meta``, where that takes up to a millisecond, and what it returned is kept:
from then on it costs a look into a table. Nothing decides but shapes, strides, dtypes and arguments
that are no tensors, so all threads share what has been found.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from zfunc.rehearsal.work import Counting

__all__ = ["Arguments", "Fresh", "Given", "Outcome", "Shape", "outcome", "remade", "shape_of"]

META = torch.device("meta")
MANY = 1 << 14  # what is kept is forgotten when there is so much of it


class Shape:
    """A shape, strides and a dtype. Equal ones are one object."""

    __slots__ = ("dtype", "shape", "stride")

    def __init__(self, shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype) -> None:
        self.shape, self.stride, self.dtype = shape, stride, dtype

    def meta(self) -> Tensor:
        """A tensor like that, without memory."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=META)


_shapes: dict[Any, Shape] = {}


def shape_of(x: Tensor) -> Shape:
    """That of a plain tensor; of a sparse one that has no strides, that of the dense one."""
    try:
        stride = x.stride()
    except RuntimeError:
        stride = torch.empty(x.shape, device=META).stride()
    key = (x.shape, stride, x.dtype)
    return _shapes.get(key) or shape_with(*key)


def shape_with(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Shape:
    """The one object of this shape, these strides, and this dtype."""
    key = (shape, stride, dtype)
    found = _shapes.get(key)
    if found is None:
        found = Shape(torch.Size(shape), tuple(stride), dtype)
        found = _shapes.setdefault((found.shape, found.stride, dtype), found)
    return found


@dataclass(frozen=True)
class Given:
    """A result that is the tensor among the arguments at ``index``."""

    index: int


@dataclass(frozen=True)
class Fresh:
    """A new tensor; ``memory`` is the index of the argument of which it is a view, or -1."""

    shape: Shape
    memory: int


@dataclass(frozen=True)
class Outcome:
    """What a function gives: its result with ``Given`` and ``Fresh`` in the place of tensors.

    Attributes:
        writes: indices of the tensors among the arguments that it writes to.
        flops: how many operations it takes.
        draws: whether it draws random numbers.
        uneven: whether numbers decide how many.
    """

    result: Any
    writes: tuple[int, ...]
    flops: int
    draws: bool
    uneven: bool


def remade(tree: Any, make: Callable[[Any], Any]) -> Any:
    """A result of something else in the place of its tensors."""
    if isinstance(tree, Given | Fresh | Tensor):
        return make(tree)
    if isinstance(tree, tuple | list):
        return _like(tree, [remade(x, make) for x in tree])
    return {k: remade(x, make) for k, x in tree.items()} if isinstance(tree, dict) else tree


def _like(tree: Any, items: list[Any]) -> Any:
    """A list or tuple of the same kind: structs that torch returns and named tuples too."""
    if hasattr(tree, "_fields"):
        return type(tree)(*items)
    return type(tree)(items)


class Arguments:
    """The tensors among arguments, and a key of everything that decides shapes.

    Attributes:
        tensors: in the order in which they are found.
        key: None if something is among the arguments that cannot be compared.
        device: one that is named among them.
    """

    __slots__ = ("device", "key", "known", "tensors")

    def __init__(
        self, func: Any, args: Any, kwargs: dict[str, Any], shape: Callable[[Tensor], Shape]
    ) -> None:
        self.tensors: list[Tensor] = []
        self.device: torch.device | None = None
        self.known = True
        key: list[Any] = [func, torch.get_default_dtype()]
        for x in args:
            self._see(x, key, shape)
        for name, x in kwargs.items():
            key.append(name)
            if type(x) in COMPARED and name != "device":  # most are
                key += type(x), x
            elif name == "device" and x is not None:
                self.device = torch.device(x)
            else:
                self._see(x, key, shape)
        self.key = tuple(key) if self.known else None

    def _see(self, x: Any, key: list[Any], shape: Callable[[Tensor], Shape]) -> None:
        kind = type(x)
        if kind in COMPARED:  # most are
            key += kind, x
        elif isinstance(x, Tensor):
            self.tensors.append(x)
            key.append(shape(x))
        elif kind is tuple or kind is list or kind is torch.Size:
            key.append((kind, len(x)))
            for item in x:
                self._see(item, key, shape)
        elif kind is slice:
            key.append(slice)
            for item in (x.start, x.stop, x.step):
                self._see(item, key, shape)
        elif kind is torch.device:
            self.device = x
        elif kind is dict:
            key.append((dict, len(x)))
            for name, item in x.items():
                key.append(name)
                self._see(item, key, shape)
        else:
            self.known = False


COMPARED = frozenset(
    {int, float, complex, bool, str, type(None), type(...)}
    | {torch.dtype, torch.layout, torch.memory_format}
)

_found: dict[Any, Outcome] = {}


def outcome(
    func: Any, args: Any, kwargs: dict[str, Any], given: Arguments, shape: Callable[[Tensor], Shape]
) -> Outcome:
    """What ``func`` gives for these arguments.

    Raises:
        Exception: whatever ``func`` raises on ``meta``.
    """
    key = given.key
    known = None if key is None else _found.get(key)
    if known is not None:
        return known
    with temporarily_clear_interpreter_stack():  # on no level of torch.func, which would wrap it
        found = _learnt(func, args, kwargs, shape)
    if key is None:
        return found
    if len(_found) > MANY:
        _found.clear()
    _found[key] = found
    return found


def _learnt(
    func: Any, args: Any, kwargs: dict[str, Any], shape: Callable[[Tensor], Shape]
) -> Outcome:
    metas: list[Tensor] = []
    shapes: list[Shape] = []

    def on_meta(x: Any) -> Any:
        if isinstance(x, Tensor):
            shapes.append(shape(x))
            metas.append(shapes[-1].meta())
            return metas[-1]
        kind = type(x)
        if kind is tuple or kind is list:
            return kind(map(on_meta, x))
        if kind is slice:
            return slice(on_meta(x.start), on_meta(x.stop), on_meta(x.step))
        if kind is dict:
            return {name: on_meta(item) for name, item in x.items()}
        return META if kind is torch.device else x

    new_args = [on_meta(x) for x in args]
    new_kwargs = {
        k: META if k == "device" and x is not None else on_meta(x) for k, x in kwargs.items()
    }
    with DisableTorchFunctionSubclass(), torch.no_grad(), Counting() as counting:
        out = func(*new_args, **new_kwargs)
    if any(shape_of(x) is not was for x, was in zip(metas, shapes, strict=True)):
        raise NotImplementedError("it changes a tensor's shape in place")
    index = {id(x): i for i, x in enumerate(metas)}
    memory = {x.untyped_storage()._cdata: i for i, x in enumerate(metas)}

    def seen(x: Tensor) -> Given | Fresh:
        if id(x) in index:
            return Given(index[id(x)])
        held = memory.get(x.untyped_storage()._cdata, -1)
        return Fresh(shape_of(_in_order(func, x, metas)), held)

    writes = tuple(i for i, x in enumerate(metas) if x._version)
    return Outcome(remade(out, seen), writes, counting.flops, counting.draws, counting.uneven)


CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def _in_order(func: Any, x: Tensor, given: list[Tensor]) -> Tensor:
    """A result in the order of memory that it has elsewhere: on ``meta`` a convolution of images
    whose channels come last gives others."""
    order = CHANNELS_LAST.get(x.dim())
    if order is None or "conv" not in getattr(func, "__name__", ""):
        return x
    last = (
        y.dim() == x.dim() and y.is_contiguous(memory_format=order) and not y.is_contiguous()
        for y in given
    )
    return x.contiguous(memory_format=order) if any(last) else x
