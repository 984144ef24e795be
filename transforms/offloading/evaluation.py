"""Evaluating trees that are not in memory: every unit is read once, computed with, and written.

All that is wanted (new moments, new parameters, plain parameters to be filled) is
evaluated together. Units that are made of the same data form a *group*; groups
are taken one after the other, what the next one needs is read meanwhile, and what came out
is written behind. Within a group operations run in the order in which the program put them
off, so memory that is donated is overwritten when it would have been at once, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import optree
import torch
from torch import Tensor

from zfunc.buffers.copies import Descent, Upload, uploaded
from zfunc.buffers.numbers import Numbers
from zfunc.engine import context
from zfunc.layout.layout import Layout
from zfunc.layout.leaves import freeze
from zfunc.layout.sharded import Sharded, summed
from zfunc.ranks.comm import Group
from zfunc.trees.memory import Donation
from zfunc.trees.nodes import NAMESPACE, Lazy, Tree, held_in, register, spent
from zfunc.trees.squares import square_sum

__all__ = ["Evaluated", "Joined", "Present", "full", "gathered_up", "stream", "sums"]

Key = tuple[Any, int]  # what is evaluated (an op or a node), and of which unit
Take = Callable[[int, Sharded], None]
_HOST = torch.device("cpu")


class Expression(Protocol):
    """A tree that is not in memory (:class:`zfunc.transforms.offloading.streamed.Streamed`).

    Attributes:
        skeleton: structure and layout, on ``meta``.
        origin: what is evaluated, an operation on other expressions or the tree itself.
        index: which of the results of ``origin`` it is.
        device: where units are used; they are evaluated on the host.
    """

    skeleton: Sharded
    index: int
    device: torch.device

    @property
    def origin(self) -> Any: ...

    @property
    def layout(self) -> Layout: ...

    @property
    def group(self) -> Group: ...


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
    wanted: dict[Key, list[tuple[int, Take]]] = {}
    for node, take in targets:
        for unit in range(len(node.layout.units)):
            wanted.setdefault((node.origin, unit), []).append((node.index, take))
    groups = sorted(_groups(list(wanted)), key=_when)
    ahead: dict[Key, Any] = {}
    numbers = Numbers()
    for i, group in enumerate(groups):
        following = groups[i + 1] if i + 1 < len(groups) else []
        now = _begun(group, ahead)
        ahead = _begun(following, must=False)
        _run(group, now, wanted, numbers, final)


def _begun(
    group: list[Key], ahead: dict[Key, Any] | None = None, must: bool = True
) -> dict[Key, Any]:
    """What of a group is to be fetched, on its way; what is ``ahead`` already is not begun anew."""
    found = dict(ahead or {})
    for key in group:
        if key[0].reads and key not in found:
            reading = key[0].begin_read(key[1], must)
            if reading is not None:
                found[key] = reading
    far = [key for key in group if key[0].away]
    if far and far[0] not in found:
        found.update(_descending(far, group))
    return found


def _when(group: list[Key]) -> int:
    return max((origin.when(unit) for origin, unit in group), default=0)


@dataclass(frozen=True)
class Present:
    """What a state holds on a device: it is there as soon as the step begins.

    Attributes:
        event: of the stream that computes, at the beginning of the step.
        tensors: the identities of the state's tensors.
    """

    event: Any
    tensors: frozenset[int]

    @classmethod
    def of(cls, tensors: Iterable[Tensor], device: torch.device) -> Present:
        event = torch.cuda.current_stream(device).record_event()
        return cls(event, frozenset(id(x) for x in tensors if x.device.type == device.type))

    def covers(self, tensors: Iterable[Any]) -> bool:
        """Whether all of these are the state's own, and nothing has been written over them."""
        return all(x is None or (id(x) in self.tensors and not spent(x)) for x in tensors)


