"""Gradients that are missing, and second moments that are frozen in 16 bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zfunc as zf
from zfunc import optim, tree
from zfunc.optim.frozen import growth

W, B = torch.tensor([3.0, -4.0]), torch.tensor([1.0, 2.0, 2.0])


def test_lamb_goes_on_without_a_leaf_as_if_it_were_alone():
    """And a leaf that comes late has the mean of its own ratios only."""
    tx, alone = optim.lamb(0.1), optim.lamb(0.1)
    state, own = tx.init({"b": B, "w": W}), alone.init({"w": W})
    grads = torch.tensor([1.0, 2.0])
    updates, state = tx.update({"b": None, "w": grads}, state, {"b": B, "w": W})
    expected, own = alone.update({"w": grads}, own, {"w": W})
    assert updates["b"] is None
    assert torch.equal(updates["w"], expected["w"])
    assert torch.equal(state.ratio[0, 1:], own.ratio[0])
    assert float(state.ratio[0, 0]) == 0


def test_lamb_says_which_trees_differ():
    tx = optim.lamb(0.1)
    state = tx.init({"b": B, "w": W})._replace(ratio=torch.zeros(1, 5))
    with pytest.raises(ValueError, match="keeps 5 trust ratios"):
        tx.update({"b": B, "w": W}, state, {"b": B, "w": W})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("frozen_at", [20, 150, 900])
def test_frozen_second_moments_grow_with_their_correction(dtype: torch.dtype, frozen_at: int):
    """In 16 bits a fraction of a per cent is rounded away: off up to 50-fold."""
    decay = 0.999
    true = torch.linspace(0.5, 1.0, 97)
    start = (true * (1 - decay**frozen_at)).to(dtype)
    v = start.clone()
    for t in range(frozen_at + 1, 4000):
        v = (v.float() * growth(decay, torch.tensor(t), dtype)).to(dtype)
    corrected = v.float() / (1 - decay**3999)
    worst = float((corrected / true - 1).abs().max())
    assert worst < (1e-4 if dtype == torch.float32 else 0.1)
    by_count = [growth(decay, torch.tensor(t), dtype) for t in (2, 500, 501, 502)]
    assert by_count[0] > 1.9


RULES = {
    "sgd": lambda: optim.sgd(0.1, momentum=0.9),
    "nesterov": lambda: optim.sgd(0.1, momentum=0.9, nesterov=True),
    "adamw": lambda: optim.adamw(0.1, weight_decay=0.1),
    "lamb": lambda: optim.lamb(0.1),
    "lion": lambda: optim.lion(0.1),
    "ema": lambda: optim.ema(0.9),
    "zero_one_adam": lambda: optim.zero_one_adam(0.1),
    "chain": lambda: optim.chain(optim.clip_by_global_norm(1.0), optim.adam(0.1)),
    "masked": lambda: optim.masked(optim.adam(0.1), lambda path: path == "b"),
    "skip": lambda: optim.skip_nonfinite(optim.adam(0.1)),
    "by label": lambda: optim.multi_transform(
        {"x": optim.lamb(0.1), "y": optim.adam(0.1)}, {"w": "x", "b": "y"}
    ),
}


@pytest.mark.parametrize("donated", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", RULES)
def test_a_leaf_rests_where_its_gradient_is_none(name: str, dtype: torch.dtype, donated: bool):
    tx, params = RULES[name](), {"b": B.to(dtype), "w": W.to(dtype)}

    def step(state: Any, grads: Any) -> Any:
        updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
        return {"params": optim.apply_updates(state["params"], updates), "opt_state": opt_state}

    run = zf.donate(step) if donated else step
    state = {"params": tree.map(torch.clone, params), "opt_state": tx.init(params)}
    for i in range(4):
        before = tree.map(torch.clone, state)
        rests = "b" if i == 1 else "w" if i == 2 else ""
        state = run(state, {k: None if k == rests else p * (i + 1) for k, p in params.items()})
        after, was = tree.flatten_names(state), tree.flatten_names(before)
        assert after.keys() == was.keys()
        assert all(x is not None for x in after.values())
        for path in after if rests else ():
            if path.endswith(f".{rests}"):
                assert torch.equal(after[path], was[path]), path
    assert all(not torch.equal(state["params"][k], params[k]) for k in params)
