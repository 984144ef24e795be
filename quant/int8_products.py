"""Products with 8-bit codes on a CPU, with exact sums in int32: oneDNN's.

oneDNN multiplies unsigned 8-bit inputs with signed 8-bit weights, which it reorders once. The
reordered codes replace the stored ones. It knows one scale for a row. So rows with several scales
are divided into pieces of a few groups, and the inputs of a piece are laid out in blocks:
``[x1 0; 0 x2]`` times ``[W1 W2]^T`` has the sums of each group in a row of its own. These are exact
in int32; they are scaled and added in fp32. A product of 1 to 16 rows waits for weights and
computes the zeros meanwhile. With more rows the zeros cost more than weights that are dequantised.

Inputs are rounded row by row. Weight-only formats round them to 16 bits, as
``x = scale * (256 * high + low)``: two rows of 8-bit inputs, which take such a product little
longer than one. ``dynamic`` formats (W8A8) round to 8 bits.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zfunc.kernels.dispatch import INSTEAD
from zfunc.kernels.panels import WIDEST
from zfunc.quant.large_pages import into_large_pages
from zfunc.quant.low_bit import LowBit

__all__ = ["Piece", "Pieces", "product", "rounded", "several", "takes"]

ROWS = 512  # of the input at once: bounds the 16-bit halves and the sums
TINY = 1e-30  # inputs below it are rounded to zero
GROUPS = 8  # groups in a piece: more would need more zeros, fewer more calls
PIECE = 1 << 14  # codes in a piece of several groups: below, a call costs more than it saves
FEW = 16  # rows of the input that pieces of several groups are worth it for
# By bits: the zero of unsigned codes, and a half, so that cutting off rounds to the nearest.
HALVES = {
    bits: torch.full((), zero + 0.5, dtype=torch.float32, device="cpu")
    for bits, zero in ((8, 128), (16, 128 * 257))
}


@functools.cache
def exact() -> bool:
    """Whether oneDNN's product is there and exact, tried where 16-bit steps would overflow."""
    if torch.backends.mkldnn.is_available():
        try:
            w = torch.full((16, 64), 127, dtype=torch.int8)
            x = torch.tensor([[255], [0]], dtype=torch.uint8).expand(2, 64).contiguous()
            y = _multiply(x, torch.ops.onednn.qlinear_prepack(w, None), torch.ones(16))
        except (RuntimeError, NotImplementedError, AttributeError):
            return False
        return bool((y[0] == 127 * 127 * 64).all()) and bool((y[1] == -128 * 127 * 64).all())
    return False


def takes(weight: LowBit, m: int) -> bool:
    """Whether this route is there and worth it; a step that is foreseen knows no oneDNN."""
    n, k = weight.rows
    if not (n and k and m) or INSTEAD.get() is not None or not exact():
        return False
    width, groups = weight.format.width(k), weight.format.groups(k)
    if width > WIDEST:
        return False
    return groups == 1 or (m <= FEW and n * width * min(groups, GROUPS) >= PIECE)


