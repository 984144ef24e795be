"""Sums in several rounds, so that all of them run while backward computes.

A handle's second round could start only in ``wait``. Here the caller says when: ``advance`` ends
a round and starts the next one, if there is one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zfunc.layout.layout import Flat
from zfunc.ranks.comm import Group, Handle
from zfunc.trees.kinds import kind

__all__ = ["ReplicaSum", "Rounds", "in_rounds"]

# Bytes from which two rounds are quicker than one exchange of whole tensors, between several ranks
# and between two: these send the same bytes in one round, but need memory for all of them.
WORTHWHILE, WORTHWHILE_OF_TWO = 1 << 16, 1 << 22


def in_rounds(spec: Flat, device: torch.device, replicated: bool) -> bool:
    """Whether a flat is reduced in rounds; on a GPU the backend overlaps its own.

    Among replicas it always is: what goes over the slower links between them is this rank's part.
    """
    size = len(spec.cuts) - 1
    if spec.whole or size == 1 or replicated:
        return replicated and not spec.whole and size > 1
    least = WORTHWHILE_OF_TWO if size == 2 else WORTHWHILE
    return kind(device) == "cpu" and spec.length * spec.dtype.itemsize > least


class ReplicaSum:
    """The sum over replicas of what is being summed within each of them.

    Args:
        replicas: the ranks that have this part.
        first: the sum within; ``wait`` gives a tensor of which nobody else has the memory.
        label: names the collective in errors and ledgers.
    """

    def __init__(self, replicas: Group, first: Handle[Tensor], label: str) -> None:
        self._replicas, self._first, self._label = replicas, first, label
        self._second: Handle[Tensor] | None = None

    @property
    def under_way(self) -> bool:
        """Whether the sum over replicas has been started."""
        return self._second is not None

    def advance(self) -> None:
        """End the sum within and start that over replicas, if that has not been done."""
        if self._second is None:
            self._second = self._replicas.all_reduce(self._first.wait(), label=self._label)

    def wait(self) -> Tensor:
        """This part of the sum."""
        self.advance()
        assert self._second is not None
        return self._second.wait()


class Rounds:
    """The sum of a full flat over the ranks.

    Args:
        group: the ranks.
        replicas: other ranks that have the same part of the work; only this one, if there are none.
        spec: how the flat is cut, which is also how the work is.
        full: the flat; belongs to this object until ``wait`` returns.
        out: memory for the sum, that of ``full`` itself if it may be overwritten.
        label: names the collectives in errors and ledgers.
    """

    def __init__(
        self, group: Group, replicas: Group, spec: Flat, full: Tensor, out: Tensor, label: str
    ) -> None:
        self._group, self._spec, self._full, self._label = group, spec, out, label
        low, high = spec.bounds(group.rank)
        own = out[low:high]
        first = group.reduce_scatter(full, cuts=spec.cuts, out=own, label=label)
        self._first = first if replicas.size == 1 else ReplicaSum(replicas, first, label)
        self._second: Handle[Tensor] | None = None

    def advance(self) -> None:
        """End the first round and start the next one; among replicas that is done twice."""
        if isinstance(self._first, ReplicaSum) and not self._first.under_way:
            self._first.advance()
        elif self._second is None:
            self._second = self._group.all_gather(
                self._full, self._first.wait(), cuts=self._spec.cuts, label=self._label
            )

    def wait(self) -> Tensor:
        """The full flat with the sums."""
        self.advance()
        self.advance()
        assert self._second is not None
        return self._second.wait()
