"""A tape of tensor operations, run again in pieces small enough to keep.

A tape knows memory, not tensors. Every operation names the cells (a :class:`MemoryCell` is one
storage, or one state of a random generator) that it reads, writes or erases, and the views through
which it does so. Views therefore need no operation of their own, aliases and in-place writes need
no special case, and randomness is ordinary data flow: a draw reads one generator state and writes
the next.

One backward pass, :func:`live`, decides everything: which operations still matter (dead values cost
nothing, dead draws stay while a later state needs them), when a cell may be freed and when a leaf
is final. :func:`schedule` moves what is not a draw beside the draw that it depends on, so that
casting a model after building it does not keep all of it. Data flow, and with it every bit, is
unchanged.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.utils import _pytree as pytree

from zfunc.errors import PlacementError

__all__ = [
    "CellValues",
    "Draw",
    "MemoryCell",
    "RecordedOperation",
    "Recording",
    "StateLeaf",
    "View",
]

_CPU = torch.device("cpu")
LOCK = threading.RLock()  # one thread at a time may put its own state into a generator


@dataclass(eq=False)
class MemoryCell:
    """One storage, or one state of a generator; compared by identity.

    ``shadow`` is the storage's stand-in on meta (its size in bytes), ``constant`` what the
    cell holds before any operation, ``ours`` whether a copy must be written instead of it,
    and ``start`` the generator whose state at the start of the run it is.
    """

    device: torch.device = _CPU
    shadow: Any = None  # an UntypedStorage, or None for the state of a generator
    constant: UntypedStorage | Tensor | None = None
    ours: bool = False
    start: torch.Generator | None = None

    @property
    def fixed(self) -> bool:
        """Whether it holds memory of somebody else's, which nothing may write to."""
        return self.constant is not None and not self.ours

    def load(self) -> Any:
        """What the cell holds when nothing was written to it."""
        if self.constant is not None:
            return self.constant.clone() if self.ours else self.constant
        if self.shadow is not None:
            return UntypedStorage(self.shadow.nbytes(), device=self.device)
        assert self.start is not None
        with LOCK:
            return self.start.get_state()


class CellValues(dict[MemoryCell, Any]):
    """What cells hold while a tape runs; before anything is written, what they began with."""

    def __missing__(self, cell: MemoryCell) -> Any:
        self[cell] = cell.load()
        return self[cell]


@dataclass(frozen=True)
class View:
    """A strided window onto a cell."""

    cell: MemoryCell
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    conj: bool
    neg: bool


@dataclass(frozen=True)
class Draw:
    """A turn of a generator from one state to the next."""

    generator: torch.Generator
    before: MemoryCell
    after: MemoryCell


@dataclass(frozen=True)
class RecordedOperation:
    """One recorded operation; in ``args`` and ``kwargs`` views stand for tensors.

    ``outputs`` has a view for each tensor of the result that lives in a new cell, else None.
    """

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[View | None, ...]
    reads: frozenset[MemoryCell]
    writes: frozenset[MemoryCell]
    erases: frozenset[MemoryCell]
    draw: Draw | None
    default_dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class StateLeaf:
    """A tensor of the result, at every index where that same tensor appears."""

    indices: tuple[int, ...]
    view: View
    parameter: bool
    requires_grad: bool
    given: Tensor | None = None

    def hand_over(self, storage: UntypedStorage, take: Callable[[int, Tensor], None]) -> None:
        """Call ``take`` with this leaf, which lives in ``storage``, for each of its indices."""
        tensor = self.tensor(storage) if self.given is None else self.given
        for index in self.indices:
            take(index, tensor)

    def tensor(self, storage: UntypedStorage) -> Tensor:
        """The leaf in ``storage``: a Parameter, or a tensor that requires grad, where it was."""
        plain = view(storage, self.view)
        if self.parameter:
            return torch.nn.Parameter(plain, requires_grad=self.requires_grad)
        return plain.requires_grad_(self.requires_grad)


