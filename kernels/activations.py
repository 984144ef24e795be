r"""SwiGLU, GeGLU, and GELU of a sum with a bias.

Elementwise, in float32, with :math:`\sigma` the logistic function and :math:`\Phi` the normal
distribution function:

.. math::
    \mathrm{swiglu} = g\,\sigma(g)\,u, \qquad \mathrm{geglu} = \mathrm{gelu}(g)\,u, \qquad
    \mathrm{bias\_gelu} = \mathrm{gelu}(x + b)

    \mathrm{gelu}(x) = x\,\Phi(x) \quad\text{or}\quad x\,\sigma(2 z),\;
    z = \sqrt{2 / \pi}\,(x + 0.044715\,x^3)

(the second, ``"tanh"``, is :math:`x (1 + \tanh z) / 2` with one exponential). Backward computes the
activation again instead of keeping it. The gradient of the bias is a sum of partial sums in a fixed
order.

Source: Shazeer, GLU Variants Improve Transformer, 2020; Hendrycks and Gimpel, Gaussian Error Linear
Units, 2016.

**Traffic** an element of the result in 16 bits: gated 6 bytes forward, 10 backward; ``bias_gelu`` 4
forward, 6 backward. Some 15 operations forward, 30 backward, of which one or two are exponentials
(the error function counts for 20): bound by memory.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from zfunc.kernels import dispatch
from zfunc.kernels.activations_torch import (
    bias_gelu_backward_twin,
    bias_gelu_formula,
    bias_gelu_twin,
    glu_backward_twin,
    glu_formula,
    glu_twin,
)
from zfunc.kernels.gradients import gradient
from zfunc.kernels.operators import (
    KernelError,
    alike,
    contiguous,
    folded,
    fresh,
    looped,
    operator,
)
from zfunc.kernels.rows import in_columns, in_rows
from zfunc.kernels.tracing import in_graph

__all__ = ["bias_gelu", "geglu", "swiglu"]

Approximate = Literal["none", "tanh"]


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up``.

    Args:
        gate, up: ``[..., F]``, bfloat16, float16 or float32 (float64 is taken by the twin); the
            halves of one packed tensor, as ``chunk`` gives them, are read where they lie.

    Returns:
        ``[..., F]`` in the dtype of ``gate``.

    Raises:
        KernelError: shapes or dtypes differ.

    >>> swiglu(torch.tensor([0.0, 1.0]), torch.tensor([5.0, 2.0]))
    tensor([0.0000, 1.4621])
    """
    return _gated("swiglu", gate, up, "silu")


def geglu(gate: Tensor, up: Tensor, approximate: Approximate = "tanh") -> Tensor:
    """``gelu(gate) * up``.

    Args:
        gate, up: see :func:`swiglu`.
        approximate: ``"tanh"`` or ``"none"``, as in ``torch.nn.functional.gelu``.

    Returns:
        ``[..., F]`` in the dtype of ``gate``.

    Raises:
        KernelError: shapes or dtypes differ, or there is no such approximation.

    >>> geglu(torch.tensor([0.0, 1.0]), torch.tensor([5.0, 2.0]), "none")
    tensor([0.0000, 1.6827])
    """
    return _gated("geglu", gate, up, _gelu("geglu", approximate))


def bias_gelu(x: Tensor, bias: Tensor | None = None, approximate: Approximate = "tanh") -> Tensor:
    """``gelu(x + bias)``.

    Args:
        x: ``[..., F]``, bfloat16, float16 or float32 (float64 is taken by the twin).
        bias: ``[F]`` of any floating-point dtype, or ``None``.
        approximate: ``"tanh"`` or ``"none"``, as in ``torch.nn.functional.gelu``.

    Returns:
        ``[..., F]`` in the dtype of ``x``.

    Raises:
        KernelError: shapes or dtypes do not fit, or there is no such approximation.

    >>> bias_gelu(torch.tensor([0.0, 1.0]), torch.tensor([1.0, 0.0]), "none")
    tensor([0.8413, 0.8413])
    """
    act = _gelu("bias_gelu", approximate)
    in_rows("bias_gelu", x=x)
    in_columns("bias_gelu", x, bias=bias)
    return BiasGelu.apply(x, bias, act)


