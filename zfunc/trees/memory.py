"""Memory of the old state that a running step may write to, and what else trees know of the step.

A pure update needs new memory for its results. Where a step donates its input state
(:func:`zfunc.donate`), :func:`reuse` gives it the old state's own.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, cached_property
from operator import gt, itemgetter
from typing import Any
from weakref import WeakSet

import optree
import torch
from torch import Tensor

from zfunc.errors import DonatedStateError
from zfunc.trees.marks import carry, gone, spent
from zfunc.trees.nodes import NAMESPACE, Box
from zfunc.trees.zeros import is_unmade

__all__ = [
    "RUNNING",
    "Donation",
    "Memory",
    "blank",
    "current",
    "donates",
    "missed",
    "reuse",
    "spend",
    "without_memory",
]

Owner = tuple[int, int, Tensor]  # where in memory a tensor begins and ends


class Residents(list[Tensor]):
    """Tensors that live in one storage."""

    @cached_property
    def row(self) -> list[Owner] | None:
        """In the order of their bytes; ``None`` if two share some: neither may have the memory."""
        row = sorted([(*_bytes_of(x), x) for x in self if x.numel()], key=itemgetter(0))
        starts, stops = [owner[0] for owner in row[1:]], [owner[1] for owner in row]
        return None if any(map(gt, stops, starts)) else row

    def between(self, start: int, stop: int) -> Iterator[Tensor]:
        """Those that have some of these bytes."""
        row = self.row or []
        for i in range(bisect_right(row, start, key=itemgetter(1)), len(row)):
            if row[i][0] >= stop:
                break
            yield row[i][2]


@dataclass
class Donation:
    """The memory of the input state, free to be written by its successor.

    ``owners`` maps a storage to the tensors of the old state that live in it. Those in
    memory that is spent go blank, so that the old values can no longer be read, neither
    later in the step nor after it; their neighbours in the same storage stay, and may
    pass into the new state as they are. ``boxes`` have views of theirs, which go blank likewise.
    """

    owners: dict[int, Residents] = field(default_factory=dict)
    boxes: dict[int, Box] = field(default_factory=dict)
    _views: dict[int, dict[int, Residents]] = field(default_factory=dict)

    @classmethod
    def of(cls, tensors: Iterable[Tensor], boxes: Iterable[Box] = ()) -> Donation:
        owners: defaultdict[int, Residents] = defaultdict(Residents)
        for x in tensors:
            owners[x.untyped_storage().data_ptr()].append(x)
        owners.pop(0, None)  # without memory
        return cls(dict(owners), {id(x): box for box in boxes for x in box.held()})

    def spend(self, x: Tensor) -> bool:
        """Blank the tensors in the memory of ``x``; False if it is not donated."""
        at = x.untyped_storage().data_ptr()
        found = self.owners.get(at)
        if found is None:
            return False
        if len(found) == 1 and (found[0] is x or _bytes_of(found[0]) == _bytes_of(x)):  # all of it
            for view in self._views_in(found[0], at) if self.boxes else ():
                blank(view)
            blank(found[0])
            return True
        if found.row is None:
            return False
        start, stop = _bytes_of(x)
        for resident in found.between(start, stop):
            for view in self._views_in(resident, at).between(start, stop):
                blank(view)
            blank(resident)
        return True

    def _views_in(self, resident: Tensor, at: int) -> Residents:
        """The leaves of the box that holds a tensor which are in the storage at ``at``."""
        box = self.boxes.get(id(resident))
        if box is None:
            return Residents()
        if (known := self._views.get(id(box))) is None:
            known = defaultdict(Residents)
            for x in box.views():
                if x.numel():
                    known[x.untyped_storage().data_ptr()].append(x)
            if known:
                self._views[id(box)] = known
        return known.get(at) or Residents()


def _bytes_of(x: Tensor) -> tuple[int, int]:
    """Where in memory a tensor lies, from its first byte to behind its last."""
    start = x.data_ptr()
    if x.is_contiguous():
        return start, start + x.nbytes
    size = x.element_size()
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return start, start + (last + 1) * size if x.numel() else start


@dataclass
class Memory:
    """What functions of trees know of the step that is running.

    Attributes:
        tensors: those of the state that the step was given.
        boxes: the whole trees with a layout in that state.
        looked_into: those of which somebody has asked for a leaf meanwhile.
        donation: the input state's memory, where it may be reused.
        offers: for addresses of the old state where the value that follows is to be written.
        notes: what is noted down for the time of this call.
        reduction: how what ranks hold each for themselves is averaged, a
            :class:`zfunc.trees.reduction.Reduction`; ``None`` where that is over already.
        missed: of each leaf that takes part in the update how many it has missed; ``None`` where
            all leaves always take part.
        complete: whether gathers of new parameters end within the step that starts them.
    """

    tensors: Sequence[Tensor] = ()
    boxes: Sequence[Box] = ()
    looked_into: WeakSet[Box] = field(default_factory=WeakSet)
    donation: Donation | None = None
    offers: dict[int, Tensor] = field(default_factory=dict)
    notes: dict[Any, Any] = field(default_factory=dict)
    reduction: Any = None
    missed: Mapping[str, int] | None = None
    complete: bool = False


RUNNING: ContextVar[Memory | None] = ContextVar("zfunc_running", default=None)
"""Set by ``Step`` (:func:`zfunc.engine.context.push`) and by nothing else."""


def current() -> Memory | None:
    """What is known of the step that is running on this rank, if any."""
    return RUNNING.get()


def missed() -> Mapping[str, int] | None:
    """Which leaves the running update is for, and how many updates each of them has missed.

    Returns:
        The number by dotted leaf path; a leaf that is not in it keeps its value and its moments.
        ``None`` where all leaves always take part.
    """
    running = RUNNING.get()
    return None if running is None else running.missed


def blank(x: Tensor) -> None:
    """Leave a donated tensor without its memory, and marked."""
    marks = x.__dict__
    if "_zfunc_donated" not in marks:
        plain = type(x) in (Tensor, torch.nn.Parameter)
        x.data = _nothing(x.dtype, x.device) if plain else x.new_empty(0)
        marks["_zfunc_donated"] = True


def without_memory(state: Any) -> Any:
    """A tree on ``meta``. Counters and keys keep their values, which steps may ask for."""

    def instead(x: Any) -> Any:
        if not isinstance(x, Tensor) or x.is_meta or x.layout is not torch.strided:
            return x
        counts = x.numel() <= 64 and (x.ndim == 0 or not x.is_floating_point())
        return carry(x.detach().to("cpu", copy=True) if counts else x.detach().to("meta"), x)

    return optree.tree_map(instead, state, none_is_leaf=True, namespace=NAMESPACE)


@cache
def _nothing(dtype: torch.dtype, device: torch.device) -> Tensor:
    """What is left of all spent tensors: a step spends hundreds."""
    with torch.inference_mode(False):  # it outlives the mode that it is made in
        return torch.empty(0, dtype=dtype, device=device)


def reuse(x: Tensor) -> Tensor:
    """Memory with the value of ``x`` that may be overwritten.

    The memory of ``x`` itself where the running step donates it (``x`` must not be
    read again), a copy everywhere else. ``tree.map(reuse, moments)`` is therefore
    the one copy of a pure update, and no copy under ``donate``.

    >>> import torch
    >>> reuse(torch.ones(2)).add_(1)
    tensor([2., 2.])
    """
    if spent(x):
        raise DonatedStateError(gone("a leaf"))
    alias, running = x.detach(), RUNNING.get()
    if running is None or is_unmade(x):
        return x.clone()
    if running.donation is not None and running.donation.spend(x):
        return alias
    room = running.offers.get(x.data_ptr()) if running.offers else None
    if room is not None and room.shape == x.shape and room.dtype == x.dtype:
        return running.offers.pop(x.data_ptr()).copy_(x)
    return x.clone()


def donates() -> bool:
    """Whether the running step donates any memory."""
    running = current()
    return running is not None and running.donation is not None


def spend(x: Tensor) -> bool:
    """Whether the running step donates the memory of ``x``; if so, it must not be read again."""
    running = current()
    return running is not None and running.donation is not None and running.donation.spend(x)
