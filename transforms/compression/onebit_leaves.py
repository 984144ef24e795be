"""One bit an element where groups begin anew with each leaf.

A bias and a matrix that share a scale are both badly served by it. So no group reaches from one
leaf into another, but for small leaves: neighbours among these, whose own scales would outweigh
their signs, share one. Long stretches go to the kernel one by one; what is short is put together
and travels as one buffer of :class:`Ragged` groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from zfunc.buffers.copies import uploaded
from zfunc.kernels import onebit_bytes

if TYPE_CHECKING:
    from zfunc.transforms.compression.exchange import Codec

__all__ = ["Blocks", "Ragged", "leafwise"]

SMALL = 64  # elements: leaves of fewer share a scale with neighbours of that kind
LONG = 8192  # elements from which a stretch is worth a kernel of its own
# Byte i of a 64-bit integer, 0 or 1, ends up as bit 56 + i of the product (little-endian).
GATHER = 0x0102040810204080

Leaves = Sequence[tuple[int, int, int]]  # see Dense.leaves_of
Span = tuple[int, int]


@dataclass(frozen=True)
class Ragged:
    """One bit for a buffer in groups of these many elements; the format is that of ``OneBit``.

    Attributes:
        lengths: of the groups, in order.
        scaling: ``"mean"`` or ``"rms"``; see :class:`~zfunc.transforms.compression.onebit.OneBit`.
    """

    freezes: ClassVar[bool] = True
    lengths: tuple[int, ...]
    scaling: str = "mean"
    _there: dict[torch.device, tuple[Tensor, Tensor]] = field(
        default_factory=dict, compare=False, repr=False
    )

    def of_momentum(self) -> Ragged:
        """Itself: it was made for what it packs."""
        return self

    def over(self, leaves: Leaves) -> Ragged:
        """Itself: it knows its groups."""
        return self

    def nbytes(self, n: int, dtype: torch.dtype) -> int:
        """Bytes of ``n`` elements whose errors are in ``dtype``."""
        return len(self.lengths) * dtype.itemsize + onebit_bytes(n)

    def pack_(self, x: Tensor, error: Tensor) -> Tensor:
        """``x + error`` as bytes; ``error`` becomes what they leave out."""
        return self._sent(error.add_(x))

    def mean_(self, received: Sequence[Tensor], error: Tensor) -> Tensor:
        """The mean of what came from all ranks, plus ``error``, as bytes; likewise."""
        rows = self.unpack(torch.stack(list(received)), len(error), error.dtype)
        return self._sent(error.add_(rows.mean(0)))

    def unpack(self, data: Tensor, n: int, dtype: torch.dtype) -> Tensor:
        """The numbers, of ``dtype``, that bytes stand for: ``[n]``, or one row each."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        cut = len(self.lengths) * wide.itemsize
        scale = data[..., :cut].reshape(-1).clone().view(wide).view(*data.shape[:-1], -1)
        signs = _signs(wide, data.device)[data[..., cut:].int()].flatten(-2)[..., :n]
        return (signs * self._spread(scale)).to(dtype)

    def unpack_(self, data: Tensor, out: Tensor) -> None:
        """The same into the 1-D ``out``."""
        out.copy_(self.unpack(data, len(out), out.dtype))

    def _sent(self, c: Tensor) -> Tensor:
        """``c`` as bytes; what is left of it afterwards is what they lack."""
        n, sizes = len(c), self._on(c.device)[0]
        parts = c.abs() if self.scaling == "mean" else c.square()
        scale = torch.segment_reduce(parts, "sum", lengths=sizes, unsafe=True) / sizes
        scale = scale.to(c.dtype) if self.scaling == "mean" else scale.sqrt_().to(c.dtype)
        positive = torch.zeros(n + -n % 8, dtype=torch.uint8, device=c.device)
        torch.logical_not(c.signbit(), out=positive[:n])
        c.sub_(self._spread(scale).copysign(c))
        bits = (positive.view(torch.int64) * GATHER).bitwise_right_shift_(56).to(torch.uint8)
        return torch.cat([scale.view(torch.uint8), bits])

    def _spread(self, scale: Tensor) -> Tensor:
        return scale.index_select(-1, self._on(scale.device)[1])

    def _on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """How long the groups are, and to which one each element belongs."""
        if device not in self._there:
            with torch.inference_mode(False):  # they outlive the mode that they are made in
                lengths = torch.tensor(self.lengths, device="cpu")
                groups = torch.arange(len(lengths), dtype=torch.int32, device="cpu")
                rows = [lengths, groups.repeat_interleave(lengths)]
                if device.type == "cuda":  # the host does not wait for what is page-locked
                    rows = [x.pin_memory() for x in rows]
                first, second = uploaded(rows, device)
            assert first is not None and second is not None
            self._there[device] = first, second
        return self._there[device]


