"""Backward operators that can be differentiated again.

The backward of a kernel is an operator without an autograd rule: a second derivative through it
would be zero without a word. :func:`gradient` calls it, and takes its derivatives from the same
formula in plain torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["gradient"]


def gradient(op: Callable[..., Any], formula: Callable[..., Any], *args: Any) -> Any:
    """Call an operator that computes gradients.

    Args:
        op: the operator; its results are tensors.
        formula: the same in plain torch: differentiable, for second derivatives.
        args: of both; tensors, ``None`` and constants.

    Returns:
        What ``op`` returns.
    """
    return Gradient.apply(op, formula, *args)


class Gradient(torch.autograd.Function):
    """``op(*args)``, whose derivatives of any order are those of ``formula(*args)``."""

    generate_vmap_rule = True

    @staticmethod
    def forward(op: Callable[..., Any], formula: Callable[..., Any], *args: Any) -> Any:
        return op(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, ctx.formula, *args = inputs
        ctx.constants = [None if isinstance(x, Tensor) else x for x in args]
        ctx.places = [i for i, x in enumerate(args) if isinstance(x, Tensor)]
        ctx.save_for_backward(*(args[i] for i in ctx.places))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        places = [
            i
            for i, x in zip(ctx.places, ctx.saved_tensors, strict=True)
            if x.is_floating_point() and ctx.needs_input_grad[2 + i]
        ]
        args = list(ctx.constants)
        for i, x in zip(ctx.places, ctx.saved_tensors, strict=True):
            args[i] = x

        def varied(*some: Tensor) -> Any:
            new = list(args)
            for i, x in zip(places, some, strict=True):
                new[i] = x
            return ctx.formula(*new)

        pull = torch.func.vjp(varied, *(args[i] for i in places))[1]
        found = dict(zip(places, pull(grads if len(grads) > 1 else grads[0]), strict=True))
        return None, None, *(found.get(i) for i in range(len(args)))
