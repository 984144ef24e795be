"""How compressed means are taken: of a whole tree at once, or of units as they leave."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import optree
import torch
from torch import Tensor

from zfunc.engine.unit_info import UnitInfo, Waiting
from zfunc.layout.dense import Dense, dense_of, spread_part, squeezed_part
from zfunc.layout.layout import Layout, Slot
from zfunc.layout.pool import empty, pool
from zfunc.layout.replicated import packed
from zfunc.layout.sharded import Sharded
from zfunc.optim import Moved
from zfunc.transforms.compression.error_feedback import Call
from zfunc.transforms.compression.estimated import Estimated
from zfunc.transforms.compression.exchange import Codec, Gathered, Scattered, codecs_of
from zfunc.transforms.compression.low_rank import LowRankMean, LowRankPart, PowerSGD
from zfunc.trees.memory import reuse
from zfunc.trees.nodes import NAMESPACE, Placed, Tree
from zfunc.trees.unreduced import Unreduced

__all__ = ["averaged", "estimated", "scattered", "summed"]


def averaged(call: Call, tree: Tree, momentum: bool = False) -> Tree:
    """The tree with means in place of ``Unreduced`` nodes; a collective if there are any.

    All first phases are under way before the first second one begins. Leaves without errors
    of their own (those of no params entry, or averaged in this call already) go plainly.
    """
    if isinstance(tree, Moved):
        return tree
    nodes, spec = optree.tree_flatten(
        tree,
        is_leaf=lambda x: isinstance(x, Placed),
        none_is_leaf=True,
        namespace=NAMESPACE,
    )
    out: list[Any] = [x.value if isinstance(x, Unreduced) and x.done else x for x in nodes]
    rows: dict[str, dict[int, int]] = {}
    others = []
    for i, node in enumerate(nodes):
        if not isinstance(node, Unreduced) or node.done:
            continue
        home = node.home
        name = None if home is None else call.entry_of(home[0])
        if home is not None and has_copies([home[0].slots[home[1]]]):
            name = None
        if name is None or home is None or (name, home[1]) in call.used:
            others.append(i)
        else:
            rows.setdefault(name, {})[home[1]] = i
            call.used.add((name, home[1]))
    means = [
        mean
        for name, row in rows.items()
        for mean in _begun(call, name, {leaf: nodes[i].value for leaf, i in row.items()}, momentum)
    ]
    for mean in means:
        mean.advance()
    for mean in means:
        for leaf, value in mean.finish().items():
            out[rows[mean.name][leaf]] = value
    for i, value in zip(others, _plainly(call, [nodes[i].value for i in others]), strict=True):
        out[i] = value
    out = [x.value if isinstance(x, Unreduced) else x for x in out]  # those without elements
    return _lying_as(nodes, spec, optree.tree_unflatten(spec, out))


def _lying_as(nodes: Sequence[Any], spec: optree.PyTreeSpec, new: Tree) -> Tree:
    """A plain tree in the layout of the params to which the leaves belong, where these are split:
    norms are those of full leaves. A list of the leaves stays one."""
    homes = [node.home for node in nodes if isinstance(node, Unreduced)]
    layout = next((home[0] for home in homes if home is not None), None)
    if layout is None or layout.along is None or spec != layout.spec:
        return new
    whose = [(layout, slot.index) for slot in layout.present]
    return packed(layout, new) if homes == whose else new


def _begun(
    call: Call, name: str, values: dict[int, Tensor], momentum: bool
) -> Sequence[_Mean | LowRankMean]:
    """The means of one params entry's flats, or of what there is of them, under way."""
    layout = call.layouts[name]
    if isinstance(call.codec, PowerSGD):
        return [
            _low_rank(call, name, i, mine)
            for i in range(len(layout.flats))
            if (mine := _values_in(layout, i, values)) and call.worker[name][i] is not None
        ]
    part = _restricted(layout, frozenset(values))
    codec = call.codec.of_momentum() if momentum else call.codec
    return [
        _Mean(call, name, part, i, values, codec)
        for i in range(len(part.flats))
        if dense_of(part, i).length and part.flats[i].trainable
    ]


