"""The loss of a step, found without running it: the step runs as far as its ``value_and_grad``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from zfunc.engine import context
from zfunc.engine.context import Context
from zfunc.engine.hooks import Gradients
from zfunc.engine.step import Differentiate, Transform
from zfunc.errors import CompositionError

__all__ = ["first_asked"]


class _Asked(BaseException):
    """The step has come to its ``value_and_grad``; no ``except Exception`` in it may keep it."""

    def __init__(self, asked: Gradients) -> None:
        super().__init__()
        self.asked = asked


class _Stop(Transform):
    """Ends a step where it differentiates."""

    def differentiate(self, call: Differentiate, running: Context) -> Differentiate:
        def run(asked: Gradients) -> Any:
            raise _Asked(asked)

        return run


def first_asked(fn: Callable[..., Any], state: Any, batch: Any) -> Gradients:
    """The first ``value_and_grad`` that ``fn(state, batch)`` calls.

    Raises:
        CompositionError: it calls none, or raises before.
    """
    token = context.push(Context(transforms=(_Stop(),)))
    try:
        fn(state, batch)
    except _Asked as found:
        return found.asked
    except Exception as error:
        raise CompositionError(
            f"pipeline(example=...): the step raised {type(error).__name__} on the example before "
            f"its value_and_grad: {error}. Give what the step gets as its second argument, tensors "
            "or torch.empty(shape, dtype=..., device='meta'); or leave the example out."
        ) from error
    finally:
        context.pop(token)
    raise CompositionError(
        "pipeline(example=...): the step never called zf.value_and_grad on the example, so nothing "
        "is known of its work. Leave the example out, or give partition=."
    )
