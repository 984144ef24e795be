r"""RMSNorm and LayerNorm over the last dimension; a residual may be added first.

For a row :math:`s = x + r` of N elements (:math:`r` is left out where there is no residual), in
float32:

.. math::
    y = \frac{s - \mu}{\sqrt{\overline{(s - \mu)^2} + \epsilon}}\,(w + o) + b

where :math:`\mu` is the mean of the row for LayerNorm and 0 for RMSNorm, and :math:`o` an offset
(1 in Gemma, whose weights begin at zero). :math:`s` is rounded to its dtype first, so that the row
that is normalised is the one that is kept. Backward, with :math:`\hat s` the row before weights and
:math:`\hat g = g (w + o)`:

.. math::
    dx = dr = g_s + \rho\,(\hat g - \overline{\hat g} - \hat s\,\overline{\hat g \hat s}),
    \qquad dw = \sum_{rows} g\,\hat s, \qquad db = \sum_{rows} g

(:math:`\overline{\hat g}` for LayerNorm alone). Sums over rows are of partial sums in a fixed
order: the same bits every time on the same device.

Source: Zhang and Sennrich, Root Mean Square Layer Normalization, 2019; Ba et al., Layer
Normalization, 2016.

**Traffic** an element in 16 bits: forward 4 bytes, 8 with a residual; backward 6, 8 with a
residual (rows beyond 8192 elements: 4 more, for the weights' pass of its own). Some 10 operations
forward and 20 backward: bound by memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zfunc.kernels import dispatch
from zfunc.kernels.gradients import gradient
from zfunc.kernels.normalization_torch import (
    Form,
    Normed,
    Rows,
    Saved,
    backward_formula,
    backward_twin,
    forward_twin,
)
from zfunc.kernels.operators import (
    alike,
    contiguous,
    folded,
    fresh,
    looped,
    operator,
    wide,
)
from zfunc.kernels.rows import in_columns, in_rows, rows_of
from zfunc.kernels.tracing import in_graph

__all__ = ["layer_norm", "rms_norm"]


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    residual: Tensor | None = None,
    offset: float = 0.0,
) -> Any:
    """Each row divided by its root mean square, times a weight.

    Args:
        x: ``[..., N]``, bfloat16, float16 or float32 (float64 is taken by the twin).
        weight: ``[N]`` of any floating-point dtype, or ``None`` for ones.
        eps: added to the mean square.
        residual: like ``x``; then ``x + residual`` is normalised.
        offset: added to the weight.

    Returns:
        ``y`` like ``x``; with a residual ``(y, x + residual)``.

    Raises:
        KernelError: shapes or dtypes do not fit.

    >>> rms_norm(torch.tensor([3.0, 4.0]), eps=0.0)
    tensor([0.8485, 1.1314])
    >>> y, stream = rms_norm(torch.ones(2), eps=0.0, residual=torch.tensor([2.0, 3.0]))
    >>> stream
    tensor([3., 4.])
    """
    return _normed("rms_norm", Rows(x, residual, weight, None), Form(eps, offset, False))


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    residual: Tensor | None = None,
) -> Any:
    """Each row less its mean, divided by its standard deviation, times a weight, plus a bias.

    Args:
        x: ``[..., N]``, bfloat16, float16 or float32 (float64 is taken by the twin).
        weight, bias: ``[N]`` of any floating-point dtype, or ``None``.
        eps: added to the variance.
        residual: like ``x``; then ``x + residual`` is normalised.

    Returns:
        ``y`` like ``x``; with a residual ``(y, x + residual)``.

    Raises:
        KernelError: shapes or dtypes do not fit.

    >>> layer_norm(torch.tensor([1.0, 3.0]), bias=torch.tensor([0.0, 10.0])).round(decimals=3)
    tensor([-1., 11.])
    """
    return _normed("layer_norm", Rows(x, residual, weight, bias), Form(eps, 0.0, True))


def _normed(name: str, rows: Rows, form: Form) -> Any:
    x, residual, weight, bias = rows
    in_rows(name, x=x)
    alike(name, x=x, residual=residual)
    in_columns(name, x, weight=weight, bias=bias)
    y, s, _, _ = Norm.apply(*rows, *form)
    return y if residual is None else (y, s)


@in_graph
@dispatch.steady
class Norm(torch.autograd.Function):
    """``(y, s, mean, rstd)``; the last two are for the backward, and ``s`` may be empty."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, *rest: Any) -> Any:
        return _norm(x, *rest)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, residual, weight, bias, *ctx.form = inputs
        _, s, mean, rstd = output
        ctx.mark_non_differentiable(mean, rstd)
        ctx.summed = residual is not None
        if not ctx.summed:
            ctx.mark_non_differentiable(s)
        ctx.save_for_backward(s if ctx.summed else x, weight, bias, mean, rstd)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_s: Tensor, *_: Any) -> tuple[Any, ...]:
        _, weight, bias, *_ = saved = ctx.saved_tensors
        upper = grad, grad_s if ctx.summed else None
        dx, dw, db = gradient(_norm_backward, backward_formula, *upper, *saved, *ctx.form)
        dw = None if weight is None else dw
        return dx, dx if ctx.summed else None, dw, None if bias is None else db, None, None, None


