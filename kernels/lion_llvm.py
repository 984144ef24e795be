"""LLVM for :mod:`zfunc.kernels.lion`: its formula, each operation rounded for itself."""

from __future__ import annotations

from zfunc.kernels.flat_llvm import Vectors, over_flat
from zfunc.kernels.llvm import Writer

__all__ = ["launch"]

NUMBERS = ("factor", "b1", "rest1", "b2", "rest2", "keep", "lr")


def _numbers(lr: float, b1: float, b2: float, decay: float, factor: float) -> tuple[float, ...]:
    return factor, b1, 1 - b1, b2, 1 - b2, 1 - lr * decay, lr


def _formula(w: Writer, x: Vectors, c: Vectors) -> Vectors:
    b, zero = w.b, w.constant(w.f32, 0.0)
    g = b.fmul(x["grad"], c["factor"])
    middle = b.fadd(b.fmul(x["mu"], c["b1"]), b.fmul(g, c["rest1"]))
    # What is no number has the sign 0 here, as in torch.
    one, less = (w.constant(w.f32, sign) for sign in (1.0, -1.0))
    down = b.select(b.fcmp_ordered("<", middle, zero), less, zero)
    sign = b.select(b.fcmp_ordered(">", middle, zero), one, down)
    param = b.fsub(b.fmul(x["param"], c["keep"]), b.fmul(sign, c["lr"]))
    return {"param": param, "mu": b.fadd(b.fmul(x["mu"], c["b2"]), b.fmul(g, c["rest2"]))}


launch = over_flat("lion_flat", ("param", "mu"), NUMBERS, _numbers, _formula)
