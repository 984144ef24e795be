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
from zfunc.transforms.offloading.generations import Placement, Plan, read_index, shape_of, unpacked
from zfunc.transforms.offloading.store import Store, open_store
from zfunc.transforms.offloading.stored import Stored
from zfunc.transforms.offloading.streamed import Cut, Streamed
from zfunc.trees.nodes import NAMESPACE, Placed
from zfunc.trees.tree import dotted

__all__ = ["recover"]


def recover(step: Step, like: Any) -> Any:
    """The newest whole state that is on disk where ``step`` keeps its own; a collective.

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
    token = PLACING.set(step)
    try:
        for transform in reversed(step.transforms):
            like = offload.laid_out(like) if transform is offload else transform.place(like)
    finally:
        PLACING.reset(token)
    paths = [Path(p) for p in offload.path]
    store = open_store(step, paths, offload.buffers, left=False)
    return step._noted(_opened(store, like, offload))


def _opened(store: Store, state: Any, offload: Any) -> Any:
    keys, found, spec = optree.tree_flatten_with_path(
        state, is_leaf=lambda x: isinstance(x, Placed), none_is_leaf=True, namespace=NAMESPACE
    )
    names = [dotted(*key) for key in keys]
    folder, record = _newest(store)
    _agree(record)
    plans = []
    for name, node in zip(names, found, strict=True):
        if isinstance(node, Cut) and name in record["columns"]:
            dtypes = tuple(None if x is None else x.dtype for x in node.skeleton.flats)
            plans.append(Plan(name, node.layout, node.group.rank, dtypes))
    home = Placement(store, plans, folder)
    _check(record, home, names)
    chosen = record["generations"][-1]
    home.resume(chosen)
    for name, node in zip(names, found, strict=True):
        if isinstance(node, Cut) and name in home.columns:
            home.columns[name].device = node.home
            store.serve(node.home, offload.pin)
    out: list[Any] = []
    for name, node in zip(names, found, strict=True):
        if name in home.columns:
            out.append(Stored(home.columns[name], chosen["slots"][name], home))
        elif isinstance(node, Tensor) and name in chosen["plain"]:
            plain = unpacked(*chosen["plain"][name])
            out.append(plain if node.is_meta else plain.to(node.device))
        elif node is None or not isinstance(node, Tensor | Streamed):
            out.append(node)
        else:
            raise CheckpointError(
                f"{name} was in memory when the process ended, and is not on disk. Restore a "
                "checkpoint. (Whole states are kept at stage 3 and without shard.)"
            )
    return optree.tree_unflatten(spec, out)


def _newest(store: Store) -> tuple[str, dict[str, Any]]:
    """Folder and record of the placement that was made last."""
    found = sorted(store.folders[0].glob("place-*/index.json"), key=os.path.getmtime)
    if not found:
        raise CheckpointError(
            f"{store.folders[0]} holds no state: no place-*/index.json. Is it the path that the "
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


def _check(record: Mapping[str, Any], home: Placement, names: list[str]) -> None:
    for name, shape in record["columns"].items():
        column = home.columns.get(name)
        if column is None:
            raise CheckpointError(
                f"the state on disk has {name}, `like` has not: it has {', '.join(names[:5])}."
            )
        mine = shape_of(column)
        if mine != shape:
            a, b = next(
                ((x, y) for x, y in zip(mine, shape, strict=False) if x != y), (mine, shape)
            )
            raise CheckpointError(
                f"{name} on disk is another tree than in `like`: {b} (leaf, shape, dtype, ranks) "
                f"there, {a} here. Give the model, optimizer and world that it was written with."
            )
