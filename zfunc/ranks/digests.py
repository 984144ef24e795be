"""Digests of tensors that see where each bit stands, taken where the tensor lies.

On the host it is the xxh3 of the bytes: as fast as memory can be read. On a device, from which
nothing but the digests is to be copied, it is a sum of the words, each times an odd number that
its place decides, modulo 2**64 (multilinear hashing, Lemire and Kaser 2014): words that change
places change the sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import xxhash
from torch import Tensor

from zfunc.trees.kinds import FORESEEN, kind
from zfunc.trees.zeros import is_unmade

__all__ = ["as_bytes", "digest_of_all", "digests", "mixed_digest"]

SMALL = 1 << 12  # elements of a leaf that is looked at together with others
BLOCK = 1 << 22  # words that are weighed at a time
_BUFFERS = {torch.float64, torch.float32, torch.float16, torch.int64, torch.int32, torch.int16}
_BUFFERS |= {torch.int8, torch.uint8, torch.bool}
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MIX = (-0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)  # SplitMix64's constants
_MASK = (1 << 64) - 1


def as_bytes(x: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    data: Any
    if x.dtype in _BUFFERS:  # twice as fast as what suits all
        data = (x.detach() if x.requires_grad else x).numpy()
        return memoryview(data).cast("B") if data.size else memoryview(b"")
    flat = x.detach().as_strided((x.numel(),), (1,))  # a lone element may have any stride
    data = flat.view(torch.uint8).numpy()
    return memoryview(data)


def digests(xs: Sequence[Tensor], weighed: bool = False) -> list[str]:
    """A digest of the bits of each tensor, in hexadecimal.

    Args:
        xs: tensors of any dtype, none of them on meta.
        weighed: the device's kind for those on the host, too.

    Returns:
        Two of one kind are the same if the tensors are, bit by bit; shapes do not count.

    >>> a, b = digests([torch.tensor([1.0, 2.0]), torch.tensor([2.0, 1.0])])
    >>> a == b
    False
    """
    out = [""] * len(xs)
    elsewhere: dict[torch.device, list[int]] = {}
    for i, x in enumerate(xs):
        by_words = weighed or kind(x.device) != "cpu"
        if FORESEEN.get() and x.numel() > SMALL:  # it has no values
            out[i] = f"{x.numel():0{16 if by_words else 32}x}"
        elif by_words:
            elsewhere.setdefault(x.device, []).append(i)
        else:
            out[i] = _digest(x)
    for some in elsewhere.values():
        with torch.no_grad():
            sums = _sums([xs[i] for i in some]).tolist()
        for i, total in zip(some, sums, strict=True):
            out[i] = f"{total & _MASK:016x}"
    return out


def digest_of_all(xs: Sequence[Tensor]) -> str:
    """One digest of the bits of all these tensors in their order, in hexadecimal.

    It tells that something differs, for a tenth of what it costs to tell what, where there are
    many small ones. Dtypes and shapes do not count.
    """
    small: dict[torch.dtype, list[Tensor]] = {}
    rest: list[Tensor] = []
    for x in xs:
        alone = x.device.type != "cpu" or x.numel() > SMALL
        (rest if alone else small.setdefault(x.dtype, [])).append(x)
    total = xxhash.xxh3_128()
    with torch.no_grad():
        for row in small.values():
            total.update(as_bytes(torch.cat([x if x.dim() == 1 else x.reshape(-1) for x in row])))
    total.update("".join(digests(rest)).encode())
    return total.hexdigest()


def mixed_digest(x: Tensor) -> Tensor:
    """A digest of the bits of a tensor, 0-d int64, where the tensor lies; no host waits for it.

    The words' sum is mixed once more, so that two that differ do so in all of their bits.
    """
    with torch.no_grad():
        words = _words(x)
        halves = words.view(torch.int32) if words.dtype == torch.int64 else words
        return mixed(_sum(halves))


def mixed(x: Tensor) -> Tensor:
    """SplitMix64's permutation of 64 bits."""
    for shift, factor in zip((30, 27), _MIX[1:], strict=True):
        x = (x ^ ((x >> shift) & (_MASK >> shift))) * factor
    return x ^ ((x >> 31) & (_MASK >> 31))


def _digest(x: Tensor) -> str:
    if not is_unmade(x):
        return xxhash.xxh3_128_hexdigest(as_bytes(x.contiguous()))
    total, one = xxhash.xxh3_128(), x.as_strided((1,), (1,))
    block = as_bytes(one.repeat(min(BLOCK, x.numel())))
    for start in range(0, x.numel(), BLOCK):
        total.update(block[: min(BLOCK, x.numel() - start) * x.element_size()])
    return total.hexdigest()


def _sums(xs: Sequence[Tensor]) -> Tensor:
    """The weighed sum of each of some tensors on one device; small ones together."""
    words = [_words(x) for x in xs]
    out: list[Any] = [None] * len(words)
    together: dict[torch.dtype, list[int]] = {}
    for i, some in enumerate(words):
        if some.numel() <= SMALL:
            together.setdefault(some.dtype, []).append(i)
        else:
            out[i] = _sum(some)
    for row in together.values():
        for i, total in zip(row, _sums_of_small([words[i] for i in row]), strict=True):
            out[i] = total
    return torch.stack(out)


def _sums_of_small(words: Sequence[Tensor]) -> Sequence[Tensor]:
    ends = torch.tensor([0, *accumulate(len(x) for x in words)])
    joined = torch.cat(list(words)).to(torch.int64)
    places = torch.arange(len(joined)) - ends[:-1].repeat_interleave(ends.diff())
    weighed = joined * _weights(SMALL, joined.device)[places.to(joined.device)]
    totals = torch.cat([joined.new_zeros(1), weighed.cumsum(0)])
    return totals[ends.to(joined.device)].diff().unbind()


def _words(x: Tensor) -> Tensor:
    if is_unmade(x):
        one = _words(x.as_strided((1,), (1,)))
        return one.expand(x.numel()) if len(one) == 1 else one.repeat(x.numel())
    x = x.detach().contiguous()
    x = torch.view_as_real(x) if x.is_complex() else x
    return x.reshape(-1).view(_WORDS[x.element_size()])


def _sum(words: Tensor) -> Tensor:
    """Block by block, each as one word of the sum of all."""
    weights = _weights(min(BLOCK, len(words)), words.device)
    parts = torch.stack(
        [(part.to(torch.int64) * weights[: len(part)]).sum() for part in words.split(BLOCK)]
    )
    return (parts * _weights(len(parts), words.device, first=BLOCK)).sum()


def _weights(n: int, device: torch.device, first: int = 0) -> Tensor:
    """An odd number for each of ``n`` places: SplitMix64 of its index."""
    x = torch.arange(first + 1, first + n + 1, dtype=torch.int64, device=device) * _MIX[0]
    for shift, factor in zip((30, 27), _MIX[1:], strict=True):
        x = (x ^ ((x >> shift) & (_MASK >> shift))) * factor
    return x | 1
