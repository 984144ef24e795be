"""Torch for :mod:`zfunc.kernels.groupwise` and :mod:`~zfunc.kernels.payloads`.

Everything happens a block of whole groups at a time, in scratch that stays in cache. The
arithmetic is that of the Triton kernels, operation by operation, so results agree bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = [
    "SMALLEST",
    "Grid",
    "dequantize_twin",
    "fake_quant_twin",
    "mean_twin",
    "quantize_twin",
    "shares_of",
]

CHUNK = 1 << 17  # for each thread: two float32 buffers of it stay in the second cache of a core
# The constants of `lowbias32` (Wellons, Prospecting for Hash Functions, 2018), as signed integers.
FIRST, SECOND = 0x7FEB352D, 0x846CA68B - (1 << 32)
GOLDEN = 0x9E3779B9
# What divided by this is finite, up to the levels of 16 bits, and scales are no subnormals.
SMALLEST = 2.0**-100

Fill = Callable[["Block", Tensor], None]


@dataclass(frozen=True)
class Grid:
    """Levels: how many bits, whether zero is in the middle, how to round.

    ``seed`` is ``None`` for rounding to nearest, and 64 bits for stochastic rounding.
    """

    bits: int
    symmetric: bool
    seed: int | None = None

    @property
    def top(self) -> int:
        """The highest level; the lowest is its negative, or 0.

        >>> Grid(8, symmetric=True).top, Grid(8, symmetric=False).top
        (127, 255)
        """
        return (1 << (self.bits - 1)) - 1 if self.symmetric else (1 << self.bits) - 1


@dataclass(frozen=True)
class Block:
    """Elements ``start`` to ``stop`` of rows laid end to end: whole groups, or one short one."""

    start: int
    stop: int
    groups: slice
    byte: int  # where their levels of 4 bits begin

    def of(self, x: Tensor) -> Tensor:
        return x.view(-1)[self.start : self.stop]


def quantize_twin(
    x: Tensor,
    error: Tensor | None,
    q: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    new_error: Tensor | None,
    *,
    bits: int,
    size: int,
    seed: Tensor | None,
) -> None:
    """``x`` is ``[R, K]``, ``q`` has its shape or, of 4 bits, ``[R, ceil(K / 2)]``."""

    def fill(block: Block, out: Tensor) -> None:
        out.copy_(block.of(x))
        if error is not None:
            out.add_(block.of(error))

    grid = Grid(bits, zero is None, _word(seed))
    _quantize(fill, x.shape, scale, zero, grid, size, q=q, error=new_error)


def mean_twin(
    received: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    error: Tensor | None,
    q: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    new_error: Tensor | None,
    *,
    n: int,
    bits: int,
    size: int,
    seed: Tensor | None,
) -> None:
    """``received`` has a row of levels for each sender, ``scales`` and ``zeros`` of groups."""
    grid = Grid(bits, zero is None, _word(seed))
    room = _room((1, n), size, scale)
    shares, lows, rest, away = shares_of(scales, zeros, bits, error is not None)

    def fill(block: Block, out: Tensor) -> None:
        if error is not None:
            out.copy_(block.of(error))
        else:
            out.zero_()
        for w in range(len(shares)):
            low = None if lows is None else lows[w]
            out.add_(_values(block, received[w], shares[w], low, bits, size, room, away))
        if rest is not None:
            its = rest[block.groups, None]
            out.view(len(its), -1).add_(its)

    _quantize(fill, torch.Size((1, n)), scale, zero, grid, size, q=q, error=new_error)


def shares_of(
    scales: Tensor, zeros: Tensor | None, bits: int, error: bool
) -> tuple[Tensor, Tensor | None, Tensor | None, float]:
    """What each sender adds to a mean, for each group.

    Shares, not sums: what travels on is a mean, and 1/W goes into the scales.

    Returns:
        ``(shares, lows, rest, away)``: a sender adds ``(level - away) * share + low``; to the sum
        ``rest`` is added. ``lows`` and ``rest`` may be absent.
    """
    shares, lows = scales / len(scales), None if zeros is None else zeros / len(scales)
    if bits == 4 and not error:
        # Levels plus 128, times shares of 16 bits: exact products, of which a GPU needs no more
        # than a multiply-add each. What is too much is taken off in the end.
        shares = _short(shares)
        return shares, None, _offsets(shares, lows), -128.0
    return shares, lows, None, 8.0 if bits == 4 and zeros is None else 0.0


def _short(shares: Tensor) -> Tensor:
    """Rounded to 16 bits (halves away from zero): times 8 bits they fit into float32.

    float64, which no GPU's kernel takes, stays as it is.
    """
    if shares.dtype != torch.float32:
        return shares
    rounded = shares.view(torch.int32).add(0x80).bitwise_and_(-0x100).view(torch.float32)
    return torch.where(shares.isnan(), shares, rounded)


def _offsets(shares: Tensor, lows: Tensor | None) -> Tensor:
    """What levels plus 128 sum up to beyond the levels' values, negative, for each group."""
    rest = torch.zeros_like(shares[0])
    for w in range(len(shares)):
        if lows is None:  # the middle of 4 bits is 8
            rest.sub_(shares[w] * 136)
        else:
            rest.add_(lows[w] - shares[w] * 128)
    return rest


