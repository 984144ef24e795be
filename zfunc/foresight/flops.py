"""How many floating point operations an operator takes: a table of those that are counted.

Two for each multiplication with an addition, in products, convolutions and attention; nothing else
is counted. Attention under a causal mask is counted whole, as products of all queries with all
keys, whatever its kernel skips.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from torch import Tensor

from zfunc.foresight.rows import StepRow

__all__ = ["CAUSAL", "Flops", "flops_of", "formula_of", "summed"]

CAUSAL = "whole"  # how attention under a causal mask is counted


@dataclass(frozen=True)
class Flops:
    """Floating point operations of a step: :mod:`zfunc.foresight.flops` says what is counted.

    Attributes:
        total: all of them.
        by_operator, by_layer, by_phase: the same; ``""`` is outside of all layers.
        causal: how attention under a causal mask is counted: ``"whole"`` or ``"half"``.
        not_counted: elements that other operators write, by operator.
    """

    total: int
    by_operator: Counter[str] = field(default_factory=Counter)
    by_layer: Counter[str] = field(default_factory=Counter)
    by_phase: Counter[str] = field(default_factory=Counter)
    causal: str = CAUSAL
    not_counted: Counter[str] = field(default_factory=Counter)


def summed(rows: Iterable[StepRow]) -> Flops:
    """The operations of these rows.

    >>> summed([StepRow("compute", "mm", flops=8), StepRow("compute", "add", elements=3)]).total
    8
    """
    operator: Counter[str] = Counter()
    layer: Counter[str] = Counter()
    phase: Counter[str] = Counter()
    rest: Counter[str] = Counter()
    for row in rows:
        if row.flops:
            operator[row.name] += row.flops
            layer[row.layer] += row.flops
            phase[row.phase] += row.flops
        elif row.kind == "compute":
            rest[row.name] += row.elements
    return Flops(operator.total(), operator, layer, phase, CAUSAL, rest)


def flops_of(name: str, args: Sequence[Any], out: Sequence[Tensor]) -> int:
    """The operations of one call.

    Args:
        name: the operator's, without overload.
        args: its positional arguments.
        out: the tensors that it makes.

    >>> import torch
    >>> flops_of("mm", (torch.ones(2, 3), torch.ones(3, 5)), [torch.ones(2, 5)])
    60
    """
    formula = formula_of(name)
    return 0 if formula is None else formula(args, out)


def formula_of(name: str) -> Formula | None:
    """How the operations of an operator are counted, in place or not; None if they are not."""
    return FORMULAS.get(name.removesuffix("_"))


def _product(a: Any, b: Any) -> int:
    """Of matrices, or of stacks of such: every element of ``a`` with every column of ``b``."""
    return 2 * int(a.numel()) * int(b.shape[-1])


def _grouped(a: Any, b: Any) -> int:
    """Of groups, which share the columns of ``b`` between them where it is one matrix for all."""
    shared = a.dim() > b.dim()
    return _product(a, b) // (int(a.shape[0]) if shared else 1)


def _convolution(x: Any, weight: Any, transposed: bool, result: Any) -> int:
    per_output = prod(weight.shape[1:])
    return 2 * int((x if transposed else result).numel()) * per_output


def _convolution_backward(args: Sequence[Any], out: Sequence[Tensor]) -> int:
    """One convolution for the gradient of the input, one for that of the weight."""
    grad, x, weight, transposed, wanted = args[0], args[1], args[2], args[7], args[10]
    return sum(wanted[:2]) * _convolution(x, weight, transposed, grad)


def _attention(q: Any, k: Any, v: Any, with_keys: int, with_values: int) -> int:
    """So many products of the size of ``q k'``, and of that of ``p v``."""
    scores = 2 * int(prod(q.shape[:-1])) * int(k.shape[-2])
    return scores * (with_keys * int(k.shape[-1]) + with_values * int(v.shape[-1]))


