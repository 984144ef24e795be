"""Every gradient transformation in one table, and how they are trained and compared."""

from __future__ import annotations

import optree
import pytest
import torch

from zfunc import optim, tree
from zfunc.engine import context
from zfunc.trees import memory

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
    "rmsprop": optim.rmsprop(0.01, centered=True, eps=1e-3, momentum=0.9, nesterov=True),
    "adagrad": optim.chain(optim.clip(1.0), optim.adagrad(0.1)),
    "nadamw": optim.nadamw(SCHEDULE, weight_decay=0.1),
    "radam": optim.radam(0.01, b2=0.9),
    "lion_scaled": optim.chain(optim.scale_by_lion(), optim.scale(-0.01)),
    "lookahead": optim.lookahead(optim.adamw(0.01), 2, 0.5),
    "every_second": optim.MultiSteps(optim.adamw(0.01), lambda update: 1 + update % 2),
    "injected": optim.inject_hyperparams(optim.adamw)(SCHEDULE, weight_decay=0.1),
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
    donation = memory.Donation.of(tree.leaves((params, state)))
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
