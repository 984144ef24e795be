"""Transforms that take functions of parameters, too: a model's ``apply``, for inference."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ParamSpec, cast

from zfunc.engine.differentiation import is_evaluated
from zfunc.engine.inference import Inference
from zfunc.engine.step import Step, Wrap
from zfunc.quant.choice import module_of

__all__ = ["of_params"]

P = ParamSpec("P")


def of_params(wrap: Wrap[P]) -> Wrap[P]:
    """The transform, which takes a model's ``apply`` and what ``zf.evaluate`` made, too.

    It is told so by its field ``of_params``; one with a field ``applied`` is told the model.

    Args:
        wrap: what ``transform_of`` made.
    """
    make: Callable[..., Any] = wrap.__wrapped__  # type: ignore[attr-defined]

    @functools.wraps(wrap)
    def either(step: Any = None, /, *args: Any, **kwargs: Any) -> Any:
        if step is None:
            return lambda fn: either(fn, *args, **kwargs)
        model = module_of(step)
        if isinstance(step, Step) or not (model or is_evaluated(step)):
            return wrap(step, *args, **kwargs)
        made = replace(make(*args, **kwargs), of_params=True)
        if hasattr(made, "applied"):
            made = replace(made, applied=model)
        return Step(Inference(step)).wrap(made)

    return cast(Wrap[P], either)
