"""What compression carries from step to step, and one call's view of it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from zfunc.buffers.readings import Reading
from zfunc.engine.entries import Entries
from zfunc.layout.layout import Layout
from zfunc.layout.merging import merged
from zfunc.layout.replicated import Replicated
from zfunc.layout.residuals import Residual, nothing_left_out, one_of
from zfunc.layout.sharded import Sharded, cut
from zfunc.ranks.axes import alone
from zfunc.ranks.comm import Group
from zfunc.trees import tree
from zfunc.trees.nodes import Placed
from zfunc.trees.squares import square_sums

__all__ = ["Call", "carried_on", "fresh", "is_finite", "layouts_of", "sums"]

TOGETHER = 1 << 23  # bytes of units that are compressed as one where all wait for backward
SCALARS = ("count", "form", "frozen", "skipped", "norm")

Carried = Mapping[str, Any]
Bases = Callable[[Layout, Sequence[Tensor | None]], dict[str, Tensor]]


def layouts_of(state: Any, names: Collection[str]) -> dict[str, tuple[Layout, list[Tensor | None]]]:
    """The params entries of a placed state: how each is cut, and a tensor for each flat."""
    entries, found = Entries(state), {}
    for name in names:
        entry = entries.get(name)
        if isinstance(entry, Sharded):
            found[name] = entry.layout, list(entry.flats)
        elif isinstance(entry, Replicated):
            if (flats := entry.flats) is None:
                rows, leaves = entry.layout.by_flat, entry.leaves
                found[name] = entry.layout, [leaves[row[0].index] if row else None for row in rows]
            else:
                found[name] = entry.layout, list(flats)
    return found


def fresh(
    state: Any,
    names: Collection[str],
    count: int,
    frozen: bool,
    serving: bool,
    bases: Bases | None = None,
    updating: bool = False,
    whole: bool = False,
) -> dict[str, Any]:
    """The carried state of a placed state before anything was compressed.

    Args:
        names: of its params entries.
        count: steps taken.
        frozen: whether compression begins with the next one.
        serving: whether ranks have errors as owners of a part too.
        bases: what a low-rank method starts from, given a layout and a tensor for each flat.
        updating: whether new parameters travel as compressed updates.
        whole: whether what is averaged waits for all of backward, so that small units travel
            together.
    """
    worker, started = {}, {}
    server: dict[str, Sharded] = {}
    updates: dict[str, Sharded] = {}
    for name, (layout, like) in layouts_of(state, names).items():
        if whole:
            layout, like = _together(layout, like)
        worker[name] = nothing_left_out(layout, like)
        if serving or updating:
            rank = worker[name].group.rank
            mine = server if serving else updates
            mine[name] = Sharded(layout, [_part(layout, i, rank, x) for i, x in enumerate(like)])
        if bases is not None:
            started[name] = bases(layout, like)
    return {
        "count": torch.tensor(count, dtype=torch.int64),
        "frozen": torch.tensor(frozen),
        "skipped": torch.zeros((), dtype=torch.int64),
        "norm": torch.zeros((), dtype=torch.float64),
        "worker": worker,
        "server": server,
        "bases": started,
        "updates": updates,
    }


def _together(layout: Layout, like: Sequence[Tensor | None]) -> tuple[Layout, list[Tensor | None]]:
    new = merged(layout, TOGETHER)
    tensors: dict[int, Tensor | None] = {}
    for old, made in zip(layout.slots, new.slots, strict=True):
        if old is not None and made is not None:
            tensors[made.flat] = like[old.flat]
    return new, [tensors.get(i) for i in range(len(new.flats))]


def _part(layout: Layout, flat: int, rank: int, like: Tensor | None) -> Tensor | None:
    spec = layout.flats[flat]
    if like is None or not spec.trainable:
        return None
    low, high = spec.bounds(rank)
    dtype = torch.float64 if spec.dtype == torch.float64 else torch.float32
    return torch.zeros(high - low, dtype=dtype, device=like.device)


def carried_on(begun: dict[str, Any], full: Carried) -> dict[str, Any]:
    """What an unplaced state carried, placed in this world.

    Errors as an owner become everybody's where nobody has such here: the mean is the same.

    Args:
        begun: what :func:`fresh` gives.
        full: what ``unplace`` left, its params-like trees placed by ``shard``.
    """
    out = {**begun, **{k: full[k].clone() for k in SCALARS if k in full}}
    for name, empty in begun["worker"].items():
        if name not in full["worker"]:
            continue
        mine = one_of(empty, full["worker"][name])
        if (served := full["server"].get(name)) is not None:
            plain = tree.full(served)
            if name in begun["server"]:
                zero = begun["server"][name]
                flats = cut(zero.layout, plain, zero.group.rank, copy=True).flats
                out["server"] = {**out["server"], name: Sharded(zero.layout, flats)}
            else:
                alike = tree.map(lambda x: x[None], plain)
                other = one_of(empty, alike)
                mine = mine.map(torch.add, [mine, other])
        out["worker"] = {**out["worker"], name: mine}
        if name in begun["updates"] and name in full.get("updates", {}):
            zero = begun["updates"][name]
            plain = tree.full(full["updates"][name])
            again = cut(zero.layout, plain, zero.group.rank, copy=True)
            out["updates"] = {**out["updates"], name: Sharded(zero.layout, again.flats)}
        known = full.get("bases", {}).get(name, {})
        if out["bases"].get(name, {}).keys() == known.keys() and known:
            out["bases"] = {**out["bases"], name: {k: q.clone() for k, q in known.items()}}
    return out


@dataclass
class Call:
    """One call of a step under compression, on one rank.

    Attributes:
        group: the ranks.
        codec: a ``Codec``, how numbers become bytes, or a ``PowerSGD``.
        stage: of ZeRO.
        active: whether this call compresses.
        carried: as it was before the call.
        worker, server: by params entry, the flats of the errors as they are now.
        updates: likewise, what parameters gathered as updates lack.
        joined: params entries that have been gathered so in this call.
        bases: by params entry and leaf path, what the next low-rank step starts from.
        used: which leaves' errors this call has used, as ``(entry, leaf index)``.
        squares: by params entry and leaf index, squares of the norms of this rank's gradients,
            where these are.
        finite: whether what this rank has seen is, likewise.
        skipped: whether some rank saw something else, so that the call changes nothing.
        doubts: by ``value_and_grad``, from 1, whether some rank saw so, not looked at yet.
        window: steps that second moments look back.
        norms: their 1-norm, of all that were noted.
        deciding: the ranks that skip a call together.
        sharing: those of them that share the work on one part of a batch.
    """

    group: Group
    codec: Any
    stage: int
    active: bool
    carried: Carried
    worker: dict[str, list[Tensor | None]] = field(default_factory=dict)
    server: dict[str, list[Tensor | None]] = field(default_factory=dict)
    bases: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    updates: dict[str, list[Tensor | None]] = field(default_factory=dict)
    joined: set[str] = field(default_factory=set)
    used: set[tuple[str, int]] = field(default_factory=set)
    squares: dict[str, dict[int, Tensor]] = field(default_factory=dict)
    finite: list[Tensor] = field(default_factory=list)
    skipped: bool = False
    doubts: dict[int, tuple[Tensor, Reading]] = field(default_factory=dict)
    window: int = 0
    norms: list[Reading] = field(default_factory=list)
    deciding: Group = field(default_factory=alone)
    sharing: Group = field(default_factory=alone)

    def __post_init__(self) -> None:
        self.layouts = {name: node.layout for name, node in self.carried["worker"].items()}
        self.restore()

    def restore(self) -> None:
        """Errors as they were before the call."""
        self.worker = {name: list(node.flats) for name, node in self.carried["worker"].items()}
        self.server = {name: list(node.flats) for name, node in self.carried["server"].items()}
        self.updates = {name: list(node.flats) for name, node in self.carried["updates"].items()}
        self.bases = {name: dict(row) for name, row in self.carried["bases"].items()}

    def see(self, name: str, layout: Layout, flats: Sequence[int], fulls: Sequence[Tensor]) -> None:
        """Note the norms of gradients that are about to leave, and whether they are finite."""
        row = self.squares.setdefault(name, {})
        for i, full in zip(flats, fulls, strict=True):
            views = zip(layout.by_flat[i], layout.views(i, full), strict=True)
            counted = {slot.index: layout.counts(slot.index, x) for slot, x in views}
            sums = square_sums(list(counted.values())).unbind()
            row.update(zip(counted, sums, strict=True))

    def agreed(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Whether some rank saw what is not finite (0-d, else 0), and the means of ``squares``
        over the ranks; collectives, for which no host waits."""
        names, size = sorted(self.squares), self.group.size
        zero = torch.zeros((), dtype=torch.float64, device=self._device())
        rows = [self._row(name, zero) for name in names]
        self.finite += [row.isfinite().all() for row in rows]
        fine = torch.stack(self.finite).all() if self.finite else zero == 0
        flag = fine.logical_not().double().view(1)
        together = torch.cat([flag, *(row.nan_to_num() for row in rows)])
        holders = next((layout.holders for layout in self.layouts.values()), self.group)
        holders.all_reduce(together, label="norms").wait()
        sizes = [len(self.layouts[name].slots) for name in names]
        means, bad = (together[1:] / size).split(sizes), together[0]
        if self.deciding.size > holders.size:
            bad = self.deciding.all_reduce(flag, label="finite").wait()[0]
        return bad, dict(zip(names, means, strict=True))

    def _device(self) -> torch.device:
        """Where gradients are, or, if there were none, errors."""
        seen = [*self.finite, *(x for row in self.squares.values() for x in row.values())]
        seen += [x for row in self.worker.values() for x in row if x is not None]
        return seen[0].device if seen else torch.device("cpu")

    def _row(self, name: str, zero: Tensor) -> Tensor:
        """The squares of all leaves of an entry as of a sum over the ranks, float64."""
        found = self.squares.pop(name)
        row = [found.get(i, zero) for i in range(len(self.layouts[name].slots))]
        if len({x.dtype for x in row}) > 1:
            row = [x.double() for x in row]
        return torch.stack(row).double().mul_(self.group.size**2)

    @property
    def norm(self) -> float:
        """The sum of ``norms``; waits for them."""
        return sum((reading.wait() for reading in self.norms), 0.0)

    def entry_of(self, layout: Layout) -> str | None:
        """The params entry that is cut so."""
        some = layout if self.stage else merged(layout, TOGETHER)
        for name, mine in self.layouts.items():
            if mine is some:
                return name
        return next((name for name, mine in self.layouts.items() if mine == some), None)

    def errors(self) -> dict[str, Any]:
        """Errors as nodes, for the next state."""

        def nodes(now: dict[str, list[Tensor | None]], kind: type[Placed]) -> dict[str, Any]:
            return {
                name: kind(self.layouts[name], flats)  # type: ignore[call-arg]
                for name, flats in now.items()
            }

        worker, server = nodes(self.worker, Residual), nodes(self.server, Sharded)
        updates = nodes(self.updates, Sharded)
        return {"worker": worker, "server": server, "bases": self.bases, "updates": updates}


def sums(values: Sequence[Tensor]) -> Tensor:
    """The sum of all elements of tensors that are not negative: 0-d, float64."""
    parts = [x.sum(dtype=torch.float64) for x in values]
    return functools.reduce(torch.add, parts) if parts else torch.zeros((), dtype=torch.float64)


def is_finite(x: Tensor) -> Tensor:
    """Whether there is no NaN and no infinity in a tensor, 0-d."""
    return torch.isfinite(torch.stack(torch.aminmax(x)) if x.numel() else x).all()
