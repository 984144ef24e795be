"""One unit of parameters during one pass: how it enters, is saved, enters again, and leaves.

Nothing keeps gathered memory alive after a layer but autograd, and there a saved-tensor
hook puts a :class:`Ticket` in the place of every tensor that lies in that memory.
Backward redeems tickets by letting the unit enter once more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from zfunc.accord import AGAIN, ENTER, RELEASE
from zfunc.context import RECOMPUTED
from zfunc.errors import PlacementError
from zfunc.pool import pool
from zfunc.seams import Pending, Ready, UnitInfo
from zfunc.versions import check, versions

if TYPE_CHECKING:
    from zfunc.passes import Pass, Source

__all__ = ["Ticket", "UnitRun", "redeem"]


class UnitRun:
    """One unit during one pass."""

    def __init__(self, owner: Pass, source: Source, index: int, stored: list[Tensor]) -> None:
        self.owner = owner
        self.source = source
        self.info = UnitInfo(
            source.layout, index, source.group, source.cut, source.index, owner.running
        )
        self.stored = stored
        self.values: list[Tensor] | None = None
        self.pending: Pending | None = None
        self.fetched: Pending | None = None  # on its way from the disk
        self.entered: dict[int, Tensor] | None = None
        self.seen: tuple[list[Tensor], list[int] | None] = [], None  # what entered, as it was
        self.tracked = False  # whether what entered is differentiable
        self.foreign: dict[int, int] = {}
        self.open = 0
        self.awaited = 0  # entries of this rank's own whose gradients may still come
        self.spare: list[Tensor] | None = None  # from before its turn, see `Accord`
        self.aside = self.spare_used = False
        self.touched = False
        self.served: set[int] = set()  # its layers that have run since it entered
        self.partial: list[Tensor | None] | None = None
        self.leaf_indices, live = source.layout.leaves_of_unit(index)
        self.live = live if source.differentiated else (False,) * len(live)

    @property
    def key(self) -> tuple[int, int]:
        return self.info.key

    @property
    def gathers(self) -> bool:
        """Whether the ranks that agree on what comes next all take part when it enters."""
        return self.source.gathers

    @property
    def arriving(self) -> bool:
        """Whether what is stored has still to be waited for."""
        return self.source.arriving(self.info.index)

    def start(self) -> None:
        """Begin to enter, unless it is under way or done."""
        if self.values is None and self.pending is None:
            if self.owner.accord is not None and self.gathers:
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
        if self.source.box is not None:
            self.source.box.wait(self.info.flats)
        value: Pending = Ready(self.stored)
        if self.source.node is not None:
            value = self.fetched or self.source.node.fetch(self.info.index)
        self.fetched = None
        for seam in self.owner.entering(self.source):
            value = seam(value, self.info)
        return value

    def fetch(self) -> None:
        """Begin to read the unit, if it is not in memory and there is room for it."""
        node = self.source.node
        if node is not None and self.values is None and self.pending is None and not self.fetched:
            self.fetched = node.fetch(self.info.index, must=False)

    def acquire(self) -> list[Tensor]:
        """The unit's values as the last ``enter`` seam made them."""
        if self.spare is not None and self.owner.beside:
            self.aside = self.spare_used = True
            self._find_foreign(self.spare)
            return self.spare
        self.owner.plan.record(self.key, follows=not self.owner.beside)
        if self.values is None:
            if self.pending is not None and self.owner.asking and self.gathers:
                self.owner.accord.gather((self,))  # type: ignore[union-attr]
            self.start()
            assert self.pending is not None
            self.values, self.pending = self.pending.wait(), None
            self._find_foreign(self.values)
        self.owner.look_ahead(self)
        return self.values

    def _find_foreign(self, values: Sequence[Tensor]) -> None:
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
            views = self._views(values)
            if again:
                return self._stand_ins(views)
            self.tracked = tracked
            if tracked:
                self.open += 1
                if self.owner.accord is not None:
                    self.owner.accord.entered(self)
                views = self._tracked(views)
            self.entered = dict(zip(self.leaf_indices, views, strict=True))
        return self.entered

    def check_unwritten(self) -> None:
        """Raise ``PlacementError`` if the function that was given the unit has written to it."""
        values, before = self.seen
        check(values, before, self._called)

    def _called(self, value: int) -> str:
        """The leaves in one of the unit's values."""
        layout = self.source.layout
        if self.source.flat:
            slots = [*layout.by_flat[self.info.flats[value]]]
        else:
            slots = [[s for i in self.info.flats for s in layout.by_flat[i]][value]]
        names = [self.source.name_of(slot.path) for slot in slots]
        kind = "parameter" if len(names) == 1 else "one of the parameters"
        return f"{kind} {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}"

    def _tracked(self, views: list[Tensor]) -> list[Tensor]:
        if all(self.live):
            return list(_Enter.apply(self.owner.tick, self, views))
        pairs = zip(views, self.live, strict=True)
        outs = iter(_Enter.apply(self.owner.tick, self, [v for v, on in pairs if on]))
        return [next(outs) if on else v for v, on in zip(views, self.live, strict=True)]

    def _stand_ins(self, views: list[Tensor]) -> dict[int, Tensor]:
        """Leaves for a second forward pass, whose graph goes nowhere: the first one's has the
        gradients."""
        pairs = zip(views, self.live, strict=True)
        leaves = [v.detach().requires_grad_() if on else v for v, on in pairs]
        return dict(zip(self.leaf_indices, leaves, strict=True))

    def _check_eager(self) -> None:
        if torch._C._functorch.maybe_current_level() is not None:
            raise PlacementError(
                f"unit {self.info.name} would enter inside torch.func (vmap, grad, jvp, ...), "
                "which cannot follow parameters that are gathered on the way. Let them enter "
                "before: params = zf.tree.map(lambda p: p, params), outside of torch.func."
            )

    def _views(self, values: list[Tensor]) -> list[Tensor]:
        if not self.source.flat:
            return [x.detach() for x in values]
        layout = self.source.layout
        out: list[Tensor] = []
        for i, full in zip(self.info.flats, values, strict=True):
            out.extend(x.detach() for x in layout.views(i, full.detach()))
        return out

    def release(self) -> None:
        """Let the values go, unless they are used again at once."""
        if self.owner.accord is not None and not self.aside:
            self.owner.accord.happens(RELEASE, self)
        self.aside = False
        self.entered = None
        if self.source.sharded:
            self.seen = [], None
        self.touched = False
        self.served.clear()
        if self.foreign and self.owner.plan.soon(self) and torch.is_grad_enabled():
            pool().trim()  # the turning point: activations are at their largest
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
        running = self.owner.running
        if running is not None and running.reached is not None:
            running.reached.update(self._reached(grads))
        grads = [g if g is None else dense(g) for g in grads]
        if self.partial is None:
            self.partial = list(grads)
        else:
            self.partial = [_add(a, b) for a, b in zip(self.partial, grads, strict=True)]
        accord = self.owner.accord
        due: bool | None = self.open == 1
        if accord is not None:
            due = accord.leaves(self, self.awaited == 1)
        if due is None:
            return
        self.left()
        if due:
            self.send()
        if accord is not None and due:
            accord.catch_up()

    def _reached(self, grads: Sequence[Tensor | None]) -> Iterator[str]:
        """Paths, within all parameters, of the leaves that have a gradient."""
        slots = self.source.layout.slots
        live = (i for i, on in zip(self.leaf_indices, self.live, strict=True) if on)
        for i, g in zip(live, grads, strict=True):
            if g is not None and (slot := slots[i]) is not None:
                yield self.source.name_of(slot.path)

    def left(self) -> None:
        """One entry less."""
        self.open = max(self.open - 1, 0)
        self.touched = False
        if not self.owner.plan.soon(self):
            self.values = None
            if self.source.sharded and self.owner.plan.ends:
                pool().trim()  # nothing is gathered any more, and soon all gradients are there

    def send(self) -> None:
        """Hand the unit's full gradient to the ``leave`` seams."""
        if self.owner.accord is None or self.owner.holding:
            self.part(self.packed())
        else:
            self.owner.accord.reduce(self, self.packed())

    def packed(self) -> list[Tensor]:
        """The full flats of the gradient that has come so far, which is forgotten."""
        layout = self.source.layout
        grads, self.partial = self.partial, None
        assert grads is not None
        flats = []
        for i in self.info.trainable:
            count = len(layout.by_flat[i])
            row, grads = grads[:count], grads[count:]
            flats.append(layout.pack(i, row, pool().take))
            del row
        return flats

    def part(self, flats: list[Tensor]) -> None:
        """Send a full gradient, which is taken out of the list, through the ``leave`` seams."""
        value: Pending = Ready([*flats])
        nbytes = sum(x.nbytes for x in flats)
        flats.clear()
        for seam in self.owner.leaving():
            if (value := seam(value, self.info)) is None:
                return  # kept back
        self.owner.sent(self, value, nbytes)


def dense(grad: Tensor) -> Tensor:
    """A gradient whose every element lies in memory (``nn.Embedding(sparse=True)`` has others)."""
    return grad.to_dense() if grad.layout != torch.strided else grad


def _add(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a + b


@dataclass(frozen=True)
class Ticket:
    """Stands for a saved tensor inside a unit's entered memory."""

    run: UnitRun
    value: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    height: int

    def redeem(self) -> Tensor:
        if (accord := self.run.owner.accord) is not None:
            accord.passed(self.height)
        full = self.run.acquire_again()[self.value]
        if full.dtype != self.dtype:
            full = full.view(self.dtype)
        return full.as_strided(self.shape, self.stride, self.offset)


def redeem(x: Any) -> Tensor:
    """The unpack hook: the tensor behind a ticket, or the tensor itself."""
    return x.redeem() if isinstance(x, Ticket) else x


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
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, None, None]:
        ctx.run.leave(grads)
        return None, None, None
