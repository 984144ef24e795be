"""``simulate(n)``: a world of n ranks that are threads of this process.

A collective is a meeting. Each rank leaves its tensors and goes on. The last rank to come does the
whole collective for all, so nothing is copied twice and results do not depend on timing. The
checks, the errors and the bytes in the ledger are those of real ranks.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import copy_context
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor
from torch.utils import _python_dispatch as modes

from zfunc.errors import DesyncError
from zfunc.ranks.adjacency import is_direct
from zfunc.ranks.connected import ConnectedGroup
from zfunc.ranks.mailboxes import Mailboxes, SimulatedMessages
from zfunc.ranks.routes import summed
from zfunc.ranks.transport import (
    EXITED,
    Collective,
    Steps,
    Transport,
    absent,
    elsewhere,
    exited,
    mismatch,
    missized,
    silence,
    told,
)
from zfunc.ranks.world import Judge, World, entered, on_leave, waiting

__all__ = ["modes_put_back", "simulate"]

T = TypeVar("T")
Serve = Callable[[list[Any]], list[Any]]  # the results of all members, of their parts
GRACE = 2.0  # seconds that the other ranks get to end once one has failed


class Deserted(DesyncError):
    """Raised in a rank because another one failed; never the error that the caller sees."""


@dataclass
class Assembly:
    """A meeting of all ranks outside of any group: their reports, and what is decided on them."""

    reports: dict[int, str] = field(default_factory=dict)
    judged: str = ""
    absent: str = ""
    failed: bool = False  # whether one is absent because it failed
    over: threading.Event = field(default_factory=threading.Event)


@dataclass
class Meeting:
    """One collective of a simulated group: the ranks that have come, and their tensors."""

    members: tuple[int, ...]
    parts: dict[int, tuple[Collective, Any]] = field(default_factory=dict)  # of those who have come
    results: dict[int, Any] = field(default_factory=dict)
    errors: dict[int, DesyncError] = field(default_factory=dict)
    over: threading.Event = field(default_factory=threading.Event)

    def missing(self) -> list[int]:
        return [rank for rank in self.members if rank not in self.parts]


class Fabric:
    """What the ranks of one simulated world share."""

    def __init__(self, size: int, timeout: float) -> None:
        self.size = size
        self.timeout = timeout
        self.lock = threading.Lock()
        self.meetings: dict[tuple[tuple[int, ...], int], Meeting] = {}
        self.gone: dict[int, str] = {}
        self.stopped: dict[int, str] = {}  # who take no further part in this epoch
        self.parted: dict[tuple[tuple[int, ...], int], DesyncError] = {}  # who failed in a group
        self.mailboxes = Mailboxes(self.lock, timeout, self._absence, self._is_busy)
        self.busy_ranks = 0  # ranks that are in a block of ``busy``
        self.relieved = -math.inf  # when the last of them was done
        self.epoch = 0
        self.assembly = Assembly()

    def join(
        self,
        members: tuple[int, ...],
        rank: int,
        call: Collective,
        part: Any,
        serve: Serve,
        epoch: int,
    ) -> Meeting:
        """Add this rank's ``part``; the last to come runs ``serve`` on all parts in rank order."""
        key = (members, call.number)
        with self.lock:
            if epoch != self.epoch:
                raise DesyncError(f"{call}: its group was made anew, and nobody waits for it")
            meeting = self.meetings.setdefault(key, Meeting(members))
            meeting.parts[rank] = (call, part)
            self._check(meeting, rank, call)
            complete = not meeting.errors and len(meeting.parts) == len(members)
        if complete:
            self._hold(meeting, serve)
            with self.lock:
                self.meetings.pop(key, None)
                # Who goes on may free at once what it gave. It has come: it is not missing.
                meeting.parts = {peer: (its, None) for peer, (its, _) in meeting.parts.items()}
            meeting.over.set()
        return meeting

    def _hold(self, meeting: Meeting, serve: Serve) -> None:
        parts = [meeting.parts[member][1] for member in meeting.members]
        try:
            meeting.results = dict(zip(meeting.members, serve(parts), strict=True))
        except Exception as error:  # no rank has a result, so no rank may go on
            for member, (call, _) in meeting.parts.items():
                meeting.errors[member] = DesyncError(f"{call} failed: {error!r}")

    def _check(self, meeting: Meeting, rank: int, call: Collective) -> None:
        for peer, (other, _) in meeting.parts.items():
            if other.digest != call.digest:
                meeting.errors[rank] = mismatch(call, peer, told(other.digest))
                meeting.errors.setdefault(peer, mismatch(other, rank, told(call.digest)))
        for peer in meeting.missing():
            if self._absence(call, meeting.members, peer) is not None:
                self._desert(meeting, peer)
        if meeting.errors:
            self._spread(meeting)

    def _spread(self, meeting: Meeting) -> None:
        """An error of one member is an error of all: those that agree cannot go on, either."""
        first = meeting.errors[min(meeting.errors)]
        heard = elsewhere(first)
        if isinstance(first, Deserted):  # the one who left is to blame, not who heard of it
            heard = Deserted(str(heard))
        for rank in meeting.members:
            meeting.errors.setdefault(rank, heard)
        meeting.over.set()

    def wait(self, meeting: Meeting, rank: int) -> Any:
        """This rank's result, once all have come."""
        if not meeting.over.is_set():
            with waiting():
                while not meeting.over.wait(self.timeout):
                    self._time_out(meeting)
        if rank in meeting.errors:
            raise meeting.errors[rank]
        return meeting.results.pop(rank)

    def _time_out(self, meeting: Meeting) -> None:
        with self.lock:
            if meeting.over.is_set() or not meeting.missing() or self._is_busy():
                return  # over, being held, or waited for by who may wait for a busy rank
            for rank, (call, _) in meeting.parts.items():
                meeting.errors[rank] = silence(call, meeting.missing(), self.timeout)
            self._spread(meeting)

    def _is_busy(self) -> bool:
        """Whether a rank was busy in the time of a timeout. The caller holds the lock."""
        return self.busy_ranks > 0 or time.monotonic() - self.relieved < self.timeout

    @contextmanager
    def while_busy(self) -> Iterator[None]:
        """A block in which no rank is taken for silent."""
        with self.lock:
            self.busy_ranks += 1
        try:
            yield
        finally:
            with self.lock:
                self.busy_ranks -= 1
                self.relieved = time.monotonic()

    def leave(self, rank: int, why: str) -> None:
        """``rank`` will come to no further meeting: wake up the ranks that wait for it."""
        with self.lock:
            self.gone[rank] = why
            self._wake(rank)
            if self.assembly.reports and rank not in self.assembly.reports:
                self._give_up(0.0)

    def stop(self, rank: int, why: str) -> None:
        """``rank`` will come to no further meeting of this epoch."""
        with self.lock:
            self.stopped[rank] = f"has stopped ({why})"
            self._wake(rank)

    def part(self, members: tuple[int, ...], rank: int, error: DesyncError, epoch: int) -> None:
        """``rank`` has failed in one group: wake up the ranks that wait for it there."""
        with self.lock:
            if epoch == self.epoch:
                self.parted.setdefault((members, rank), error)
                self._wake(rank)

    def _absence(self, call: Collective, members: tuple[int, ...], rank: int) -> DesyncError | None:
        """The error for who waits in a group for a rank that takes no further part in it."""
        if (error := self.parted.get((members, rank))) is not None:
            return Deserted(f"{call}: rank {rank} has stopped: {error}")
        if why := self.gone.get(rank) or self.stopped.get(rank):
            kind = Deserted if why.startswith("failed") else DesyncError
            return kind(f"{call}: rank {rank} {why} and will not take part")
        return None

    def _wake(self, rank: int) -> None:
        self.mailboxes.wake(rank)
        for meeting in self.meetings.values():
            if rank in meeting.missing() and not meeting.over.is_set():
                self._desert(meeting, rank)
                if meeting.errors:  # it may have failed in another group only
                    self._spread(meeting)

    def assemble(self, rank: int, report: str, judge: Judge, until: float) -> str:
        """Meet all ranks; the next epoch begins unless ``judge`` gives a reason against it."""
        began = time.monotonic()
        with self.lock:
            assembly = self.assembly
            assembly.reports[rank] = report
            if len(assembly.reports) == self.size:
                assembly.judged = judge([assembly.reports[k] for k in range(self.size)])
                if not assembly.judged:
                    self.epoch += 1
                    self.meetings.clear()
                    self.mailboxes.clear()
                    self.stopped.clear()
                    self.parted.clear()
                self._dissolve()
            elif any(peer not in assembly.reports for peer in self.gone):
                self._give_up(0.0)
        with waiting():
            if not assembly.over.wait(max(0.0, until - time.monotonic())):
                with self.lock:
                    if not assembly.over.is_set():
                        self._give_up(time.monotonic() - began)
        if assembly.absent:
            raise (Deserted if assembly.failed else DesyncError)(assembly.absent)
        return assembly.judged

    def _give_up(self, waited: float) -> None:
        reports = self.assembly.reports
        missing = {k: self.gone.get(k, "") for k in range(self.size) if k not in reports}
        self.assembly.absent = absent(missing, waited)
        self.assembly.failed = any(why.startswith("failed") for why in missing.values())
        self._dissolve()

    def _dissolve(self) -> None:
        """End this meeting; ranks that come from now on come to the next one."""
        self.assembly.over.set()
        self.assembly = Assembly()

    def _parted(self, members: tuple[int, ...]) -> dict[int, DesyncError]:
        """The errors, by rank, of the first collective on which ranks disagreed."""
        failed = [k for k, m in self.meetings.items() if k[0] == members and m.errors]
        return self.meetings[min(failed)].errors if failed else {}

    def _desert(self, meeting: Meeting, rank: int) -> None:
        parted = self._parted(meeting.members)
        for peer, (call, _) in meeting.parts.items():
            if peer in parted:  # why it is gone, perhaps
                meeting.errors[peer] = parted[peer]
                continue
            if (error := self._absence(call, meeting.members, rank)) is not None:
                meeting.errors[peer] = error


