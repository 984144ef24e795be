"""The evaluation of trees that are not in memory, one unit at a time.

A unit is read, computed with and written once, whatever is wanted of it: new moments, new
parameters, plain parameters to be filled. Units that are made of the same data form a *group*.
Groups are evaluated one after the other. While one is computed, the next one is read and the one
before it is written. Within a group operations run in the order of the program, so donated memory
is overwritten when it would have been without offload.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import optree
import torch
from torch import Tensor

from zfunc.buffers.copies import Descent, Upload
from zfunc.buffers.numbers import Numbers
from zfunc.engine import context
from zfunc.layout.freezing import freeze
from zfunc.layout.layout import Layout
from zfunc.layout.readable import Readable
from zfunc.layout.sharded import Sharded, summed
from zfunc.ranks.comm import Group
from zfunc.transforms.offloading.parts import part_of, part_on, part_on_host
from zfunc.transforms.offloading.present import present
from zfunc.trees.kinds import kind
from zfunc.trees.memory import Donation
from zfunc.trees.nodes import Lazy, Tree, held_in, register

__all__ = [
    "Collected",
    "Evaluable",
    "Expression",
    "LazyJoin",
    "PendingUnit",
    "Take",
    "filling",
    "full",
    "gathered_up",
    "stream",
    "sums",
]

Key = tuple[Any, int]  # what is evaluated (an op or a node), and of which unit
Take = Callable[[int, Sharded], None]
Wanted = dict[Key, list[tuple[int, Take]]]
Sums = tuple[dict[int, Tensor], list[torch.dtype | None]]
_HOST = torch.device("cpu")


class Evaluable:
    """What is evaluated: data that lie somewhere, or an operation on other trees.

    Attributes:
        computed: whether it is an operation.
        serial: in which order the program made the operations.
        away: whether its data are in the memory of a device.
        landing: for gradients on their way to the host, what to wait for.
    """

    computed = False
    serial = 0
    away = False
    landing: Any = None

    def when(self, unit: int) -> int:
        """When a unit arrives, counted from 0: those that come first are evaluated first."""
        return 0

    def begin(self, unit: int, must: bool) -> Callable[[], Sharded] | None:
        """Start to read a unit. Returns what waits for it; None if nothing has to be read."""
        return None

    def known_sums(self, f: Callable[[Tensor], Tensor]) -> Sums | None:
        """The leaves' sums of ``f``, and the flats' dtypes, if they are known already."""
        return None


class Expression(Evaluable, Readable):
    """A tree that is not in memory (see :class:`zfunc.transforms.offloading.deferred.Streamed`).

    Attributes:
        skeleton: structure and layout, on ``meta``.
        index: which of the results of ``origin`` it is.
        device: where units are used; they are evaluated on the host.
    """

    skeleton: Sharded
    index = 0
    device: torch.device = _HOST

    @property
    def origin(self) -> Any:
        """What is evaluated: an operation, or the node itself."""
        return self

    @property
    def layout(self) -> Layout:  # type: ignore[override]
        return self.skeleton.layout

    @property
    def group(self) -> Group:
        """The ranks over which the flats are sharded."""
        return self.skeleton.group


def stream(targets: Sequence[tuple[Expression, Take]], final: bool = False) -> None:
    """Evaluate nodes together, unit by unit: ``take(unit, part)`` gets each part.

    Args:
        targets: what is wanted.
        final: whether the step has nothing left to do, so that memory which it donates may be
            overwritten; otherwise it may have to be read again.

    Raises:
        DonatedStateError: of a node that it needs, a later generation is on the disk.
        CheckpointError: what is read is damaged.
    """
    wanted: Wanted = {}
    for node, take in targets:
        for unit in range(len(node.layout.units)):
            wanted.setdefault((node.origin, unit), []).append((node.index, take))
    groups = sorted(_groups(list(wanted)), key=_when)
    ahead: dict[Key, Any] = {}
    numbers = Numbers()
    for i, group in enumerate(groups):
        following = groups[i + 1] if i + 1 < len(groups) else []
        now = _begun(group, wanted, ahead)
        ahead = _begun(following, wanted, must=False)
        _run(group, now, wanted, numbers, final)


def _begun(
    group: list[Key],
    wanted: Wanted,
    ahead: dict[Key, Any] | None = None,
    must: bool = True,
) -> dict[Key, Any]:
    """What waits for each unit of a group that is read; units in ``ahead`` are on their way."""
    found = dict(ahead or {})
    for key in group:
        if key not in found and (arrival := key[0].begin(key[1], must)) is not None:
            found[key] = arrival
    far = [key for key in group if key[0].away]
    if far and far[0] not in found:
        found.update(_descending(far, group, wanted))
    return found


def _when(group: list[Key]) -> int:
    return max((origin.when(unit) for origin, unit in group), default=0)


def _descending(far: list[Key], group: list[Key], wanted: Wanted) -> dict[Key, Any]:
    """Parts of trees on a device, on their way to the host together: what is computed with."""
    parts = {key: key[0].part(key[1]) for key in far}
    leaving = {key: _computed_with(key, part, group, wanted) for key, part in parts.items()}
    flats = {id(x): x for part in leaving.values() for x in _data(part)}
    there = present()
    copies: dict[Key, dict[int, Tensor]] | None = {key: {} for key in far}
    if flats:
        copies = None if there is None else there.taken(leaving)
    if copies is not None:
        return {k: partial(_at_home, parts[k], leaving[k], copies[k]) for k in far}
    landings = [(node.landing, unit) for node, unit in group if node.landing is not None]
    behind = [event for x, unit in landings if (event := x.events.get(unit)) is not None]
    node, unit = far[0]
    name = node.layout.units[unit].name
    after = None if there is None else there.since(flats.values())
    descent = Descent(list(flats.values()), name, behind, after)

    def arrived(key: Key) -> Sharded:
        found = dict(zip(flats, descent.wait(), strict=True))
        for landing, k in landings:
            landing.events.pop(k, None)  # this event comes behind it
        part = leaving[key]
        mine = {i: found[id(x)] for i, x in enumerate(part.flats) if id(x) in found}
        return _at_home(parts[key], part, mine)

    return {key: partial(arrived, key) for key in far}


def _computed_with(key: Key, part: Sharded, group: list[Key], wanted: Wanted) -> Sharded:
    """A part without the flats that nothing is computed with, mostly of frozen parameters: what
    has a value at the same place is made without them, or hands them on to their own device."""
    users = [other for other in group if key in _needs(other)]
    if key in wanted or any(op.skeleton.layout.flats != part.layout.flats for op, _ in users):
        return part
    rows = [op.skeleton.flats for op, k in users if not _handed_on((op, k), group, wanted)]
    used = {i: x for i, x in enumerate(part.flats) if any(row[i] is not None for row in rows)}
    return part_of(part.layout, used)


def _handed_on(key: Key, group: list[Key], wanted: Wanted) -> bool:
    """Whether what an operation takes over unchanged goes nowhere but to the device."""
    takers = [take for _, take in wanted.get(key, ())]
    up = all(isinstance(x, Collected) and x.goes_up for x in takers)
    return not key[0].computes and up and not any(key in _needs(other) for other in group)


def _at_home(part: Sharded, leaving: Sharded, copies: Mapping[int, Tensor]) -> Sharded:
    """A part with what leaves the device in host memory: copies of its flats, by number, and
    those without elements."""
    there = part_on_host(part_of(part.layout, {**dict(enumerate(leaving.flats)), **copies}))
    both = zip(there.flats, part.flats, strict=True)
    return Sharded(part.layout, [y if x is None else x for x, y in both])


def _rows(key: Key) -> list[tuple[Expression, list[int]]]:
    """The trees of which a unit is computed, each with the units of it that are needed."""
    origin, unit = key
    return list(zip(origin.sources, origin.needs(unit), strict=True)) if origin.computed else []


def _needs(key: Key) -> list[Key]:
    return [(node.origin, k) for node, units in _rows(key) for k in units]


def _groups(wanted: list[Key]) -> list[list[Key]]:
    """Everything to be evaluated, in groups that share nothing, each in order."""
    leader: dict[Key, Key] = {}

    def find(key: Key) -> Key:
        while leader[key] != key:
            leader[key] = leader[leader[key]]
            key = leader[key]
        return key

    todo = list(reversed(wanted))
    order: dict[Key, int] = {}
    while todo:
        key = todo.pop()
        if key in order:
            continue
        order[key] = len(order)
        leader.setdefault(key, key)
        for other in _needs(key):
            leader.setdefault(other, other)
            leader[find(other)] = find(key)
            todo.append(other)
    groups: dict[Key, list[Key]] = {}
    for key in order:
        groups.setdefault(find(key), []).append(key)
    return [sorted(group, key=lambda key: (key[0].serial, order[key])) for group in groups.values()]


def _run(
    group: list[Key],
    readings: dict[Key, Any],
    wanted: Wanted,
    numbers: Numbers,
    final: bool = False,
) -> None:
    """Evaluate one group, and hand out what is wanted of it."""
    if (away := next((key for key in readings if key[0].away), None)) is not None:
        readings[away]()  # waits for all that come from the device
    for node, unit in group:
        if node.landing is not None:
            node.landing.wait(unit)  # behind it much else is done: its parameters' way up, say
    last = {need: key for key in group for need in _needs(key)}
    made: dict[Key, Sequence[Sharded]] = {}
    read: set[int] = set()
    for key in group:
        origin, unit = key
        if not origin.computed:
            if key in readings:
                part = readings.pop(key)()
                read |= {
                    x.untyped_storage().data_ptr() for x in _data(part) if x.device.type == "cpu"
                }
            else:
                part = origin.part(unit)
            made[key] = (part,)
            continue
        spent = {need for need in _needs(key) if last[need] == key and need not in wanted}
        kept = {at for other in made if other not in spent for at in _storages(made[other])}
        inputs = [x for need in spent for part in made[need] for x in _data(part)]
        free = [x for x in inputs if x.untyped_storage().data_ptr() in read - kept]
        parts = [_united(node, units, made) for node, units in _rows(key)]
        far = any(node.device.type != "cpu" for node in origin.sources)
        with _donating(free, final), numbers if far else nullcontext():
            made[key] = origin.run(unit, parts)
        del parts, inputs, free
        for need in spent:
            del made[need]
    for key in group:
        for index, take in wanted.get(key, ()):
            take(key[1], made[key][index])
        made.pop(key, None)


def _data(part: Sharded) -> list[Tensor]:
    return [x for x in part.flats if x is not None and x.numel()]


def _storages(parts: Sequence[Sharded]) -> set[int]:
    return {x.untyped_storage().data_ptr() for part in parts for x in _data(part)}


def _united(node: Expression, units: list[int], made: dict[Key, Sequence[Sharded]]) -> Sharded:
    """The parts of several units of one tree (mostly it is one) as one part."""
    parts = [made[node.origin, unit][node.index] for unit in units]
    if len(parts) == 1:
        return parts[0]
    flats = {i: x for part in parts for i, x in enumerate(part.flats) if x is not None}
    return part_of(node.layout, flats)


@contextmanager
def _donating(tensors: Sequence[Tensor], final: bool) -> Iterator[None]:
    """Let what is computed inside the block write into memory that nobody reads again."""
    running = context.current()
    if running is None:
        yield
        return
    outer = running.donation
    mine = Donation.of(tensors)
    theirs = outer.owners if outer is not None and final else {}
    running.donation = Donation({**theirs, **mine.owners})
    try:
        yield
    finally:
        running.donation = outer


class PendingUnit:
    """One unit of a tree, evaluated when it is waited for; a ``Pending``."""

    def __init__(self, node: Expression, unit: int) -> None:
        self.node, self.unit = node, unit
        self._values: list[Tensor] | None = None

    def wait(self) -> list[Tensor]:
        if self._values is None:
            key = (self.node.origin, self.unit)
            out: list[Sharded] = []
            wanted = {key: [(self.node.index, lambda unit, part: out.append(part))]}
            (group,) = _groups([key])
            _run(group, _begun(group, wanted), wanted, Numbers())
            flats = [out[0].flats[i] for i in self.node.layout.units[self.unit].flats]
            self._values = Upload([x for x in flats if x is not None], self.node.device).wait()
        return self._values

    def advance(self) -> None:
        """There is one round only."""


# What needs all units at once


def sums(node: Expression, f: Callable[[Tensor], Tensor]) -> Tree:
    """``Placed.sums``: the same additions as in memory, so the same bits."""
    partial_sums: dict[int, Tensor] = {}
    dtypes: list[torch.dtype | None] = [None] * len(node.layout.flats)
    known = node.origin.known_sums(f)
    if known is not None:
        partial_sums, dtypes = known
    else:

        def take(unit: int, part: Sharded) -> None:
            partial_sums.update(part.partial_sums(f))
            for i in node.layout.units[unit].flats:
                dtypes[i] = None if (x := part.flats[i]) is None else x.dtype

        stream([(node, take)])
    for i, flat in enumerate(node.skeleton.flats):
        if flat is not None and dtypes[i] is None:
            dtypes[i] = flat.dtype  # flats without leaves
    return summed(node.layout, node.skeleton.summing, partial_sums, dtypes, node.device)


def full(node: Expression) -> Tree:
    """The plain tree, in memory of its own; a collective."""
    layout = node.layout
    leaves: list[Any] = [None] * len(layout.slots)

    def take(unit: int, part: Sharded) -> None:
        part = part_on(part, node.device)
        for i in layout.units[unit].flats:
            if (base := part._gather(i)) is not None:
                for slot, view in zip(layout.by_flat[i], layout.views(i, base), strict=True):
                    leaves[slot.index] = leaf = layout.complete(slot, view)
                    if not layout.flats[i].trainable:
                        freeze(leaf)

    stream([(node, take)])
    return optree.tree_unflatten(layout.spec, leaves)


def gathered_up(node: Expression) -> Sharded:
    """All units of this rank's part, in memory."""
    sink = Collected(node)
    stream([(node, sink)])
    return sink.result()


