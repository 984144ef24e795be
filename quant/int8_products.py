"""Products of 8-bit codes on the CPU, with exact sums in int32.

oneDNN multiplies unsigned 8-bit inputs with signed 8-bit weights that it has reordered once. The
reordered codes replace the stored ones, so memory holds them once. Rows with several scales are
cut into one piece for each group: sums are exact within a group and fp32 between groups.

Inputs are rounded row by row. Weight-only formats round them to 16 bits, as
``x = scale * (256 * high + low)``: two rows of 8-bit inputs, which a product that waits for
weights (1 to 16 rows) takes for little more than one. ``dynamic`` formats (W8A8) round to 8.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from zfunc.quant.qtensor import QTensor

__all__ = ["Pieces", "product", "rounded", "takes"]

ROWS = 512  # of the input at once: bounds the 16-bit halves and the sums
TINY = 1e-30  # inputs below it are rounded to zero
PIECE = 1 << 14  # codes in a piece: below, a call costs more than it saves


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


def takes(weight: QTensor, m: int) -> bool:
    """Whether this route is there and worth it."""
    n, k = weight.rows
    many = weight.format.groups(k) > 1
    return bool(n and k and m) and exact() and (not many or n * weight.format.width(k) >= PIECE)


@dataclass(frozen=True)
class Pieces:
    """Codes as oneDNN reads them, one piece for each group of columns, with its scales ``[n]``."""

    pieces: tuple[Tensor, ...]
    scales: tuple[Tensor, ...]

    def codes(self) -> Tensor:
        """``[n, k]`` int8."""
        return torch.cat([piece.to_dense().t() for piece in self.pieces], dim=1).contiguous()


def product(x: Tensor, weight: QTensor) -> Tensor:
    """``x W^T`` for fp32 ``x`` ``[m, k]``."""
    if len(x) > ROWS:
        return torch.cat([product(part, weight) for part in x.split(ROWS)])
    ready: Pieces = weight.ready(lambda: _pieces(weight))
    if weight.format.dynamic and len(ready.pieces) == 1 and weight.zero is None:
        # Nothing but the product: next to a narrow layer's, every call of torch counts.
        codes, _, scale = _rounded_to_8(x)
        return _multiply(codes, ready.pieces[0], ready.scales[0]).mul_(scale)
    width = weight.format.width(weight.rows[1])
    high, low, scale = _rounded_to_8(x) if weight.format.dynamic else _rounded_to_16(x)
    halves = high if low is None else torch.cat([high, low])
    total: Tensor | None = None
    inputs = halves.split(width, dim=1)
    for g, (part, piece, scales) in enumerate(zip(inputs, ready.pieces, ready.scales, strict=True)):
        y = _multiply(part.contiguous(), piece, scales)
        if weight.zero is not None:
            sums = (part.to(torch.int32) - 128).sum(dim=1, keepdim=True)
            y -= sums * (scales * weight.zero[:, g])
        total = y if total is None else total.add_(y)
    assert total is not None
    if low is not None:
        total = total[len(x) :].add_(total[: len(x)], alpha=256.0)
    return total.mul_(scale)


def _pieces(weight: QTensor) -> Pieces:
    codes, width = weight.codes, weight.format.width(weight.rows[1])
    prepack: Any = torch.ops.onednn.qlinear_prepack
    # A group's scales are read together; where they are fp32 already, nothing is kept twice.
    columns = weight.scale.t().contiguous()
    weight.scale = columns.t()
    return Pieces(
        tuple(prepack(part.contiguous(), None) for part in codes.split(width, dim=1)),
        columns.float().unbind(),
    )


def _multiply(inputs: Tensor, piece: Tensor, scale: Tensor) -> Tensor:
    """``(inputs - 128) codes^T`` in int32, times ``scale`` ``[n]`` in fp32."""
    return torch.ops.onednn.qlinear_pointwise(
        inputs, 1.0, 128, piece, scale, _zeros(len(scale)), None, 1.0, 0, torch.float32, "none",
        [], "",
    )  # fmt: skip


@functools.cache
def _zeros(n: int) -> Tensor:
    return torch.zeros(n, dtype=torch.int64)


def _scale(x: Tensor, top: int) -> Tensor:
    """``max|x| / top`` of each row; of a row of zeros a number that is no zero."""
    return x.abs().amax(dim=-1, keepdim=True).div_(top).clamp_min_(TINY)


def _rounded_to_8(x: Tensor) -> tuple[Tensor, None, Tensor]:
    scale = _scale(x, 127)
    return x.div(scale).round_().add_(128).to(torch.uint8), None, scale


def _rounded_to_16(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    scale = _scale(x, 127 * 256)
    codes = x.div(scale).round_().to(torch.int32)
    high = codes.add(128).bitwise_right_shift_(8)
    low = codes.sub_(high, alpha=256).add_(128).to(torch.uint8)
    return high.add_(128).to(torch.uint8), low, scale


def rounded(x: Tensor) -> Tensor:
    """``x`` rounded to 8 bits, row by row, and back: what a dynamic format multiplies with."""
    scale = _scale(x, 127)
    return (x / scale).round_() * scale