def _rooms(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, form: Form
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Fresh ``y, s, mean, rstd``; what there is not to be said is empty."""
    y, rstd = fresh(x), x.new_empty(x.shape[:-1], dtype=wide(x))
    s = torch.empty_like(y) if residual is not None else x.new_empty((*x.shape[:-1], 0))
    return y, s, rstd.new_empty((*x.shape[:-1], 2 if form.center else 0)), rstd


@operator(_rooms, batch=folded(2))
def _norm(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, form: Form
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    y, s, mean, rstd = made = _rooms(x, residual, weight, bias, form)
    if not y.numel():
        mean.zero_(), rstd.zero_()
        return made
    n = x.shape[-1]
    rows = Rows(rows_of(x), rows_of(residual), *contiguous(weight, bias))
    sums = None if residual is None else s.view(-1, n)
    means = mean.view(-1, 2) if form.center else None
    out = Normed(y.view(-1, n), sums, means, rstd.view(-1))
    dispatch.run("layer_norm" if form.center else "rms_norm", rows, out, form=form)
    return made


def _gradient_rooms(
    grad: Tensor, grad_s: Tensor | None, saved: Saved, form: Form
) -> tuple[Tensor, Tensor, Tensor]:
    s = saved.s
    dw, db = (s.new_empty(0) if p is None else p.new_empty(p.shape) for p in saved[1:3])
    return fresh(s), dw, db


@operator(_gradient_rooms, batch=looped)
def _norm_backward(
    grad: Tensor, grad_s: Tensor | None, saved: Saved, form: Form
) -> tuple[Tensor, Tensor, Tensor]:
    dx, dw, db = made = _gradient_rooms(grad, grad_s, saved, form)
    s, weight, bias, mean, rstd = saved
    if not s.numel():
        return dx, dw.zero_(), db.zero_()
    means = mean.reshape(-1, 2).contiguous() if form.center and mean is not None else None
    weight, bias = contiguous(weight, bias)
    rows = Saved(rows_of(s), weight, bias, means, rstd.reshape(-1).contiguous())
    sums = None if weight is None else dw, None if bias is None else db
    name = "layer_norm_backward" if form.center else "rms_norm_backward"
    out = (dx.view(-1, s.shape[-1]), *sums)
    dispatch.run(name, rows_of(grad), rows_of(grad_s), rows, out, form=form)
    if s.shape[-1] == 1 and not form.center:
        dx.copy_(_of_one(grad, grad_s, weight, rstd[..., None], form))
    return made


def _of_one(
    grad: Tensor, grad_s: Tensor | None, weight: Tensor | None, rstd: Tensor, form: Form
) -> Tensor:
    """The gradient of RMSNorm in rows of one element, whose square is 1 but for ``eps``: the
    formula for rows of any length takes all its digits away."""
    g = grad.to(rstd.dtype)
    g = g if weight is None else g * (weight.to(g.dtype) + form.offset)
    new = g * (form.eps * rstd**3)
    return new if grad_s is None else new + grad_s


for _name in ("rms_norm", "layer_norm"):
    for _suffix, _twin, _bytes in (("", forward_twin, 4), ("_backward", backward_twin, 6)):
        _traffic = f"{_bytes} B, 8 B with a residual (bf16)"
        dispatch.register(_name + _suffix, _twin, "normalization_triton", _traffic)
