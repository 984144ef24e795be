"""How one call of a step gathers parameters and reduces gradients; transforms set it up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from zfunc.engine.context import Context
from zfunc.layout.cutting import make_layout
from zfunc.layout.layout import Layout
from zfunc.ranks.axes import alone, group
from zfunc.ranks.comm import Group
from zfunc.ranks.meshes import BATCH, SHARED, Mesh

__all__ = ["Communication", "communication", "uncut"]


def uncut(tree: Any) -> tuple[Layout, bool]:
    """The layout of a plain params tree that nobody cuts."""
    return make_layout(tree), False


@dataclass
class Communication:
    """Over which ranks, of which layout, and how far ahead.

    Attributes:
        group: the ranks over which the state is cut.
        replicas: those that hold the same part of it as this one.
        everyone: both together: over them losses and gradients are averaged.
        mesh: how all ranks are laid out, if the step says so.
        averaged: its axes along which ranks have other rows of a batch.
        layout_for: plain params tree -> its layout, and whether gradients are cut.
        prefetch, room: see :class:`zfunc.engine.plans.PassPlan`.
        spill: see :class:`zfunc.engine.passes.Pass`.
        gathers_anew: whether units are gathered each time that they enter, and not kept.
        reduce_once: whether whole gradients are summed before they are reduced.
        keeps: which units' gradients are left for another transform than shard to average, if any.
    """

    group: Group = field(default_factory=alone)
    replicas: Group = field(default_factory=alone)
    everyone: Group = field(default_factory=alone)
    mesh: Mesh | None = None
    averaged: tuple[str, ...] = BATCH
    layout_for: Callable[[Any], tuple[Layout, bool]] = uncut
    prefetch: int = 1
    room: int = 0
    spill: Callable[[Any, bool], Any] | None = None
    gathers_anew: bool = False
    reduce_once: bool = False
    keeps: Callable[[Any], bool] | None = None

    @property
    def deciding(self) -> Group:
        """The ranks that decide together what to do next: all that work on one state."""
        if self.mesh is None:
            return self.everyone
        names = (*self.averaged, *SHARED)
        together = tuple(name for name in self.mesh.names if name in names)
        return group(self.mesh, together) if together else self.everyone

    @property
    def sharing(self) -> Group:
        """The ranks that have the same rows of a batch as this one, and share the work on them.

        Whatever is the same on all of ``everyone`` is decided among these.
        """
        names = () if self.mesh is None else self.mesh.names
        shared = tuple(name for name in names if name in SHARED and name not in self.averaged)
        return group(self.mesh, shared) if shared else alone()


def communication(running: Context) -> Communication:
    """That of a running call."""
    found: Communication | None = running.notes.get(Communication)
    if found is None:
        mesh = next((t.mesh for t in running.transforms if t.mesh is not None), None)
        averaged = (*BATCH, *(name for t in running.transforms for name in t.averages))
        apart = alone()
        found = Communication(apart, apart, apart, mesh, averaged)
        running.notes[Communication] = found
    return found
