"""Torch for :mod:`zfunc.kernels.groupwise` and :mod:`~zfunc.kernels.payloads`.

Everything happens a block of whole groups at a time, in scratch that stays in cache. The
arithmetic is that of the Triton kernels, operation by operation, so results agree bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from zfunc.kernels.operators import wide

__all__ = ["SMALLEST", "Codes", "Levels", "Quantizing", "dequantize_twin", "quantize_twin"]

CHUNK = 1 << 17  # for each thread: two float32 buffers of it stay in the second cache of a core
# The constants of `lowbias32` (Wellons, Prospecting for Hash Functions, 2018), as signed integers.
FIRST, SECOND = 0x7FEB352D, 0x846CA68B - (1 << 32)
GOLDEN = 0x9E3779B9
# What divided by this is finite, up to the levels of 16 bits, and scales are no subnormals.
SMALLEST = 2.0**-100

Fill = Callable[["GroupBlock", Tensor], None]


class Codes(NamedTuple):
    """Levels with their scales and, where zero is not in their middle, zeros."""

    q: Tensor
    scale: Tensor
    zero: Tensor | None


class Quantizing(NamedTuple):
    """What is rounded to levels, and what that gives.

    Attributes:
        x: values ``[R, K]``; or levels that senders sent, a row each, whose mean is rounded.
        shape: ``(R, K)``.
        symmetric: whether zero is in the middle of the levels.
        scales, zeros: of what senders sent, for each group; ``None`` where ``x`` are values.
        error: added to the values.
        q, scale, zero: levels ``[R, K]`` or, of 4 bits, ``[R, ceil(K / 2)]``; scales and zeros.
        left: what the levels leave out; may be ``error``.
        fake: the values that the levels stand for; then levels and scales are not kept.
    """

    x: Tensor
    shape: tuple[int, ...]
    symmetric: bool
    scales: Tensor | None = None
    zeros: Tensor | None = None
    error: Tensor | None = None
    q: Tensor | None = None
    scale: Tensor | None = None
    zero: Tensor | None = None
    left: Tensor | None = None
    fake: Tensor | None = None

    def shares(self, bits: int) -> tuple[Tensor, Tensor | None, Tensor | None, float]:
        """What each sender adds to a mean, for each group.

        Shares, not sums: what travels on is a mean, and 1/W goes into the scales.

        Returns:
            ``(shares, lows, rest, away)``: a sender adds ``(level - away) * share + low``; to the
            sum ``rest`` is added. ``lows`` and ``rest`` may be absent.
        """
        assert self.scales is not None
        shares, zeros = self.scales / len(self.scales), self.zeros
        lows = None if zeros is None else zeros / len(zeros)
        if bits == 4 and self.error is None:
            # Levels plus 128, times shares of 16 bits: exact products, of which a GPU needs no more
            # than a multiply-add each. What is too much is taken off in the end.
            shares = _short(shares)
            return shares, None, _offsets(shares, lows), -128.0
        return shares, lows, None, 8.0 if bits == 4 and zeros is None else 0.0


@dataclass(frozen=True)
class Levels:
    """Which levels there are: how many bits, whether zero is in the middle, how to round."""

    bits: int
    symmetric: bool
    stochastic: bool = False

    @property
    def top(self) -> int:
        """The highest level; the lowest is its negative, or 0.

        >>> Levels(8, symmetric=True).top, Levels(8, symmetric=False).top
        (127, 255)
        """
        return (1 << (self.bits - 1)) - 1 if self.symmetric else (1 << self.bits) - 1

    @property
    def reach(self) -> float:
        """Where the greatest value goes: with dither just inside the range, so that none leads out
        of it and nothing need be clamped."""
        return self.top * (1 - 2**-20) if self.stochastic else self.top


@dataclass(frozen=True)
class GroupBlock:
    """Elements ``start`` to ``stop`` of rows laid end to end: whole groups, or one short one."""

    start: int
    stop: int
    groups: slice
    byte: int  # where their levels of 4 bits begin

    def of(self, x: Tensor) -> Tensor:
        return x.view(-1)[self.start : self.stop]


def quantize_twin(given: Quantizing, *, bits: int, size: int, seed: Tensor | None) -> None:
    """Values, or the mean of what senders sent, to levels."""
    levels = Levels(bits, given.symmetric, seed is not None)
    word = 0 if seed is None else int(seed) & 0xFFFFFFFFFFFFFFFF
    scale, zero = given.scale, given.zero
    if scale is None:
        count = given.shape[0] * -(-given.shape[1] // size)
        scale = given.x.new_empty(count, dtype=wide(given.x))
        zero = None if given.symmetric else torch.empty_like(scale)
    fill = _values_of(given) if given.scales is None else _mean_of(given, scale, bits, size)
    values, rounded = (_room(given.shape, size, scale) for _ in range(2))
    whole = torch.empty_like(values, dtype=torch.int8)
    for block in _blocks(given.shape, size):
        n = block.stop - block.start
        rows = -(-n // size)
        c, y = (room[: rows * size].view(rows, size) for room in (values, rounded))
        fill(block, values[:n])
        if n % size:
            values[n : rows * size] = values[n - 1]  # changes neither least nor greatest
        its = scale.view(-1)[block.groups]
        low = None if zero is None else zero.view(-1)[block.groups]
        _to_levels(c, y, its, low, levels)
        if levels.stochastic:
            y.add_(_dither(word, block.groups.start, y))
        y.round_()
        if given.q is not None:
            _store(block, rounded[:n], whole, given.q.view(-1), levels)
        y.mul_(its[:, None])
        if low is not None:
            y.add_(low[:, None])
        if given.left is not None:
            torch.sub(values[:n], rounded[:n], out=block.of(given.left))
        if given.fake is not None:
            block.of(given.fake).copy_(rounded[:n])


def _values_of(given: Quantizing) -> Fill:
    def fill(block: GroupBlock, out: Tensor) -> None:
        out.copy_(block.of(given.x))
        if given.error is not None:
            out.add_(block.of(given.error))

    return fill


def _mean_of(given: Quantizing, like: Tensor, bits: int, size: int) -> Fill:
    room = _room(given.shape, size, like)
    shares, lows, rest, away = given.shares(bits)

    def fill(block: GroupBlock, out: Tensor) -> None:
        if given.error is not None:
            out.copy_(block.of(given.error))
        else:
            out.zero_()
        for w in range(len(shares)):
            low = None if lows is None else lows[w]
            sent = Codes(given.x[w], shares[w], low)
            out.add_(_values(block, sent, bits, size, room, away))
        if rest is not None:
            its = rest[block.groups, None]
            out.view(len(its), -1).add_(its)

    return fill


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


def dequantize_twin(
    q: Tensor, scale: Tensor, zero: Tensor | None, out: Tensor, *, bits: int, size: int
) -> None:
    """``out`` is ``[R, K]``, the others as :func:`quantize_twin` leaves them."""
    room = _room(out.shape, size, scale)
    away = 8.0 if zero is None else 0.0
    codes = Codes(q.view(-1), scale.view(-1), None if zero is None else zero.view(-1))
    for block in _blocks(out.shape, size):
        block.of(out).copy_(_values(block, codes, bits, size, room, away))


def _to_levels(c: Tensor, y: Tensor, scale: Tensor, zero: Tensor | None, levels: Levels) -> None:
    """Rows of values to rows of levels, as floats that are not yet rounded; scales and zeros."""
    if zero is None:
        span = torch.amax(torch.abs(c, out=y), 1)
    else:
        torch.amin(c, 1, out=zero)
        span = torch.amax(c, 1).sub_(zero)
    torch.mul(span, 1 / levels.top, out=scale)
    usable = (span > SMALLEST) & span.isfinite()
    # `number / tensor` would be rounded twice in torch: as a reciprocal, and as a product.
    inverse = torch.where(usable, torch.full_like(span, levels.reach).div_(span), 0)[:, None]
    if zero is None:
        torch.mul(c, inverse, out=y)
    else:
        torch.sub(c, zero[:, None], out=y).mul_(inverse)
    if not usable.all():
        y.masked_fill_(~usable[:, None], 0)


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


def _store(block: GroupBlock, levels: Tensor, whole: Tensor, q: Tensor, form: Levels) -> None:
    """Levels as bytes, or two in a byte, the first in its low half."""
    n = levels.numel()
    if form.bits == 8 and form.symmetric:
        q[block.start : block.stop].copy_(levels)
        return
    if form.bits == 8:  # by way of int8: torch converts to uint8 one by one
        target = q[block.start : block.stop]
        target.view(torch.int8).copy_(levels - 128)
        target.bitwise_xor_(128)
        return
    halves = whole[: n + n % 2]
    halves[n:].zero_()
    halves[:n].copy_(levels)
    if form.symmetric:
        halves[:n].add_(8)
    pairs = halves.view(torch.int16)
    q[block.byte : block.byte + len(pairs)].copy_(pairs.bitwise_or_(pairs >> 4))


def _values(
    block: GroupBlock, codes: Codes, bits: int, size: int, room: Tensor, away: float
) -> Tensor:
    """What the levels of a block stand for, in ``room``; those of 4 bits less ``away``."""
    q, scale, zero = codes
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


def _blocks(shape: tuple[int, ...], size: int) -> Iterator[GroupBlock]:
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
            yield GroupBlock(row * width + a, row * width + b, found, row * stride + a // 2)


def _room(shape: tuple[int, ...], size: int, like: Tensor) -> Tensor:
    """Scratch for the largest block."""
    total = shape[0] * (-(-shape[1] // size)) * size
    return like.new_empty(min(_most(size), total))


def _most(size: int) -> int:
    """Elements of a block, whole groups; more for more threads, which begin together."""
    chunk = CHUNK * min(torch.get_num_threads(), 8)
    return max(chunk - chunk % size, size)
