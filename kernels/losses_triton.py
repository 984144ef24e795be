"""Triton for :mod:`zfunc.kernels.losses`: a program takes a row, a block of classes at a time.

The sum of exponentials is kept relative to the greatest logit so far. One kernel makes the
loss, the gradient from a sum that is known, or one after the other, the gradient over the logits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from zfunc.kernels import dispatch
from zfunc.kernels.losses_torch import Terms

__all__ = [
    "cross_entropy",
    "cross_entropy_backward",
    "cross_entropy_grad",
    "cross_entropy_kernel",
]


@triton.jit
def _exp(x):
    """``tl.exp`` takes three instructions more, for results below 1e-38, which here are 0."""
    return tl.exp2(x * 1.4426950408889634)


@triton.jit
def _joined(top, exps, x):
    """The greatest logit and the sum of exponentials relative to it, with a block more; a level,
    and the block less it."""
    most = tl.maximum(top, tl.max(x, 0))
    level = tl.where(most == float("-inf"), 0.0, most)  # of rows that begin with it
    low = x - level
    return most, exps * _exp(top - level) + tl.sum(_exp(low), 0), level, low


@triton.jit
def cross_entropy_kernel(
    logits, target, losses, total, grad, new, V, stride, ignore, smoothing, z,
    LOSS: tl.constexpr, GRAD: tl.constexpr, SCALE: tl.constexpr, SMOOTH: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """``SCALE``: ``grad`` is one number for all rows, else one for each."""
    row = tl.program_id(0).to(tl.int64)
    start = row * stride
    lanes = tl.arange(0, BLOCK)
    goal = tl.load(target + row)
    counts = goal != ignore
    real = (goal >= 0) & (goal < V)
    here = goal.to(tl.int32)
    if LOSS:
        # Differences of logits, not of sums: great logits have no room for a small loss's digits.
        at = tl.load(logits + start + goal, mask=counts & real, other=float("nan")).to(tl.float32)
        anchor = tl.where(at == float("-inf"), 0.0, at)
        top = float("-inf")
        exps = 0.0
        plain = 0.0  # the sum of logits less the anchor
        whole = V // BLOCK * BLOCK  # known to be a multiple of BLOCK, so the rest is loaded wide
        for c in range(0, whole, BLOCK):
            x = tl.load(logits + start + c + lanes).to(tl.float32)
            top, exps, level, low = _joined(top, exps, x)
            if SMOOTH:
                plain += tl.sum(low, 0) + (level - anchor) * BLOCK
        if whole < V:
            inside = whole + lanes < V
            x = tl.load(logits + start + whole + lanes, mask=inside, other=float("-inf"))
            top, exps, level, low = _joined(top, exps, x.to(tl.float32))
            if SMOOTH:
                plain += tl.sum(tl.where(inside, low, 0.0), 0) + (level - anchor) * (V - whole)
        sums = tl.where(top == float("-inf"), 0.0, top) + tl.log(exps)
        loss = tl.log(exps) + (top - anchor) - (1.0 - smoothing) * (at - anchor) + z * sums * sums
        if SMOOTH:
            loss -= smoothing * (plain / V)
        tl.store(losses + row, tl.where(counts, loss, 0.0))
        if not GRAD:
            tl.store(total + 2 * row, top)
            tl.store(total + 2 * row + 1, exps)
    if GRAD:
        if LOSS:
            tl.debug_barrier()  # the target's logit has been read before it is written over
        else:
            top = tl.load(total + 2 * row)
            exps = tl.load(total + 2 * row + 1)
            sums = top + tl.log(exps)
        g = tl.load(grad) if SCALE else tl.load(grad + row)
        g = tl.where(real, g, float("nan"))
        lift = (1.0 + 2.0 * z * sums) / exps
        even = smoothing / V
        for c in range(0, V, BLOCK):
            inside = c + lanes < V
            x = tl.load(logits + start + c + lanes, mask=inside, other=0.0).to(tl.float32)
            d = _exp(x - top) * lift - even
            d = tl.where(c + lanes == here, d - (1.0 - smoothing), d) * g
            d = tl.where(counts, d, 0.0).to(new.dtype.element_ty)
            tl.store(new + start + c + lanes, d, mask=inside)


def _launch(name: str, terms: Terms, logits: Tensor, *rest: Tensor, **flags: bool) -> None:
    rows, classes = logits.shape
    tuned = dict(dispatch.config(name, logits.device))
    while tuned["BLOCK"] >= 2 * classes and tuned["BLOCK"] > 128:
        tuned["BLOCK"] //= 2
        tuned["num_warps"] = max(1, tuned["num_warps"] // 2)
    cross_entropy_kernel[(rows,)](
        *(logits, *rest, classes, logits.stride(0), *terms),
        SMOOTH=terms.smoothing != 0,
        **flags,
        **tuned,
    )


def cross_entropy(
    logits: Tensor, target: Tensor, losses: Tensor, total: Tensor, *, terms: Terms
) -> None:
    """Launch over rows ``[M, V]``."""
    room = (logits, target, losses, total, losses, losses)
    _launch("cross_entropy", terms, *room, LOSS=True, GRAD=False, SCALE=False)


def cross_entropy_backward(
    grad: Tensor, logits: Tensor, target: Tensor, total: Tensor, new: Tensor, *, terms: Terms
) -> None:
    """Launch over rows ``[M, V]``."""
    room = (logits, target, total, total, grad, new)
    _launch("cross_entropy_backward", terms, *room, LOSS=False, GRAD=True, SCALE=False)


def cross_entropy_grad(
    logits: Tensor, target: Tensor, scale: Tensor, losses: Tensor, *, terms: Terms
) -> None:
    """Launch over rows ``[M, V]``, which become their gradient times ``scale``, 0-d."""
    room = (logits, target, losses, losses, scale.to(torch.float32), logits)
    _launch("cross_entropy_grad", terms, *room, LOSS=True, GRAD=True, SCALE=True)
