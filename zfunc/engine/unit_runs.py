"""One unit of parameters during one pass: how it enters, is saved, and leaves.

Nothing keeps gathered memory alive after a layer but autograd, and there a saved-tensor
hook puts a :class:`Ticket` in the place of every tensor that lies in that memory. Backward redeems
tickets by letting the unit enter once more. Nothing calls a global hook: autograd Functions carry
their unit with them, so that backward may run on a thread of its own (as it does on a GPU).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from zfunc.engine.context import RECOMPUTED
from zfunc.engine.hooks import Pending
from zfunc.engine.unit_info import CommonLeaves, OwnHooks, Ready, UnitInfo, add_into
from zfunc.engine.versions import check, versions
from zfunc.errors import PlacementError
from zfunc.layout.pool import pool
from zfunc.layout.replicated import Replicated
from zfunc.trees.kinds import kind

__all__ = [
    "AGAIN",
    "ENTER",
    "LEAVE",
    "RELEASE",
    "WEIGHTS_UNREAD",
    "Running",
    "Ticket",
    "UnitRun",
    "dense",
]

WEIGHTS_UNREAD: ContextVar[bool] = ContextVar("zfunc_weights_unread", default=False)
"""Whether a node that asks for a weight that it has saved will not read it: a product of matrices
whose gradient of the weight is computed, for which it takes the activation alone, asks for both. It
may be given anything of the weight's shape."""

ENTER, AGAIN, RELEASE, LEAVE = "enter", "again", "release", "leave"  # what happens to a unit
BYTES_ON_A_GPU = 2**30  # that may be under way at once


class Running(Protocol):
    """A pass as its trees and units see it (:class:`zfunc.engine.passes.Pass`).

    Attributes:
        plan: in which order units are expected (:class:`zfunc.engine.plans.PassPlan`).
        accord: how the ranks agree on what comes next (:class:`zfunc.engine.accord.Accord`).
        running: the context of the call, if there is one.
        leave: the ``leave`` hooks.
        ends: leaves that hand over their gradients by themselves, and their hooks of backward.
        holding: whether gradients are kept back for a later pass.
        waiting: gradients that an earlier pass kept back for this one.
        take: the sum of a unit to which its gradients are added on the spot, if there is one.
        adds: whether autograd itself may add them.
        lingering: units that are kept for a neighbour's sake.
    """

    plan: Any
    accord: Any
    running: Any
    leave: Sequence[Callable[..., Any]]
    ends: list[tuple[Tensor, Callable[[Tensor], Tensor | None]]]
    holding: bool
    waiting: Mapping[tuple[int, int], Any]
    take: Callable[[UnitInfo], list[Tensor] | None] | None
    adds: bool
    lingering: list[UnitRun]

    @property
    def tick(self) -> Tensor:
        """What backward runs towards, beside ``ends``."""

    def close_others(self, runs: Sequence[UnitRun]) -> None:
        """Release units of earlier layers that were kept."""

    def drop_transient(self, run: UnitRun) -> None:
        """Let go of what backward regathered for a unit without gradients."""

    def sent(self, run: UnitRun, value: Pending, nbytes: int) -> None:
        """Remember a gradient on its way."""


