"""Chains, masks, groups, clips, skipped steps and averages."""

from __future__ import annotations

import math

import pytest
import torch

from tests.unit.optim_table import assert_same, donating, make_grads, make_params, train
from zfunc import optim, tree
from zfunc.errors import CompositionError, NonFiniteError, PlacementError


def test_a_chain_of_adam_and_more_sees_additive_updates():
    params = make_params(torch.float64)
    tx = optim.chain(optim.adam(1.0), optim.add_decayed_weights(-0.5), optim.scale_by_schedule(0.1))
    adam = optim.adam(1.0)
    updates, _ = tx.update(make_grads(params, 1), tx.init(params), params)
    raw, _ = adam.update(make_grads(params, 1), adam.init(params), params)
    expected = tree.map(lambda u, p: 0.1 * (u - 0.5 * p), raw, params)
    for x, y in zip(tree.leaves(updates), tree.leaves(expected), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-13)
    assert_same(train(tx, params), train(tx, make_params(torch.float64), donate=True))


def test_a_chain_with_the_state_of_another():
    tx = optim.chain(optim.sgd(0.1), optim.sgd(0.1))
    with pytest.raises(CompositionError, match="2 transformations got 1"):
        tx.update(torch.ones(1), (tx.init(torch.ones(1))[0],), None)


def test_masked_passes_the_others_through():
    params = make_params()
    tx = optim.masked(optim.sgd(1.0, momentum=0.9), {"b": True, "deep": False, "w": False})
    grads = make_grads(params, 1)
    updates, state = tx.update(grads, tx.init(params), params)
    assert torch.equal(updates["b"], -grads["b"])
    assert updates["w"] is grads["w"]
    assert len(tree.leaves(state)) == 2  # the count and one moment


def test_multi_transform_equals_its_parts():
    params = make_params()
    parts = {"x": optim.adamw(0.01), "y": optim.adamw(0.1, weight_decay=0.3)}
    labels = {"b": "x", "deep": "y", "w": "x"}
    new, state = train(optim.multi_transform(parts, labels), params)
    for label, tx in parts.items():
        alone, _ = train(tx, params)
        for name in labels:
            if labels[name] == label:
                assert_same(new[name], alone[name])
    assert set(state.inner_states) == {"x", "y"}


def test_multi_transform_behind_an_active_clip_equals_its_parts():
    """What clips hands on lazily is still read by its leaves' own paths."""
    parts = {"x": optim.sgd(1.0), "y": optim.sgd(0.5)}
    tx = optim.chain(
        optim.clip_by_global_norm(1.0), optim.multi_transform(parts, {"a": "x", "b": "y"})
    )
    grads = {"a": torch.tensor([3.0]), "b": torch.tensor([4.0])}
    updates, _ = tx.update(grads, tx.init(grads), grads)
    torch.testing.assert_close(updates, {"a": torch.tensor([-0.6]), "b": torch.tensor([-0.4])})


def test_multi_transform_names_a_leaf_without_a_transformation():
    tx = optim.multi_transform({"x": optim.sgd(1.0)}, lambda path: "z" if "deep" in path else "x")
    with pytest.raises(CompositionError, match=r"deep\.0\.\w.*'z'.*\['x'\]"):
        tx.init(make_params())


def test_a_mask_that_says_nothing_about_a_leaf():
    tx = optim.adamw(0.1, mask={"w": True})
    params = make_params()
    with pytest.raises(PlacementError, match="'b'"):
        tx.update(make_grads(params, 1), tx.init(params), params)


def test_trees_that_do_not_fit():
    tx, params = optim.adamw(0.1), make_params()
    grads = make_grads(params, 1)
    del grads["w"]
    with pytest.raises(PlacementError, match="w"):
        tx.update(grads, tx.init(params), params)
    with pytest.raises(PlacementError, match=r"\(2,\).*\(3,\)"):
        optim.apply_updates(torch.zeros(3), torch.zeros(2))


