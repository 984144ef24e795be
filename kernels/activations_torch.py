"""Twins in plain torch of :mod:`zfunc.kernels.activations`, and its formulas for autograd."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zfunc.kernels.operators import wide
from zfunc.kernels.pieces_torch import element_pieces, row_pieces

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
    for g, u, y in element_pieces(gate, up, out):
        wide_g = g.to(wide(g))
        room = _room(y, wide_g)
        _put(y, _activate(wide_g, act, room).mul_(u))


def glu_backward_twin(
    grad: Tensor, gate: Tensor, up: Tensor, d_gate: Tensor, d_up: Tensor, *, act: str
) -> None:
    """Rows ``[M, F]``."""
    for go, g, u, dg, du in element_pieces(grad, gate, up, d_gate, d_up):
        pull, x = go.to(wide(g)), g.to(wide(g))
        _put(du, _activate(x, act, _room(du, x)).mul_(pull))
        _put(dg, _pull(pull * u, x, act, _room(dg, x)))


def _activate(x: Tensor, act: str, out: Tensor) -> Tensor:
    """:func:`activated`, written to ``out``."""
    if act == "silu":
        torch.ops.aten.silu.out(x, out=out)
    else:
        torch.ops.aten.gelu.out(x, approximate=_how(act), out=out)
    return out


def _pull(grad: Tensor, x: Tensor, act: str, out: Tensor) -> Tensor:
    """The gradient behind the activation, by torch's own kernel, written to ``out``."""
    if act == "silu":
        torch.ops.aten.silu_backward.grad_input(grad, x, grad_input=out)
    else:
        torch.ops.aten.gelu_backward.grad_input(grad, x, approximate=_how(act), grad_input=out)
    return out


def _how(act: str) -> str:
    return "tanh" if act == "gelu_tanh" else "none"


def _room(target: Tensor, x: Tensor) -> Tensor:
    """Where something of the dtype of ``x`` is written that belongs into ``target``."""
    return target if target.dtype == x.dtype else torch.empty_like(x)


def _put(target: Tensor, x: Tensor) -> None:
    """Round ``x`` to where it belongs, if it is not there."""
    if x is not target:
        target.copy_(x)


def glu_formula(grad: Tensor, gate: Tensor, up: Tensor, act: str) -> tuple[Tensor, Tensor]:
    """The gradients as a function that autograd can follow."""
    g, u, go = (x.to(wide(gate)) for x in (gate, up, grad))
    return (go * u * slope(g, act)).to(gate.dtype), (go * activated(g, act)).to(up.dtype)


def bias_gelu_twin(x: Tensor, bias: Tensor | None, out: Tensor, *, act: str) -> None:
    """Rows ``[M, F]``."""
    for part, y in _pieces(bias, x, out):
        v = _biased(part, bias)
        _put(y, _activate(v, act, _room(y, v)))


def bias_gelu_backward_twin(
    grad: Tensor, x: Tensor, bias: Tensor | None, dx: Tensor, db: Tensor | None, *, act: str
) -> None:
    """Rows ``[M, F]``; ``db`` is ``[F]``."""
    total = None if db is None else torch.zeros_like(db, dtype=wide(x))
    for go, part, d in _pieces(bias, grad, x, dx):
        v = _biased(part, bias)
        v = _pull(go.to(v.dtype), v, act, _room(d, v))
        _put(d, v)
        if total is not None:
            total += v.sum(0)
    if db is not None and total is not None:
        db.copy_(total)


def _pieces(bias: Tensor | None, *matrices: Tensor) -> Iterable[tuple[Any, ...]]:
    """Uncut where one function does it all."""
    if bias is not None:
        return row_pieces(*matrices)
    alone = matrices[0].dtype == wide(matrices[0])
    return [matrices] if alone else element_pieces(*matrices)


def _biased(x: Tensor, bias: Tensor | None) -> Tensor:
    v = x.to(wide(x))
    return v if bias is None else v + bias


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
