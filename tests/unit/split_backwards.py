"""What tests of backward in two parts share: one whole backward, and what both compute."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import TorchDispatchMode

from zfunc.engine.split_backward import SplitBackward

Piece = tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Any]]
NAMES = "mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "convolution", "linear"
WITHIN = 1e-12


class Handed(torch.autograd.Function):
    """Weights that come in behind an end without elements; gradients are handed over."""

    @staticmethod
    def forward(ctx: Any, end: Tensor, name: str, into: list[Any], *leaves: Tensor) -> Any:
        ctx.name, ctx.into = name, into
        ctx.set_materialize_grads(False)
        return leaves if len(leaves) > 1 else leaves[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        ctx.into.append((ctx.name, grads))
        return (None,) * (3 + len(grads))


class Products(TorchDispatchMode):
    """Counts products by name; a convolution's gradients by which of them are asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.counted: Counter[str] = Counter()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kw: Any = None) -> Any:
        name = op.overloadpacket.__name__
        if name in NAMES or name.startswith(("_scaled_dot", "_thnn", "mkldnn_rnn", "linalg")):
            self.counted[name] += 1
        if name == "convolution_backward":
            for which, asked in zip("xwb", args[-1], strict=True):
                self.counted[f"convolution_{which}"] += asked
        return op(*args, **(kw or {}))


@dataclass
class Outcome:
    """Gradients of inputs and ends, and the products of each part (of all at once: ``first``)."""

    inputs: list[Tensor | None]
    ends: list[Tensor | None]
    first: Counter[str]
    second: Counter[str] = field(default_factory=Counter)


def seeds_of(outs: Sequence[Tensor]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(x.shape, generator=generator, dtype=x.dtype) for x in outs]


def whole(make: Callable[[], Piece]) -> Outcome:
    outs, inputs, ends = make()
    pairs = [(x, g) for x, g in zip(outs, seeds_of(outs), strict=True) if x.requires_grad]
    with Products() as products:
        found = torch.autograd.grad(
            [x for x, _ in pairs], [*inputs, *ends], [g for _, g in pairs], allow_unused=True
        )
    return Outcome([*found[: len(inputs)]], [*found[len(inputs) :]], products.counted)


def towards_inputs(make: Callable[[], Piece]) -> Counter[str]:
    """The products of a backward that asks for nothing else."""
    outs, inputs, _ = make()
    pairs = [(x, g) for x, g in zip(outs, seeds_of(outs), strict=True) if x.requires_grad]
    with Products() as products:
        if inputs:
            torch.autograd.grad(
                [x for x, _ in pairs], [*inputs], [g for _, g in pairs], allow_unused=True
            )
    return products.counted


def split(make: Callable[[], Piece]) -> Outcome:
    outs, inputs, ends = make()
    back = SplitBackward(outs, inputs, ends)
    with Products() as first:
        of_inputs = back.of_inputs(seeds_of(outs))
    with Products() as second:
        of_weights = back.of_weights()
    return Outcome(of_inputs, of_weights, first.counted, second.counted)


def largest_difference(got: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> float:
    worst = 0.0
    for x, y in zip(got, expected, strict=True):
        assert (x is None) == (y is None)
        if x is not None and y is not None:
            assert x.shape == y.shape and x.dtype == y.dtype
            x, y = x.to_dense().detach(), y.to_dense().detach()
            scale = max(1.0, float(y.abs().max())) if y.numel() else 1.0
            worst = max(worst, float((x - y).abs().max()) / scale if y.numel() else 0.0)
    return worst


def check(make: Callable[[], Piece], *, parts: bool = True) -> Outcome:
    """Both parts give what one backward gives, and do what it does; the first only its share.

    Args:
        parts: whether all products of weights are the second part's.
    """
    expected, got = whole(make), split(make)
    assert largest_difference(got.inputs, expected.inputs) <= WITHIN
    assert largest_difference(got.ends, expected.ends) <= WITHIN
    assert got.first + got.second == expected.first
    if parts:
        assert got.first == towards_inputs(make)
    return got
