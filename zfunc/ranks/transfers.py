"""Messages from one rank to another: what a transport does for them, and how a rank waits.

Messages from one rank of a group to another are numbered, apart from those that go back and from
the group's collectives. The n-th that is sent is the n-th that is received there.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod
from threading import RLock
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from zfunc.errors import DesyncError
from zfunc.ranks.comm import Handle

__all__ = ["SENT", "Complete", "Direction", "TensorSpec", "Transfer", "TransferHandle"]

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
Direction = tuple[int, int]  # from a rank of a group, to another


@dataclass(frozen=True)
class TensorSpec:
    """What a tensor that is to come looks like.

    >>> TensorSpec((2, 3), torch.float32).nbytes
    24
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"

    @cached_property  # of those that come in every step
    def nbytes(self) -> int:
        """The bytes of its elements."""
        return prod(self.shape) * self.dtype.itemsize

    def empty(self, device: torch.device | str | None = None) -> Tensor:
        """New memory for it."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)


class Transfer(Protocol[T_co]):
    """One message under way, as one of its two ranks sees it."""

    def is_over(self) -> bool:
        """Whether :meth:`wait` returns, or raises, at once."""

    def wait(self) -> T_co:
        """Return when the tensors that are sent may change, or those that come are there.

        Raises:
            DesyncError: the peer sends or expects something else, is silent or gone.
        """


class Issuer(Protocol):
    """Where a message was issued (:class:`zfunc.ranks.connected.ConnectedGroup`)."""

    epoch: int
    failure: DesyncError | None

    def why_lost(self, epoch: int) -> DesyncError:
        """Why what was issued in that epoch will not come: it is over, or there is a failure."""

    def fail(self, error: DesyncError) -> None:
        """Give up, and tell the others."""


class TransferHandle(Handle[T]):
    """A handle whose message a transport moves.

    Args:
        transfer: the transport's, or why there is none.
        issuer: the group; ``None`` where a rank is alone.
    """

    def __init__(self, transfer: Transfer[T] | DesyncError, issuer: Issuer | None) -> None:
        self._lock = RLock()
        self._issuer, self._epoch = issuer, 0 if issuer is None else issuer.epoch
        self._error: BaseException | None = None
        self._transfer: Transfer[T] | None = None
        if isinstance(transfer, DesyncError):
            self._end(transfer)
        else:
            self._transfer = transfer

    @property
    def done(self) -> bool:
        transfer = self._transfer
        return transfer is None or transfer.is_over()

    def wait(self) -> T:
        with self._lock:
            if (transfer := self._transfer) is not None:
                issuer = self._issuer
                if issuer is not None and (issuer.failure or issuer.epoch != self._epoch):
                    self._error = issuer.why_lost(self._epoch)
                else:
                    try:
                        self._result = transfer.wait()
                    except BaseException as error:
                        self._end(error)
                self._transfer = None
        if self._error is not None:
            raise self._error
        return self._result

    def _end(self, error: BaseException) -> None:
        self._error = error
        if isinstance(error, DesyncError) and self._issuer is not None:
            self._issuer.fail(error)


class Complete:
    """A message that has left already: what was sent may change."""

    def is_over(self) -> bool:
        return True

    def wait(self) -> Any:
        return None


SENT = Handle(None)  # of whatever is complete: nothing is left to be asked
