"""LLVM for :mod:`zfunc.kernels.adamw`: the operations of ``torch._fused_adamw_``, in its order.

Each is rounded where torch's vectors round it, so both give the same bits. Sixteen elements are
loaded, renewed and stored, with their 16-bit copy: memory is passed over once.
"""

from __future__ import annotations

import functools
import math
import struct
from typing import Any

import torch
from torch import Tensor

from zfunc.kernels import llvm
from zfunc.kernels.flat_llvm import ALONE, read, shared_out, write
from zfunc.kernels.llvm import Writer, host

__all__ = ["launch"]

STATE = ("param", "mu", "nu")
NUMBERS = ("factor", "keep", "weight", "turned", "b2", "rest2", "correction2", "eps", "step")


def launch(grad: Tensor, *buffers: Any, hyper: Tensor) -> None:
    """Buffers are the state, the new state, which may be the same, and the copy or ``None``."""
    *kept, low = buffers
    kernel = _made(host().isa, grad.dtype, None if low is None else low.dtype)
    addresses = [0 if x is None else x.data_ptr() for x in (grad, *kept, low)]
    n = grad.numel()
    kernel([*addresses, n, *map(_bits, _numbers(*hyper.tolist()))], 1 if n < ALONE else 0)


@functools.cache
@llvm.once
def _made(isa: str, grad: torch.dtype, low: torch.dtype | None) -> llvm.Kernel:
    w = Writer("adamw", ["grad", *STATE, *(f"new {x}" for x in STATE), "low", "n", *NUMBERS])
    a = w.arguments
    known = {x: w.splat(w.b.bitcast(w.b.trunc(a[x], w.i32), w.f32)) for x in NUMBERS}

    def vector(at: Any, mask: Any) -> None:
        g = read(w, a["grad"], at, grad, mask)
        old = {x: read(w, a[x], at, torch.float32, mask) for x in STATE}
        new = _formula(w, g, old, known)
        for name, x in new.items():
            write(w, a[f"new {name}"], at, x, torch.float32, mask)
        if low is not None:
            write(w, a["low"], at, new["param"], low, mask)

    shared_out(w, a["n"], vector)
    return llvm.compiled(w.done(), "adamw", isa)


def _numbers(
    lr: float, b1: float, b2: float, eps: float, decay: float, factor: float, count: float, *_: Any
) -> tuple[float, ...]:
    weight = llvm.single(1 - b1)  # of the gradient in the first moment
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


def _bits(x: float) -> int:
    """The bits of a number in float32, as an integer."""
    return int.from_bytes(struct.pack("<f", llvm.single(x)), "little")


def _formula(w: Writer, g: Any, x: dict[str, Any], c: dict[str, Any]) -> dict[str, Any]:
    b = w.b
    g = b.fmul(g, c["factor"])
    turned = b.fcmp_ordered("!=", c["turned"], w.constant(w.f32, 0.0))
    base = b.select(turned, g, x["mu"])
    mu = w.multiply_add(c["weight"], b.fsub(g, x["mu"]), base)
    nu = w.multiply_add(b.fmul(c["rest2"], g), g, b.fmul(x["nu"], c["b2"]))
    root = b.fdiv(w.root(nu), c["correction2"])
    step = b.fdiv(b.fmul(c["step"], mu), b.fadd(root, c["eps"]))
    return {"param": b.fadd(b.fmul(x["param"], c["keep"]), step), "mu": mu, "nu": nu}
