"""Who does what in a pipeline: all ranks have to mean the same, and a state has to lie so.

Nobody would notice otherwise: with other partitions on two ranks a layer is trained by none of
them, or by both.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from zfunc.errors import PlacementError
from zfunc.layout.readable import Readable
from zfunc.layout.stages import owners_of_chunks
from zfunc.ranks.comm import Group
from zfunc.schedules.pipeline_schedule import Schedule
from zfunc.trees.nodes import OPAQUE, leaves_in

__all__ = ["Told", "agree", "check_owners", "followed"]

Told = Sequence[tuple[str, str]]
"""Arguments of a pipeline, and what they are on this rank, in words."""


def followed(given: Any, plan: Schedule) -> Told:
    """What each call follows: the arguments that say which rank does what, and when.

    Args:
        given: the schedule as the user wrote it.
        plan: what it is here.
    """
    name = repr(given) if isinstance(given, str) else f"its own, of digest {_digest(plan)}"
    rows = ("microbatches", plan.microbatches), ("schedule", name), ("chunks in all", plan.chunks)
    return [(what, str(value)) for what, value in rows]


@lru_cache(maxsize=16)  # each call of a step asks, and there are many actions
def _digest(plan: Schedule) -> str:
    rows = [[tuple(action) for action in row] for row in plan.actions]
    return hashlib.sha256(repr((plan.rank_of, rows)).encode()).hexdigest()[:8]


def agree(ranks: Group, told: Told) -> None:
    """Raise ``PlacementError`` on all ranks if some were given other arguments; a collective."""
    if ranks.size == 1:
        return
    mine = [[what, value] for what, value in told]
    rows = ranks.exchange(mine, label="arguments of pipeline")
    for rank, theirs in enumerate(rows):
        pairs = zip(rows[0], theirs, strict=True)
        if differ := [f"{a[0]}: {a[1]} and {b[1]}" for a, b in pairs if a != b]:
            raise PlacementError(
                f"ranks 0 and {rank} were given different arguments of pipeline: "
                f"{'; '.join(differ)}. Give all ranks the same: otherwise some layers would be "
                "trained by two of them, or by none."
            )


def check_owners(state: Any, rank_of: Sequence[int]) -> None:
    """Raise ``PlacementError`` if chunks of a placed state lie on other stages than they run on.

    At which layers chunks begin is no matter: calls find that in the state.
    """
    wanted, found, wrong = dict(enumerate(rank_of)), dict[int, int](), False
    for node in leaves_in(state, OPAQUE):
        if isinstance(node, Readable) and node.layout.layers and not wrong:
            mine = owners_of_chunks(node.layout)
            found |= mine
            wrong = any(wanted.get(k) != rank for k, rank in mine.items())
    if wrong or (found and max(found) + 1 != len(rank_of)):
        theirs = [found.get(k, -1) for k in range(max(found) + 1)]
        raise PlacementError(
            f"this state was placed by another step: its chunks lie on the stages {theirs}, and "
            f"this step runs chunks on the stages {list(rank_of)}, as its schedule= and chunks= "
            "say. Call the step that placed it, or take the state back with its `unplace` and "
            "`place` the result here."
        )
