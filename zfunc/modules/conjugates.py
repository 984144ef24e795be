"""Pairs of operators between whole activations and parts of them.

Each rank computes one part of a sum, so the gradient of what all of them read is a sum, too; and
what is a sum gives each of them its whole gradient. Forward and backward change places.

Source: Shoeybi et al., Megatron-LM: Training Multi-Billion Parameter Language Models Using Model
Parallelism, 2019, section 3 (f and g).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from zfunc.layout.splits import Split
from zfunc.ranks.comm import Group

__all__ = ["copied", "gathered", "summed"]


def copied(x: Tensor, ranks: Group, label: str, split: Split | None = None) -> Tensor:
    """``x`` itself, whose gradient is summed over ranks.

    Args:
        split: of a leaf some of whose indices stand on several ranks: their gradients are summed
            over these.
    """
    if ranks.size == 1 or not (x.requires_grad and torch.is_grad_enabled()):
        return x
    out: Tensor = _Copied.apply(x, ranks, label, split)
    return out


def summed(x: Tensor, ranks: Group, label: str) -> Tensor:
    """The sum over ranks, in the memory of ``x``, which nobody else may hold."""
    if ranks.size == 1:
        return x
    out: Tensor = _Summed.apply(x, ranks, label)
    return out


def gathered(x: Tensor, ranks: Group, label: str, split: Split) -> Tensor:
    """Every rank's part of the last dimension, put together."""
    if ranks.size == 1:
        return x
    along = replace(split, dim=x.ndim - 1)
    out: Tensor = _Gathered.apply(x, ranks, label, along)
    return out


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, ranks: Group, label: str, split: Split | None) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, ctx.ranks, ctx.label, ctx.split = inputs

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        if ctx.split is None:
            mine = g.clone(memory_format=torch.contiguous_format)
            return summed(mine, ctx.ranks, ctx.label), None, None, None
        rows = torch.tensor(ctx.split.indices(ctx.ranks.rank), device=g.device, dtype=torch.long)
        full = g.new_zeros(ctx.split.full(g.shape)).index_copy(ctx.split.dim, rows, g)
        total = summed(full, ctx.ranks, ctx.label)
        return total.index_select(ctx.split.dim, rows), None, None, None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, ranks: Group, label: str) -> Tensor:
        return ranks.all_reduce(x.detach().contiguous(), label=label).wait()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, ctx.ranks, ctx.label = inputs

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return copied(g, ctx.ranks, ctx.label), None, None


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, ranks: Group, label: str, split: Split) -> Tensor:
        return split.gathered(x, ranks, label)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, ctx.ranks, _, ctx.split = inputs

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return ctx.split.local(g, ctx.ranks.rank), None, None, None