def _descending(far: list[Key], group: list[Key]) -> dict[Key, Any]:
    """Parts of trees on a device, on their way to the host together."""
    parts = {key: key[0].part(key[1]) for key in far}
    flats = [x for part in parts.values() for x in _data(part)]
    if not flats:
        return {key: _Descending(part, None) for key, part in parts.items()}
    running = context.current()
    there: Present | None = None if running is None else running.notes.get(Present)
    known = there is not None and all(there.covers(node.sources(unit)) for node, unit in far)
    landings = [(node.landing, unit) for node, unit in group if node.landing is not None]
    behind = [event for x, unit in landings if (event := x.events.get(unit)) is not None]
    node, unit = far[0]
    name = node.layout.units[unit].name
    descent = Descent(flats, name, behind, [there.event] if known and there else None)

    def arrived() -> dict[int, Tensor]:
        found = {id(x): y for x, y in zip(flats, descent.wait(), strict=True)}
        for landing, k in landings:
            landing.events.pop(k, None)  # this event comes behind it
        return found

    return {key: _Descending(part, arrived) for key, part in parts.items()}


class _Descending:
    """One part of a tree on its way to the host."""

    def __init__(self, part: Sharded, arrived: Callable[[], dict[int, Tensor]] | None) -> None:
        self._part, self._arrived = part, arrived

    def part(self) -> Sharded:
        """The part, in host memory."""
        found = {} if self._arrived is None else self._arrived()
        flats = [x if x is None else found.get(id(x), x) for x in self._part.flats]
        return Sharded(self._part.layout, [x if x is None else _at_home(x) for x in flats])


def _at_home(x: Tensor) -> Tensor:
    return x if x.device == _HOST else x.to(_HOST)  # an empty one


def _needs(key: Key) -> list[Key]:
    origin, unit = key
    if not origin.computed:
        return []
    rows = zip(origin.sources, origin.needs(unit), strict=True)
    return [(node.origin, k) for node, units in rows for k in units]


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
    wanted: dict[Key, list[tuple[int, Take]]],
    numbers: Numbers,
    final: bool = False,
) -> None:
    """Evaluate one group, and hand out what is wanted of it."""
    descended = {k: x.part() for k, x in readings.items() if isinstance(x, _Descending)}
    for node, unit in group:
        if node.landing is not None:
            node.landing.wait(unit)  # behind it much else is done: its parameters' way up, say
    last = {need: key for key in group for need in _needs(key)}
    made: dict[Key, Sequence[Sharded]] = {}
    read: set[int] = set()
    for key in group:
        origin, unit = key
        if not origin.computed:
            if key in descended:
                part = descended.pop(key)
                read |= _storages((part,))
            elif key in readings:
                part = origin.arrived(unit, readings.pop(key))
                read |= _storages((part,))
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


def on(part: Sharded, device: torch.device) -> Sharded:
    """A part whose tensors are on a device; those that are there already are not copied."""
    if device.type != "cpu":
        return Sharded(part.layout, uploaded(part.flats, device))
    return Sharded(part.layout, [x if x is None else x.to(device) for x in part.flats])


def _data(part: Sharded) -> list[Tensor]:
    return [x for x in part.flats if x is not None and x.numel()]


def _storages(parts: Sequence[Sharded]) -> set[int]:
    return {x.untyped_storage().data_ptr() for part in parts for x in _data(part)}


def _rows(key: Key) -> list[tuple[Expression, list[int]]]:
    return list(zip(key[0].sources, key[0].needs(key[1]), strict=True))


def _united(node: Expression, units: list[int], made: dict[Key, Sequence[Sharded]]) -> Sharded:
    """The parts of several units of one tree (mostly it is one) as one part."""
    parts = [made[node.origin, unit][node.index] for unit in units]
    if len(parts) == 1:
        return parts[0]
    flats: list[Tensor | None] = [None] * len(node.layout.flats)
    for part in parts:
        flats = [x if y is None else y for x, y in zip(flats, part.flats, strict=True)]
    return Sharded(node.layout, flats)


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


