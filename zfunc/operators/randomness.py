"""``in_parts``: random numbers of work in parts, which are to differ from rank to rank.

On the residual stream ranks of the axis compute alike, and so they draw alike. Between a column
and its row each rank has heads or hidden units of its own, whose masks are to be independent.

Source: Shoeybi et al., Megatron-LM, 2019, section 3 (hybrid model and data parallelism, the random
number generators of dropout).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from zfunc.ranks.comm import Group
from zfunc.ranks.keys import fold_in, scope
from zfunc.trees.memory import current

__all__ = ["apart", "in_parts"]


@contextmanager
def in_parts() -> Iterator[None]:
    """A block in which torch's random functions draw other numbers on each rank of the axis.

    Around dropout between a column and its row. What is drawn behind the block is alike on all
    ranks again. For draws with keys of your own
    ``zf.random.fold_in(key, zf.axis_index("tensor"))`` says the same. Outside of a step that
    splits, and on one rank, nothing is changed.

    >>> with in_parts():
    ...     y = torch.nn.functional.dropout(torch.ones(2), 0.0)
    """
    running = current()
    split: Any = None if running is None else running.notes.get("split")
    if split is None or split.group.size == 1:
        yield
        return
    with apart(split.group):
        yield


def apart(ranks: Group) -> scope:
    """A scope of numbers of this rank's own; a draw that is alike on all ranks decides them."""
    drawn = torch.empty((), dtype=torch.int64, device="cpu").random_()
    return scope(fold_in(drawn, ranks.rank))