def _values_in(layout: Layout, flat: int, values: dict[int, Tensor]) -> dict[int, Tensor]:
    slots = dense_of(layout, flat).slots
    return {slot.index: values[slot.index] for slot in slots if slot.index in values}


def _low_rank(call: Call, name: str, flat: int, values: dict[int, Tensor]) -> LowRankMean:
    layout, old = call.layouts[name], call.worker[name][flat]
    assert old is not None
    call.worker[name][flat] = error = reuse(old) if call.stage == 0 else old.clone()
    label = f"compress {layout.units[layout.unit_of_flat[flat]].name}"
    return LowRankMean(call, name, flat, values, error, label)


def _restricted(layout: Layout, leaves: frozenset[int]) -> Layout:
    trained = {slot.index for slot in layout.present if layout.flats[slot.flat].trainable}
    if leaves >= trained:
        return layout
    key = ("restricted", leaves)
    if key not in layout._memo:
        layout._memo[key] = layout.select(leaves.__contains__)
    return layout._memo[key]


class _Mean:
    """The compressed mean of one flat."""

    def __init__(
        self,
        call: Call,
        name: str,
        part: Layout,
        flat: int,
        values: dict[int, Tensor],
        codec: Codec,
    ) -> None:
        self.call, self.name, self.part, self.flat = call, name, part, flat
        self.dense = dense_of(part, flat)
        self.whole = dense_of(call.layouts[name], flat)
        self.label = f"compress {part.units[part.unit_of_flat[flat]].name}"
        x = self._buffer(values)
        worker = call.worker[name][flat]
        assert worker is not None
        self.given = x.dtype
        if x.dtype == torch.float64:  # of masters, whose parameters may be in 16 bits
            x = x.to(worker.dtype)
        self.dtype, self.device = x.dtype, x.device
        call.worker[name][flat] = worker = reuse(worker)
        error = worker
        if self.dense != self.whole:
            error = torch.cat([worker[a:b] for a, b in self._places()])
        codecs = codecs_of(codec, part, flat)
        self.first = Scattered(call.group, codecs, x, self.dense.cuts, error, self.label)
        if error is not worker:
            for (a, b), mine in zip(self._places(), self._split(error), strict=True):
                worker[a:b] = mine

    def _buffer(self, values: dict[int, Tensor]) -> Tensor:
        row = [values[slot.index] for slot in self.part.by_flat[self.flat]]
        full = self.part.buffer_under(self.flat, row)
        if full is not None and self.dense.gapless:
            return self.dense.squeezed(full)
        return torch.cat([values[slot.index].reshape(-1) for slot in self.dense.slots])

    def _places(self) -> list[tuple[int, int]]:
        """Where in the whole flat's dense buffer the leaves of this part are."""
        starts = dict(zip((s.index for s in self.whole.slots), self.whole.starts, strict=True))
        return [(starts[s.index], starts[s.index] + s.numel) for s in self.dense.slots]

    def _split(self, dense: Tensor) -> tuple[Tensor, ...]:
        return dense.split([slot.numel for slot in self.dense.slots])

    def advance(self) -> None:
        """Wait for the first phase and begin the second."""
        call, rank = self.call, self.call.group.rank
        server = call.server[self.name][self.flat]
        assert server is not None
        layout = call.layouts[self.name]
        call.server[self.name][self.flat] = server = reuse(server)
        if self.dense == self.whole:
            error = squeezed_part(layout, self.flat, rank, server)
            self.second = Gathered(self.first, error, self.label)
            if error.data_ptr() != server.data_ptr():
                server.copy_(spread_part(layout, self.flat, rank, error))
            return
        mine = {slot.index for slot in self.dense.slots}
        pieces = [(a, b) for s, a, b, _ in layout.segments(self.flat, rank) if s.index in mine]
        error = torch.cat([server[:0], *(server[a:b] for a, b in pieces)])
        self.second = Gathered(self.first, error, self.label)
        for (a, b), new in zip(pieces, error.split([b - a for a, b in pieces]), strict=True):
            server[a:b] = new

    def finish(self) -> dict[int, Tensor]:
        """The means of the leaves, by index."""
        length = self.part.flats[self.flat].length
        full = pool().take(length, self.dtype, self.device)
        if self.dense.gapless:
            self.second.write(full[: self.dense.length])
        else:
            dense = empty(self.dense.length, self.dtype, self.device)
            self.second.write(dense)
            self.dense.spread(dense, full)
        return {
            slot.index: full.narrow(0, slot.start, slot.numel).view(slot.shape).to(self.given)
            for slot in self.dense.slots
        }