def _forward(args: Sequence[Any], out: Sequence[Tensor]) -> int:
    return _attention(args[0], args[1], args[2], 1, 1)


def _backward(args: Sequence[Any], out: Sequence[Tensor]) -> int:
    """Scores once more, and the gradients of q and k; those of p and v."""
    return _attention(args[1], args[2], args[3], 3, 2)


def _recurrent(x: Any, weights: Iterable[Any]) -> int:
    """A layer of an RNN: each weight meets every element of the sequences once."""
    return 2 * int(prod(x.shape[:-1])) * sum(int(w.numel()) for w in weights if w.dim() > 1)


def _self_attention(q: Any, k: Any, v: Any) -> int:
    """Of a layer with its projections; heads share the width of what is given."""
    projections = 2 * int(q.shape[-1]) * int(2 * q.numel() + k.numel() + v.numel())
    return projections + 4 * int(q.numel()) * int(k.shape[1])


def _encoder_layer(args: Sequence[Any], out: Sequence[Tensor]) -> int:
    x = args[0]
    return _self_attention(x, x, x) + _recurrent(x, (args[14], args[16]))


Formula = Callable[[Sequence[Any], Sequence[Tensor]], int]

FORMULAS: dict[str, Formula] = {
    **dict.fromkeys(
        ("mm", "bmm", "mv", "_int_mm", "_scaled_mm", "_scaled_mm_v2"),
        lambda args, out: _product(args[0], args[1] if args[1].dim() > 1 else args[1][:, None]),
    ),
    **dict.fromkeys(
        ("addmm", "baddbmm", "addbmm", "_addmm_activation", "addmv"),
        lambda args, out: _product(args[1], args[2] if args[2].dim() > 1 else args[2][:, None]),
    ),
    **dict.fromkeys(
        ("_weight_int4pack_mm", "_weight_int4pack_mm_for_cpu", "_weight_int8pack_mm"),
        lambda args, out: _product(args[0], out[0]),
    ),
    **dict.fromkeys(
        ("_grouped_mm", "_scaled_grouped_mm", "_scaled_grouped_mm_v2"),
        lambda args, out: _grouped(args[0], args[1]),
    ),
    "_foreach_mm": lambda args, out: sum(map(_product, args[0], args[1])),
    **dict.fromkeys(("dot", "vdot"), lambda args, out: 2 * int(args[0].numel())),
    "convolution": lambda args, out: _convolution(args[0], args[1], args[6], out[0]),
    "convolution_backward": _convolution_backward,
    **dict.fromkeys(
        (
            "_scaled_dot_product_flash_attention",
            "_scaled_dot_product_flash_attention_for_cpu",
            "_scaled_dot_product_efficient_attention",
            "_scaled_dot_product_cudnn_attention",
            "_scaled_dot_product_fused_attention_overrideable",
        ),
        _forward,
    ),
    **dict.fromkeys(
        (
            "_scaled_dot_product_flash_attention_backward",
            "_scaled_dot_product_flash_attention_for_cpu_backward",
            "_scaled_dot_product_efficient_attention_backward",
            "_scaled_dot_product_cudnn_attention_backward",
            "_scaled_dot_product_fused_attention_overrideable_backward",
        ),
        _backward,
    ),
    "mkldnn_rnn_layer": lambda args, out: _recurrent(args[0], args[1:3]),
    "mkldnn_rnn_layer_backward": lambda args, out: 2 * _recurrent(args[0], args[1:3]),
    **dict.fromkeys(("_cudnn_rnn", "miopen_rnn"), lambda args, out: _recurrent(args[0], args[1])),
    **dict.fromkeys(
        ("_cudnn_rnn_backward", "miopen_rnn_backward"),
        lambda args, out: 2 * _recurrent(args[0], args[1]),
    ),
    "_native_multi_head_attention": lambda args, out: _self_attention(*args[:3]),
    "_transformer_encoder_layer_fwd": _encoder_layer,
}