@dataclass(eq=False, repr=False)
class UnitRun:
    """One unit during one pass.

    Attributes:
        owner: the pass.
        info: what hooks are told of the unit.
        stored: its flats, or its leaves, as they are in memory.
        hooks: what it goes through when it enters.
        differentiated: whether gradients of its tree are asked for.
        sharded: whether its tree is one that is gathered.
        flat: whether flats enter, and not leaves.
        node: what reads the unit, if it is not in memory.
        box: what waits for its flats, if they may be on their way.
        name_of: from a leaf's path here to that in all params.
        values: what entered, as the last hook made it.
        seen: what entered when it was looked at last, and how often that had been written to.
        entered: the leaves by leaf index; ``tracked``: whether they are differentiable.
        pending: the entry under way; ``fetched``: what is on its way from the disk.
        foreign: which value lies in which memory that is not the state's.
        open: entries whose gradients have not left; ``awaited``: those of them that may still come.
        spare: values from before its turn, see ``Accord``.
        aside: whether they are what entered; ``spare_used``: whether they have ever been.
        gathers: whether the ranks that agree on what comes next all take part when it enters.
        touched: whether backward has it.
        served: its layers that have run since it entered.
        partial: gradients that have come, by trainable leaf.
        adding: of each entry whose gradients autograd adds to sums the trainable leaves.
        dtypes: those in which they entered.
        common: what such entries of other passes have entered, if all have the same values.
        own_hooks: those that this pass has given to such leaves.
        is_end: whether what enters is an end of the graph, which autograd comes to as soon as
            it can: not where units are gathered once more, since ranks on other paths could not
            tell when its gradient comes.
    """

    owner: Running
    info: UnitInfo
    stored: list[Tensor]
    hooks: Sequence[Callable[..., Any]]
    differentiated: bool
    sharded: bool
    flat: bool
    node: Any
    box: Replicated | None
    name_of: Callable[[str], str]
    values: list[Tensor] | None = None
    seen: tuple[Sequence[Tensor], list[int] | None] = (), None
    entered: dict[int, Tensor] | None = None
    tracked: bool = False
    pending: Pending | None = None
    fetched: Pending | None = None
    foreign: dict[int, int] = field(default_factory=dict)
    open: int = 0
    awaited: int = 0
    spare: list[Tensor] | None = None
    aside: bool = False
    spare_used: bool = False
    gathers: bool = False
    touched: bool = False
    served: set[int] = field(default_factory=set)
    partial: list[Tensor | None] | None = None
    adding: list[list[Tensor]] = field(default_factory=list)
    dtypes: set[torch.dtype] = field(default_factory=set)
    common: CommonLeaves | None = None
    own_hooks: list[OwnHooks] = field(default_factory=list)

    def __post_init__(self) -> None:
        layout, index = self.info.layout, self.info.index
        self.key = self.info.key
        where = self.stored[0] if self.stored else self.node
        self.device: torch.device | None = None if where is None else where.device
        self.leaf_indices, live = layout.leaves_of_units[index]
        self.live = live if self.differentiated else (False,) * len(live)
        root = layout.layer_of_unit[index] < 0
        self.is_end = root and sum(self.live) == 1 and not self.sharded

    @property
    def arriving(self) -> bool:
        """Whether what is stored has still to be waited for."""
        return self.box is not None and not self.box.under_way.keys().isdisjoint(self.info.flats)

    def limit(self, on_a_host: int) -> int:
        """How many bytes may be under way at once."""
        on_host = self.device is None or kind(self.device) == "cpu"
        return on_a_host if on_host else BYTES_ON_A_GPU

    def is_much(self, nbytes: int, on_a_host: int) -> bool:
        """Whether so many bytes are more than that."""
        return nbytes > min(on_a_host, BYTES_ON_A_GPU) and nbytes > self.limit(on_a_host)

    def start(self) -> None:
        """Begin to enter, unless it is under way or done."""
        if self.values is None and self.pending is None:
            if self.gathers:
                self.owner.accord.gather((self,))
            else:
                self.begin()

    def begin(self) -> None:
        """Begin to enter, with all ranks."""
        self.pending = self._entering()

    def begin_in_vain(self) -> None:
        """Take part in a gather that others need."""
        self._entering().wait()

    def _entering(self) -> Pending:
        if self.box is not None:
            self.box.wait(self.info.flats)
        value: Pending = Ready(self.stored)
        if self.node is not None:
            value = self.fetched or self.node.fetch(self.info.index)
        self.fetched = None
        for hook in self.hooks:
            value = hook(value, self.info)
        return value

    def fetch(self) -> None:
        """Begin to read the unit, if it is not in memory and there is room for it."""
        absent = self.values is None and self.pending is None and self.fetched is None
        if self.node is not None and absent:
            self.fetched = self.node.fetch(self.info.index, must=False)

    def acquire(self) -> list[Tensor]:
        """The unit's values as the last ``enter`` hook made them."""
        accord = self.owner.accord
        beside = accord is not None and accord.beside
        if self.spare is not None and beside:
            self.aside = self.spare_used = True
            self._find_foreign(self.spare)
            return self.spare
        self.owner.plan.record(self.key, follows=not beside)
        if self.values is None:
            if self.pending is not None and self.gathers and accord.asking:
                accord.gather((self,))
            self.start()
            assert self.pending is not None
            self.values, self.pending = self.pending.wait(), None
            self._find_foreign(self.values)
        if accord is None or not (accord.asking or accord.beside):  # nobody has to be asked
            self.owner.plan.look_ahead(self)
        return self.values

    def _find_foreign(self, values: Sequence[Tensor]) -> None:
        if values is self.stored:
            self.foreign = {}
            return
        own = {x.untyped_storage().data_ptr() for x in self.stored}
        where = [x.untyped_storage().data_ptr() for x in values]
        self.foreign = {at: i for i, at in enumerate(where) if at not in own}

    def acquire_again(self) -> list[Tensor]:
        """Values for backward: they stay until the unit's gradients have left."""
        if not self.touched:
            if self.owner.accord is not None:
                there = self.owner.accord.happens(AGAIN, self)
                if not there and self.spare is not None:
                    return self.spare
            self.touched = True
            self.owner.drop_transient(self)
            return self.acquire()
        assert self.values is not None
        return self.values

    def leaves(self) -> dict[int, Tensor]:
        """The entered leaves by leaf index, differentiable where they are trainable."""
        tracked = any(self.live) and torch.is_grad_enabled()
        if self.entered is None or (tracked and not self.tracked):
            self._check_eager()
            again = tracked and RECOMPUTED.get() == "again"
            if self.owner.accord is not None:
                self.owner.accord.happens(ENTER, self, tracked and not again)
            values = self.acquire()
            self.seen = values, versions(values)
            if again:
                return self._stand_ins(self._views(values))
            self.tracked = tracked
            adds = tracked and self._can_add
            views = self._added_to(values) if adds else self._views(values)
            if tracked and not adds:
                self.open += 1
                if self.owner.accord is not None:
                    self.owner.accord.entered(self)
                views = self._tracked(views)
            self.entered = self._marked(views)
        return self.entered

    def _added_to(self, values: list[Tensor]) -> list[Tensor]:
        """Leaves to whose gradients autograd adds: those of other passes, but for a second entry
        in this one, whose gradients are added to the first one's."""
        common = None if self.adding else self.common
        usable = common is not None and common.usable
        views = common.leaves if common is not None and usable else self._views(values)
        trained = zip(views, self.live, strict=True)
        self.adding.append(views if all(self.live) else [v for v, on in trained if on])
        self.dtypes = {x.dtype for x in values}
        if not usable:
            for view in self.adding[-1]:
                view.requires_grad_()
        if common is not None and not usable:
            common.leaves, common.sums = views, []
        return views

    @property
    def _can_add(self) -> bool:
        """Whether leaves may enter as ends of the graph that are nothing else: nobody has to know
        when, and whether, their gradients come."""
        owner = self.owner
        if not owner.adds or self.is_end or self.foreign or owner.accord is not None:
            return False
        watched = owner.running is not None and owner.running.reached is not None
        return not watched and self.flat and self.info.index not in self.info.layout.encoded

    def _marked(self, leaves: Sequence[Tensor]) -> dict[int, Tensor]:
        """The entered leaves by leaf index; those of a split tree say what they are parts of."""
        found, layout = dict(zip(self.leaf_indices, leaves, strict=True)), self.info.layout
        if layout.along is not None:
            for i, leaf in found.items():
                layout.marked(layout.slots[i], leaf)
        return found

    def check_unwritten(self) -> None:
        """Raise ``PlacementError`` if the function that was given the unit has written to it."""
        values, before = self.seen
        if before is not None:
            check(values, before, self._called)

    def _called(self, value: int) -> str:
        """The leaves in one of the unit's values."""
        layout = self.info.layout
        if self.flat:
            slots = [*layout.by_flat[self.info.flats[value]]]
        else:
            slots = [[s for i in self.info.flats for s in layout.by_flat[i]][value]]
        names = [self.name_of(slot.path) for slot in slots]
        kind = "parameter" if len(names) == 1 else "one of the parameters"
        return f"{kind} {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}"

    def _tracked(self, views: list[Tensor]) -> list[Tensor]:
        if self.is_end:
            return [self._ending(v) if on else v for v, on in zip(views, self.live, strict=True)]
        if all(self.live):
            return list(_Enter.apply(self.owner.tick, self, views))
        pairs = zip(views, self.live, strict=True)
        outs = iter(_Enter.apply(self.owner.tick, self, [v for v, on in pairs if on]))
        return [next(outs) if on else v for v, on in zip(views, self.live, strict=True)]

    def _ending(self, view: Tensor) -> Tensor:
        """The one leaf of a unit outside all layers, as an end of the graph.

        Autograd comes to nodes in the reverse order of their making, so that a head's gradient
        would leave behind those of the layers, whose parameters enter later.
        """

        def leave(grad: Tensor) -> Tensor | None:
            self.leave([grad])
            if grad.layout != torch.strided:
                return None
            return grad.new_empty(()).expand(grad.shape)  # autograd keeps it to the end

        end = view.requires_grad_()
        self.owner.ends.append((end, leave))
        return end

    def _stand_ins(self, views: list[Tensor]) -> dict[int, Tensor]:
        """Leaves for a second forward pass, whose graph goes nowhere: the first one's has the
        gradients."""
        pairs = zip(views, self.live, strict=True)
        return self._marked([v.detach().requires_grad_() if on else v for v, on in pairs])

    def _check_eager(self) -> None:
        if torch._C._functorch.maybe_current_level() is not None:
            raise PlacementError(
                f"unit {self.info.name} would enter inside torch.func (vmap, grad, jvp, ...), "
                "which cannot follow parameters that are gathered on the way. Let them enter "
                "before: params = zf.tree.map(lambda p: p, params), outside of torch.func."
            )

    def _views(self, values: list[Tensor]) -> list[Tensor]:
        if not self.flat:
            return [x.detach() for x in values]
        layout = self.info.layout
        out: list[Tensor] = []
        for i, full in zip(self.info.flats, values, strict=True):
            full = full.detach() if full.requires_grad else full
            out += [x.detach() for x in layout.views(i, full)]
        return out

    def release(self) -> None:
        """Let the values go, unless they are used again at once."""
        if self.owner.accord is not None and not self.aside:
            self.owner.accord.happens(RELEASE, self)
        self.aside = False
        self.entered = None
        if self.common is not None and self.adding:
            self.own_hooks += [OwnHooks(x) for x in self.adding[-1] if x._backward_hooks]
        if self.sharded:
            self.seen = (), None
        self.touched = False
        self.served.clear()
        if self.foreign and self.owner.plan.soon(self) and torch.is_grad_enabled():
            pool(self.info.group).trim()  # the turning point: activations are at their largest
        else:
            self.values = None

    def pack(self, x: Tensor) -> Any:
        """A ticket for a saved tensor that lies in the entered memory; others as they are."""
        i = self.foreign.get(x.untyped_storage().data_ptr())
        if i is None:
            return x
        accord = self.owner.accord
        height = 0 if accord is None else accord.height
        return Ticket(self, i, x.dtype, x.shape, x.stride(), int(x.storage_offset()), height)

    def leave(self, grads: Sequence[Tensor | None]) -> None:
        """Gradients of one entry's trainable leaves; the last entry's send them off."""
        running = self.info.running
        if running is not None and running.reached is not None:
            running.reached.update(self._reached(grads))
        come = [g if g is None or g.layout == torch.strided else dense(g) for g in grads]
        if self.partial is not None:
            come = [_add(a, b) for a, b in zip(self.partial, come, strict=True)]
        self.partial = come
        accord = self.owner.accord
        due: bool | None = self.open == 1
        if accord is not None:
            due = accord.leaves(self, self.awaited == 1)
        if due is None:
            return
        self.left()
        if due:
            self.send(self.packed())
            if accord is not None:
                accord.catch_up()

    def _reached(self, grads: Sequence[Tensor | None]) -> Iterator[str]:
        """Paths, within all parameters, of the leaves that have a gradient."""
        slots = self.info.layout.slots
        live = (i for i, on in zip(self.leaf_indices, self.live, strict=True) if on)
        for i, g in zip(live, grads, strict=True):
            if g is not None and (slot := slots[i]) is not None:
                yield self.name_of(slot.path)

    def left(self) -> None:
        """One entry less."""
        self.open = max(self.open - 1, 0)
        self.touched = False
        if not self.owner.plan.soon(self):
            self.values = None
            adds_up = self.owner.holding or self.owner.waiting
            if self.sharded and adds_up and self.owner.plan.ends:
                # Nothing is gathered any more, and soon two sets of gradients exist.
                pool(self.info.group).trim()

    def send(self, flats: list[Tensor]) -> None:
        """Hand a full gradient of the unit to the ``leave`` hooks, when all ranks do."""
        if self.owner.accord is None or self.owner.holding:
            self.part(flats)
        else:
            self.owner.accord.reduce(self, flats)

    def packed(self) -> list[Tensor]:
        """The full flats of the gradient that has come so far, which is forgotten; added to those
        that earlier passes have kept back."""
        layout, owner = self.info.layout, self.owner
        grads, self.partial = self.partial, None
        assert grads is not None
        if owner.take is not None and (sums := owner.take(self.info)) is not None:
            layout.add(self.info.trainable, sums, grads)
            return sums
        flats = []
        for i in self.info.trainable:
            count = len(layout.by_flat[i])
            row, grads = grads[:count], grads[count:]
            flats.append(layout.pack(i, row, self.info.memory))
            del row
        return flats

    def begin_adding(self) -> tuple[list[Tensor], Callable[[], None]]:
        """Let autograd add gradients to what earlier passes have kept, each as soon as it comes.
        Those of several entries are added to each other first, and so are those of leaves that a
        module has cast in place (``self.router.to(torch.float32)`` in its forward).

        Returns:
            The leaves, and what is to be called when backward is over.
        """
        entries, self.adding = self.adding, []
        if len(entries) == 1 and self.dtypes.issuperset([x.dtype for x in entries[0]]):
            sums = None if self.owner.take is None else self.owner.take(self.info)
            fresh, sums = sums is None, sums or self._nothing(entries[0])
            add_into(sums, entries[0], self.info.layout, self.info.trainable, self.common)
            return entries[0], partial(self._added, entries[0], sums, fresh, versions(sums))
        for x in chain.from_iterable(entries):  # a backward within the function has left it there
            x.grad = None
        return [*chain.from_iterable(entries)], partial(self._added_up, entries)

    def _added(
        self, leaves: Sequence[Tensor], sums: list[Tensor], fresh: bool, before: list[int] | None
    ) -> None:
        for x in leaves:  # what other passes have in common: their functions may run backward
            x.grad = None
        if not (fresh and before and versions(sums) == before):
            self.part(sums, own=fresh)  # unless no gradient has come

    def _added_up(self, entries: Sequence[Sequence[Tensor]]) -> None:
        for leaves in reversed(entries):  # as backward comes to them
            row = [None if x.grad is None else dense(x.grad) for x in leaves]
            old = self.partial
            self.partial = row if old is None else [*map(_add, old, row)]
        if any(x is not None for x in self.partial or ()):
            self.part(self.packed())
        self.partial = None

    def _nothing(self, leaves: Sequence[Tensor]) -> list[Tensor]:
        """Flats of zeros for the gradients of some leaves."""
        layout, flats, at = self.info.layout, list[Tensor](), 0
        for i in self.info.trainable:
            like = leaves[at]
            flat = self.info.memory(layout.flats[i].length, like.dtype, like.device)
            flats.append(flat.zero_())
            at += len(layout.by_flat[i])
        return flats

    def part(self, flats: list[Tensor], own: bool = False) -> None:
        """Send a full gradient, which is taken out of the list, through the ``leave`` hooks.

        Args:
            own: whether its memory was made for it.
        """
        value: Pending = Ready([*flats], own)
        nbytes = sum([x.nbytes for x in flats])
        flats.clear()
        for hook in self.owner.leave:
            if (value := hook(value, self.info)) is None:
                return  # kept back
        self.owner.sent(self, value, nbytes)

    def forget(self) -> None:
        """Let go of all that enters."""
        self.pending = self.values = self.entered = self.fetched = None