@dataclass(frozen=True)
class Scheduled:
    """An operation in its place: the leaves final after it, the cells free after it."""

    op: RecordedOperation
    done: tuple[StateLeaf, ...]
    free: frozenset[MemoryCell]


@dataclass(frozen=True)
class Recording:
    """A state's initialisation, not yet carried out.

    ``tree`` is what ``make_state`` returned, each tensor replaced by one on the meta device
    (same shape, stride, dtype, ties; Parameters stay Parameters).
    """

    tree: Any
    _ops: list[RecordedOperation] = field(repr=False)
    _leaves: list[StateLeaf] = field(repr=False)
    _starts: list[MemoryCell] = field(repr=False)
    _ends: list[tuple[torch.Generator, MemoryCell]] = field(repr=False)
    _pinned: dict[torch.Generator, Tensor] = field(repr=False)

    def replay(self, take: Callable[[int, Tensor], None]) -> None:
        """Run the initialiser on real memory, handing over each leaf as soon as it is final.

        Draws keep their order. Every intermediate is freed after its last use. The generators
        end in the states in which a plain call would leave them; one that was seeded before
        ``record`` starts from its state at that time, the global ones from their state now.

        Args:
            take: called once per tensor leaf as ``take(i, tensor)``, in the order in which
                leaves become final. ``i`` is the position in ``optree.tree_leaves(tree,
                namespace="zfunc")``, counting every leaf (there is no call for those that are
                no tensors). Copy what you keep, and do not write to the tensor: it may share
                memory with other leaves and with values still needed. A tensor that existed
                before ``record`` is handed over itself.

        Raises:
            PlacementError: the initialiser looks at values that it draws, and the global
                generator is not in the state that it was recorded in.
        """
        memory = CellValues()
        with LOCK:
            if not all(torch.equal(g.get_state(), state) for g, state in self._pinned.items()):
                raise PlacementError(_MOVED)
            memory.update((cell, cell.load()) for cell in self._starts)
        ends = {cell for _, cell in self._ends}
        needed = [one.op for one in live(self._ops, self._leaves, ends)]
        turns = live(schedule(needed), self._leaves, ends)
        for leaf in run(turns, memory):
            leaf.hand_over(memory[leaf.view.cell], take)
        written = {leaf for one in turns for leaf in one.done}
        for leaf in self._leaves:
            if leaf not in written:
                leaf.hand_over(leaf.view.cell.load(), take)
        with LOCK:
            for generator, cell in self._ends:
                generator.set_state(memory[cell])


_MOVED = (
    "step.init: the initialiser looks at values that it draws (as nn.init.trunc_normal_ does), so "
    "it can only be replayed from the state of torch's generator in which it was recorded, and "
    "that state has changed since. Restore it with torch.set_rng_state, or record again."
)


def view(storage: UntypedStorage, v: View) -> Tensor:
    """The tensor that ``v`` describes, on ``storage``, sharing its memory."""
    tensor = torch.empty(0, dtype=v.dtype, device=storage.device)
    tensor.set_(storage, v.offset, v.size, v.stride)
    if v.conj:
        torch._C._set_conj(tensor, True)
    if v.neg:
        torch._C._set_neg(tensor, True)
    return tensor


def geometry(tensor: Tensor, cell: MemoryCell) -> View:
    """The window through which ``tensor`` sees its cell."""
    size, stride = tuple(tensor.size()), tuple(tensor.stride())
    bits = tensor.is_conj(), tensor.is_neg()
    return View(cell, tensor.dtype, size, stride, int(tensor.storage_offset()), *bits)


