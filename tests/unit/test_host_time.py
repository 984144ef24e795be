"""What a steady step does besides its arithmetic, counted: operators, walks, references, bytes."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
from torch import Tensor, nn

import zfunc as zf
from tests.unit.operators import Operators
from zfunc import random
from zfunc.engine import sources
from zfunc.layout import layout as layouts
from zfunc.layout.cutting import make_layout
from zfunc.layout.replicated import Replicated, boxed
from zfunc.trees import nodes
from zfunc.trees.nodes import NAMESPACE, OPAQUE, PLACED, Layers, _glance, _seen, boxes_in, leaves_in

TX = zf.optim.sgd(0.1)


def module(layers: int) -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)) for _ in range(layers)]
    return nn.Sequential(*blocks)


def differentiating(functional: Any) -> Callable[..., Any]:
    """A hand-written step that differentiates and leaves the state as it is."""
    differentiate = zf.value_and_grad(lambda p, x: functional.apply(p, x).square().mean())

    def step(state: Any, batch: Tensor) -> Any:
        loss, grads = differentiate(state.params, batch)
        return state, {"loss": loss, "grads": grads}

    return step


def running(layers: int, stage: int, *wraps: Any, **how: Any) -> tuple[Any, Any]:
    functional = zf.functionalize(module(layers))
    step = zf.shard(differentiating(functional), stage=stage, **how)
    for wrap in wraps:
        step = wrap(step)
    return step, step.place(zf.TrainState.create(functional.params, TX))


def operators(call: Callable[[], Any]) -> Counter[str]:
    with Operators() as seen:
        call()
    return seen.counts


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_leaf_costs_a_view_on_its_way_in_and_one_on_its_way_out(stage: int) -> None:
    x = torch.ones(2, 4)

    def count(layers: int) -> int:
        step, state = running(layers, stage)
        for _ in range(2):
            step(state, x)
        plain = zf.functionalize(module(layers))
        base = operators(lambda: differentiating(plain)(zf.TrainState.create(plain.params, TX), x))
        return operators(lambda: step(state, x)).total() - base.total()

    more = count(12) - count(4)  # 8 layers of 4 leaves
    assert more <= 2.0 * 8 * 4, more


def test_gradients_of_a_unit_are_packed_by_one_operator() -> None:
    step, state = running(6, 0)
    seen = operators(lambda: step(state, torch.ones(2, 4)))
    assert seen["cat"] == 1 and seen["_foreach_copy_"] == seen["copy_"] == 0, seen


def test_a_steady_step_walks_along_structures_it_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    step, state = running(6, 0)
    for _ in range(2):
        step(state, torch.ones(2, 4))
    walked: list[int] = []
    flatten = optree.tree_flatten

    def counted(tree: Any, *args: Any, **kwargs: Any) -> Any:
        leaves, spec = flatten(tree, *args, **kwargs)
        walked.append(len(leaves))
        return leaves, spec

    monkeypatch.setattr(nodes.optree, "tree_flatten", counted)
    step(state, torch.ones(2, 4))
    assert not [n for n in walked if n >= 24], walked


@pytest.mark.parametrize(
    ("stage", "wraps", "direct"),
    [(0, (), True), (2, (), True), (3, (), False), (0, (zf.remat,), False)],
)
def test_layers_need_references_only_where_something_is_done_to_them(
    stage: int, wraps: tuple[Any, ...], direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    call = sources.LayerRef.call

    def counted(self: sources.LayerRef, *args: Any) -> Any:
        calls.append(self)
        return call(self, *args)

    monkeypatch.setattr(sources.LayerRef, "call", counted)
    step, state = running(5, stage, *wraps)
    step(state, torch.ones(2, 4))
    assert bool(calls) != direct


def test_gradients_are_the_same_with_references_and_without() -> None:
    x = torch.linspace(-1, 1, 8).view(2, 4)
    functional = zf.functionalize(module(5))
    plain = zf.TrainState.create(functional.params, TX)
    want = differentiating(functional)(plain, x)[1]
    for stage in (0, 1, 2):
        step, state = running(5, stage)
        got = zf.full(step(state, x)[1])
        assert torch.equal(got["loss"], want["loss"])
        pairs = zip(zf.tree.leaves(got["grads"]), zf.tree.leaves(want["grads"]), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)


# --- leaves of a tree ---


def test_leaves_of_a_known_structure_are_those_of_this_tree() -> None:
    trees: list[Any] = [
        {"a": torch.ones(1), "b": {"c": torch.zeros(2)}},
        {"a": torch.ones(1), "b": {"c": {"d": torch.zeros(2), "e": 3}}},  # a subtree for a leaf
        {"a": torch.ones(1), "b": {"c": None}},
        {"a": None, "b": {"c": torch.zeros(2)}},
        {"b": {"c": torch.zeros(2)}, "a": 5},
        {"a": torch.ones(1), "b": {"x": torch.zeros(2)}},
        {"a": torch.ones(1), "b": [torch.zeros(2)]},
        {"a": Layers([{"w": torch.ones(1)}]), "b": {"c": torch.zeros(2)}},
        {},
        torch.ones(3),
        None,
        (torch.ones(1), [2.0, None]),
    ]
    for _ in range(2):
        for tree in trees:
            for namespace in (NAMESPACE, PLACED, OPAQUE):
                want = optree.tree_leaves(tree, namespace=namespace)
                got = leaves_in(tree, namespace)
                assert len(got) == len(want)
                assert all(a is b for a, b in zip(got, want, strict=True))


def test_placed_nodes_are_leaves_where_nobody_looks_into_them() -> None:
    _, state = running(3, 3)
    assert [type(x).__name__ for x in leaves_in(state.params, PLACED)] == ["Sharded"]
    assert all(isinstance(x, Tensor) for x in leaves_in(state.params))
    moved = zf.optim.Moved(state.params, state.params, lambda: state.params)
    assert leaves_in({"m": moved}, OPAQUE) == [moved]
    assert [type(x).__name__ for x in leaves_in({"m": moved}, PLACED)] == ["Sharded"]


# --- layouts ---


class Counted(list[int]):
    """Sizes that count how often one is read."""

    reads = 0

    def __getitem__(self, i: Any) -> Any:
        type(self).reads += 1
        return super().__getitem__(i)


def test_cutting_reads_the_size_of_each_leaf_a_few_times() -> None:
    from zfunc.layout.cutting import _groups
    from zfunc.layout.layout import find_layers

    n = 500
    for tree in ({str(i): torch.ones(1) for i in range(n)}, Layers([torch.ones(1)] * n)):
        _, layers = find_layers(tree)
        root = [] if layers else list(range(n))
        Counted.reads = 0
        groups = _groups(layers, root, Counted([4] * n), 1 << 26, True, None, None)
        assert len(groups) == 1 and len(groups[0][1]) == n
        assert Counted.reads <= 4 * n


@pytest.mark.parametrize("small", [0, 1 << 20])
@pytest.mark.parametrize("lacking", [(), (1,), (0, 2)])
def test_a_packed_flat_holds_its_leaves_and_zeros(
    small: int, lacking: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layouts, "SMALL", small)
    shapes = [(3, 5), (64,), (), (0, 2), (7, 1, 2)]
    tree = [torch.randn(5, 3).t(), *(torch.randn(shape) for shape in shapes[1:])]
    layout = make_layout(tree)
    leaves = [None if i in lacking else x for i, x in enumerate(tree)]

    def dirty(n: int, dtype: torch.dtype, device: Any) -> Tensor:
        return torch.full((n,), 9.0, dtype=dtype)

    full = layout.pack(0, leaves, dirty)
    want = torch.zeros(layout.flats[0].length)
    for slot, leaf in zip(layout.by_flat[0], leaves, strict=True):
        if leaf is not None:
            want[slot.start : slot.start + slot.numel] = leaf.reshape(-1)
    assert torch.equal(full, want)
    for view, leaf in zip(layout.views(0, full), leaves, strict=True):
        assert leaf is None or torch.equal(view, leaf)


def test_ranks_that_start_alike_send_one_digest_each() -> None:
    params = {str(i): torch.ones(3) for i in range(300)}

    def run() -> int:
        step = zf.shard(zf.train_step(lambda p, x: x * p["0"].sum(), TX), stage=3)
        with zf.comm.ledger() as led:
            step.place(zf.TrainState.create(params, TX))
        return led.payload_bytes

    assert max(zf.simulate(2)(run)()) < 2000


def test_a_layers_stream_is_that_of_its_key() -> None:
    key = random.key(3)
    scope = random.scope.folded(key)
    for i in (0, 5):
        with random.scope(random.fold_in(key, i)):
            want = torch.rand(4)
        with scope(i):
            assert torch.equal(torch.rand(4), want)


def test_a_layouts_hash_stays_in_its_process() -> None:
    layout = make_layout({"w": torch.zeros(3)}, world=1)
    assert hash(layout) == hash(make_layout({"w": torch.zeros(3)}, world=1))
    assert hash(layout) != hash(make_layout({"v": torch.zeros(3)}, world=1))
    found = subprocess.run(
        [sys.executable, "-c", HASHED], input=pickle.dumps(layout), capture_output=True, check=True
    )
    assert found.stdout.split() == [b"True"], found.stderr


HASHED = """
import pickle, sys, torch
layout = pickle.load(sys.stdin.buffer)
from zfunc.layout.cutting import make_layout
print(hash(layout) == hash(make_layout({"w": torch.zeros(3)}, world=1)))
"""


def test_no_value_is_written_out_to_tell_structures_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU that would be waited for."""

    def looked(*given: Any, **how: Any) -> str:
        raise AssertionError("a tensor was printed")

    monkeypatch.setattr(torch._tensor_str, "_str", looked)
    one = {"layers": Layers([{"w": torch.zeros(3)}] * 2), "head": torch.zeros(2)}
    two = one | {"layers": Layers([{"w": torch.zeros(3), "b": torch.ones(4)}] * 2)}
    for _ in range(3):
        assert (len(leaves_in(one)), len(leaves_in(two))) == (3, 5)


