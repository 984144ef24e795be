"""Laws of every optimizer, over random trees and simulated worlds.

Placing commutes with training; donating, wrapping in a chain, a full mask or a single
label change nothing. Bitwise, except where a norm is summed in another order.
"""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

import zfunc as zf
from tests.laws.covering import pairs
from zfunc import optim, tree
from zfunc.engine import context
from zfunc.layout.cutting import make_layout
from zfunc.layout.sharded import cut
from zfunc.trees import memory

Tree = Any


def no_bias(path: str) -> bool:
    return not path.endswith("b")


ELEMENTWISE = {
    "sgd": optim.sgd(0.1),
    "nesterov": optim.sgd(0.1, momentum=0.9, nesterov=True),
    "adam": optim.adam(optim.linear(0.1, 0.0, 9)),
    "adamw": optim.adamw(0.1, weight_decay=0.3, mask=no_bias),
    "lion": optim.lion(0.1, weight_decay=0.3, mask=no_bias),
    "rmsprop": optim.rmsprop(0.01, centered=True, eps=0.1, momentum=0.9, bias_correction=True),
    "adagrad": optim.chain(optim.clip(0.5), optim.adagrad(0.1)),
    "nadamw": optim.nadamw(0.1, weight_decay=0.3, mask=no_bias),
    "radam": optim.radam(0.1, b2=0.9),
    "lookahead": optim.lookahead(optim.lion(0.1), 2, 0.5),
    "every second": optim.MultiSteps(optim.adamw(0.1), 2),
    "injected": optim.inject_hyperparams(optim.adamw)(0.1, weight_decay=0.3, mask=no_bias),
    "masked": optim.chain(optim.masked(optim.adamw(0.1), no_bias), optim.ema(0.5)),
    "multi": optim.multi_transform(
        {"x": optim.adamw(0.1), "y": optim.sgd(0.1, momentum=0.9)},
        lambda path: "x" if no_bias(path) else "y",
    ),
}
NORMED = {
    "lamb": optim.lamb(0.1, weight_decay=0.3, mask=no_bias),
    "clipped": optim.chain(optim.clip_by_global_norm(0.1), optim.adamw(0.1)),
    "skipping": optim.skip_nonfinite(optim.adamw(0.1)),
}
EVERY = {**ELEMENTWISE, **NORMED}

# Trees of weights alone, and of biases alone, are among them.
pytestmark = pytest.mark.filterwarnings("ignore:.*(chooses none|is that of none):UserWarning")

shapes = st.lists(st.integers(0, 12), max_size=3).map(tuple) | st.just((130,)) | st.just((9, 70))
units = st.dictionaries(st.sampled_from(["w", "b", "c"]), shapes, min_size=1)
trees = st.fixed_dictionaries({"root": units, "layers": st.lists(units, max_size=3)})


