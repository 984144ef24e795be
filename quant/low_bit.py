"""``LowBit``: what a weight in few bits holds, and how it is read.

:class:`~zfunc.quant.qtensor.QTensor` is such a weight that stands wherever a tensor can stand.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from zfunc import kernels
from zfunc.errors import PlacementError
from zfunc.layout.splits import Encoded, Runs
from zfunc.quant import grids, packing, parts
from zfunc.quant.grids import Format, Grid

__all__ = ["Code", "LowBit", "matrix_shape"]

R = TypeVar("R")  # codes as some kernel reads them


class LowBit(Encoded, Tensor):
    """A low-bit weight.

    Raises:
        PlacementError: codes, scales and zero points do not form such a tensor. (Products read
            them by address.)

    Attributes:
        scale: ``[n, groups]``: fp32, or bf16 beside 4-bit codes.
        zero: ``[n, groups]`` int8, or None if the grid is symmetric.
        format: bits, group size and the rest.
        transposed: whether the tensor is ``[k, n]``, ``k`` being summed over, instead of
            ``[..., k]`` (whose leading dimensions together are ``n``).

    """

    _store: _Store
    scale: Tensor
    zero: Tensor | None
    format: Format
    transposed: bool
    rows: tuple[int, int]  # (n, k), the matrix that the codes form
    depth: int  # the number of its dimensions; like `rows` read without a detour through torch

    @staticmethod
    def __new__(
        cls,
        data: Tensor | _Store,
        scale: Tensor,
        zero: Tensor | None,
        format: Format,
        shape: torch.Size | tuple[int, ...],
        dtype: torch.dtype,
        transposed: bool = False,
    ) -> Self:
        if not isinstance(data, _Store):  # that of another view, which has been checked
            _check(data, scale, zero, format, shape, transposed)
            data = _Store(data)
        self: Self = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=scale.device)
        self._store = data
        self.scale, self.zero, self.format, self.transposed = scale, zero, format, transposed
        self.rows = (shape[1], shape[0]) if transposed else (scale.shape[0], shape[-1])
        self.depth = len(shape)
        return self

    # What it holds

    @property
    def grid(self) -> Grid:
        return Grid(self.scale, self.zero)

    @property
    def data_codes(self) -> Tensor:
        """What is stored: ``[n, k]`` int8, or ``[n, ceil(k / 2)]`` uint8 with two in a byte."""
        data = self._store.data  # once: another thread may put the codes in order meanwhile
        if data is None:
            codes: Tensor = self._store.ready.codes()
            return packing.pack(codes) if self.format.packed else codes
        return data

    @property
    def codes(self) -> Tensor:
        """The codes, ``[n, k]`` int8."""
        data = self._store.data
        if data is None:
            return self._store.ready.codes()
        return packing.unpack(data, self.rows[1]) if self.format.packed else data

    def looked_up(self, where: Tensor) -> Tensor:
        """The codes of some rows ``[rows, k]`` int8, for ``where`` ``[rows]``, from 0 on."""
        data = self._store.data
        if data is None:
            ready = self._store.ready
            some = getattr(ready, "looked_up", None)
            return ready.codes()[where] if some is None else some(where)
        return packing.unpack(data[where], self.rows[1]) if self.format.packed else data[where]

    def ready(self, kind: type[R], make: Callable[[], R]) -> R:
        """The codes in the order that a kernel reads them in, which replaces the one they had."""
        store = self._store
        found = store.ready
        if type(found) is not kind:
            store.ready = found = make()
            store.data = None
        return found  # and not what another thread has put there since

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Bytes that it takes: codes, scales and zero points."""
        n, k = self.rows
        codes = n * (-(-k // 2) if self.format.packed else k)
        return codes + self.scale.nbytes + (0 if self.zero is None else self.zero.nbytes)

    @property
    def static(self) -> Self:
        """The same weight, with which products do not round their inputs to 8 bits."""
        if not self.format.dynamic:
            return self
        found: Self | None = self.__dict__.get("_static")
        if found is None:
            how = replace(self.format, dynamic=False), self.shape, self.dtype, self.transposed
            found = type(self)(self._store, self.scale, self.zero, *how)
            self.__dict__["_static"] = found
        return found

    def data_ptr(self) -> int:
        """That of its scales, which are its own whatever form the codes are in."""
        return self.scale.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        """That of its scales. Dequantised values have one, too, which others get once they are
        gone: who asks whose memory a tensor lies in must not hear of it."""
        return self.scale.untyped_storage()

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The plain tensor that it stands for, in its own dtype or the one given."""
        return self.shaped(self.dequantized_rows(dtype or self.dtype))

    def dequantized_rows(self, dtype: torch.dtype) -> Tensor:
        """The matrix ``[n, k]`` that it stands for.

        A kernel writes it in one pass where it has these grids, with the same bits: symmetric
        ones whose groups are even, while the codes are in the order in which they were stored.
        """
        data, size = self._store.data, self.format.fitted(self.rows[1]).group_size
        if data is None or self.zero is not None or (size or 0) % 2 or dtype == torch.float64:
            return grids.dequantize(self.codes, self.grid, self.format, dtype)
        bits, (_, k) = 4 if self.format.packed else 8, self.rows
        return kernels.dequantize_groups(
            data, self.scale.float(), None, k, bits=bits, group=size, dtype=dtype
        )

    @property
    def code(self) -> Code:
        """What it is apart from its data."""
        return Code(type(self), self.format, self.rows, self.shape, self.dtype, self.transposed)

    def to_bytes(self) -> Tensor:
        """Codes, scales and zero points in one buffer, 1-D uint8 (see :class:`Code`)."""
        held = self._held()
        out = held[0].new_zeros(self.code.bytes, dtype=torch.uint8)
        at = 0
        for x in held:
            out[at : at + x.nbytes] = x.contiguous().reshape(-1).view(torch.uint8)
            at += padded(x.nbytes)
        return out

    def grouped(self, form: Format) -> Self:
        """The same weight, a part of a row of which the whole has this format's groups."""
        if form.group_size == self.format.group_size:
            return self
        how = replace(self.format, group_size=form.group_size), self.shape, self.dtype
        return type(self)(self._store, self.scale, self.zero, *how, self.transposed)

    # Parts of it, along a dimension of the tensor that it stands for

    def grain(self, dim: int) -> int:
        return (self.format.group_size or 1) if self._inner(dim) else 1

    def taken(self, dim: int, runs: Runs) -> Self:
        code = self.code.resized(dim, sum(stop - start for start, stop in runs))
        if not self._inner(dim):
            return self._made(code, [self._rows_taken(x, dim, runs) for x in self._held()])
        if self.format.packed and parts.in_pairs(runs):
            codes = parts.taken(self.data_codes, 1, parts.coarser(runs, 2))
        else:
            codes = self._stored(parts.taken(self.codes, 1, runs))
        groups = self._groups(runs)
        return self._made(code, [codes, *(parts.taken(x, 1, groups) for x in self._held()[1:])])

    def joined(self, some: Sequence[Self], dim: int, runs: Sequence[Runs]) -> Self:
        code = self.code.resized(dim, max(row[-1][1] for row in runs if row))
        rows = [*zip(*(x._held() for x in some), strict=True)]
        if self._inner(dim):
            codes = self._stored(parts.joined([x.codes for x in some], 1, runs))
            groups = [self._groups(row) for row in runs]
            return self._made(code, [codes, *(parts.joined(row, 1, groups) for row in rows[1:])])
        lead, at = [x._lead() for x in some], 0 if self.transposed else dim
        shaped = [
            [x.reshape(*shape, x.shape[1]) for x, shape in zip(row, lead, strict=True)]
            for row in rows
        ]
        full = [parts.joined(row, at, runs) for row in shaped]
        return self._made(code, [x.reshape(-1, x.shape[-1]) for x in full])

    def _made(self, code: Code, held: Sequence[Tensor]) -> Self:
        made: Self = code.holding(*held)  # type: ignore[assignment]
        return made

    def _inner(self, dim: int) -> bool:
        """Whether products sum over a dimension."""
        return dim == (0 if self.transposed else self.depth - 1)

    def _groups(self, runs: Runs) -> Runs:
        """Which scales these columns have; all have the one of a row that has one."""
        size = self.format.group_size
        return ((0, 1),) if size is None else parts.coarser(runs, size)

    def _held(self) -> list[Tensor]:
        return [self.data_codes, self.scale, *([] if self.zero is None else [self.zero])]

    def _stored(self, codes: Tensor) -> Tensor:
        return packing.pack(codes) if self.format.packed else codes

    def _lead(self) -> tuple[int, ...]:
        """The dimensions that are rows of the matrix that is stored."""
        return self.rows[:1] if self.transposed else tuple(self.shape[:-1])

    def _rows_taken(self, x: Tensor, dim: int, runs: Runs) -> Tensor:
        """Some rows of codes or scales ``[n, ...]``."""
        shaped = x.reshape(*self._lead(), x.shape[1])
        return parts.taken(shaped, 0 if self.transposed else dim, runs).reshape(-1, x.shape[1])

    def shaped(self, rows: Tensor) -> Tensor:
        """A matrix ``[n, k]`` in this tensor's shape."""
        return rows.t().contiguous() if self.transposed else rows.reshape(self.shape)

    def each(self, f: Callable[[Tensor], Tensor], dtype: torch.dtype | None = None) -> Self:
        """The same weight, perhaps of another dtype, of ``f`` of each tensor that it holds."""
        return type(self)(
            f(self.data_codes),
            f(self.scale),
            None if self.zero is None else f(self.zero),
            self.format,
            self.shape,
            dtype or self.dtype,
            self.transposed,
        )

    def __repr__(self, *, tensor_contents: Any = None) -> Any:  # type: ignore[override]
        name, dtype = type(self).__name__, str(self.dtype).removeprefix("torch.")
        return f"{name}({tuple(self.shape)} {dtype} in {self.format}, {self.nbytes} bytes)"

    def __reduce_ex__(self, protocol: Any) -> Any:
        parts = self.data_codes, self.scale, self.zero, self.format, self.shape, self.dtype
        return type(self), (*parts, self.transposed)

    def __deepcopy__(self, memo: Any) -> Self:
        return self.clone()  # type: ignore[return-value]


@dataclass(frozen=True)
class Code:
    """What a low-bit tensor is apart from its data: how it is read from bytes.

    The bytes are codes, scales and zero points, each part filled up to a multiple of 16.
    """

    kind: type[LowBit]
    format: Format
    rows: tuple[int, int]
    shape: torch.Size
    dtype: torch.dtype
    transposed: bool

    @property
    def parts(self) -> list[tuple[tuple[int, int], torch.dtype]]:
        """Shape and dtype of the codes, the scales and, if there are any, the zero points."""
        return list(self.format.parts(*self.rows).values())

    @property
    def bytes(self) -> int:
        """How many there are."""
        return sum(padded(n * m * dtype.itemsize) for (n, m), dtype in self.parts)

    def read(self, data: Tensor) -> LowBit:
        """The tensor whose data lie in ``data``, 1-D uint8; nothing is copied."""
        found: list[Tensor] = []
        at = 0
        for shape, dtype in self.parts:
            size = shape[0] * shape[1] * dtype.itemsize
            found.append(data[at : at + size].view(dtype).view(shape))
            at += padded(size)
        return self.holding(*found)

    def holding(self, codes: Tensor, scale: Tensor, zero: Tensor | None = None) -> LowBit:
        """The tensor of this code with these data."""
        return self.kind(codes, scale, zero, self.format, self.shape, self.dtype, self.transposed)

    @property
    def grain(self) -> int:
        """How many of what products sum over share a scale; 1 where all of a row do."""
        return self.format.group_size or 1

    def resized(self, dim: int, size: int) -> Code:
        """That of a tensor with another size along a dimension; the format stays the same."""
        shape = torch.Size((*self.shape[:dim], size, *self.shape[dim + 1 :]))
        return replace(self, shape=shape, rows=matrix_shape(shape, self.transposed))


def matrix_shape(shape: Sequence[int], transposed: bool) -> tuple[int, int]:
    """``(n, k)`` of the matrix that a weight of this shape is stored as."""
    return (shape[1], shape[0]) if transposed else (math.prod(shape[:-1]), shape[-1])


def padded(size: int) -> int:
    """``size`` and its filling."""
    return -(-size // 16) * 16


def _check(
    data: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    form: Format,
    shape: torch.Size | tuple[int, ...],
    transposed: bool,
) -> None:
    """Refuse parts that do not form a tensor of this shape."""
    if not len(shape) or (transposed and len(shape) != 2) or form.bits > 8:
        raise PlacementError(
            f"a QTensor of shape {tuple(shape)} in {form}{', transposed' if transposed else ''}: "
            "expected one of at least one dimension (two, if transposed) and of at most 8 bits."
        )
    wanted = form.parts(*matrix_shape(shape, transposed))
    given = {"codes": data, "scale": scale, "zero": zero}
    found = {name: x for name, x in given.items() if x is not None}
    fits = found.keys() == wanted.keys()
    if not fits or any(
        (tuple(x.shape), x.dtype) != wanted[name] or x.device != data.device
        for name, x in found.items()
    ):
        has = {name: f"{x.dtype}{list(x.shape)} on {x.device}" for name, x in found.items()}
        need = {name: f"{dtype}{list(size)}" for name, (size, dtype) in wanted.items()}
        raise PlacementError(
            f"a QTensor of shape {tuple(shape)} in {form} was given {has}; it consists of {need} "
            f"on one device{', and of no zero points' if form.symmetric else ''}. "
            "QTensor.quantize makes one from a plain tensor."
        )


class _Store:
    """Codes as they were given, or as a kernel reads them: in one place for all views of them."""

    __slots__ = ("data", "ready")

    def __init__(self, data: Tensor) -> None:
        self.data: Tensor | None = data
        self.ready: Any = None
