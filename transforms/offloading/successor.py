"""A state of which parts are on disk, and the state that follows it.

Whatever a step returns where its state was on disk is evaluated in one pass over the units and
written into the other slots; then the index names them. If anything fails before that,
the state that the step was given is still the newest one on disk, and whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
from torch import Tensor

from zfunc.buffers.ring import HOST
from zfunc.engine import context
from zfunc.errors import PlacementError
from zfunc.layout.readable import Readable
from zfunc.layout.sharded import Sharded
from zfunc.transforms.offloading.evaluation import (
    Collected,
    Expression,
    Joined,
    Take,
    filling,
    gathered_up,
    stream,
)
from zfunc.transforms.offloading.generations import Placement, Plan
from zfunc.transforms.offloading.hosted import Hosted, Settled, in_host_memory
from zfunc.transforms.offloading.store import Store
from zfunc.transforms.offloading.stored import Stored, plain_leaves, state_nodes, stored_nodes
from zfunc.transforms.offloading.streamed import Cut, Streamed, assembled
from zfunc.trees.nodes import NAMESPACE, Box, Lazy, Placed
from zfunc.trees.tree import dotted

__all__ = ["hosted_nodes", "lower", "settle", "succeed"]


def hosted_nodes(state: Any) -> list[Hosted]:
    """The trees of a state that are in host memory, apart from the device's."""
    return [x for x in state_nodes(state, Placed | Lazy)[1] if isinstance(x, Hosted)]


def lower(
    state: Any, keep: Callable[[str], bool], back: Callable[[str, Cut], Any], pin: bool
) -> Any:
    """As :func:`settle`, to host memory."""
    names, found, spec = state_nodes(state)
    out: list[Any] = []
    for name, node in zip(names, found, strict=True):
        if not isinstance(node, Cut):
            out.append(node)
        elif not keep(name):
            out.append(back(name, node))
        else:
            local = node.skeleton if node.on_meta else gathered_up(node)
            out.append(in_host_memory(local, node.home, pin, empty=node.on_meta))
            del local
            HOST.clear()  # what units went through on their way down
    return optree.tree_unflatten(spec, out)


def settle(
    state: Any, store: Store, keep: Callable[[str], bool], back: Callable[[str, Cut], Any]
) -> Any:
    """Write the parts of a new state that are cut lazily to the disk, unit by unit.

    Args:
        state: with :class:`Cut` nodes.
        keep: whether the one at a path belongs on disk.
        back: what takes its place in memory otherwise.
    """
    names, found, spec = state_nodes(state)
    plans = [
        Plan(name, node.layout, node.group.rank, tuple(_dtypes(node)))
        for name, node in zip(names, found, strict=True)
        if isinstance(node, Cut) and keep(name)
    ]
    home = Placement(store, plans) if plans else None
    out = []
    for name, node in zip(names, found, strict=True):
        if not isinstance(node, Cut):
            out.append(node)
        elif home is None or name not in home.columns:
            out.append(back(name, node))
        else:
            column = home.columns[name]
            column.device = node.home
            if not node.on_meta:
                for unit in range(len(node.layout.units)):
                    store.behind(column.write(0, unit, node.part(unit).flats))
            out.append(Stored(column, 0, home))
    new = optree.tree_unflatten(spec, out)
    store.settle()
    if home is not None and not any(x.on_meta for x in found if isinstance(x, Cut)):
        home.commit(dict.fromkeys(home.columns, 0), plain_leaves(new))
    return new


def _dtypes(node: Streamed) -> list[Any]:
    return [None if x is None else x.dtype for x in node.skeleton.flats]