def dense(grad: Tensor) -> Tensor:
    """A gradient whose every element lies in memory (``nn.Embedding(sparse=True)`` has others)."""
    return grad.to_dense() if grad.layout != torch.strided else grad


def _add(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a + b


@dataclass(frozen=True)
class Ticket:
    """Stands for a saved tensor inside a unit's entered memory.

    Attributes:
        repeatable: that it may be redeemed twice; the unit enters once for all of its tickets.
    """

    repeatable: ClassVar[bool] = True

    run: UnitRun
    value: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    height: int

    def redeem(self) -> Tensor:
        if WEIGHTS_UNREAD.get() and self.dtype.is_floating_point:
            where = self.run.device
            return torch.full((), torch.nan, dtype=self.dtype, device=where).expand(self.shape)
        if (accord := self.run.owner.accord) is not None:
            accord.passed(self.height)
        full = self.run.acquire_again()[self.value]
        if full.dtype != self.dtype:
            full = full.view(self.dtype)
        return full.as_strided(self.shape, self.stride, self.offset)


class _Enter(torch.autograd.Function):
    """The identity on a unit's leaves; backward hands their gradients to the unit.

    ``tick`` carries no value: it is the one tensor that backward runs towards, so
    that gradients leave unit by unit instead of through autograd's outputs.
    """

    @staticmethod
    def forward(ctx: Any, tick: Tensor, run: UnitRun, leaves: list[Tensor]) -> tuple[Tensor, ...]:
        # No `setup_context`: torch looks up the signature of such a function at each call, which
        # takes a tenth of a step of small units. (Nothing enters inside torch.func.)
        ctx.run = run
        ctx.set_materialize_grads(False)
        return tuple(leaves)  # new tensors, which nobody else has

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, None, None]:
        return (_leave_once if torch.is_grad_enabled() else _leave)(ctx, *grads)


def _leave(ctx: Any, *grads: Tensor | None) -> tuple[None, None, None]:
    if not ctx.run.owner.runs_forward:
        ctx.run.leave(grads)
    return None, None, None


# It refuses to be differentiated again, which can be asked for only where a graph is recorded.
_leave_once = torch.autograd.function.once_differentiable(_leave)
