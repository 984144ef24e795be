"""Twins in plain torch of :mod:`zfunc.kernels.activations`, and its formulas for autograd."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from zfunc.kernels.normalization_torch import wide

__all__ = [
    "activated",
    "bias_gelu_backward_twin",
    "bias_gelu_formula",
    "bias_gelu_twin",
    "glu_backward_twin",
    "glu_formula",
    "glu_twin",
    "slope",
]


def activated(x: Tensor, act: str) -> Tensor:
    """``"silu"``, ``"gelu"`` or ``"gelu_tanh"`` of ``x``."""
    if act == "silu":
        return F.silu(x)
    return F.gelu(x, approximate="tanh" if act == "gelu_tanh" else "none")


def slope(x: Tensor, act: str) -> Tensor:
    """Its derivative, which autograd can follow."""
    if act == "silu":
        s = torch.sigmoid(x)
        return s * (1 + x * (1 - s))
    if act == "gelu":
        density = torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
        return 0.5 * (1 + torch.erf(x / math.sqrt(2))) + x * density
    c = math.sqrt(2 / math.pi)
    s = torch.sigmoid(2 * c * (x + 0.044715 * x * x * x))
    return s + x * s * (1 - s) * 2 * c * (1 + 3 * 0.044715 * x * x)


def glu_twin(gate: Tensor, up: Tensor, out: Tensor, *, act: str) -> None:
    """Rows ``[M, F]``."""
    g = gate.to(wide(gate))
    out.copy_(activated(g, act).mul_(up))


def glu_backward_twin(
    grad: Tensor, gate: Tensor, up: Tensor, d_gate: Tensor, d_up: Tensor, *, act: str
) -> None:
    """Rows ``[M, F]``."""
    g, go = gate.to(wide(gate)), grad.to(wide(gate))
    d_up.copy_(activated(g, act).mul_(go))
    d_gate.copy_(_pulled(go * up, g, act))


def _pulled(grad: Tensor, x: Tensor, act: str) -> Tensor:
    """The gradient behind the activation, by torch's own kernel."""
    if act == "silu":
        return torch.ops.aten.silu_backward(grad, x)
    how = "tanh" if act == "gelu_tanh" else "none"
    return torch.ops.aten.gelu_backward(grad, x, approximate=how)


def glu_formula(grad: Tensor, gate: Tensor, up: Tensor, act: str) -> tuple[Tensor, Tensor]:
    """The gradients as a function that autograd can follow."""
    g, u, go = (x.to(wide(gate)) for x in (gate, up, grad))
    return (go * u * slope(g, act)).to(gate.dtype), (go * activated(g, act)).to(up.dtype)


def bias_gelu_twin(x: Tensor, bias: Tensor | None, out: Tensor, *, act: str) -> None:
    """Rows ``[M, F]``."""
    v = x.to(wide(x))
    out.copy_(activated(v if bias is None else v + bias, act))


def bias_gelu_backward_twin(
    grad: Tensor, x: Tensor, bias: Tensor | None, dx: Tensor, db: Tensor | None, *, act: str
) -> None:
    """Rows ``[M, F]``; ``db`` is ``[F]``."""
    v = x.to(wide(x))
    v = _pulled(grad.to(v.dtype), v if bias is None else v + bias, act)
    dx.copy_(v)
    if db is not None:
        db.copy_(v.sum(0))


def bias_gelu_formula(
    grad: Tensor, x: Tensor, bias: Tensor | None, act: str
) -> tuple[Tensor, Tensor]:
    """The gradients as a function that autograd can follow."""
    v = x.to(wide(x))
    v = grad.to(v.dtype) * slope(v if bias is None else v + bias, act)
    if bias is None:
        return v.to(x.dtype), x.new_empty(0)
    rows = tuple(range(v.dim() - 1))
    return v.to(x.dtype), (v.sum(rows) if rows else v).to(bias.dtype)
