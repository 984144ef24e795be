"""Leaves that are stored as bytes: low-bit tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, Self

from torch import Tensor

from zfunc.ranks.comm import Group

__all__ = ["Encoded", "Encoding"]

Runs = tuple[tuple[int, int], ...]


class Encoding(Protocol):
    """What an encoded leaf is apart from its data: a static value, hashable."""

    shape: Any

    @property
    def bytes(self) -> int:
        """How many bytes it is stored in."""

    def read(self, data: Tensor) -> Any:
        """The leaf whose bytes lie in ``data``, 1-D uint8."""

    def resized(self, dim: int, size: int) -> Encoding:
        """That of a leaf with another size along a dimension."""


class Encoded:
    """A leaf that is cut and sent as the bytes that it is stored in (a low-bit tensor)."""

    def to_bytes(self) -> Tensor:
        """All that it holds, 1-D uint8."""
        raise NotImplementedError

    @property
    def code(self) -> Any:
        """An :class:`Encoding`."""
        raise NotImplementedError

    def grain(self, dim: int) -> int:
        """Of how many indices of a dimension a part must have all or none; 1 where any will do."""
        raise NotImplementedError

    def taken(self, dim: int, runs: Runs) -> Self:
        """Some indices of a dimension, in memory of their own; at borders that :meth:`grain` has.

        Args:
            dim: of the leaf that it stands for, counted from 0.
            runs: ``(start, stop)`` of indices, rising.
        """
        raise NotImplementedError

    def joined(self, parts: Sequence[Self], dim: int, runs: Sequence[Runs]) -> Self:
        """The leaf of which ``parts`` are the ones that :meth:`taken` gave for each of ``runs``."""
        raise NotImplementedError

    def summand(self, x: Tensor, ranks: Group) -> Tensor:
        """``x W^T``, where ranks have parts of what is summed over: this rank's summand.

        Inputs are prepared as for the whole product, about which ranks may have to agree.
        """
        raise NotImplementedError
