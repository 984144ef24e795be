"""``Residual``: a tree of which every rank has one of its own, as errors of compression are.

A pytree node whose leaves are this rank's dense buffers (see :mod:`zfunc.layout.dense`). In full,
each leaf has the ranks as its first dimension. On another number of ranks each starts with
the mean of all, which leaves the mean what it was.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import optree
import torch
from torch import Tensor

from zfunc.errors import PlacementError
from zfunc.layout.dense import dense_of
from zfunc.layout.layout import Layout
from zfunc.layout.pieces import leaves_of
from zfunc.layout.splits import Split
from zfunc.layout.streaming import replicas, rows
from zfunc.ranks.axes import group as group_of
from zfunc.ranks.comm import Group
from zfunc.trees.nodes import LeafInfo, Placed, Span, Tree, register

__all__ = ["Residual", "nothing_left_out", "one_of"]


class Residual(Placed):
    """This rank's own tree of the shape of a params tree.

    Attributes:
        layout: how the params tree is cut.
        flats: for each of the layout's flats a dense 1-D tensor, or ``None``.
    """

    def __init__(self, layout: Layout, flats: Sequence[Tensor | None]) -> None:
        self.layout = layout
        self.flats = tuple(flats)

    def __repr__(self) -> str:
        return f"Residual({sum(x.numel() for x in self.flats if x is not None)} elements)"

    @property
    def group(self) -> Group:
        """The ranks that have one each.

        Raises:
            PlacementError: the current world has another size.
        """
        ranks = group_of(self.layout.mesh, self.layout.axis)
        if ranks.size != self.layout.world:
            raise PlacementError(
                f"errors of compression were placed on {self.layout.world} ranks, the current "
                f"world has {ranks.size}. `unplace` the state there and `place` it here."
            )
        return ranks

    def map(self, f: Callable[..., Any], others: Sequence[Any]) -> Residual:
        rows = zip(*(node.flats for node in others), strict=True)
        return Residual(self.layout, [None if row[0] is None else f(*row) for row in rows])

    def held(self) -> Sequence[Tensor | None]:
        return self.flats

    def names(self) -> list[str]:
        return [slot.path for slot in self.layout.present if self.flats[slot.flat] is not None]

    @property
    def num_leaves(self) -> int:
        return len(self.layout.slots)

    def sums(self, f: Callable[[Tensor], Tensor]) -> Tree:
        leaves = self._leaves(list(self.flats))
        held = [i for i, leaf in enumerate(leaves) if leaf is not None]
        if held:
            totals = torch.stack([f(self.layout.counts(i, leaves[i])).double() for i in held])
            self.layout.holders.all_reduce(totals, label="sums of leaves").wait()
            for i, total in zip(held, totals, strict=True):
                leaves[i] = total.to(leaves[i].dtype)
        return optree.tree_unflatten(self.layout.spec, leaves)

    def full(self) -> Tree:
        """The plain tree of all ranks' tensors: leaves of shape ``[ranks, *shape]``."""
        ranks, every = self.group, []
        for local in self.flats:
            if local is None or ranks.size == 1:
                every.append(None if local is None else local.clone()[None])
                continue
            both = local.new_empty(ranks.size * len(local))
            ranks.all_gather(both, local, label="full errors").wait()
            every.append(both.view(ranks.size, -1))
        leaves = self._leaves(every)
        for slot in self.layout.present:
            if slot.split is not None and leaves[slot.index] is not None:
                leaves[slot.index] = _of_rows(slot.split).gathered(
                    leaves[slot.index], self.layout.parts, f"full {slot.path}"
                )
        return optree.tree_unflatten(self.layout.spec, leaves)

    # To and from files: each rank writes and reads a row of its own

    def leaf_infos(self) -> list[LeafInfo]:
        ranks, infos = self.group.size, []
        for slot, keys in zip(self.layout.slots, self.layout.spec.paths(), strict=True):
            flat = None if slot is None else self.flats[slot.flat]
            if slot is None or flat is None:
                infos.append(LeafInfo(tuple(keys), None, None))
            else:
                infos.append(LeafInfo(tuple(keys), (ranks, *slot.full), flat.dtype, each=True))
        return infos

    def spans(self) -> list[Span]:
        return [span for span, _ in self.streamed()]

    def streamed(self) -> Iterator[tuple[Span, Tensor]]:
        rank = self.group.rank
        same = {split: replicas(self.layout, False, split) for split in (False, True)}
        for i, flat in enumerate(self.flats):
            if flat is None:
                continue
            dense = dense_of(self.layout, i)
            for slot, start in zip(dense.slots, dense.starts, strict=True):
                first, part = rank * math.prod(slot.full), slot.split is not None
                its = rows(self.layout, slot, first)
                at = 0 if part else first
                span = Span(slot.index, at, at + slot.numel, same[part], its)
                yield span, flat[start : start + slot.numel]

    def refilled(self, fill: Callable[[Span, Tensor], None]) -> Residual:
        new = self.map(torch.zeros_like, [self])
        for span, out in new.streamed():
            fill(span, out)
        return new

    def _leaves(self, flats: Sequence[Tensor | None]) -> list[Any]:
        leaves: list[Any] = [None] * len(self.layout.slots)
        for i, flat in enumerate(flats):
            if flat is not None:
                for slot in self.layout.by_flat[i]:  # also those without elements
                    leaves[slot.index] = flat.new_zeros(*flat.shape[:-1], *slot.shape)
                dense = dense_of(self.layout, i)
                for slot, view in zip(dense.slots, dense.views(flat), strict=True):
                    leaves[slot.index] = view
        return leaves


register(
    Residual,
    lambda node: (node.flats, node.layout, tuple(range(len(node.flats)))),
    lambda layout, flats: Residual(layout, flats),
)


def _of_rows(split: Split) -> Split:
    """The same split of leaves that have a row for each rank."""
    return replace(split, dim=split.dim + 1)


def nothing_left_out(layout: Layout, like: Sequence[Tensor | None]) -> Residual:
    """Zeros for every flat that is trained and cut.

    Args:
        like: for each flat a tensor on its device, or ``None``.
    """
    flats: list[Tensor | None] = []
    for i, spec in enumerate(layout.flats):
        some = like[i]
        if not spec.trainable or spec.whole or some is None:
            flats.append(None)
        else:
            dtype = torch.float64 if spec.dtype == torch.float64 else torch.float32
            flats.append(torch.zeros(dense_of(layout, i).length, dtype=dtype, device=some.device))
    return Residual(layout, flats)


def one_of(empty: Residual, every: Tree) -> Residual:
    """This rank's errors out of those of all ranks of a world, perhaps of another size.

    Args:
        empty: errors of this world that are zero.
        every: plain tree of leaves of shape ``[ranks, *shape]``; ``None`` where there are none.
    """
    leaves = leaves_of(empty.layout, every)
    ranks, flats = empty.group, []
    for i, zero in enumerate(empty.flats):
        new = None if zero is None else zero.clone()
        if new is not None:
            dense = dense_of(empty.layout, i)
            for slot, view in zip(dense.slots, dense.views(new), strict=True):
                its = leaves[slot.index]
                if its is not None:
                    mine = its[ranks.rank] if len(its) == ranks.size else its.mean(0)
                    view.copy_(empty.layout.own(slot, mine))
        flats.append(new)
    return Residual(empty.layout, flats)
