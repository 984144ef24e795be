"""What a running step knows: one contextvar, pushed by ``Step`` and by nothing else."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from typing import Any

import torch

from zfunc.trees.memory import RUNNING, Memory

__all__ = ["ENDING", "PLACING", "RECOMPUTED", "Context", "current", "pop", "push"]

ENDING: ContextVar[bool] = ContextVar("zfunc_ending", default=False)
"""Whether steps end the gathers of new parameters that they start: what is recorded as a graph
does, and cannot leave them to the next call."""


@dataclass
class Context(Memory):
    """One call of a step on one rank.

    Attributes:
        transforms: in data-flow order.
        memo: this rank's memory of earlier calls of the same step.
        key: the state's key and its number of steps, of which this call's randomness is made
            (:func:`zfunc.engine.keys.key_of`); None where it has no key.
        by_unit: whether parameters enter and leave unit by unit.
        passes: the passes that are running, innermost last.
        asked: how often ``value_and_grad`` was called.
        differentiated: the same, each microbatch counted.
        evaluated: how often ``evaluate`` was called.
        layer_scope, layer_calls: randomness of the layers of the running loss.
        compute: the 16-bit dtype in which layers compute, if there is one.
        reached: paths of the leaves to which backward has come on this rank, where somebody asks.
        around: the transforms that surround layers, the innermost first.
        entering, leaving: those through which units enter, and gradients leave.
    """

    transforms: tuple[Any, ...] = ()
    memo: dict[Any, Any] = field(default_factory=dict)
    key: tuple[Any, Any] | None = None
    by_unit: bool = False
    passes: list[Any] = field(default_factory=list)
    asked: int = 0
    differentiated: int = 0
    evaluated: int = 0
    layer_scope: Callable[[int], AbstractContextManager[Any]] | None = None
    layer_calls: int = 0
    compute: torch.dtype | None = None
    complete: bool = field(default_factory=ENDING.get)
    reached: set[str] | None = None

    def __copy__(self) -> Context:
        made = object.__new__(type(self))
        made.__dict__.update(self.__dict__)
        return made

    def next_layer(self) -> tuple[int, Callable[[int], AbstractContextManager[Any]] | None]:
        """The next layer that is called, and what makes its scope of randomness, if it has one."""
        index, self.layer_calls = self.layer_calls, self.layer_calls + 1
        return index, self.layer_scope

    def __post_init__(self) -> None:
        # Not when asked: each microbatch has a copy of its own, and each layer asks.
        self.around = [t for t in reversed(self.transforms) if "layer" in t.acts_at]
        self.entering = [t for t in self.transforms if "enter" in t.acts_at]
        self.leaving = [t for t in self.transforms if "leave" in t.acts_at]


RECOMPUTED: ContextVar[str] = ContextVar("zfunc_recomputed", default="")
"""Of a layer whose activations are not kept: ``"first"`` in its forward pass, ``"again"``
when backward runs it anew, empty elsewhere."""

PLACING: ContextVar[Any] = ContextVar("zfunc_placing", default=None)
"""The step whose ``place`` or ``init`` is running."""


current: Callable[[], Context | None] = RUNNING.get  # type: ignore[assignment]  # what is pushed
"""The context of the step that is running on this rank, if any."""


def push(context: Context) -> Token[Memory | None]:
    """Make ``context`` the running one; ``pop`` with the token undoes it."""
    return RUNNING.set(context)


def pop(token: Token[Memory | None]) -> None:
    """Undo a ``push``."""
    RUNNING.reset(token)
