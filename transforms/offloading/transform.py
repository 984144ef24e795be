"""``offload``: state outside the memory of the device that computes: on the host or on disk.

Law: ``offload(f)`` is ``f``, bitwise; ``shard(offload(f), stage=s)`` is ``shard(f, stage=s)``,
bitwise, in either order of wrapping. Only where the state lives differs.

On disk each unit (see :mod:`zfunc.layout.layout`) of parameters and optimizer state is in memory
only while it is needed. Parameters are read forward and backward, ahead in the recorded order.
Gradients are written as backward produces them. Then one pass reads parameters, gradients and
moments, runs whatever elementwise optimizer the step uses, and writes the new ones.

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
from zfunc.engine.entries import ROLES, Entries, Roles, copied
from zfunc.engine.hooks import Order
from zfunc.engine.placement import Twins, layout_for, placed_nodes, rejoined
from zfunc.engine.signs import sign
from zfunc.engine.step import Step, Transform, transform_of
from zfunc.errors import CompositionError, PlacementError
from zfunc.layout.cutting import make_layout
from zfunc.layout.layout import Layout, whole
from zfunc.layout.low_bits import refuse_low_bits
from zfunc.layout.readable import Readable
from zfunc.layout.replicated import Replicated, packed
from zfunc.layout.sharded import Sharded
from zfunc.ranks import world
from zfunc.ranks.axes import group
from zfunc.transforms.offloading.deferred import LazyShard, Streamed
from zfunc.transforms.offloading.disk import Disk, open_disk
from zfunc.transforms.offloading.disk_trees import DiskGradients, DiskTree, trees_on_disk
from zfunc.transforms.offloading.host_trees import HostGradients, HostTree
from zfunc.transforms.offloading.parts import rank_in
from zfunc.transforms.offloading.present import Present
from zfunc.transforms.offloading.transitions import (
    next_state,
    put_on_disk,
    put_on_host,
    trees_on_host,
)
from zfunc.transforms.offloading.tree_storage import for_gradients
from zfunc.trees.boxes import alike
from zfunc.trees.kinds import kind
from zfunc.trees.nodes import NAMESPACE, Tree, held_in

__all__ = ["Offload", "offload"]

WHAT = ("opt_state", "params")
WHERE = {"cpu": "in host memory", "disk": "on disk"}
_TIERS: dict[type, str] = {HostTree: "cpu", DiskTree: "disk"}
for _kind in _TIERS:
    sign(_kind, "offload")


@dataclass(frozen=True)
class Offload(Transform):
    """See :func:`offload`."""

    to: str = "cpu"
    what: tuple[str, ...] = WHAT
    path: tuple[str, ...] = ()
    pin: bool = True
    buffers: int = 3
    roles: Roles = ROLES

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

    def hold(self, layout: Layout, tree: Any) -> LazyShard | None:
        return LazyShard(layout, tree) if self._takes(tree) else None

    def _takes(self, tree: Any) -> bool:
        return self.to == "disk" or self.moves(_device_of(tree))

    def moves(self, device: torch.device) -> bool:
        """Whether the host's memory is another than that of a device."""
        return kind(device) != "cpu"

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
        names = {t.name for t in step.transforms}
        if self.to == "disk":
            refuse_low_bits(state, "offload(to='disk')", "Shard it at stage 3 instead.")
        if "split" in names and "shard" not in names:
            raise CompositionError(
                "offload beside split keeps the units that shard makes of a state, and there is no "
                "shard. Add it: zf.shard(step, stage=0), or a higher stage."
            )
        if "compress_grads" in names:
            raise CompositionError(
                "compress_grads works on gradients in the memory of the device, and offload takes "
                "them down to the host's. Leave out one of them."
            )
        if any(t.name == "split" for t in step.transforms) and self._unsharded(step):
            raise CompositionError(
                "offload brings in what shard keeps in units, and this step splits its leaves and "
                "shards nothing. Add it: zf.shard(step, stage=3), or stage=1 to keep parameters in "
                "memory."
            )
        state = self.laid_out(state)
        nodes = placed_nodes(state)
        cut = any(isinstance(x, Streamed | Sharded) and x.layout.axis != () for x in nodes)
        failed: PlacementError | None = None
        placed: Any = None
        try:
            placed = self._put(state, step)
        except PlacementError as error:
            failed = error
        if cut and (ranks := group(None, "data")).size > 1:  # those of other groups, too
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

    def _unsharded(self, step: Step) -> bool:
        return not any(t.name == "shard" for t in step.transforms)

    def laid_out(self, state: Any) -> Any:
        step = PLACING.get()
        return self._in_units(state, _roles(step, self)) if self._alone(step) else state

    def _put(self, state: Any, step: Step) -> Any:
        """The state with its lazy shards on the host or on disk, or back in memory."""
        roles, device = _roles(step, self), _device_of(state)

        def keep(path: str) -> bool:
            return _role(path, roles) in self.what

        if self.to == "cpu":
            HOST.locked = self.pin and device.type == "cuda"
            return put_on_host(state, keep, self.pin)
        disk = open_disk(step, [Path(p) for p in self.path], self.buffers)
        disk.serve(device, self.pin)
        HOST.locked = disk.ring.locked
        disk.sweep()
        disk.forget()
        try:
            placed = put_on_disk(state, disk, keep)
            for layout in _gradient_layouts(placed, roles):
                disk.idle.append(for_gradients(disk, layout, rank_in(layout)))
        except PlacementError:
            if not disk.alive:
                disk.close()
            raise
        return placed

    def _in_units(self, state: Any, roles: Roles) -> Any:
        """Without ``shard``: units of the complete tree."""
        entries = Entries(state)
        params = roles.found("params", entries, self.name)
        names = [name for name in entries.names if name in params]
        layouts = {name: _layout(entries[name], (self.name, repr(self))) for name in names}
        twins = Twins(layouts.values())
        for name in entries.names:
            if name in names and "params" in self.what:
                entries[name] = LazyShard(layouts[name], entries[name])
            elif name in names:
                entries[name] = packed(layouts[name], entries[name])
            else:
                entries[name] = twins.replace(entries[name], LazyShard)
        return entries.rebuild()

    def check(self, state: Any) -> None:
        entries = Entries(state)
        for name, role in self.roles:
            if name in entries:
                self._check_entry(entries, name, role)
        if self.to != "disk":
            return
        for node in trees_on_disk(state).values():
            folders = tuple(str(folder.parent) for folder in node.storage.disk.folders)
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
        if asked and self._lacks(entries, name, role, any(isinstance(x, Sharded) for x in held)):
            raise PlacementError(_misplaced(name, self))

    def _lacks(self, entries: Entries, name: str, role: str, sharded: bool) -> bool:
        """Whether an entry of which nothing is on disk should be there."""
        if role == "params" and sharded:
            return True
        if role == "params":  # replicated ones stay in memory where shard has placed them so
            entry = entries[name]
            return bool(held_in(entry)) and (
                not isinstance(entry, Replicated) or entry.layout.axis == ()
            )
        if not any(x.ndim for x in held_in(entries[name])):
            return False
        layouts = [_layout_of(entries[n]) for n in self.roles.named("params") if n in entries]
        # As `place` found them: moments of one of several layers that are alike stay in memory.
        unsharded = optree.tree_map(
            _unfolded, entries[name], is_leaf=lambda x: isinstance(x, Sharded), namespace=NAMESPACE
        )
        return Twins(layouts).holds(unsharded)

    # One call

    def configure(self, running: Context, state: Any) -> None:
        hosted = trees_on_host(state)
        if hosted:
            device, pin, present = hosted[0].device, self.pin, None
            if device.type == "cuda":
                HOST.locked = pin
                running.notes[Present] = present = Present(state, device)
            self._by_unit(running, lambda layout: HostGradients(layout, device, pin, present))
        nodes = trees_on_disk(state)
        there = {path.split(".", 1)[0] for path in nodes}
        for name, nbytes in running.memo.get("on disk", {}).items():
            if nbytes and name not in there:
                raise PlacementError(_misplaced(name, self))
        if not nodes:
            return
        disk: Disk = next(iter(nodes.values())).storage.disk
        HOST.locked = disk.ring.locked
        disk.drain()  # what a step that broke off was writing
        self._by_unit(running, lambda layout: DiskGradients(disk, layout))

    def _by_unit(self, running: Context, spill: Callable[[Layout], Any]) -> None:
        running.by_unit = True
        over = communication(running)
        over.spill = lambda layout, cut: spill(layout if cut else whole(layout))
        if not any(t.represents for t in running.transforms if t is not self):
            memo = running.memo.setdefault("layouts", {})
            over.layout_for = lambda params: (layout_for(params, 1, memo, _layout), False)

    def finish(self, old: Any, out: Any) -> Any:
        if not trees_on_disk(old) and not trees_on_host(old):
            return out
        if isinstance(out, tuple) and out and type(out[0]) is type(old):
            return (self._succeeded(old, out[0]), *out[1:])
        return self._succeeded(old, out) if type(out) is type(old) else out

    def _succeeded(self, old: Any, new: Any) -> Any:
        before, after = Entries(old), Entries(new)
        for name in after.names:
            if name in before and placed_nodes(after[name]) and not placed_nodes(before[name]):
                after[name] = rejoined(before[name], after[name])
        out = Entries(next_state(old, after.rebuild()))
        for name in out.names:
            if name in before:
                out[name] = alike(before[name], out[name])
        return out.rebuild()

    def release(self, step: Step) -> None:
        HOST.clear()
        for disk in list(world.current().memo.get("disks", {}).values()):
            if disk.owner == step:
                disk.close()

    # What it says of itself

    def expect(self, state: Any, memo: dict[Any, Any]) -> None:
        sizes: dict[str, int] = {}
        for path, node in trees_on_disk(state).items():
            entry = path.split(".", 1)[0]
            sizes[entry] = sizes.get(entry, 0) + node.nbytes
        memo["on disk"] = sizes
        hosted = trees_on_host(state)
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
            lines.append("parameters are replicated at this stage, and stay in memory")
        return lines