def succeed(old: Any, new: Any) -> Any:
    """The state after ``old``, with what a step put off done, and on disk what was there.

    Raises:
        PlacementError: the device is full; or the state has changed its structure.
        CheckpointError: what is read is damaged.
    """
    lazies = [x for x in state_nodes(new, Placed | Lazy)[1] if isinstance(x, Joined)]
    targets: list[tuple[Expression, Take]] = []
    for lazy in lazies:
        if lazy.made is None:
            targets.append((lazy.node, filling(lazy)))
    names, before, spec = state_nodes(old)
    after = _along(old, _unveiled(new, lambda lazy: lazy.params), "")
    writes: dict[str, tuple[Stored, int]] = {}
    collected: dict[int, Collected | Settled] = {}
    offers, stays = _offers(before)
    for i, (name, was, now) in enumerate(zip(names, before, after, strict=True)):
        if isinstance(was, Stored):
            if now is not was:
                node = _checked(name, was, assembled(was.layout, now))
                slot = 1 - was.slot
                writes[name] = (was, slot)
                targets.append((node, _writing(was, slot)))
        elif isinstance(was, Hosted):
            if now is not was:
                node = _checked(name, was, assembled(was.layout, now))
                collected[i] = Settled(was, stays, offers)
                targets.append((node, collected[i]))
        elif isinstance(now, Streamed):
            collected[i] = Collected(now, now.device)
            targets.append((now, collected[i]))
    if not targets:
        return new
    try:
        _advance(old, writes, targets)
    finally:
        if offers is not None:
            offers.clear()  # by now the new state lies there
    after = _along(old, _unveiled(new, lambda lazy: lazy.made), "")
    for i, name in enumerate(names):
        if name in writes:
            was, slot = writes[name]
            after[i] = Stored(was.column, slot, was.home)
        elif i in collected:
            after[i] = collected[i].result()
    out = optree.tree_unflatten(spec, after)
    _commit(out, old, writes)
    return out


def _offers(before: list[Any]) -> tuple[dict[int, Tensor] | None, frozenset[int]]:
    """Where optimizers may write the new state at once, if they may not where the old one lies.

    And where the old one lies, since what stays there is not copied.
    """
    hosted = [x for node in before if isinstance(node, Hosted) for x in node.held()]
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


def _unveiled(state: Any, what: Callable[[Joined], Any]) -> Any:
    """A state with something in the place of each tree that is to be filled."""
    return optree.tree_map(
        lambda x: what(x) if isinstance(x, Joined) else x,
        state,
        is_leaf=lambda x: isinstance(x, Placed | Box | Lazy),
        none_is_leaf=True,
        namespace=NAMESPACE,
    )


def _writing(was: Stored, slot: int) -> Take:
    column = was.column

    def take(unit: int, part: Sharded) -> None:
        _same_kind(column.name, column.sections[unit].flats, part)
        column.store.behind(column.write(slot, unit, part.flats))

    return take


def _same_kind(name: str, rows: Any, part: Sharded) -> None:
    for i, dtype, _, _ in rows:
        x = part.flats[i]
        if x is None or x.dtype != dtype:
            leaf = part.layout.by_flat[i][0].path if part.layout.by_flat[i] else "(padding)"
            raise PlacementError(
                f"{name}.{leaf} is kept on disk as {dtype}, but the step returned "
                f"{'nothing' if x is None else x.dtype} for it. A state keeps its dtypes."
            )


def _checked(name: str, was: Stored | Hosted, node: Streamed) -> Streamed:
    if node.layout != was.layout:
        raise PlacementError(
            f"state entry {name!r} came back with another structure than it has on disk: "
            f"{node.layout.spec} instead of {was.layout.spec}. A step keeps its state's structure."
        )
    return node


def _advance(
    old: Any, writes: dict[str, tuple[Stored, int]], targets: list[tuple[Expression, Take]]
) -> None:
    """Evaluate everything; what cannot be finished leaves the old state as it was."""
    for home in _homes(writes):
        mine = {n: (was, slot) for n, (was, slot) in writes.items() if was.home is home}
        slots = {
            node.column.name: node.slot for node in stored_nodes(old).values() if node.home is home
        }
        home.begin(slots, {was.column.name: slot for was, slot in mine.values()})
    stores = {id(was.column.store): was.column.store for was, _ in writes.values()}
    try:
        stream(targets, final=True)
        for store in stores.values():
            store.settle()
    except BaseException:
        for store in stores.values():
            store.drain()
        raise


def _homes(writes: dict[str, tuple[Stored, int]]) -> list[Placement]:
    return list({id(was.home): was.home for was, _ in writes.values()}.values())


def _commit(out: Any, old: Any, writes: dict[str, tuple[Stored, int]]) -> None:
    nodes = stored_nodes(out).values()
    for home in _homes(writes):
        slots = dict(home.newest[-1].slots)
        slots.update({node.column.name: node.slot for node in nodes if node.home is home})
        home.commit(slots, plain_leaves(out))