# --- what a step does with all leaves together ---


def trained(stage: int, tx: Any, layers: int = 4) -> tuple[Any, Any, Any]:
    functional = zf.functionalize(module(layers))

    def loss_fn(params: Any, x: Tensor) -> Tensor:
        return functional.apply(params, x).square().mean()

    plain = zf.train_step(loss_fn, tx)
    return plain, zf.shard(zf.donate(plain), stage=stage), functional.params


@pytest.mark.parametrize("clip", [False, True])
def test_moments_of_adam_that_nobody_cuts_are_flats(clip: bool) -> None:
    adam = zf.optim.adamw(0.1)
    tx = zf.optim.chain(zf.optim.clip_by_global_norm(0.5), adam) if clip else adam
    plain, step, params = trained(0, tx)
    want = zf.TrainState.create(params, tx)
    state = step.place(want)
    boxes = boxes_in(state.opt_state)
    assert len(boxes) == 2 and all(box.flat is not None for box in boxes)
    for k in range(3):
        x = torch.full((2, 4), 1.0 + k)
        (spent_moments, *_) = boxes[0].held()
        want, metrics = plain(want, x)
        state, got = step(state, x)
        assert torch.equal(got["grad_norm"], metrics["grad_norm"])
    assert spent_moments.numel() == 0
    pairs = zip(zf.tree.leaves(step.unplace(state)), zf.tree.leaves(want), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_updates_are_seen_leaf_by_leaf_where_somebody_looks() -> None:
    def scaled(grads: Any, state: Any, params: Any) -> Any:
        return zf.tree.map(lambda g: g / (1.0 + g.norm()), grads), state

    last = zf.optim.GradientTransformation(lambda params: (), scaled)
    tx = zf.optim.chain(zf.optim.adam(0.1), last)
    plain, step, params = trained(0, tx)
    want, x = zf.TrainState.create(params, tx), torch.linspace(-1, 1, 8).view(2, 4)
    state = step.place(want)
    state, _ = step(state, x)
    want, _ = plain(want, x)
    pairs = zip(zf.tree.leaves(step.unplace(state)), zf.tree.leaves(want), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_norm_and_update_take_no_operator_for_a_leaf_but_its_new_view(stage: int) -> None:
    def count(layers: int) -> int:
        _, step, params = trained(stage, zf.optim.adamw(0.1), layers)
        functional = zf.functionalize(module(layers))
        alone = zf.shard(zf.donate(differentiating(functional)), stage=stage)
        bare = alone.place(zf.TrainState.create(functional.params, TX))
        state = step.place(zf.TrainState.create(params, zf.optim.adamw(0.1)))
        x = torch.ones(2, 4)
        state, _ = step(state, x)
        out, _ = alone(bare, x)
        base = operators(lambda: alone(out, x)).total()
        return operators(lambda: step(state, x)).total() - base

    more = count(12) - count(4)  # 8 layers of 4 leaves
    assert more <= 1.0 * 8 * 4, more


def test_flats_stand_for_leaves_only_where_these_still_lie_in_them() -> None:
    leaves = [torch.ones(3), None, torch.ones(2)]
    layout = make_layout(leaves)
    flat = layout.pack(0, [x for x in leaves if x is not None])
    a, b = layout.views(0, flat)
    box = Replicated(layout, [a, None, b])
    assert box.flats is not None and box.flats[0] is not None
    assert box.flats[0].data_ptr() == flat.data_ptr() and box.flats[0].shape == flat.shape
    for others in ([b, None, a], [a, None, b.clone()], [a, None, None]):
        assert Replicated(layout, others).flats is None
    assert boxed(layout, [b, None, a]) == [b, None, a]  # other shapes


def test_states_of_two_stages_are_told_apart_at_a_glance() -> None:
    """To try one's structure on the other costs more than all that is saved."""
    tx, params = zf.optim.adamw(1e-3), {"w": torch.ones(3), "b": torch.ones(2)}
    step = zf.train_step(lambda params, batch: params["w"].sum(), tx)
    full = zf.TrainState.create(params, tx)
    states = [zf.shard(step, stage=stage).place(full) for stage in (0, 1, 2, 3)]
    assert len({_glance(state) for state in states}) == 4
    assert len({_glance((state, {"loss": 1})) for state in states}) == 4, "what a step returns"


def test_structures_that_take_turns_are_soon_not_tried_on_each_other() -> None:
    trees = [{"same": {"w": torch.ones(1), name: torch.ones(2)}} for name in ("x", "y")]
    keys = {(NAMESPACE, _glance(tree)) for tree in trees}
    assert len(keys) == 1
    tried = 0
    for _ in range(100):
        for tree in trees:
            known = _seen.specs.get(*keys)  # type: ignore[arg-type]
            tried += known is not None and known.credit >= 0
            assert leaves_in(tree) == optree.tree_leaves(tree, namespace=NAMESPACE)
    assert tried <= 12
