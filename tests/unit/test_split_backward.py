"""Backward in two parts: inputs first, then weights, each product once."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.unit.split_backwards import Piece, Products, check, seeds_of, split, whole
from zfunc.engine.split_backward import SplitBackward
from zfunc.errors import BackwardError

D = torch.float64


def leaf(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + 31 * sum(shape))
    return torch.randn(shape, dtype=D, generator=generator).requires_grad_()


class TwoOutputs(torch.autograd.Function):
    """``x @ w`` and ``w * 2``: one output leads to an input, and both to weights."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, w)
        return x @ w, w * 2

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return g @ w.T, x.T @ g + 2 * h


class Same(torch.autograd.Function):
    """``x + w``, which gives one tensor to both."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        return x + w

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        return g, g


def used_twice() -> Piece:
    x, w = leaf(3, 4), leaf(4, 4)
    return [x @ w @ w], [x], [w]


def used_five_times_with_bias() -> Piece:
    x, w, b = leaf(3, 4), leaf(4, 4), leaf(4)
    y = x
    for _ in range(5):
        y = torch.tanh(F.linear(y, w, b)) + y
    return [y], [x], [w, b]


def used_in_several_places() -> Piece:
    x, z, w, v = leaf(3, 4), leaf(2, 4), leaf(4, 4), leaf(4)
    h = x @ w
    return [h @ w.t() + v, (z * v) @ (w * 2), w.sum(), h], [x, z], [w, v]


def through_weights_of_weights() -> Piece:
    x, w, v = leaf(3, 4), leaf(4, 4), leaf(4)
    made = (w * v).exp()
    other = made.t() @ w
    y = F.rms_norm(x @ made, (4,), v) * (1 + v) + other.sum(0)
    return [y @ other, other], [x], [w, v]


def split_and_chunk() -> Piece:
    x, w = leaf(3, 4), leaf(4, 12)
    a, b, c = (x @ w).split(4, -1)
    d, e = w.t().chunk(2)
    return [a * b.sigmoid() @ d.t()[:, :3], c, e @ x.t()], [x], [w]


def both_from_one_function() -> Piece:
    x, w, v = leaf(3, 4), leaf(4, 4), leaf(4, 4)
    y, z = TwoOutputs.apply(x * 2, w * v)
    return [y @ z, z], [x], [w, v]


def only_the_weight_output() -> Piece:
    x, w = leaf(3, 4), leaf(4, 4)
    _, z = TwoOutputs.apply(x * 2, w)
    return [z @ w], [x], [w]


def one_gradient_for_two() -> Piece:
    x, w, v = leaf(3, 4), leaf(3, 4), leaf(3, 4)
    return [Same.apply(Same.apply(x * 2, w), v) + Same.apply(x, w)], [x], [w, v]


def weights_alone() -> Piece:
    x, w = leaf(3, 4), leaf(4, 4)
    return [w @ w, x * 2], [x], [w]


def nothing_leads_to_inputs() -> Piece:
    x, w = leaf(3, 4), leaf(4, 4)
    return [(w @ w).sum()], [x], [w]


def no_inputs() -> Piece:
    w, v = leaf(4, 4), leaf(4)
    return [F.layer_norm(w @ w, (4,), v)], [], [w, v]


def no_ends() -> Piece:
    x, w = leaf(3, 4), leaf(4, 4)
    return [x @ w], [x], []


def unused() -> Piece:
    x, y, w, v = leaf(3, 4), leaf(2), leaf(4, 4), leaf(3)
    return [x @ w, torch.ones(3, dtype=D)], [y, x], [v, w, v]


def returned_as_it_is() -> Piece:
    x, y, w = leaf(3, 4), leaf(2, 4), leaf(4, 4)
    return [x, x @ w, x, w, y], [x, y], [w]


def an_input_is_an_end() -> Piece:
    x, w = leaf(4, 4), leaf(4, 4)
    return [x @ w @ x], [x], [w, x]


def an_input_in_the_middle() -> Piece:
    x, w, v = leaf(3, 4), leaf(4, 4), leaf(4, 4)
    middle = (x @ w).relu()
    return [middle @ v @ w], [middle], [w, v]


def an_input_before_an_input() -> Piece:
    x, w, v = leaf(3, 4), leaf(4, 4), leaf(4, 4)
    middle = (x @ w).relu()
    return [middle @ v @ w, x], [middle, x], [w, v]


def an_end_in_the_middle() -> Piece:
    x, w, v = leaf(3, 4), leaf(4, 4), leaf(4, 4)
    made, middle = w.exp(), x @ v
    y = middle @ made @ w
    return [y], [x], [made, w, middle, v]


def in_place_on_views() -> Piece:
    x, w, v = leaf(3, 4), leaf(4, 4), leaf(4)
    y = (x @ w).clone()
    y[:, 1:3].mul_(v[1:3])
    y[0] += v
    y[:, 0] = w[:3, 0] @ w[:3, :3]
    z = w.clone()
    z[0] = x[0]
    return [y.cos() @ z], [x], [w, v]


def broadcast() -> Piece:
    x, w, v = leaf(5, 3, 4), leaf(4), leaf(3, 1)
    y = torch.addcmul(x * w + v, x, w, value=0.5) - w
    return [torch.where(y > 0, y, v) / (2 + w * w)], [x], [w, v]


def batched() -> Piece:
    x, w, b = leaf(2, 3, 4), leaf(2, 4, 5), leaf(2, 1, 5)
    y = torch.baddbmm(b, x, w)
    return (
        [torch.einsum("bij,bkj->bik", y, w), F.bilinear(x, x, leaf(2, 4, 4), b[0, 0, :2])],
        [x],
        [w, b],
    )


def attention() -> Piece:
    x, q, o = leaf(2, 5, 8), leaf(8, 24), leaf(8, 8)
    parts = (x @ q).view(2, 5, 3, 2, 4).permute(2, 0, 3, 1, 4)
    y = F.scaled_dot_product_attention(*parts, is_causal=True)
    return [y.transpose(1, 2).reshape(2, 5, 8) @ o], [x], [q, o]


def convolutions() -> Piece:
    x, w, b, v = leaf(2, 3, 8), leaf(4, 3, 3), leaf(4), leaf(4, 2, 3)
    y = F.conv1d(x, w, b, padding=1).relu()
    return [F.conv_transpose1d(y, v, stride=2)], [x], [w, b, v]


def norms() -> Piece:
    x, w, b, m = leaf(2, 6, 5), leaf(6), leaf(6), leaf(5, 5)
    y = F.batch_norm(x @ m, None, None, w, b, training=True)
    y = F.group_norm(y, 3, w, b)
    return [F.layer_norm(y.mT, (6,), w, b) * F.prelu(x, b.abs()).mT], [x], [w, b, m]


def embedding() -> Piece:
    x, table, w = leaf(3, 4), leaf(7, 4), leaf(4, 4)
    at = torch.tensor([1, 1, 6])
    y = x @ w + F.embedding(at, table)
    return [y @ table.t(), F.embedding(at, table) @ w], [x], [table, w]


PIECES: list[Callable[[], Piece]] = [
    used_twice, used_five_times_with_bias, used_in_several_places, through_weights_of_weights,
    split_and_chunk, weights_alone, nothing_leads_to_inputs, no_inputs, no_ends, unused,
    returned_as_it_is, an_input_is_an_end, an_input_in_the_middle, an_input_before_an_input,
    an_end_in_the_middle, in_place_on_views, broadcast, batched, attention, convolutions, norms,
    embedding, one_gradient_for_two,
]  # fmt: skip


@pytest.mark.parametrize("make", PIECES)
def test_both_parts_are_one_backward(make: Callable[[], Piece]) -> None:
    check(make)


@pytest.mark.parametrize("make", [both_from_one_function, only_the_weight_output])
def test_a_function_runs_once(make: Callable[[], Piece]) -> None:
    check(make, parts=False)
