"""How the ranks of a pass agree on which collective comes next.

A rank may not use what its peers use: tokens go to other experts, a branch is taken on one rank
alone. Whoever lacks a unit takes part in its gather and in its reduction all the same, with
zeros. There are two ways to know when.

*Asking*: before each collective of a unit all ranks say what they need next. What is least in
the order of definition (backward: greatest) is done first, and by all; who needed it has it, the
others let it go at once. So a unit may come twice where ranks differ in order or in number, and
no rank ever holds more than what it uses and one layer besides.

*Following*: a pass in which all ranks did the same, with every unit, leaves a *script*. From then
on nobody asks. A rank that finds itself further on in the script than it should be does what
lies between in vain: it enters, releases and leaves units as its peers do, so that the same code
starts the same collectives in the same order. A rank in another order keeps some of what entered
in vain, and a gradient until it is its turn. What all ranks do beside the script is right, too,
and makes them ask once more; where one rank does it alone (it calls a layer more often, say) the
headers of collectives tell.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from zfunc.engine.hooks import Pending
from zfunc.engine.plans import PassPlan
from zfunc.engine.sources import Source
from zfunc.engine.unit_runs import AGAIN, ENTER, LEAVE, RELEASE, UnitRun
from zfunc.errors import DesyncError
from zfunc.layout.layout import Layout
from zfunc.ranks.comm import Group

__all__ = ["Accord", "Script"]

Key = tuple[int, int]
T = TypeVar("T")
MARK = "mark"  # a collective that is no unit's
GATHER, REDUCE = "gather", "reduce"
LAST = 1 << 40  # behind every layer
SPARE_BYTES = 1 << 26  # of units that entered in vain, kept for a rank that is in another order
Event = tuple[Any, ...]  # what happens, to which unit, and a flag
Ask = tuple[int, int, str, tuple[Any, ...], tuple[Key, ...]]


@dataclass(frozen=True)
class Script:
    """What every rank does in a pass.

    Attributes:
        layouts: of the trees that take part.
        events: ``(ENTER, unit, tracked)``, ``(AGAIN, unit, False)``, ``(RELEASE, unit, False)``,
            ``(LEAVE, unit, whether its gradient is sent)`` and ``(MARK, what, False)``.
        dtypes: of the flats of gradients that a unit sends, by unit.
    """

    layouts: tuple[Layout, ...]
    events: tuple[Event, ...]
    dtypes: Mapping[Key, tuple[str, ...]]

    def has(self, source: Source) -> bool:
        """Whether this tree takes part in its place."""
        if source.index >= len(self.layouts):
            return False
        mine = self.layouts[source.index]
        return mine is source.layout or mine == source.layout

    @property
    def plan(self) -> list[Key]:
        """The units in the order in which they enter."""
        return [event[1] for event in self.events if event[0] in (ENTER, AGAIN)]


class Members(Protocol):
    """What takes part in a pass (:class:`zfunc.engine.passes.Pass`)."""

    plan: PassPlan
    sources: list[Source]
    idle: set[Key]
    holding: bool


class Accord:
    """One rank's part in it, during one pass.

    Args:
        owner: the pass.
        ranks: who has to agree.
        within: of them, those among which units are gathered.
        script: what to follow; ranks ask if there is none.
        learns: whether a pass in which ranks asked is to leave a script.
    """

    def __init__(
        self, owner: Members, ranks: Group, within: Group, script: Script | None, learns: bool
    ) -> None:
        self.owner, self.ranks, self.learns = owner, ranks, learns
        self.groups = {ranks, within}
        self.asking = script is None
        events = () if script is None else script.events
        self.events = [event for event in events if event[1] not in owner.idle]
        self.dtypes: dict[Key, tuple[str, ...]] = {} if script is None else dict(script.dtypes)
        self.log: list[Event] = []
        self.script = script
        self.at = 0
        self.backward = self.strayed = self.beside = False
        self._busy = 0  # whether a collective that is issued is the pass's own
        self._hinted: list[tuple[UnitRun, Pending]] = []  # started ahead, and not used yet
        self._gone: set[Key] = set()  # units whose turn to leave is over
        self._deferred: list[UnitRun] = []  # whose gradients wait for their turn
        # Differentiable ones, in the order of the graph; None where one has left before its turn.
        self._entries: list[UnitRun | None] = []
        self._spare: list[UnitRun] = []
        for source in owner.sources:
            self.admit(source)
        self._world = ranks.world
        self._outer = self._world.gate
        if self._outer is not None:
            self._outer("a pass within")
        self._world.gate = self.gate

    def close(self) -> None:
        """The pass is over."""
        self._world.gate = self._outer

    # What the pass tells

    def happens(self, kind: str, run: UnitRun, flag: bool = False) -> bool:
        """An event of a unit; whether the script has it here."""
        if self._busy or not run.gathers:
            return True
        if self.asking:
            self.log.append((kind, run.key, flag))
            return True
        at = self._find(kind, run.key)
        self.beside = at < 0
        if at >= 0:
            if at > self.at:
                self._until(at)
            self.at, self.beside = at + 1, False
        return at >= 0

    def entered(self, run: UnitRun) -> None:
        """A unit has entered differentiably: its gradient may come."""
        run.awaited += 1
        self._entries.append(run)

    @property
    def height(self) -> int:
        """How many entries there are: what is computed now comes behind them in the graph."""
        return len(self._entries)

    def passed(self, height: int) -> None:
        """Backward has come to what was computed behind so many entries.

        Autograd goes back in the order in which nodes were made, so later entries whose gradients
        have not come have none.
        """
        while len(self._entries) > height:
            if (run := self._entries.pop()) is not None:
                run.awaited -= 1

    def leaves(self, run: UnitRun, due: bool) -> bool | None:
        """An entry's gradient has come, the last one if ``due``.

        Returns:
            Whether to send what has come; ``None`` if its turn comes later.

        Raises:
            DesyncError: its turn is over.
        """
        if self.owner.holding:
            return due
        places = range(len(self._entries) - 1, -1, -1)  # it is the last one, but for ends
        entry = next((i for i in places if self._entries[i] is run), None)
        if entry is not None and run.is_end:
            self._entries[entry] = None
            run.awaited -= 1
        elif entry is not None:
            self.passed(entry)
        if self.asking:
            self.log.append((LEAVE, run.key, due))
            return due
        at = self._find(LEAVE, run.key, due)
        if at >= 0:
            self._until(at)
            self.at, self.beside = at + 1, False
            return due
        if not due:
            return False
        if run.key in self._gone:
            raise DesyncError(
                f"the gradient of unit {run.info.name} came when its turn was over: rank "
                f"{self.ranks.rank} ran layers in another order than all ranks did before. Run "
                "them alike on all ranks."
            )
        if any(event[:2] == (LEAVE, run.key) for event in self.events[self.at :]):
            self._deferred.append(run)
            return None
        self.beside = True
        return due

    def catch_up(self) -> None:
        """Send gradients whose turn has come."""
        for run in tuple(self._deferred):
            at = self._find(LEAVE, run.key, True)
            if at >= 0:
                self._until(at + 1)

    def gate(self, what: str) -> None:
        """A collective that is not of this pass comes: all ranks must be there."""
        if not self.asking:
            at = self._find(MARK, what)
            if at >= 0:
                self._until(at)
                self.at = at + 1
            return
        if self.backward or self._sends:
            self._meet(what)
        self.log.append((MARK, what, False))

    def admit(self, source: Source) -> None:
        """One more tree takes part; if the script has another in its place, ranks ask."""
        source.gathers = source.sharded and source.cut and source.group in self.groups
        for run in source.made:
            run.gathers = source.gathers
        if self.script is not None and not self.script.has(source):
            self.asking, self.learns = True, False

    def approach(self, runs: Sequence[UnitRun]) -> None:
        """The units of a layer are about to enter together."""
        if self.asking:
            self.gather(runs)
        elif not self._busy:
            first = next((run for run in runs if run.entered is None), None)
            if first is not None:
                at = self._find(ENTER, first.key)
                self.beside = at < 0
                self._until(at)

    def turn(self) -> None:
        """Forward is done."""
        if self.asking and self._sends:
            self._meet("backward")
        self.backward = True

    # Collectives of units

    def gather(self, runs: Sequence[UnitRun]) -> None:
        """Start to let units enter, and with them what all ranks expect next."""
        if not self.asking:
            for run in runs:
                if self.beside and run.spare is not None:
                    continue
                self.strayed = self.strayed or self.beside
                self.own(run.begin)
            return
        if not runs:
            return  # a layer without parameters
        left = [run.key for run in runs if run.values is None and run.pending is None]
        self._hinted = [row for row in self._hinted if row[0] not in runs]
        hints = tuple(self.owner.plan.next_layer(runs))
        if left or hints:
            position = min(map(self._position, runs))
            self._ask(GATHER, left, position, hints)

    def reduce(self, run: UnitRun, flats: list[Tensor]) -> None:
        """Send a unit's gradient off."""
        self.dtypes[run.key] = tuple(str(x.dtype).removeprefix("torch.") for x in flats)
        if not self.asking:
            self.strayed = self.strayed or self.beside
            self.own(run.part, flats)
            return
        what = (*run.key, *self.dtypes[run.key])
        self._ask(REDUCE, [what], self._position(run), (), flats)

    def own(self, call: Callable[..., T], *args: Any) -> T:
        """Call what may start collectives that are the pass's own, which ask nobody."""
        self._busy += 1
        gate, self._world.gate = self._world.gate, None
        try:
            return call(*args)
        finally:
            self._busy -= 1
            self._world.gate = gate

    # Asking

    def _position(self, run: UnitRun) -> int:
        layer = run.info.layout.layer_of_unit[run.info.index]
        if not self.backward:
            return layer
        return LAST if layer < 0 else -layer

    def _meet(self, what: str) -> None:
        self._ask(MARK, [what], LAST, ())

    def _ask(
        self,
        kind: str,
        left: list[Any],
        position: int,
        hints: tuple[Key, ...],
        flats: list[Tensor] | None = None,
    ) -> None:
        """Take part in what ranks ask for until that has been done which this one asks for."""
        while True:
            mine: Ask = (int(self.backward), position, kind, tuple(left), hints)
            asked: list[Ask] = self.own(self._exchange, mine)
            wanted = [ask for ask in asked if ask[2] != MARK and ask[3]]
            alike = all(ask == mine for ask in asked)
            if wanted:
                chosen = min(wanted)
                for what in chosen[3]:
                    own = chosen[2] == kind and what in left
                    if own:
                        left.remove(what)
                    self._do(chosen[2], what, own, flats)
            elif kind == MARK and all(ask[2] == MARK for ask in asked):
                if not alike:
                    raise self._parted(asked)
                return
            if alike and hints:
                self._prefetch(hints)
            if kind != MARK and not left:
                return

    def _do(self, kind: str, what: tuple[Any, ...], own: bool, flats: list[Tensor] | None) -> None:
        run = self._run((what[0], what[1]))
        if kind == GATHER:
            self.own(run.begin if own else run.begin_in_vain)
        elif own and flats is not None:
            self.own(run.part, flats)
        else:
            self.dtypes[run.key] = what[2:]
            self.own(run.part, self._zeros(run))

    def _exchange(self, mine: Any) -> list[Any]:
        return self.ranks.exchange(mine, label="ask")

    def _run(self, key: Key) -> UnitRun:
        run = self.owner.plan.units[key].run
        if run is None:
            raise DesyncError(
                f"another rank uses a tree of parameters, number {key[0]} of its pass, that rank "
                f"{self.ranks.rank} has not let in. Let it enter on all ranks: pass it to the loss "
                "as an argument."
            )
        return run

    def _zeros(self, run: UnitRun) -> list[Tensor]:
        specs = [run.info.layout.flats[i] for i in run.info.trainable]
        names = self.dtypes.get(run.key)
        dtypes = [s.dtype for s in specs] if names is None else [getattr(torch, n) for n in names]
        rows = zip(specs, dtypes, strict=True)
        return [torch.zeros(s.length, dtype=d, device=run.device) for s, d in rows]

    def _prefetch(self, hints: Sequence[Key]) -> None:
        for run, pending in self._hinted:  # one layer ahead at most
            if run.pending is pending:
                pending.wait()
                run.pending = None
        self._hinted.clear()
        for key in hints:
            run = self._run(key)
            self.own(run.begin)
            if run.pending is not None:
                self._hinted.append((run, run.pending))

    def _parted(self, asked: Sequence[Ask]) -> DesyncError:
        where = "; ".join(f"rank {rank} is at {ask[3][0]}" for rank, ask in enumerate(asked))
        return DesyncError(
            f"the ranks of one pass come to different collectives: {where}. All ranks must call "
            "psum, pmean and their like in the same order: look for one in a branch that depends "
            "on the rank or on its data"
        )

    # Following

    def _find(self, kind: str, what: Any, flag: bool | None = None) -> int:
        """Where the script has an event that may be next on this rank; -1 if it has none.

        No mark may lie before it, and no unit leave before it whose gradient is still to come.
        """
        for i in range(self.at, len(self.events)):
            event = self.events[i]
            if event[0] == kind and event[1] == what and flag in (None, event[2]):
                return i
            if event[0] == MARK:
                return -1
            if event[0] == LEAVE and event[2] and self._run(event[1]).awaited > 0:
                return -1
        return -1

    def _until(self, stop: int) -> None:
        while self.at < stop:
            kind, key, flag = self.events[self.at]
            self.at += 1
            self.beside = False
            self.own(self._in_vain, kind, self._run(key), flag)

    def _in_vain(self, kind: str, run: UnitRun, flag: bool) -> None:
        if kind == ENTER:
            run.acquire()
            run.open += flag
        elif kind == AGAIN:
            run.acquire_again()
        elif kind == RELEASE:
            self._spared(run)
            run.release()
        else:
            run.left()
            if flag:
                self._gone.add(run.key)
                self._deferred = [other for other in self._deferred if other is not run]
                run.part(self._zeros(run) if run.partial is None else run.packed())

    def _spared(self, run: UnitRun) -> None:
        """Keep for a while what has entered in vain: this rank may only be in another order."""
        if self.backward or run.entered is not None or run.values is None:
            return
        run.spare = run.values
        self._spare.append(run)
        left = run.limit(SPARE_BYTES)
        for other in reversed(self._spare):
            left -= sum(x.nbytes for x in other.spare or ())
            if left < 0 and not other.spare_used:
                other.spare = None
        self._spare = [other for other in self._spare if other.spare is not None]

    # The end

    def rest(self) -> None:
        """What the script has and this rank has not done."""
        self.passed(0)
        if not self.asking:
            marks = (i for i, e in enumerate(self.events) if i >= self.at and e[0] == MARK)
            self._until(next(marks, len(self.events)))

    def end(self) -> Script | None:
        """The script of the next pass, or ``None`` where ranks are to ask in it."""
        if not self.asking:
            # Where units are left out on purpose a pass could not leave a script of all of them.
            return None if self.strayed and not self.owner.idle else self.script
        leaves = any(source.differentiated for source in self.owner.sources)
        if self._sends or (leaves and not self.owner.holding):
            self._meet("the end of a pass")
        if not self.learns:
            return None
        layouts = tuple(source.layout for source in self.owner.sources)
        made = Script(layouts, tuple(self._completed()), self._sent_as())
        text = repr((made.events, sorted(made.dtypes.items()))).encode()
        digest = hashlib.blake2b(text, digest_size=8).hexdigest()
        found = self.own(self._exchange, (digest, self._is_whole()))
        return made if all(row == (digest, True) for row in found) else None

    @property
    def _sends(self) -> bool:
        """Whether ranks take part when units enter."""
        return any(source.gathers for source in self.owner.sources)

    def _is_whole(self) -> bool:
        """Whether every unit that is gathered has entered, and none was left out on purpose."""
        entered = {event[1] for event in self.log if event[0] == ENTER}
        gathered = (source for source in self.owner.sources if source.gathers)
        keys = {(s.index, i) for s in gathered for i in range(len(s.layout.units))}
        return not self.owner.idle and keys <= entered

    def _sent_as(self) -> dict[Key, tuple[str, ...]]:
        """Dtypes of the gradients of all units; of one that had none, as of others like it."""
        known: dict[torch.dtype, str] = {}
        for key, names in self.dtypes.items():
            run = self._run(key)
            for i, name in zip(run.info.trainable, names, strict=True):
                known[run.info.layout.flats[i].dtype] = name
        out = dict(self.dtypes)
        for source in self.owner.sources:
            trainable = source.layout.trainable_of_units if source.differentiated else ()
            for unit, flats in enumerate(trainable):
                own = [source.layout.flats[i].dtype for i in flats]
                names = tuple(known.get(d, str(d).removeprefix("torch.")) for d in own)
                out.setdefault((source.index, unit), names)
        return out

    def _completed(self) -> list[Event]:
        """The log, and gradients of units that had none on any rank: one may have next time."""
        events = list(self.log)
        left = {event[1] for event in events if event[0] == LEAVE}
        for source in self.owner.sources:
            if not source.differentiated or self.owner.holding:
                continue
            for unit, trainable in enumerate(source.layout.trainable_of_units):
                key = source.index, unit
                if trainable and key not in left:
                    tracked = sum(e[0] == ENTER and e[1] == key and e[2] for e in events)
                    events += [(LEAVE, key, False)] * (tracked - 1)
                    events.append((LEAVE, key, True))
        return events
