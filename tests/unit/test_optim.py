"""Optimizers: one conformance table for all, and each against its reference."""

from __future__ import annotations

import itertools
import math

import optree
import pytest
import torch

from zfunc import context, optim, tree
from zfunc.errors import CompositionError, DonatedStateError, NonFiniteError, PlacementError
from zfunc.placed.cutting import make_layout
from zfunc.placed.sharded import Sharded, cut

SCHEDULE = optim.warmup_cosine(0.05, warmup=3, steps=12, start=0.01)
TABLE = {
    "sgd": optim.sgd(0.1),
    "momentum": optim.sgd(0.1, momentum=0.9),
    "nesterov": optim.sgd(SCHEDULE, momentum=0.9, nesterov=True),
    "adam": optim.adam(0.01),
    "adam_tensor_lr": optim.adam(torch.tensor(0.01)),
    "adamw": optim.adamw(SCHEDULE, weight_decay=0.1),
    "adamw_masked_decay": optim.adamw(0.01, weight_decay=0.1, mask=lambda path: path != "b"),
    "lamb": optim.lamb(0.01, weight_decay=0.1, mask={"w": True, "b": False, "deep": True}),
    "lion": optim.lion(0.01, weight_decay=0.1),
    "clipped": optim.chain(optim.clip_by_global_norm(0.5), optim.adamw(0.01)),
    "scaled_after": optim.chain(optim.adamw(0.01), optim.scale_by_schedule(0.5)),
    "masked": optim.masked(optim.adamw(0.01), lambda path: path.startswith("deep")),
    "multi": optim.multi_transform(
        {"x": optim.adamw(0.01), "y": optim.sgd(0.1)}, {"w": "x", "b": "y", "deep": "x"}
    ),
    "skipping": optim.skip_nonfinite(optim.adamw(0.01), max_consecutive=3),
    "smoothed": optim.chain(optim.sgd(0.1), optim.ema(0.9)),
    "decayed": optim.chain(optim.add_decayed_weights(0.1), optim.sgd(0.1)),
    "none": optim.chain(),
}
ALL = pytest.mark.parametrize("tx", TABLE.values(), ids=TABLE.keys())


def make_params(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)

    def new(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    deep = tree.Layers([{"w": new(8, 16), "s": new()} for _ in range(2)])
    return {"b": new(5), "deep": deep, "w": new(33, 7)}


def make_grads(params, seed):
    generator = torch.Generator().manual_seed(seed)
    return tree.map(
        lambda p: torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype), params
    )


def train(tx, params, steps=4, place=lambda plain: plain, donate=False):
    """The parameters and the state after some steps on random gradients."""
    plain, params = params, place(tree.map(lambda p: p, params))
    if donate:
        plain = tree.map(torch.clone, plain)
    state = tx.init(params)
    for seed in range(steps):
        grads = place(make_grads(plain, seed))
        if donate:
            params, state = donating(tx, grads, state, params)
        else:
            updates, state = tx.update(grads, state, params)
            params = optim.apply_updates(params, updates)
    return params, state


def donating(tx, grads, state, params):
    donation = context.Donation.of(tree.leaves((params, state)))
    token = context.push(context.Context(donation=donation))
    try:
        updates, state = tx.update(grads, state, params)
        return optim.apply_updates(params, updates), state
    finally:
        context.pop(token)


def assert_same(a, b):
    a, b = tree.full(a), tree.full(b)
    spec_a, spec_b = (optree.tree_structure(x, namespace=tree.NAMESPACE) for x in (a, b))
    assert spec_a == spec_b
    for name, x in tree.flatten_names(a).items():
        y = tree.flatten_names(b)[name]
        assert x.dtype == y.dtype
        assert torch.equal(x, y), name


def relative(a, b):
    return ((a - b).abs().max() / b.abs().max().clamp_min(1e-30)).item()


# Conformance


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


# Against torch.optim


