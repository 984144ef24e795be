"""Layers of a loss where their parameters are not: a call of one goes to what is under way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import torch

from zfunc.engine.hooks import LayerInfo
from zfunc.engine.primitives import Ref
from zfunc.engine.sources import LayerRef, Source
from zfunc.engine.step import Transform
from zfunc.layout.layout import Layout
from zfunc.rehearsal.ghosts import RUN, ghost_leaves
from zfunc.trees.nodes import Tree, register

__all__ = ["GhostRef", "Seam", "StageRef"]


class Seam(Transform):
    """Sends layers through what is under way."""

    def layer(self, call: Callable[..., Any], info: LayerInfo) -> Callable[..., Any]:
        """A run decides what becomes of the layer."""

        def through(*xs: Any, **kw: Any) -> Any:
            run: Any = RUN.get()
            return call(*xs, **kw) if run is None else run.layer(call, info, *xs, **kw)

        return through


class GhostRef(Ref):
    """A layer's parameters where they are not."""

    def __init__(self, layout: Layout, layer: int, params: Tree, differentiated: bool) -> None:
        self.layout, self.span, self.layer = layout, layout.layers[layer], layer
        self.params, self.differentiated = params, differentiated

    def call(self, fn: Callable[..., Any], xs: tuple[Any, ...], kw: dict[str, Any]) -> Any:
        return fn(self.params, *xs, **kw)

    def force(self) -> Tree:
        return self.params

    def told(self, index: int, name: str) -> LayerInfo:
        return LayerInfo(index, name, key=(None, self.layer))

    def __repr__(self) -> str:
        return f"GhostRef({self.span.name})"


class StageRef(LayerRef):
    """A layer in a run of a stage. Its parameters enter for its call; who looks at them elsewhere
    sees ghosts, on this stage as on those that do not have the layer."""

    def __init__(
        self, device: torch.device, compute: torch.dtype | None, source: Source, layer: int
    ) -> None:
        super().__init__(source, layer)
        self.device, self.compute = device, compute

    def force(self) -> Tree:
        if self.runs and all(run.entered is not None for run in self.runs):  # within its call
            return super().force()
        indices = range(self.span.start, self.span.stop)
        ghosts = ghost_leaves(self.layout, self.device, self.compute, indices)
        return optree.tree_unflatten(self.span.spec, [ghosts.get(i) for i in indices])


for kind in (GhostRef, StageRef):  # as what stands there where there is no pipeline
    register(
        kind,
        lambda ref: ((ref.force(),), None, ("",)),
        lambda _, children: children[0],
    )