def numbers(like: Tree, seed: int, dtype: torch.dtype = torch.float32) -> Tree:
    """Random tensors of the given shapes, or of the shapes of the given tensors."""
    generator = torch.Generator().manual_seed(seed)

    def new(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    return {
        "root": {name: new(shape) for name, shape in like["root"].items()},
        "layers": tree.Layers(
            [{name: new(shape) for name, shape in unit.items()} for unit in like["layers"]]
        ),
    }


def steps(tx: Any, params: Tree, grads: list[Tree], donate: bool = False) -> tuple[Tree, Any]:
    """The parameters and the optimizer's state after one update for each of the gradients."""
    state = tx.init(params)
    for g in grads:
        donation = memory.Donation.of(tree.leaves((params, state))) if donate else None
        token = context.push(context.Context(donation=donation))
        try:
            updates, state = tx.update(g, state, params)
            params = optim.apply_updates(params, updates)
        finally:
            context.pop(token)
    return params, state


def assert_same(a: Tree, b: Tree, exact: bool = True) -> None:
    names = tree.flatten_names(a)
    assert names.keys() == tree.flatten_names(b).keys()
    for name, y in tree.flatten_names(b).items():
        if exact:
            assert torch.equal(names[name], y), name
        else:
            torch.testing.assert_close(names[name], y, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", EVERY)
@settings(max_examples=8)
@given(
    like=trees,
    ranks=st.integers(1, 4),
    unit_bytes=st.sampled_from([1 << 20, 512, 1]),
    persist_below=st.sampled_from([0, 20]),
)
def test_placing_commutes_with_training(name, like, ranks, unit_bytes, persist_below):
    tx, exact = EVERY[name], name in ELEMENTWISE
    dtype = torch.float32 if exact else torch.float64
    params = numbers(like, 0, dtype)
    grads = [numbers(like, seed, dtype) for seed in (1, 2, 3)]
    layout = make_layout(params, world=ranks, unit_bytes=unit_bytes, persist_below=persist_below)
    expected, expected_state = steps(tx, params, grads)

    def rank():
        def place(plain: Tree) -> Tree:
            return cut(layout, plain, zf.rank())

        three, state = steps(tx, place(params), [place(g) for g in grads])
        copies = tree.map(torch.clone, place(params))  # `cut` may alias what it cuts
        donated, _ = steps(tx, copies, [place(g) for g in grads], donate=True)
        assert_same(tree.full(donated), tree.full(three))
        updates, _ = tx.update(place(grads[0]), tx.init(place(params)), params)
        return tree.full(three), tree.full(state), optim.apply_updates(params, updates)

    first, _ = steps(tx, params, grads[:1])
    for three, state, one in zf.simulate(ranks)(rank)():
        assert_same(three, expected, exact)
        assert_same(state, expected_state, exact)
        assert_same(one, first, exact)


@pytest.mark.parametrize("name", EVERY)
@settings(max_examples=10)
@given(like=trees, dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
def test_what_changes_nothing(name, like, dtype):
    tx, params = EVERY[name], numbers(like, 0, dtype)
    grads = [numbers(like, seed, dtype) for seed in (1, 2)]
    expected, _ = steps(tx, params, grads)
    untouched = numbers(like, 0, dtype)
    assert_same(params, untouched)
    for other in (
        optim.chain(tx),
        optim.multi_transform({"all": tx}, lambda path: "all"),
        optim.skip_nonfinite(tx),
        optim.chain(optim.identity(), tx),
    ):
        assert_same(steps(other, params, grads)[0], expected)
    copies = tree.map(torch.clone, params)
    assert_same(steps(tx, copies, grads, donate=True)[0], expected)


@pytest.mark.parametrize("name", EVERY)
@settings(max_examples=5)
@given(like=trees)
def test_a_full_mask_equals_no_mask(name, like):
    tx, params = EVERY[name], numbers(like, 0, torch.float64)
    grads = [numbers(like, seed, torch.float64) for seed in (1, 2)]
    masked, _ = steps(optim.masked(tx, lambda path: True), params, grads)
    assert_same(masked, steps(tx, params, grads)[0], exact=False)  # additive, not fused


@settings(max_examples=10)
@given(like=trees, ranks=st.integers(1, 3), bad=st.sampled_from([float("nan"), float("inf")]))
def test_one_bad_element_on_one_rank_skips_the_step_on_all(like, ranks, bad):
    tx = optim.skip_nonfinite(optim.adamw(0.1))
    params, grads = numbers(like, 0), numbers(like, 1)
    some = [x for x in tree.leaves(grads) if x.numel()]
    if not some:
        return
    some[-1].view(-1)[-1] = bad
    layout = make_layout(params, world=ranks, unit_bytes=1)

    def rank():
        place = cut(layout, params, zf.rank())
        new, state = steps(tx, place, [cut(layout, grads, zf.rank())])
        return tree.full(new), state.total_skipped.item(), state.inner_state.count.item()

    for new, skipped, count in zf.simulate(ranks)(rank)():
        assert_same(new, params)
        assert (skipped, count) == (1, 0)


def test_a_custom_transformation_is_tried_without_a_collective():
    seen: list[tuple[int, bool]] = []

    def update(grads, state, params):
        seen.append((zf.world_size(), context.current() is not None))
        return tree.map(torch.sign, grads), state

    params = {"root": {"w": torch.randn(130)}}
    layout = make_layout(params, world=2)
    tx = optim.GradientTransformation(lambda params: optim.EmptyState(), update)

    def rank():
        token = context.push(context.Context())
        with zf.comm.ledger() as led:
            tx.update(cut(layout, params, zf.rank()), optim.EmptyState())
        context.pop(token)
        return led.calls

    assert zf.simulate(2)(rank)() == [0, 0]
    assert seen.count((2, True)) == 2
    # A trial, on one rank or on each, is two updates of two trees, in no world and no step.
    assert seen.count((1, False)) in (4, 8)
    assert len(seen) == 2 + seen.count((1, False))


def loss_fn(params: Tree, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    x, y = batch
    x = zf.scan(lambda p, h: h + torch.tanh(h @ p["w"] + p["b"]), params["layers"], x)
    return ((x @ params["head"] - y) ** 2).mean()


FROZEN = ("layers.1.w", "layers.1.b", "head")
ROWS = pairs(EVERY, range(4), ((), FROZEN), (False, True))


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("frozen", [(), FROZEN])
def test_every_optimizer_at_every_stage(name, frozen):
    generator = torch.Generator().manual_seed(0)

    def new(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    layers = zf.Layers([{"w": 0.1 * new(8, 8), "b": new(8)} for _ in range(3)])
    params, batch = {"layers": layers, "head": new(8, 1)}, (new(6, 8), new(6, 1))
    step = zf.train_step(loss_fn, EVERY[name])
    state = zf.TrainState.create(params, EVERY[name], trainable=lambda path: path not in frozen)

    def rank(step, data):
        placed = step.place(state)
        part = tuple(x.chunk(zf.world_size())[zf.rank()] for x in data)
        for _ in range(4):
            placed, _ = step(placed, part)
        return step.unplace(placed)

    expected = rank(step, batch)
    for stage, donated in (row[1::2] for row in ROWS if row[::2] == (name, frozen)):
        one = zf.shard(step, stage=stage)
        for found in zf.simulate(2)(rank)(zf.donate(one) if donated else one, batch):
            assert_same(found.params, expected.params, exact=False)
            assert_same(found.opt_state, expected.opt_state, exact=False)
