"""``offload``: state outside of the memory that computes, on the host or on disk.

Law: ``offload(f)`` is ``f``, bitwise; ``shard(offload(f), stage=s)`` is ``shard(f, stage=s)``,
bitwise, in either order of wrapping. Only where the state lives differs.

On disk every unit (see :mod:`zfunc.layout.layout`) of parameters and optimizer state passes
through memory when it is needed: parameters forward and backward, read ahead in the recorded
order; gradients out, as backward produces them; then parameters, gradients and moments
in and their successors out, in one pass, whatever elementwise optimizer the step uses.

Sources: Ren et al., ZeRO-Offload, 2021; Rajbhandari et al., ZeRO-Infinity, 2021.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import optree
import torch

from zfunc.buffers.pages import aligned
from zfunc.buffers.ring import HOST
from zfunc.engine.communication import communication
from zfunc.engine.context import PLACING, Context
from zfunc.engine.entries import Entries
from zfunc.engine.intake import copied
from zfunc.engine.order import Order
from zfunc.engine.placement import Twins, layout_for, placed_nodes, rejoined
from zfunc.engine.signs import sign
from zfunc.engine.step import Step, Transform, transform_of
from zfunc.errors import CompositionError, PlacementError
from zfunc.layout.cutting import make_layout
from zfunc.layout.layout import Layout, whole
from zfunc.layout.readable import Readable
from zfunc.layout.replicated import Replicated, packed
from zfunc.layout.sharded import Sharded
from zfunc.ranks import world
from zfunc.transforms.offloading.columns import for_gradients
from zfunc.transforms.offloading.evaluation import Present
from zfunc.transforms.offloading.hosted import Hosted, HostSpill
from zfunc.transforms.offloading.store import Store, open_store
from zfunc.transforms.offloading.stored import Spill, Stored, stored_nodes
from zfunc.transforms.offloading.streamed import Cut, Streamed, rank_in
from zfunc.transforms.offloading.successor import hosted_nodes, lower, settle, succeed
from zfunc.trees.boxes import alike
from zfunc.trees.nodes import NAMESPACE, Tree, held_in

__all__ = ["Offload", "offload"]

ROLES = {"params": "params", "opt_state": "opt_state"}
WHAT = ("opt_state", "params")
WHERE = {"cpu": "in host memory", "disk": "on disk"}
_TIERS: dict[type, str] = {Hosted: "cpu", Stored: "disk"}
sign(Hosted, "offload")
sign(Stored, "offload")


@dataclass(frozen=True)
class Offload(Transform):
    """See :func:`offload`."""

    to: str = "cpu"
    what: tuple[str, ...] = WHAT
    path: tuple[str, ...] = ()
    pin: bool = True
    buffers: int = 3
    roles: tuple[tuple[str, str], ...] = tuple(ROLES.items())

    position: ClassVar[int] = Order.OFFLOAD
    name: ClassVar[str] = "offload"

    def __post_init__(self) -> None:
        if self.to not in ("cpu", "disk"):
            raise CompositionError(f"offload(to={self.to!r}): state goes to 'cpu' or to 'disk'.")
        if self.to == "disk" and not self.path:
            raise CompositionError(
                "offload(to='disk') needs path=..., a folder on a fast device (or several)."
            )
        if self.to == "cpu" and self.path:
            raise CompositionError(
                f"offload(to='cpu', path={self.path!r}): host memory has no path. Write to='disk', "
                "or leave the path out."
            )
        if unknown := [name for name in self.what if name not in WHAT]:
            raise CompositionError(
                f"offload(what={self.what!r}): {unknown[0]!r} is neither 'opt_state' nor 'params'."
            )
        if not self.what:
            raise CompositionError("offload(what=()): name 'opt_state', 'params', or both.")
        if type(self.buffers) is not int or self.buffers < 1:
            raise CompositionError(
                f"offload(buffers={self.buffers!r}): at least one unit is in memory at a time."
            )
        for entry, role in self.roles:
            if role not in WHAT:
                raise ValueError(
                    f"roles={{{entry!r}: {role!r}}}: a role is 'params' or 'opt_state'."
                )

    def __repr__(self) -> str:
        where = f", path={os.pathsep.join(self.path)!r}" if self.path else ""
        return f"offload(to={self.to!r}{where})"

    def obstacle(self) -> str:
        return "runs the optimizer on the host, where a graph computes nothing"

    def beside(self, others: Sequence[Transform]) -> Transform:
        if self.to == "disk" and any(other.name == "compress_grads" for other in others):
            raise CompositionError(
                "compress_grads works on whole gradients and keeps its errors in memory, "
                "offload(to='disk') lets no gradient stay there. Leave out one of them, or write "
                "offload(to='cpu')."
            )
        return self

    def hold(self, layout: Layout, tree: Any) -> Cut | None:
        return Cut(layout, tree) if self._takes(tree) else None

    def _takes(self, tree: Any) -> bool:
        return self.to == "disk" or self.moves(_device_of(tree))

    def moves(self, device: torch.device) -> bool:
        """Whether the host's memory is another than that of a device."""
        return device.type != "cpu"

    @property
    def represents(self) -> bool:  # type: ignore[override]
        devices = [torch.get_default_device()]
        devices += [torch.device("cuda")] if torch.cuda.is_available() else []
        return self.to == "disk" or any(self.moves(device) for device in devices)

    # How the state is represented

    def place(self, state: Any) -> Any:
        step = PLACING.get()
        if not self._takes(state):
            return copied(state) if self.represents and self._alone(step) else state
        if any(t.name == "compress_grads" for t in step.transforms):
            raise CompositionError(
                "compress_grads works on gradients in the memory of the device, and offload takes "
                "them down to the host's. Leave out one of them."
            )
        roles, state = _roles(step, self), self.laid_out(state)
        nodes = placed_nodes(state)
        ranks = next((x.group for x in nodes if isinstance(x, Streamed | Sharded)), None)
        failed: PlacementError | None = None
        placed: Any = None
        try:
            if self.to == "cpu":
                placed = self._lowered(state, roles)
            else:
                placed = self._written(state, step, roles)
        except PlacementError as error:
            failed = error
        if ranks is not None and ranks.size > 1:
            told = ranks.exchange(None if failed is None else str(failed), label="offload")
            other = next((k for k, text in enumerate(told) if text is not None), None)
            if other is not None and failed is None:
                failed = PlacementError(f"rank {other} cannot keep its part: {told[other]}")
        if failed is not None:
            raise failed
        return placed

    def _alone(self, step: Step) -> bool:
        """Whether nobody else decides how the state is represented."""
        return not any(t.represents for t in step.transforms if t is not self)

    def laid_out(self, state: Any) -> Any:
        step = PLACING.get()
        if not self._alone(step):
            return state
        return self._cut_alone(state, _roles(step, self))

    def _lowered(self, state: Any, roles: Mapping[str, str]) -> Any:
        """The state with the trees that are cut lazily in host memory."""
        HOST.locked = self.pin and _device_of(state).type == "cuda"

        def keep(path: str) -> bool:
            return _role(path, roles) in self.what

        return lower(state, keep, _in_memory, self.pin)

    def _written(self, state: Any, step: Step, roles: Mapping[str, str]) -> Any:
        store = open_store(step, [Path(p) for p in self.path], self.buffers)
        store.serve(_device_of(state), self.pin)
        HOST.locked = store.ring.locked
        store.sweep()
        store.forget()

        def keep(path: str) -> bool:
            return _role(path, roles) in self.what

        try:
            placed = settle(state, store, keep, _in_memory)
            for layout in _gradient_layouts(placed, roles):
                store.idle.append(for_gradients(store, layout, rank_in(layout)))
        except PlacementError:
            if not store.alive:
                store.close()
            raise
        return placed

    def _cut_alone(self, state: Any, roles: Mapping[str, str]) -> Any:
        """Without ``shard``: units of the whole tree."""
        entries = Entries(state)
        names = [name for name in entries.names if roles.get(name) == "params"]
        if not names:
            raise PlacementError(
                f"the state ({entries}) has no entry in the role of params: name it params, or "
                'tell offload which entries are: roles={"generator": "params", ...}.'
            )
        layouts = {name: _layout(entries[name], (self.name, repr(self))) for name in names}
        twins = Twins(layouts.values())
        for name in entries.names:
            if name in names and "params" in self.what:
                entries[name] = Cut(layouts[name], entries[name])
            elif name in names:
                entries[name] = packed(layouts[name], entries[name])
            else:
                entries[name] = twins.replace(entries[name], Cut)
        return entries.rebuild()

    def check(self, state: Any) -> None:
        entries = Entries(state)
        for name, role in self.roles:
            if name in entries:
                self._check_entry(entries, name, role)
        if self.to != "disk":
            return
        for node in stored_nodes(state).values():
            folders = tuple(str(folder.parent) for folder in node.column.store.folders)
            if folders != tuple(os.path.abspath(path) for path in self.path):
                raise PlacementError(
                    f"this state is on disk in {folders[0]}, but {self!r} keeps its own elsewhere. "
                    "Take it out with the step that placed it (`unplace`), and `place` it here."
                )

    def _check_entry(self, entries: Entries, name: str, role: str) -> None:
        """Raise if an entry of a state is on another tier than this one keeps it on."""
        held = placed_nodes(entries[name])
        tier = next((_TIERS[type(x)] for x in held if type(x) in _TIERS), None)
        if tier is not None and (tier != self.to or role not in self.what):
            raise PlacementError(
                f"state entry {name!r} is {WHERE[tier]}, but {self!r} keeps "
                + (f"it {WHERE[self.to]}" if role in self.what else f"{self.what} there alone")
                + ". `unplace` it with the step that placed it, and `place` the result here."
            )
        asked = tier is None and self.to == "disk" and role in self.what
        if asked and self._lacks(entries, name, role, any(map(_is_sharded, held))):
            raise PlacementError(_misplaced(name, self))

    def _lacks(self, entries: Entries, name: str, role: str, cut: bool) -> bool:
        """Whether an entry of which nothing is on disk should be there."""
        if role == "params" and cut:
            return True
        if role == "params":  # whole ones stay in memory where shard has placed them so
            entry = entries[name]
            return bool(held_in(entry)) and (
                not isinstance(entry, Replicated) or entry.layout.axis == ()
            )
        if not any(x.ndim for x in held_in(entries[name])):
            return False
        names = [n for n, its in self.roles if its == "params" and n in entries]
        layouts = [_layout_of(entries[n]) for n in names]
        # As `place` found them: moments of one of several layers that are alike stay in memory.
        whole_again = optree.tree_map(
            _unfolded, entries[name], is_leaf=_is_sharded, namespace=NAMESPACE
        )
        return Twins(layouts).holds(whole_again)

    # One call

    def configure(self, running: Context, state: Any) -> None:
        hosted = hosted_nodes(state)
        if hosted:
            device, pin = hosted[0].device, self.pin
            if device.type == "cuda":
                HOST.locked = pin
                running.notes[Present] = Present.of(held_in(state), device)
            self._by_unit(running, lambda layout: HostSpill(layout, device, pin))
        nodes = stored_nodes(state)
        there = {path.split(".", 1)[0] for path in nodes}
        for name, nbytes in running.memo.get("on disk", {}).items():
            if nbytes and name not in there:
                raise PlacementError(_misplaced(name, self))
        if not nodes:
            return
        store: Store = next(iter(nodes.values())).column.store
        HOST.locked = store.ring.locked
        store.drain()  # what a step that broke off was writing
        self._by_unit(running, lambda layout: Spill(store, layout))

    def _by_unit(self, running: Context, spill: Callable[[Layout], Any]) -> None:
        running.by_unit = True
        over = communication(running)
        over.spill = lambda layout, cut: spill(layout if cut else whole(layout))
        if not any(t.represents for t in running.transforms if t is not self):
            memo = running.memo.setdefault("layouts", {})
            over.layout_for = lambda params: (layout_for(params, 1, memo, _layout), False)

    def finish(self, old: Any, out: Any) -> Any:
        if not stored_nodes(old) and not hosted_nodes(old):
            return out
        if isinstance(out, tuple) and out and type(out[0]) is type(old):
            return (self._succeeded(old, out[0]), *out[1:])
        return self._succeeded(old, out) if type(out) is type(old) else out

    def _succeeded(self, old: Any, new: Any) -> Any:
        before, after = Entries(old), Entries(new)
        for name in after.names:
            if name in before and placed_nodes(after[name]) and not placed_nodes(before[name]):
                after[name] = rejoined(before[name], after[name])
        out = Entries(succeed(old, after.rebuild()))
        for name in out.names:
            if name in before:
                out[name] = alike(before[name], out[name])
        return out.rebuild()

    def release(self, step: Step) -> None:
        HOST.clear()
        stores = world.current().memo.get("stores", {})
        for store in list(stores.values()):
            if store.owner == step:
                store.close()

    # What it says of itself

    def expect(self, state: Any, memo: dict[Any, Any]) -> None:
        sizes: dict[str, int] = {}
        for path, node in stored_nodes(state).items():
            entry = path.split(".", 1)[0]
            sizes[entry] = sizes.get(entry, 0) + node.nbytes
        memo["on disk"] = sizes
        hosted = hosted_nodes(state)
        memo["on host"] = sum(node.nbytes for node in hosted)
        memo["device"] = hosted[0].device if hosted else None
        memo["locked"] = sum(aligned(node.nbytes) for node in hosted if node.locked)

    def describe(self, memo: Mapping[Any, Any]) -> list[str]:
        if self.to == "cpu":
            if memo.get("device") is None:
                return ["offload: to host memory, which is where this step computes: nothing moves"]
            return [
                f"offload: {memo['on host']} bytes of this rank in host memory, of which "
                f"{memo['locked']} are page-locked; units go up to {memo['device']}, gradients "
                "come down, and the optimizer runs on the host"
            ]
        where = ", ".join(self.path)
        sizes = memo.get("on disk")
        if sizes is None:
            return [f"offload: {' and '.join(self.what)} on disk in {where}"]
        listed = ", ".join(f"{name} {n}" for name, n in sizes.items()) or "nothing"
        lines = [
            f"offload: {sum(sizes.values())} bytes of this rank on disk in {where} ({listed}), "
            "in two generations; gradients pass through it",
            f"ring: {self.buffers} of the largest unit with all that belongs to it",
        ]
        if "params" in self.what and "params" not in sizes:
            lines.append("parameters are whole at this stage, and stay in memory")
        return lines


