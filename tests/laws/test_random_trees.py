"""Laws 1 and 2 over random trees, dtypes, worlds, stages and layouts."""

from __future__ import annotations

from typing import Any, NamedTuple

import hypothesis.strategies as st
import optree
import torch
from hypothesis import assume, given, settings
from torch import Tensor

import zfunc as zf
from tests.laws.cases import (
    ADAMW,
    Case,
    alone,
    assert_like_alone,
    assert_same,
    cut_up,
    named,
    numbers,
)
from tests.laws.covering import Covering
from zfunc import optim, tree

Tree = Any
F64 = torch.float64


class Two(NamedTuple):
    left: Any
    right: Any


class Leaf(NamedTuple):
    """Stands for a tensor in the trees that hypothesis draws."""

    shape: tuple[int, ...]
    dtype: torch.dtype


shapes = st.lists(st.integers(0, 7), max_size=3).map(tuple) | st.sampled_from([(64,), (9, 15)])
leaves = st.builds(Leaf, shapes, st.sampled_from([F64, F64, torch.float32])) | st.none()


def nodes(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    several = st.lists(children, max_size=3)
    keys = st.text("ab.", max_size=2) | st.integers(0, 12)
    return (
        several
        | several.map(tuple)
        | several.map(zf.Layers)
        | st.dictionaries(st.text("abc", min_size=1, max_size=2), children, max_size=3)
        | st.dictionaries(
            st.just("k") | keys.filter(lambda k: isinstance(k, int)), children, max_size=1
        )
        | st.builds(Two, children, children)
    )


anything = st.recursive(leaves, nodes, max_leaves=9)
unit = st.dictionaries(st.sampled_from("abcd"), leaves, min_size=1)
models = st.fixed_dictionaries(
    {
        "root": unit,
        "layers": st.lists(unit, min_size=1, max_size=4).map(zf.Layers),
        "rest": anything,
    }
)
trees = anything | models
layouts = st.fixed_dictionaries(
    {
        "stage": st.integers(0, 3),
        "unit_bytes": st.sampled_from([1, 300, 2000, 1 << 26]),
        "persist_below": st.sampled_from([0, 0, 5, 1000]),
        "prefetch": st.integers(0, 3),
    }
)
optimizers = st.sampled_from(
    [
        ADAMW,
        optim.sgd(0.1, momentum=0.9),
        optim.lamb(0.05),
        optim.chain(optim.clip_by_global_norm(0.1), optim.lion(0.01)),
    ]
)


def filled(drawn: Tree) -> Tree:
    """The tree with numbers in the places of its ``Leaf`` entries."""
    items, spec = optree.tree_flatten(
        drawn, is_leaf=lambda x: isinstance(x, Leaf), none_is_leaf=True, namespace=tree.NAMESPACE
    )
    tensors = [
        x if x is None else numbers(x.shape, i, x.dtype) + (x.shape != ()) * 0.1
        for i, x in enumerate(items)
    ]
    return optree.tree_unflatten(spec, tensors)


def energy(params: Tree, total: Tensor) -> Tensor:
    for p in tree.leaves(params):
        total = total + torch.tanh(p.double()).sum() + 0.3 * p.double().square().sum()
    return total


def visit(node: Tree, total: Tensor, layer: Any = zf.layer) -> Tensor:
    """The energy of a tree, its layers one by one, forward and then the last one again."""
    if node is None:
        return total
    if isinstance(node, Tensor):
        return energy(node, total)
    if isinstance(node, zf.Layers):
        for child in [*node, *node[-1:]]:
            total = layer(energy, child, total)
        return total
    for child in node.values() if isinstance(node, dict) else node:
        total = visit(child, total, layer)
    return total


def loss(params: Tree, batch: Tree) -> Tensor:
    x = batch["x"]
    return (visit(params, x.mean() * 0) * x).mean() + x.mean()


def rows(i: int, dtype: torch.dtype) -> Tree:
    return {"x": numbers((12,), 100 + i, F64) + 1.5}


@settings(max_examples=60 if Covering.whole else 25)
@given(trees, optimizers, layouts, st.integers(1, 4), st.booleans(), st.integers(0, 7))
def test_training_is_the_same_however_the_tree_is_cut(
    drawn: Tree, tx: Any, how: dict[str, int], ranks: int, donated: bool, frozen: int
) -> None:
    params = filled(drawn)
    alive = [path for path, x in named(params).items() if x is not None]
    assume(alive)
    stay = {path for i, path in enumerate(alive) if frozen >> (i % 3) & 1}
    assume(len(stay) < len(alive))

    def state(tx: Any, dtype: torch.dtype) -> Any:
        kept = None if not stay else lambda path: path not in stay
        return zf.TrainState.create(filled(drawn), tx, trainable=kept)

    case = Case(state, lambda tx: zf.train_step(loss, tx), rows)
    wide = all(x is None or x.dtype == F64 for x in named(params).values())
    reference = alone(case, tx, steps=2)
    runs = cut_up(case, ranks, tx, steps=2, donated=donated, **how)
    assert_like_alone(runs, reference, 1e-9 if wide else 1e-5)


@settings(max_examples=60 if Covering.whole else 25)
@given(trees, layouts, st.integers(1, 4))
def test_round_trip(drawn: Tree, how: dict[str, int], ranks: int) -> None:
    params = filled(drawn)
    assume(any(x is not None for x in named(params).values()))
    full = zf.TrainState.create(params, ADAMW, buffers={"b": torch.arange(3)}, aux=[None, 2, "x"])

    def body() -> Any:
        step = zf.shard(zf.train_step(loss, ADAMW), **how)
        placed = step.place(full)
        names = tree.paths(placed.params)
        sizes = {k: tuple(x.shape) for k, x in tree.flatten_names(placed.params).items()}
        return step.unplace(placed), names, sizes

    for back, names, sizes in zf.simulate(ranks)(body)():
        assert_same(back, full)
        plain = {path: tuple(x.shape) for path, x in named(params).items() if x is not None}
        assert sizes == plain
        assert [name for name in names if name in plain] == list(plain)
