"""One bit an element where groups begin anew with each leaf.

A bias and a matrix that share a scale are both badly served by it. So no group reaches from one
leaf into another, but for small leaves: neighbours among these, whose own scales would outweigh
their signs, share one. The signs of a group begin with a byte. Machine code does all of it in one
call. Elsewhere long stretches go to the kernel one by one; what is short is put together, as a
buffer of :class:`Ragged` groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from zfunc.buffers.copies import uploaded
from zfunc.kernels.dispatch import choose
from zfunc.kernels.onebit import onebit_bytes
from zfunc.kernels.onebit_llvm import mean_pieces, pack_pieces, unpack_pieces
from zfunc.trees.kinds import FORESEEN

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
    """One bit for a buffer in groups of these many elements: scales, and for each group its signs.

    Attributes:
        lengths: of the groups, in order.
        scaling: ``"mean"`` or ``"rms"``; see :class:`~zfunc.transforms.compression.onebit.OneBit`.
    """

    freezes: ClassVar[bool] = True
    lengths: tuple[int, ...]
    scaling: str = "mean"
    _there: dict[torch.device, tuple[Tensor, Tensor, Tensor]] = field(
        default_factory=dict, compare=False, repr=False
    )

    def of_momentum(self) -> Ragged:
        """Itself: it was made for what it packs."""
        return self

    def over(self, leaves: Leaves) -> Ragged:
        """Itself: it knows its groups."""
        return self

    def nbytes(self, n: int, dtype: torch.dtype) -> int:
        """Bytes of all groups, of errors in ``dtype``."""
        return len(self.lengths) * dtype.itemsize + sum(map(onebit_bytes, self.lengths))

    def pack_(self, x: Tensor, error: Tensor) -> Tensor:
        """``x + error`` as bytes; ``error`` becomes what they leave out."""
        return self._sent(error.add_(x))

    def mean_(self, received: Sequence[Tensor], error: Tensor) -> Tensor:
        """The mean of what came from all ranks, plus ``error``, as bytes; likewise."""
        for data in received:  # in this order, as kernels do
            scale, signs = self._read(data, error.dtype)
            error.addcmul_(signs, self._spread(scale / len(received)))
        return self._sent(error)

    def unpack(self, data: Tensor, n: int, dtype: torch.dtype) -> Tensor:
        """The numbers, of ``dtype``, that bytes stand for: ``[n]``, or one row each."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        scale, signs = self._read(data, wide)
        return signs.mul_(self._spread(scale)).to(dtype)

    def unpack_(self, data: Tensor, out: Tensor) -> None:
        """The same into the 1-D ``out``."""
        out.copy_(self.unpack(data, len(out), out.dtype))

    def _read(self, data: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Scales of the groups and signs of the elements."""
        cut = len(self.lengths) * dtype.itemsize
        scale = data[..., :cut].reshape(-1).clone().view(dtype).view(*data.shape[:-1], -1)
        signs = _signs(dtype, data.device)[data[..., cut:].int()].flatten(-2)
        return scale, signs.index_select(-1, self._on(data.device)[2])

    def _sent(self, c: Tensor) -> Tensor:
        """``c`` as bytes; what is left of it afterwards is what they lack."""
        sizes, _, places = self._on(c.device)
        parts = c.double()
        parts = parts.abs() if self.scaling == "mean" else parts.square()
        scale = torch.segment_reduce(parts, "sum", lengths=sizes, unsafe=True) / sizes
        scale = (scale if self.scaling == "mean" else scale.sqrt_()).to(c.dtype)
        room = 8 * sum(map(onebit_bytes, self.lengths))
        positive = torch.zeros(room, dtype=torch.uint8, device=c.device)
        positive.index_copy_(0, places, c.signbit().logical_not_().to(torch.uint8))
        c.sub_(self._spread(scale).copysign(c))
        bits = (positive.view(torch.int64) * GATHER).bitwise_right_shift_(56).to(torch.uint8)
        return torch.cat([scale.view(torch.uint8), bits])

    def _spread(self, scale: Tensor) -> Tensor:
        return scale.index_select(-1, self._on(scale.device)[1])

    def _on(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """How long groups are; of each element its group, and the place of its sign."""
        if device not in self._there:
            with torch.inference_mode(False):  # they outlive the mode that they are made in
                lengths = torch.tensor(self.lengths, dtype=torch.int64, device="cpu")
                groups = torch.arange(len(lengths), dtype=torch.int32, device="cpu")
                begun = (-(-lengths // 8) * 8 - lengths).cumsum(0).roll(1)
                begun[:1] = 0  # elements that are lacking before a group
                at = torch.arange(sum(self.lengths), device="cpu")
                spread = groups.repeat_interleave(lengths)
                rows = [lengths, spread, at + begun[spread]]
                if device.type == "cuda":  # the host does not wait for what is page-locked
                    rows = [x.pin_memory() for x in rows]
                made = [x for x in uploaded(rows, device) if x is not None]
            self._there[device] = made[0], made[1], made[2]
        return self._there[device]


@dataclass(frozen=True)
class Blocks:
    """One bit for a buffer of which every stretch has a codec of its own.

    Attributes:
        blocks: the stretches that travel together, and how; these cover the buffer.
        group: elements that share a scale in long stretches.
        scaling: see :class:`Ragged`.
    """

    freezes: ClassVar[bool] = True
    blocks: tuple[tuple[tuple[Span, ...], Codec], ...]
    group: int
    scaling: str = "mean"
    _tables: list[Tensor] = field(default_factory=list, compare=False, repr=False)

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
        if _by_machine("onebit_pack", x, error):
            data = x.new_empty(self.nbytes(len(x), error.dtype), dtype=torch.uint8)
            pack_pieces(x, error, data, self._table, self.scaling)
            return data
        out = []
        for spans, codec in self.blocks:
            mine = _taken(error, spans)
            out.append(codec.pack_(_taken(x, spans), mine))
            _put(error, spans, mine)
        return _joined(out, x)

    def mean_(self, received: Sequence[Tensor], error: Tensor) -> Tensor:
        """The mean of what came from all ranks, plus ``error``, as bytes; likewise."""
        rows, out = torch.stack(list(received)), []
        if _by_machine("onebit_mean", rows, error):
            data = torch.empty_like(rows[0])
            mean_pieces(rows, error, data, self._table, self.scaling)
            return data
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
        if wide == torch.float32 and _by_machine("onebit_unpack", data, data, out):
            unpack_pieces(data.contiguous(), out, self._table)
            return
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

    @property
    def _table(self) -> Tensor:
        """For machine code: where each group and what it is sent as are (float32)."""
        if not self._tables:
            rows: list[tuple[int, int, int, int]] = []
            for (spans, codec), (low, _) in zip(
                self.blocks, self._places(torch.float32), strict=True
            ):
                groups = list(_groups(spans, codec, self.group))
                bits = low + 4 * len(groups)
                for i, (a, b) in enumerate(groups):
                    rows.append((a, b, low + 4 * i, bits))
                    bits += onebit_bytes(b - a)
            rows.sort()
            with torch.inference_mode(False):  # it outlives the mode that it is made in
                self._tables.append(
                    torch.tensor(rows, dtype=torch.int64).view(-1, 4).t().contiguous()
                )
        return self._tables[0]


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
            pooled = False
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
    if len(long) == 1 and not short:
        return codec
    return Blocks(tuple(blocks), group, scaling)


def _groups(spans: Sequence[Span], codec: Codec, group: int) -> Iterator[Span]:
    """The groups of a block; none reaches from one stretch into another."""
    if not isinstance(codec, Ragged):
        ((start, stop),) = spans
        yield from ((a, min(a + group, stop)) for a in range(start, stop, group))
        return
    lengths = iter(codec.lengths)
    for start, stop in spans:
        while start < stop:
            size = next(lengths)
            yield start, start + size
            start += size


def _by_machine(kernel: str, *tensors: Tensor) -> bool:
    """Whether machine code of the CPU takes these, as it would take one group after the other."""
    if FORESEEN.get() or choose(kernel, *tensors).route != "llvm":
        return False
    return all(x.is_contiguous() for x in tensors)


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