def _device_of(state: Any) -> torch.device:
    """Where a state computes: the device of its tensors."""
    homes = [x.device for x in held_in(state) if x.ndim]
    # What shard has made lazy already has no leaves; its tensors are still where they were.
    homes += [node.home for node in placed_nodes(state) if isinstance(node, Cut)]
    device = next((home for home in homes if home.type != "cpu"), torch.device("cpu"))
    return torch.get_default_device() if device.type == "meta" else device


def _layout_of(params: Tree) -> Layout:
    return params.layout if isinstance(params, Readable | Replicated) else _layout(params)


def _unfolded(node: Any) -> Any:
    """A tree of the shapes that a node stands for."""
    if not isinstance(node, Sharded):
        return node
    shapes = [slot and torch.empty(slot.shape, device="meta") for slot in node.layout.slots]
    return optree.tree_unflatten(node.layout.spec, shapes)


def _is_sharded(node: Any) -> bool:
    return isinstance(node, Sharded)


def _misplaced(name: str, mine: Offload) -> str:
    return (
        f"state entry {name!r} is in memory, but {mine!r} keeps it on disk. Give the step a state "
        "that it placed itself: state = step.place(full_state)."
    )


def _roles(step: Any, mine: Offload) -> dict[str, str]:
    """What offload was told of the entries, and what others were told."""
    roles: dict[str, str] = {}
    for transform in step.transforms:
        roles.update(getattr(transform, "roles", ()))
    return {**roles, **dict(mine.roles)}


