"""``Replicated``: whole parameters that read like the user's own tree, and lie in flats."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict
from typing import Any, NamedTuple

import optree
import pytest
import torch
import torch.utils._pytree as torch_pytree
from torch import Tensor

import zfunc as zf
from tests.laws.covering import pairs
from tests.unit.live_bytes import Peak
from tests.unit.peaks import needs_peaks
from zfunc import optim
from zfunc.errors import DonatedStateError, PlacementError
from zfunc.layout.cutting import make_layout
from zfunc.layout.replicated import Replicated, boxed, packed
from zfunc.layout.sharded import Sharded
from zfunc.trees.boxes import alike, elementwise
from zfunc.trees.nodes import boxes_in, held_in, opened

TX = optim.adamw(0.1)


class Net(NamedTuple):
    head: Tensor
    layers: Any


def full() -> dict[str, Any]:
    layers = zf.tree.Layers([{"w": torch.eye(3) * (i + 1), "b": torch.zeros(3)} for i in range(3)])
    return {"head": torch.arange(6.0).view(3, 2), "layers": layers}


def loss(params: Any, x: Tensor) -> Tensor:
    x = zf.scan(lambda p, x: torch.tanh(x @ p["w"] + p["b"]), params["layers"], x)
    return (x @ params["head"]).square().mean()


def batch(i: int) -> Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(i))


def whole(plain: Any) -> Replicated:
    return packed(make_layout(plain), plain)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_parameters_read_like_the_users_own_tree(stage: int) -> None:
    step = zf.shard(zf.train_step(loss, TX), stage=stage)
    plain = full()
    params = step.place(zf.TrainState.create(full(), TX)).params
    assert type(params) is Replicated
    assert type(params["layers"][0]["w"]) is Tensor
    assert torch.equal(params["layers"][2]["w"], plain["layers"][2]["w"])
    assert params["head"] is params["head"]
    assert list(params) == ["head", "layers"] and len(params) == 2 and "head" in params
    assert [type(layer) for layer in params["layers"]] == [dict] * 3
    assert {**params}.keys() == params.keys() and [k for k, _ in params.items()] == list(params)
    assert zf.tree.paths(params) == zf.tree.paths(plain)
    assert zf.tree.size_bytes(params) == zf.tree.size_bytes(plain)
    assert torch.equal(loss(params, batch(0)), loss(plain, batch(0)))
    for flatten in (
        lambda x: optree.tree_leaves(x, namespace=zf.tree.NAMESPACE),
        torch_pytree.tree_leaves,
        zf.tree.leaves,
    ):
        pairs = zip(flatten(params), flatten(plain), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)


def test_other_containers_and_a_single_tensor() -> None:
    plain = full()
    net = whole(Net(plain["head"], plain["layers"]))
    assert torch.equal(net.head, net[0]) and net._fields == ("head", "layers")
    assert torch.equal(next(iter(net)), plain["head"])
    assert list(whole([torch.ones(2), torch.zeros(1)]))[1].shape == (1,)
    assert list(whole(OrderedDict(b=torch.ones(1), a=torch.ones(2)))) == ["b", "a"]
    alone = whole(torch.arange(3.0))
    assert torch.equal(alone + 1, torch.arange(1.0, 4.0)) and alone.shape == (3,)
    assert torch.equal(torch.stack([alone, alone]).sum(0), 2 * torch.arange(3.0))
    with pytest.raises(AttributeError):
        _ = net.tail
    with pytest.raises(KeyError):
        _ = whole(plain)["tail"]


@pytest.mark.parametrize(("stage", "tx", "ranks"), pairs((0, 1, 2), (TX, optim.sgd(0.1)), (1, 2)))
def test_what_is_written_to_its_containers_counts(stage: int, tx: Any, ranks: int) -> None:
    """As in the user's own dict: of new parameters and gradients, at the top and deep inside."""

    def clipping(state: Any, x: Tensor) -> Any:
        value, grads = zf.value_and_grad(loss)(state.params, x)
        if type(grads) is not Sharded:
            grads["layers"][0]["b"] = grads["layers"][0]["b"] * 0
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        params = optim.apply_updates(state.params, updates)
        params["head"] = params["head"].clamp(-0.1, 0.1)
        params["layers"][1]["w"] = params["layers"][1]["w"].clamp(-0.1, 0.1)
        return state.replace(params=params, opt_state=opt_state), value

    def train(step: Any, state: Any) -> Any:
        for i in range(3):
            state, _ = step(state, batch(i))
            state.params["layers"][2]["w"] = state.params["layers"][2]["w"] * 0.9
        return state.params

    def run() -> None:
        for wrap in (lambda step: step, zf.donate):
            step = wrap(zf.shard(clipping, stage=stage))
            found = train(step, step.place(zf.TrainState.create(full(), tx)))
            assert (zf.tree.global_norm(found) - zf.tree.global_norm(opened(found))).abs() < 1e-6
            if stage == 0:
                torch.testing.assert_close(opened(found), wanted)
            assert found["head"].abs().max() <= 0.1

    wanted = train(clipping, zf.TrainState.create(full(), tx))
    zf.simulate(ranks)(run)()


