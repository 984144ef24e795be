"""The order in which units are expected to enter a pass, and what is started ahead of its turn.

The order is that of the last pass. It is a hint and never a law: a pass that takes another path
gathers what it needs when it needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from zfunc.engine.unit_runs import UnitRun
from zfunc.layout.layout import Layout

__all__ = ["PassPlan", "there", "there_and_back"]

AHEAD_BYTES = 2**26  # of units that entered ahead, on a host: one is always there
Key = tuple[int, int]  # which tree of the pass, and which unit of it


class _Planned(NamedTuple):
    """A unit of the plan: its run, its layer, its bytes."""

    run: UnitRun | None
    layer: Key
    nbytes: int


class _Units(dict[Key, _Planned]):
    """By key, once asked for. One whose tree is not here has no run, and is a layer by itself."""

    def __init__(self) -> None:
        self.trees: list[tuple[Layout, Callable[[int], UnitRun]]] = []

    def __missing__(self, key: Key) -> _Planned:
        source, unit = key
        layout, run = self.trees[source] if source < len(self.trees) else (None, None)
        if layout is None or run is None or unit >= len(layout.units):
            return _Planned(None, key, 0)
        layer, nbytes = (source, layout.layer_of_unit[unit]), layout.unit_nbytes(unit)
        self[key] = found = _Planned(run(unit), layer, nbytes)
        return found


@dataclass
class PassPlan:
    """What is known of a pass before it runs, and how far it is.

    Attributes:
        order: the units as they entered last time.
        prefetch: how many layers ahead entry starts, as far as their bytes allow.
        room: bytes of units that may be there beyond these: entered ahead, or kept because they
            are needed again soon. What small units that are not merged may take together.
        units: those of all trees of the pass.
        events: the units as they have entered.
        cursor: how much of the order has come.
        most_ahead: bytes of units that were ahead at once.
    """

    order: Sequence[Key] = ()
    prefetch: int = 1
    room: int = 0
    units: _Units = field(default_factory=_Units)
    events: list[Key] = field(default_factory=list)
    cursor: int = 0
    most_ahead: int = 0

    def add(self, layout: Layout, run: Callable[[int], UnitRun]) -> None:
        """One more tree takes part, whose units ``run`` gives."""
        self.units.trees.append((layout, run))

    def clear(self) -> None:
        """Forget the trees."""
        self.units.clear()
        self.units.trees.clear()

    def record(self, key: Key, follows: bool) -> None:
        """Note that a unit enters, and, if the rank follows the plan, where in it that is."""
        self.events.append(key)
        for i in range(self.cursor, len(self.order)) if follows else ():
            if self.order[i] == key:
                self.cursor = i + 1
                return

    def look_ahead(self, now: UnitRun) -> None:
        """Start the entry of the layers that the plan has next, and reading those behind them.

        The other units of the layer that is entering are started, too.
        """
        if not self.order:
            return
        for key in self.order[self.cursor : self.cursor + self.prefetch + 1]:
            if run := self.units[key].run:
                run.fetch()
        ahead, layers = 0, {self.units[now.key].layer}
        met: set[Key] = set()
        for i, (key, planned, room) in enumerate(self._coming()):
            run, size = planned.run, planned.nbytes
            layers.add(planned.layer)
            on_disk = run is not None and run.node is not None  # its store reads ahead
            enough = i >= self.prefetch if on_disk else len(layers) > self.prefetch + 1
            if enough and (room < 0 or on_disk):
                return
            if run is None or run.values is not None or key in met or run.arriving:
                continue
            met.add(key)
            if ahead and run.is_much(ahead + size, AHEAD_BYTES):
                return
            run.start()
            ahead += size
            self.most_ahead = max(self.most_ahead, ahead)

    def _coming(self) -> Iterator[tuple[Key, _Planned, int]]:
        """The plan from here to the turn, with the room left behind each unit.

        The turn is a unit that comes again. There most of the activations are in memory, so no
        layer behind it is gathered ahead, unless there is room for all.
        """
        room, passed = self.room, set(self.order[self.cursor - 1 : self.cursor])
        for key in self.order[self.cursor :]:
            planned = self.units[key]
            room -= planned.nbytes
            if key in passed and room < 0:
                return
            passed.add(key)
            yield key, planned, room

    def next_layer(self, now: Sequence[UnitRun]) -> list[Key]:
        """The units that the plan has behind these, of one layer, if they are not there yet."""
        met = {self.units[run.key].layer for run in now}
        first: Key | None = None
        found: list[Key] = []
        size = 0
        for key, planned, _ in self._coming() if self.prefetch else ():
            run, layer = planned.run, planned.layer
            if layer in met or run is None:
                continue
            if first not in (None, layer):
                break
            first, size = layer, size + planned.nbytes
            if run.values is not None or run.pending is not None or run.node is not None:
                break
            if not run.gathers or (found and run.is_much(size, AHEAD_BYTES)):
                break
            if key not in found:
                found.append(key)
        return found

    def soon(self, run: UnitRun) -> bool:
        """Whether the plan has this unit next, or so soon that it and all until then have room.

        The units of its own layer come with it.
        """
        if self.cursor >= len(self.order):
            return False
        own = self.units[run.key]
        met, left = {run.key}, self.room - own.nbytes
        for key in self.order[self.cursor :]:
            if key == run.key:
                return True
            planned = self.units[key]
            if planned.layer == own.layer:
                continue
            if key not in met:
                met.add(key)
                left -= planned.nbytes
            if left < 0:
                return False
        return False

    @property
    def ends(self) -> bool:
        """Whether the plan has no unit to come."""
        return 0 < len(self.order) <= self.cursor


def there(layouts: Sequence[Layout]) -> list[Key]:
    """A plan before anything is recorded: the root, then all layers in order.

    The last one turns up again, since backward begins with it. What backward needs
    beyond that is not known yet, so nothing is fetched in vain.
    """
    root, layers = _in_order(layouts)
    return [*root, *layers, *layers[-1:]]


def there_and_back(layouts: Sequence[Layout]) -> list[Key]:
    """The whole way, if backward needs the weights of every layer."""
    root, layers = _in_order(layouts)
    return [*root, *layers, *reversed(layers)]


def _in_order(layouts: Sequence[Layout]) -> tuple[list[Key], list[Key]]:
    root: list[Key] = []
    layers: list[Key] = []
    for k, layout in enumerate(layouts):
        for i, layer in enumerate(layout.layer_of_unit):
            (root if layer < 0 else layers).append((k, i))
    return root, layers
