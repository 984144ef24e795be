"""Updates of many leaves at once: the same bits as one by one, in few operations."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

import zfunc as zf
from tests.unit.operators import Operators
from tests.unit.optim_table import assert_same
from zfunc import optim, tree
from zfunc.engine import context
from zfunc.layout.cutting import make_layout
from zfunc.layout.freezing import freeze, is_frozen
from zfunc.layout.replicated import Replicated, packed
from zfunc.trees import memory
from zfunc.trees.nodes import boxes_in, held_in, opened

SIZES = [(1,), (), (0,), (3,), (64,), (65,), (9, 70), (130, 130), (20_000,), (3, 7, 11)]


def no_bias(path: str) -> bool:
    return not path.endswith(("1", "3"))


TXS = {
    "adam": optim.adam(0.1),
    "adamw": optim.adamw(0.1, weight_decay=0.2),
    "masked": optim.adamw(0.1, weight_decay=0.2, mask=no_bias),
    "clipped": optim.chain(optim.clip_by_global_norm(0.5), optim.adamw(0.1, mask=no_bias)),
}


def numbers(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {
        f"p{i}": torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        for i, shape in enumerate(SIZES)
    }


def steps(tx: Any, params: Any, place: Any, donate: bool, dtype: torch.dtype) -> Any:
    state = tx.init(params)
    for seed in (1, 2, 3):
        both = params, state
        donation = memory.Donation.of(held_in(both), boxes_in(both)) if donate else None
        token = context.push(context.Context(donation=donation))
        try:
            updates, state = tx.update(place(numbers(seed, dtype)), state, params)
            params = optim.apply_updates(params, updates)
        finally:
            context.pop(token)
        if seed == 1:  # moments lie as their parameters do, as in a state that was placed
            state = (
                tree.map(lambda x: x.clone(), state) if place is tidy else repacked(state, place)
            )
    return params, state


def tidy(plain: Any) -> Any:
    return tree.map(torch.clone, plain)


def repacked(state: Any, place: Any) -> Any:
    if isinstance(state, optim.AdamState):
        return state._replace(mu=place(state.mu), nu=place(state.nu))
    return tuple(repacked(x, place) for x in state) if type(state) is tuple else state


def in_flats(plain: Any) -> Any:
    plain = opened(plain)
    return packed(make_layout(plain, unit_bytes=1 << 12), plain)


@pytest.mark.parametrize("name", TXS)
@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_flats_under_leaves_change_no_bit(name: str, donate: bool, dtype: torch.dtype):
    tx = TXS[name]
    plain = steps(tx, tidy(numbers(0, dtype)), tidy, donate, dtype)
    flat = steps(tx, in_flats(numbers(0, dtype)), in_flats, donate, dtype)
    assert_same(flat[0], plain[0])
    assert_same(flat[1], plain[1])


def test_a_placed_state_keeps_its_flats_and_marks():
    params, tx = in_flats(numbers(0)), optim.adamw(0.1)
    layout = params.layout
    state = repacked(tx.init(params), in_flats)
    both = params, state
    flats = {x.untyped_storage().data_ptr() for x in held_in(both) if x.ndim and x.numel()}
    donation = memory.Donation.of(held_in(both), boxes_in(both))
    token = context.push(context.Context(donation=donation))
    try:
        updates, after = tx.update(numbers(1), state, params)
        new = optim.apply_updates(params, updates)
    finally:
        context.pop(token)
    found = [x for x in tree.leaves((new, after.mu, after.nu)) if x.numel()]
    assert {x.untyped_storage().data_ptr() for x in found} == flats
    assert new.layout is layout and new.flat is not None
    assert all(new[k].shape == x.shape for k, x in numbers(0).items())


def test_leaves_that_only_look_like_flats_are_taken_one_by_one():
    base = in_flats({"a": torch.randn(8, 8), "b": torch.randn(8, 8)})
    params = {"a": base["a"], "b": base["b"]}
    # The same memory, otherwise read.
    turned = Replicated(base.layout, {"a": params["a"], "b": base["b"].t()})
    assert turned.flat is None
    tx, grads = optim.adamw(0.1), {"a": torch.randn(8, 8), "b": torch.randn(8, 8)}
    found = optim.apply_updates(turned, tx.update(grads, tx.init(turned), turned)[0])
    alone = tidy(turned)
    expected = optim.apply_updates(alone, tx.update(grads, tx.init(alone), alone)[0])
    assert_same(found, expected)


def test_frozen_and_missing_leaves_stay():
    full = numbers(0)
    full["p4"] = freeze(full["p4"])
    layout = make_layout(full, frozen=is_frozen)
    params = packed(layout, full)
    before = tidy(params)
    grads = {k: None if k in ("p4", "p6") else x for k, x in numbers(1).items()}
    tx = optim.adamw(0.1)
    updates, _ = tx.update(grads, tx.init(tree.map(lambda g, p: p, grads, params)), params)
    new = optim.apply_updates(params, updates)
    for k in full:
        assert torch.equal(new[k], before[k]) == (k in ("p2", "p4", "p6")), k


@pytest.mark.parametrize(
    "place", [tidy, lambda plain: packed(make_layout(opened(plain)), plain)], ids=["tidy", "flat"]
)
@pytest.mark.parametrize("donate", [False, True])
def test_a_hundred_leaves_take_few_operations(place: Any, donate: bool):
    full = {f"p{i:03}": torch.randn(5, 3) for i in range(100)}
    params, tx = place(full), optim.adamw(0.1)
    state = repacked(tx.init(params), place)
    both = params, state
    grads = place(full)
    donation = memory.Donation.of(held_in(both), boxes_in(both)) if donate else None
    token = context.push(context.Context(donation=donation))
    views = ("view", "split", "slice", "alias", "detach", "as_strided", "narrow", "t")
    try:
        with Operators() as operators:
            tree.global_norm(grads)
            updates, _ = tx.update(grads, state, params)
            optim.apply_updates(params, updates)
    finally:
        context.pop(token)
    work = {k: n for k, n in operators.counts.items() if not k.startswith(views)}
    assert work["_fused_adamw_"] == 1
    assert sum(work.values()) < 40, work


def test_small_leaves_have_memory_of_their_own() -> None:
    """A leaf that is kept, copied or saved alone does not bring the others along."""
    params, tx = numbers(0), optim.adamw(0.1)
    updates, state = tx.update(numbers(1), tx.init(params), params)
    for x in tree.leaves((optim.apply_updates(params, updates), state)):
        assert x.untyped_storage().nbytes() == x.nbytes


@pytest.mark.parametrize("sizes", [(0, 3, 64), (3, 0, 64), (3, 64, 0), (0, 0, 5), (0, 0)])
def test_a_flat_is_found_under_its_leaves_wherever_empty_ones_are(sizes: tuple[int, ...]) -> None:
    leaves = {f"p{i}": torch.rand(size) for i, size in enumerate(sizes)}
    layout = make_layout(leaves)
    room = torch.zeros(layout.flats[0].length + 7)
    views = layout.views(0, room[7:].copy_(layout.pack(0, list(leaves.values()))))
    views = [x if x.numel() else torch.empty(0) for x in views]
    found = layout.buffer_under(0, views)
    assert found is not None and torch.equal(found, room[7:])
    assert not any(sizes) or found.data_ptr() == room[7:].data_ptr()
    for i, x in enumerate(views):
        if x.numel():
            assert layout.buffer_under(0, [*views[:i], x.clone(), *views[i + 1 :]]) is None


@pytest.mark.parametrize("write", [lambda z: z[0].fill_(1.0), lambda z: z[0, 0].add_(3.0)])
def test_zeros_that_an_optimizer_writes_to_have_memory_of_their_own(write: Any) -> None:
    def init(params: Any) -> Any:
        zeros = tree.map(torch.zeros_like, params)
        write(zeros["w"])
        return zeros

    def update(grads: Any, state: Any, params: Any = None, **_: Any) -> Any:
        return grads, state

    params = {"w": torch.ones(4, 3), "b": torch.ones(3)}
    for mode in (nullcontext, torch.inference_mode):
        with mode():
            state = zf.TrainState.create(params, optim.GradientTransformation(init, update))
        assert state.opt_state["w"].sum() == 3.0
        assert state.opt_state["b"].sum() == 0.0
