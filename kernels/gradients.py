"""Gradients of kernels: operators too, and differentiable in their turn.

The backward of a kernel is an operator, which says nothing to autograd: left bare, a second
derivative through it would be zero without a word. :func:`gradient` calls it and knows its
derivatives from the same formula in plain torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from zfunc.kernels.operators import KernelError

__all__ = ["gradient", "once"]


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


def once(name: str, factor: Tensor, *parts: Tensor) -> tuple[Tensor, ...]:
    """Gradients that were computed beforehand, times that of what came out.

    Args:
        name: of the function, for the error.
        factor: 0-d.
        parts: of any shape.

    Returns:
        ``factor * part`` for each, in the dtype of the part. Nothing can be
        differentiated through that.
    """
    out: tuple[Tensor, ...] = Once.apply(name, factor, *parts)
    return out


class Once(torch.autograd.Function):
    """A product that refuses to be differentiated."""

    generate_vmap_rule = True

    @staticmethod
    def forward(name: str, factor: Tensor, *parts: Tensor) -> tuple[Tensor, ...]:
        # In the dtype of the factor, which in that of a part would be rounded.
        return tuple((part.to(factor.dtype) * factor).to(part.dtype) for part in parts)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.name = inputs[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise KernelError(
            f"kernels.{ctx.name} has a first derivative and no second one: its gradients are "
            "computed in the forward pass, so that the logits need not be kept. Where a second "
            "one is wanted, apply the head by itself and use kernels.cross_entropy."
        )
