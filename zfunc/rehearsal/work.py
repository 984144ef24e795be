"""How many operations a function takes, and whether it draws random numbers, from shapes alone.

A multiplication and an addition are two. Counted are products, convolutions and attention, as torch
counts them itself
(``torch.utils.flop_counter``), and operators of ours that contain a product.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from zfunc.rehearsal.grouped_products import GROUPED, grouped_shape

__all__ = ["Counting"]


class Counting(TorchDispatchMode):
    """A block in which operations are counted.

    Attributes:
        flops: how many there were.
        draws: whether one drew random numbers.
        uneven: whether one drew as many as the numbers that it was given made it.
    """

    def __init__(self) -> None:
        super().__init__()
        from torch.utils.flop_counter import flop_registry  # its import takes a while

        self.formulas, self.flops, self.draws, self.uneven = flop_registry, 0, False, False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.draws, self.uneven = True, self.uneven or func._schema.name in UNEVEN
        if func is GROUPED and args[0].is_meta:
            out = grouped_shape(*args, **(kwargs or {}))
        else:
            out = func(*args, **(kwargs or {}))
        packet = func.overloadpacket
        if packet in self.formulas:
            self.flops += self.formulas[packet](*args, **(kwargs or {}), out_val=out)
        elif (own := OWN.get(func._schema.name)) is not None:
            self.flops += own(*args)
        return out


def _vector(a: Any, b: Any, *rest: Any) -> int:
    """``mv`` and ``dot``, which torch does not count."""
    return 2 * int(a.numel())


def _with_vector(bias: Any, a: Any, *rest: Any) -> int:
    return 2 * int(a.numel())


def _grouped(a: Any, b: Any, *rest: Any) -> int:
    """Groups share the columns of ``b`` between them where it is one matrix for all."""
    shared = int(a.shape[0]) if a.dim() > b.dim() else 1
    return 2 * int(a.numel()) * int(b.shape[-1]) // shared


def _losses(x: Any, weight: Any, *rest: Any) -> int:
    """Of the logits alone: the other products, which it makes at once, are backward's."""
    return 2 * int(x.numel()) * int(weight.shape[0])


# Those that reject what they have drawn, and draw again, or draw where a number is below zero.
_UNEVEN = "poisson binomial _standard_gamma _sample_dirichlet rrelu_with_noise rrelu_with_noise_"
UNEVEN = frozenset(f"aten::{name}" for name in _UNEVEN.split())
OWN = {
    "aten::mv": _vector,
    "aten::dot": _vector,
    "aten::vdot": _vector,
    "aten::addmv": _with_vector,
    "aten::_grouped_mm": _grouped,
    "zfunc::linear_cross_entropy": _losses,
}