class Meetings(Transport):
    """The transport of one simulated group. Reductions add in rank order."""

    def __init__(self, fabric: Fabric, members: tuple[int, ...], world_rank: int) -> None:
        self.rank = members.index(world_rank)
        self.size = len(members)
        self._fabric, self._members, self._world_rank = fabric, members, world_rank
        self._epoch = fabric.epoch
        self.messages = SimulatedMessages(
            fabric.mailboxes, members, world_rank, lambda: fabric.epoch
        )

    def leave(self, error: DesyncError) -> None:
        self._fabric.part(self._members, self._world_rank, error, self._epoch)

    def mark(self, call: Collective) -> None:
        for _ in self._meet(call, None, list):
            pass

    def _meet(self, call: Collective, part: Any, serve: Serve) -> Steps[Any]:
        rank, epoch = self._world_rank, self._epoch
        meeting = self._fabric.join(self._members, rank, call, part, serve, epoch)
        yield
        return self._fabric.wait(meeting, self._world_rank)

    def all_gather(self, call: Collective, full: Tensor, cuts: Sequence[int]) -> Steps[Tensor]:
        def serve(fulls: list[Tensor]) -> list[Tensor]:
            for source, (start, end) in enumerate(pairwise(cuts)):
                for target in range(len(fulls)):
                    if target != source and start < end:
                        fulls[target][start:end].copy_(fulls[source][start:end])
            return fulls

        return self._meet(call, full, serve)

    def reduce_scatter(
        self, call: Collective, full: Tensor, cuts: Sequence[int], out: Tensor | None
    ) -> Steps[Tensor]:
        def serve(parts: list[tuple[Tensor, Tensor | None]]) -> list[Tensor]:
            sums = [_sum([full[a:b] for full, _ in parts]) for a, b in pairwise(cuts)]
            outs = [out for _, out in parts]
            return [s if o is None else o.copy_(s) for s, o in zip(sums, outs, strict=True)]

        return self._meet(call, (full, out), serve)

    def all_reduce(self, call: Collective, flat: Tensor) -> Steps[Tensor]:
        def serve(flats: list[Tensor]) -> list[Tensor]:
            total = _sum(flats)
            return [flat.copy_(total) for flat in flats]

        return self._meet(call, flat, serve)

    def all_to_all(
        self, call: Collective, chunks: Sequence[Tensor], sizes: Sequence[int]
    ) -> Steps[list[Tensor]]:
        def serve(parts: list[tuple[Sequence[Tensor], Sequence[int]]]) -> list[Any]:
            return [
                [_expected(call, src, sent[dst], sizes[src]) for src, (sent, _) in enumerate(parts)]
                for dst, (_, sizes) in enumerate(parts)
            ]

        received = yield from self._meet(call, (chunks, sizes), serve)
        for part in received:
            if isinstance(part, DesyncError):
                raise part
        return list(received)

    def broadcast(self, call: Collective, flat: Tensor, src: int) -> Steps[Tensor]:
        def serve(flats: list[Tensor]) -> list[Tensor]:
            return [flat if flat is flats[src] else flat.copy_(flats[src]) for flat in flats]

        return self._meet(call, flat, serve)

    def exchange(self, call: Collective, data: bytes) -> Steps[list[bytes]]:
        return self._meet(call, data, lambda parts: [list(parts) for _ in parts])


