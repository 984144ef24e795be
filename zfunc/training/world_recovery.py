"""``recover_world``: new groups after an error, where all ranks still hold the old state.

Ranks that parted cannot go on in the groups in which they did: what is under way there belongs to
different steps. So all ranks meet outside of any group, tell what they hold, and begin the next
epoch of their world, in which every group begins anew. Groups stay the objects that they are, so
that placed states, steps and meshes go on with them.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from typing import Any

import optree
from torch import Tensor

from zfunc.engine import context
from zfunc.engine.entries import entry
from zfunc.errors import CompositionError, DesyncError, DonatedStateError, ZfuncError
from zfunc.layout.arriving import completed
from zfunc.layout.replicated import Replicated, gathered_again
from zfunc.ranks import world
from zfunc.ranks.axes import group
from zfunc.ranks.transport import named
from zfunc.transforms.capture import in_graph_memory
from zfunc.trees.marks import any_spent
from zfunc.trees.nodes import PLACED, Placed, boxes_in, held_in
from zfunc.trees.tree import check_alive, dotted

__all__ = ["recover_world"]

SPENT, APART = "spent: ", "apart: "  # how a verdict begins
_PLAIN = (bool, int, float, str, type(None))


def recover_world(state: Any = None, *, timeout: float | None = None) -> None:
    """Go on after an error in which ranks parted: all of them meet, and every group begins anew.

    A :class:`DesyncError` ends all groups for good, since ranks that disagree cannot go on. Where
    each rank still holds the state that it gave to the step, nothing is lost: all ranks call this,
    whatever error each of them caught, and go on. Steps, meshes and placed states go on as they
    are. What is still on its way from before the error reaches nobody; what the ranks had agreed
    on in earlier steps (in which order units enter, CUDA graphs) they agree on anew. A process
    group that you made stays untouched.

    The state is the one that went into the step: whether that has succeeded, other ranks may not
    know. So keep it until the next step has returned, without ``donate``; a state that a step had
    begun to write over is spent, and so is one in the memory of ``zf.captured``.

    A collective, called between steps. Ranks that do not come are named on those that do. Ranks
    that still wait for this one in a group are told at once, or find out by their timeout. What it
    raises it raises on all ranks that came, alike.

    Args:
        state: plain or placed. If given, all ranks must hold a live state of the same step and
            composition; what it was still gathering arrives. Without it nothing is said about
            states: restore one.
        timeout: seconds to wait for the other ranks; by default twice that of the world, for a
            rank may only find out by that that something has failed.

    Raises:
        CompositionError: it was called inside a step.
        DesyncError: ranks did not come, or hold states of different steps or compositions; groups
            stay as they are, and it may be called again.
        DonatedStateError: on some rank the state is spent; groups stay as they are. Call it again
            without a state, and restore a checkpoint.
        CheckpointError: what was being saved in the background could not be written; the groups
            are new all the same.

    >>> from zfunc.ranks.simulation import simulate
    >>> from zfunc.ranks.world import rank
    >>> def parting():
    ...     ranks = group(None, "data")
    ...     try:
    ...         ranks.exchange("hello", label=f"layer {rank()}")
    ...     except DesyncError:
    ...         recover_world()
    ...     return ranks.exchange(rank())
    >>> simulate(2)(parting)()
    [[0, 1], [0, 1]]
    """
    here = world.current()
    if context.current() is not None:
        raise CompositionError(
            "recover_world() was called inside a step, which cannot go on: catch the error around "
            "the step's call, and call it there"
        )
    began = time.monotonic()
    seconds = 2 * here.timeout if timeout is None else float(timeout)
    completed()
    here.stop(_reason())
    verdict = here.meet(json.dumps(_report(state)), _judged, began + seconds)
    if verdict:
        kind, text = verdict[: len(SPENT)], verdict[len(SPENT) :]
        raise (DonatedStateError if kind == SPENT else DesyncError)(text)
    here.renew()
    if here.size > 1 and state is not None:
        boxes = [x for x in boxes_in(state) if isinstance(x, Replicated)]
        gathered_again(boxes, group(None, "data"))
    for forget in world.on_renewal:
        forget()


def _reason() -> str:
    """Why this rank has stopped: what it is catching."""
    error = sys.exc_info()[1]
    return "zf.recover_world() was called" if error is None else f"{type(error).__name__}: {error}"


def _report(state: Any) -> dict[str, Any]:
    """What a rank tells of the state that it holds."""
    if state is None:
        return {"given": False}
    told: dict[str, Any] = {"given": True, "spent": _dead(state)}
    if not told["spent"]:
        step = entry(state, "step")
        told["step"] = int(step) if isinstance(step, Tensor | int) else None
        told["kind"] = _composition(state)
    return told


def _dead(state: Any) -> str:
    """Why a state is not to be used any more; nothing if it is alive."""
    tensors = held_in(state)
    if any_spent(tensors):
        try:
            check_alive(state)
        except ZfuncError as error:
            return str(error)
        return "a leaf was donated"
    on_device = [x for x in tensors if x.device.type != "cpu"]
    if on_device and any(ranks.cut_short for ranks in world.current().groups):
        return "steps that had returned were still being computed when the groups failed"
    if any(map(in_graph_memory, on_device)):
        return "it lies in the memory of zf.captured, which the replay that failed writes to"
    return ""


def _composition(state: Any) -> str:
    """A digest of what a state is, apart from its numbers; alike on all ranks."""
    nodes, spec = optree.tree_flatten(state, none_is_leaf=True, namespace=PLACED)
    rows = [(dotted(*path), *_kind(node)) for path, node in zip(spec.paths(), nodes, strict=True)]
    return hashlib.sha256(repr(rows).encode()).hexdigest()[:16]


def _kind(node: Any) -> tuple[Any, ...]:
    if isinstance(node, Placed):
        infos = [(info.keys, info.shape, info.dtype) for info in node.leaf_infos()]
        return type(node).__name__, infos
    if isinstance(node, Replicated):
        slots = [slot and (slot.path, slot.shape) for slot in node.layout.slots]
        return "tree", slots, [flat.dtype for flat in node.layout.flats]
    if isinstance(node, Tensor):
        return "tensor", tuple(node.shape), node.dtype
    return type(node).__name__, node if isinstance(node, _PLAIN) else ""


def _judged(reports: list[str]) -> str:
    """What the ranks must not go on with; empty if they may."""
    told = [json.loads(report) for report in reports]
    given = [rank for rank, row in enumerate(told) if row["given"]]
    if given and len(given) < len(told):
        without = [rank for rank in range(len(told)) if rank not in given]
        return f"{APART}zf.recover_world(): {named(without)} gave no state, and the others did"
    if spent := {rank: row["spent"] for rank, row in enumerate(told) if row.get("spent")}:
        first, why = next(iter(spent.items()))
        return (
            f"{SPENT}zf.recover_world(): {named(list(spent))} no longer "
            f"{'holds' if len(spent) == 1 else 'hold'} the state. Call zf.recover_world() without "
            "one on all ranks, and go on from the last checkpoint (zf.restore). "
            f"Rank {first}: {why}"
        )
    for what, text in (("step", "states of different steps"), ("kind", "different states")):
        ranks: dict[Any, list[int]] = {}
        for rank, row in enumerate(told):
            ranks.setdefault(row.get(what), []).append(rank)
        if len(ranks) > 1:
            rows = [f"{named(who)}: {what} {value}" for value, who in ranks.items()]
            return (
                f"{APART}zf.recover_world(): the ranks hold {text} ({'; '.join(rows)}). A step may "
                "have returned on some ranks and failed on others: give the state that went into "
                "it, on all ranks, or restore a checkpoint"
            )
    return ""
