"""What a running step knows: one contextvar, pushed by ``Step`` and by nothing else."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from functools import cache, cached_property
from operator import gt, itemgetter
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from zfunc.comm import Group
from zfunc.errors import DonatedStateError
from zfunc.nodes import Box, spent
from zfunc.placed.cutting import make_layout
from zfunc.tree import gone
from zfunc.worlds.axes import alone
from zfunc.zeros import is_unmade

__all__ = [
    "ENDING",
    "PLACING",
    "RECOMPUTED",
    "Context",
    "Donation",
    "LayerInfo",
    "Withheld",
    "current",
    "donates",
    "keeping",
    "pop",
    "push",
    "reuse",
    "spend",
    "uncut",
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
    _views: dict[int, Residents] = field(default_factory=dict)

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
        if found is None or found.row is None:
            return False
        start, stop = _bytes_of(x)
        for resident in found.between(start, stop):
            for view in self._views_in(resident, at).between(start, stop):
                blank(view)
            blank(resident)
        return True

    def _views_in(self, resident: Tensor, at: int) -> Residents:
        """The leaves of a box that are views of a tensor it holds, in the storage at ``at``."""
        box = self.boxes.get(id(resident))
        if box is None or not box.views():
            return Residents()
        if id(resident) not in self._views:
            mine = (x for x in box.views() if x.untyped_storage().data_ptr() == at)
            self._views[id(resident)] = Residents(mine)
        return self._views[id(resident)]


def _bytes_of(x: Tensor) -> tuple[int, int]:
    """Where in memory a tensor lies, from its first byte to behind its last."""
    start = x.data_ptr()
    if x.is_contiguous():
        return start, start + x.nbytes
    size = x.element_size()
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return start, start + (last + 1) * size if x.numel() else start


@dataclass(frozen=True)
class LayerInfo:
    """What the ``layer`` seam is told of a layer.

    Attributes:
        index: counts the calls of layers within one loss.
        name: the layer's name in a module; the index where it has none.
        stack: the path of the ``Layers`` that it is in; ``None`` if that is not known.
        depth, of: its position in the stack, from 0, and the stack's length.
        key: identifies its parameters within the running pass.
    """

    index: int
    name: str
    stack: str | None = None
    depth: int = 0
    of: int = 1
    key: Any = None

    @property
    def place(self) -> str:
        """Where the layer is, for messages."""
        return self.name if self.stack is None else f"{self.stack}.{self.depth}".lstrip(".")


def uncut(tree: Any) -> tuple[Any, bool]:
    """The layout of a plain params tree that nobody cuts."""
    return make_layout(tree), False


ENDING: ContextVar[bool] = ContextVar("zfunc_ending", default=False)
"""Whether steps end the gathers of new parameters that they start: what is recorded as a graph
does, and cannot leave them to the next call."""


@dataclass
class Context:
    """One call of a step on one rank.

    Attributes:
        transforms: in data-flow order.
        memo: this rank's memory of earlier calls of the same step.
        tensors: those of the state that the step was given.
        boxes: the whole trees with a layout in that state.
        looked_into: those of which somebody has asked for a leaf meanwhile.
        key: the key of this call's randomness, or None.
        donation: the input state's memory, where it may be reused.
        group: the ranks over which losses and gradients are averaged.
        by_unit: whether parameters enter and leave unit by unit.
        prefetch, room: see :class:`zfunc.plans.Plan`.
        spill: see :class:`zfunc.passes.Pass`.
        layout_for: plain params tree -> its layout, and whether gradients are cut.
        passes: the passes that are running, innermost last.
        asked: how often ``value_and_grad`` was called.
        differentiated: the same, each microbatch counted.
        evaluated: how often ``evaluate`` was called.
        keeps: which units' gradients are left for another transform than shard to average.
        frozen: whether second moments stay as they are in this call.
        unsettled: whether ``settled`` must be given the second moments before the step.
        layer_scope, layer_calls: randomness of the layers of the running loss.
        reduce_once: whether whole gradients are summed before they are reduced.
        compute: the 16-bit dtype in which layers compute, if there is one.
        join: ``(node, params)`` -> the plain params with the values of all ranks, or ``None``
            for the usual way; see :meth:`zfunc.placed.sharded.Sharded.join`.
        complete: whether gathers of new parameters end within the step that starts them.
        notes: what transforms note down for the time of this call.
        offers: for addresses of the old state where the value that follows is to be written.
        reached: paths of the leaves to which backward has come on this rank, where somebody asks.
        missed: of each leaf that takes part in the update how many it has missed; ``None`` where
            all leaves always take part.
    """

    transforms: tuple[Any, ...] = ()
    memo: dict[Any, Any] = field(default_factory=dict)
    tensors: Sequence[Tensor] = ()
    boxes: Sequence[Box] = ()
    looked_into: WeakSet[Box] = field(default_factory=WeakSet)
    key: Tensor | None = None
    donation: Donation | None = None
    group: Group = field(default_factory=alone)
    by_unit: bool = False
    prefetch: int = 1
    room: int = 0
    spill: Callable[[Any, bool], Any] | None = None
    layout_for: Callable[[Any], tuple[Any, bool]] = uncut
    passes: list[Any] = field(default_factory=list)
    asked: int = 0
    differentiated: int = 0
    evaluated: int = 0
    keeps: Callable[[Any], bool] = lambda unit: False
    frozen: bool = False
    unsettled: bool = False
    axis: str | tuple[str, ...] = "data"
    layer_scope: Callable[[int], AbstractContextManager[Any]] | None = None
    layer_calls: int = 0
    reduce_once: bool = False
    compute: torch.dtype | None = None
    join: Callable[[Any, Any], Any] = lambda node, params: None
    complete: bool = field(default_factory=ENDING.get)
    notes: dict[Any, Any] = field(default_factory=dict)
    offers: dict[int, Tensor] = field(default_factory=dict)
    reached: set[str] | None = None
    missed: Mapping[str, int] | None = None

    def next_scope(self) -> AbstractContextManager[Any] | None:
        """The scope of randomness of the next layer that is called, if it has one of its own."""
        index, self.layer_calls = self.layer_calls, self.layer_calls + 1
        return None if self.layer_scope is None else self.layer_scope(index)

    @cached_property
    def around(self) -> list[Any]:
        """The transforms that surround layers, the innermost first."""
        return [t for t in reversed(self.transforms) if t.wraps_layers]


RECOMPUTED: ContextVar[str] = ContextVar("zfunc_recomputed", default="")
"""Of a layer whose activations are not kept: ``"first"`` in its forward pass, ``"again"``
when backward runs it anew, empty elsewhere."""

PLACING: ContextVar[Any] = ContextVar("zfunc_placing", default=None)
"""The step whose ``place`` or ``init`` is running."""

_CURRENT: ContextVar[Context | None] = ContextVar("zfunc_context", default=None)


def current() -> Context | None:
    """The context of the step that is running on this rank, if any."""
    return _CURRENT.get()


def push(context: Context) -> Token[Context | None]:
    """Make ``context`` the running one; ``pop`` with the token undoes it."""
    return _CURRENT.set(context)


def pop(token: Token[Context | None]) -> None:
    """Undo a ``push``."""
    _CURRENT.reset(token)


def blank(x: Tensor) -> None:
    """Leave a donated tensor without its memory, and marked."""
    marks = x.__dict__
    if "_zfunc_donated" not in marks:
        plain = type(x) in (Tensor, torch.nn.Parameter)
        x.data = _nothing(x.dtype, x.device) if plain else x.new_empty(0)
        marks["_zfunc_donated"] = True


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
    alias = x.detach()
    if is_unmade(x):
        return x.clone()
    if spend(x):
        return alias
    offers = running.offers if (running := _CURRENT.get()) is not None else None
    if (
        offers
        and (room := offers.get(x.data_ptr())) is not None
        and room.shape == x.shape
        and room.dtype == x.dtype
    ):
        return offers.pop(x.data_ptr()).copy_(x)
    return x.clone()


@contextmanager
def keeping() -> Iterator[None]:
    """Within the block the running step donates nothing."""
    running = current()
    donation = running.donation if running is not None else None
    if running is not None:
        running.donation = None
    try:
        yield
    finally:
        if running is not None:
            running.donation = donation


def donates() -> bool:
    """Whether the running step donates any memory."""
    running = current()
    return running is not None and running.donation is not None


def spend(x: Tensor) -> bool:
    """Whether the running step donates the memory of ``x``; if so, it must not be read again."""
    context = current()
    return context is not None and context.donation is not None and context.donation.spend(x)


@dataclass
class Withheld(Donation):
    """Donated memory that is given away once ``ask`` has said whether the step counts at all.

    Whoever wants it first asks, and may have to wait for the answer; until then nobody does.
    """

    given: Donation = field(default_factory=Donation)
    ask: Callable[[], bool] = bool

    @classmethod
    def until(cls, given: Donation, ask: Callable[[], bool]) -> Withheld:
        """The memory of ``given``."""
        return cls(given.owners, given.boxes, given=given, ask=ask)

    def spend(self, x: Tensor) -> bool:
        return self.ask() and self.given.spend(x)
