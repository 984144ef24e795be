"""Sums of squares that keep their digits, of which norms are made.

A CPU adds up a long tensor in a few float32 lanes, how many depends on the CPU: the sum of a
million squares is wrong by some 1e-5. Here blocks of 64 elements have sums of their own, which
are added in float64, one after the other. Leaves of placed trees begin at multiples of 64
elements, so a leaf has the same sum, to the last bit, wherever it lies; and all leaves of a tree,
or of a flat, take a handful of operations together. On a GPU it is one ``_foreach_norm``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from zfunc.trees.kinds import kind

__all__ = ["Segments", "square_sum", "square_sums", "wide", "wide_dtype", "zeros"]

BLOCK = 64
LARGE = 1 << 12  # elements from which on a leaf is not copied to lie beside others

_PLAIN = {Tensor, torch.nn.Parameter}


def wide_dtype(x: Tensor) -> torch.dtype:
    """In what squares of ``x`` are added up: float32 at least."""
    return torch.float32 if x.dtype in (torch.bfloat16, torch.float16) else x.dtype


def wide(x: Tensor) -> Tensor:
    """``x`` in the precision in which updates are computed: at least float32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def square_sum(x: Tensor) -> Tensor:
    """The sum of the squares of a tensor's elements, 0-d, of its wide dtype."""
    return square_sums([x])[0]


def square_sums(xs: Sequence[Tensor]) -> Tensor:
    """The sum of squares of each tensor, 1-D.

    Each is rounded to the wide dtype of its own tensor; the result is of the widest.

    >>> square_sums([torch.tensor([3.0, 4.0]), torch.ones(2, 2), torch.zeros(0)])
    tensor([25.,  4.,  0.])
    """
    if len({x.dtype for x in xs}) == len({x.device for x in xs}) == 1 and not _special(xs):
        with torch.no_grad():
            return _together(xs)
    if not xs:
        return torch.zeros(0)
    sums = [_alone(x.detach()) for x in xs]
    widest = torch.float64 if any(x.dtype == torch.float64 for x in sums) else sums[0].dtype
    return torch.stack([x.to(widest) for x in sums])


def _special(xs: Sequence[Tensor]) -> bool:
    """Whether tensors are traced, batched, or none of torch's own."""
    return (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or not set(map(type, xs)) <= _PLAIN
        or not xs[0].is_floating_point()
    )


def _alone(x: Tensor) -> Tensor:
    if x.device.type in ("cpu", "cuda") and not _special([x]):
        with torch.no_grad():
            return _together([x])[0]
    return torch.linalg.vector_norm(x, dtype=wide_dtype(x)).square()


