"""Messages between GPUs: NCCL moves them, and headers go beside it over sockets.

Each direction, from a rank to another, has a communicator of its own, and with it a stream. So what
goes one way never stands behind what comes the other way, and a receive that is posted long before
holds up nothing but what comes after it in the same direction. They are made by ``connect``, in one
order on all ranks: NCCL's set-up waits for the other rank, and ranks that set up as they meet could
wait in a circle. Later no host waits.

A message that waits is an event for the current stream, as a collective is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zfunc.errors import DeviceError
from zfunc.ranks.host_messages import HostMessages
from zfunc.ranks.transfers import Direction, TensorSpec, Transfer
from zfunc.ranks.transport import Collective, Messages

__all__ = ["DeviceMessages", "coalesces"]

SOURCE, TO = 0, 1  # the two ranks in a direction's communicator
Later = Callable[[Callable[[], Any]], None]


class DeviceMessages(Messages):
    """The messages of one rank of a group beside NCCL.

    Args:
        host: moves what is on the CPU, and the headers.
        rank: this rank in the group.
        make: makes the communicator of a direction.
        later: takes a check of a header, and makes it now or at the end of the step.
    """

    def __init__(
        self,
        host: HostMessages,
        rank: int,
        make: Callable[[Direction], dist.ProcessGroup] | None,
        later: Later,
    ) -> None:
        self._host, self._rank, self._make, self._later = host, rank, make, later
        self._groups: dict[Direction, dist.ProcessGroup] = {}

    @property
    def communicators(self) -> list[dist.ProcessGroup]:
        """Those of all directions."""
        return list(self._groups.values())

    def connect(self, directions: Sequence[Direction]) -> None:
        device = torch.device("cuda", torch.cuda.current_device())
        for direction in directions:
            apart = direction[0] != direction[1]
            if self._rank in direction and apart and direction not in self._groups:
                if self._make is None:
                    raise DeviceError("this group was made without communicators for messages")
                made = self._groups[direction] = self._make(direction)
                # NCCL sets a communicator up when it is first used, and both wait in there.
                kind = "send" if direction[SOURCE] == self._rank else "recv"
                for work in _start(kind, made, [torch.zeros(1, dtype=torch.uint8, device=device)]):
                    work.wait()

    def finish(self) -> None:
        self._host.finish()

    def send(self, call: Collective, peer: int, parts: Sequence[Tensor]) -> Transfer[None]:
        if not parts or not parts[0].is_cuda:
            return self._host.send(call, peer, parts)
        group = self._group(call, (self._rank, peer))
        flat = [x.view(-1).view(torch.uint8) for x in parts if x.numel()]
        self._host.announce(call, peer, sum(x.nbytes for x in flat))
        return Sent(_start("send", group, flat), list(parts))

    def receive(
        self, call: Collective, peer: int, specs: Sequence[TensorSpec], device: torch.device
    ) -> Transfer[list[Tensor]]:
        if not specs or device.type != "cuda":
            return self._host.receive(call, peer, specs, device)
        group = self._group(call, (peer, self._rank))
        self._host.expect(call, peer)
        tensors = [spec.empty(device) for spec in specs]
        flat = [x.view(-1).view(torch.uint8) for x in tensors if x.numel()]
        check = partial(self._host.take, call, peer)
        return Received(_start("recv", group, flat), tensors, partial(self._later, check))

    def _group(self, call: Collective, direction: Direction) -> dist.ProcessGroup:
        if direction not in self._groups:
            raise DeviceError(
                f"{call}: no communicator for messages from rank {direction[0]} to "
                f"{direction[1]} of this group. All its ranks have to call "
                "point_to_point.connect(group, directions) before the first message between GPUs"
            )
        return self._groups[direction]


def _start(kind: str, group: dist.ProcessGroup, pieces: Sequence[Tensor]) -> list[Any]:
    """One launch for all pieces, where the backend can."""
    start, peer = (group.send, TO) if kind == "send" else (group.recv, SOURCE)
    if not pieces:
        return []
    if not coalesces(group, pieces[0].device):
        return [start([piece], peer, 0) for piece in pieces]
    # A lone piece, too: beside these a communicator would set up another one for such.
    with dist.distributed_c10d._coalescing_manager(
        group=group, device=pieces[0].device, async_ops=True
    ) as together:
        for piece in pieces:
            start([piece], peer, 0)
    return list(together.works)


def coalesces(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether a communicator launches several operations as one."""
    try:
        return bool(group._get_backend(device).supports_coalescing)
    except (AttributeError, RuntimeError):
        return False


@dataclass
class Sent(Transfer[None]):
    """A message of this rank, and its tensors until the current stream has waited for it."""

    works: list[Any]
    parts: list[Tensor]

    def is_over(self) -> bool:
        if torch.cuda.is_current_stream_capturing():  # nothing may be asked now
            return False
        return all(work.is_completed() for work in self.works)

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        self.parts.clear()


@dataclass
class Received(Transfer[list[Tensor]]):
    """A message to this rank."""

    works: list[Any]
    tensors: list[Tensor]
    check: Callable[[], None]

    def is_over(self) -> bool:
        return True

    def wait(self) -> list[Tensor]:
        self.check()
        for work in self.works:
            work.wait()
        return self.tensors
