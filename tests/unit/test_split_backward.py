"""Backward in two parts: inputs first, then weights, each product once."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.unit.split_backwards import Handed, Piece, check, seeds_of, split, whole
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


class Marked(Tensor):
    """A subclass."""


def of_a_subclass() -> Piece:
    x, y, w = leaf(3, 4).detach().as_subclass(Marked).requires_grad_(), leaf(3, 4), leaf(4, 4)
    return [(torch.tanh(x @ w) + y) @ w], [x, y], [w]


PIECES: list[Callable[[], Piece]] = [
    used_twice, used_five_times_with_bias, used_in_several_places, through_weights_of_weights,
    split_and_chunk, weights_alone, nothing_leads_to_inputs, no_inputs, no_ends, unused,
    returned_as_it_is, an_input_is_an_end, an_input_in_the_middle, an_input_before_an_input,
    an_end_in_the_middle, in_place_on_views, broadcast, batched, attention, convolutions, norms,
    embedding, one_gradient_for_two, of_a_subclass,
]  # fmt: skip


@pytest.mark.parametrize("make", PIECES)
def test_both_parts_are_one_backward(make: Callable[[], Piece]) -> None:
    check(make)


@pytest.mark.parametrize("make", [both_from_one_function, only_the_weight_output])
def test_a_function_runs_once(make: Callable[[], Piece]) -> None:
    check(make, parts=False)


def lstm(bidirectional: bool) -> Piece:
    torch.manual_seed(0)
    module = nn.LSTM(4, 3, 2, bidirectional=bidirectional).double()
    x, h = leaf(5, 2, 4), leaf(4 if bidirectional else 2, 2, 3)
    out, (hidden, _) = module(x, (h, h * 2))
    return [out, hidden], [x, h], [*module.parameters()]


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of what dynamo looks at
def test_what_torch_has_compiled() -> None:
    """It may write over what it has saved: torch refuses to keep its graph for another run."""
    bent = torch.compile(lambda x: torch.relu(x.sin()).exp(), backend="aot_eager")
    x, w, v = leaf(3, 4), leaf(4, 4), leaf(4, 4, seed=1)
    seed = torch.ones(3, 4, dtype=D)
    expected = torch.autograd.grad(bent(x @ w) @ v, [x, w, v], seed)
    back = SplitBackward([bent(x @ w) @ v], [x], [w, v])
    found = [*back.of_inputs([seed]), *back.of_weights()]
    torch.testing.assert_close(found, [*expected], rtol=0, atol=0)


@pytest.mark.parametrize("bidirectional", [False, True])
def test_a_recurrence(bidirectional: bool) -> None:
    check(lambda: lstm(bidirectional))


def test_attention_whose_queries_are_weights() -> None:
    """Attention computes all of its gradients at once, so it does that once."""

    def make() -> Piece:
        x, q, k = leaf(2, 3, 5, 4), leaf(2, 3, 5, 4), leaf(4, 4)
        return [F.scaled_dot_product_attention(q, x @ k, x * 2)], [x], [q, k]

    got = check(make, parts=False)
    assert not got.second


def checkpointed(runs: list[int]) -> Piece:
    x, w, v = leaf(3, 4), leaf(4, 4), leaf(4)

    def layer(x: Tensor, masked: Tensor) -> Tensor:
        runs.append(1)
        return F.layer_norm(torch.tanh(x @ masked) @ w.exp(), (4,), v)

    y = x
    for _ in range(2):
        y = y + checkpoint(layer, y, w * 2, use_reentrant=False)
    return [y, w @ w], [x], [w, v]


def test_checkpointed_layers_are_computed_again_once() -> None:
    runs: list[int] = []
    expected = whole(lambda: checkpointed(runs))
    assert len(runs) == 4
    got = split(lambda: checkpointed(runs))
    assert len(runs) == 8  # twice each, as in one backward
    for x, y in zip([*got.inputs, *got.ends], [*expected.inputs, *expected.ends], strict=True):
        assert x is not None and y is not None and torch.equal(x, y)
    assert got.first + got.second == expected.first


def test_checkpointed_layers_without_inputs() -> None:
    runs: list[int] = []

    def make() -> Piece:
        outs, (x,), ends = checkpointed(runs)
        return outs, [], [x, *ends]

    expected, got = whole(make), split(make)
    assert len(runs) == 8 and not got.first
    for x, y in zip(got.ends, expected.ends, strict=True):
        assert x is not None and y is not None and torch.equal(x, y)


def test_hooks_see_whole_gradients_once() -> None:
    """Hooks of tensors, which may change gradients, act as in one backward: once."""
    seen: list[str] = []

    def hooked(name: str, x: Tensor) -> Tensor:
        x.register_hook(lambda g: (seen.append(name), g * 3)[1])
        return x

    def make() -> Piece:
        x, w, v = hooked("x", leaf(3, 4)), hooked("w", leaf(4, 4)), hooked("v", leaf(4))
        made = hooked("made", w * v)
        y = hooked("y", x @ made)
        z = hooked("z", F.rms_norm(y, (4,), v) @ made + v)
        return [z, made @ w], [x], [w, v]

    expected = whole(make)
    once, seen[:] = sorted(seen), []
    got = check_equal(make, expected)
    assert sorted(seen) == once == sorted(["x", "w", "v", "made", "y", "z"])
    assert got.second


def test_hooks_of_nodes_see_all_gradients_once() -> None:
    """Those of products and of sums, as ``nn.Module.register_backward_hook`` gives them."""
    seen: list[int] = []

    def hook(grads: tuple[Tensor | None, ...], _: Any) -> tuple[Tensor | None, ...]:
        seen.append(sum(g is not None for g in grads))
        return tuple(None if g is None else g.clamp(-0.1, 0.1) for g in grads)

    def make() -> Piece:
        x, w, b = leaf(3, 4), leaf(4, 4), leaf(4)
        y = x @ w
        z = y + b * 2
        for made in (y, z):
            made.grad_fn.register_hook(hook)  # type: ignore[union-attr]
        return [z.tanh() @ w], [x], [w, b]

    expected = whole(make)
    once, seen[:] = [*seen], []
    check_equal(make, expected)
    assert seen == once == [2, 2]


def check_equal(make: Callable[[], Piece], expected: Any) -> Any:
    got = split(make)
    for x, y in zip([*got.inputs, *got.ends], [*expected.inputs, *expected.ends], strict=True):
        assert x is not None and y is not None
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)
    return got


@pytest.mark.parametrize("shape", [(), (0,)])
def test_gradients_are_handed_over_on_the_way(shape: tuple[int, ...]) -> None:
    """Once for each unit of weights, all of its leaves; with an empty end unit by unit."""
    come: list[Any] = []
    end = torch.zeros(shape, requires_grad=True)

    def make(split_too: bool = True) -> Piece:
        x, y = leaf(3, 4), leaf(3, 4)
        y = x
        for i in range(3):
            w, b, v = Handed.apply(end, i, come, *(leaf(*s).detach() for s in ((4, 4), (4,), (4,))))
            y = y + F.linear(F.layer_norm(y, (4,), v), w, b).relu() @ w.t()
        return [y], [x], [end]

    expected = whole(make)
    before, come[:] = [*come], []
    got = split(make)
    assert [name for name, _ in come] == [name for name, _ in before] == [2, 1, 0]
    for (_, row), (_, other) in zip(come, before, strict=True):
        for x, y in zip(row, other, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)
    assert got.ends == [None] and got.first + got.second == expected.first


def test_leaves_of_one_unit_in_two_ways() -> None:
    """A weight of a unit that is scaled first, and one that is not: the unit gets both at once."""
    come: list[Any] = []
    end = torch.zeros(0, requires_grad=True)

    def make() -> Piece:
        x = leaf(3, 4)
        w, v = Handed.apply(end, "unit", come, leaf(4, 4).detach(), leaf(4).detach())
        y = F.rms_norm(x, (4,), 1 + v) * v
        return [(y @ w @ w) * (1 + v), w * v], [x], [end]

    whole(make)
    split(make)
    assert len(come) == 2
    for x, y in zip(come[0][1], come[1][1], strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


def test_activations_of_the_first_part_are_freed() -> None:
    """Behind it only what products of weights need is there: their operands and gradients."""
    x, w, u = leaf(3, 4), leaf(4, 4), leaf(4, 4)
    saved: dict[str, weakref.ref[Any]] = {}

    def remember(name: str, x: Tensor) -> Tensor:
        saved[name] = weakref.ref(x.untyped_storage())
        return x

    def run() -> list[Tensor]:
        y = remember("operand", torch.tanh(x @ w))
        z = remember("tanh", torch.tanh(y @ u))
        p = remember("softmax", torch.softmax(z * remember("sigmoid", z.sigmoid()), -1))
        return [remember("other operand", p.exp()) @ u]

    outs = run()
    back = SplitBackward(outs, [x], [w, u])
    seeds = seeds_of(outs)
    del outs
    assert all(alive() is not None for alive in saved.values())
    back.of_inputs(seeds)
    left = {name for name, alive in saved.items() if alive() is not None}
    assert left == {"operand", "other operand"}
    back.of_weights()
    assert not [name for name, alive in saved.items() if alive() is not None]


def test_a_gradient_that_is_written_to_in_between_raises() -> None:
    x, w = leaf(3, 4), leaf(4, 4)
    out = x @ w
    seeds = seeds_of([out])
    back = SplitBackward([out], [x], [w])
    back.of_inputs(seeds)
    seeds[0].mul_(2)
    with pytest.raises(BackwardError, match=r"shape \(3, 4\) was written to"):
        back.of_weights()


def test_each_part_runs_once_and_in_order() -> None:
    x, w = leaf(3, 4), leaf(4, 4)
    out = x @ w
    back = SplitBackward([out], [x], [w])
    with pytest.raises(BackwardError, match=r"of_inputs.. comes first"):
        back.of_weights()
    with pytest.raises(BackwardError, match="2 gradients for 1 outputs"):
        back.of_inputs([None, None])
    with pytest.raises(BackwardError, match=r"output 0 has shape \(2,\); expected .* \(3, 4\)"):
        back.of_inputs([torch.ones(2)])
    back.of_inputs(seeds_of([out]))
    with pytest.raises(BackwardError, match="it was called before"):
        back.of_inputs(seeds_of([out]))
    back.of_weights()
    with pytest.raises(BackwardError, match="it was called before"):
        back.of_weights()


def test_what_is_used_up_says_so() -> None:
    x, w = leaf(3, 4), leaf(4, 4)
    y = torch.tanh(x).exp() @ w
    back = SplitBackward([y], [x], [w])
    back.of_inputs(seeds_of([y]))
    with pytest.raises(BackwardError, match="a second time"):
        y.sum().backward()


def test_outputs_that_no_gradient_has_come_for() -> None:
    x, w, v = leaf(3, 4), leaf(4, 4), leaf(4, 4)
    outs = [x @ w, x @ v, v * 2]
    back = SplitBackward(outs, [x], [w, v])
    seed = seeds_of(outs)[0]
    (dx,) = back.of_inputs([seed, None, None])
    dw, dv = back.of_weights()
    assert dx is not None and dw is not None and dv is None
    assert torch.equal(dx, seed @ w.t()) and torch.equal(dw, x.t() @ seed)


@pytest.mark.parametrize("shape", [(), (0,)])
def test_units_behind_one_end_of_which_one_is_checkpointed(shape: tuple[int, ...]) -> None:
    """Autograd that runs towards an end runs all that leads to it: units must still leave once."""
    come: list[Any] = []
    end = torch.zeros(shape, requires_grad=True)

    def make() -> Piece:
        x = leaf(3, 4)
        y: Tensor = x
        for i in range(3):
            w, v = Handed.apply(end, i, come, leaf(4, 4).detach(), leaf(4).detach())
            again = i == 1

            def layer(y: Tensor, w: Tensor, v: Tensor) -> Tensor:
                return F.rms_norm(torch.tanh(y @ w), (4,), v) @ w

            y = checkpoint(layer, y, w, v, use_reentrant=False) if again else layer(y, w, v)
        return [y], [x], [end]

    expected = whole(make)
    before, come[:] = [*come], []
    got = split(make)
    assert [name for name, _ in come] == [name for name, _ in before]
    for (_, row), (_, other) in zip(come, before, strict=True):
        for a, b in zip(row, other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert got.first + got.second == expected.first


@pytest.mark.parametrize("inputs", [True, False])
def test_weights_made_in_a_checkpointed_region(inputs: bool) -> None:
    """What has been computed again serves the way to inputs and all branches, at once."""
    runs: list[int] = []
    come: list[Any] = []
    end = torch.zeros(0, requires_grad=True)

    def region(x: Tensor, w: Tensor, v: Tensor) -> Any:
        runs.append(1)
        return torch.tanh(x), w.exp(), v.exp()

    def make() -> Piece:
        x, w, v = leaf(3, 4), leaf(4, 4).detach(), leaf(4, 4, seed=1).detach()
        w, v = Handed.apply(end, 0, come, w), Handed.apply(end, 1, come, v)
        y, made, other = checkpoint(region, x, w, v, use_reentrant=False)
        if not inputs:
            return [made.sin(), other.sin()], [], [end]
        return [y @ made, other.sin()], [x], [end]

    expected = whole(make)
    once, before, runs[:], come[:] = len(runs), sorted(come, key=lambda c: c[0]), [], []
    got = split(make)
    assert len(runs) == once == 2
    assert got.first + got.second == expected.first
    for (name, row), (other, rows) in zip(sorted(come, key=lambda c: c[0]), before, strict=True):
        assert name == other
        torch.testing.assert_close(row[0], rows[0], rtol=1e-12, atol=1e-12)
