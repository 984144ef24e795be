"""Groups of several ranks: what is issued is announced, counted, bounded and finished in turn.

Ranks that disagree on what comes next would wait for each other for ever, or add up unrelated
numbers. So every collective sends each peer a header; one that differs, or that does not come
within the timeout, is a :class:`~zfunc.errors.DesyncError`. A transport moves the data, one per
backend: ``zfunc.ranks.gloo`` (point to point), ``zfunc.ranks.nccl`` (native),
``zfunc.ranks.simulation`` (threads that meet).
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from operator import attrgetter
from threading import RLock
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from zfunc.errors import DesyncError
from zfunc.ranks.accounting import HEADER_BYTES
from zfunc.ranks.comm import Group, Handle
from zfunc.ranks.mailboxes import OwnMessages
from zfunc.ranks.routes import (
    all_gather_bytes,
    all_reduce_bytes,
    broadcast_bytes,
    exchange_bytes,
    goes_whole,
    reduce_scatter_bytes,
)
from zfunc.ranks.transfers import SENT, Complete, Direction, TensorSpec, TransferHandle
from zfunc.ranks.transport import Collective, Steps, Transport, announced, announcement
from zfunc.ranks.world import World

__all__ = ["ConnectedGroup", "PendingHandle"]

T = TypeVar("T")

NBYTES = attrgetter("nbytes")
INFLIGHT_BYTES = 64 * 2**20  # that unfinished reductions may hold in the host's memory


class PendingHandle(Handle[T]):
    """A handle whose collective a transport completes.

    Args:
        steps: the transport's.
        group: which it was issued in.
        turn: its number among those that are finished in their order; 0 if in any.
        held: bytes that it holds in the host's memory until it is complete.
        then: makes the result of what ``steps`` returns; by default that is it.
    """

    def __init__(
        self,
        steps: Steps[Any],
        group: ConnectedGroup,
        turn: int,
        held: int,
        then: Callable[[Any], T] | None,
    ) -> None:
        self._lock = RLock()
        self._steps: Steps[Any] | None = steps
        self._group, self._turn, self._held, self._then = group, turn, held, then
        self._error: BaseException | None = None
        self._epoch = group.epoch
        group._under_way.add(steps)
        self._advance()

    @property
    def done(self) -> bool:
        return self._steps is None

    def wait(self) -> T:
        with self._lock:
            if self._epoch != self._group.epoch:  # what this waits for will not come
                self._abandon(_stale())
            if self._steps is not None and self._turn:
                self._group._finish_before(self)
            if self._steps is not None:  # not finished by what went before, either
                self._advance()
        if self._error is not None:
            raise self._error
        return self._result

    def _advance(self) -> None:
        assert self._steps is not None
        try:
            with torch.no_grad():
                next(self._steps)
            return
        except StopIteration as end:
            self._result = end.value if self._then is None else self._then(end.value)
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

    def _let_go(self) -> None:
        """Drop the generator, and with it the buffers."""
        self._group._under_way.discard(self._steps)
        self._steps = self._then = None

    def __del__(self) -> None:
        if self._steps is not None and self._epoch == self._group.epoch:
            self._group._dropped.append(self)


class ConnectedGroup(Group):
    """The ranks along one axis, as this rank sees them, and the transport between them.

    Attributes:
        epoch: how often it was made anew.
        failure: why it takes part in nothing any longer, if it does not.

    Args:
        connect: makes its transport, now and in each of the world's next epochs.
    """

    def __init__(
        self, axis: str, world: World, members: tuple[int, ...], connect: Callable[[], Transport]
    ) -> None:
        self._connect, self._transport = connect, connect()
        self.rank, self.size = self._transport.rank, self._transport.size
        self.epoch = 0
        self.failure: DesyncError | None = None
        self._under_way: set[Steps[Any] | None] = set()  # the cycle collector would close them
        self._dropped: list[PendingHandle[Any]] = []
        self._in_turn: list[weakref.ref[PendingHandle[Any]]] = []
        self._begin_messages()
        super().__init__(axis, world, members)

    def exchange(self, obj: Any, *, label: str = "") -> list[Any]:
        try:
            return super().exchange(obj, label=label)
        except ValueError as error:
            failed = DesyncError(f"exchange({label!r}): {error}")
            self._fail(failed)
            raise failed from error

    def mark(self, label: str) -> None:
        call = self._call("mark", label, (), None)
        self._failing(lambda: self._transport.mark(call))

    def settle(self) -> None:
        self._failing(self._transport.settle)

    def _begin_messages(self) -> None:
        self._numbers: Counter[tuple[str, int]] = Counter()  # of messages, by kind and peer
        self._own = OwnMessages()

    def connect(self, directions: Sequence[Direction]) -> None:
        """Prepare for messages (:func:`zfunc.ranks.point_to_point.connect`)."""
        if self.failure is not None:
            self._refuse("connect", "")
        self._failing(lambda: self._transport.messages.connect(directions))

    def send(
        self, label: str, what: tuple[Any, ...], parts: Sequence[Tensor], to: int
    ) -> Handle[None]:
        """Send contiguous tensors (:func:`zfunc.ranks.point_to_point.send`)."""
        if self.failure is not None:
            self._refuse("send", label)
        if to == self.rank:
            return TransferHandle(self._own.put(label, what, parts), self)
        digest, _ = announcement("message", label, what)  # the same on both ranks
        self._numbers["send", to] += 1
        call = Collective("send", label, digest, self._numbers["send", to])
        self._book(call, sum(map(NBYTES, parts)), HEADER_BYTES)
        try:
            under_way = self._transport.messages.send(call, to, parts)
        except DesyncError as error:
            return TransferHandle(error, self)
        return SENT if type(under_way) is Complete else TransferHandle(under_way, self)

    def receive(
        self,
        label: str,
        what: tuple[Any, ...],
        specs: Sequence[TensorSpec],
        device: torch.device,
        source: int,
    ) -> Handle[list[Tensor]]:
        """Receive such tensors (:func:`zfunc.ranks.point_to_point.receive`)."""
        if self.failure is not None:
            self._refuse("receive", label)
        if source == self.rank:
            return TransferHandle(self._own.get(label, what), self)
        digest, _ = announcement("message", label, what)
        self._numbers["receive", source] += 1
        call = Collective("receive", label, digest, self._numbers["receive", source])
        try:
            coming = self._transport.messages.receive(call, source, specs, device)
            return TransferHandle(coming, self)
        except DesyncError as error:
            return TransferHandle(error, self)

    def why_lost(self, epoch: int) -> DesyncError:
        """Why a message of that epoch will not come: the epoch is over, or there is a failure."""
        if epoch != self.epoch:
            return _stale()
        return DesyncError(f"the group {self.axis!r} failed before: {self.failure}")

    def fail(self, error: DesyncError) -> None:
        """Give up because of a message."""
        if self.failure is None:
            self._fail(error)

    def _failing(self, check: Callable[[], None]) -> None:
        try:
            check()
        except DesyncError as error:
            self._fail(error)
            raise

    def _issue(
        self,
        kind: str,
        label: str,
        what: tuple[Any, ...],
        data: Tensor,
        args: tuple[Any, ...],
        then: Callable[[Any], Any] | None = None,
    ) -> Handle[Any]:
        # A tensor of a kind that answers for torch's functions is asked about this one, too: what
        # has a shape and no memory can be in no message.
        if has_torch_function_unary(data):
            asked: Handle[Any] = handle_torch_function(
                ConnectedGroup._issue, (data,), self, kind, label, what, data, args, then
            )
            return asked
        call = self._call(kind, label, what, data)
        sent, held = self._cost(kind, data, args)
        self._record(call, sent, data)
        if held is not None and not self._transport.hosted(data):
            held = None  # in the device's memory, which the caller bounds
        if held is not None:
            self._make_room(held)
        return self._begin(self._transport.start(call, data, args), data, held, then)

    def _begin(
        self,
        steps: Steps[Any],
        data: Tensor | None,
        held: int | None = None,
        then: Callable[[Any], Any] | None = None,
    ) -> PendingHandle[Any]:
        """Start a collective; a reduction that holds memory is finished in its turn.

        So is whatever goes on in ``wait``. What was dropped is finished behind this one, which
        peers may wait for before they take part in that.
        """
        in_turn = held is not None or self._transport.in_rounds(data)
        handle = PendingHandle(steps, self, self.issued if in_turn else 0, held or 0, then)
        if in_turn:
            self._in_turn = [weakref.ref(other) for other in (*self._taking_turns(), handle)]
        if self._dropped:
            self._finish_dropped()
        return handle

    def _exchanged(self, kind: str, label: str, data: bytes) -> list[bytes]:
        call = self._call(kind, label, (), None)
        parts: list[bytes] = self._begin(self._transport.exchange(call, data), None).wait()
        sent = exchange_bytes([len(part) for part in parts], self.rank, self.size)
        self._record(call, sent, None)
        return parts

    def _call(
        self, kind: str, label: str, what: tuple[Any, ...], data: Tensor | None
    ) -> Collective:
        """Number and announce a collective on ``data``."""
        if self.failure is not None:
            self._refuse(kind, label)
        self._ask_gate(kind, label)
        self.issued += 1
        self.hosted += self._transport.hosted(data)
        return Collective(kind, label, announced(kind, label, what), self.issued)

    def _refuse(self, kind: str, label: str) -> NoReturn:
        raise DesyncError(
            f"{kind}({label!r}): the group {self.axis!r} failed before: {self.failure}"
        ) from self.failure

    def _cost(self, kind: str, data: Tensor, args: tuple[Any, ...]) -> tuple[int, int | None]:
        """The bytes that this rank sends, and those that a reduction holds until it is complete."""
        rank, size, itemsize = self.rank, self.size, data.element_size()
        if kind == "all_gather":
            return all_gather_bytes(args[1], itemsize, rank, size), None
        if kind == "reduce_scatter":
            cuts = args[1]
            own = (cuts[rank + 1] - cuts[rank]) * itemsize
            return reduce_scatter_bytes(cuts, itemsize, rank, size), data.nbytes + own * (size - 2)
        if kind == "all_reduce":
            sent, numel = all_reduce_bytes(data.numel(), itemsize, rank, size), data.numel()
            own = (numel // size + (rank < numel % size)) * itemsize
            return sent, sent if goes_whole(data.nbytes, size) else own * (size - 1)
        if kind == "broadcast":
            return broadcast_bytes(data.nbytes, rank, size, args[1]), None
        return sum(chunk.nbytes for chunk in args[0]) - data.nbytes, None  # all_to_all

    def _record(self, call: Collective, sent: int, data: Tensor | None) -> None:
        self._book(call, sent, HEADER_BYTES * self._transport.headers_sent(call.kind, data))

    def _book(self, call: Collective, sent: int, headers: int) -> None:
        for book in tuple(self.world.ledgers):
            book.record(call.kind, call.label, self.axis, sent, headers)

    def _fail(self, error: DesyncError) -> None:
        """Give up: ranks that disagree cannot go on together.

        So all groups of the world fail. Whoever waits for this rank in another group hears why, and
        what already runs on the device, in whichever communicator, would wait for ever.
        """
        self._give_up(error)
        for group in self._connected():
            group._transport.abort()
            if group.failure is None:
                group._give_up(error)

    def _give_up(self, error: DesyncError) -> None:
        self.failure = error
        if self._transport.in_rounds(None):  # partners far away wait for what would come next
            for handle in self._unfinished():
                handle._abandon(error)
        self._transport.leave(error)

    def _connected(self) -> list[ConnectedGroup]:
        return [group for group in self.world.groups if isinstance(group, ConnectedGroup)]

    def _make_room(self, held: int) -> None:
        """Finish as many of the oldest reductions as the bytes of a new one need."""
        unfinished = self._taking_turns()
        total = held + sum(handle._held for handle in unfinished)
        while unfinished and total > INFLIGHT_BYTES:
            oldest = unfinished.pop(0)
            total -= oldest._held
            oldest.wait()

    def _taking_turns(self) -> list[PendingHandle[Any]]:
        """What is finished in its turn and somebody may wait for, the oldest first."""
        alive = [ref() for ref in self._in_turn]
        return [handle for handle in alive if handle is not None and handle._steps is not None]

    def _finish_before(self, handle: PendingHandle[Any]) -> None:
        """Finish what goes on in ``wait`` and was issued before this one, if this one does.

        Ranks that waited for such in different orders would wait for each other. Large
        all-reduces take two rounds, so reductions always do; in a large group everything does.
        """
        earlier = [other for other in self._unfinished() if 0 < other._turn < handle._turn]
        for other in sorted(earlier, key=attrgetter("_turn")):
            other.wait()

    def _unfinished(self) -> list[PendingHandle[Any]]:
        """What takes turns, and what was dropped; a handle may be named twice.

        Of handles that the cycle collector ends only the list of the dropped ones knows.
        """
        dropped = (handle for handle in self._dropped if handle._steps is not None)
        return [*dropped, *self._taking_turns()]

    def finish(self) -> None:
        if self.failure is None:
            for handle in self._unfinished():
                handle.wait()
            self._finish_dropped()
            if not any(group.failure for group in self._connected()):  # or nobody may ask for it
                self._failing(self._transport.messages.finish)
            self.settle()

    def hang_up(self) -> None:
        self._transport.hang_up()

    def stop(self, error: DesyncError) -> None:
        if self.failure is None:
            self._fail(error)
        self._transport.hang_up()

    def renew(self) -> None:
        self.epoch += 1
        for steps in tuple(self._under_way):
            if steps is not None:
                steps.close()
        self._under_way.clear()
        self._dropped.clear()
        self._in_turn.clear()
        self._begin_messages()
        self.issued = self.hosted = 0
        self.failure = None
        self._transport = self._connect()

    @property
    def cut_short(self) -> bool:
        return self._transport.cut_short()

    def _finish_dropped(self) -> None:
        while self._dropped:
            handle = self._dropped.pop(0)
            if self.failure is None:
                handle.wait()
            else:  # nobody takes part any longer
                handle._abandon(self.failure)


def _stale() -> DesyncError:
    return DesyncError(
        "this was under way when the groups failed, and zf.recover_world() has made new ones: it "
        "will not come. Give the state that holds it: zf.recover_world(state)"
    )
