"""Collectives between the ranks along one mesh axis: asynchronous, counted, and never a hang.

:class:`Group` is what the rest of zfunc calls. This file says what each collective means, and
checks its arguments. A rank that is alone in its group needs no more. A group of several ranks is a
:class:`~zfunc.ranks.connected.ConnectedGroup`, which announces each collective to the peers, counts
its bytes, bounds what is under way, and lets a transport move the data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from zfunc.ranks.accounting import ledger
from zfunc.ranks.messages import read, written
from zfunc.ranks.world import Member, World, settle, unchecked

__all__ = ["Group", "Handle", "even_cuts", "groups_of", "ledger", "settle", "unchecked"]

T = TypeVar("T")


class Handle(Generic[T]):
    """A collective under way. Its tensors belong to it until :meth:`wait` returns.

    One that nobody waits for is completed by its group when the next collective is issued: the
    peers take part in it all the same.
    """

    _result: T

    def __init__(self, result: T) -> None:
        self._result = result

    @property
    def done(self) -> bool:
        """Whether :meth:`wait` would return, or raise, at once."""
        return True

    def wait(self) -> T:
        """Block until the collective is complete on this rank. Calling again is free.

        Returns:
            What the collective promises: see the methods of :class:`Group`.

        Raises:
            DesyncError: a peer is in another collective, silent or gone.
        """
        return self._result


# What a rank that is alone gets, by kind: its own part.
_ALONE: dict[str, Callable[..., Any]] = {
    "all_gather": lambda full, cuts: full,
    "reduce_scatter": lambda full, cuts, out: full.clone() if out is None else out.copy_(full),
    "all_reduce": lambda flat: flat,
    "all_to_all": lambda chunks, sizes: [chunk.clone() for chunk in chunks],
    "broadcast": lambda flat, src: flat,
}


class Group(Member):
    """The ranks along one axis of a mesh (or along several, flattened), as this rank sees them.

    All ranks of the group issue the same collectives in the same order; they may wait for them
    in any order (between groups that share ranks, in the same one). Every method that returns a
    :class:`Handle` is asynchronous. The class itself is the group of a rank that is alone.

    Attributes:
        axis: the axis' name; a flattened group joins the names with ``+``.
        rank: this rank's index along the axis.
        size: the number of ranks along the axis.
        members: the ranks of the world that are in it, where that is known.
        issued: how many collectives it has issued.
        hosted: how many of them were the host's work.
        world: this rank's.
    """

    rank, size = 0, 1
    issued = hosted = 0

    def __init__(self, axis: str, world: World, members: tuple[int, ...] = ()) -> None:
        self.axis = axis
        self.members = members
        self.world = world
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
            shard: this rank's segment, 1-D or rows of one shape; not copied if it is there already.
            cuts: ``size + 1`` offsets into ``full``; even ones if ``None``.
            label: names the collective in errors and ledgers.

        Raises:
            ValueError: a wrong shape, dtype or device, or cuts that do not cover ``full``.
        """
        offsets = self._cuts("all_gather", label, full, cuts)
        own = full[offsets[self.rank] : offsets[self.rank + 1]]
        if own.numel() != shard.numel() or own.dtype != shard.dtype:
            raise ValueError(
                f"all_gather({label!r}): shard is {shard.dtype} {list(shard.shape)}, expected "
                f"{own.dtype} {list(own.shape)}, the segment of rank {self.rank}"
            )
        if torch.overrides.has_torch_function_unary(shard) or own.data_ptr() != shard.data_ptr():
            with torch.no_grad():
                own.copy_(shard.reshape(-1))
        what = (full.dtype, offsets, *shard.shape[1:])
        return self._issue("all_gather", label, what, full, (full, offsets))

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
            full: contiguous, 1-D or rows of one shape on all ranks; read until ``wait()`` returns,
                and not kept after that.
            cuts: ``size + 1`` offsets into ``full``; even ones if ``None``.
            out: receives the result, instead of a new tensor; it may be this rank's segment
                of ``full``, but no other memory of it.
            label: names the collective in errors and ledgers.

        Raises:
            ValueError: ``full`` is not contiguous, cuts that do not cover it, or an ``out`` that
                is not like this rank's segment.
        """
        rows, full = full.shape[1:], self._flat("reduce_scatter", label, full)
        offsets = self._cuts("reduce_scatter", label, full, cuts)
        own = full[offsets[self.rank] : offsets[self.rank + 1]]
        if out is not None and (out.shape != own.shape or out.dtype != own.dtype):
            raise ValueError(
                f"reduce_scatter({label!r}): out is {out.dtype} {list(out.shape)}, expected "
                f"{own.dtype} {list(own.shape)}, the segment of rank {self.rank}"
            )
        what = (full.dtype, offsets, *rows)
        return self._issue("reduce_scatter", label, what, full, (full, offsets, out))

    def all_reduce(self, x: Tensor, *, label: str = "") -> Handle[Tensor]:
        """Sum over ranks, in place; ``wait()`` returns ``x``, the same bits on every rank.

        Args:
            x: contiguous, of any shape.
            label: names the collective in errors and ledgers.

        Raises:
            ValueError: ``x`` is not contiguous.
        """
        flat = self._flat("all_reduce", label, x)
        return self._issue("all_reduce", label, (x.dtype, *x.shape), flat, (flat,), lambda _: x)

    def all_to_all(
        self, chunks: Sequence[Tensor], *, sizes: Sequence[int] | None = None, label: str = ""
    ) -> Handle[list[Tensor]]:
        """Send ``chunks[i]`` to rank i; ``wait()`` returns new tensors, one from each rank.

        Args:
            chunks: one contiguous tensor per rank, all of one dtype; 1-D, or rows of one shape.
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
        shape = own.shape if sizes is None else (-1,)
        return self._issue(
            *("all_to_all", label, (own.dtype, *own.shape[1:]), own, (flats, expected)),
            lambda parts: [part.view(shape) for part in parts],
        )

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
        what = x.dtype, x.numel(), src
        return self._issue("broadcast", label, what, flat, (flat, src), lambda _: x)

    def exchange(self, obj: Any, *, label: str = "") -> list[Any]:
        """Every rank's small object, in rank order; blocks.

        Args:
            obj: plain data, the same kinds as in ``zfunc.ranks.messages``: it travels as JSON.
            label: names the collective in errors and ledgers.

        Raises:
            TypeError: it is something else.
            DesyncError: what came from a rank is no message.
        """
        return [read(part) for part in self._exchanged("exchange", label, written(obj))]

    def barrier(self, *, label: str = "") -> None:
        """Return once every rank of the group has come here."""
        self._exchanged("barrier", label, b"")

    def mark(self, label: str) -> None:
        """Tell the neighbours that this rank has come here, and check their mark before this one.

        For what runs again on the device without Python's taking part. The host waits only for a
        neighbour that is a whole mark behind.

        Raises:
            DesyncError: a neighbour did something else, is silent or gone.
        """

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
        complete = len(offsets) == self.size + 1 and (offsets[0], offsets[-1]) == (0, full.numel())
        if not complete or any(a > b for a, b in pairwise(offsets)):
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

    def _issue(
        self,
        kind: str,
        label: str,
        what: tuple[Any, ...],
        data: Tensor,
        args: tuple[Any, ...],
        then: Callable[[Any], Any] | None = None,
    ) -> Handle[Any]:
        """Start a collective.

        Args:
            kind: its name, also that of the transport's method.
            label: names it in errors and ledgers.
            what: is alike on all ranks that agree.
            data: tells where it happens.
            args: the transport's.
            then: makes of the transport's result what ``wait()`` returns.
        """
        self._ask_gate(kind, label)
        with torch.no_grad():
            result = _ALONE[kind](*args)
        return Handle(result if then is None else then(result))

    def _exchanged(self, kind: str, label: str, data: bytes) -> list[bytes]:
        self._ask_gate(kind, label)
        return [data]

    def _ask_gate(self, kind: str, label: str) -> None:
        if self.world.gate is not None:
            self.world.gate(f"{kind}({label!r})")

    def _finish_dropped(self) -> None:
        """Complete what was started and let go of by everybody."""


def even_cuts(numel: int, size: int) -> tuple[int, ...]:
    """Cut ``numel`` elements into ``size`` segments as even as can be, the longer ones first.

    >>> even_cuts(7, 3)
    (0, 3, 5, 7)
    """
    small, rest = divmod(numel, size)
    return tuple(small * r + min(r, rest) for r in range(size + 1))


def groups_of(world: World) -> tuple[Group, ...]:
    """Every group that was made in a world."""
    return tuple(group for group in world.groups if isinstance(group, Group))