@pytest.mark.parametrize(
    "tx",
    [
        optim.adamw(0.1),
        optim.lamb(0.1),
        optim.lion(0.1, weight_decay=0.1),
        optim.add_decayed_weights(0.1),
    ],
)
def test_decay_without_parameters(tx):
    with pytest.raises(ValueError, match="needs the parameters"):
        tx.update(torch.ones(2), tx.init(torch.ones(2)))


# Clipping, skipping, averaging


def test_clipping():
    grads = {"a": torch.tensor([3.0]), "b": torch.tensor([[4.0]]), "c": None}
    within, _ = optim.clip_by_global_norm(5.0).update(grads, optim.EmptyState())
    assert within is grads
    clipped, _ = optim.clip_by_global_norm(2.5).update(grads, optim.EmptyState())
    assert clipped["a"].item() == 1.5
    assert clipped["c"] is None
    assert tree.global_norm(clipped).item() == pytest.approx(2.5)
    bad, _ = optim.clip_by_global_norm(1.0).update(
        {"a": torch.tensor([math.nan]), "b": torch.ones(2)}, optim.EmptyState()
    )
    assert bad["b"].isnan().all()
    with pytest.raises(ValueError, match="positive"):
        optim.clip_by_global_norm(0.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("donate", [False, True])
def test_a_nonfinite_step_changes_nothing(bad, donate):
    tx, params = optim.skip_nonfinite(optim.adamw(0.1)), make_params()
    params["b"][0] = -0.0
    kept, state = tree.map(torch.clone, params), tx.init(params)
    grads = make_grads(params, 1)
    grads["deep"][1]["s"].fill_(bad)
    if donate:
        new, after = donating(tx, grads, state, params)
    else:
        updates, after = tx.update(grads, state, params)
        new = optim.apply_updates(params, updates)
    assert_same(new, kept)
    assert torch.signbit(new["b"][0])
    assert (after.total_skipped.item(), after.consecutive.item()) == (1, 1)
    assert after.inner_state.count.item() == 0
    _, after = tx.update(make_grads(new, 2), after, new)
    assert (after.total_skipped.item(), after.consecutive.item()) == (1, 0)


def test_large_but_finite_gradients_are_not_skipped():
    tx = optim.skip_nonfinite(optim.sgd(1.0))
    grads = torch.full((4,), 1e30)
    _, state = tx.update(grads, tx.init(grads))
    assert tree.global_norm(grads).isinf()
    assert state.total_skipped.item() == 0


def test_too_many_nonfinite_steps_name_the_leaf():
    tx, params = optim.skip_nonfinite(optim.sgd(0.1), max_consecutive=2), make_params()
    grads, state = make_grads(params, 1), tx.init(params)
    grads["deep"][0]["w"][1, 2] = math.nan
    for _ in range(2):
        _, state = tx.update(grads, state, params)
    with pytest.raises(NonFiniteError, match=r"deep\.0\.w"):
        tx.update(grads, state, params)


def test_ema_of_parameters():
    tx = optim.ema(0.8)
    values = [torch.randn(3, dtype=torch.float64) for _ in range(5)]
    state, mean = tx.init(values[0]), torch.zeros(3, dtype=torch.float64)
    for count, x in enumerate(values, start=1):
        mean = 0.8 * mean + 0.2 * x
        average, state = tx.update(x, state)
        torch.testing.assert_close(average, mean / (1 - 0.8**count))
    raw = optim.ema(0.8, debias=False)
    average, _ = raw.update(values[0], raw.init(values[0]))
    torch.testing.assert_close(average, 0.2 * values[0])


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 3e-6), (torch.bfloat16, 2e-4)])
def test_the_norm_of_a_large_leaf_keeps_its_digits(dtype, bound):
    leaf = torch.randn(12_000_000, generator=torch.Generator().manual_seed(0)).to(dtype)
    exact = math.sqrt(sum(float(x.double().square().sum()) for x in leaf.split(1 << 20)))
    assert tree.global_norm({"w": leaf, "none": torch.zeros(0)}).item() == pytest.approx(
        exact, rel=bound
    )