TORCH = {
    "sgd": (optim.sgd(0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
    "momentum": (optim.sgd(0.1, 0.9), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
    "nesterov": (
        optim.sgd(0.1, momentum=0.9, nesterov=True),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    ),
    "adam": (optim.adam(0.01), lambda p: torch.optim.Adam(p, lr=0.01)),
    "adam_betas": (
        optim.adam(0.01, b1=0.8, b2=0.99, eps=1e-6),
        lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.8, 0.99), eps=1e-6),
    ),
    "adamw": (
        optim.adamw(0.01, weight_decay=0.3),
        lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.3),
    ),
}


@pytest.mark.parametrize(("ours", "theirs"), TORCH.values(), ids=TORCH.keys())
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
def test_against_torch(ours, theirs, fused, dtype, bound):
    params = make_params(dtype)
    weights = [torch.nn.Parameter(x.clone()) for x in tree.leaves(params)]
    optimizer, state = theirs(weights), ours.init(params)
    for seed in range(20):
        grads = make_grads(params, seed)
        for weight, grad in zip(weights, tree.leaves(grads), strict=True):
            weight.grad = grad.clone()
        optimizer.step()
        updates, state = (ours.update if fused else ours.additive)(grads, state, params)
        params = optim.apply_updates(params, updates)
    for x, y in zip(tree.leaves(params), weights, strict=True):
        assert relative(x, y.detach()) < bound


