"""What a backend provides, and how a disagreement between ranks is found and told.

A :class:`Transport` moves data between the ranks of one group. It writes each collective as a
generator with a single ``yield``: what stands above it happens when the collective is issued,
what stands below when it is waited for; its return value is the result.

A collective is announced to the peers by a digest of its kind, label, dtype and sizes. Digests
arrive in the order of issue, so one that differs means that the ranks took different paths.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Mapping, Sequence
from functools import cached_property, lru_cache
from threading import Lock
from typing import Any, NamedTuple, Protocol, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from zfunc.errors import DesyncError
from zfunc.ranks.adjacency import neighbours
from zfunc.ranks.routes import headers_each
from zfunc.ranks.transfers import Direction, TensorSpec, Transfer

__all__ = ["Collective", "Messages", "Steps", "Transport", "announced", "announcement"]

T = TypeVar("T")
Steps = Generator[None, None, T]


class Collective(NamedTuple):
    """One collective as it is announced to the peers.

    Attributes:
        kind: such as ``"all_gather"``.
        label: what it is for, such as the unit's name.
        digest: a 63-bit hash of kind, label, dtype and sizes; equal on ranks that agree.
        number: counts the group's collectives.
    """

    kind: str
    label: str
    digest: int
    number: int

    def __str__(self) -> str:
        return f"{self.kind}({self.label!r})"


class Messages(Protocol):
    """What a backend does for messages in one group. Ranks here are ranks within the group."""

    def connect(self, directions: Sequence[Direction]) -> None:
        """Prepare for messages in these directions. All ranks of the group name them alike."""

    def send(self, call: Collective, peer: int, parts: Sequence[Tensor]) -> Transfer[None]:
        """Start to send contiguous tensors of one device; waits for no receiver."""

    def receive(
        self, call: Collective, peer: int, specs: Sequence[TensorSpec], device: torch.device
    ) -> Transfer[list[Tensor]]:
        """Start to receive as many tensors."""

    def finish(self) -> None:
        """Return when what was sent has left, whoever has waited for it.

        Raises:
            DesyncError: a receiver is silent or gone.
        """


class Transport(Protocol):
    """One backend's collectives and messages. Ranks here are ranks within the group.

    The tensors of collectives are 1-D.

    What has a body here suits a backend in the host's memory: nothing is checked late, and nothing
    runs on a device.
    """

    rank: int
    size: int
    messages: Messages

    def start(self, call: Collective, data: Tensor, args: tuple[Any, ...]) -> Steps[Any]:
        """Issue a collective on ``data``: the method that is called like its kind."""
        steps: Steps[Any] = getattr(self, call.kind)(call, *args)
        return steps

    def headers_sent(self, kind: str, data: Tensor | None) -> int:
        """How many headers this rank sends in a collective on ``data``."""
        nbytes = 0 if data is None else data.nbytes
        return len(self.neighbours) * headers_each(kind, nbytes, self.size)

    @cached_property
    def neighbours(self) -> list[int]:
        """The ranks whose headers this one checks."""
        return neighbours(self.rank, self.size)

    def hosted(self, data: Tensor | None) -> bool:
        """Whether a collective on ``data`` is the host's work, and in the host's memory."""
        return True

    def in_rounds(self, data: Tensor | None) -> bool:
        """Whether a collective on ``data`` goes on in ``wait``.

        Ranks that waited for such in different orders would wait for each other.
        """
        return False

    def settle(self) -> None:
        """Check the headers of collectives that were waited for, but not yet checked.

        Raises:
            DesyncError: a peer was in another one, is silent or gone.
        """
        return

    def mark(self, call: Collective) -> None:
        """Announce a call in which nothing is sent, and check earlier ones: this one may wait.

        Raises:
            DesyncError: a peer was in another one, is silent or gone.
        """

    def abort(self) -> bool:
        """Stop what is under way on the device; whether there is anything of that kind."""
        return False

    def leave(self, error: DesyncError) -> None:
        """Tell the others that this rank has failed and takes no further part."""
        return

    def hang_up(self) -> None:
        """Tell the others that this rank is done, so that they do not wait for it."""
        return

    def cut_short(self) -> bool:
        """Whether :meth:`abort` has stopped work on the device of steps that had returned."""
        return False

    def all_gather(self, call: Collective, full: Tensor, cuts: Sequence[int]) -> Steps[Tensor]:
        """Fill ``full``, whose own segment is in place."""

    def reduce_scatter(
        self, call: Collective, full: Tensor, cuts: Sequence[int], out: Tensor | None
    ) -> Steps[Tensor]:
        """The own segment of the sum, in rank order, in ``out`` or in new memory."""

    def all_reduce(self, call: Collective, flat: Tensor) -> Steps[Tensor]:
        """Sum in place."""

    def all_to_all(
        self, call: Collective, chunks: Sequence[Tensor], sizes: Sequence[int]
    ) -> Steps[list[Tensor]]:
        """New tensors, of these sizes, one from each rank."""

    def broadcast(self, call: Collective, flat: Tensor, src: int) -> Steps[Tensor]:
        """Overwrite ``flat`` with that of ``src``."""

    def exchange(self, call: Collective, data: bytes) -> Steps[list[bytes]]:
        """Every rank's bytes."""


