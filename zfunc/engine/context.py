"""What a running step knows: one contextvar, pushed by ``Step`` and by nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor

from zfunc.layout.cutting import make_layout
from zfunc.ranks.axes import alone
from zfunc.ranks.comm import Group
from zfunc.trees.memory import RUNNING, Memory

__all__ = [
    "ENDING",
    "PLACING",
    "RECOMPUTED",
    "Context",
    "LayerInfo",
    "current",
    "pop",
    "push",
    "uncut",
]


@dataclass(frozen=True)
class LayerInfo:
    """What the ``layer`` seam is told of a layer.

    Attributes:
        index: counts the calls of layers within one loss.
        name: the layer's name in a module; the index where it has none.
        stack: the path of the ``Layers`` that it is in; ``None`` if that is not known.
        depth, of: its position in the stack, from 0, and the stack's length.
        key: identifies its parameters within the running pass.
    """

    index: int
    name: str
    stack: str | None = None
    depth: int = 0
    of: int = 1
    key: Any = None

    @property
    def place(self) -> str:
        """Where the layer is, for messages."""
        return self.name if self.stack is None else f"{self.stack}.{self.depth}".lstrip(".")


def uncut(tree: Any) -> tuple[Any, bool]:
    """The layout of a plain params tree that nobody cuts."""
    return make_layout(tree), False


ENDING: ContextVar[bool] = ContextVar("zfunc_ending", default=False)
"""Whether steps end the gathers of new parameters that they start: what is recorded as a graph
does, and cannot leave them to the next call."""


@dataclass
class Context(Memory):
    """One call of a step on one rank.

    Attributes:
        transforms: in data-flow order.
        memo: this rank's memory of earlier calls of the same step.
        key: the key of this call's randomness, or None.
        group: the ranks over which losses and gradients are averaged.
        by_unit: whether parameters enter and leave unit by unit.
        prefetch, room: see :class:`zfunc.engine.plans.Plan`.
        spill: see :class:`zfunc.engine.passes.Pass`.
        layout_for: plain params tree -> its layout, and whether gradients are cut.
        passes: the passes that are running, innermost last.
        asked: how often ``value_and_grad`` was called.
        differentiated: the same, each microbatch counted.
        evaluated: how often ``evaluate`` was called.
        keeps: which units' gradients are left for another transform than shard to average.
        frozen: whether second moments stay as they are in this call.
        unsettled: whether ``settled`` must be given the second moments before the step.
        layer_scope, layer_calls: randomness of the layers of the running loss.
        reduce_once: whether whole gradients are summed before they are reduced.
        compute: the 16-bit dtype in which layers compute, if there is one.
        reached: paths of the leaves to which backward has come on this rank, where somebody asks.
        missed: of each leaf that takes part in the update how many it has missed; ``None`` where
            all leaves always take part.
    """

    transforms: tuple[Any, ...] = ()
    memo: dict[Any, Any] = field(default_factory=dict)
    key: Tensor | None = None
    group: Group = field(default_factory=alone)
    by_unit: bool = False
    prefetch: int = 1
    room: int = 0
    spill: Callable[[Any, bool], Any] | None = None
    layout_for: Callable[[Any], tuple[Any, bool]] = uncut
    passes: list[Any] = field(default_factory=list)
    asked: int = 0
    differentiated: int = 0
    evaluated: int = 0
    keeps: Callable[[Any], bool] = lambda unit: False
    frozen: bool = False
    unsettled: bool = False
    layer_scope: Callable[[int], AbstractContextManager[Any]] | None = None
    layer_calls: int = 0
    reduce_once: bool = False
    compute: torch.dtype | None = None
    complete: bool = field(default_factory=ENDING.get)
    reached: set[str] | None = None
    missed: Mapping[str, int] | None = None

    def next_scope(self) -> AbstractContextManager[Any] | None:
        """The scope of randomness of the next layer that is called, if it has one of its own."""
        index, self.layer_calls = self.layer_calls, self.layer_calls + 1
        return None if self.layer_scope is None else self.layer_scope(index)

    @cached_property
    def around(self) -> list[Any]:
        """The transforms that surround layers, the innermost first."""
        return [t for t in reversed(self.transforms) if t.wraps_layers]


RECOMPUTED: ContextVar[str] = ContextVar("zfunc_recomputed", default="")
"""Of a layer whose activations are not kept: ``"first"`` in its forward pass, ``"again"``
when backward runs it anew, empty elsewhere."""

PLACING: ContextVar[Any] = ContextVar("zfunc_placing", default=None)
"""The step whose ``place`` or ``init`` is running."""


def current() -> Context | None:
    """The context of the step that is running on this rank, if any."""
    return cast("Context | None", RUNNING.get())


def push(context: Context) -> Token[Memory | None]:
    """Make ``context`` the running one; ``pop`` with the token undoes it."""
    return RUNNING.set(context)


def pop(token: Token[Memory | None]) -> None:
    """Undo a ``push``."""
    RUNNING.reset(token)