def _sum(parts: Sequence[Tensor]) -> Tensor:
    if not is_direct(len(parts)):
        return summed(parts)
    total = parts[0].clone()
    for part in parts[1:]:
        total.add_(part)
    return total


def _expected(call: Collective, src: int, chunk: Tensor, size: int) -> Tensor | DesyncError:
    if chunk.numel() != size:
        return missized(call, src, chunk.numel(), size)
    return chunk.clone()


class SimulatedWorld(World):
    """The world of one simulated rank."""

    threads: ClassVar[bool] = True

    def __init__(self, rank: int, fabric: Fabric) -> None:
        super().__init__(rank, fabric.size, fabric.timeout)
        self._fabric = fabric

    def connect(self, axis: str, members: tuple[int, ...]) -> ConnectedGroup:
        return ConnectedGroup(
            axis, self, members, lambda: Meetings(self._fabric, members, self.rank)
        )

    def busy(self) -> AbstractContextManager[None]:
        return self._fabric.while_busy()

    def _announce_stop(self, why: str) -> None:
        self._fabric.stop(self.rank, why)

    def meet(self, report: str, judge: Judge, until: float) -> str:
        return self._fabric.assemble(self.rank, report, judge, until)


def simulate(n: int, timeout: float = 60.0) -> Callable[[Callable[..., T]], Callable[..., list[T]]]:
    """Run a function on ``n`` ranks that are threads of this process.

    Arguments are shared between the ranks, not copied.

    Args:
        n: the number of ranks.
        timeout: seconds a collective waits for a rank that does not come.

    Returns:
        A function that turns ``fn`` into one returning ``[result of rank 0, ...]``.

    Raises:
        TypeError: ``n`` is a function, as :func:`launch` would take it.
        ValueError: ``n`` is not positive.
        Exception: what a rank raised, as it is; the other ranks are woken up and end.

    >>> from zfunc.ranks.world import rank
    >>> simulate(3)(lambda x: x + rank())(10)
    [10, 11, 12]
    """
    if callable(n):
        raise TypeError(
            f"simulate() got {n!r} for the number of ranks. Write simulate(4)(fn)(*args)."
        )
    if n < 1:
        raise ValueError(f"simulate({n}): expected at least one rank")

    def over_ranks(fn: Callable[..., T]) -> Callable[..., list[T]]:
        def run(*args: Any, **kwargs: Any) -> list[T]:
            return _run_ranks(Fabric(n, float(timeout)), lambda: fn(*args, **kwargs))

        return run

    return over_ranks


