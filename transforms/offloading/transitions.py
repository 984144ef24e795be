"""A state that is put on the host or on disk, and the state that follows it after a step.

What a step returns in place of trees on disk is evaluated in one pass over the units and written
into the other slots. Then the index names these slots. If anything fails before that, the state
that the step was given is still the newest one on disk, and complete.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
from torch import Tensor

from zfunc.buffers.ring import HOST
from zfunc.engine import context
from zfunc.engine.placement import placed_nodes
from zfunc.errors import PlacementError
from zfunc.layout.readable import Readable
from zfunc.layout.sharded import Sharded
from zfunc.transforms.offloading.deferred import LazyShard, Streamed, assembled
from zfunc.transforms.offloading.disk import Disk
from zfunc.transforms.offloading.disk_state import DiskState
from zfunc.transforms.offloading.disk_trees import (
    DiskTree,
    plain_leaves,
    state_nodes,
    trees_on_disk,
)
from zfunc.transforms.offloading.evaluation import (
    Collected,
    Expression,
    LazyJoin,
    Take,
    filling,
    gathered_up,
    stream,
)
from zfunc.transforms.offloading.host_trees import HostTree, HostWriter, copied_to_host
from zfunc.trees.nodes import NAMESPACE, Box, Lazy, Placed
from zfunc.trees.tree import dotted

__all__ = ["next_state", "put_on_disk", "put_on_host", "trees_on_host"]


def trees_on_host(state: Any) -> list[HostTree]:
    """The trees of a state that are in host memory, apart from the device's."""
    return [x for x in placed_nodes(state) if isinstance(x, HostTree)]


def put_on_host(state: Any, keep: Callable[[str], bool], pin: bool) -> Any:
    """Copy the trees of a new state into host memory.

    Args:
        state: with :class:`LazyShard` nodes.
        keep: whether the one at a path belongs there; others stay where they are.
        pin: whether the memory is page-locked.
    """

    def put(name: str, node: LazyShard) -> Any:
        if not keep(name):
            return node.in_memory()
        local = node.skeleton if node.on_meta else gathered_up(node)
        made = copied_to_host(local, node.home, pin, empty=node.on_meta)
        del local
        HOST.clear()  # what units went through on their way down
        return made

    return _with_shards(state, put)


def put_on_disk(state: Any, disk: Disk, keep: Callable[[str], bool]) -> Any:
    """The same to the disk, unit by unit."""
    names, found, _ = state_nodes(state)
    lazy = {n: x for n, x in zip(names, found, strict=True) if isinstance(x, LazyShard)}
    kept = {name: node.skeleton for name, node in lazy.items() if keep(name)}
    home = DiskState(disk, kept) if kept else None

    def put(name: str, node: LazyShard) -> Any:
        if home is None or name not in home.trees:
            return node.in_memory()
        storage = home.trees[name]
        storage.device = node.home
        if not node.on_meta:
            for unit in range(len(node.layout.units)):
                disk.behind(storage.write(0, unit, node.part(unit).flats))
        return DiskTree(storage, 0, home)

    new = _with_shards(state, put)
    disk.settle()
    if home is not None and not any(node.on_meta for node in lazy.values()):
        home.commit(dict.fromkeys(home.trees, 0), plain_leaves(new))
    return new


def _with_shards(state: Any, put: Callable[[str, LazyShard], Any]) -> Any:
    """A state with ``put(path, node)`` in place of its lazy shards."""
    names, found, spec = state_nodes(state)
    rows = zip(names, found, strict=True)
    return optree.tree_unflatten(
        spec, [put(name, x) if isinstance(x, LazyShard) else x for name, x in rows]
    )


class DiskWriter:
    """Takes the parts of the tree that follows a :class:`DiskTree`, and writes them."""

    def __init__(self, was: DiskTree) -> None:
        self.was, self.slot = was, 1 - was.slot

    def __call__(self, unit: int, part: Sharded) -> None:
        storage = self.was.storage
        _check_dtypes(storage.name, storage.sections[unit].flats, part)
        storage.disk.behind(storage.write(self.slot, unit, part.flats))

    def result(self) -> DiskTree:
        """The new tree."""
        return DiskTree(self.was.storage, self.slot, self.was.home)