def has_copies(slots: Iterable[Slot | None]) -> bool:
    """Whether ranks that split layers have some elements of these leaves several times.

    Each would round them beside other ones, and copies would drift apart: they go plainly.
    """
    return any(s is not None and s.split is not None and s.split.shared for s in slots)


def _plainly(call: Call, values: Sequence[Tensor]) -> list[Tensor]:
    """Means of tensors without errors, reduced one by one."""
    sums = [call.group.all_reduce(x.detach().clone().contiguous(), label="reduce") for x in values]
    return [handle.wait() / call.group.size for handle in sums]


class _Part:
    """This rank's part of one flat's compressed mean, when it has come."""

    def __init__(self, first: Scattered, layout: Layout, flat: int, rank: int) -> None:
        self._first, self._layout, self._flat, self._rank = first, layout, flat, rank

    def wait(self) -> Tensor:
        return spread_part(self._layout, self._flat, self._rank, self._first.wait())


def summed(unit: UnitInfo, flat: int, full: Tensor) -> Tensor:
    """A flat's gradient as it would be if the ranks summed: units leave as parts of a mean."""
    size = unit.group.size
    return full * size if unit.borrowed(flat, full) else full.mul_(size)


def scattered(call: Call, unit: UnitInfo, name: str, fulls: Sequence[Tensor]) -> Waiting:
    """Send a unit's gradients to their owners; what each rank gets is its part of the mean.

    Errors get memory of their own: whether this step counts is known only when all units
    have left.
    """
    parts: list[Any] = []
    for i, full in zip(unit.trainable, fulls, strict=True):
        if unit.layout.flats[i].whole:
            own = full.clone() if unit.borrowed(i, full) else full
            parts.append(unit.group.all_reduce(own, label=f"reduce {unit.name}"))
            continue
        dense: Dense = dense_of(unit.layout, i)
        if has_copies(unit.layout.by_flat[i]):
            low, high = unit.layout.flats[i].bounds(unit.group.rank)
            own, cuts = full.new_empty(high - low), unit.layout.flats[i].cuts
            label = f"reduce {unit.name}"
            parts.append(unit.group.reduce_scatter(full, cuts=cuts, out=own, label=label))
            continue
        if isinstance(call.codec, PowerSGD):
            if not dense.length:  # nothing but leaves without elements
                low, high = unit.layout.flats[i].bounds(unit.group.rank)
                parts.append(full[low:high])
                continue
            views = unit.layout.views(i, summed(unit, i, full))
            values = dict(zip((s.index for s in unit.layout.by_flat[i]), views, strict=True))
            mean = _low_rank(call, name, i, _values_in(unit.layout, i, values))
            parts.append(LowRankPart(mean, *unit.layout.flats[i].bounds(unit.group.rank)))
            continue
        old = call.worker[name][i]
        assert old is not None
        call.worker[name][i] = error = old.clone()
        x = dense.squeezed(summed(unit, i, full))
        label = f"compress {unit.name}"
        codecs = codecs_of(call.codec, unit.layout, i)
        first = Scattered(unit.group, codecs, x, dense.cuts, error, label)
        parts.append(_Part(first, unit.layout, i, unit.group.rank))
    return Waiting(parts)


def estimated(call: Call, grads: Tree, squares: Mapping[str, Tensor]) -> Tree:
    """Cut gradients with the norms that were before compression."""

    def known(node: Any) -> Any:
        if not isinstance(node, Sharded):
            return node
        name = call.entry_of(node.layout)
        if name is None or name not in squares:
            return node
        return Estimated(node.layout, node.flats, squares[name])

    return optree.tree_map(
        known,
        grads,
        is_leaf=lambda node: isinstance(node, Placed),
        none_is_leaf=True,
        namespace=NAMESPACE,
    )
