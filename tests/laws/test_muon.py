"""Muon: the numbers of one process at every stage, each matrix on one rank, bytes counted."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import zfunc as zf
from tests.laws.covering import each
from tests.laws.split_layers import RULES, SIZES, WIDTH, batch_of, full_params, loss_fn, trained
from zfunc import optim, tree
from zfunc.layout.cutting import make_layout
from zfunc.layout.dealing import dealt, dealt_out
from zfunc.layout.sharded import cut

Tree = Any
# --- Muon on one process, as its authors write it, in float64 -------------------------------------


def newton_schulz(g: Tensor) -> Tensor:
    x = g.mT if g.shape[0] > g.shape[1] else g
    x = x / max(x.norm().item(), 1e-7)
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.775 * a + 2.0315 * (a @ a)) @ x
    return x.mT if g.shape[0] > g.shape[1] else x


def by_hand(nesterov: bool = True, matched: bool = False) -> dict[str, Tensor]:
    params, lr, decay = full_params(), 0.02, 0.1
    adam = optim.adamw(lr)
    momentum: dict[str, Tensor] = {}
    state = adam.init(params)
    for n in range(3):
        _, grads = zf.value_and_grad(loss_fn)(params, batch_of(n))
        updates, state = adam.update(grads, state, params)
        new = tree.flatten_names(optim.apply_updates(params, updates))
        old, grad = tree.flatten_names(params), tree.flatten_names(grads)
        for name in old:
            if "layers" in name and old[name].ndim == 2:
                m = momentum[name] = 0.95 * momentum.get(name, torch.zeros(())) + grad[name]
                u = newton_schulz(grad[name] + 0.95 * m if nesterov else m)
                rows, columns = u.shape
                gain = 0.2 * max(rows, columns) ** 0.5 if matched else max(1, rows / columns) ** 0.5
                new[name] = old[name] * (1 - lr * decay) - lr * gain * u
        params = tree.map_leaves(lambda path, p, new=new: new[path], params)
    return tree.flatten_names(params)


def same(found: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert found.keys() == want.keys()
    for name, x in want.items():
        torch.testing.assert_close(found[name], x, rtol=1e-9, atol=1e-9, msg=name)


@pytest.mark.parametrize(("stage", "ranks"), each(range(4), [1, 2, 3], times=2))
def test_it_is_that_of_one_process_at_every_stage(stage: int, ranks: int) -> None:
    nesterov, matched = stage % 2 == 0, stage in (1, 2)
    how: Any = "match_rms_adamw" if matched else "original"
    tx = optim.muon(0.02, nesterov=nesterov, adjust=how, ns_dtype=None)
    want = by_hand(nesterov, matched)
    step = zf.shard(zf.train_step(loss_fn, tx), stage=stage, unit_bytes=300)
    for one in (step, zf.donate(step)):
        for (found, _), _ in zf.simulate(ranks)(trained)(one, tx, 3):
            same(found, want)


@pytest.mark.parametrize("mesh", [{"tensor": 2}, {"tensor": 3}, {"data": 2, "tensor": 2}])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_split_leaves_are_gathered_for_it(stage: int, mesh: dict[str, int]) -> None:
    tx = optim.muon(0.02, ns_dtype=None)
    want = by_hand()
    on = zf.mesh(**{"data": 1, **mesh})
    step = zf.shard(zf.split(zf.train_step(loss_fn, tx), rules=RULES), stage=stage, mesh=on)
    for (found, _), _ in zf.simulate(math.prod(mesh.values()))(trained)(step, tx, 3):
        same(found, want)


BESIDE: dict[str, Any] = {
    "offload": lambda f: zf.offload(zf.shard(f, stage=3), to="cpu"),
    "accumulate": lambda f: zf.shard(zf.accumulate(f, 2), stage=2),
    "remat": lambda f: zf.shard(zf.remat(f), stage=3),
    "replicas": lambda f: zf.shard(f, stage=3, mesh=zf.mesh(data=1, replica=2)),
    "pipeline": lambda f: zf.pipeline(f, microbatches=2, mesh=zf.mesh(data=1, pipe=2)),
}


@pytest.mark.parametrize("name", BESIDE)
def test_beside_other_transforms(name: str) -> None:
    tx = optim.muon(0.02, ns_dtype=None)
    step = BESIDE[name](zf.train_step(loss_fn, tx))
    for (found, _), _ in zf.simulate(2)(trained)(step, tx, 3):
        same(found, by_hand())


THERE, BACK = "leaves to their owners", "results to their holders"


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("stage", range(4))
def test_bytes_beside_those_of_adamw(stage: int, ranks: int) -> None:
    """Stage 0 sends every result to all. Others send pieces to the owners, and as many back."""
    matrices = 8 * sum(2 * n * WIDTH for n in SIZES)

    def sent(tx: Any) -> list[dict[str, int]]:
        step = zf.shard(zf.train_step(loss_fn, tx), stage=stage, unit_bytes=1 << 20)
        runs = zf.simulate(ranks)(trained)(step, tx, 1)
        return [{k: n for k, n in run[1].by_label.items() if k != "ask"} for run in runs]

    rows, plain = sent(optim.muon(0.02, ns_dtype=None)), sent(optim.adamw(0.02))
    there, back = (sum(row.pop(k, 0) for row in rows) for k in (THERE, BACK))
    assert rows == plain
    assert (there, back) == (0, (ranks - 1) * matrices) if stage == 0 else there == back
    assert stage == 0 or 0 < there <= matrices  # but for what lies with its owner already


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("unit_bytes", [1, 300, 1 << 20])
def test_each_leaf_is_worked_on_once(ranks: int, unit_bytes: int) -> None:
    layers = zf.Layers([{"w": torch.randn(n, 7)} for n in (3, 9, 4, 4, 8, 2)])
    params = {"layers": layers, "head": torch.randn(11, 5), "empty": torch.randn(0, 4)}
    layout = make_layout(params, world=ranks, unit_bytes=unit_bytes)
    cost = lambda shape: float(math.prod(shape))  # noqa: E731

    def rank() -> tuple[list[tuple[int, ...]], Tree]:
        seen: list[tuple[int, ...]] = []

        def work(x: Tensor) -> Tensor:
            seen.append(tuple(x.shape))
            return x.cumsum(0) * 2

        done = dealt(cut(layout, params, zf.rank()), work, cost)
        return seen, tree.full(done)

    runs = zf.simulate(ranks)(rank)()
    shapes = sorted(tuple(x.shape) for x in tree.leaves(params))
    assert sorted(shape for seen, _ in runs for shape in seen) == shapes
    loads = [sum(map(cost, seen)) for seen, _ in runs]
    longest = max(map(cost, shapes))
    assert max(loads) <= max(4 / 3 * max(sum(loads) / ranks, longest), longest)
    for _, found in runs:
        for a, b in zip(tree.leaves(found), tree.leaves(params), strict=True):
            assert torch.equal(a, b.cumsum(0) * 2)


def test_the_longest_goes_to_the_emptiest_that_may_have_it() -> None:
    assert dealt_out([5.0, 4.0, 3.0, 3.0], [range(2)] * 4) == [0, 1, 1, 0]
    assert dealt_out([5.0, 4.0, 3.0], [[1], [1, 2], [0]]) == [1, 2, 0]


# --- by itself ------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(4, 4), (16, 5), (5, 16), (1, 7)])
@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [False, True])
def test_against_torch(shape: tuple[int, int], adjust: Any, nesterov: bool) -> None:
    torch.manual_seed(0)
    start = torch.randn(shape)
    weight = torch.nn.Parameter(start.clone())
    theirs = torch.optim.Muon([weight], 0.02, nesterov=nesterov, adjust_lr_fn=adjust)
    tx = optim.muon(0.02, nesterov=nesterov, adjust=adjust, matrices=lambda path: True)
    params = {"w": start}
    state = tx.init(params)
    for _ in range(5):
        grad = torch.randn(shape)
        weight.grad = grad.clone()
        theirs.step()
        updates, state = tx.update({"w": grad}, state, params)
        params = optim.apply_updates(params, updates)
    gain = (
        max(1.0, (shape[0] / shape[1]) ** 0.5) if adjust == "original" else 0.2 * max(shape) ** 0.5
    )
    assert (params["w"] - weight.detach()).abs().max() < 5 * 0.02 * gain * 2**-6  # bf16's rounding


def test_a_stack_of_matrices_is_each_of_them() -> None:
    stack = torch.randn(3, 4, 6, dtype=torch.float64)
    found = optim.orthogonal(stack, dtype=None)
    for x, y in zip(stack, found, strict=True):
        torch.testing.assert_close(optim.orthogonal(x, dtype=None), y, rtol=1e-12, atol=1e-12)


def test_which_leaves_are_matrices() -> None:
    params = full_params()
    layers = [
        {"experts": torch.ones(2, 3, 4), "kernel": torch.ones(2, 3, 4, 5), "scale": torch.ones(3)}
    ]
    params["more"] = zf.Layers(layers)
    state = optim.muon(0.1).init(params)
    chosen = {*tree.flatten_names(state.inner_states["muon"].mu)}
    inside = {f"layers.{i}.{name}" for i in range(len(SIZES)) for name in ("up", "down")}
    assert chosen == inside | {"more.0.experts"}
    assert not chosen & {*tree.flatten_names(state.inner_states["adamw"].mu)}


def test_what_is_no_matrix_is_refused_by_shape() -> None:
    tx = optim.muon(0.1, matrices=lambda path: path == "b", weight_decay=0.0)
    params = {"b": torch.ones(3), "w": torch.ones(2, 2)}
    with pytest.raises(zf.CompositionError, match=r"shape \(3,\) is no matrix.*matrices=lambda"):
        tx.update(params, tx.init(params), params)
    with pytest.raises(ValueError, match="'original' or 'match_rms_adamw'"):
        optim.muon(0.1, adjust="spectral")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="muon needs the parameters"):
        optim.muon(0.1, matrices=lambda path: path == "w").update(params, tx.init(params))
