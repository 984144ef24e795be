"""Messages from one rank of a group to another: ``send`` and ``receive``.

Both return at once, with a handle. Receives may be posted long before anything is sent, and much
may be sent before it is asked for: a send waits for nobody. But ``wait()`` of a send may last until
its receive has been posted, so a rank that waits for what it sends posts its receives first.

In one direction, from a rank to another, the n-th send belongs to the n-th receive, in whatever
order their handles are waited for. Each message tells its label, shapes and dtypes, and a receive
that expects others raises. Autograd does not see messages.

How a message travels: between threads it is copied once. Between processes on one host, what has up
to 16 MiB goes through shared memory in one piece, copied in by the sender and out by the receiver.
What is larger, or for another host, goes over a socket of that direction, straight from and to the
tensors' memory, in threads. On GPUs NCCL moves it, with a communicator for each direction, which
:func:`connect` makes.

A ledger counts a message where it is sent: under ``"send"`` the bytes of its tensors and no more,
and one header. Setting up (connections, and the names of labels, once to each peer) is not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from zfunc.errors import DesyncError
from zfunc.ranks.comm import Group, Handle
from zfunc.ranks.connected import ConnectedGroup
from zfunc.ranks.mailboxes import OwnMessages
from zfunc.ranks.transfers import Direction, TensorSpec, TransferHandle

__all__ = ["Like", "connect", "message_bytes", "receive", "send"]

Like = Tensor | TensorSpec


def send(
    ranks: Group, tensors: Tensor | Sequence[Tensor], to: int, *, label: str = ""
) -> Handle[None]:
    """Send tensors to a rank, in one message. The tensors belong to it until ``wait()`` returns.

    A handle that is let go of is no loss: the group keeps the tensors until they have left.
    Whatever is sent arrives in new memory, so the sender may overwrite its own. A rank may send to
    itself. That is how a pipeline of one rank works.

    Args:
        ranks: the group.
        tensors: of one device; any shapes, strides and dtypes, none of them on meta or sparse.
            They are copied first where they are not contiguous.
        to: a rank of the group.
        label: names the message in errors and ledgers. The receiver gives the same.

    Returns:
        A handle. ``wait()`` returns nothing, when the tensors may change. On a GPU the current
        stream waits, not the host. It does not mean that anything was received.

    Raises:
        ValueError: no such rank, or a tensor that cannot be sent.
        DeviceError: the tensors are on a GPU, and :func:`connect` has not named this direction.
        DesyncError: the group has failed; from ``wait()``, the receiver is gone.

    >>> from zfunc.ranks.axes import alone
    >>> coming = receive(alone(), TensorSpec((2,), torch.float32), 0, label="x")
    >>> send(alone(), torch.tensor([1.0, 2.0]), 0, label="x").wait()
    >>> coming.wait()
    [tensor([1., 2.])]
    """
    if not 0 <= to < ranks.size:
        raise _no_rank(ranks, "send", label, "to", to)
    parts: list[Tensor] = []
    forms, devices = [], set()
    for x in [tensors] if isinstance(tensors, Tensor) else tensors:
        if x.layout is not torch.strided or x.is_meta:
            raise _without_data(label, len(parts), x)
        part = x.detach() if x.requires_grad else x
        # Contiguous memory, which is the tensor's own if that is possible.
        if part.is_conj() or part.is_neg() or not part.is_contiguous():
            part = part.resolve_conj().resolve_neg().contiguous()
        parts.append(part)
        forms.append((part.shape, part.dtype))
        devices.add(part.device)
    if len(devices) > 1:
        where = sorted(map(str, devices))
        raise ValueError(f"send({label!r}): its tensors are on {where}, expected one")
    what = _described(tuple(forms), *devices)
    if isinstance(ranks, ConnectedGroup):
        return ranks.send(label, what, parts, to)
    return TransferHandle(_own(ranks).put(label, what, parts), None)


def receive(
    ranks: Group,
    like: Like | Sequence[Like],
    source: int,
    *,
    device: torch.device | str | None = None,
    label: str = "",
) -> Handle[list[Tensor]]:
    """Receive what a rank sends, in one message; ``wait()`` returns new tensors.

    A receive may be posted as long before the send as there is memory for what comes. One that is
    posted and never waited for takes its message all the same.

    Args:
        ranks: the group.
        like: the shapes and dtypes that come, as tensors (on any device, meta too) or specs.
        source: a rank of the group.
        device: where the tensors are sent from and go to; by default the world's.
        label: names the message in errors. The sender gives the same.

    Returns:
        A handle. ``wait()`` returns a list of contiguous tensors, each with memory of its own.

    Raises:
        ValueError: no such rank.
        DeviceError: the device is a GPU, and :func:`connect` has not named this direction.
        DesyncError: the group has failed; from ``wait()``, the sender sends something else, is
            silent or gone.
    """
    if not 0 <= source < ranks.size:
        raise _no_rank(ranks, "receive", label, "source", source)
    specs, forms = [], []
    for x in [like] if isinstance(like, Like) else like:
        spec = x if isinstance(x, TensorSpec) else _spec(x)
        specs.append(spec)
        forms.append((spec.shape, spec.dtype))
    at = ranks.world.device if device is None else torch.device(device)
    what = _described(tuple(forms), *[at] * bool(specs))
    if isinstance(ranks, ConnectedGroup):
        return ranks.receive(label, what, specs, at, source)
    return TransferHandle(_own(ranks).get(label, what), None)


def connect(ranks: Group, directions: Sequence[Direction], *, label: str = "connect") -> None:
    """Prepare for messages; all ranks of the group call it, with the same directions in one order.

    On GPUs it makes the communicators, one for each direction, in the order that is given. Ranks
    that made them when they first met would wait for each other in circles. Elsewhere it only
    compares what the ranks say. It blocks, and is for setting up, not for a step. It is called once
    more after ``zf.recover_world()``, which ends all communicators.

    Args:
        ranks: the group.
        directions: pairs of ranks of the group, ``(from, to)``.
        label: names the exchange in errors and ledgers.

    Raises:
        ValueError: no such ranks.
        DesyncError: another rank gives other directions.
    """
    asked = [(int(source), int(to)) for source, to in directions]
    for source, to in asked:
        for name, rank in (("from", source), ("to", to)):
            if not 0 <= rank < ranks.size:
                raise _no_rank(ranks, "connect", label, name, rank)
    for rank, theirs in enumerate(ranks.exchange(asked, label=label)):
        if theirs != asked:
            raise DesyncError(
                f"connect({label!r}): rank {ranks.rank} gives the directions {asked}, but rank "
                f"{rank} gives {theirs}. All ranks have to give the same, in one order"
            )
    if isinstance(ranks, ConnectedGroup):
        ranks.connect(asked)


def message_bytes(like: Like | Sequence[Like]) -> int:
    """The bytes that a message of these tensors has, as the ledger counts them.

    >>> message_bytes([torch.zeros(3), TensorSpec((5,), torch.bool)])
    17
    """
    given = [like] if isinstance(like, Like) else list(like)
    return sum(x.nbytes for x in given)


def _no_rank(ranks: Group, call: str, label: str, name: str, rank: int) -> ValueError:
    return ValueError(
        f"{call}({label!r}): {name}={rank}, expected 0 to {ranks.size - 1}, of {ranks}"
    )


def _without_data(label: str, i: int, x: Tensor) -> ValueError:
    kind = "on meta, without data" if x.is_meta else f"of layout {x.layout}"
    return ValueError(f"send({label!r}): tensor {i}, {_spec(x)}, is {kind}: send its dense values")


def _spec(x: Tensor) -> TensorSpec:
    return TensorSpec(tuple(x.shape), x.dtype)


@lru_cache(maxsize=4096)
def _described(
    forms: tuple[tuple[tuple[int, ...], torch.dtype], ...], *devices: torch.device
) -> tuple[str, ...]:
    """The tensors of a message, alike on both ranks: shapes and dtypes, and from which kind of
    device, if they are not on a CPU."""
    texts = (str(TensorSpec(tuple(shape), dtype)) for shape, dtype in forms)
    return (*texts, *(f"on {device.type}" for device in devices if device.type != "cpu"))


def _own(ranks: Group) -> OwnMessages:
    """The messages that a rank that is alone in its group sends itself."""
    key = "messages to itself", ranks
    made: OwnMessages | None = ranks.world.memo.get(key)
    if made is None:
        made = ranks.world.memo[key] = OwnMessages()
    return made
