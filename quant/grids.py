"""Grids: which few numbers a group of weights may take, and how weights are rounded to them.

A weight matrix is seen as rows ``[n, k]`` of which ``k`` is summed over in the product. Each run
of ``group_size`` elements of a row has one step ``scale`` and, if the grid is asymmetric, one
code ``zero`` that stands for 0: ``weight = scale * (code - zero)``. Codes of ``b`` bits lie in
``[-2**(b - 1), 2**(b - 1) - 1]``.

Symmetric: ``zero = 0``. Above 4 bits, ``scale = max|w| / (2**(b-1) - 1)`` and nothing is clipped.
Up to 4 bits the scale is the one of least squared error among a few that bring the weight of
largest magnitude to the lowest code or beyond it, see :mod:`zfunc.quant.scale_search`. It is
negative where that weight is positive, and the largest weights may be clipped.
``python -m benchmarks.low_bit_grids`` compares this with other scales.

Asymmetric: the codes span ``[min(w, 0), max(w, 0)]``. So 0 is a code in each case, and padding is
exact. What a tensor stands for is in its codes, scales and zero points alone, however they were
found: those with symmetric 4-bit codes from -7 to 7, as earlier versions made them, are as good.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from zfunc.buffers.readings import number
from zfunc.errors import NonFiniteError
from zfunc.quant.scale_search import searched

__all__ = ["BITS", "Format", "Grid", "dequantize", "fit", "quantize", "wide"]

BITS = (4, 8)  # what is stored and served; schedules pass through the others


@dataclass(frozen=True)
class Format:
    """How a weight is stored.

    Attributes:
        bits: of a code, 2 to 15; up to 4 they are packed two in a byte, up to 8 stored at all.
        group_size: weights of a row that share a scale; None: the whole row.
        symmetric: whether 0 is the middle of the codes.
        dynamic: whether products round their inputs to 8 bits as well, row by row (W8A8).
        shared: how many rows, one below the other, have the same scales.

    Raises:
        ValueError: a number of bits or a group size that means nothing.

    >>> Format(4, 32).groups(100)
    4
    """

    bits: int = 8
    group_size: int | None = 128
    symmetric: bool = True
    dynamic: bool = False
    shared: int = 1

    def __post_init__(self) -> None:
        if type(self.bits) is not int or not 2 <= self.bits <= 15:
            raise ValueError(f"bits={self.bits!r}: expected a whole number from 2 to 15.")
        size = self.group_size
        if size is not None and (type(size) is not int or size < 1):
            raise ValueError(
                f"group_size={size!r}: expected how many weights of a row share a scale, at least "
                "1, or None for one scale for each row."
            )

    @property
    def packed(self) -> bool:
        """Whether two codes share a byte."""
        return self.bits <= 4

    @property
    def scale_dtype(self) -> torch.dtype:
        """Next to 4-bit codes a scale's own rounding (to 8 bits) is not seen."""
        return torch.bfloat16 if self.packed else torch.float32

    def width(self, k: int) -> int:
        """How many elements of a row of ``k`` share a scale."""
        return max(1, k if self.group_size is None else min(self.group_size, k))

    def groups(self, k: int) -> int:
        """How many scales a row of ``k`` elements has; the last group may be shorter."""
        return -(-k // self.width(k))

    def fitted(self, k: int) -> Format:
        """The same for rows of ``k``: a group that holds a whole row is called None."""
        whole = self.group_size is not None and self.group_size >= k
        return replace(self, group_size=None) if whole else self

    def parts(self, n: int, k: int) -> dict[str, tuple[tuple[int, int], torch.dtype]]:
        """Shape and dtype of the tensors in which a weight ``[n, k]`` is stored, by name.

        >>> Format(4, 32).parts(2, 65)
        {'codes': ((2, 33), torch.uint8), 'scale': ((2, 3), torch.bfloat16)}
        """
        grid = n, self.groups(k)
        codes = ((n, -(-k // 2)), torch.uint8) if self.packed else ((n, k), torch.int8)
        found = {"codes": codes, "scale": (grid, self.scale_dtype)}
        return found if self.symmetric else {**found, "zero": (grid, torch.int8)}

    def __str__(self) -> str:
        size = "per row" if self.group_size is None else f"groups of {self.group_size}"
        kind = "symmetric" if self.symmetric else "asymmetric"
        return f"int{self.bits}, {size}, {kind}{', 8-bit inputs' if self.dynamic else ''}"


@dataclass(frozen=True)
class Grid:
    """The grids of all groups.

    Attributes:
        scale: ``[n, groups]``, not 0, of the format's ``scale_dtype``; negative only beside
            symmetric codes of up to 4 bits.
        zero: ``[n, groups]`` int16, int8 for up to 8 bits; None where it is 0.
    """

    scale: Tensor
    zero: Tensor | None


def wide(dtype: torch.dtype) -> torch.dtype:
    """What rounding is computed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def by_group(rows: Tensor, form: Format) -> Tensor:
    """``[n, k]`` as ``[n, groups, width]``; a last, shorter group is filled with zeros."""
    n, k = rows.shape
    width, groups = form.width(k), form.groups(k)
    if groups * width > k:
        rows = torch.nn.functional.pad(rows, (0, groups * width - k))
    return rows.reshape(n, groups, width)


def fit(rows: Tensor, form: Format, name: str = "weight", check: bool = True) -> Grid:
    """The grids of each group: those that span it or, symmetric of up to 4 bits, fit it best.

    Args:
        rows: ``[n, k]``, floating-point. Groups that are all zero get the scale 1.
        name: of the weight, for the error.
        check: whether a weight that is not finite is an error, for which a device is waited for;
            else the scale of its group is not finite either.

    Raises:
        NonFiniteError: a weight is NaN or infinite.

    >>> fit(torch.tensor([[1.0, -2.0, 127.0]]), Format(8, None)).scale
    tensor([[1.]])
    """
    x = by_group(rows.detach().to(wide(rows.dtype)), form)
    top, kind = 2 ** (form.bits - 1) - 1, code_dtype(form)
    if not x.numel():
        scale = x.new_ones(x.shape[:2])
        return Grid(scale.to(form.scale_dtype), None if form.symmetric else scale.to(kind))
    x = _in_blocks(x, form.shared)
    zero = None
    if form.symmetric and form.packed:
        scale = searched(x, form.bits, form.scale_dtype)
    else:
        low, high = x.aminmax(dim=-1)
        if form.symmetric:
            span, steps = torch.maximum(-low, high), top
        else:
            low, high = low.clamp_max(0), high.clamp_min(0)
            span, steps = high - low, 2 * top + 1
        scale = (span / steps).to(form.scale_dtype)
        scale = torch.where(scale <= 0, torch.ones_like(scale), scale)  # NaN stays
        if not form.symmetric:
            zero = -top - 1 - low / scale.to(x.dtype)
            zero = zero.round_().clamp_(-top - 1, top).to(kind)
    if check and not number(torch.isfinite(scale).all()):
        raise NonFiniteError(_not_finite(rows, name))
    return Grid(_each_row(scale, form, rows), None if zero is None else _each_row(zero, form, rows))


def code_dtype(form: Format) -> torch.dtype:
    """The integers that hold codes."""
    return torch.int8 if form.bits <= 8 else torch.int16


def _in_blocks(x: Tensor, shared: int) -> Tensor:
    """``[n, groups, width]`` as ``[blocks, groups, shared * width]``: what has the same scale."""
    if shared == 1:
        return x
    x = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, -len(x) % shared))
    return x.reshape(-1, shared, *x.shape[1:]).transpose(1, 2).flatten(2)


def _each_row(x: Tensor, form: Format, rows: Tensor) -> Tensor:
    """``[blocks, groups]`` as ``[n, groups]``."""
    return x if form.shared == 1 else x.repeat_interleave(form.shared, dim=0)[: len(rows)]


def _not_finite(rows: Tensor, name: str) -> str:
    bad = (~torch.isfinite(rows)).nonzero()
    if not len(bad):
        return f"{name} spans more than a scale can hold; scale it down before it is quantised."
    row, column = bad[0].tolist()
    return (
        f"{name} has {len(bad)} value(s) that are NaN or infinite, the first in row {row}, column "
        f"{column}: {float(rows[row, column])}. No grid spans them; repair the weights, or leave "
        "this leaf out by `include`."
    )


def quantize(rows: Tensor, grid: Grid, form: Format, noise: Tensor | None = None) -> Tensor:
    """Codes of weights.

    Args:
        rows: ``[n, k]``.
        noise: ``[n, k]`` in [-1/2, 1/2), added before rounding to the nearest code:
            uniform noise makes the rounding stochastic, and right in the mean for every weight
            that the grid does not clip.

    Returns:
        ``[n, k]`` int8, int16 for more than 8 bits.

    >>> rows = torch.tensor([[0.5, -2.0, 1.0]])
    >>> quantize(rows, fit(rows, Format(4, None)), Format(4, None))
    tensor([[ 2, -8,  4]], dtype=torch.int8)
    """
    k = rows.shape[1]
    dtype = wide(rows.dtype)
    x = by_group(rows.detach().to(dtype), form) / grid.scale.to(dtype)[:, :, None]
    if noise is not None:
        x = x + by_group(noise.to(dtype), form)
    x = x.round_()
    if grid.zero is not None:
        x += grid.zero[:, :, None]
    top = 2 ** (form.bits - 1) - 1
    return x.clamp_(-top - 1, top).to(code_dtype(form)).flatten(1)[:, :k]


def dequantize(
    codes: Tensor, grid: Grid, form: Format, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Weights from codes ``[n, k]``, in ``dtype``.

    >>> form = Format(4, None)
    >>> rows = torch.tensor([[0.5, -2.0, 1.0]])
    >>> grid = fit(rows, form)
    >>> dequantize(quantize(rows, grid, form), grid, form)
    tensor([[ 0.5000, -2.0000,  1.0000]])
    """
    k = codes.shape[1]
    x = by_group(codes, form).to(wide(dtype))
    if grid.zero is not None:
        x -= grid.zero[:, :, None]
    x *= grid.scale[:, :, None]
    return x.to(dtype).flatten(1)[:, :k]
