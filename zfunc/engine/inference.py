"""Functions of parameters, which no gradient is taken of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from zfunc.engine.differentiation import evaluate, is_evaluated

__all__ = ["Inference"]


@dataclass(frozen=True)
class Inference:
    """A function of parameters, without gradients."""

    fn: Callable[..., Any]

    def __post_init__(self) -> None:
        if is_evaluated(self.fn):  # within it, trees would be entered once more
            object.__setattr__(self, "fn", self.fn.__wrapped__)  # type: ignore[attr-defined]
        for name in ("__name__", "__doc__", "__module__", "__qualname__"):
            if hasattr(self.fn, name):
                object.__setattr__(self, name, getattr(self.fn, name))

    def __call__(self, params: Any, *args: Any, **kwargs: Any) -> Any:
        return evaluate(self.fn)(params, *args, **kwargs)
