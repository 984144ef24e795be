"""``zf.tree`` on placed trees says what it says on plain ones."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch

import zfunc as zf
from tests.laws.cases import ADAMW, assert_near, assert_same, named, numbers
from tests.laws.models import mixed, nested, stack, tiny
from zfunc import tree

F64 = torch.float64
TREES: dict[str, Callable[[torch.dtype], Any]] = {
    "stack": stack,
    "nested": nested,
    "tiny": tiny,
    "mixed": mixed,
}


def on_ranks(
    name: str, body: Callable[[Any, Any], Any], stage: int = 3, ranks: int = 3, **how: Any
) -> list[Any]:
    """``body(placed params, plain params)`` on every rank."""
    plain = TREES[name](F64)

    def run() -> Any:
        step = zf.shard(zf.train_step(lambda p, batch: p, ADAMW), stage=stage, **how)
        state = step.place(zf.TrainState.create(plain, ADAMW))
        return body(state.params, TREES[name](F64))

    return zf.simulate(ranks)(run)()


@pytest.mark.parametrize("name", TREES)
def test_norms_and_names(name: str) -> None:
    plain = TREES[name](F64)

    def body(placed: Any, _: Any) -> Any:
        return tree.global_norm(placed), tree.leaf_norms(placed), tree.flatten_names(placed)

    for how in ({}, {"unit_bytes": 1}, {"persist_below": 8}, {"stage": 1}):
        for norm, norms, names in on_ranks(name, body, **how):
            assert_near(norm, tree.global_norm(plain), 1e-12)
            assert_near(norms, tree.leaf_norms(plain), 1e-6 if name == "mixed" else 1e-12)
            assert list(names) == list(tree.flatten_names(plain))
            assert_same(names, tree.flatten_names(plain))


@pytest.mark.parametrize("name", TREES)
def test_maps(name: str) -> None:
    plain = TREES[name](F64)

    def body(placed: Any, plain: Any) -> Any:
        doubled = tree.map(lambda x: x * 2, placed)
        scalars = tree.map(lambda x: x.double().sum().to(x.dtype), plain)
        return zf.full(
            {
                "one": doubled,
                "two": tree.map(torch.sub, doubled, placed),
                "plain second": tree.map(torch.add, placed, plain),
                "plain first": tree.map(torch.add, plain, placed),
                "scalars": tree.map(torch.mul, placed, scalars),
                "by path": tree.map_leaves(lambda p, x: x * len(p), placed),
                "by path too": tree.map_with_path(lambda p, x, y: x * len(p) + y, placed, plain),
                "whole": tree.whole(lambda x: x.flip(0) if x.ndim else -x, placed),
                "whole of two": tree.whole(torch.add, placed, plain),
            }
        )

    expected = body(plain, plain)
    for how in ({}, {"unit_bytes": 1}, {"persist_below": 8}):
        for found in on_ranks(name, body, **how):
            assert_same(found, expected)


def test_zeros_stay_zero_behind_the_leaves() -> None:
    """A map that moves zero does not leak from the padding into norms."""

    def body(placed: Any, plain: Any) -> Any:
        moved = tree.map(torch.exp, placed)
        return tree.global_norm(moved), tree.leaf_norms(tree.map(lambda x: x + 1, placed))

    plain = stack(F64)
    for norm, norms in on_ranks("stack", body):
        assert_near(norm, tree.global_norm(tree.map(torch.exp, plain)), 1e-12)
        assert_near(norms, tree.leaf_norms(tree.map(lambda x: x + 1, plain)), 1e-12)


@pytest.mark.parametrize("name", TREES)
def test_get_and_set_of_every_leaf(name: str) -> None:
    plain = TREES[name](F64)

    def body(placed: Any, plain: Any) -> Any:
        for path, leaf in named(plain).items():
            assert_same(tree.get(placed, path), leaf)
            new = torch.full_like(leaf, 7)
            changed = tree.set(placed, path, new)
            wanted = named(plain) | {path: new}
            assert_same(tree.flatten_names(zf.full(changed)), wanted)
            assert_same(tree.flatten_names(placed), named(plain))  # the old one is as it was
        return tree.paths(placed)

    for how in ({}, {"unit_bytes": 1, "persist_below": 8}, {"stage": 0}):
        assert on_ranks(name, body, **how) == [tree.paths(plain)] * 3


def test_select_and_merge() -> None:
    plain = stack(F64)

    def weights(path: str) -> bool:
        return path.endswith("w")

    def body(placed: Any, plain: Any) -> Any:
        part = tree.select(placed, weights)
        rest = tree.select(placed, lambda path: not weights(path))
        moved = tree.map(lambda x: x + 1, part)
        back = tree.merge(tree.merge(placed, rest), part)
        assert_near(tree.global_norm(part), tree.global_norm(tree.select(plain, weights)), 1e-12)
        return zf.full((moved, rest, back))

    wanted = (
        tree.map(lambda x: x + 1, tree.select(plain, weights)),
        tree.select(plain, lambda path: not weights(path)),
        plain,
    )
    for found in on_ranks("stack", body):
        assert_same(found, wanted)


def test_a_placed_tree_reads_like_the_tree_that_it_stands_for() -> None:
    def body(placed: Any, plain: Any) -> None:
        assert set(placed) == set(plain) and "head" in placed and len(placed) == len(plain)
        assert_same(zf.full(placed["blocks"][1]), plain["blocks"][1])
        assert_same(zf.full({**placed}), plain)
        assert_same(
            placed["head"]["w"] @ torch.ones(1, 2, dtype=F64),
            plain["head"]["w"] @ torch.ones(1, 2, dtype=F64),
        )
        assert_same(torch.tanh(placed["first"]["b"]), torch.tanh(plain["first"]["b"]))
        assert_same(
            zf.full([layer["w"] for layer in placed["blocks"]]), [p["w"] for p in plain["blocks"]]
        )
        with pytest.raises(KeyError):
            placed["tail"]

    on_ranks("stack", body)


def test_sizes_in_bytes() -> None:
    plain = {"w": numbers((640, 10), 1), "b": numbers((64,), 2)}
    tied = {"a": plain["w"], "b": plain["w"]}
    assert tree.size_bytes(plain) == 8 * 6464
    assert tree.size_bytes(tied) == 8 * 6400
    assert tree.size_bytes({"none": None, "n": 3}) == 0


def test_sizes_of_shapes_in_bytes() -> None:
    """On meta no leaf has an address; leaves of one storage lie in it one behind the other."""
    flat = torch.empty(100, dtype=F64, device="meta")
    parts = {"w": flat[:60].view(10, 6), "b": flat[60:], "tied": flat[:60]}
    assert tree.size_bytes({"a": torch.empty(5, device="meta"), **parts}) == 4 * 5 + 8 * 100

    def body() -> list[int | None]:
        step, sizes = zf.shard(zf.train_step(lambda p, batch: p, ADAMW), stage=3), []
        for params in (full, shapes):
            step.place(zf.TrainState.create(params, ADAMW))
            sizes.append(step.describe().state_bytes)
        return sizes

    full, shapes = stack(F64), tree.map(lambda x: x.to("meta"), stack(F64))
    for here, there in zf.simulate(2)(body)():
        assert here == there


def test_optimizers_on_every_rank_hold_their_part_only() -> None:
    def body() -> Any:
        step = zf.shard(zf.train_step(lambda p, batch: p, ADAMW), stage=1, unit_bytes=1)
        state = step.place(zf.TrainState.create(stack(F64), ADAMW))
        parts = tree.map_leaves(lambda path, x: x, state.opt_state.mu)
        return [int(x.numel()) for x in tree.leaves(parts)], zf.full(state.opt_state.mu)

    for sizes, full in zf.simulate(2)(body)():
        assert max(sizes) <= 64
        assert_same(full, tree.map(lambda x: torch.zeros_like(x), stack(F64)))


def test_leaves_come_in_the_order_of_their_paths() -> None:
    """Also of an ordered dict that comes after a dict of the same keys."""
    w, b = torch.zeros(2), torch.zeros(3)
    for inner in ({"w": w, "b": b}, OrderedDict(w=w, b=b), OrderedDict(b=b, w=w)):
        held = dict(zip(tree.paths({"net": inner}), tree.leaves({"net": inner}), strict=True))
        assert held["net.w"] is w and held["net.b"] is b


@pytest.mark.parametrize("stage", [0, 3])
def test_ordered_dicts_of_placed_trees(stage: int) -> None:
    """Two nets of unlike sizes are differentiated and stepped together, then in another order."""

    def loss(nets: Any, x: torch.Tensor) -> torch.Tensor:
        return (x @ nets["all"]["g"]["w"]).sum() + 100 * (x @ nets["all"]["d"]["w"]).square().sum()

    def together(kind: Callable[..., Any], state: Any) -> Any:
        return {"all": kind(g=state["g"], d=state["d"])}

    def step_with(kind: Callable[..., Any]) -> Callable[..., Any]:
        def step(state: Any, x: torch.Tensor) -> Any:
            nets = together(kind, state)
            _, grads = zf.value_and_grad(loss)(nets, x)
            updates, opt = ADAMW.update(grads, state["opt"], nets)
            new = zf.optim.apply_updates(nets, updates)["all"]
            return {"g": new["g"], "d": new["d"], "opt": opt}, tree.global_norm(grads)

        return step

    def begun(kind: Callable[..., Any]) -> Any:
        nets = {"g": {"w": numbers((4, 40), 1)}, "d": {"w": numbers((4, 4), 2)}}
        return {**nets, "opt": ADAMW.init(together(kind, nets))}

    def run(kind: Callable[..., Any], placed: bool) -> Any:
        step, state = zf.Step(step_with(kind)), begun(kind)
        if placed:
            step = zf.shard(
                step, stage=stage, roles={"g": "params", "d": "params", "opt": "opt_state"}
            )
            state = step.place(state)
        for i in range(2):
            state, norm = step(state, numbers((3, 4), i))
        state = step.unplace(state)
        return state["g"], state["d"], norm

    plain = run(dict, False)
    for kinds in ([dict, OrderedDict], [OrderedDict, dict]):
        for found in zf.simulate(2)(lambda kinds=kinds: [run(kind, True) for kind in kinds])():
            for one in found:
                assert_near(one, plain, 1e-12)


def test_two_leaves_of_one_name_make_no_dict_of_names():
    """One of them would be lost."""
    with pytest.raises(zf.PlacementError, match=r"two leaves are called a\.b"):
        tree.flatten_names({"a": {"b": torch.ones(2)}, "a.b": torch.zeros(3)})