def fake_quant_twin(
    x: Tensor,
    out: Tensor,
    *,
    bits: int,
    size: int,
    symmetric: bool,
    seed: Tensor | None,
) -> None:
    """``x`` and ``out`` are ``[R, K]``."""
    groups = x.shape[0] * -(-x.shape[1] // size)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    scale = x.new_empty(groups, dtype=wide)
    zero = None if symmetric else torch.empty_like(scale)

    def fill(block: Block, values: Tensor) -> None:
        values.copy_(block.of(x))

    grid = Grid(bits, symmetric, _word(seed))
    _quantize(fill, x.shape, scale, zero, grid, size, fake=out)


def dequantize_twin(
    q: Tensor, scale: Tensor, zero: Tensor | None, out: Tensor, *, bits: int, size: int
) -> None:
    """``out`` is ``[R, K]``, the others as :func:`quantize_twin` leaves them."""
    room = _room(out.shape, size, scale)
    away = 8.0 if zero is None else 0.0
    low = None if zero is None else zero.view(-1)
    for block in _blocks(out.shape, size):
        parts = q.view(-1), scale.view(-1), low
        block.of(out).copy_(_values(block, *parts, bits, size, room, away))


def _quantize(
    fill: Fill,
    shape: torch.Size,
    scale: Tensor,
    zero: Tensor | None,
    grid: Grid,
    size: int,
    *,
    q: Tensor | None = None,
    error: Tensor | None = None,
    fake: Tensor | None = None,
) -> None:
    values, levels = (_room(shape, size, scale) for _ in range(2))
    whole = torch.empty_like(values, dtype=torch.int8)
    for block in _blocks(shape, size):
        n = block.stop - block.start
        rows = -(-n // size)
        c, y = (room[: rows * size].view(rows, size) for room in (values, levels))
        fill(block, values[:n])
        if n % size:
            values[n : rows * size] = values[n - 1]  # changes neither least nor greatest
        its = scale.view(-1)[block.groups]
        low = None if zero is None else zero.view(-1)[block.groups]
        _to_levels(c, y, its, low, grid, block.groups.start)
        if q is not None:
            _store(block, levels[:n], whole, q.view(-1), grid)
        y.mul_(its[:, None])
        if low is not None:
            y.add_(low[:, None])
        if error is not None:
            torch.sub(values[:n], levels[:n], out=block.of(error))
        if fake is not None:
            block.of(fake).copy_(levels[:n])


def _to_levels(
    c: Tensor, y: Tensor, scale: Tensor, zero: Tensor | None, grid: Grid, first: int
) -> None:
    """Rows of values to rows of levels, as floats; their scales and zeros."""
    if zero is None:
        span = torch.amax(torch.abs(c, out=y), 1)
    else:
        torch.amin(c, 1, out=zero)
        span = torch.amax(c, 1).sub_(zero)
    torch.mul(span, 1 / grid.top, out=scale)
    usable = (span > SMALLEST) & span.isfinite()
    # Just inside the range, so that no dither leads out of it and nothing need be clamped.
    reach = grid.top if grid.seed is None else grid.top * (1 - 2**-20)
    # `number / tensor` would be rounded twice in torch: as a reciprocal, and as a product.
    inverse = torch.where(usable, torch.full_like(span, reach).div_(span), 0)[:, None]
    if zero is None:
        torch.mul(c, inverse, out=y)
    else:
        torch.sub(c, zero[:, None], out=y).mul_(inverse)
    if not usable.all():
        y.masked_fill_(~usable[:, None], 0)
    if grid.seed is not None:
        y.add_(_dither(grid.seed, first, y))
    y.round_()


def _dither(seed: int, first: int, like: Tensor) -> Tensor:
    """Numbers from -1/2 to below 1/2, of 16 bits: of the seed, the group and the place in it alone.

    ``like`` is ``[rows, size]``, its first row the group ``first``. Each group begins at a hash
    of its number; from there four neighbours share one step and one round of mixing: two have
    the halves of its word, two those of the word turned by a byte. Their mean is -2**-17.
    """
    rows, size = like.shape
    base = (first + (first >> 32) * GOLDEN + (seed & 0xFFFFFFFF)) & 0xFFFFFFFF
    key = torch.arange(rows, dtype=torch.int32, device=like.device).add_(_signed(base))
    t = torch.empty_like(key)
    _fold(key, t, 16).mul_(FIRST).bitwise_xor_(_signed(seed >> 32))
    _fold(key, t, 15).mul_(SECOND)
    _fold(key, t, 16)
    steps = torch.arange(-(-size // 4), dtype=torch.int32, device=like.device)
    h = key[:, None] + steps.mul_(_signed(GOLDEN))
    t = torch.empty_like(h)
    _fold(h, t, 15).mul_(SECOND)
    torch.bitwise_right_shift(h, 16, out=t)
    h.add_(t.bitwise_and_(0xFFFF))
    words = h.new_empty((*h.shape, 2))
    torch.bitwise_right_shift(h, 8, out=t).bitwise_and_(0xFFFFFF)
    torch.bitwise_or(h << 24, t, out=words[..., 1])
    words[..., 0] = h
    halves = words.view(torch.int16).view(rows, -1)
    return torch.empty_like(like).copy_(halves[:, :size]).mul_(2**-16)


def _fold(h: Tensor, t: Tensor, by: int) -> Tensor:
    """``h ^= h >> by``, the shift logical."""
    torch.bitwise_right_shift(h, by, out=t)
    return h.bitwise_xor_(t.bitwise_and_((1 << (32 - by)) - 1))


def _signed(word: int) -> int:
    return (word & 0xFFFFFFFF) - ((word & 0x80000000) << 1)


def _store(block: Block, levels: Tensor, whole: Tensor, q: Tensor, grid: Grid) -> None:
    """Levels as bytes, or two in a byte, the first in its low half."""
    n = levels.numel()
    if grid.bits == 8 and grid.symmetric:
        q[block.start : block.stop].copy_(levels)
        return
    if grid.bits == 8:  # by way of int8: torch converts to uint8 one by one
        target = q[block.start : block.stop]
        target.view(torch.int8).copy_(levels - 128)
        target.bitwise_xor_(128)
        return
    halves = whole[: n + n % 2]
    halves[n:].zero_()
    halves[:n].copy_(levels)
    if grid.symmetric:
        halves[:n].add_(8)
    pairs = halves.view(torch.int16)
    q[block.byte : block.byte + len(pairs)].copy_(pairs.bitwise_or_(pairs >> 4))


def _values(
    block: Block,
    q: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    bits: int,
    size: int,
    room: Tensor,
    away: float,
) -> Tensor:
    """What the levels of a block stand for, in ``room``; those of 4 bits less ``away``."""
    n = block.stop - block.start
    rows = -(-n // size)
    if bits == 8:
        room[:n].copy_(q[block.start : block.stop])
    else:
        pairs = q[block.byte : block.byte + (n + 1) // 2].to(torch.int16)
        pairs = pairs.bitwise_or_(pairs << 4).bitwise_and_(0x0F0F)
        room[:n].copy_(pairs.view(torch.int8)[:n])
        if away:
            room[:n].sub_(away)
    y = room[: rows * size].view(rows, size)
    y.mul_(scale[block.groups, None])
    if zero is not None:
        y.add_(zero[block.groups, None])
    return room[:n]


def _blocks(shape: torch.Size, size: int) -> Iterator[Block]:
    """Whole groups, some chunk at a time; each row's shorter last group for itself."""
    rows, width = shape
    if width and width % size == 0:
        rows, width = 1, rows * width
    step = _most(size)
    groups, stride = -(-width // size), -(-width // 2)
    whole = width - width % size
    for row in range(rows):
        ends = [(a, min(a + step, whole)) for a in range(0, whole, step)]
        for a, b in ends + ([(whole, width)] if whole < width else []):
            first = row * groups + a // size
            found = slice(first, first + -(-(b - a) // size))
            yield Block(row * width + a, row * width + b, found, row * stride + a // 2)


def _room(shape: torch.Size | tuple[int, int], size: int, like: Tensor) -> Tensor:
    """Scratch for the largest block."""
    total = shape[0] * (-(-shape[1] // size)) * size
    return like.new_empty(min(_most(size), total))


def _most(size: int) -> int:
    """Elements of a block, whole groups; more for more threads, which begin together."""
    chunk = CHUNK * min(torch.get_num_threads(), 8)
    return max(chunk - chunk % size, size)


def _word(seed: Tensor | None) -> int | None:
    return None if seed is None else int(seed) & 0xFFFFFFFFFFFFFFFF
