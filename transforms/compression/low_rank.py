r"""PowerSGD: gradient matrices as products of two thin ones.

For a matrix ``M``, ``[n, m]`` (a rank's gradient plus what was left out before), and the ``Q``,
``[m, r]``, of the step before:

.. math::
    P = \mathrm{orth}(\mathrm{mean}(M Q)) \qquad Q' = \mathrm{mean}(M^T P) \qquad
    \mathrm{mean}(M) \approx P Q'^T

Both means are plain all-reduces, of r (n + m) numbers. What the product lacks of a rank's ``M``
stays there as its error. Leaves with one dimension, and those for which it would not pay, are
averaged as they are. Every rank computes the same product from the same bits, so ranks agree on
one kind of machine; on different kinds the orthogonalisation may differ in the last bit.

Source: Vogels et al., PowerSGD: Practical Low-Rank Gradient Compression for Distributed
Optimization, 2019.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from zfunc.layout.dense import dense_of
from zfunc.layout.layout import Layout, Slot
from zfunc.layout.pool import pool
from zfunc.transforms.compression.error_feedback import Call

__all__ = ["LowRankMean", "LowRankPart", "PowerSGD", "bases_of"]


@dataclass(frozen=True)
class PowerSGD:
    """Products of rank ``rank``.

    Attributes:
        rank: columns of ``P`` and ``Q``; Vogels et al. use 1 to 4.
    """

    rank: int = 4

    freezes: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if type(self.rank) is not int or self.rank < 1:
            raise ValueError(f"rank={self.rank!r}: expected a positive number of columns.")

    def shape(self, slot: Slot) -> tuple[int, int] | None:
        """A leaf's rows and columns as a matrix; ``None`` if it travels as it is."""
        if len(slot.shape) < 2 or not slot.numel:
            return None
        rows, columns = slot.shape[0], math.prod(slot.shape[1:])
        pays = self.rank * (rows + columns) < slot.numel and self.rank <= min(rows, columns)
        return (rows, columns) if pays else None


def bases_of(codec: PowerSGD, layout: Layout, like: Sequence[Tensor | None]) -> dict[str, Tensor]:
    """A ``Q`` to begin with for each matrix, by leaf path, the same on all ranks.

    Args:
        like: for each flat a tensor on its device, or ``None``.
    """
    bases: dict[str, Tensor] = {}
    for slot in layout.present:
        spec, some, shape = layout.flats[slot.flat], like[slot.flat], codec.shape(slot)
        if shape is None or some is None or not spec.trainable or spec.whole:
            continue
        draw = torch.Generator().manual_seed(slot.index)
        start = torch.randn(shape[1], codec.rank, generator=draw, dtype=torch.float64, device="cpu")
        wide = torch.float64 if spec.dtype == torch.float64 else torch.float32
        bases[slot.path] = start.to(some.device, wide)
    return bases


class LowRankMean:
    """The mean over the ranks of the leaves of one flat, or of some of them.

    Args:
        values: this rank's leaves, by leaf index.
        error: the flat's dense buffer of errors, overwritten by the new ones.
        label: names the collectives.
    """

    def __init__(
        self, call: Call, name: str, flat: int, values: dict[int, Tensor], error: Tensor, label: str
    ) -> None:
        self.call, self.name, self.flat, self.label = call, name, flat, label
        layout = call.layouts[name]
        dense = dense_of(layout, flat)
        self.slots = [slot for slot in dense.slots if slot.index in values]
        self.shapes = [call.codec.shape(slot) for slot in self.slots]
        views = dict(zip((s.index for s in dense.slots), dense.views(error), strict=True))
        self.owed = [views[slot.index].add_(values[slot.index]) for slot in self.slots]
        some = next(iter(values.values()))
        self.dtype, self.device = some.dtype, some.device
        bases = call.bases[name]
        thin = [
            owed.reshape(-1) if shape is None else (owed.view(shape) @ bases[slot.path]).reshape(-1)
            for owed, shape, slot in zip(self.owed, self.shapes, self.slots, strict=True)
        ]
        self._sizes = [len(x) for x in thin]
        self._first = call.group.all_reduce(torch.cat(thin), label=label)
        self._second: Any = None

    def advance(self) -> None:
        """Wait for the first products and begin with the second."""
        if self._second is not None:
            return
        means = (self._first.wait() / self.call.group.size).split(self._sizes)
        rank = self.call.codec.rank
        self.left = [
            x if shape is None else torch.linalg.qr(x.view(-1, rank)).Q
            for x, shape in zip(means, self.shapes, strict=True)
        ]
        thin = [
            (owed.view(shape).T @ p).reshape(-1)
            for owed, p, shape in zip(self.owed, self.left, self.shapes, strict=True)
            if shape is not None
        ]
        together = torch.cat(thin) if thin else means[0].new_zeros(0)
        self._second = self.call.group.all_reduce(together, label=self.label)

    def finish(self) -> dict[int, Tensor]:
        """The means, by leaf index: views of one full flat."""
        self.advance()
        right, rank = self._second.wait() / self.call.group.size, self.call.codec.rank
        layout, at = self.call.layouts[self.name], 0
        full = pool().take(layout.flats[self.flat].length, self.dtype, self.device).zero_()
        out = {}
        for slot, owed, left, shape in zip(
            self.slots, self.owed, self.left, self.shapes, strict=True
        ):
            if shape is None:
                mean = left.view(slot.shape)
            else:
                q = right[at : at + shape[1] * rank].view(shape[1], rank)
                at += q.numel()
                mean = (left @ q.T).view(slot.shape)
                self.call.bases[self.name][slot.path] = q.clone()
            owed -= mean
            out[slot.index] = view = full[slot.start : slot.start + slot.numel].view(slot.shape)
            view.copy_(mean)
        self.full = full
        return out


class LowRankPart:
    """This rank's part of a flat's mean; ``wait`` gives it again and again."""

    def __init__(self, mean: LowRankMean, low: int, high: int) -> None:
        self._mean, self._low, self._high = mean, low, high
        self._part: Tensor | None = None

    def wait(self) -> Tensor:
        if self._part is None:
            self._mean.finish()
            self._part = self._mean.full[self._low : self._high].clone()
        return self._part
