"""AdamW with moments of 8 bits: how far from AdamW it is, and that no world changes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zfunc as zf
from tests.laws.covering import Covering
from zfunc import optim, tree
from zfunc.errors import CompositionError
from zfunc.optim.adam_8bit import GOLDEN, decoded, encoded

Tree = Any
TX = optim.adamw(0.01, weight_decay=0.1, mask=lambda path: path != "b", moments=8)
GROUPED = ("flat", "wide", "layers.0.w", "layers.1.w")  # the others have float32 moments


def drawn(seed: int) -> Tree:
    """Whole numbers of uneven shapes, zeros among them; groups do not divide by any ranks."""
    generator = torch.Generator().manual_seed(seed)

    def some(*shape: int) -> torch.Tensor:
        return torch.randint(-8, 9, shape, generator=generator).float()

    layers = zf.Layers([{"w": some(33, 128), "s": some(64, 65), "t": some(3)} for _ in range(2)])
    return {"b": some(5), "flat": some(4096), "wide": some(67, 64), "layers": layers}


START, FIRST, SECOND = tree.map(lambda x: x / 7, drawn(0)), drawn(1), drawn(2)


def batch(i: int) -> torch.Tensor:
    """Rows whose sums, and whose means over 2, 3 and 5 ranks, are whole numbers."""
    generator = torch.Generator().manual_seed(i)
    return 30.0 * torch.randint(-3, 4, (30, 2), generator=generator)


def loss_fn(params: Tree, rows: torch.Tensor) -> torch.Tensor:
    """With gradients that do not depend on how ranks add up."""
    s, t = rows.sum(0) / len(rows)
    trees = map(tree.leaves, (params, FIRST, SECOND))
    return sum((p * (a * s + b * t)).sum() for p, a, b in zip(*trees, strict=True))  # type: ignore[return-value]


def trained(stage: int, steps: int = 5) -> tuple[Tree, Tree]:
    step = zf.shard(zf.train_step(loss_fn, TX), stage=stage)
    state = step.place(zf.TrainState.create(START, TX))
    for i in range(steps):
        state, _ = step(state, step.local_batch(batch(i)))
    full = step.unplace(state)
    return full.params, full.opt_state


def same(a: Tree, b: Tree) -> bool:
    pairs = zip(tree.leaves(a), tree.leaves(b), strict=True)
    return all(torch.equal(x, y) for x, y in pairs)


def rounded(x: torch.Tensor, top: int, step: int) -> torch.Tensor:
    """What is kept of ``[groups, 64]``: powers of two in steps of an eighth below the greatest."""
    greatest = x.abs().amax(1, keepdim=True)
    part = torch.where(greatest > 0, x.abs() / greatest, 0.0)
    code = (top + 8 * part.log2() + step * GOLDEN % 1).floor().clamp(0, top)
    if top == 126:  # roots: one that is not zero stays so
        code = torch.where(x > 0, code.clamp(min=1), code)
    return torch.where(code > 0, greatest * ((code - top) / 8).exp2(), 0.0) * x.sign()


def by_hand(path: str, steps: int) -> torch.Tensor:
    w, a, b = (tree.get(x, path).reshape(-1, 64) for x in (START, FIRST, SECOND))
    m = r = torch.zeros_like(w)
    for n in range(1, steps + 1):
        s, t = batch(n - 1).sum(0) / 30
        g = a * s + b * t
        m, r = m * 0.9 + g * (1 - 0.9), (r * r * 0.999 + g * g * (1 - 0.999)).sqrt()
        ratio = (m / (1 - 0.9**n)) / (r / (1 - 0.999**n) ** 0.5 + 1e-8)
        w = w + (ratio + w * 0.1) * -0.01
        m, r = rounded(m, 127, n), rounded(r, 126, n)
    return w.reshape(tree.get(START, path).shape)


def test_it_is_what_a_few_lines_say() -> None:
    found = zf.simulate(1)(trained)(0)[0][0]
    for path in GROUPED:
        assert torch.equal(tree.get(found, path), by_hand(path, 5)), path


@pytest.mark.parametrize(
    ("ranks", "stage"),
    [(n, stage) for n in (2, 3, 5) for stage in range(4)]
    if Covering.whole
    else [(2, 0), (3, 1), (5, 2), (3, 3), (5, 3)],
)
def test_no_world_changes_a_bit(ranks: int, stage: int) -> None:
    """Of training whose gradients are sums without rounding."""
    one = zf.simulate(1)(trained)(0)[0]
    for found in zf.simulate(ranks)(trained)(stage):
        assert same(found[0], one[0]) and same(found[1], one[1])


def test_a_checkpoint_goes_on_in_another_world(tmp_path: Path) -> None:
    step = zf.shard(zf.train_step(loss_fn, TX), stage=3)

    def part(first: int, last: int) -> Tree:
        state = step.place(zf.TrainState.create(START, TX))
        if first:
            state = zf.restore(tmp_path, like=state)
        for i in range(first, last):
            state, _ = step(state, step.local_batch(batch(i)))
        zf.save(tmp_path, state, step=last)
        return tree.full(state.params)

    zf.simulate(5)(part)(0, 3)
    assert same(zf.simulate(2)(part)(3, 5)[0], zf.simulate(1)(trained)(0)[0][0])


def test_a_rank_without_groups_saves_and_labels_leave_some_out(tmp_path: Path) -> None:
    start = {"a": torch.ones(64, 64), "z": torch.ones(4095), "o": torch.ones(2)}
    tx = optim.multi_transform(
        {"adam": optim.adamw(0.01, moments=8), "sgd": optim.sgd(0.01)},
        lambda path: "sgd" if path == "o" else "adam",
    )
    step = zf.train_step(lambda p, x: sum(y.sum() for y in tree.leaves(p)) * x, tx)
    step = zf.shard(step, stage=3)

    def saved() -> Tree:
        state, _ = step(step.place(zf.TrainState.create(start, tx)), torch.ones(()))
        zf.save(tmp_path, state)
        return step.unplace(zf.restore(tmp_path, state)).params

    one, many = zf.simulate(1)(saved)()[0], zf.simulate(2)(saved)()
    assert all(same(found, one) for found in many)


def test_split_leaves_keep_their_groups() -> None:
    """Gradients in float64 are the same ones when they are rounded to float32."""
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(64, 192), nn.Tanh(), nn.Linear(192, 64)).double()
    model = zf.functionalize(block)
    full, x = tree.map(torch.clone, model.params), torch.randn(4, 64, dtype=torch.float64)
    tx = optim.adamw(1e-3, moments=8)

    def found(ranks: int, stage: int) -> tuple[Any, Any]:
        def body() -> tuple[Any, Any]:
            step = zf.train_step(lambda p, x: model.apply(p, x).square().mean(), tx)
            step = zf.shard(step, stage=stage)
            step = zf.split(step, model, tensor=ranks) if ranks > 1 else step
            state = step.place(zf.TrainState.create(full, tx))
            for _ in range(3):
                state, _ = step(state, x)
            whole = step.unplace(state)
            return whole.params, whole.opt_state

        return zf.simulate(ranks)(body)()[0]

    (p_one, s_one), (p_two, s_two) = found(1, 0), found(3, 3)
    for a, b in zip(tree.leaves(p_one), tree.leaves(p_two), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    codes = [[x for x in tree.leaves(s) if x.dtype == torch.bfloat16] for s in (s_one, s_two)]
    assert len(codes[0]) == 2
    assert same(*[[x.view(torch.int16) for x in some] for some in codes])


def test_a_split_that_cuts_a_group_is_refused_by_name() -> None:
    model = zf.functionalize(nn.Sequential(nn.Linear(64, 192), nn.Tanh(), nn.Linear(192, 64)))
    step = zf.train_step(lambda p, x: model.apply(p, x).square().mean(), tx := TX)

    def body() -> None:
        cut = zf.split(step, model, tensor=2)
        state = cut.place(zf.TrainState.create(model.params, tx))
        with pytest.raises(CompositionError, match=r"the rows of 2\.weight at 96.*multiples of 64"):
            cut(state, torch.ones(4, 64))

    zf.simulate(2)(body)()


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
