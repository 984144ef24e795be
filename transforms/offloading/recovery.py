"""``recover``: open the state that a killed process left on disk."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import optree
from torch import Tensor

from zfunc.engine.context import PLACING
from zfunc.engine.step import Step
from zfunc.errors import CheckpointError
from zfunc.ranks import world
from zfunc.ranks.axes import group
from zfunc.transforms.offloading.deferred import LazyShard, Streamed
from zfunc.transforms.offloading.disk import Disk, open_disk
from zfunc.transforms.offloading.disk_state import (
    DiskState,
    description_of,
    read_index,
    unpacked,
)
from zfunc.transforms.offloading.disk_trees import DiskTree, state_nodes
from zfunc.trees.nodes import Placed

__all__ = ["recover"]


def recover(step: Step, like: Any) -> Any:
    """The newest complete state that is on disk where ``step`` keeps its own; a collective.

    For a run that was killed: the state is the one that its last finished step returned, on
    all ranks. Call it in place of ``step.place``, which would discard what is there.

    Args:
        step: wrapped in ``offload(to="disk", path=...)``, as the killed one was, on as many
            ranks.
        like: a full state of the same structure (``TrainState.create(params, tx)``); its
            tensors may be on ``meta``. Its values are not used.

    Returns:
        The placed state. Data are read, and their checksums verified, when they are used.

    Raises:
        CheckpointError: nothing is there, it is damaged, belongs to another state, or part of
            the state was in memory only (parameters at stages 0 to 2).
        PlacementError: the path is in use.
    """
    offload: Any = next((t for t in step.transforms if getattr(t, "to", None) == "disk"), None)
    if offload is None:
        raise CheckpointError(
            f"{step!r} keeps nothing on disk. Wrap it in offload(to='disk', path=...) as it was."
        )
    token, laid_out = PLACING.set(step), offload.laid_out
    try:
        for transform in reversed(step.transforms):
            like = laid_out(like) if transform is offload else transform.place(like)
    finally:
        PLACING.reset(token)
    paths = [Path(p) for p in offload.path]
    disk = open_disk(step, paths, offload.buffers, left=False)
    return step._noted(_opened(disk, like, offload))


def _opened(disk: Disk, state: Any, offload: Any) -> Any:
    names, found, spec = state_nodes(state, Placed)  # of boxes every leaf
    folder, record = _newest(disk)
    _agree(record)
    lazy = {
        name: node
        for name, node in zip(names, found, strict=True)
        if isinstance(node, LazyShard) and name in record["columns"]
    }
    home = DiskState(disk, {name: node.skeleton for name, node in lazy.items()}, folder)
    _check(record, home, names)
    chosen = record["generations"][-1]
    home.resume(chosen)
    for name, node in lazy.items():
        home.trees[name].device = node.home
        disk.serve(node.home, offload.pin)
    out: list[Any] = []
    for name, node in zip(names, found, strict=True):
        if name in home.trees:
            out.append(DiskTree(home.trees[name], chosen["slots"][name], home))
        elif isinstance(node, Tensor) and name in chosen["plain"]:
            plain = unpacked(*chosen["plain"][name])
            out.append(plain if node.is_meta else plain.to(node.device))
        elif node is None or not isinstance(node, Tensor | Streamed):
            out.append(node)
        else:
            raise CheckpointError(
                f"{name} was in memory when the process ended, and is not on disk. Restore a "
                "checkpoint. (Complete states are kept at stage 3 and without shard.)"
            )
    return optree.tree_unflatten(spec, out)


def _newest(disk: Disk) -> tuple[str, dict[str, Any]]:
    """Folder and record of the state that was placed last."""
    found = sorted(disk.folders[0].glob("place-*/index.json"), key=os.path.getmtime)
    if not found:
        raise CheckpointError(
            f"{disk.folders[0]} holds no state: no place-*/index.json. Is it the path that the "
            "killed run had, and does this world have as many ranks?"
        )
    return found[-1].parent.name, read_index(found[-1])


def _agree(record: dict[str, Any]) -> None:
    """Keep the newest generation that every rank has."""
    if world.current().size == 1:
        return
    mine = {g["number"] for g in record["generations"]}
    everyone = group(None, "data").exchange(sorted(mine), label="recover")
    common = mine.intersection(*everyone)
    if not common:
        raise CheckpointError(
            f"the ranks hold no state of the same step: {everyone}. Restore a checkpoint."
        )
    record["generations"] = [g for g in record["generations"] if g["number"] <= max(common)]


def _check(record: Mapping[str, Any], home: DiskState, names: list[str]) -> None:
    for name, shape in record["columns"].items():
        tree = home.trees.get(name)
        if tree is None:
            raise CheckpointError(
                f"the state on disk has {name}, `like` has not: it has {', '.join(names[:5])}."
            )
        mine = description_of(tree)
        if mine != shape:
            a, b = next(
                ((x, y) for x, y in zip(mine, shape, strict=False) if x != y), (mine, shape)
            )
            raise CheckpointError(
                f"{name} on disk is another tree than in `like`: {b} (leaf, shape, dtype, ranks) "
                f"there, {a} here. Give the model, optimizer and world that it was written with."
            )
