"""Round trip, commutation, purity and ``zf.tree`` on state that is on disk; the host tier."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import zfunc as zf
from tests.laws.cases import ADAMW, alone, assert_same, named, regression, train
from tests.laws.models import CASES, mixed, nested, stack, tiny
from tests.laws.test_shard_laws import SOME, odd_values, uses
from zfunc import optim, tree
from zfunc.transforms.offloading.disk_trees import trees_on_disk

F64 = torch.float64
STAGES = (0, 1, 2, 3)
STACK = CASES["stack"]
TREES = {"stack": stack, "nested": nested, "tiny": tiny, "mixed": mixed}


def make(path: Path, stage: int | None, case: Any = STACK, tx: Any = ADAMW, **how: Any) -> Any:
    step = zf.offload(case.step(tx), to="disk", path=path, roles=case.roles, **how)
    return step if stage is None else zf.shard(step, stage=stage, unit_bytes=600, roles=case.roles)


@pytest.mark.parametrize("name", SOME)
def test_round_trip_is_bitwise(name: str, tmp_path: Path) -> None:
    case = SOME[name]
    full = odd_values(case.state(ADAMW, F64))
    before = tree.map(lambda x: x.clone() if isinstance(x, Tensor) else x, full)

    def body(stage: int | None) -> Any:
        with make(tmp_path, stage, case) as step:
            return step.unplace(step.place(full))

    for ranks in (1, 3):
        for stage in (None, *STAGES) if ranks == 1 else STAGES:
            for back in zf.simulate(ranks)(body)(stage):
                assert_same(back, before, f"stage {stage} on {ranks} ranks")
    assert_same(full, before, "the input")


@pytest.mark.parametrize("stage", STAGES)
def test_any_order_of_wrapping(stage: int, tmp_path: Path) -> None:
    bare = STACK.step(ADAMW)

    def disk(f: Any) -> Any:
        return zf.offload(f, to="disk", path=tmp_path)

    def cut(f: Any) -> Any:
        return zf.shard(f, stage=stage)

    orders = [
        disk(cut(zf.donate(bare))),
        cut(disk(zf.donate(bare))),
        zf.donate(disk(cut(bare))),
        zf.offload(to="disk", path=tmp_path)(zf.donate(cut(bare))),
    ]
    assert all(step == orders[0] for step in orders)

    def body(i: int) -> Any:
        with orders[i] as step:
            metrics, state = train(step, step.place(STACK.state(ADAMW, F64)), STACK, 2)
            return metrics, step.unplace(state)

    first = zf.simulate(2)(body)(0)
    for i in (1, 2, 3):
        assert_same(zf.simulate(2)(body)(i), first)


@pytest.mark.parametrize("name", SOME)
def test_a_step_is_pure(name: str, tmp_path: Path) -> None:
    """The same call twice; the second result takes the place of the first on the disk."""
    case = SOME[name]
    full = case.state(ADAMW, F64)

    def body(stage: int) -> None:
        with make(tmp_path, stage, case) as step:
            batch = zf.local_batch(case.batch(0, F64))
            state, _ = step(step.place(full), batch)
            kept = step.unplace(state)
            first = step(state, batch)
            once = step.unplace(first[0])
            again = step(state, batch)
            assert_same(step.unplace(again[0]), once)
            assert_same(again[1], first[1])
            assert_same(step.unplace(state), kept)

    for stage in STAGES:
        zf.simulate(2)(body)(stage)


@pytest.mark.parametrize("stage", [None, *STAGES])
def test_a_donated_state_is_spent(stage: int | None, tmp_path: Path) -> None:
    def body() -> None:
        step = zf.donate(make(tmp_path, stage))
        old = step.place(STACK.state(ADAMW, F64))
        new, _ = step(old, zf.local_batch(regression(0, F64)))
        for name, use in uses(step).items():
            if name == "item" and stage in (0, 1, 2):
                continue
            with pytest.raises(zf.DonatedStateError, match=r"donated.*that the step returned"):
                use(old)
        step(new, zf.local_batch(regression(1, F64)))
        step.close()

    zf.simulate(1 if stage is None else 2)(body)()


@pytest.mark.parametrize("name", TREES)
def test_tree_functions(name: str, tmp_path: Path) -> None:
    """What they say of a tree on disk is what they say of it in memory, bit by bit."""
    plain = TREES[name](F64)
    paths = list(named(plain))

    def read(placed: Any) -> Any:
        doubled = tree.map(lambda x: x * 2, placed)
        weights = tree.select(placed, lambda path: path.endswith("w") or path == paths[0])
        rest = tree.select(placed, lambda path: not path.endswith("w") and path != paths[0])
        return {
            "norm": tree.global_norm(placed),
            "norms": tree.leaf_norms(doubled),
            "names": tree.paths(doubled),
            "leaves": tree.flatten_names(placed),
            "doubled": zf.full(doubled),
            "two": zf.full(tree.map(torch.sub, doubled, placed)),
            "plain first": zf.full(tree.map(torch.add, plain, doubled)),
            "plain second": zf.full(tree.map(torch.add, doubled, plain)),
            "scalars": zf.full(tree.map(torch.mul, placed, tree.map(torch.sum, plain))),
            "by path": zf.full(tree.map_leaves(lambda p, x: x * len(p), placed)),
            "whole": zf.full(tree.whole(lambda x: x.flip(0) if x.ndim else -x, placed)),
            "selected": zf.full(weights),
            "merged": zf.full(tree.merge(weights, rest)) if name == "x" else None,
            "back": zf.full(tree.merge(tree.map(lambda x: x + 1, weights), placed)),
            "got": [tree.get(placed, path) for path in paths],
            "set": [
                zf.full(tree.set(placed, path, torch.full_like(leaf, 7)))
                for path, leaf in named(plain).items()
            ],
            "children": [zf.full(placed[key]) for key in placed.keys()],  # noqa: SIM118
            "parts": zf.full({**placed}),
        }

    def body(on_disk: bool, stage: int) -> Any:
        step = zf.train_step(lambda p, batch: p, ADAMW)
        step = zf.offload(step, to="disk", path=tmp_path) if on_disk else step
        step = zf.shard(step, stage=stage, unit_bytes=600)
        state = step.place(zf.TrainState.create(plain, ADAMW))
        placed = state.params if stage == 3 else tree.map(torch.add, state.opt_state.mu, plain)
        out = read(placed)
        step.close()
        return out

    for stage in (1, 3):
        assert_same(zf.simulate(2)(body)(True, stage), zf.simulate(2)(body)(False, stage))


@pytest.mark.parametrize("stage", [None, 3])
def test_init_writes_leaf_by_leaf(stage: int | None, tmp_path: Path) -> None:
    """The same bits as placing the full state, and never a unit of it in memory."""

    def start() -> Any:
        generator = torch.Generator().manual_seed(3)
        blocks = [
            {"w": torch.randn(6, 6, generator=generator), "b": torch.zeros(6)} for _ in range(3)
        ]
        params = {
            "first": {"w": torch.randn(6, 6, generator=generator), "b": torch.ones(6)},
            "blocks": zf.Layers(blocks),
            "head": {"w": torch.randn(6, 1, generator=generator), "b": torch.zeros(1)},
        }
        return zf.TrainState.create(params, ADAMW)

    def body() -> None:
        step = make(tmp_path, stage)
        placed = step.init(start)
        assert all(node.storage.sums[0][0] is not None for node in trees_on_disk(placed).values())
        assert_same(step.unplace(placed), start())
        batch = tree.map(lambda x: x.float(), zf.local_batch(regression(0, F64)))
        mine = step.unplace(step(placed, batch)[0])
        step.close()
        other = zf.shard(STACK.step(ADAMW), stage=3, unit_bytes=600)
        assert_same(mine, other.unplace(other(other.init(start), batch)[0]))

    zf.simulate(1 if stage is None else 2)(body)()


def test_folders_and_buffers(tmp_path: Path) -> None:
    """However many folders the blocks go round, and however few buffers there are."""
    reference = alone(STACK)
    for i, folders in enumerate((["a"], ["a", "b"], ["a", "b", "c"])):
        paths = [tmp_path / str(i) / name for name in folders]
        for buffers in (1, 3):
            with make(paths, None, buffers=buffers) as step:  # type: ignore[arg-type]
                metrics, state = train(step, step.place(STACK.state(ADAMW, F64)), STACK, 4)
                assert_same((metrics, step.unplace(state)), reference)
        assert all(any(path.rglob("*.bin")) for path in paths)


def test_what_passes_through_is_not_written_again(tmp_path: Path) -> None:
    """A skipped step leaves the moments where they are."""
    tx = optim.skip_nonfinite(ADAMW)
    with make(tmp_path, 3, tx=tx) as step:
        state = step.place(STACK.state(tx, F64))
        batch = regression(0, F64)
        new, _ = step(state, {**batch, "x": batch["x"] * float("nan")})
        assert new.opt_state.inner_state.mu is state.opt_state.inner_state.mu
        assert_same(step.unplace(new).params, step.unplace(state).params)
        train(step, new, STACK, 3)


def test_ordinary_tree_maps_are_refused(tmp_path: Path) -> None:
    """They would see what stands for the data, and silently do nothing."""
    import optree

    with make(tmp_path, 3) as step:
        state = step.place(STACK.state(ADAMW, F64))
        with pytest.raises(zf.PlacementError, match=r"Use zf.tree.map"):
            optree.tree_map(lambda x: x * 2, state.params, namespace=tree.NAMESPACE)


def test_describe(tmp_path: Path) -> None:
    with make(tmp_path, 3) as step:
        step.place(STACK.state(ADAMW, F64))
        text = step.describe()
        assert "on disk" in text and str(tmp_path) in text and "opt_state" in text
        assert text.state_bytes == 24  # counts and the key
    with make(tmp_path, 1) as step:
        step.place(STACK.state(ADAMW, F64))
        assert "replicated at this stage, and stay in memory" in step.describe()


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"to": "disk"}, "needs path"),
        ({"to": "cpu", "path": "x"}, "host memory has no path"),
        ({"to": "tape"}, "'cpu' or to 'disk'"),
        ({"what": ("grads",)}, "'grads' is neither"),
        ({"what": ()}, "name 'opt_state'"),
        ({"buffers": 0}, "at least one"),
    ],
)
def test_what_means_nothing_raises_when_wrapping(how: dict[str, Any], says: str) -> None:
    with pytest.raises(zf.CompositionError, match=says):
        zf.offload(STACK.step(ADAMW), **how)


def test_a_state_of_another_step(tmp_path: Path) -> None:
    with make(tmp_path / "a", 3) as step, make(tmp_path / "b", 3) as other:
        state = step.place(STACK.state(ADAMW, F64))
        batch = regression(0, F64)
        with pytest.raises(zf.PlacementError, match=r"keeps its own elsewhere"):
            other(state, batch)
        in_memory = zf.shard(STACK.step(ADAMW), stage=3).place(STACK.state(ADAMW, F64))
        with pytest.raises(zf.PlacementError, match="is in memory"):
            other(in_memory, batch)
        with pytest.raises(zf.PlacementError):
            STACK.step(ADAMW)(state, batch)


@pytest.mark.parametrize("stage", [None, *STAGES])
def test_the_host_tier_on_a_host(stage: int | None) -> None:
    """Host memory is where it computes already: the same bits, and it says so."""

    def body(on_host: bool) -> Any:
        step = STACK.step(ADAMW)
        step = zf.offload(step) if on_host else step
        step = step if stage is None else zf.shard(step, stage=stage)
        assert not on_host or "nothing moves" in step.describe()
        metrics, state = train(step, step.place(STACK.state(ADAMW, F64)), STACK, 3)
        return metrics, step.unplace(state)

    ranks = 1 if stage is None else 2
    assert_same(zf.simulate(ranks)(body)(True), zf.simulate(ranks)(body)(False))