def _role(path: str, roles: Mapping[str, str]) -> str:
    """Entries that are no parameters but look like them count as optimizer state."""
    return roles.get(path.split(".", 1)[0], "opt_state")


def _layout(params: Tree, by: tuple[str, str] | None = None) -> Layout:
    return make_layout(params, axis=(), by=by)


def _in_memory(path: str, node: Cut) -> Any:
    """What is to stay in memory, as it would be without offload."""
    return node.packed() if node.layout.axis == () else node.sharded()


def _gradient_layouts(state: Any, roles: Mapping[str, str]) -> Sequence[Layout]:
    """Layouts of whole params trees on disk, or of what goes with plain ones."""
    found = {path: node.layout for path, node in stored_nodes(state).items()}
    mine = [layout for path, layout in found.items() if _role(path, roles) == "params"]
    return mine or list(found.values())[:1]


@transform_of
def offload(
    to: str = "cpu",
    what: Sequence[str] = WHAT,
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
    pin: bool = True,
    buffers: int = 3,
    roles: Mapping[str, str] | None = None,
) -> Offload:
    """Keep state in host memory or on disk, and bring it in unit by unit.

    Call it as ``offload(step, to="disk", path=...)`` or as a decorator, alone or under ``shard``.

    Args:
        to: ``"cpu"``, or ``"disk"`` (ZeRO-Infinity).
        what: ``"opt_state"``, ``"params"`` or both. Parameters leave memory where they
            may be cut into units: alone and at stage 3.
        path: a folder on disk, or several on several devices; blocks go round them. Every rank
            has a subfolder. What an earlier process left there is discarded by ``place``.
        pin: whether host memory is page-locked, so that copies to a GPU run beside it.
        buffers: how many units, with all that belongs to them, may be in memory at once to be
            read, computed with and written. More hides more of the disk; any number is right.
        roles: as those of :func:`zfunc.shard`.

    Returns:
        A :class:`~zfunc.Step`. On disk a state has two generations: the one that a step was
        given last and the one that it returned. One before them raises ``DonatedStateError``.

    Raises:
        CompositionError: a disk without a path, a path without a disk, an unknown tier
            or entry, no buffer at all.
        PlacementError: (from ``place``) the path is in use, cannot be written, or lacks room.
        CheckpointError: (from a step) a block on disk is damaged.
    """
    if path is None:
        paths: tuple[str, ...] = ()
    elif isinstance(path, str | os.PathLike):
        paths = (os.fspath(path),)
    else:
        paths = tuple(os.fspath(p) for p in path)
    named = {**ROLES, **(roles or {})}
    what = (what,) if isinstance(what, str) else tuple(what)
    return Offload(to, what, paths, pin, buffers, tuple(named.items()))