@dataclass(frozen=True)
class Blocks:
    """One bit for a buffer of which every stretch has a codec of its own.

    Attributes:
        blocks: the stretches that travel together, and how; these cover the buffer.
    """

    freezes: ClassVar[bool] = True
    blocks: tuple[tuple[tuple[Span, ...], Codec], ...]

    def of_momentum(self) -> Blocks:
        """Itself: it was made for what it packs."""
        return self

    def over(self, leaves: Leaves) -> Blocks:
        """Itself: it knows its leaves."""
        return self

    def nbytes(self, n: int, dtype: torch.dtype) -> int:
        """Bytes of all blocks, of errors in ``dtype``."""
        return sum(self._sizes(dtype))

    def pack_(self, x: Tensor, error: Tensor) -> Tensor:
        """``x + error`` as bytes; ``error`` becomes what they leave out."""
        out = []
        for spans, codec in self.blocks:
            mine = _taken(error, spans)
            out.append(codec.pack_(_taken(x, spans), mine))
            _put(error, spans, mine)
        return _joined(out, x)

    def mean_(self, received: Sequence[Tensor], error: Tensor) -> Tensor:
        """The mean of what came from all ranks, plus ``error``, as bytes; likewise."""
        rows, out = torch.stack(list(received)), []
        for (spans, codec), (a, b) in zip(self.blocks, self._places(error.dtype), strict=True):
            mine = _taken(error, spans)
            out.append(codec.mean_(rows[:, a:b], mine))
            _put(error, spans, mine)
        return _joined(out, rows)

    def unpack(self, data: Tensor, n: int, dtype: torch.dtype) -> Tensor:
        """The numbers, of ``dtype``, that bytes stand for: ``[n]``, or one row each."""
        out = data.new_empty(*data.shape[:-1], n, dtype=dtype)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        for (spans, codec), (a, b) in zip(self.blocks, self._places(wide), strict=True):
            _put(out, spans, codec.unpack(data[..., a:b], _length(spans), dtype))
        return out

    def unpack_(self, data: Tensor, out: Tensor) -> None:
        """The same into the 1-D ``out``."""
        wide = torch.float64 if out.dtype == torch.float64 else torch.float32
        for (spans, codec), (a, b) in zip(self.blocks, self._places(wide), strict=True):
            if len(spans) == 1:
                codec.unpack_(data[a:b], out[slice(*spans[0])])
            else:
                _put(out, spans, codec.unpack(data[a:b], _length(spans), out.dtype))

    def _sizes(self, dtype: torch.dtype) -> list[int]:
        return [codec.nbytes(_length(spans), dtype) for spans, codec in self.blocks]

    def _places(self, dtype: torch.dtype) -> list[Span]:
        """Where each block is in the bytes."""
        return list(pairwise(accumulate(self._sizes(dtype), initial=0)))


def leafwise(codec: Codec, group: int, scaling: str, leaves: Leaves) -> Codec:
    """A codec for a buffer of these leaves, groups of which begin anew with each.

    Args:
        codec: that of long stretches.
        group, scaling: how many elements share a scale there, and which.
        leaves: see :meth:`zfunc.layout.dense.Dense.leaves_of`.
    """
    long: list[Span] = []
    short: list[Span] = []
    lengths: list[int] = []
    pooled = False  # whether the last group is of small leaves
    for a, b, elements in leaves:
        size = b - a
        if size >= LONG:
            before = long[-1] if long else (0, -1)
            if before[1] == a and (a - before[0]) % group == 0:
                long[-1] = before[0], b  # groups begin where they would
            else:
                long.append((a, b))
            continue
        begun = short.pop()[0] if short and short[-1][1] == a else a
        short.append((begun, b))
        small = elements < SMALL
        if small and pooled and lengths[-1] + size <= group:
            lengths[-1] += size
        else:
            lengths += [min(group, size - at) for at in range(0, size, group)]
        pooled = small
    blocks: list[tuple[tuple[Span, ...], Codec]] = [((span,), codec) for span in long]
    if short:
        blocks.append((tuple(short), Ragged(tuple(lengths), scaling)))
    if len(blocks) == 1 and len(blocks[0][0]) == 1:
        return blocks[0][1]
    return Blocks(tuple(blocks))


def _taken(x: Tensor, spans: tuple[Span, ...]) -> Tensor:
    """These stretches of a buffer: a view of one, a copy of several."""
    parts = [x[a:b] for a, b in spans]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _put(out: Tensor, spans: tuple[Span, ...], values: Tensor) -> None:
    """Write stretches back, unless they are views."""
    if len(spans) == 1:
        (a, b) = spans[0]
        if values.data_ptr() != out[..., a:b].data_ptr():
            out[..., a:b] = values
        return
    parts = values.split([b - a for a, b in spans], -1)
    torch._foreach_copy_([out[..., a:b] for a, b in spans], list(parts))


def _joined(parts: Sequence[Tensor], like: Tensor) -> Tensor:
    return torch.cat(list(parts)) if parts else like.new_empty(0, dtype=torch.uint8)


def _length(spans: tuple[Span, ...]) -> int:
    return sum(b - a for a, b in spans)


@cache
def _signs(dtype: torch.dtype, device: torch.device) -> Tensor:
    """For each byte its eight signs, 1 or -1."""
    with torch.inference_mode(False):  # it outlives the mode that it is made in
        bits = torch.arange(256, device=device)[:, None] >> torch.arange(8, device=device) & 1
        return (2 * bits - 1).to(dtype)
