"""``Residual``: a tree of which every rank has one of its own, as errors of compression are.

A pytree node whose leaves are this rank's dense buffers (see :mod:`zfunc.layout.dense`). In full,
each leaf has the ranks as its first dimension. On another number of ranks each starts with
the mean of all, which leaves the mean what it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import optree
import torch
from torch import Tensor

from zfunc.errors import PlacementError
from zfunc.layout.dense import dense_of
from zfunc.layout.layout import Layout
from zfunc.layout.pieces import leaves_of
from zfunc.layout.streaming import replicas
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
        ranks, leaves = self.group, self._leaves(list(self.flats))
        held = [i for i, leaf in enumerate(leaves) if leaf is not None]
        if held:
            totals = torch.stack([f(leaves[i]).double() for i in held])
            ranks.all_reduce(totals, label="sums of leaves").wait()
            for i, total in zip(held, totals, strict=True):
                leaves[i] = total.to(leaves[i].dtype)
        return optree.tree_unflatten(self.layout.spec, leaves)

    def full(self) -> Tree:
        """The plain tree of all ranks' tensors: leaves of shape ``[ranks, *shape]``."""
        ranks, rows = self.group, []
        for local in self.flats:
            if local is None or ranks.size == 1:
                rows.append(None if local is None else local.clone()[None])
                continue
            every = local.new_empty(ranks.size * len(local))
            ranks.all_gather(every, local, label="full errors").wait()
            rows.append(every.view(ranks.size, -1))
        return optree.tree_unflatten(self.layout.spec, self._leaves(rows))

    # To and from files: each rank writes and reads a row of its own

    def leaf_infos(self) -> list[LeafInfo]:
        ranks, infos = self.group.size, []
        for slot, keys in zip(self.layout.slots, self.layout.spec.paths(), strict=True):
            flat = None if slot is None else self.flats[slot.flat]
            if slot is None or flat is None:
                infos.append(LeafInfo(tuple(keys), None, None))
            else:
                infos.append(LeafInfo(tuple(keys), (ranks, *slot.shape), flat.dtype, each=True))
        return infos

    def spans(self) -> list[Span]:
        return [span for span, _ in self.streamed()]

    def streamed(self) -> Iterator[tuple[Span, Tensor]]:
        rank, same = self.group.rank, replicas(self.layout, whole=False)
        for i, flat in enumerate(self.flats):
            if flat is None:
                continue
            dense = dense_of(self.layout, i)
            for slot, start in zip(dense.slots, dense.starts, strict=True):
                span = Span(slot.index, rank * slot.numel, (rank + 1) * slot.numel, same)
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
        mine = None if zero is None else zero.clone()
        if mine is not None:
            dense = dense_of(empty.layout, i)
            for slot, view in zip(dense.slots, dense.views(mine), strict=True):
                rows = leaves[slot.index]
                if rows is not None:
                    view.copy_(rows[ranks.rank] if len(rows) == ranks.size else rows.mean(0))
        flats.append(mine)
    return Residual(empty.layout, flats)
