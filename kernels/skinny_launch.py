"""How the kernels of :mod:`zfunc.kernels.skinny_triton` are launched: tiles, shares, second steps.

The length of the weights is shared out until some ``PROGRAMS`` programs read at once on each
processor of the GPU, each at least ``DEPTH`` blocks: a GPU is not kept busy by 64 programs, and
loads of one program that wait for each other do not fill its memory's pipeline.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from zfunc.kernels import dispatch
from zfunc.kernels.devices import gpu
from zfunc.kernels.groupwise import quantize_groups
from zfunc.kernels.packed import BITS, BLOCK
from zfunc.kernels.skinny_triton import finish_kernel, int8_product_kernel, product_kernel

__all__ = [
    "normed_products",
    "partial_products",
    "shares",
    "skinny_mm",
    "tile",
    "w4_mm",
    "w8_mm",
    "w8a8_mm",
]

DEPTH = 4
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


def _scales(scale: Tensor | None, zero: Tensor | None, some: Tensor) -> tuple[Any, ...]:
    """Scales, zeros, and their two strides, which they share."""
    if scale is None:
        return some, some, 0, 0
    if zero is not None and zero.stride() != scale.stride():
        scale, zero = scale.contiguous(), zero.contiguous()
    return scale, some if zero is None else zero, *scale.stride()


def partial_products(
    x: Tensor,
    w: Tensor,
    scale: Tensor | None,
    zero: Tensor | None,
    *,
    kind: str,
    group: int,
    bias: Tensor | None,
    residual: Tensor | None,
    y: Tensor,
) -> Tensor | None:
    """The first launch of a product.

    Args:
        x, w, scale, zero, kind, group: see :class:`zfunc.kernels.packed.Packed`.
        bias, residual, y: where one share does, the first launch writes the result.

    Returns:
        Partial sums ``[S, M, N]`` in float32, or ``None`` where ``y`` is written.
    """
    (m, k), n = x.shape, w.shape[0]
    how = tile(kind, group, m, k, norm=False, device=x.device)
    tiles, blocks = triton.cdiv(n, how["BN"]), triton.cdiv(k, how["BK"])
    splits, share = shares(tiles, blocks, how.pop("PROGRAMS"))
    parts = x.new_empty((splits, m, n) if splits > 1 else (1,), dtype=torch.float32)
    rest = (bias, residual, y)
    _multiply(x, w, (scale, zero), None, parts, None, rest, n, splits, share, kind, group, how)
    return parts if splits > 1 else None


def normed_products(
    x: Tensor,
    w: list[Tensor],
    scale: list[Tensor],
    zero: list[Tensor],
    *,
    kind: str,
    group: int,
    norm: Tensor,
) -> tuple[Tensor, Tensor]:
    """The first launches of products of one RMS norm, whose scale is left to what follows.

    Args:
        x, kind, group: see :class:`zfunc.kernels.packed.Packed`.
        w, scale, zero: likewise, of matrices whose rows follow each other. A launch for each, with
            as many shares as all of them together need.
        norm: the weight of the norm.

    Returns:
        Partial sums ``[S, M, N]`` and squares of the inputs ``[S, M]``, in float32.
    """
    (m, k), n = x.shape, sum(len(part) for part in w)
    inside = not norm_first(kind, group, m, zero=bool(zero))
    how = tile(kind, group, m, k, norm=inside, device=x.device)
    tiles = sum(triton.cdiv(len(part), how["BN"]) for part in w)
    splits, share = shares(tiles, triton.cdiv(k, how["BK"]), how.pop("PROGRAMS"))
    parts = x.new_empty((splits, m, n), dtype=torch.float32)
    squares = x.new_empty((splits, m), dtype=torch.float32)
    weight = norm if inside else None
    if not inside:
        squares.zero_()[0] = x.float().square().sum(1)
        x = x * norm.to(x.dtype)
    at = 0
    for i, part in enumerate(w):
        codes = (scale[i] if scale else None, zero[i] if zero else None)
        mine, rest = parts[:, :, at:], (None, None, None)
        _multiply(x, part, codes, weight, mine, squares, rest, n, splits, share, kind, group, how)
        at += len(part)
    return parts, squares


def _multiply(
    x: Tensor,
    w: Tensor,
    codes: tuple[Tensor | None, Tensor | None],
    norm: Tensor | None,
    parts: Tensor,
    squares: Tensor | None,
    rest: tuple[Tensor | None, Tensor | None, Tensor | None],
    stride: int,
    splits: int,
    share: int,
    kind: str,
    group: int,
    how: dict[str, int],
) -> None:
    """Launch ``x W^T`` into ``parts``, whose rows are ``stride`` apart, or into the last of
    ``rest``: bias, residual, result."""
    if BITS[kind] == 4 and (short := -x.shape[1] % 16):  # words have room: nothing else is moved
        x, norm = F.pad(x, (0, short)), norm if norm is None else F.pad(norm, (0, short))
    (m, k), n = x.shape, w.shape[0]
    tiles, blocks = triton.cdiv(n, how["BN"]), triton.cdiv(k, how["BK"])
    scales, zeros, step_n, step_g = _scales(*codes, w)
    bias, residual, y = rest
    product_kernel[(tiles, splits)](
        *(x, w, scales, zeros, x if norm is None else norm, 0.0),
        *(x if t is None else t for t in (bias, residual, y)),
        *(parts, parts if squares is None else squares),
        *(m, n, k, w.shape[1], stride, step_n, step_g, blocks, share),
        BITS=BITS[kind],
        G=group,
        ZERO=codes[1] is not None,
        NORM=norm is not None,
        SPLIT=splits > 1 or y is None,
        BIAS=bias is not None,
        RESIDUAL=residual is not None,
        EVEN=k % how["BK"] == 0,
        ASM=ASSEMBLER,
        EXACT=exact(kind, group, zero=codes[1] is not None, amd=dispatch.AMD),
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


def _launch(
    x: Tensor,
    w: Tensor,
    scale: Tensor | None,
    zero: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    y: Tensor,
    *,
    kind: str,
    group: int,
    rows: int,
    dtype: torch.dtype,
) -> None:
    left = partial_products(
        x, w, scale, zero, kind=kind, group=group, bias=bias, residual=residual, y=y
    )
    if left is not None:
        finish(left, bias, residual, y)


def skinny_mm(*args: Any, **how: Any) -> None:
    """Weights of 16 bits."""
    _launch(*args, kind="skinny_mm", **how)


def w8_mm(*args: Any, **how: Any) -> None:
    """Int8 codes."""
    _launch(*args, kind="w8_mm", **how)


def w4_mm(*args: Any, **how: Any) -> None:
    """Words of 4-bit codes."""
    _launch(*args, kind="w4_mm", **how)


def w8a8_mm(
    x: Tensor,
    w: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    y: Tensor,
    *,
    group: int,
    rows: int,
    dtype: torch.dtype,
) -> None:
    """Rounds the inputs, then multiplies codes with codes."""
    (m, k), n = x.shape, w.shape[0]
    if k:
        codes, step, _ = quantize_groups(x, group=None)
    else:
        codes, step = x.to(torch.int8), x.new_zeros((m, 1), dtype=torch.float32)
    how = tile("w8a8_mm", group, m, k, norm=False, device=x.device)
    tiles, blocks = triton.cdiv(n, how["BN"]), triton.cdiv(k, how["BK"])
    splits, share = shares(tiles, blocks, how.pop("PROGRAMS"))
    parts = y if splits == 1 else x.new_empty((splits, m, n), dtype=torch.float32)
    scales, zeros, step_n, step_g = _scales(scale, zero, w)
    int8_product_kernel[(tiles, splits)](
        *(codes, step, w, scales, zeros, y if bias is None else bias),
        *(y if residual is None else residual, y, parts),
        *(m, n, k, step_n, step_g, blocks, share),
        G=group,
        ZERO=zero is not None,
        SPLIT=splits > 1,
        BIAS=bias is not None,
        RESIDUAL=residual is not None,
        EVEN=k % how["BK"] == 0,
        **how,
    )
    if splits > 1:
        finish(parts, bias, residual, y)
