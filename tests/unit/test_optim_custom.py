"""Transformations of the user's own."""

from __future__ import annotations

import pytest
import torch

from tests.unit.optim_table import make_params
from zfunc import optim, tree
from zfunc.errors import CompositionError
from zfunc.layout.cutting import make_layout
from zfunc.layout.sharded import cut


def custom(f, **options):
    return optim.GradientTransformation(
        lambda params: optim.EmptyState(), lambda grads, state, params: (f(grads), state), **options
    )


def unit_norm(grads):
    return tree.map(lambda g: g / g.norm(), grads)


def unit_norm_right(grads):
    return tree.map(lambda g, norm: g / norm, grads, tree.leaf_norms(grads))


def place(plain):
    return cut(make_layout(plain), plain, 0)


@pytest.mark.parametrize(
    "f",
    [
        unit_norm,
        lambda grads: tree.map(lambda g: g.t() if g.ndim == 2 else g * 2, grads),
        lambda grads: tree.map(lambda g: g.flip(0), grads),
        # On one rank these pieces are whole leaves.
        lambda grads: tree.map_leaves(lambda _, g: g / g.norm(), grads),
        lambda grads: tree.map_leaves(lambda _, g: g - g.mean(), grads),
    ],
)
def test_what_is_not_elementwise_is_refused_on_placed_trees(f):
    tx, params = custom(f), make_params()
    with pytest.raises(CompositionError, match=r"map_leaves.*tree\.whole"):
        tx.update(place(params), optim.EmptyState(), place(params))


@pytest.mark.parametrize(
    "f",
    [
        unit_norm_right,
        lambda grads: tree.map(torch.sign, grads),
        lambda grads: tree.whole(lambda g: g / g.norm(), grads),
        lambda grads: tree.map_leaves(lambda path, g: g * len(path), grads),
    ],
)
def test_what_is_right_on_placed_trees_is_tried_once(f):
    calls = []
    tx, params = custom(lambda grads: calls.append(0) or f(grads)), make_params()
    found, _ = tx.update(place(params), optim.EmptyState(), place(params))
    expected, _ = tx.update(params, optim.EmptyState(), params)
    for x, y in zip(tree.leaves(tree.full(found)), tree.leaves(expected), strict=True):
        torch.testing.assert_close(x, y)
    before = len(calls)
    tx.update(place(params), optim.EmptyState(), place(params))
    assert len(calls) == before + 1


def test_a_custom_transformation_inside_a_chain_is_tried_too():
    tx, params = optim.chain(custom(unit_norm), optim.sgd(0.1)), make_params()
    state = tx.init(place(params))
    with pytest.raises(CompositionError, match="not elementwise"):
        tx.update(place(params), state, place(params))
    tx.update(params, state, params)


def test_what_wants_a_tree_of_its_own_must_vouch_for_itself():
    def only_w(grads):
        return {**tree.map(lambda g: g, grads), "w": grads["w"] * 2}

    params = {"w": torch.ones(70)}
    with pytest.raises(CompositionError, match="checked=True"):
        custom(only_w).update(place(params), optim.EmptyState())
    custom(lambda grads: grads, checked=True).update(place(params), optim.EmptyState())
