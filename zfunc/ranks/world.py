"""The world a rank lives in: who it is, how many there are, and what it may remember.

There are three kinds. A plain Python process is rank 0 of 1 (:class:`World` itself). A thread
of ``zf.simulate(n)`` is a rank of a simulated world (``zfunc.ranks.simulation``). A process
started by ``torchrun`` or ``zf.launch`` is a rank of a distributed one
(``zfunc.ranks.distributed``). A simulated world is found through a context variable; the others
are facts about the process.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from typing import Any, ClassVar, Protocol

import torch

from zfunc.errors import DesyncError

__all__ = ["Judge", "World", "adopt", "current", "default_timeout", "entered", "rank", "world_size"]

on_wait: list[Callable[[], AbstractContextManager[Any]]] = []
"""Entered around every blocking wait of a simulated rank. Code that holds a lock which all ranks
of a process share adds a context manager that gives it up meanwhile."""

on_leave: list[Callable[[], None]] = []
"""Called by each rank once its function has returned: they complete what is still being written."""

on_renewal: list[Callable[[], None]] = []
"""Called by each rank once its groups are made anew. They clear caches of what ranks had agreed on,
since one rank may have cached what another has not."""

Judge = Callable[[list[str]], str]


def default_timeout() -> float:
    """Seconds a collective waits for a silent peer: ``ZFUNC_TIMEOUT``, else 600.

    Raises:
        ValueError: ``ZFUNC_TIMEOUT`` is not a positive number.
    """
    text = os.environ.get("ZFUNC_TIMEOUT", "600")
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise ValueError(f"ZFUNC_TIMEOUT={text!r}: expected a positive number of seconds")
    return seconds


class Member:
    """A group as its world sees it (:class:`zfunc.ranks.comm.Group`).

    A rank that is alone in its group has nothing to complete and nobody to tell.
    """

    @property
    def cut_short(self) -> bool:
        """Whether work of earlier steps was still under way on a device when it was stopped."""
        return False

    def finish(self) -> None:
        """Complete what this rank has issued and nobody has waited for: peers are in it too.

        Raises:
            DesyncError: a peer is not.
        """

    def settle(self) -> None:
        """Check the headers of all collectives that were waited for inside ``unchecked``.

        Raises:
            DesyncError: a peer was in another one, is silent or gone.
        """

    def hang_up(self) -> None:
        """Take no further part; peers that wait for this rank raise."""

    def stop(self, error: DesyncError) -> None:
        """Fail, if it has not failed yet, and take no further part."""

    def renew(self) -> None:
        """Begin anew, with nothing under way; all ranks of the group do, in one epoch.

        It stays the same object, since placed states and steps refer to it. Waiting for a
        collective that was under way raises an error from now on.
        """


class Recorder(Protocol):
    """What collectives report to (:class:`zfunc.ranks.accounting.Ledger`)."""

    def record(self, kind: str, label: str, axis: str, payload: int, headers: int) -> None:
        """Add one collective: the bytes sent to all peers."""


class World:
    """One rank's view of all ranks; on its own, the world of a single process.

    Attributes:
        rank: this rank, from 0.
        size: the number of ranks.
        timeout: seconds a collective waits for a silent peer before it raises.
        memo: this rank's scratch space for caches that live as long as the world.
        ledgers: the open ledgers, which every collective of this rank reports to.
        groups: every group that was made in this world.
        unchecked: how many blocks are open in which headers are checked late.
        epoch: how often its groups were made anew; nothing of an earlier epoch reaches a later one.
        ended: whether this rank is done, and its thread has ended.
        threads: whether the ranks are threads of one process.
        gate: called before a collective is issued, with its name (:mod:`zfunc.engine.accord`).
    """

    threads: ClassVar[bool] = False

    def __init__(self, rank: int = 0, size: int = 1, timeout: float | None = None) -> None:
        self.rank = rank
        self.size = size
        self.timeout = default_timeout() if timeout is None else float(timeout)
        self.memo: dict[Any, Any] = {}
        self.ledgers: list[Recorder] = []
        self.groups: list[Member] = []
        self.unchecked = self.epoch = 0
        self.ended = False
        self.gate: Callable[[str], None] | None = None

    @property
    def device(self) -> torch.device:
        """The device on which this rank computes."""
        return torch.get_default_device()

    def connect(self, axis: str, members: tuple[int, ...]) -> Member:
        """The group of these ranks, this one among them, under the name of an axis."""
        raise NotImplementedError(f"{self!r} has no peers to connect to")

    def stop(self, why: str) -> None:
        """Take no further part in the groups of this epoch; ranks that wait in them are told why.

        What this rank has issued is completed before if that is possible, since peers are in it.
        """
        for group in tuple(self.groups):
            with suppress(DesyncError):
                group.finish()
        self._announce_stop(why)
        for group in tuple(self.groups):
            group.stop(DesyncError(f"this rank has stopped: {why}"))

    def _announce_stop(self, why: str) -> None:
        """Tell the ranks that no group tells."""

    def meet(self, report: str, judge: Judge, until: float) -> str:
        """Meet all ranks outside of any group; returns what was decided.

        Args:
            report: this rank's.
            judge: decides on the reports of all ranks, in rank order. It is a pure function, which
                the last rank to come calls for all. With an empty text the next epoch begins.
            until: when to give up, in the seconds of ``time.monotonic``.

        Raises:
            DesyncError: a rank did not come; alike on all that did.
        """
        return judge([report])

    def renew(self) -> None:
        """Begin the next epoch: all groups begin anew, with nothing under way."""
        self.epoch += 1
        self.gate = None
        for group in tuple(self.groups):
            group.renew()

    def busy(self) -> AbstractContextManager[None]:
        """A block in which simulated ranks may take long: none is taken for silent."""
        return nullcontext()

    def depart(self, why: str) -> None:
        """Complete what is under way, then let the others know that this rank is done.

        Args:
            why: goes on from "rank 3", such as ``"has returned"``.
        """

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank={self.rank}, size={self.size})"


_ENTERED: ContextVar[World | None] = ContextVar("zfunc_world", default=None)
_process: World | None = None

finders: list[Callable[[], World | None]] = []
"""Each looks for a world that this process has joined by other means than ``zf.init``."""


def current() -> World:
    """The world of the calling rank; a single-process world where there is no other.

    >>> current().rank, current().size
    (0, 1)
    """
    return _ENTERED.get() or _of_process()


def _of_process() -> World:
    global _process
    _process = _process or World()
    if type(_process) is World:
        for find in finders:
            _process = find() or _process
    return _process


def adopt(world: World | None) -> None:
    """Make ``world`` the world of this process; ``None`` forgets it."""
    global _process
    _process = world


@contextmanager
def entered(world: World) -> Iterator[World]:
    """Be a rank of ``world`` inside the block, in this thread and this context only."""
    token = _ENTERED.set(world)
    try:
        yield world
    finally:
        _ENTERED.reset(token)


@contextmanager
def waiting() -> Iterator[None]:
    """Around a blocking wait: locks that are in ``on_wait`` are given up inside the block."""
    with ExitStack() as stack:
        for release in on_wait:
            stack.enter_context(release())
        yield


def rank() -> int:
    """This rank in its world; 0 outside one.

    >>> rank()
    0
    """
    return current().rank


def world_size() -> int:
    """The number of ranks; 1 outside a world.

    >>> world_size()
    1
    """
    return current().size


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


def settle() -> None:
    """Check what is unchecked in every group of this rank, as before the host reads a value.

    Raises:
        DesyncError: a peer was in another collective, is silent or gone.
    """
    for group in tuple(current().groups):
        group.settle()


MESH: ContextVar[Any] = ContextVar("zfunc_mesh", default=None)
"""The :class:`~zfunc.ranks.meshes.Mesh` of the running step, which axis names refer to."""
