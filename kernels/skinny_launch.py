"""Launches of the kernels of :mod:`zfunc.kernels.skinny_triton`: tiles, shares, second steps.

The length of the weights is shared out until some ``PROGRAMS`` programs read at once on each
processor of the GPU, each at least ``DEPTH`` blocks: a GPU is not kept busy by 64 programs, and
loads of one program that wait for each other do not fill its memory's pipeline.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from zfunc.kernels import dispatch
from zfunc.kernels.devices import gpu
from zfunc.kernels.groupwise import quantize_groups
from zfunc.kernels.packed import BITS, BLOCK, Matrix, NormedProduct
from zfunc.kernels.skinny_triton import finish_kernel, int8_product_kernel, product_kernel

__all__ = [
    "Tiling",
    "normed_products",
    "shares",
    "skinny_mm",
    "tile",
    "w4_mm",
    "w8_mm",
    "w8a8_mm",
]

DEPTH = 4
Sums = tuple[Tensor, Tensor | None, int]  # partial, of squares; how far rows of the first are apart
Rest = tuple[Tensor | None, Tensor | None, Tensor | None]  # bias, residual, result
ASSEMBLER = not dispatch.AMD and not dispatch.interpreting()


def shares(tiles: int, blocks: int, programs: int) -> tuple[int, int]:
    """How many shares, and blocks in each: as many as keep ``programs`` busy, none empty.

    >>> shares(64, 32, 264), shares(448, 32, 264), shares(64, 5, 264)
    ((4, 8), (1, 32), (1, 5))
    """
    wanted = max(1, min(blocks // DEPTH, programs // max(tiles, 1)))
    each = max(1, -(-blocks // wanted))
    return max(1, -(-blocks // each)), each


def tile(
    kind: str,
    group: int,
    rows: int,
    length: int,
    *,
    norm: bool,
    device: torch.device | None = None,
    target: str | None = None,
) -> dict[str, int]:
    """The tile of a program and its warps, for weights whose rows have ``length`` elements.

    Products with words are turned, so that 8 rows are enough for NVIDIA's tensor cores, which
    halves what is done for each row. What a norm costs is shared by twice the columns where
    that leaves room: at 16 rows the compiler would choose products of four warps together on
    sm_90, whose fences cost more than is won.
    """
    how = dict(dispatch.config(kind, device, target=target))
    on = gpu(device)
    target = on.target if target is None else target
    amd, ampere = target.startswith("gfx"), target.startswith("sm_8")
    how["PROGRAMS"] *= on.processors if on.name else 132  # in the interpreter as on an H200
    how["BN"], how["BM"] = how.pop("BLOCK"), 16
    how["BK"] = BLOCK if BITS[kind] == 4 or not group else min(BLOCK, group)
    if BITS[kind] == 4 and rows <= 8 and not amd:
        how["BM"] = 8
    if BITS[kind] == 8 and how["BK"] == 32:  # short blocks: more columns share what is done for one
        how["BN"] *= 2
    if BITS[kind] == 8 and length % 16:  # read byte by byte, each with an address of its own
        how["BN"] = 32
    if BITS[kind] > 4 and length % 16 and norm and amd:  # each such address has a mask of its own
        how["num_warps"] *= 2
    if BITS[kind] == 4 and norm and ampere and how["BM"] == 16:  # two warps have no room for it
        how["num_warps"] *= 2
    if BITS[kind] == 4 and norm and (how["BM"] == 8 or amd):
        how["BN"], how["num_warps"] = 2 * how["BN"], 2 * how["num_warps"]
    return how


def exact(kind: str, group: int, *, zero: bool, amd: bool) -> bool:
    """Whether zero points are taken off the codes, as 16-bit pairs, and not off their sums.

    Short groups have so many sums that this is cheaper, for what adds such pairs at once.
    """
    return zero and BITS[kind] == 4 and group in (32, 64) and not amd


def norm_first(kind: str, group: int, rows: int, *, zero: bool) -> bool:
    """Whether a norm's weight is multiplied in before the product, and not in it.

    At 16 rows the scales of short groups leave no room among the instructions.
    """
    return BITS[kind] == 4 and rows > 8 and (group == 32 or (group == 64 and zero))


class Tiling(NamedTuple):
    """What all launches of a product share.

    Attributes:
        how: the tile of a program, and how it is compiled.
        splits: shares of the length of the weights.
        share: blocks of each of them.
    """

    how: dict[str, int]
    splits: int
    share: int

    @staticmethod
    def of(x: Tensor, weights: Sequence[Matrix], *, norm: bool = False) -> Tiling:
        """For matrices that all have the same rows for input."""
        (m, k), first = x.shape, weights[0]
        how = tile(first.kind, first.group, m, k, norm=norm, device=x.device)
        tiles = sum(triton.cdiv(len(weight.w), how["BN"]) for weight in weights)
        blocks = triton.cdiv(k, how["BK"])
        return Tiling(how, *shares(tiles, blocks, programs=how.pop("PROGRAMS")))

    def grid(self, n: int) -> tuple[int, int]:
        """Programs for ``n`` rows of weights."""
        return triton.cdiv(n, self.how["BN"]), self.splits


def _scales(weight: Matrix) -> tuple[Any, ...]:
    """Scales, zeros, and their two strides, which they share."""
    some, scale, zero = weight[:3]
    if scale is None:
        return some, some, 0, 0
    if zero is not None and zero.stride() != scale.stride():
        scale, zero = scale.contiguous(), zero.contiguous()
    return scale, some if zero is None else zero, *scale.stride()


def skinny_mm(
    x: Tensor, weight: Matrix, bias: Tensor | None, residual: Tensor | None, y: Tensor, **how: Any
) -> None:
    """Launch a product; where one share does, that is all."""
    m, n, tiling = len(x), len(weight.w), Tiling.of(x, [weight])
    parts = x.new_empty((tiling.splits, m, n) if tiling.splits > 1 else (1,), dtype=torch.float32)
    _multiply(x, weight, None, (parts, None, n), (bias, residual, y), tiling)
    if tiling.splits > 1:
        finish(parts, bias, residual, y)


w8_mm = skinny_mm  # the kind is told by the weights
w4_mm = skinny_mm


def normed_products(product: NormedProduct) -> tuple[Tensor, Tensor]:
    """The first launches of products of one RMS norm, whose scale is left to what follows.

    A launch for each matrix, with as many shares as all of them together need.

    Returns:
        Partial sums ``[S, M, N]`` and squares of the inputs ``[S, M]``, in float32.
    """
    x, m, n = product.x, len(product.x), sum(map(len, product.w))
    inside = not norm_first(product.kind, product.group, m, zero=bool(product.zero))
    matrices = product.matrices
    tiling = Tiling.of(x, matrices, norm=inside)
    parts = x.new_empty((tiling.splits, m, n), dtype=torch.float32)
    squares = x.new_empty((tiling.splits, m), dtype=torch.float32)
    norm = product.norm if inside else None
    if not inside:
        squares.zero_()[0] = x.float().square().sum(1)
        x = x * product.norm.to(x.dtype)
    at = 0
    for weight in matrices:
        _multiply(x, weight, norm, (parts[:, :, at:], squares, n), (None, None, None), tiling)
        at += len(weight.w)
    return parts, squares


def _multiply(
    x: Tensor, weight: Matrix, norm: Tensor | None, sums: Sums, rest: Rest, tiling: Tiling
) -> None:
    """Launch ``x W^T`` into partial sums, or into the last of ``rest``."""
    bits, group, zero = BITS[weight.kind], weight.group, weight.zero is not None
    if bits == 4 and (short := -x.shape[1] % 16):  # words have room: nothing else is moved
        x, norm = F.pad(x, (0, short)), norm if norm is None else F.pad(norm, (0, short))
    (m, k), n, (bias, residual, y) = x.shape, len(weight.w), rest
    parts, squares, stride = sums
    scales, zeros, *steps = _scales(weight)
    how = tiling.how
    product_kernel[tiling.grid(n)](
        *(x, weight.w, scales, zeros, x if norm is None else norm, 0.0),
        *(x if t is None else t for t in rest),
        *(parts, parts if squares is None else squares),
        *(m, n, k, weight.w.shape[1], stride, *steps, triton.cdiv(k, how["BK"]), tiling.share),
        BITS=bits,
        G=group,
        ZERO=zero,
        NORM=norm is not None,
        SPLIT=tiling.splits > 1 or y is None,
        BIAS=bias is not None,
        RESIDUAL=residual is not None,
        EVEN=k % how["BK"] == 0,
        ASM=ASSEMBLER,
        EXACT=exact(weight.kind, group, zero=zero, amd=dispatch.AMD),
        **how,
    )


def finish(parts: Tensor, bias: Tensor | None, residual: Tensor | None, y: Tensor) -> None:
    """The second launch: sums over shares."""
    splits, m, n = parts.shape
    block = min(1024, triton.next_power_of_2(n))
    finish_kernel[(triton.cdiv(n, block), m)](
        *(parts, parts, parts if bias is None else bias, parts if residual is None else residual),
        *(y, m, n, 1, 0.0, splits),
        NORM=False,
        BIAS=bias is not None,
        RESIDUAL=residual is not None,
        BLOCK=block,
        num_warps=max(1, min(4, block // 256)),
    )


def w8a8_mm(
    x: Tensor, weight: Matrix, bias: Tensor | None, residual: Tensor | None, y: Tensor, **how: Any
) -> None:
    """Rounds the inputs, then multiplies codes with codes."""
    (m, k), n = x.shape, len(weight.w)
    if k:
        codes, step, _ = quantize_groups(x, group=None)
    else:
        codes, step = x.to(torch.int8), x.new_zeros((m, 1), dtype=torch.float32)
    tile, splits, share = tiling = Tiling.of(x, [weight])
    parts = y if splits == 1 else x.new_empty((splits, m, n), dtype=torch.float32)
    scales, zeros, *steps = _scales(weight)
    int8_product_kernel[tiling.grid(n)](
        *(codes, step, weight.w, scales, zeros, y if bias is None else bias),
        *(y if residual is None else residual, y, parts),
        *(m, n, k, *steps, triton.cdiv(k, tile["BK"]), share),
        G=weight.group,
        ZERO=weight.zero is not None,
        SPLIT=splits > 1,
        BIAS=bias is not None,
        RESIDUAL=residual is not None,
        EVEN=k % tile["BK"] == 0,
        **tile,
    )
    if splits > 1:
        finish(parts, bias, residual, y)
