"""An all-reduce as its two rounds, so that both run while backward computes.

A handle's second round could start only in ``wait``. Here the caller says when:
``advance`` ends the reduce-scatter and starts the all-gather of the sums.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zfunc.layout.layout import Flat
from zfunc.ranks.comm import Group, Handle

__all__ = ["Rounds", "in_rounds"]

# Bytes from which two rounds are quicker than one exchange of whole tensors, between several ranks
# and between two: these send the same bytes in one round, but need memory for all of them.
WORTHWHILE, WORTHWHILE_OF_TWO = 1 << 16, 1 << 22


def in_rounds(spec: Flat, device: torch.device) -> bool:
    """Whether a flat is reduced in two rounds; on a GPU the backend overlaps its own."""
    size = len(spec.cuts) - 1
    least = WORTHWHILE_OF_TWO if size == 2 else WORTHWHILE
    cut = not spec.whole and size > 1
    return device.type == "cpu" and cut and spec.length * spec.dtype.itemsize > least


class Rounds:
    """The sum of a full flat over the ranks.

    Args:
        group: the ranks.
        spec: how the flat is cut, which is also how the work is.
        full: the flat; belongs to this object until ``wait`` returns.
        out: memory for the sum, that of ``full`` itself if it may be overwritten.
        label: names the collectives in errors and ledgers.
    """

    def __init__(self, group: Group, spec: Flat, full: Tensor, out: Tensor, label: str) -> None:
        self._group, self._spec, self._full, self._label = group, spec, out, label
        low, high = spec.bounds(group.rank)
        own = out[low:high]
        self._first = group.reduce_scatter(full, cuts=spec.cuts, out=own, label=label)
        self._second: Handle[Tensor] | None = None

    def advance(self) -> None:
        """End the first round and start the second, if that has not been done."""
        if self._second is None:
            self._second = self._group.all_gather(
                self._full, self._first.wait(), cuts=self._spec.cuts, label=self._label
            )

    def wait(self) -> Tensor:
        """The full flat with the sums."""
        self.advance()
        assert self._second is not None
        return self._second.wait()
