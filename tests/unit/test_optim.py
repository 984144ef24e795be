"""Optimizers: one conformance table for all, and each against its reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.unit.optim_table import ALL, TABLE, assert_same, make_grads, make_params, relative, train
from zfunc import optim, tree
from zfunc.layout.cutting import make_layout
from zfunc.layout.sharded import Sharded, cut


@ALL
def test_the_arguments_are_left_alone_and_the_result_is_repeatable(tx):
    params = make_params()
    state, grads = tx.init(params), make_grads(params, 1)
    before = tree.map(torch.clone, (params, state, grads))
    first = tx.update(grads, state, params)
    second = tx.update(grads, state, params)
    moved = optim.apply_updates(params, first[0])
    assert_same((params, state, grads), before)
    assert_same(first[1], second[1])
    assert_same(moved, optim.apply_updates(params, second[0]))


@ALL
def test_states_keep_their_structure_and_hold_only_tensors(tx):
    params = make_params()
    state = tx.init(params)
    _, after = tx.update(make_grads(params, 1), state, params)
    kinds = [
        [(type(x), x.shape, x.dtype, x.device) for x in tree.leaves(one)] for one in (state, after)
    ]
    assert kinds[0] == kinds[1]
    assert all(isinstance(x, torch.Tensor) for x in tree.leaves(state))
    assert tree.paths(state) == tree.paths(after)


@ALL
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_dtypes_are_kept(tx, dtype):
    params, state = train(tx, make_params(dtype))
    if isinstance(state, optim.LambState):  # whose means of ratios are float32, a number a leaf
        state = state._replace(ratio=None)
    if isinstance(state, optim.InjectHyperparamsState):  # whose numbers are float64
        state = state._replace(hyperparams={})
    floats = [x for x in tree.leaves((params, state)) if x.is_floating_point()]
    assert {x.dtype for x in floats} == {dtype}
    assert all(x.isfinite().all() for x in floats)


@ALL
def test_without_a_gradient_a_parameter_is_passed_on_itself(tx):
    params = make_params()
    trained = tree.select(params, lambda path: path != "w")
    grads = tree.select(make_grads(params, 1), lambda path: path != "w")
    updates, state = tx.update(grads, tx.init(trained), params)
    new = optim.apply_updates(params, updates)
    assert new["w"] is params["w"]
    assert not torch.equal(new["b"], params["b"])
    assert all(x is None or x.shape != (33, 7) for x in tree.leaves(state))


@ALL
def test_looking_at_the_updates_tells_the_truth(tx):
    params = make_params(torch.float64)
    state, _ = tx.init(params), None
    for seed in range(3):
        updates, after = tx.update(make_grads(params, seed), state, params)
        seen, _ = tx.additive(make_grads(params, seed), state, params)
        new = optim.apply_updates(params, updates)
        for name, x in tree.flatten_names(tree.map(lambda u: u * 1, updates)).items():
            moved = tree.flatten_names(new)[name] - tree.flatten_names(params)[name]
            assert relative(x, tree.flatten_names(tree.map(lambda u: u * 1, seen))[name]) < 1e-12
            assert relative(x, moved) < 1e-9, name
        params, state = new, after


@ALL
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_donated_memory_changes_no_bit(tx, dtype):
    pure = train(tx, make_params(dtype))
    donated = train(tx, make_params(dtype), donate=True)
    assert_same(pure, donated)


@ALL
@pytest.mark.parametrize("unit_bytes", [1 << 20, 300])
def test_a_placed_tree_changes_no_bit(tx, unit_bytes):
    params = make_params()
    layout = make_layout(params, unit_bytes=unit_bytes)
    plain = train(tx, params)
    placed = train(tx, params, place=lambda x: cut(layout, x, 0))
    if "lamb" in [name for name, one in TABLE.items() if one is tx] or tx is TABLE["clipped"]:
        for x, y in zip(tree.leaves(plain[0]), tree.leaves(tree.full(placed[0])), strict=True):
            torch.testing.assert_close(x, y)  # a norm is summed in another order
    else:
        assert_same(plain, placed)


@ALL
def test_placed_gradients_move_plain_parameters(tx):
    params = make_params()
    layout = make_layout(params)
    updates, _ = tx.update(
        cut(layout, make_grads(params, 1), 0), tx.init(cut(layout, params, 0)), params
    )
    new = optim.apply_updates(params, updates)
    plain, _ = tx.update(make_grads(params, 1), tx.init(params), params)
    expected = optim.apply_updates(params, plain)
    assert not any(isinstance(x, Sharded) for x in tree.leaves(new))
    for x, y in zip(tree.leaves(new), tree.leaves(expected), strict=True):
        torch.testing.assert_close(x, y)


def test_a_transformation_is_a_pair():
    init, update = optim.sgd(0.5)
    params = torch.ones(2)
    updates, _ = update(torch.ones(2), init(params), params)
    assert updates.tolist() == [-0.5, -0.5]


MODELS: dict[str, Any] = {
    "adamw": lambda: optim.adamw(0.1, weight_decay=0.1),
    "scheduled": lambda: optim.adam(optim.warmup_cosine(0.1, 2, 10)),
    "lamb": lambda: optim.lamb(0.1),
    "lion": lambda: optim.lion(0.1),
    "sgd": lambda: optim.sgd(0.1, momentum=0.9, nesterov=True),
    "ema": lambda: optim.ema(0.9),
    "onebit_adam": lambda: optim.onebit_adam(0.1),
    "zero_one_adam": lambda: optim.zero_one_adam(0.1),
    "clipped": lambda: optim.chain(optim.clip_by_global_norm(0.5), optim.adam(0.1)),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_stack_of_models_steps_like_each_of_them(name: str) -> None:
    """Counts are tensors under vmap: ``1 - b2**n`` in float32 would be off by 1e-5."""
    tx, n = MODELS[name](), 3
    generator = torch.Generator().manual_seed(0)

    def drawn() -> Any:
        return {"w": torch.randn(n, 5, 3, generator=generator, dtype=torch.float64)}

    params, grads = drawn(), [drawn() for _ in range(5)]
    stacked, alone = params, []
    state = tree.map(lambda x: torch.stack([x] * n), tx.init({"w": params["w"][0]}))
    for g in grads:
        updates, state = torch.func.vmap(tx.update)(g, state, stacked)
        stacked = tree.map(torch.add, stacked, updates)
    for k in range(n):
        one, own = {"w": params["w"][k]}, tx.init({"w": params["w"][k]})
        for g in grads:
            updates, own = tx.update({"w": g["w"][k]}, own, one)
            one = optim.apply_updates(one, updates)
        alone.append(one["w"])
    torch.testing.assert_close(stacked["w"], torch.stack(alone), rtol=1e-12, atol=1e-12)
