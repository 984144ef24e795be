r"""RMSNorm and LayerNorm over the last dimension, with the sum of a residual stream before it.

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

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from zfunc.kernels import dispatch
from zfunc.kernels.gradients import gradient
from zfunc.kernels.normalization_torch import (
    backward_formula,
    backward_twin,
    forward_twin,
    wide,
)
from zfunc.kernels.operators import alike, define, folded, in_columns, in_rows, looped, rows_of
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
    return _norm("rms_norm", x, residual, weight, None, eps, offset, False)


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
    return _norm("layer_norm", x, residual, weight, bias, eps, 0.0, True)


def _norm(
    name: str,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    offset: float,
    center: bool,
) -> Any:
    _check(name, x, residual, weight, bias)
    y, s, _, _ = Norm.apply(x, residual, weight, bias, eps, offset, center)
    return y if residual is None else (y, s)


def _check(
    name: str, x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None
) -> None:
    in_rows(name, x=x)
    alike(name, x=x, residual=residual)
    in_columns(name, x, weight=weight, bias=bias)


@in_graph
@dispatch.steady
class Norm(torch.autograd.Function):
    """``(y, s, mean, rstd)``; the last two are for the backward, and ``s`` may be empty."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        offset: float,
        center: bool,
    ) -> tuple[Tensor, ...]:
        return _forward(x, residual, weight, bias, eps, offset, center)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, residual, weight, bias, ctx.eps, ctx.offset, ctx.center = inputs
        _, s, mean, rstd = output
        ctx.mark_non_differentiable(mean, rstd)
        ctx.summed = residual is not None
        if not ctx.summed:
            ctx.mark_non_differentiable(s)
        ctx.save_for_backward(s if ctx.summed else x, weight, bias, mean, rstd)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_s: Tensor, *_: Any) -> tuple[Any, ...]:
        s, weight, bias, mean, rstd = ctx.saved_tensors
        dx, dw, db = gradient(
            _backward,
            backward_formula,
            grad,
            grad_s if ctx.summed else None,
            s,
            weight,
            bias,
            mean,
            rstd,
            ctx.eps,
            ctx.offset,
            ctx.center,
        )
        dw = None if weight is None else dw
        return dx, dx if ctx.summed else None, dw, None if bias is None else db, None, None, None


def _rooms(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    offset: float,
    center: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Fresh ``y, s, mean, rstd``; what there is not to be said is empty."""
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    s = torch.empty_like(y) if residual is not None else x.new_empty((*x.shape[:-1], 0))
    rstd = x.new_empty(x.shape[:-1], dtype=wide(x))
    return y, s, rstd.new_empty((*x.shape[:-1], 2 if center else 0)), rstd


def _run_forward(x: Tensor, residual: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    weight, bias, eps, offset, center = rest
    y, s, mean, rstd = _rooms(x, residual, *rest)
    if not y.numel():
        mean.zero_(), rstd.zero_()
    else:
        dispatch.run(
            "layer_norm" if center else "rms_norm",
            _rows(x),
            None if residual is None else _rows(residual),
            *(None if p is None else p.contiguous() for p in (weight, bias)),
            y.view(-1, x.shape[-1]),
            None if residual is None else s.view(-1, x.shape[-1]),
            mean.view(-1, 2) if center else None,
            rstd.view(-1),
            eps=eps,
            offset=offset,
        )
    return y, s, mean, rstd


def _rows(x: Tensor) -> Tensor:
    return rows_of(x).contiguous()


def _gradient_rooms(
    grad: Tensor,
    grad_s: Tensor | None,
    s: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    dx = torch.empty_like(s, memory_format=torch.contiguous_format)
    dw, db = (s.new_empty(0) if p is None else p.new_empty(p.shape) for p in (weight, bias))
    return dx, dw, db


def _run_backward(
    grad: Tensor,
    grad_s: Tensor | None,
    s: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    eps: float,
    offset: float,
    center: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    dx, dw, db = _gradient_rooms(grad, grad_s, s, weight, bias)
    if not s.numel():
        return dx, dw.zero_(), db.zero_()
    dispatch.run(
        "layer_norm_backward" if center else "rms_norm_backward",
        _rows(grad),
        None if grad_s is None else _rows(grad_s),
        _rows(s),
        None if weight is None else weight.contiguous(),
        mean.reshape(-1, 2).contiguous() if center else None,
        rstd.reshape(-1).contiguous(),
        dx.view(-1, s.shape[-1]),
        None if weight is None else dw,
        None if bias is None else db,
        offset=offset,
    )
    if s.shape[-1] == 1 and not center:
        dx.copy_(_of_one(grad, grad_s, weight, rstd[..., None], eps, offset))
    return dx, dw, db


def _of_one(
    grad: Tensor,
    grad_s: Tensor | None,
    weight: Tensor | None,
    rstd: Tensor,
    eps: float,
    offset: float,
) -> Tensor:
    """The gradient of RMSNorm in rows of one element, whose square is 1 but for ``eps``: the
    formula for rows of any length takes all its digits away."""
    g = grad.to(rstd.dtype)
    g = g if weight is None else g * (weight.to(g.dtype) + offset)
    new = g * (eps * rstd**3)
    return new if grad_s is None else new + grad_s


_forward: Callable[..., Any] = define(
    "norm(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, float eps, float offset,"
    " bool center) -> (Tensor, Tensor, Tensor, Tensor)",
    _run_forward,
    _rooms,
    folded(lambda: _forward, 2),
)
_backward: Callable[..., Any] = define(
    "norm_backward(Tensor grad, Tensor? grad_s, Tensor s, Tensor? weight, Tensor? bias,"
    " Tensor mean, Tensor rstd, float eps, float offset, bool center) -> (Tensor, Tensor, Tensor)",
    _run_backward,
    _gradient_rooms,
    looped(lambda: _backward),
)

for _name in ("rms_norm", "layer_norm"):
    for _suffix, _twin, _bytes in (("", forward_twin, 4), ("_backward", backward_twin, 6)):
        dispatch.register(
            dispatch.Kernel(
                _name + _suffix,
                _twin,
                f"zfunc.kernels.normalization_triton:{'backward' if _suffix else 'forward'}",
                f"{_bytes} B, 8 B with a residual (bf16)",
                dtypes=dispatch.FLOATS,
            )
        )