def _together(xs: Sequence[Tensor]) -> Tensor:
    """:func:`square_sums` of tensors of one dtype on one kind of device."""
    if kind(xs[0].device) != "cpu":
        return _norms(xs).square_()
    sizes = [x.numel() for x in xs]
    large = [i for i, n in enumerate(sizes) if n > LARGE]
    small = range(len(xs)) if not large else [i for i, n in enumerate(sizes) if n <= LARGE]
    rows = [_rows(_side_by_side([xs[i] for i in small], [sizes[i] for i in small]))]
    for i in large:
        flat = xs[i].reshape(-1)
        cut = sizes[i] - sizes[i] % BLOCK
        rows.append(_rows(flat[:cut]))
        if cut < sizes[i]:
            rows.append(_rows(_side_by_side([flat[cut:]], [sizes[i] - cut])))
    order = [*small, *large]
    offsets = torch.tensor([0, *(-(-sizes[i] // BLOCK) for i in order)]).cumsum(0)
    sums = _added(torch.cat(rows) if large else rows[0], offsets, wide_dtype(xs[0]))
    if large and len(small):
        sums = torch.empty_like(sums).index_copy_(0, torch.tensor(order), sums)
    return sums


def _norms(xs: Sequence[Tensor]) -> Tensor:
    if not all(x.numel() for x in xs):  # of which torch's kernels make no norm
        xs = [x if x.numel() else x.new_zeros(1) for x in xs]
    return torch.stack(torch._foreach_norm(list(xs), 2, dtype=wide_dtype(xs[0])))


def _side_by_side(xs: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """The elements of all, those of each followed by zeros up to a multiple of 64."""
    if not xs:
        return torch.zeros(0)
    row: list[Tensor] = []
    for x, n in zip(xs, sizes, strict=True):
        row.append(x)
        if n % BLOCK:
            row.append(zeros(x.dtype, BLOCK - n % BLOCK))
    return torch._C._nn.flatten_dense_tensors(row)


@cache
def zeros(dtype: torch.dtype, length: int) -> Tensor:
    """Padding on the CPU, always the same tensor: nobody may write to it."""
    with torch.inference_mode(False):  # they outlive the mode that they are made in
        return torch.zeros(length, dtype=dtype, device="cpu")


def _rows(flat: Tensor) -> Tensor:
    """The norm of every 64 elements."""
    return torch.linalg.vector_norm(flat.view(-1, BLOCK), dim=1, dtype=wide_dtype(flat))


def _added(rows: Tensor, offsets: Tensor, dtype: torch.dtype) -> Tensor:
    """Sums of the squares between offsets, in float64 and one by one: so they are always alike."""
    if not rows.numel():
        return torch.zeros(len(offsets) - 1, dtype=dtype)
    return torch.segment_reduce(rows.double().square_(), "sum", offsets=offsets).to(dtype)


@dataclass(frozen=True)
class Segments:
    """Leaves, or parts of such, in some flats: of each flat their starts and stops, in order."""

    bounds: tuple[tuple[tuple[int, int], ...], ...]

    def square_sums(self, flats: Sequence[Tensor]) -> Tensor:
        """:func:`square_sums` of ``flat[start:stop]`` of each; what lies between does not count.

        Args:
            flats: 1-D tensors of one dtype, on one device.

        >>> Segments((((0, 4), (64, 65)),)).square_sums([torch.full((128,), 2.0)])
        tensor([16.,  4.])
        """
        usual = all(
            kind(flat.device) == "cpu" and flat.is_contiguous() and not flat.numel() % BLOCK
            for flat in flats
        )
        if not usual or self._crooked or _special(flats):
            pairs = zip(self.bounds, flats, strict=True)
            return square_sums([view for row, flat in pairs for view in _views(row, flat)])
        with torch.no_grad():
            return self._summed(flats[0] if len(flats) == 1 else torch.cat(list(flats)), flats)

    def _summed(self, flat: Tensor, flats: Sequence[Tensor]) -> Tensor:
        rows = _rows(flat)
        (cut, beyond), offsets = self._places(tuple(x.numel() // BLOCK for x in flats))
        if len(cut):  # of their last block only a part
            last = flat.view(-1, BLOCK).index_select(0, cut).masked_fill_(beyond, 0.0)
            rows.index_copy_(0, cut, _rows(last.view(-1)))
        return _added(rows, offsets, wide_dtype(flat))[1::2].contiguous()

    @cached_property
    def _crooked(self) -> bool:
        """Whether something begins within a block."""
        return any(a % BLOCK for row in self.bounds for a, _ in row)

    @cached_property
    def _found(self) -> dict[tuple[int, ...], Any]:
        return {}

    def _places(self, blocks: tuple[int, ...]) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """For flats of so many blocks: which blocks are not full and where in them nothing is; and,
        in blocks, the offsets of each leaf and of what lies before it."""
        if blocks not in self._found:
            starts = [0, *accumulate(blocks)]
            moved = [
                (start * BLOCK + a, start * BLOCK + b)
                for start, row in zip(starts, self.bounds, strict=False)
                for a, b in row
            ]
            stops = torch.tensor([b for _, b in moved if b % BLOCK], dtype=torch.int64)
            ends = stops // BLOCK, torch.arange(BLOCK) >= (stops % BLOCK)[:, None]
            offsets = [0, *(x for a, b in moved for x in (a // BLOCK, -(-b // BLOCK)))]
            self._found[blocks] = ends, torch.tensor(offsets)
        found: tuple[tuple[Tensor, Tensor], Tensor] = self._found[blocks]
        return found


def _views(bounds: Sequence[tuple[int, int]], flat: Tensor) -> list[Tensor]:
    lengths, at = [], 0
    for a, b in bounds:
        lengths += [a - at, b - a]
        at = b
    return list(flat.detach().split_with_sizes([*lengths, flat.numel() - at])[1::2])
