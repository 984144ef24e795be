"""Where the blocks of :mod:`zfunc.kernels.decode` take over, and weights as they read them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zfunc import kernels
from zfunc.kernels import Packed, dispatch
from zfunc.quant import kernel_products
from zfunc.quant.qtensor import QTensor
from zfunc.trees.kinds import kind

__all__ = ["ACTIVATIONS", "Slots", "added", "bias", "packed"]

Slots = dict[str, Any]
"""A submodule's parameters of the moment, by name."""

ACTIVATIONS = {"silu": "silu", "none": "gelu", "tanh": "gelu_tanh"}


def packed(name: str | None, x: Tensor, slots: Sequence[Slots], **how: Any) -> list[Packed] | None:
    """Matrices as a block reads them; None where the dispatch does not send it to a kernel.

    Args:
        name: of the kernel; by default that of a product with such weights.
        x: ``[b, w]``, its input.
        slots: whose ``"weight"`` they are.
        how: what else matters to the dispatch.

    On a CPU blocks are slower than the operations that they are made of, so they run only where
    :func:`zfunc.kernels.use` asks for their twins, or for Triton in its interpreter.
    """
    forced = dispatch.forced()
    if kind(x.device) == "cpu" and forced in (None, "llvm"):
        return None
    weights = [_packed(x, p["weight"], forced) for p in slots]
    first = weights[0]
    if first is None or any(w is None or w.kind != first.kind for w in weights):
        return None
    if len({(w.group, w.zero is None) for w in weights if w is not None}) > 1:
        return None
    if forced != "torch":
        more = {"kind": first.kind, **how} if name else {}
        asked = {"group": first.group or 0, "rows": len(x), "dtype": x.dtype, **more}
        choice = kernels.choose(name or first.kind, x, first.scale, first.zero, **asked)
        if choice.route != "triton":
            return None
    return [w for w in weights if w is not None]


def _packed(x: Tensor, weight: Any, forced: str | None) -> Packed | None:
    if isinstance(weight, QTensor):
        if not kernel_products.readable(weight) or weight.format.dynamic:
            return None
        good = forced == "torch" or kernel_products.takes(x, weight)
        return kernel_products.packed(weight) if good else None
    plain = type(weight) in (Tensor, torch.nn.Parameter)
    return Packed.of(weight) if plain and weight.dtype == x.dtype else None


def added(x: Tensor, y: Tensor, slots: Slots) -> Tensor:
    """``x + y W^T`` for ``y`` ``[b, k]``."""
    weights = packed(None, y, (slots,))
    if weights is not None:
        return kernels.packed_mm(y, weights[0], slots["bias"], x)
    return x + F.linear(y, slots["weight"], slots["bias"])


def bias(slots: Sequence[Slots]) -> Tensor | None:
    """What is added to the rows of matrices below each other; None if to none of them."""
    found = [p["bias"] for p in slots]
    if all(b is None for b in found):
        return None
    rows = [len(p["weight"]) for p in slots]
    some = next(b for b in found if b is not None)
    return torch.cat(
        [some.new_zeros(n) if b is None else b for b, n in zip(found, rows, strict=True)]
    )