REMEMBERED = 4096  # more than a step has; a program that keeps naming new ones never ends
TOLD = 500  # characters of a collective that an error gives: cuts have a number for every rank


class _Text(str):
    """A collective as errors give it. Unlike a plain string it can be referred to weakly."""


_SEEN: WeakValueDictionary[int, _Text] = WeakValueDictionary()  # what the cache holds
_SEEING = Lock()  # simulated ranks are threads, and two that come at once must see the same


@lru_cache(maxsize=REMEMBERED)
def announcement(kind: str, label: str, what: tuple[Any, ...]) -> tuple[int, str]:
    """The digest of a collective, and its text; as long as that is here, a peer's is told by it."""
    text = f"{kind}({label!r}) of {' '.join(str(part) for part in what) or 'nothing'}"
    digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
    if len(text) > TOLD:
        text = f"{text[:TOLD]}... (digest {digest:#x})"
    with _SEEING:
        return digest, _SEEN.setdefault(digest, _Text(text))


def announced(kind: str, label: str, what: tuple[Any, ...]) -> int:
    """The digest of a collective; the latest are remembered, so that a peer's is told by name."""
    return announcement(kind, label, what)[0]


def told(digest: int) -> str:
    """The collective behind a digest, if this process has issued it lately."""
    return _SEEN.get(digest) or f"a collective unknown to this rank (digest {digest:#x})"


def mismatch(call: Collective, peer: int, theirs: str) -> DesyncError:
    """The error for a peer that is in another collective, ``theirs``, than this rank."""
    return DesyncError(
        f"{call}: this rank is in {told(call.digest)}, but rank {peer} is in {theirs}. "
        "All ranks must run the same units in the same order with the same sizes: look for a "
        "branch that depends on the rank or on its data"
    )


def missized(call: Collective, peer: int, found: int, expected: int) -> DesyncError:
    """The error for a peer that sends another number of elements than this rank expects."""
    return DesyncError(
        f"{call}: rank {peer} sends {found} elements, this rank expects {expected}: "
        "pass the sizes= that the peers' chunks have"
    )


def elsewhere(cause: str | DesyncError) -> DesyncError:
    """The error for a rank that agrees with its peers, but cannot go on."""
    return DesyncError(f"elsewhere in this group: {cause}")


def departed(call: Collective, peer: int, why: str) -> DesyncError:
    """The error for a peer that has gone in an orderly way."""
    return DesyncError(
        f"{call}: rank {peer} {why} and will not take part: look for a return, or an end of a "
        "loop, that depends on the rank or on its data"
    )


EXITED = "has called sys.exit"


def exited(rank: int, error: SystemExit) -> DesyncError | None:
    """What ``sys.exit`` means on a rank: a return, or the failure of that rank.

    Raised in the program that started the ranks it would end that without a word.
    """
    if error.code in (None, 0):
        return None
    return DesyncError(f"rank {rank} has called sys.exit({error.code!r})")


def named(ranks: Sequence[int]) -> str:
    """Ranks, as errors name them."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def absent(reasons: Mapping[int, str], seconds: float) -> str:
    """What to say of ranks that do not come to where all meet.

    Args:
        reasons: why each of them will not; empty where nobody knows.
        seconds: for which the others have waited.
    """
    gone = [f"rank {rank} {why}" for rank, why in reasons.items() if why]
    if silent := [rank for rank, why in reasons.items() if not why]:
        gone.append(
            f"{named(silent)} did not come within {seconds:.3g} s: ended, hanging, or on a path "
            "that does not call it"
        )
    return (
        f"zf.recover_world(): {'; '.join(gone)}. All ranks have to call it. Without them, start "
        "anew from the last checkpoint"
    )


def silence(call: Collective, peers: Sequence[int], seconds: float) -> DesyncError:
    """The error for peers that did not take part within the timeout."""
    return DesyncError(
        f"{call}: {named(peers)} did not take part within {seconds:g} s. It hangs, is slow, or "
        "took another path; raise timeout= (or ZFUNC_TIMEOUT) if it only needs longer"
    )