def live(
    ops: Sequence[RecordedOperation],
    leaves: Sequence[StateLeaf] = (),
    roots: Collection[MemoryCell] = (),
    known: Collection[MemoryCell] = (),
) -> list[Scheduled]:
    """The operations that ``leaves`` and ``roots`` need, in order, with the life of each cell.

    Args:
        ops: a tape.
        leaves: final after the last operation that writes their cell.
        roots: cells that must hold their last value at the end.
        known: generator states (each written once) that need no computing.
    """
    pending: dict[MemoryCell, list[StateLeaf]] = {}
    for leaf in leaves:
        pending.setdefault(leaf.view.cell, []).append(leaf)
    needed, turns = set(roots).difference(known), []
    for op in reversed(ops):
        if not needed and not pending:
            break
        final = [cell for cell in op.writes if cell in pending]
        if not final and needed.isdisjoint(op.writes):
            continue
        free = (op.reads | op.writes) - needed
        done = [leaf for cell in final for leaf in pending.pop(cell)]
        needed = (needed.union(final) - op.erases) | op.reads.difference(known)
        turns.append(Scheduled(op, tuple(sorted(done, key=lambda leaf: leaf.indices)), free))
    return turns[::-1]


def schedule(ops: Sequence[RecordedOperation]) -> list[RecordedOperation]:
    """Reorder ``ops``: draws stay in order, the rest goes where memory is shortest-lived.

    What depends on a draw runs right after the last such draw; what depends on none runs
    right before its first use. Every read-write dependence between two operations is kept.
    """
    written: dict[MemoryCell, int] = {}
    readers: dict[MemoryCell, set[int]] = {}
    users: list[list[int]] = [[] for _ in ops]
    place: list[int] = []
    for i, op in enumerate(ops):
        before = {written[cell] for cell in op.reads | op.writes if cell in written}
        before.update(*(readers.pop(cell, ()) for cell in op.writes))
        for j in before:
            users[j].append(i)
        place.append(i if op.draw else max((place[j] for j in before), default=-1))
        written.update(dict.fromkeys(op.writes, i))
        for cell in op.reads - op.writes:
            readers.setdefault(cell, set()).add(i)
    for i in reversed(range(len(ops))):
        if place[i] < 0:
            place[i] = min((place[j] for j in users[i]), default=i)
    return [ops[i] for i in sorted(range(len(ops)), key=lambda i: (place[i], i))]


def run(turns: Sequence[Scheduled], memory: CellValues) -> Iterator[StateLeaf]:
    """Run a plan on real memory; ``memory`` holds known cells before and the roots after.

    Yields each leaf when it is final: it can be read from ``memory`` until the next.
    """
    for turn in turns:
        _run_operation(turn.op, memory)
        yield from turn.done
        for cell in turn.free:
            memory.pop(cell, None)


def _run_operation(op: RecordedOperation, memory: CellValues) -> None:
    def real(value: Any) -> Any:
        return view(memory[value.cell], value) if isinstance(value, View) else value

    args, kwargs = pytree.tree_map(real, (op.args, op.kwargs))
    with torch.no_grad(), _as_recorded(op, memory):
        result = op.func(*args, **kwargs)
    tensors = [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor)]
    for tensor, expected in zip(tensors, op.outputs, strict=True):
        if expected is not None:
            if geometry(tensor, expected.cell) != expected:
                raise PlacementError(_OTHER_GEOMETRY.format(op.func, expected.size, tensor.shape))
            memory[expected.cell] = tensor.untyped_storage()


_OTHER_GEOMETRY = (
    "{} gave a result of another shape, stride or dtype than its meta kernel had predicted "
    "(shapes {} and {}), so what follows cannot be replayed. "
    "Build the state and call step.place(state) instead."
)


@contextmanager
def _as_recorded(op: RecordedOperation, memory: CellValues) -> Iterator[None]:
    """The default dtype of the recording, and the generator in the state that ``op`` reads."""
    draw = op.draw
    if draw is None and op.default_dtype == torch.get_default_dtype():
        yield
        return
    with LOCK:  # both are global, not per thread
        dtype = torch.get_default_dtype()
        state = None if draw is None else draw.generator.get_state()
        try:
            torch.set_default_dtype(op.default_dtype)
            if draw is not None:
                draw.generator.set_state(memory[draw.before])
            yield
            if draw is not None:
                memory[draw.after] = draw.generator.get_state()
        finally:
            torch.set_default_dtype(dtype)
            if draw is not None and state is not None:
                draw.generator.set_state(state)