@contextmanager
def modes_put_back() -> Iterator[None]:
    """A block that undoes what threads that were in dispatch modes at one time leave behind.

    torch keeps for the whole process whether it is in one. Each thread puts back what it found,
    which may be another thread's: torch.compile would then compile anew at each call.
    """
    flags = {name: value for name, value in vars(modes).items() if name.startswith("_is_in_")}
    try:
        yield
    finally:
        vars(modes).update(flags)
        guarded = getattr(modes, "set_is_in_mode_without_ignore_compile_internals", None)
        if guarded is not None:
            guarded(flags["_is_in_any_mode_without_ignore_compile_internals"])


def _run_ranks(fabric: Fabric, body: Callable[[], T]) -> list[T]:
    results: dict[int, T] = {}
    errors: dict[int, BaseException] = {}
    grad = torch.is_grad_enabled()  # thread-local in torch, so not inherited

    def rank_thread(rank: int) -> None:
        joined = SimulatedWorld(rank, fabric)
        try:
            with entered(joined), torch.set_grad_enabled(grad):
                results[rank] = body()
                for finish in on_leave:
                    finish()
            fabric.leave(rank, "has returned")
        except SystemExit as error:
            if (failure := exited(rank, error)) is None:
                results[rank] = None  # type: ignore[assignment]
            else:
                errors[rank] = failure
            fabric.leave(rank, EXITED if failure is None else f"failed ({failure})")
        except BaseException as error:
            errors[rank] = error
            fabric.leave(rank, f"failed ({type(error).__name__}: {error})")
        finally:
            joined.ended = True

    threads = [
        threading.Thread(
            target=copy_context().run, args=(rank_thread, rank), name=f"rank {rank}", daemon=True
        )
        for rank in range(fabric.size)
    ]
    with modes_put_back():
        for thread in threads:
            thread.start()
        _join(threads, fabric, errors)
    if errors:
        raise _culprit(errors)
    return [results[rank] for rank in range(fabric.size)]


def _join(
    threads: list[threading.Thread], fabric: Fabric, errors: dict[int, BaseException]
) -> None:
    """Wait for all ranks; once one has failed for ``GRACE`` alone, as no thread can be ended."""
    deadline: float | None = None
    try:
        while alive := [thread for thread in threads if thread.is_alive()]:
            alive[0].join(0.05)
            if errors and deadline is None:
                deadline = time.monotonic() + GRACE
            if deadline is not None and time.monotonic() > deadline:
                return
    except BaseException:  # Ctrl-C in a notebook: let the ranks end at their next collective
        for rank in range(fabric.size):
            fabric.leave(rank, "failed (interrupted)")
        raise


def _culprit(errors: dict[int, BaseException]) -> BaseException:
    """The error of the lowest rank whose error did not follow from another rank's."""
    causes = {rank: e for rank, e in errors.items() if not isinstance(e, Deserted)}
    return (causes or errors)[min(causes or errors)]