@dataclass(frozen=True)
class Piece:
    """Some columns as oneDNN reads them.

    Attributes:
        codes: the reordered matrix.
        scales: ``[groups, n]`` fp32.
        zeros: ``[groups, n]`` int8, or None.
        width: columns of a group.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    width: int


@dataclass(frozen=True)
class Pieces:
    """All columns, in pieces of up to :data:`GROUPS` groups of the same width."""

    pieces: tuple[Piece, ...]

    def codes(self) -> Tensor:
        """``[n, k]`` int8."""
        return torch.cat([p.codes.to_dense().t() for p in self.pieces], dim=1).contiguous()


def product(x: Tensor, weight: LowBit) -> Tensor:
    """``x W^T`` for fp32 ``x`` ``[m, k]``."""
    return several(x, [weight])[0]


def several(x: Tensor, weights: Sequence[LowBit]) -> list[Tensor]:
    """``x W^T`` for each of several weights, all dynamic or none: ``x`` is rounded once."""
    rounding = _rounded_to_8 if weights[0].format.dynamic else _rounded_to_16
    inputs, scale = rounding(x)
    return [_times(inputs, weight).mul_(scale) for weight in weights]


def _times(inputs: Tensor, weight: LowBit) -> Tensor:
    ready: Pieces = weight.ready(Pieces, lambda: _pieces(weight))
    if len(ready.pieces) == 1:
        return _sums(inputs, ready.pieces[0])
    sizes = [p.width * p.scales.shape[0] for p in ready.pieces]
    return functools.reduce(Tensor.add_, map(_sums, inputs.split(sizes, dim=2), ready.pieces))


def _pieces(weight: LowBit) -> Pieces:
    codes, width = weight.codes, weight.format.width(weight.rows[1])
    prepack: Any = torch.ops.onednn.qlinear_prepack
    # A group's scales are read together; where they are fp32 already, nothing is kept twice.
    columns = weight.scale.t().contiguous()
    weight.scale = columns.t()
    scales, found = columns.float(), []
    for at, groups, size in _cuts(weight.rows[1], width):
        part = codes[:, at : at + groups * size]
        first = at // width
        zeros = None if weight.zero is None else weight.zero.t()[first : first + groups]
        packed = into_large_pages(prepack(part.contiguous(), None))
        found.append(Piece(packed, scales[first : first + groups], zeros, size))
    return Pieces(tuple(found))


def _cuts(k: int, width: int) -> list[tuple[int, int, int]]:
    """Pieces of rows of ``k``: first column, groups, columns of a group.

    >>> _cuts(1100, 100)
    [(0, 8, 100), (800, 3, 100)]
    >>> _cuts(70, 32)
    [(0, 2, 32), (64, 1, 6)]
    """
    full = k // width
    cuts = [(g * width, min(GROUPS, full - g), width) for g in range(0, full, GROUPS)]
    return cuts + ([(full * width, 1, k % width)] if k % width else [])


def _sums(inputs: Tensor, piece: Piece) -> Tensor:
    """``codes(inputs) W^T`` ``[m, n]``, up to the scales of the inputs.

    Args:
        inputs: ``[halves, m, columns]`` uint8, the low ones first; 128 stands for 0.
    """
    (halves, m, k), groups = inputs.shape, piece.scales.shape[0]
    if groups == 1:
        y = _multiply(inputs.reshape(halves * m, k), piece.codes, piece.scales[0])
    else:
        blocks = inputs.new_full((halves, groups, m, groups, piece.width), 128)
        each = inputs.view(halves, m, groups, piece.width).permute(0, 1, 3, 2)
        blocks.diagonal(dim1=1, dim2=3).copy_(each)
        y = _multiply(blocks.view(-1, k), piece.codes, _ones(piece.scales.shape[1]))
    if halves == 2:
        low, high = y.view(2, groups * m, -1)
        y = low.add_(high, alpha=256.0)
    if groups > 1:
        y = y.view(groups, m, -1).mul_(piece.scales[:, None]).sum(dim=0)
    if piece.zeros is not None:
        taken = inputs.reshape(halves, m, groups, piece.width).sum(dim=3, dtype=torch.int32)
        taken = taken.sub_(128 * piece.width).float()
        if halves == 2:
            taken = taken[:1].add_(taken[1:], alpha=256.0)
        y.addmm_(taken[0], piece.scales * piece.zeros, alpha=-1)
    return y


@functools.cache
def _product() -> Any:
    return torch.ops.onednn.qlinear_pointwise.default


def _multiply(inputs: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    """``(inputs - 128) codes^T`` in int32, times ``scale`` ``[n]`` in fp32."""
    return _product()(
        inputs, 1.0, 128, codes, scale, _zeros(scale.shape[0]), None, 1.0, 0, torch.float32, "none",
        [], "",
    )  # fmt: skip


@functools.cache
def _zeros(n: int) -> Tensor:
    return torch.zeros(n, dtype=torch.int64)


@functools.cache
def _ones(n: int) -> Tensor:
    return torch.ones(n)


def _scale(x: Tensor, top: int) -> Tensor:
    """``max|x| / top`` of each row; of a row of zeros a number that is no zero."""
    if not x.shape[-1]:
        return x.new_full((*x.shape[:-1], 1), TINY)
    return x.abs().amax(dim=-1, keepdim=True).div_(top).clamp_min_(TINY)


def _rounded_to_8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes ``[1, m, k]`` uint8, 128 standing for 0, and the scale ``[m, 1]`` of each row."""
    scale = _scale(x, 127)
    return torch.addcdiv(HALVES[8], x, scale).to(torch.uint8)[None], scale


def _rounded_to_16(x: Tensor) -> tuple[Tensor, Tensor]:
    """The same of ``256 * high + low``: low and high ones ``[2, m, k]``."""
    scale = _scale(x, 127 * 256)
    codes = torch.addcdiv(HALVES[16], x, scale).to(torch.int32)
    low, high = codes.bitwise_and(255), codes.bitwise_right_shift_(8)
    return torch.stack([low, high]).to(torch.uint8), scale


def rounded(x: Tensor, most: Tensor | None = None) -> Tensor:
    """``x`` rounded to 8 bits, row by row, and back: what a dynamic format multiplies with.

    Args:
        x: ``[..., k]``.
        most: ``max|x|`` of each row ``[..., 1]``, where ``x`` is a part of it.
    """
    scale = _scale(x, 127) if most is None else (most / 127).clamp_min_(TINY)
    return (x / scale).add_(128.5).floor_().sub_(128) * scale