def test_data_of_leaves_and_fields_of_dataclasses_can_be_set() -> None:
    step = zf.shard(zf.train_step(loss, TX), stage=0)
    state = step.place(zf.TrainState.create(full(), TX))
    state.params["head"].data = torch.zeros(3, 2)
    wanted, _ = zf.train_step(loss, TX)(
        zf.TrainState.create({**full(), "head": torch.zeros(3, 2)}, TX), batch(0)
    )
    torch.testing.assert_close(opened(step(state, batch(0))[0].params), wanted.params)
    state.params.pop("head")
    with pytest.raises(PlacementError, match="structure"):
        step(state, batch(0))


def test_trees_that_share_leaves_are_spent_together() -> None:
    step = zf.donate(zf.shard(zf.train_step(loss, TX), stage=0))
    state = step.place(zf.TrainState.create(full(), TX))
    best = zf.tree.map(lambda p: p, state.params)
    other = zf.tree.set(state.params, "head", torch.zeros(3, 2))
    zf.tree.global_norm(best)
    step(state, batch(0))
    for params in (best, other, state.params):
        for use in (zf.tree.global_norm, zf.full, zf.evaluate(lambda p: p["layers"][0]["w"].sum())):
            with pytest.raises(DonatedStateError):
                use(params)
        with pytest.raises(DonatedStateError):
            step(state.replace(params=params), batch(1))


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_leaf_of_another_dtype_changes_no_other(stage: int, ranks: int) -> None:
    tx = optim.sgd(0.1)

    def lowering(state: Any, x: Tensor) -> Any:
        value, grads = zf.value_and_grad(mixed)(state.params, x)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        params = optim.apply_updates(state.params, updates)
        params = {**params, "head": params["head"].bfloat16()}
        return state.replace(params=params, opt_state=opt_state), value

    def mixed(params: Any, x: Tensor) -> Tensor:
        return loss({**params, "head": params["head"].float()}, x)

    def train(step: Any, state: Any) -> Any:
        for i in range(3):
            state, _ = step(state, batch(i))
        return state.params

    wanted = train(lowering, zf.TrainState.create(full(), tx))

    def run() -> None:
        step = zf.shard(lowering, stage=stage)
        found = train(step, step.place(zf.TrainState.create(full(), tx)))
        assert type(found) is Replicated and found["head"].dtype == torch.bfloat16
        assert found["layers"][0]["w"].dtype == torch.float32
        torch.testing.assert_close(opened(found), wanted)

    zf.simulate(ranks)(run)()


