"""AdamW with moments of 8 bits: how far from AdamW it is, and that no world changes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zfunc as zf
from zfunc import optim, tree
from zfunc.optim.adam_8bit import decoded, encoded

Tree = Any
TX = optim.adamw(0.01, weight_decay=0.1, mask=lambda path: path != "b", moments=8)


def params() -> Tree:
    torch.manual_seed(0)
    layers = zf.Layers([{"w": torch.randn(33, 128), "s": torch.randn(64, 65)} for _ in range(2)])
    return {"b": torch.randn(5), "head": torch.randn(4096), "layers": layers}


START = params()


def loss_fn(params: Tree, x: torch.Tensor) -> torch.Tensor:
    """With gradients that do not depend on how ranks add up: powers of two."""
    return sum((p.sum() * 2.0 ** -(i % 3)) for i, p in enumerate(tree.leaves(params))) * x


def trained(stage: int, steps: int = 5) -> tuple[Tree, Tree]:
    step = zf.shard(zf.train_step(loss_fn, TX), stage=stage)
    state = step.place(zf.TrainState.create(START, TX))
    for i in range(steps):
        state, _ = step(state, torch.tensor(1.0 - 0.25 * i))
    full = step.unplace(state)
    return full.params, full.opt_state


def same(a: Tree, b: Tree) -> bool:
    pairs = zip(tree.leaves(a), tree.leaves(b), strict=True)
    return all(torch.equal(x, y) for x, y in pairs)


@pytest.mark.parametrize("stage", range(4))
def test_no_world_changes_a_bit(stage: int) -> None:
    one, three = zf.simulate(1)(trained)(0)[0], zf.simulate(4)(trained)(stage)
    for found in three:
        assert same(found[0], one[0]) and same(found[1], one[1])


def test_a_checkpoint_goes_on_in_another_world(tmp_path: Path) -> None:
    step = zf.shard(zf.train_step(loss_fn, TX), stage=3)

    def part(first: int, last: int) -> Tree:
        state = step.place(zf.TrainState.create(START, TX))
        if first:
            state = zf.restore(tmp_path, like=state)
        for i in range(first, last):
            state, _ = step(state, torch.tensor(1.0 - 0.25 * i))
        zf.save(tmp_path, state, step=last)
        return tree.full(state.params)

    zf.simulate(4)(part)(0, 3)
    assert same(zf.simulate(2)(part)(3, 5)[0], zf.simulate(1)(trained)(0)[0][0])


def test_a_rank_without_groups_saves_and_labels_leave_some_out(tmp_path: Path) -> None:
    start = {"a": torch.ones(64, 64), "z": torch.ones(4095), "o": torch.ones(2)}
    tx = optim.multi_transform(
        {"adam": optim.adamw(0.01, moments=8), "sgd": optim.sgd(0.01)},
        lambda path: "sgd" if path == "o" else "adam",
    )
    step = zf.shard(zf.train_step(loss_fn, tx), stage=3)

    def saved() -> Tree:
        state, _ = step(step.place(zf.TrainState.create(start, tx)), torch.tensor(1.0))
        zf.save(tmp_path, state)
        return step.unplace(zf.restore(tmp_path, state)).params

    one, many = zf.simulate(1)(saved)()[0], zf.simulate(2)(saved)()
    assert all(same(found, one) for found in many)


def test_split_leaves_keep_their_groups() -> None:
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64))
    model = zf.functionalize(block)
    full, x = tree.map(torch.clone, model.params), torch.randn(4, 64)
    tx = optim.adamw(1e-3, moments=8)

    def found(ranks: int, stage: int) -> tuple[Any, Any]:
        def body() -> tuple[Any, Any]:
            step = zf.train_step(lambda p, x: model.apply(p, x).square().mean(), tx)
            step = zf.shard(step, stage=stage)
            step = zf.split(step, model, tensor=ranks) if ranks > 1 else step
            state = step.place(zf.TrainState.create(full, tx))
            for _ in range(2):
                state, _ = step(state, x)
            whole = step.unplace(state)
            return whole.params, whole.opt_state

        return zf.simulate(ranks)(body)()[0]

    (p_one, s_one), (p_two, s_two) = found(1, 0), found(2, 3)
    for name, x_one in tree.flatten_names(p_one).items():
        torch.testing.assert_close(tree.flatten_names(p_two)[name], x_one, rtol=1e-4, atol=1e-4)
    codes = [[x for x in tree.leaves(s) if x.dtype == torch.bfloat16] for s in (s_one, s_two)]
    assert [x.shape for x in codes[0]] == [x.shape for x in codes[1]] and len(codes[0]) == 2
    for a, b in zip(*codes, strict=True):
        for one, two in zip(decoded(a), decoded(b), strict=True):
            close = (one - two).abs() <= 0.1 * one.abs() + 1e-7
            assert close.float().mean() > 0.999


def test_what_is_rounded_is_near_and_the_greatest_is_exact() -> None:
    torch.manual_seed(0)
    m, r = torch.randn(500, 64), torch.randn(500, 64).exp()
    for threshold in (0.0, 0.3, 0.99):
        again, root = decoded(encoded(m, r, threshold))
        assert ((root - r).abs() / r).max() < 2 ** (1 / 8) - 1 + 1e-6
        assert (root.amax(1) == r.amax(1)).all()
        assert ((again - m).abs() / m.abs()).max() < 2 ** (1 / 8) - 1 + 1e-6


def test_a_mean_that_changes_slowly_is_not_lost() -> None:
    """Rounded to nearest, the second moment of the small gradient would stay for ever."""
    tx, start = optim.adamw(0.0, b2=0.99, moments=8), torch.zeros(64, 64)
    reference, state = 1.0, tx.init(start)
    for i in range(400):
        g = torch.ones(64, 64)
        if i >= 100:
            g[:, 1:] = 0.0
            reference *= 0.99
        _, state = tx.update(g, state, start)
    root = decoded(tree.leaves(state)[1])[1]
    at_100 = (1 - 0.99**100) ** 0.5
    assert root[0, 5].item() == pytest.approx(at_100 * reference**0.5, rel=0.2)


def test_numbers_that_are_none_stay_so() -> None:
    bad = torch.ones(64, 64)
    bad[3, 5] = float("nan")
    tx = optim.adamw(0.1, moments=8)
    updates, state = tx.update(bad, tx.init(bad), bad)
    assert updates[3, 5].isnan() and updates[0].isfinite().all()
    assert tx.update(torch.ones(64, 64), state, bad)[0][3, 5].isnan()


def test_training_is_that_of_adamw() -> None:
    torch.manual_seed(0)
    x, target = torch.randn(256, 64), torch.randn(64, 64)

    def loss(bits: int) -> float:
        tx, w = optim.adamw(0.02, weight_decay=0.0, moments=bits), {"w": torch.zeros(64, 64)}
        state = tx.init(w)
        for _ in range(150):
            grads = {"w": 2 / 256 * x.T @ (x @ w["w"] - x @ target)}
            updates, state = tx.update(grads, state, w)
            w = optim.apply_updates(w, updates)
        return (x @ (w["w"] - target)).square().mean().item()

    assert loss(8) == pytest.approx(loss(32), rel=0.25)
    assert loss(8) < 1.0 < (x @ target).square().mean().item()


def test_other_bits_are_refused() -> None:
    with pytest.raises(ValueError, match="moments=4; they have 32 bits, or 8"):
        optim.adamw(0.1, moments=4)
