"""Against torch.optim, and against formulas in Python's own floats."""

from __future__ import annotations

import math

import pytest
import torch

from tests.unit.optim_table import make_grads, make_params, relative
from zfunc import optim, tree
from zfunc.layout.cutting import make_layout
from zfunc.layout.sharded import cut

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