@pytest.mark.filterwarnings("ignore:.*jit.script.*:DeprecationWarning")
def test_a_single_tensor_compares_like_one_and_torch_keeps_the_class() -> None:
    alone, params = whole(torch.arange(3.0)), whole(full())
    assert (alone == torch.arange(3.0)).all() and (alone < 3).all() and (2**alone)[2] == 4
    assert (1 / (alone + 1))[0] == 1 and (abs(alone) // 2)[2] == 1
    assert params != whole(full()) and params == params and len({params, alone}) == 2
    with pytest.raises(TypeError, match="Replicated"):
        2.0 * params
    norms = torch_pytree.tree_map(torch.linalg.norm, params)
    scaled = torch_pytree.tree_map(lambda p, n: p / (1 + n), params, norms)
    assert torch.equal(scaled["head"], full()["head"] / (1 + full()["head"].norm()))
    hessian = torch.func.hessian(lambda p: (p["head"] ** 2).sum())(params)
    assert hessian["head"]["head"].shape == (3, 2, 3, 2)


def test_maps_keep_the_layout_beside_plain_and_sharded_trees() -> None:
    plain, params = full(), whole(full())
    cut = Sharded(params.layout, params.flats or ())
    for trees in ((params,), (params, plain), (plain, params), (params, params)):
        new = zf.tree.map(lambda *xs: sum(xs) * 2, *trees)
        assert type(new) is Replicated and new.layout is params.layout
        assert torch.equal(new["head"], 2 * len(trees) * plain["head"])
    assert type(zf.tree.map(torch.add, params, cut)) is Sharded
    shapes = zf.tree.map(lambda p: tuple(p.shape), params)
    assert shapes["layers"][0] == {"b": (3,), "w": (3, 3)}
    norms = zf.tree.leaf_norms(params)
    assert norms["head"].shape == () and torch.equal(norms["head"], plain["head"].norm())
    assert torch.equal(zf.tree.global_norm(params), zf.tree.global_norm(plain))
    some = zf.tree.select(params, lambda path: path == "head")
    assert some["layers"][0]["w"] is None and zf.tree.merge(some, params)["layers"][0]["w"].any()
    halved = elementwise(lambda p: p / 2, params)
    assert halved.flat is not None and torch.equal(halved["head"], plain["head"] / 2)
    with pytest.raises(PlacementError, match="structure"):
        zf.tree.map(torch.add, params, {"head": plain["head"]})


def test_flats_are_found_again_under_leaves() -> None:
    params = whole(full())
    same = zf.tree.map(lambda p: p, params)
    flats, found = params.flats, same.flats
    assert flats is not None and found is not None
    assert [x.data_ptr() for x in flats if x is not None] == [
        x.data_ptr() for x in found if x is not None
    ]
    apart = zf.tree.map(torch.clone, params)
    assert apart.flats is None and apart.packed().flats is not None
    assert len(held_in(apart)) == 7 and len(held_in(params)) == len(flats)


def test_only_tensors_of_the_layouts_shapes_are_boxed() -> None:
    params = whole(full())
    plain = opened(params)
    assert (
        boxed(params.layout, params) is params and type(boxed(params.layout, plain)) is Replicated
    )
    for other in (
        zf.tree.map(lambda p: p[None], plain),
        zf.tree.map(lambda p: 1.0, plain),
        {"head": plain["head"]},
        None,
    ):
        assert boxed(params.layout, other) is other
    assert alike(plain, plain) is plain and type(alike(params, plain)) is Replicated


@pytest.mark.parametrize(
    "again", [copy.deepcopy, copy.copy, lambda x: pickle.loads(pickle.dumps(x))]
)
def test_copies_are_the_same_tree(again: Any) -> None:
    step = zf.shard(zf.train_step(loss, TX), stage=0)
    state = step.place(zf.TrainState.create(full(), TX))
    new = again(state)
    assert new.params.flat is not None
    a, b = step(state, batch(0))[0], step(new, batch(0))[0]
    pairs = zip(zf.tree.leaves(a), zf.tree.leaves(b), strict=True)
    assert all(torch.equal(x, y) for x, y in pairs)


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("ranks", [1, 2])
def test_leaves_that_were_read_are_spent_with_their_flats(stage: int, ranks: int) -> None:
    """Also where they were read within the step, before it wrote."""

    def reading(state: Any, x: Tensor) -> Any:
        before = state.params["head"]
        value, grads = zf.value_and_grad(loss)(state.params, x)
        updates, opt_state = TX.update(grads, state.opt_state, state.params)
        params = optim.apply_updates(state.params, updates)
        return state.replace(params=params, opt_state=opt_state), (value, before.numel())

    def run() -> None:
        step = zf.donate(zf.shard(reading, stage=stage))
        state = step.place(zf.TrainState.create(full(), TX))
        head, kept = state.params["head"], zf.full(state.params)["head"]
        new, (_, left) = step(state, batch(0))
        assert head.numel() == left == 0 and kept.numel() == 6
        for use in (
            lambda: zf.tree.leaves(zf.tree.map(torch.clone, state.params)),
            lambda: zf.tree.global_norm(state.params),
            lambda: step(state, batch(1)),
            lambda: zf.full(state),
        ):
            with pytest.raises(DonatedStateError):
                use()
        assert new.params["head"].numel() == 6
        assert "donated" in repr(state.params) and "donated" not in repr(new.params)

    zf.simulate(ranks)(run)()


@pytest.mark.parametrize(("stage", "ranks", "donated"), pairs((0, 1, 2), (1, 2), (False, True)))
def test_parts_are_trained_by_themselves(stage: int, ranks: int, donated: bool) -> None:
    """A part, and leaves that were picked one by one: both are cut like the whole."""

    def picking(state: Any, x: Tensor) -> Any:
        params = state["params"]
        picked = {key: value for key, value in params.items() if key == "head"}
        value, grads = zf.value_and_grad(lambda p, x: loss({**params, **p}, x))(picked, x)
        updates, opt_state = TX.update(grads, state["opt_state"], picked)
        picked = optim.apply_updates(picked, updates)
        return {"params": {**params, **picked}, "opt_state": opt_state}, value

    def train(step: Any, state: Any) -> Any:
        for i in range(3):
            state, value = step(state, batch(i))
        return state, value

    def state() -> Any:
        return {"params": full(), "opt_state": TX.init({"head": full()["head"]})}

    wanted, value = train(picking, state())

    def run() -> None:
        step = zf.shard(picking, stage=stage, unit_bytes=64)
        step = zf.donate(step) if donated else step
        found, loss = train(step, step.place(state()))
        assert type(found["params"]) is Replicated
        torch.testing.assert_close(loss, value)
        torch.testing.assert_close(opened(found["params"]), wanted["params"])

    zf.simulate(ranks)(run)()


@pytest.mark.parametrize(
    ("stage", "ranks", "donated", "whole_units"),
    pairs((0, 1, 2), (1, 2), (False, True), (False, True)),
)
def test_a_selected_part_is_trained(
    stage: int, ranks: int, donated: bool, whole_units: bool
) -> None:
    """Selected and merged by path, also where a flat has leaves of both parts."""

    def mine(path: str) -> bool:
        return path != "head" if whole_units else path.endswith("w")

    def selecting(state: Any, x: Tensor) -> Any:
        part = zf.tree.select(state["params"], mine)
        rest = zf.tree.select(state["params"], lambda path: not mine(path))
        value, grads = zf.value_and_grad(lambda p, x: loss(zf.tree.merge(p, rest), x))(part, x)
        updates, opt_state = TX.update(grads, state["opt_state"], part)
        part = optim.apply_updates(part, updates)
        return {"params": zf.tree.merge(part, rest), "opt_state": opt_state}, value

    def train(step: Any, state: Any) -> Any:
        for i in range(3):
            state, value = step(state, batch(i))
        return state, value

    def state() -> Any:
        return {"params": full(), "opt_state": TX.init(zf.tree.select(full(), mine))}

    wanted, value = train(selecting, state())

    def run() -> None:
        step = zf.shard(selecting, stage=stage, unit_bytes=64)
        step = zf.donate(step) if donated else step
        found, loss = train(step, step.place(state()))
        torch.testing.assert_close(loss, value)
        found = step.unplace(found)
        torch.testing.assert_close(zf.tree.leaves(found), zf.tree.leaves(wanted))

    zf.simulate(ranks)(run)()


def test_a_tree_put_together_by_hand_between_steps_is_refused() -> None:
    step = zf.shard(zf.train_step(loss, TX), stage=0)
    state = step.place(zf.TrainState.create(full(), TX))
    by_hand = state.replace(params={**state.params, "head": torch.zeros(3, 2)})
    with pytest.raises(PlacementError, match=r"zf\.tree\.set"):
        step(by_hand, batch(0))
    changed = state.replace(params=zf.tree.set(state.params, "head", torch.zeros(3, 2)))
    assert type(step(changed, batch(0))[0].params) is Replicated


@pytest.mark.parametrize("stage", [0, 2])
def test_steps_that_map_leaves_keep_training_right(stage: int) -> None:
    """Leaves that lie in no flats: rescaled between steps, by a map."""

    def run(step: Any, state: Any) -> Any:
        for i in range(3):
            state, _ = step(state, batch(i))
            state = state.replace(params=zf.tree.map(lambda p: p * 0.9, state.params))
        return state

    plain = zf.train_step(loss, TX)
    wanted = run(plain, zf.TrainState.create(full(), TX)).params
    for wrap in (lambda step: step, zf.donate):
        step = wrap(zf.shard(plain, stage=stage))
        found = run(step, step.place(zf.TrainState.create(full(), TX)))
        torch.testing.assert_close(opened(found.params), wanted)


def test_checkpoints_have_the_paths_of_the_plain_tree(tmp_path: Any) -> None:
    step = zf.shard(zf.train_step(loss, TX), stage=0)
    state = step.place(zf.TrainState.create(full(), TX))
    state, _ = step(state, batch(0))
    zf.save(tmp_path, state)
    back = zf.restore(tmp_path, state)
    assert [box.flat is not None for box in boxes_in(back)] == [True] * 3
    plain = zf.restore(tmp_path, zf.TrainState.create(full(), TX))
    pairs = zip(zf.tree.leaves(back), zf.tree.leaves(plain), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


@needs_peaks
def test_gradients_that_were_mapped_are_packed_where_the_first_ones_lay() -> None:
    width, tx = 512, optim.adamw(0.01)  # large enough for memory that is used again

    def mapping(state: Any, x: Tensor) -> Any:
        value, grads = zf.value_and_grad(lambda p, x: (x @ p["a"] @ p["b"]).sum())(state.params, x)
        grads = zf.tree.map(lambda g: g.clamp(-1, 1), grads)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        params = optim.apply_updates(state.params, updates)
        return state.replace(params=params, opt_state=opt_state), value

    params = {name: torch.eye(width) for name in "ab"}
    step = zf.donate(zf.shard(mapping, stage=0))
    state, x = step.place(zf.TrainState.create(params, tx)), torch.ones(1, width)
    for _ in range(2):
        state, _ = step(state, x)
    with Peak() as peak:
        step(state, x)
    # Parameters, two moments, the gradients as mapped, and in flats.
    assert peak.bytes < 5.1 * 2 * width * width * 4


@pytest.mark.parametrize(
    "again",
    [copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p))],
    ids=["deepcopy", "pickle"],
)
def test_copies_have_what_was_written_to_containers(again: Any) -> None:
    tree = whole(full())
    tree["head"] = torch.ones(3, 2)
    assert torch.equal(again(tree)["head"], torch.ones(3, 2))
    tree["layers"][1]["b"] = torch.full((3,), 2.0)
    assert torch.equal(again(tree)["layers"][1]["b"], torch.full((3,), 2.0))