def _gelu(name: str, approximate: str) -> str:
    if approximate not in ("none", "tanh"):
        raise KernelError(
            f'kernels.{name}: approximate={approximate!r}; expected "none" or "tanh".'
        )
    return "gelu" if approximate == "none" else "gelu_tanh"


def _gated(name: str, gate: Tensor, up: Tensor, act: str) -> Tensor:
    in_rows(name, gate=gate, up=up)
    alike(name, gate=gate, up=up)
    return GatedLinear.apply(gate, up, act)


@in_graph
@dispatch.steady
class GatedLinear(torch.autograd.Function):
    """``act(gate) * up``."""

    generate_vmap_rule = True

    @staticmethod
    def forward(gate: Tensor, up: Tensor, act: str) -> Tensor:
        return _glu(gate, up, act)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, ctx.act = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return *gradient(_glu_backward, glu_formula, grad, *ctx.saved_tensors, ctx.act), None


@in_graph
@dispatch.steady
class BiasGelu(torch.autograd.Function):
    """``gelu(x + bias)``."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, bias: Tensor | None, act: str) -> Tensor:
        return _bias_gelu(x, bias, act)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, bias, ctx.act = inputs
        ctx.save_for_backward(x, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, bias = ctx.saved_tensors
        dx, db = gradient(_bias_gelu_backward, bias_gelu_formula, grad, x, bias, ctx.act)
        return dx, None if bias is None else db, None


def _alike(*tensors: Tensor) -> list[Tensor]:
    """All as ``[M, F]``, views where rows lie in one piece; as one row if all are contiguous."""
    dense = [x if x.stride(-1) == 1 else x.contiguous() for x in tensors]
    if all(x.is_contiguous() for x in dense):
        return [x.view(1, -1) for x in dense]
    return [x.reshape(x.shape[:-1].numel(), x.shape[-1]) for x in dense]


@operator(fresh, batch=folded(2))
def _glu(gate: Tensor, up: Tensor, act: str) -> Tensor:
    out = fresh(gate)
    if out.numel():
        dispatch.run("glu", *_alike(gate, up, out), act=act)
    return out


def _both_fresh(grad: Tensor, gate: Tensor, up: Tensor, act: str) -> tuple[Tensor, Tensor]:
    return fresh(gate), fresh(up)


@operator(_both_fresh, batch=folded(3))
def _glu_backward(grad: Tensor, gate: Tensor, up: Tensor, act: str) -> tuple[Tensor, Tensor]:
    out = fresh(gate), fresh(up)
    if gate.numel():
        dispatch.run("glu_backward", *_alike(grad, gate, up, *out), act=act)
    return out


def _flat(x: Tensor, bias: Tensor | None) -> Tensor:
    """One row where there is no bias to tell columns apart."""
    return x.contiguous().view(-1, x.shape[-1] if bias is not None else x.numel())


@operator(fresh, batch=folded(1))
def _bias_gelu(x: Tensor, bias: Tensor | None, act: str) -> Tensor:
    out = fresh(x)
    if out.numel():
        dispatch.run("bias_gelu", _flat(x, bias), *contiguous(bias), _flat(out, bias), act=act)
    return out


def _rooms(grad: Tensor, x: Tensor, bias: Tensor | None, act: str) -> tuple[Tensor, Tensor]:
    return fresh(x), x.new_empty(0) if bias is None else bias.new_empty(bias.shape)


@operator(_rooms, batch=looped)
def _bias_gelu_backward(
    grad: Tensor, x: Tensor, bias: Tensor | None, act: str
) -> tuple[Tensor, Tensor]:
    dx, db = _rooms(grad, x, bias, act)
    if not x.numel():
        return dx, db.zero_()
    given = (_flat(grad, bias), _flat(x, bias), *contiguous(bias))
    sums = None if bias is None else db
    dispatch.run("bias_gelu_backward", *given, _flat(dx, bias), sums, act=act)
    return dx, db


FILE = "activations_triton"
dispatch.register("glu", glu_twin, FILE, "6 B (bf16)")
dispatch.register("glu_backward", glu_backward_twin, FILE, "10 B (bf16)")
dispatch.register("bias_gelu", bias_gelu_twin, FILE, "4 B (bf16)")
dispatch.register("bias_gelu_backward", bias_gelu_backward_twin, FILE, "6 B (bf16)")
