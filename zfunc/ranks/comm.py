"""Collectives between the ranks along one mesh axis: asynchronous, counted, and never a hang.

:class:`Group` is what the rest of zfunc sees: it checks arguments, counts bytes, announces each
collective and bounds what is under way. A transport moves the data, one per backend:
``zfunc.ranks.gloo`` (point to point), ``zfunc.ranks.nccl`` (native),
``zfunc.ranks.simulation`` (threads that meet).

Ranks that disagree on what comes next would wait for each other for ever, or add up unrelated
numbers. So every collective sends each peer a header; one that differs, or that does not come
within the timeout, is a :class:`~zfunc.errors.DesyncError`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from threading import RLock
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from zfunc.errors import DesyncError
from zfunc.ranks.accounting import Ledger, ledger
from zfunc.ranks.messages import read, written
from zfunc.ranks.routes import (
    all_gather_bytes,
    all_reduce_bytes,
    broadcast_bytes,
    even_cuts,
    exchange_bytes,
    goes_whole,
    reduce_scatter_bytes,
)
from zfunc.ranks.transport import HEADER_BYTES, Call, Steps, Transport, announced
from zfunc.ranks.world import World, current

__all__ = [
    "Group",
    "Handle",
    "Ledger",
    "all_reduce_bytes",
    "even_cuts",
    "groups_of",
    "ledger",
    "settle",
    "unchecked",
]

T = TypeVar("T")

INFLIGHT_BYTES = 64 * 2**20  # that unfinished reductions may hold in the host's memory


class Handle(Generic[T]):
    """A collective under way. Its tensors belong to it until :meth:`wait` returns.

    One that nobody waits for is completed by its group when the next collective is issued: the
    peers take part in it all the same.
    """

    def __init__(self, steps: Steps[T], group: Group, turn: int) -> None:
        self._lock = RLock()
        self._steps: Steps[T] | None = steps
        self._group = group
        self._turn = turn  # its number among those that are finished in their order; 0 if in any
        self._error: BaseException | None = None
        self._epoch = group.epoch
        self._result: T
        group._under_way.add(steps)
        self._run(lambda: next(steps))

    @property
    def done(self) -> bool:
        """Whether :meth:`wait` would return, or raise, at once."""
        return self._steps is None

    def wait(self) -> T:
        """Block until the collective is complete on this rank. Calling again is free.

        Returns:
            What the collective promises: see the methods of :class:`Group`.

        Raises:
            DesyncError: a peer is in another collective, silent or gone.
        """
        with self._lock:
            if self._is_stale():
                self._abandon(_stale())
            if self._steps is not None:
                self._group._finish_before(self)
            if (steps := self._steps) is not None:  # not finished by what went before, either
                self._run(lambda: next(steps))
        if self._error is not None:
            raise self._error
        return self._result

    def _run(self, advance: Callable[[], None]) -> None:
        try:
            with torch.no_grad():
                advance()
            return
        except StopIteration as end:
            self._result = end.value
        except BaseException as error:
            self._error = error
        self._let_go()
        if isinstance(self._error, DesyncError):
            self._group._fail(self._error)

    def _abandon(self, error: DesyncError) -> None:
        """Take no further part: the group has failed."""
        if self._steps is not None:
            self._steps.close()
            self._error = error
            self._let_go()

    def _is_stale(self) -> bool:
        """Whether the group was made anew meanwhile: what this waits for will not come."""
        return self._epoch != self._group.epoch

    def _let_go(self) -> None:
        """Drop the generator, and with it the buffers."""
        self._group._under_way.discard(self._steps)
        self._steps = None

    def __del__(self) -> None:
        if self._steps is not None and not self._is_stale():
            self._group._dropped.append(self)


class Group:
    """The ranks along one axis of a mesh (or along several, flattened), as this rank sees them.

    All ranks of the group issue the same collectives in the same order; they may wait for them
    in any order (between groups that share ranks, in the same one). Every method that returns a
    :class:`Handle` is asynchronous.

    Attributes:
        axis: the axis' name; a flattened group joins the names with ``+``.
        rank: this rank's index along the axis.
        size: the number of ranks along the axis.
        epoch: how often it was made anew.
        members: the ranks of the world that are in it, where that is known.

    Args:
        connect: makes its transport anew, in the world's next epoch. A group of several ranks
            without it ends with its first error.
    """

    def __init__(
        self,
        axis: str,
        world: World,
        transport: Transport,
        members: tuple[int, ...] = (),
        connect: Callable[[], Transport] | None = None,
    ) -> None:
        self.axis = axis
        self.members = members
        self.epoch = 0
        self.rank = transport.rank
        self.size = transport.size
        self._world = world
        self._transport = transport
        self._connect = connect
        self.issued = self.hosted = 0
        self._failure: DesyncError | None = None
        self._under_way: set[Steps[Any] | None] = set()  # the cycle collector would close them
        self._dropped: list[Handle[Any]] = []
        self._inflight: list[tuple[weakref.ref[Handle[Any]], int]] = []
        world.groups.append(self)

    def __repr__(self) -> str:
        return f"Group({self.axis!r}, rank={self.rank}, size={self.size})"

    def all_gather(
        self,
        full: Tensor,
        shard: Tensor,
        *,
        cuts: Sequence[int] | None = None,
        label: str = "",
    ) -> Handle[Tensor]:
        """Fill ``full`` with every rank's segment; ``wait()`` returns ``full``.

        Args:
            full: 1-D, contiguous; written in place.
            shard: 1-D, this rank's segment; not copied if it already is that memory of ``full``.
            cuts: ``size + 1`` offsets into ``full``; even ones if ``None``.
            label: names the collective in errors and ledgers.

        Raises:
            ValueError: a wrong shape, dtype or device, or cuts that do not cover ``full``.
        """
        offsets = self._cuts("all_gather", label, full, cuts)
        own = full[offsets[self.rank] : offsets[self.rank + 1]]
        if own.shape != shard.shape or own.dtype != shard.dtype:
            raise ValueError(
                f"all_gather({label!r}): shard is {shard.dtype} {list(shard.shape)}, expected "
                f"{own.dtype} {list(own.shape)}, the segment of rank {self.rank}"
            )
        if own.data_ptr() != shard.data_ptr():
            with torch.no_grad():
                own.copy_(shard)
        sent = all_gather_bytes(offsets, full.element_size(), self.rank, self.size)
        call = self._call("all_gather", label, (full.dtype, offsets), sent, full)
        return self._issue(full, lambda: self._transport.all_gather(call, full, offsets))

    def reduce_scatter(
        self,
        full: Tensor,
        *,
        cuts: Sequence[int] | None = None,
        out: Tensor | None = None,
        label: str = "",
    ) -> Handle[Tensor]:
        """Sum over ranks; ``wait()`` returns this rank's 1-D segment of the sum.

        Segments are added in rank order, so a value does not depend on which rank owns it.
        Where too much is under way, earlier reductions are finished first.

        Args:
            full: 1-D, contiguous; read until ``wait()`` returns, and not kept after that.
            cuts: ``size + 1`` offsets into ``full``; even ones if ``None``.
            out: receives the result, instead of a new tensor; it may be this rank's segment
                of ``full``, but no other memory of it.
            label: names the collective in errors and ledgers.

        Raises:
            ValueError: ``full`` is not 1-D and contiguous, cuts that do not cover it, or an
                ``out`` that is not like this rank's segment.
        """
        offsets = self._cuts("reduce_scatter", label, full, cuts)
        full = full.detach()
        own = full[offsets[self.rank] : offsets[self.rank + 1]]
        if out is not None and (out.shape != own.shape or out.dtype != own.dtype):
            raise ValueError(
                f"reduce_scatter({label!r}): out is {out.dtype} {list(out.shape)}, expected "
                f"{own.dtype} {list(own.shape)}, the segment of rank {self.rank}"
            )
        held = full.nbytes + own.nbytes * max(0, self.size - 2)
        sent = reduce_scatter_bytes(offsets, full.element_size(), self.rank, self.size)
        call = self._call("reduce_scatter", label, (full.dtype, offsets), sent, full)
        return self._reduce(
            full, held, lambda: self._transport.reduce_scatter(call, full, offsets, out)
        )

    def all_reduce(self, x: Tensor, *, label: str = "") -> Handle[Tensor]:
        """Sum over ranks, in place; ``wait()`` returns ``x``, the same bits on every rank.

        Args:
            x: contiguous, of any shape.
            label: names the collective in errors and ledgers.

        Raises:
            ValueError: ``x`` is not contiguous.
        """
        flat = self._flat("all_reduce", label, x)
        sent = all_reduce_bytes(flat.numel(), flat.element_size(), self.rank, self.size)
        if goes_whole(flat.nbytes, self.size):
            offsets, held = None, sent
        else:
            offsets = even_cuts(flat.numel(), self.size)
            own = (offsets[self.rank + 1] - offsets[self.rank]) * flat.element_size()
            held = own * (self.size - 1)
        call = self._call("all_reduce", label, (flat.dtype, flat.numel()), sent, flat)
        return self._reduce(
            flat, held, lambda: _returning(x, self._transport.all_reduce(call, flat, offsets))
        )

    def all_to_all(
        self, chunks: Sequence[Tensor], *, sizes: Sequence[int] | None = None, label: str = ""
    ) -> Handle[list[Tensor]]:
        """Send ``chunks[i]`` to rank i; ``wait()`` returns new tensors, one from each rank.

        Args:
            chunks: one contiguous tensor per rank, all of one dtype.
            sizes: how many elements arrive from each rank, as 1-D tensors. If ``None``, every
                rank sends what this rank's own chunk looks like, and that shape is kept.
            label: names the collective in errors and ledgers.

        Raises:
            ValueError: not one chunk and size per rank, chunks of different dtypes, or a size of
                this rank's own chunk that is another.
        """
        where = f"all_to_all({label!r})"
        if len(chunks) != self.size or (sizes is not None and len(sizes) != self.size):
            raise ValueError(f"{where}: expected {self.size} chunks (and sizes), one per rank")
        if len({chunk.dtype for chunk in chunks}) > 1:
            raise ValueError(f"{where}: chunks differ in dtype: {[c.dtype for c in chunks]}")
        flats = [self._flat("all_to_all", label, chunk) for chunk in chunks]
        own = chunks[self.rank]
        expected = [own.numel()] * self.size if sizes is None else list(sizes)
        if expected[self.rank] != own.numel():
            raise ValueError(
                f"{where}: sizes[{self.rank}] is {expected[self.rank]}, but the chunk of this rank "
                f"for itself has {own.numel()} elements"
            )
        sent = sum(flat.nbytes for flat in flats) - flats[self.rank].nbytes
        call = self._call("all_to_all", label, (own.dtype,), sent, own)

        def start() -> Steps[list[Tensor]]:
            steps = self._transport.all_to_all(call, flats, expected)
            return steps if sizes is not None else _reshaped(steps, own.shape)

        return self._issue(own, start)

    def broadcast(self, x: Tensor, src: int, *, label: str = "") -> Handle[Tensor]:
        """Overwrite ``x`` with that of rank ``src``; ``wait()`` returns ``x``.

        Args:
            x: contiguous, of any shape.
            src: a rank of this group.
            label: names the collective in errors and ledgers.

        Raises:
            ValueError: ``x`` is not contiguous, or ``src`` is not a rank of this group.
        """
        if not 0 <= src < self.size:
            raise ValueError(f"broadcast({label!r}): src={src}, expected 0 to {self.size - 1}")
        flat = self._flat("broadcast", label, x)
        sent = broadcast_bytes(flat.nbytes, self.rank, self.size, src)
        call = self._call("broadcast", label, (flat.dtype, flat.numel(), src), sent, flat)
        return self._issue(flat, lambda: _returning(x, self._transport.broadcast(call, flat, src)))

    def exchange(self, obj: Any, *, label: str = "") -> list[Any]:
        """Every rank's small object, in rank order; blocks.

        Args:
            obj: plain data, the same kinds as in ``zfunc.ranks.messages``: it travels as JSON.
            label: names the collective in errors and ledgers.

        Raises:
            TypeError: it is something else.
            DesyncError: what came from a rank is no message.
        """
        parts = self._exchanged("exchange", label, written(obj))
        try:
            return [read(part) for part in parts]
        except ValueError as error:
            failed = DesyncError(f"exchange({label!r}): {error}")
            self._fail(failed)
            raise failed from error

    def barrier(self, *, label: str = "") -> None:
        """Return once every rank of the group has come here."""
        self._exchanged("barrier", label, b"")

    def _exchanged(self, kind: str, label: str, data: bytes) -> list[bytes]:
        call = self._call(kind, label, (), None)
        parts = self._issue(None, lambda: self._transport.exchange(call, data)).wait()
        sent = exchange_bytes([len(part) for part in parts], self.rank, self.size)
        self._record(call, sent, None)
        return parts

    def mark(self, label: str) -> None:
        """Tell the neighbours that this rank has come here, and check their mark before this one.

        For what runs again on the device without Python's taking part. The host waits only for a
        neighbour that is a whole mark behind.

        Raises:
            DesyncError: a neighbour did something else, is silent or gone.
        """
        call = self._call("mark", label, (), None)
        try:
            self._transport.mark(call)
        except DesyncError as error:
            self._fail(error)
            raise

    def settle(self) -> None:
        """Check the headers of all collectives that were waited for inside :func:`unchecked`.

        Raises:
            DesyncError: a peer was in another one, is silent or gone.
        """
        try:
            self._transport.settle()
        except DesyncError as error:
            self._fail(error)
            raise

    def _cuts(
        self, kind: str, label: str, full: Tensor, cuts: Sequence[int] | None
    ) -> tuple[int, ...]:
        if full.dim() != 1 or not full.is_contiguous():
            raise ValueError(
                f"{kind}({label!r}): full has shape {list(full.shape)} and stride "
                f"{full.stride()}, expected a contiguous 1-D tensor: pass x.reshape(-1)"
            )
        if cuts is None:
            return even_cuts(full.numel(), self.size)
        offsets = tuple(cuts)
        rising = all(a <= b for a, b in pairwise(offsets))
        if len(offsets) != self.size + 1 or (offsets[0], offsets[-1]) != (0, full.numel()):
            rising = False
        if not rising:
            raise ValueError(
                f"{kind}({label!r}): cuts {list(offsets)}, expected {self.size + 1} rising "
                f"offsets from 0 to {full.numel()}"
            )
        return offsets

    def _flat(self, kind: str, label: str, x: Tensor) -> Tensor:
        if not x.is_contiguous():
            raise ValueError(
                f"{kind}({label!r}): a {list(x.shape)} tensor of stride {x.stride()} is not "
                "contiguous: pass x.contiguous()"
            )
        return x.detach().view(-1)

    def _call(
        self,
        kind: str,
        label: str,
        what: tuple[Any, ...],
        sent: int | None,
        data: Tensor | None = None,
    ) -> Call:
        """Number and announce a collective on ``data`` that sends ``sent`` bytes of payload.

        ``None`` if they are not known yet, and :meth:`_record` is called when they are.
        """
        if self._failure is not None:
            raise DesyncError(
                f"{kind}({label!r}): the group {self.axis!r} failed before: {self._failure}"
            ) from self._failure
        if self._world.gate is not None:
            self._world.gate(f"{kind}({label!r})")
        self.issued += 1
        self.hosted += self._transport.hosted(data)
        call = Call(kind, label, announced(kind, label, what), self.issued)
        if sent is not None:
            self._record(call, sent, data)
        return call

    def _record(self, call: Call, sent: int, data: Tensor | None) -> None:
        if self.size > 1:
            headers = HEADER_BYTES * self._transport.headers_sent(call.kind, data)
            for book in tuple(self._world.ledgers):
                book.record(call.kind, call.label, sent, headers)

    def _fail(self, error: DesyncError) -> None:
        """Give up: ranks that disagree cannot go on together.

        What already runs on the device would wait for ever, in whichever communicator it is: so
        those of all groups of the world are stopped.
        """
        self._failure = error
        if self._transport.in_rounds(None):  # partners far away wait for what would come next
            for handle in self._unfinished():
                handle._abandon(error)
        self._transport.leave(error)
        for group in groups_of(self._world):
            if group._transport.abort() and group._failure is None:
                group._failure = error
                group._transport.leave(error)

    def _issue(
        self, data: Tensor | None, start: Callable[[], Steps[T]], held: int | None = None
    ) -> Handle[T]:
        """Issue a collective; a reduction that holds memory is finished in its turn.

        So is whatever goes on in ``wait``. What was dropped is finished behind this one, which
        peers may wait for before they take part in that.
        """
        in_turn = held is not None or self._transport.in_rounds(data)
        handle = Handle(start(), self, self.issued if in_turn else 0)
        if in_turn:
            self._inflight = [pair for pair in self._inflight if _is_unfinished(pair[0])]
            self._inflight.append((weakref.ref(handle), held or 0))
        self._finish_dropped()
        return handle

    def _reduce(self, data: Tensor, held: int, start: Callable[[], Steps[T]]) -> Handle[T]:
        """Issue a reduction, after finishing as many of the oldest as its ``held`` bytes need."""
        if not self._transport.hosted(data):
            return self._issue(data, start)  # in the device's memory, which the caller bounds
        unfinished = [(ref, size) for ref, size in self._inflight if _is_unfinished(ref)]
        total = held + sum(size for _, size in unfinished)
        while unfinished and total > INFLIGHT_BYTES:
            ref, size = unfinished.pop(0)
            total -= size
            if oldest := ref():
                oldest.wait()
        return self._issue(data, start, held)

    def _finish_before(self, handle: Handle[Any]) -> None:
        """Finish what goes on in ``wait`` and was issued before this one, if this one does.

        Ranks that waited for such in different orders would wait for each other. Large
        all-reduces take two rounds, so reductions always do; in a large group everything does.
        """
        earlier = [other for other in self._unfinished() if 0 < other._turn < handle._turn]
        for other in sorted(earlier, key=lambda other: other._turn):
            other.wait()

    def _unfinished(self) -> list[Handle[Any]]:
        """What takes turns, and what was dropped; a handle may be named twice.

        Of handles that the cycle collector ends only the list of the dropped ones knows.
        """
        alive = [ref() for ref, _ in self._inflight]
        return [
            handle for handle in (*self._dropped, *alive) if handle is not None and not handle.done
        ]

    def finish(self) -> None:
        """Complete what this rank has issued and nobody has waited for: peers are in it too.

        Raises:
            DesyncError: a peer is not.
        """
        if self._failure is None:
            for handle in self._unfinished():
                handle.wait()
            self._finish_dropped()
            self.settle()

    def hang_up(self) -> None:
        """Take no further part; peers that wait for this rank raise."""
        self._transport.hang_up()

    def stop(self, error: DesyncError) -> None:
        """Fail, if it has not failed yet, and take no further part."""
        if self.size > 1 and self._failure is None:
            self._fail(error)
        self._transport.hang_up()

    def renew(self) -> None:
        """Begin anew, with nothing under way; all ranks of the group do, in one epoch.

        It stays the same object, which placed states and steps refer to. Whoever waits for what
        was under way is told that it will not come.
        """
        if self._connect is None:
            return
        self.epoch += 1
        for steps in tuple(self._under_way):
            if steps is not None:
                steps.close()
        self._under_way.clear()
        self._dropped.clear()
        self._inflight.clear()
        self.issued = self.hosted = 0
        self._failure = None
        self._transport = self._connect()

    @property
    def cut_short(self) -> bool:
        """Whether work of earlier steps was still under way on a device when it was stopped."""
        return self._transport.cut_short()

    def _finish_dropped(self) -> None:
        while self._dropped:
            handle = self._dropped.pop(0)
            if self._failure is None:
                handle.wait()
            else:  # nobody takes part any longer
                handle._abandon(self._failure)


@contextmanager
def unchecked() -> Iterator[None]:
    """Check headers of collectives on the device late in this block: at its end, all of them.

    Waiting for such a collective does not then hold the host until its neighbours have come as
    far. Whatever was received, nothing leaves the block before every header is checked; a step is
    such a block.

    Raises:
        DesyncError: a peer was in another collective, is silent or gone.
    """
    world = current()
    if world.size == 1:
        yield
        return
    world.unchecked += 1
    try:
        yield
    finally:
        world.unchecked -= 1
    settle()


def groups_of(world: World) -> tuple[Group, ...]:
    """Every group that was made in a world."""
    return tuple(group for group in world.groups if isinstance(group, Group))


def settle() -> None:
    """Check what is unchecked in every group of this rank, as before the host reads a value.

    Raises:
        DesyncError: a peer was in another collective, is silent or gone.
    """
    for group in tuple(current().groups):
        group.settle()


def _stale() -> DesyncError:
    return DesyncError(
        "this was under way when the groups failed, and zf.recover_world() has made new ones: it "
        "will not come. Give the state that holds it: zf.recover_world(state)"
    )


def _is_unfinished(ref: weakref.ref[Handle[Any]]) -> bool:
    handle = ref()
    return handle is not None and not handle.done


def _returning(x: T, steps: Steps[Any]) -> Steps[T]:
    yield from steps
    return x


def _reshaped(steps: Steps[list[Tensor]], shape: torch.Size) -> Steps[list[Tensor]]:
    received = yield from steps
    return [part.view(shape) for part in received]