def next_state(old: Any, new: Any) -> Any:
    """The state after ``old``: ``new`` evaluated, and in host memory and on disk what was there.

    Raises:
        PlacementError: the device is full; or the state has changed its structure.
        CheckpointError: what is read is damaged.
    """
    lazies = [x for x in state_nodes(new, Placed, Box, Lazy)[1] if isinstance(x, LazyJoin)]
    targets: list[tuple[Expression, Take]] = [
        (lazy.node, filling(lazy)) for lazy in lazies if lazy.made is None
    ]
    names, before, spec = state_nodes(old)
    after = _along(old, _unveiled(new, lambda lazy: lazy.params), "")
    takers: dict[int, Collected | HostWriter | DiskWriter] = {}
    offers, stays = _offers(before)
    for i, (name, was, now) in enumerate(zip(names, before, after, strict=True)):
        if now is was and isinstance(was, DiskTree | HostTree):
            continue
        if isinstance(was, DiskTree | HostTree):
            now = _checked(name, was, assembled(was.layout, now))
            takers[i] = (
                DiskWriter(was) if isinstance(was, DiskTree) else HostWriter(was, stays, offers)
            )
        elif isinstance(now, Streamed):
            takers[i] = Collected(now, now.device)
        else:
            continue
        targets.append((now, takers[i]))
    if not targets:
        return new
    writes = [x for x in takers.values() if isinstance(x, DiskWriter)]
    try:
        _advance(old, writes, targets)
    finally:
        if offers is not None:
            offers.clear()  # by now the new state lies there
    after = _along(old, _unveiled(new, lambda lazy: lazy.made), "")
    for i, taker in takers.items():
        after[i] = taker.result()
    out = optree.tree_unflatten(spec, after)
    _commit(out, writes)
    return out


def _offers(before: list[Any]) -> tuple[dict[int, Tensor] | None, frozenset[int]]:
    """Where optimizers may write the new state at once, if they may not where the old one lies.

    And where the old one lies, since what stays there is not copied.
    """
    hosted = [x for node in before if isinstance(node, HostTree) for x in node.held()]
    stays = frozenset(x.data_ptr() for x in hosted if x is not None and x.numel())
    running = context.current()
    donated = running is not None and running.donation is not None
    return None if running is None or donated else running.offers, stays


def _along(old: Any, new: Any, path: str) -> list[Any]:
    """The subtrees of ``new`` where ``old`` has its leaves and placed nodes, in their order."""
    if isinstance(old, Placed | Box) or optree.tree_is_leaf(
        old, none_is_leaf=True, namespace=NAMESPACE
    ):
        return [new]
    mine, _, entries, _ = optree.tree_flatten_one_level(old, none_is_leaf=True, namespace=NAMESPACE)
    theirs: Any = None
    if isinstance(new, Readable) and set(entries) <= set(new.keys()):
        theirs = [new[entry] for entry in entries]  # one node for all of it
    elif type(new) is type(old):
        theirs, _, others, _ = optree.tree_flatten_one_level(
            new, none_is_leaf=True, namespace=NAMESPACE
        )
        theirs = theirs if entries == others else None
    if theirs is None:
        raise PlacementError(
            f"the step returned a state of another structure than it was given: {path or 'it'} is "
            f"a {type(new).__name__}, and was a {type(old).__name__} of {list(entries)}. Part of "
            "the state is on disk: keep its structure, or give `place` a state that has it."
        )
    out = []
    for entry, a, b in zip(entries, mine, theirs, strict=True):
        out += _along(a, b, dotted(path, entry))
    return out


def _unveiled(state: Any, what: Callable[[LazyJoin], Any]) -> Any:
    """A state with something in the place of each tree that is to be filled."""
    return optree.tree_map(
        lambda x: what(x) if isinstance(x, LazyJoin) else x,
        state,
        is_leaf=lambda x: isinstance(x, Placed | Box | Lazy),
        none_is_leaf=True,
        namespace=NAMESPACE,
    )


def _check_dtypes(name: str, rows: Any, part: Sharded) -> None:
    for i, dtype, _, _ in rows:
        x = part.flats[i]
        if x is None or x.dtype != dtype:
            leaf = part.layout.by_flat[i][0].path if part.layout.by_flat[i] else "(padding)"
            raise PlacementError(
                f"{name}.{leaf} is kept on disk as {dtype}, but the step returned "
                f"{'nothing' if x is None else x.dtype} for it. A state keeps its dtypes."
            )


def _checked(name: str, was: DiskTree | HostTree, node: Streamed) -> Streamed:
    if node.layout != was.layout:
        raise PlacementError(
            f"state entry {name!r} came back with another structure than it has on disk: "
            f"{node.layout.spec} instead of {was.layout.spec}. A step keeps its state's structure."
        )
    return node


def _advance(old: Any, writes: list[DiskWriter], targets: list[tuple[Expression, Take]]) -> None:
    """Evaluate everything; what cannot be finished leaves the old state as it was."""
    for home in _homes(writes):
        held = [node for node in trees_on_disk(old).values() if node.home is home]
        home.begin(
            {node.storage.name: node.slot for node in held},
            {x.was.storage.name: x.slot for x in writes if x.was.home is home},
        )
    disks = {id(disk): disk for disk in (x.was.storage.disk for x in writes)}
    try:
        stream(targets, final=True)
        for disk in disks.values():
            disk.settle()
    except BaseException:
        for disk in disks.values():
            disk.drain()
        raise


def _homes(writes: list[DiskWriter]) -> list[DiskState]:
    return list({id(x.was.home): x.was.home for x in writes}.values())


def _commit(out: Any, writes: list[DiskWriter]) -> None:
    nodes = trees_on_disk(out).values()
    for home in _homes(writes):
        slots = dict(home.newest[-1].slots)
        slots.update({node.storage.name: node.slot for node in nodes if node.home is home})
        home.commit(slots, plain_leaves(out))