def _device_of(state: Any) -> torch.device:
    """Where a state computes: the device of its tensors."""
    homes = [x.device for x in held_in(state) if x.ndim]
    # What shard has made lazy already has no leaves; its tensors are still where they were.
    homes += [node.home for node in placed_nodes(state) if isinstance(node, LazyShard)]
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


def _misplaced(name: str, mine: Offload) -> str:
    return (
        f"state entry {name!r} is in memory, but {mine!r} keeps it on disk. Give the step a state "
        "that it placed itself: state = step.place(full_state)."
    )


def _roles(step: Any, mine: Offload) -> Roles:
    """What offload was told of the entries, and what others were told."""
    told = [pair for transform in step.transforms for pair in getattr(transform, "roles", ())]
    return Roles(dict([*told, *mine.roles]).items())


def _role(path: str, roles: Roles) -> str:
    """Entries that are no parameters but look like them count as optimizer state."""
    return dict(roles).get(path.split(".", 1)[0], "opt_state")


def _layout(params: Tree, by: tuple[str, str] | None = None) -> Layout:
    return make_layout(params, axis=(), by=by)


def _gradient_layouts(state: Any, roles: Roles) -> Sequence[Layout]:
    """Layouts of complete params trees on disk, or of what goes with plain ones."""
    found = {path: node.layout for path, node in trees_on_disk(state).items()}
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
            consist of units of their own: alone and at stage 3.
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
    given = [path] if isinstance(path, str | os.PathLike) else path or ()
    what = (what,) if isinstance(what, str) else tuple(what)
    return Offload(to, what, tuple(os.fspath(p) for p in given), pin, buffers, Roles.of(roles))