class Evaluated:
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
            _run(group, _begun(group), wanted, Numbers())
            flats = [out[0].flats[i] for i in self.node.layout.units[self.unit].flats]
            self._values = Upload([x for x in flats if x is not None], self.node.device).wait()
        return self._values

    def advance(self) -> None:
        """There is one round only."""


# What needs all units at once


def sums(node: Expression, f: Callable[[Tensor], Tensor]) -> Tree:
    """``Placed.sums``: the same additions as in memory, so the same bits."""
    partial: dict[int, Tensor] = {}
    dtypes: list[torch.dtype | None] = [None] * len(node.layout.flats)
    known = node.origin.squares if f is square_sum else None
    if known is not None:
        partial, dtypes = known()
    else:

        def take(unit: int, part: Sharded) -> None:
            partial.update(part.partial_sums(f))
            for i in node.layout.units[unit].flats:
                dtypes[i] = None if (x := part.flats[i]) is None else x.dtype

        stream([(node, take)])
    for i, flat in enumerate(node.skeleton.flats):
        if flat is not None and dtypes[i] is None:
            dtypes[i] = flat.dtype  # flats without leaves
    return summed(node.layout, node.group, partial, dtypes, node.device)


def full(node: Expression) -> Tree:
    """The plain tree, in memory of its own; a collective."""
    layout = node.layout
    leaves: list[Any] = [None] * len(layout.slots)

    def take(unit: int, part: Sharded) -> None:
        part = on(part, node.device)
        for i in layout.units[unit].flats:
            if (base := part._gather(i)) is not None:
                for slot, view in zip(layout.by_flat[i], layout.views(i, base), strict=True):
                    leaves[slot.index] = view
                    if not layout.flats[i].trainable:
                        freeze(view)

    stream([(node, take)])
    return optree.tree_unflatten(layout.spec, leaves)


def gathered_up(node: Expression) -> Sharded:
    """All units of this rank's part, in memory."""
    sink = Collected(node)
    stream([(node, sink)])
    return sink.result()


class Collected:
    """Takes the parts of a tree into memory."""

    def __init__(self, node: Expression, device: torch.device = _HOST) -> None:
        self._layout, self._device = node.layout, device
        self._flats: list[Tensor | None] = [
            x if x is None or x.numel() else torch.empty(0, dtype=x.dtype)
            for x in node.skeleton.flats
        ]

    def __call__(self, unit: int, part: Sharded) -> None:
        for i in self._layout.units[unit].flats:
            x = part.flats[i]
            if x is not None and self._device.type != "cpu":
                x = Upload([x], self._device).wait()[0]
            self._flats[i] = x if x is None or not _in_buffer(x) else x.clone()

    def result(self) -> Sharded:
        """The tree."""
        return Sharded(self._layout, self._flats)


def _in_buffer(x: Tensor) -> bool:
    """Whether a tensor may lie in a ring's buffer, which is not to be kept for long."""
    return x.numel() > 0 and not x.untyped_storage().resizable()


@dataclass(eq=False)
class Joined(Lazy):
    """A plain tree with the values of one that streams, all ranks' together: see ``join``.

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

    def __getitem__(self, entry: Any) -> Any:
        return self.force()[entry]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.force(), name)

    def __iter__(self) -> Any:
        return iter(self.force())

    def __len__(self) -> int:
        return len(self.force())

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        values: Any = [*args, kwargs or {}]
        values = optree.tree_map(lambda x: x, values, namespace=NAMESPACE)
        return func(*values[:-1], **values[-1])


register(Joined, lambda lazy: ((lazy.force(),), None, ("",)), lambda _, children: children[0])


def filling(lazy: Joined) -> Take:
    """What takes the parts for a plain tree."""
    lazy.made = lazy.params
    device = next((x.device for x in held_in(lazy.params)), _HOST)

    def take(unit: int, part: Sharded) -> None:
        flats: Sequence[Tensor | None] = part.flats
        if device.type == "cpu":
            flats = [x.clone() if x is not None and _in_buffer(x) else x for x in flats]
        lazy.made = on(Sharded(part.layout, flats), device).join(lazy.made)

    return take