def test_adamw_by_groups_against_torch():
    params = make_params(torch.float64)
    tx = optim.adamw(0.01, weight_decay=0.3, mask=tree.map(lambda p: p.ndim > 1, params))
    weights = [torch.nn.Parameter(x.clone()) for x in tree.leaves(params)]
    groups = [
        {"params": [w for w in weights if w.ndim > 1], "weight_decay": 0.3},
        {"params": [w for w in weights if w.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer, state = torch.optim.AdamW(groups, lr=0.01), tx.init(params)
    for seed in range(10):
        grads = make_grads(params, seed)
        for weight, grad in zip(weights, tree.leaves(grads), strict=True):
            weight.grad = grad
        optimizer.step()
        updates, state = tx.update(grads, state, params)
        params = optim.apply_updates(params, updates)
    for x, y in zip(tree.leaves(params), weights, strict=True):
        assert relative(x, y.detach()) < 1e-12


# Against a reference in Python's own floats


def reference_lamb(p, grads, lr, b1, b2, eps, weight_decay):
    m, v = [0.0] * len(p), [0.0] * len(p)
    for t, g in enumerate(grads, start=1):
        m = [b1 * a + (1 - b1) * x for a, x in zip(m, g, strict=True)]
        v = [b2 * a + (1 - b2) * x * x for a, x in zip(v, g, strict=True)]
        hats = [(a / (1 - b1**t), c / (1 - b2**t)) for a, c in zip(m, v, strict=True)]
        u = [a / (math.sqrt(c) + eps) + weight_decay * x for (a, c), x in zip(hats, p, strict=True)]
        norm_p, norm_u = math.hypot(*p), math.hypot(*u)
        ratio = norm_p / norm_u if norm_p > 0 and norm_u > 0 else 1.0
        p = [x - lr * ratio * y for x, y in zip(p, u, strict=True)]
    return p


def reference_lion(p, grads, lr, b1, b2, weight_decay):
    m = [0.0] * len(p)
    for g in grads:
        c = [b1 * a + (1 - b1) * x for a, x in zip(m, g, strict=True)]
        p = [x - lr * (math.copysign(1, y) + weight_decay * x) for x, y in zip(p, c, strict=True)]
        m = [b2 * a + (1 - b2) * x for a, x in zip(m, g, strict=True)]
    return p


REFERENCES = {
    "lamb": (
        optim.lamb(0.02, weight_decay=0.1),
        lambda p, g: reference_lamb(p, g, 0.02, 0.9, 0.999, 1e-6, 0.1),
    ),
    "lion": (
        optim.lion(0.02, weight_decay=0.1),
        lambda p, g: reference_lion(p, g, 0.02, 0.9, 0.99, 0.1),
    ),
}


@pytest.mark.parametrize(("tx", "reference"), REFERENCES.values(), ids=REFERENCES.keys())
@pytest.mark.parametrize("zero", [False, True])
def test_against_a_scalar_reference(tx, reference, zero):
    params = {"a": torch.randn(7, dtype=torch.float64), "b": torch.randn(2, 3, dtype=torch.float64)}
    if zero:
        params["a"].zero_()
    layout = make_layout(params)
    grads = [make_grads(params, seed) for seed in range(15)]
    expected = {
        name: reference(x.flatten().tolist(), [g[name].flatten().tolist() for g in grads])
        for name, x in params.items()
    }
    for place in (lambda x: x, lambda x: cut(layout, x, 0)):
        new, state = place(params), tx.init(place(params))
        for g in grads:
            updates, state = tx.update(place(g), state, new)
            new = optim.apply_updates(new, updates)
        for name, x in tree.full(new).items():
            y = torch.tensor(expected[name], dtype=torch.float64)
            torch.testing.assert_close(x.flatten(), y, rtol=1e-12, atol=1e-13)


def test_lamb_does_not_divide_by_zero():
    params = torch.ones(3)
    updates, _ = optim.lamb(0.1).update(torch.zeros(3), optim.lamb(0.1).init(params), params)
    assert updates.tolist() == [0.0, 0.0, 0.0]


# The fused kernel


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
    token = context.push(context.Context(donation=context.Donation.of(tree.leaves(params))))
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


# Combining


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


# Transformations of the user's own


def custom(f, **options):
    return optim.GradientTransformation(
        lambda params: optim.EmptyState(), lambda grads, state, params: (f(grads), state), **options
    )


def unit_norm(grads):
    return tree.map(lambda g: g / g.norm(), grads)


def unit_norm_right(grads):
    return tree.map(lambda g, norm: g / norm, grads, tree.leaf_norms(grads))


def place(plain):
    return cut(make_layout(plain), plain, 0)


@pytest.mark.parametrize(
    "f",
    [
        unit_norm,
        lambda grads: tree.map(lambda g: g.t() if g.ndim == 2 else g * 2, grads),
        lambda grads: tree.map(lambda g: g.flip(0), grads),
    ],
)
def test_what_is_not_elementwise_is_refused_on_placed_trees(f):
    tx, params = custom(f), make_params()
    with pytest.raises(CompositionError, match=r"map_leaves.*tree\.whole"):
        tx.update(place(params), optim.EmptyState(), place(params))


@pytest.mark.parametrize(
    "f",
    [
        unit_norm_right,
        lambda grads: tree.map(torch.sign, grads),
        lambda grads: tree.whole(lambda g: g / g.norm(), grads),
        lambda grads: tree.map_leaves(lambda path, g: g * len(path), grads),
    ],
)
def test_what_is_right_on_placed_trees_is_tried_once(f):
    calls = []
    tx, params = custom(lambda grads: calls.append(0) or f(grads)), make_params()
    found, _ = tx.update(place(params), optim.EmptyState(), place(params))
    expected, _ = tx.update(params, optim.EmptyState(), params)
    for x, y in zip(tree.leaves(tree.full(found)), tree.leaves(expected), strict=True):
        torch.testing.assert_close(x, y)
    before = len(calls)
    tx.update(place(params), optim.EmptyState(), place(params))
    assert len(calls) == before + 1


def test_a_custom_transformation_inside_a_chain_is_tried_too():
    tx, params = optim.chain(custom(unit_norm), optim.sgd(0.1)), make_params()
    state = tx.init(place(params))
    with pytest.raises(CompositionError, match="not elementwise"):
        tx.update(place(params), state, place(params))
    tx.update(params, state, params)


def test_what_wants_a_tree_of_its_own_must_vouch_for_itself():
    def only_w(grads):
        return {**tree.map(lambda g: g, grads), "w": grads["w"] * 2}

    params = {"w": torch.ones(70)}
    with pytest.raises(CompositionError, match="checked=True"):
        custom(only_w).update(place(params), optim.EmptyState())
    custom(lambda grads: grads, checked=True).update(place(params), optim.EmptyState())
