"""LLVM for :mod:`zfunc.kernels.frozen`: each buffer is read once and written once.

Each product, sum, quotient and root is rounded by itself, as torch rounds it: the bits are those of
the twins.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zfunc.kernels.flat_llvm import call, read, shared_out, write, written
from zfunc.kernels.llvm import Emitter, host

__all__ = ["adamw_frozen", "momentum_shares"]

F32 = torch.float32


def momentum_shares(grad: Tensor, mu: Tensor, nu: Tensor, *, hyper: Tensor) -> None:
    """All contiguous; ``mu`` and ``nu`` in float32."""
    n = grad.numel()
    call(_sharing(host().isa, grad.dtype), n, grad, mu, nu, hyper, n)


def adamw_frozen(param: Tensor, mu: Tensor, nu: Tensor, *, hyper: Tensor, shares: bool) -> None:
    """All contiguous, in float32."""
    n = param.numel()
    call(_stepping(host().isa, shares), n, param, mu, nu, hyper, n)


@written("grad", "mu", "nu", "hyper", "n")
def _sharing(w: Emitter, dtype: torch.dtype) -> None:
    b, a = w.b, w.arguments
    decay, correction = _hyper(w, 2)
    rest = _single(w, b.fsub(w.ir.Constant(w.f64, 1.0), decay))
    decay, correction = _single(w, decay), _single(w, correction)

    def vector(at: Any, mask: Any) -> None:
        g = b.fmul(read(w, a["grad"], at, dtype, mask), rest)
        mean = b.fadd(b.fmul(read(w, a["mu"], at, F32, mask), decay), g)
        square = _threshold(w, b.fdiv(read(w, a["nu"], at, F32, mask), correction))
        write(w, a["mu"], at, b.fmul(mean, _inverse(w, square)), F32, mask)

    shared_out(w, a["n"], vector)


@written("param", "mu", "nu", "hyper", "n")
def _stepping(w: Emitter, shares: bool) -> None:
    b, a = w.b, w.arguments
    rate, grown, correction, most, eps, kept = (_single(w, x) for x in _hyper(w, 6))
    least, one = b.fneg(most), w.constant(w.f32, 1.0)

    def vector(at: Any, mask: Any) -> None:
        m, v = (read(w, a[name], at, F32, mask) for name in ("mu", "nu"))
        new = b.fmul(v, grown)
        size = b.fdiv(one, _inverse(w, b.fdiv(v if shares else new, correction)))
        write(w, a["nu"], at, new, F32, mask)
        if shares:
            m = b.fmul(m, size)
            write(w, a["mu"], at, m, F32, mask)
        move = b.fdiv(b.fmul(m, rate), b.fadd(_threshold(w, size), eps))
        move = b.select(b.fcmp_ordered("<", move, least), least, move)  # NaN stays
        move = b.select(b.fcmp_ordered(">", move, most), most, move)
        p = b.fmul(read(w, a["param"], at, F32, mask), kept)
        write(w, a["param"], at, b.fsub(p, move), F32, mask)

    shared_out(w, a["n"], vector)


def _hyper(w: Emitter, count: int) -> list[Any]:
    """Hyperparameters, in float64."""
    return [w.load(w.at(w.arguments["hyper"], 8 * i), w.f64) for i in range(count)]


def _single(w: Emitter, x: Any) -> Any:
    """A float64 as 16 float32."""
    return w.splat(w.b.fptrunc(x, w.f32))


def _inverse(w: Emitter, x: Any) -> Any:
    """``1 / sqrt(x)``, the root rounded first."""
    root = w.intrinsic("llvm.sqrt.v16f32", x.type, x)
    return w.b.fdiv(w.constant(w.f32, 1.0), root)


def _threshold(w: Emitter, x: Any) -> Any:
    """What is not positive, infinite."""
    none = w.b.fcmp_ordered("<=", x, w.constant(w.f32, 0.0))
    return w.b.select(none, w.constant(w.f32, float("inf")), x)
