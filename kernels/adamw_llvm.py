"""LLVM for :mod:`zfunc.kernels.adamw`: the operations of ``torch._fused_adamw_``, in its order.

Each is rounded where torch's vectors round it, so both give the same bits.
"""

from __future__ import annotations

import math
from typing import Any

from zfunc.kernels.flat_llvm import Vectors, over_flat
from zfunc.kernels.llvm import Writer, single

__all__ = ["launch"]

NUMBERS = ("factor", "keep", "weight", "turned", "b2", "rest2", "correction2", "eps", "step")


def _numbers(
    lr: float, b1: float, b2: float, eps: float, decay: float, factor: float, count: float, *_: Any
) -> tuple[float, ...]:
    weight = single(1 - b1)  # of the gradient in the first moment
    near = abs(weight) < 0.5  # torch starts from the nearer end
    correction1, correction2 = _correction(b1, count), _correction(b2, count)
    return (
        factor,
        1 - lr * decay,
        weight if near else weight - 1,
        float(not near),
        b2,
        1 - b2,
        math.sqrt(correction2) if correction2 >= 0 else math.nan,
        eps,
        -lr / correction1 if correction1 else -lr * math.inf,
    )


def _correction(decay: float, count: float) -> float:
    """``1 - decay**count``; where Python would raise it is infinite, as in C."""
    try:
        return 1 - math.pow(decay, count)
    except (OverflowError, ValueError):
        return -math.inf


def _formula(w: Writer, x: Vectors, c: Vectors) -> Vectors:
    b = w.b
    g = b.fmul(x["grad"], c["factor"])
    turned = b.fcmp_ordered("!=", c["turned"], w.constant(w.f32, 0.0))
    base = b.select(turned, g, x["mu"])
    mu = w.multiply_add(c["weight"], b.fsub(g, x["mu"]), base)
    nu = w.multiply_add(b.fmul(c["rest2"], g), g, b.fmul(x["nu"], c["b2"]))
    root = b.fdiv(w.root(nu), c["correction2"])
    step = b.fdiv(b.fmul(c["step"], mu), b.fadd(root, c["eps"]))
    return {"param": b.fadd(b.fmul(x["param"], c["keep"]), step), "mu": mu, "nu": nu}


launch = over_flat("adamw_flat", ("param", "mu", "nu"), NUMBERS, _numbers, _formula)
