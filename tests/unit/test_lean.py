"""Full parameters and moments that nobody asked to keep are not kept."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import zfunc as zf
from tests.laws.cases import assert_same
from zfunc import optim, tree
from zfunc.ranks.digests import digest_of_all, digests

TX = optim.adamw(1e-2)
OPTIMIZERS: dict[str, Any] = {
    "adamw": TX,
    "sgd": optim.sgd(0.1, momentum=0.9),
    "lion": optim.lion(1e-3),
    "lamb": optim.lamb(0.1),
    "chain": optim.chain(optim.clip_by_global_norm(1.0), TX),
    "multi": optim.multi_transform(
        {"a": TX, "b": optim.sgd(0.1, momentum=0.9)}, lambda p: "b" if "bias" in p else "a"
    ),
}


def module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)).double()


def step_of(f: zf.Functional, tx: Any = TX) -> zf.Step:
    return zf.train_step(lambda p, b: f.apply(p, b).square().mean(), tx)


def batch() -> Tensor:
    return torch.linspace(-1, 1, 48, dtype=torch.float64).view(6, 8)


def memory(x: Any) -> weakref.ref[Any]:
    return weakref.ref(x.untyped_storage())


@pytest.mark.parametrize("stage", [None, 0, 1, 2, 3])
def test_nothing_of_the_full_model_stays_behind(stage: int | None) -> None:
    full = module()
    f = zf.functionalize(full)
    gone = [memory(p) for p in full.parameters()]
    step = step_of(f) if stage is None else zf.shard(step_of(f), stage=stage)
    state = zf.donate(step).place(zf.TrainState.create(f.params, TX))
    assert tree.paths(f.params)  # the module has them
    del full
    gc.collect()
    assert [x() for x in gone] == [None] * 4
    with pytest.raises(zf.PlacementError, match=r"Sequential \(0\.weight, .* keep the module"):
        f.params  # noqa: B018
    again = pickle.loads(pickle.dumps(f))
    with pytest.raises(zf.PlacementError, match="no longer in memory"):
        again.params  # noqa: B018
    other = zf.functionalize(module())
    expected, _ = step_of(other)(zf.TrainState.create(other.params, TX), batch())
    for functional in (f, again):
        step = step_of(functional) if stage is None else zf.shard(step_of(functional), stage=stage)
        assert_same(tree.full(step(state, batch())[0].params), expected.params)


@pytest.mark.parametrize("kind", ["weight_norm", "spectral_norm", "orthogonal"])
def test_nothing_of_a_parametrized_module_stays_behind(kind: str) -> None:
    """The class that torch gives it holds the module that it was made for."""
    full = torch.nn.Sequential(
        getattr(parametrizations, kind)(torch.nn.Linear(8, 8)), torch.nn.Linear(8, 8)
    ).double()
    f = zf.functionalize(full)
    gone = [memory(p) for p in full.parameters()]
    expected, _ = step_of(f)(zf.TrainState.create(f.params, TX), batch())
    step = zf.shard(step_of(f), stage=3)
    state = step.place(zf.TrainState.create(f.params, TX))
    del full
    gc.collect()
    assert [x() for x in gone] == [None] * len(gone)
    assert_same(tree.full(step(state, batch())[0].params), expected.params)


def test_whoever_holds_them_keeps_them() -> None:
    for keep in ("module", "tree", "leaves", "parameters"):
        full = module()
        f = zf.functionalize(full)
        held: Any = {
            "module": full,
            "tree": f.params,
            "leaves": tree.leaves(f.params),
            "parameters": list(full.parameters()),
        }[keep]
        step_of(f).place(zf.TrainState.create(f.params, TX))
        del full
        gc.collect()
        assert_same(f.params, zf.functionalize(module()).params)
        assert {x.data_ptr() for x in tree.leaves(f.params)} == {
            x.data_ptr() for x in (held.parameters() if keep == "module" else tree.leaves(held))
        }


def test_a_part_that_is_placed_lets_go_of_nothing() -> None:
    f = zf.functionalize(nn.Sequential(nn.Linear(3, 2), nn.ReLU()))
    part = {"weight": f.params[0]["weight"]}
    zf.shard(zf.train_step(lambda p, x: (x @ p["weight"].T).sum(), TX)).place(
        zf.TrainState.create(part, TX)
    )
    del part
    gc.collect()
    assert len(tree.paths(f.params)) == 2


def test_a_placing_that_fails_lets_go_of_nothing() -> None:
    f = zf.functionalize(module())
    with pytest.raises(zf.PlacementError):
        zf.shard(step_of(f)).place({"weights": f.params})
    assert tree.paths(f.params)


def test_copies_and_functionals_of_one_module_hold_their_own() -> None:
    full = module()
    f, g = zf.functionalize(full), zf.functionalize(full, train=False)
    h = copy.deepcopy(f)
    del full
    step_of(f).place(zf.TrainState.create(f.params, TX))
    gc.collect()
    for gone in (f, g):
        with pytest.raises(zf.PlacementError, match="no longer in memory"):
            gone.params  # noqa: B018
    assert_same(h.params, zf.functionalize(module()).params)


def test_simulated_ranks_place_the_same_parameters() -> None:
    f = zf.functionalize(module())
    step = zf.shard(step_of(f), stage=3)
    for ranks in (2, 3):
        zf.simulate(ranks)(lambda: step.place(zf.TrainState.create(f.params, TX)))()


def test_inference_lets_go_of_nothing() -> None:
    f = zf.functionalize(nn.Sequential(nn.Linear(64, 64)))
    for predict in (zf.quantize(f.apply, bits=8), zf.shard(zf.quantize(f.apply, bits=8))):
        predict.place(f.params)
        assert tree.paths(f.params)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_moments_take_no_memory_until_they_are_placed(name: str) -> None:
    tx = OPTIMIZERS[name]
    held = module()
    f = zf.functionalize(held)
    state = zf.TrainState.create(f.params, tx)
    moments = [x for x in tree.leaves(state.opt_state) if x.ndim and x.shape != (1, 4)]
    assert moments and all(x.untyped_storage().nbytes() == x.element_size() for x in moments)
    assert_same(state.opt_state, tx.init(f.params))
    dense = state.replace(opt_state=tx.init(f.params))
    bare = step_of(f, tx)
    expected, _ = bare(dense, batch())
    assert_same(bare(state, batch())[0], expected)
    copies = copy.deepcopy(state), pickle.loads(pickle.dumps(state)), tree.map(torch.clone, state)
    for other in copies:
        assert_same(bare(other, batch())[0], expected)
    for wrap in (zf.remat, lambda s: zf.accumulate(s, 1), zf.donate):  # none has placed it
        mine = zf.TrainState.create(tree.map(torch.clone, f.params), tx)
        assert_same(wrap(bare)(mine, batch())[0], expected)
    for stage in range(4):
        step = zf.donate(zf.shard(bare, stage=stage))
        new, _ = step(step.place(state), batch())
        assert_same(step.unplace(new), expected)


def test_unmade_moments_are_saved_and_restored(tmp_path: Any) -> None:
    f = zf.functionalize(module())
    state = zf.TrainState.create(f.params, TX)
    zf.save(tmp_path, state)
    assert_same(zf.restore(tmp_path, like=state), state)


def test_an_optimizer_that_writes_into_its_zeros_gets_whole_ones() -> None:
    def init(params: Any) -> Any:
        return tree.map(lambda p: torch.zeros_like(p).add_(1), params)

    tx = optim.GradientTransformation(init, lambda grads, state, params=None: (grads, state))
    state = zf.TrainState.create({"w": torch.ones(3)}, tx)
    assert torch.equal(state.opt_state["w"], torch.ones(3))


def test_digests_of_what_takes_no_memory_are_those_of_its_values() -> None:
    for dtype in (torch.float32, torch.complex64, torch.bfloat16):
        for n in (2, 5000, (1 << 22) + 7):
            one = torch.full((), 3, dtype=dtype).expand(n)
            whole = one.clone()
            for weighed in (False, True):
                assert digests([one], weighed) == digests([whole], weighed)
            assert digest_of_all([one]) == digest_of_all([whole])


def test_dense_peers_start_from_the_same_moments() -> None:
    f = zf.functionalize(module())

    def body() -> None:
        state = zf.TrainState.create(f.params, TX)
        if zf.rank():
            state = state.replace(opt_state=TX.init(f.params))
        zf.shard(step_of(f), stage=3).place(state)

    zf.simulate(2)(body)()