class Collected:
    """Takes the parts of a tree into memory: a device's, or the host's if none is named."""

    def __init__(self, node: Expression, device: torch.device | None = None) -> None:
        self._layout, self.device = node.layout, device
        self._flats: list[Tensor | None] = [
            x if x is None or x.numel() else torch.empty(0, dtype=x.dtype)
            for x in node.skeleton.flats
        ]

    @property
    def goes_up(self) -> bool:
        """Whether they go to a device that has memory of its own."""
        return self.device is not None and kind(self.device) != "cpu"

    def __call__(self, unit: int, part: Sharded) -> None:
        part = _to_keep(part, self.device)
        for i in self._layout.units[unit].flats:
            self._flats[i] = part.flats[i]

    def result(self) -> Sharded:
        """The tree."""
        return Sharded(self._layout, self._flats)


def _to_keep(part: Sharded, device: torch.device | None) -> Sharded:
    """A part on a device; a ring's buffer, in which it may lie, is not to be kept for long."""
    if device is not None and kind(device) != "cpu":
        return part_on(part, device)
    flats = [
        x.clone() if x is not None and x.numel() and not x.untyped_storage().resizable() else x
        for x in part.flats
    ]
    return Sharded(part.layout, flats)


@dataclass(eq=False)
class LazyJoin(Lazy):
    """A plain tree with the values of one that is streamed, all ranks' together: see ``join``.

    Attributes:
        node: where the values come from.
        params: the tree in whose place it stands; leaves that ``node`` lacks are passed on.
    """

    node: Expression
    params: Tree
    made: Tree = field(default=None)

    def force(self) -> Tree:
        if self.made is None:
            stream([(self.node, filling(self))])
        return self.made


register(LazyJoin, lambda lazy: ((lazy.force(),), None, ("",)), lambda _, children: children[0])


def filling(lazy: LazyJoin) -> Take:
    """What takes the parts for a plain tree."""
    lazy.made = lazy.params
    device = next((x.device for x in held_in(lazy.params)), _HOST)

    def take(unit: int, part: Sharded) -> None:
        lazy.made = _to_keep(part, device).join(lazy.made)

    return take
