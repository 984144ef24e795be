"""The fused update: bits, donation, dtypes, derivatives."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.unit.optim_table import TABLE, assert_same, donating, make_grads, make_params, train
from zfunc import optim, tree
from zfunc.engine import context
from zfunc.errors import DonatedStateError
from zfunc.trees import memory


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_an_element_has_the_same_bits_in_any_tree(dtype, threads):
    sizes = [1, 63, 64, 65, 7, 129, 1000, 4096, 0, 31]
    whole = torch.randn(sum(sizes), dtype=torch.float64).to(dtype)
    grad = torch.randn(sum(sizes), dtype=torch.float64).to(dtype)
    tx = optim.adamw(0.01, weight_decay=0.1)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        results = []
        for order in (sizes, [sum(sizes)], [2] * (sum(sizes) // 2), sizes[::-1]):
            pieces = order if sum(order) == sum(sizes) else [*order, sum(sizes) - sum(order)]
            params = [x.clone() for x in whole.split(pieces)]
            state = tx.init(params)
            for _ in range(3):
                updates, state = tx.update(list(grad.split(pieces)), state, params)
                params = optim.apply_updates(params, updates)
            results.append([torch.cat(x) for x in (params, state.mu, state.nu)])
    finally:
        torch.set_num_threads(before)
    for a, b in itertools.combinations(results, 2):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("factor", [None, 0.37])
def test_clipping_inside_the_kernel_changes_no_bit(factor):
    params = {"big": torch.randn(3, 200_001), "small": torch.randn(5), "more": torch.randn(70_000)}
    grads = tree.map(torch.randn_like, params)
    norm = 1e9 if factor is None else factor * tree.global_norm(grads).item()
    clip, tx = optim.clip_by_global_norm(norm), optim.adamw(0.1)
    inside = optim.chain(clip, tx)
    fused, fused_state = inside.update(grads, inside.init(params), params)
    clipped, _ = clip.update(grads, clip.init(params))
    plain, plain_state = tx.update(clipped, tx.init(params), params)
    assert_same(optim.apply_updates(params, fused), optim.apply_updates(params, plain))
    assert_same(fused_state[1], plain_state)


def test_strided_and_shared_leaves():
    base = torch.randn(12, 10)
    shared = torch.randn(6)
    params = {"t": base.t(), "part": base[:, 3], "a": shared, "b": shared}
    alone = tree.map(lambda p: p.clone(memory_format=torch.contiguous_format), params)
    tx = optim.adamw(0.1)
    assert_same(train(tx, params), train(tx, alone))


def test_donation_of_leaves_that_share_a_storage():
    def make():
        store = torch.arange(200.0)
        return {"a": store[:70], "b": store[70:], "c": (tied := torch.ones(3)), "d": tied}

    tx = optim.adamw(0.1)
    assert_same(train(tx, make()), train(tx, make(), donate=True))


def test_donation_reuses_memory_and_spends_the_old_state():
    tx = optim.chain(optim.clip_by_global_norm(1e-3), optim.adamw(0.1))
    params = make_params()
    state = tx.init(params)
    held = {x.data_ptr() for x in tree.leaves((params, state[1].mu, state[1].nu))}
    new, after = donating(tx, make_grads(params, 1), state, params)
    assert {x.data_ptr() for x in tree.leaves((new, after[1].mu, after[1].nu))} == held
    with pytest.raises(DonatedStateError):
        optim.apply_updates(params, make_grads(new, 1))


def test_spent_parameters_take_no_other_updates():
    tx, params = optim.adamw(0.1), make_params()
    grads, state = make_grads(params, 1), tx.init(params)
    token = context.push(context.Context(donation=memory.Donation.of(tree.leaves(params))))
    try:
        updates, _ = tx.update(grads, state, params)
        halved = tree.map(lambda u: u * 0.5, updates)
        with pytest.raises(DonatedStateError):
            optim.apply_updates(params, halved)
    finally:
        context.pop(token)


def test_updates_can_be_read_like_the_tree_they_stand_for():
    tx, params = optim.adamw(0.1), make_params()
    updates, _ = tx.update(make_grads(params, 1), tx.init(params), params)
    assert isinstance(updates, optim.Moved)
    assert set(updates) == set(params)
    assert updates["w"].shape == (33, 7)
    assert len(updates) == 3
    assert sorted(updates.keys()) == ["b", "deep", "w"]
    assert tree.global_norm(updates) == tree.global_norm(tree.map(torch.clone, updates))
    single, _ = tx.update(torch.ones(2), tx.init(torch.zeros(2)), torch.zeros(2))
    torch.testing.assert_close(torch.add(single, 1.0), torch.full((2,), 0.9))


def test_updates_apply_to_other_parameters_too():
    tx, params = optim.adamw(0.1), make_params(torch.float64)
    other = tree.map(lambda p: p + 1, params)
    updates, _ = tx.update(make_grads(params, 1), tx.init(params), params)
    new, moved = optim.apply_updates(params, updates), optim.apply_updates(other, updates)
    for x, y in zip(tree.leaves(new), tree.leaves(moved), strict=True):
        torch.testing.assert_close(x + 1, y, rtol=1e-12, atol=1e-12)


def test_gradients_of_another_dtype():
    params = make_params()
    grads = tree.map(lambda p: torch.randn_like(p, dtype=torch.bfloat16), params)
    tx = optim.adamw(0.1)
    updates, _ = tx.update(grads, tx.init(params), params)
    expected, _ = tx.update(tree.map(torch.Tensor.float, grads), tx.init(params), params)
    assert_same(optim.apply_updates(params, updates), optim.apply_updates(params, expected))


def test_moments_of_another_dtype_take_the_additive_path():
    params = make_params(torch.bfloat16)
    tx = optim.adamw(0.1)
    state = tx.init(tree.map(torch.Tensor.float, params))
    updates, after = tx.update(make_grads(params, 1), state, params)
    assert not isinstance(updates, optim.Moved)
    assert {x.dtype for x in tree.leaves((after.mu, after.nu))} == {torch.float32}
    assert {x.dtype for x in tree.leaves(optim.apply_updates(params, updates))} == {torch.bfloat16}


@pytest.mark.parametrize("tx", [TABLE["adamw"], TABLE["lion"], TABLE["lamb"], TABLE["clipped"]])
def test_an_update_can_be_differentiated(tx):
    params = {"b": torch.ones(3), "w": torch.ones(2, 2), "deep": torch.ones(2)}

    def after(scale):
        grads = tree.map(lambda p: p * scale, params)
        updates, state = tx.update(grads, tx.init(params), params)
        updates, _ = tx.update(grads, state, params)
        return sum(x.sum() for x in tree.leaves(optim.apply_updates(params, updates)))

    scale = torch.tensor(0.3, requires_grad=True)
    torch.autograd.grad(after(scale) + scale, scale)
    torch.func.grad(lambda s: after(s) + s)(torch.tensor(0.3))


def test_the_learning_rate_can_be_differentiated():
    params, grads = torch.ones(3, dtype=torch.float64), torch.tensor([1.0, 2.0, 3.0]).double()
    rate = torch.tensor(0.1, dtype=torch.float64, requires_grad=True)
    tx = optim.adam(rate)
    updates, _ = tx.update(grads, tx.init(params), params)
    (slope,) = torch.autograd.grad(optim.apply_updates(params, updates).sum(), rate)
    assert slope.item() == pytest.approx(-3.0, rel=1e-6)
