"""Operators on split leaves: what they give, and their gradients, are those of the full leaves."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import zfunc as zf
from tests.laws.split_leaves import (
    EXACT,
    MLP,
    MLP_CUTS,
    WAYS,
    Leaves,
    Result,
    Splits,
    cut,
    drawn,
    leaves_of,
    marked,
    mlp,
    run,
    same,
)
from zfunc import operators
from zfunc.engine import context
from zfunc.errors import PlacementError
from zfunc.layout.splits import Cut, Split
from zfunc.ranks.axes import group
from zfunc.ranks.comm import even_cuts
from zfunc.transforms import splitting


@pytest.mark.parametrize("ways", WAYS)
@pytest.mark.parametrize("bias", [False, True])
def test_a_column_and_a_row_are_the_products_of_full_leaves(ways: int, bias: bool) -> None:
    shapes, cuts = dict(MLP), dict(MLP_CUTS)
    if bias:
        shapes |= {"gate_b": (7,), "down_b": (6,)}
        cuts["gate_b"] = Cut(0)
    full = leaves_of(**shapes)
    results = same(mlp, full, cut(full, ways, **cuts), drawn(2, 3, 6), ways)
    if ways > 1:  # gate and up share what backward sums
        assert all(r.calls == {"tensor forward": 1, "tensor backward": 1} for r in results)


def attention(p: Leaves, x: Tensor, d: int = 2) -> Tensor:
    h = F.layer_norm(x, x.shape[-1:])
    if "qkv" in p:
        q, k, v = zf.column(h, p["qkv"], p.get("qkv_b")).chunk(3, -1)
    else:
        q, k, v = (zf.column(h, p[name], p.get(name + "_b")) for name in ("q", "k", "v"))
    q, k, v = (y.unflatten(-1, (-1, d)).transpose(1, 2) for y in (q, k, v))
    if "norm" in p:
        q = q * operators.between(p["norm"])
    k, v = (y.repeat_interleave(q.shape[1] // y.shape[1], 1) for y in (k, v))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return x + zf.row(y.transpose(1, 2).flatten(2), p["o"])


def grouped(heads: int, kv: int, d: int = 2, w: int = 5, **more: tuple[int, ...]) -> Leaves:
    return leaves_of(q=(heads * d, w), k=(kv * d, w), v=(kv * d, w), o=(w, heads * d), **more)


@pytest.mark.parametrize("ways", WAYS)
def test_uneven_key_and_value_heads(ways: int) -> None:
    full = grouped(12, 6, k_b=(12,), norm=(2,))
    by = Cut(0, by=6)
    splits = cut(full, ways, q=by, k=by, v=by, k_b=by, o=Cut(1, by=6))
    results = same(attention, full, splits, drawn(2, 3, 5), ways)
    if ways > 1:
        counts = {"tensor forward": 1, "tensor backward": 1, "tensor between": 1}
        assert all(r.calls == counts for r in results)


def shared_splits(full: Leaves, ways: int, heads: int, kv: int, d: int = 2) -> Splits:
    ends = even_cuts(heads, ways)
    mine = [range(ends[r], ends[r + 1]) for r in range(ways)]
    theirs = [sorted({i * kv // heads for i in own}) for own in mine]
    q = [[i * d + j for i in own for j in range(d)] for own in mine]
    k = [[i * d + j for i in own for j in range(d)] for own in theirs]
    found = {"q": Split.of(0, q), "k": Split.of(0, k), "v": Split.of(0, k), "o": Split.of(1, q)}
    return {name: found[name[0]] for name in full}


@pytest.mark.parametrize(
    ("ways", "heads", "kv"), [(2, 4, 1), (4, 4, 1), (4, 4, 2), (3, 6, 2), (3, 4, 2)]
)
def test_key_and_value_heads_that_are_fewer_than_ranks(ways: int, heads: int, kv: int) -> None:
    full = grouped(heads, kv, k_b=(kv * 2,))
    splits = shared_splits(full, ways, heads, kv)
    results = same(attention, full, splits, drawn(2, 3, 5), ways)
    counts = {"tensor forward": 1, "tensor backward": 1, "tensor shared rows": 3}
    assert all(r.calls == counts for r in results)
    for name in ("k", "v", "k_b"):  # who has a row has the same bits of its gradient
        split = splits[name]
        assert split is not None
        rows: dict[int, Tensor] = {}
        for rank, result in enumerate(results):
            for at, i in enumerate(split.indices(rank)):
                assert torch.equal(
                    result.leaves[name][at], rows.setdefault(i, result.leaves[name][at])
                )


def test_only_rows_that_several_ranks_have_are_sent() -> None:
    split = Split.of(0, [[0, 1, 4], [2, 3, 4]])
    full = leaves_of(w=(5, 6))

    def model(p: Leaves, x: Tensor) -> Tensor:
        w = operators.shared(p["w"], group(zf.mesh(tensor=2), "tensor"), split)
        return (x @ w.T).square().sum() * (1 + zf.rank())

    def on_a_rank() -> Result:
        return run(model, {"w": marked(full["w"], split)}, drawn(2, 6))

    results = zf.simulate(2)(on_a_rank)()
    assert [r.sent["tensor shared rows"] for r in results] == [6 * 8] * 2
    assert torch.equal(results[0].leaves["w"][2], results[1].leaves["w"][2])


@pytest.mark.parametrize("ways", [2, 3, 4])
def test_fused_queries_keys_and_values(ways: int) -> None:
    full = leaves_of(qkv=(24, 5), qkv_b=(24,), o=(5, 8))
    by = Cut(0, parts=3, by=4)
    splits = cut(full, ways, qkv=by, qkv_b=by, o=Cut(1, by=4))
    same(attention, full, splits, drawn(2, 3, 5), ways)


@pytest.mark.parametrize("ways", [2, 3])
def test_whole_leaves_are_plain_products(ways: int) -> None:
    full = leaves_of(**MLP)
    results = same(mlp, full, dict.fromkeys(full), drawn(2, 3, 6), ways, rtol=0.0, atol=0.0)
    assert all(r.calls == {} for r in results)


def layer(p: Leaves, x: Tensor) -> Tensor:
    return mlp(p, attention(p, x))


def llama(ways: int) -> tuple[Leaves, Splits]:
    full = grouped(4, 4, w=6) | leaves_of(**MLP)
    by = Cut(0, by=4)
    return full, cut(full, ways, q=by, k=by, v=by, o=Cut(1, by=4), **MLP_CUTS)


def test_a_layer_sums_twice_forward_and_twice_backward() -> None:
    full, splits = llama(2)
    x = drawn(2, 3, 6)
    for result in same(layer, full, splits, x, 2):
        assert result.calls == {"tensor forward": 2, "tensor backward": 2}
        assert result.sent == {"tensor forward": 2 * x.nbytes, "tensor backward": 2 * x.nbytes}


def test_a_layer_that_is_computed_again_in_backward() -> None:
    full, splits = llama(3)

    def again(p: Leaves, x: Tensor) -> Tensor:
        return checkpoint(layer, p, x, use_reentrant=False)

    for result in same(again, full, splits, drawn(2, 3, 6), 3):
        assert result.calls["tensor forward"] <= 4 and result.calls["tensor backward"] == 2


def test_frozen_weights_share_the_sum_too() -> None:
    full = leaves_of(**MLP)

    def on_a_rank() -> tuple[int, Tensor]:
        p = {
            k: marked(v, MLP_CUTS[k].split(v.shape, 2)).requires_grad_(False)
            for k, v in full.items()
        }
        x = drawn(2, 6).requires_grad_()
        with zf.comm.ledger() as led:
            found = torch.autograd.grad(mlp(p, x).sum(), x)[0]
        return led.calls_by_label["tensor backward"], found

    x = drawn(2, 6).requires_grad_()
    want = torch.autograd.grad(mlp(full, x).sum(), x)[0]
    for calls, found in zf.simulate(2)(on_a_rank)():
        assert calls == 1
        torch.testing.assert_close(found, want, **EXACT)


def test_inputs_that_all_ranks_have_in_one_tensor() -> None:
    full, x = leaves_of(a=(4, 3), b=(4, 3)), drawn(2, 3).requires_grad_()

    def on_a_rank() -> tuple[int, Tensor]:
        p = {k: marked(v, Cut(0).split(v.shape, 2)) for k, v in full.items()}
        with zf.comm.ledger() as led:
            y = zf.column(x, p["a"]).sum() + zf.column(x, p["b"]).sum()
            found = torch.autograd.grad(y, x)[0]
        return led.calls_by_label["tensor backward"], found

    want = torch.autograd.grad((x @ full["a"].T + x @ full["b"].T).sum(), x)[0]
    for calls, found in zf.simulate(2)(on_a_rank)():
        assert calls == 1
        torch.testing.assert_close(found, want, **EXACT)


def test_what_was_written_to_in_between_is_copied_again() -> None:
    w = drawn(4, 3)

    def on_a_rank() -> tuple[Tensor, ...]:
        own = marked(w, Cut(0).split(w.shape, 2))
        x = drawn(2, 3).requires_grad_()
        h = x * 1.0
        with torch.no_grad():
            before = zf.column(h, own)
        first = zf.column(h.clone(), own)
        h.mul_(2.0)
        second = zf.column(h, own)
        assert torch.equal(before, first.detach())
        h = h * 1.0
        third = zf.column(h, own)
        h.mul_(0.5)  # `third` saved it
        fourth = zf.column(h, own)
        with pytest.raises(RuntimeError, match="modified by an inplace"):
            torch.autograd.grad(third.sum(), own)
        return second.detach(), fourth.detach(), torch.autograd.grad(fourth.sum(), x)[0]

    for rank, (second, fourth, grad) in enumerate(zf.simulate(2)(on_a_rank)()):
        rows = w[rank * 2 : rank * 2 + 2]
        torch.testing.assert_close(second, 2 * drawn(2, 3) @ rows.T, **EXACT)
        torch.testing.assert_close(fourth, drawn(2, 3) @ rows.T, **EXACT)
        torch.testing.assert_close(grad, w.sum(0).expand(2, 3), **EXACT)


@pytest.mark.parametrize("is_leaf", [False, True])
def test_an_input_is_freed_with_its_last_reference(is_leaf: bool) -> None:
    def on_a_rank() -> bool:
        own = marked(drawn(4, 3), Cut(0).split((4, 3), 2))
        x = drawn(2, 3).requires_grad_()
        x = x if is_leaf else x * 1.0
        y = zf.column(x, own)
        ref = weakref.ref(x)
        torch.autograd.grad(y.sum(), own)
        del x, y
        return ref() is None

    gc.disable()
    try:
        assert zf.simulate(2)(on_a_rank)() == [True, True]
    finally:
        gc.enable()


def test_inside_of_torch_func() -> None:
    full = leaves_of(**MLP)
    x = drawn(2, 6)

    def on_a_rank() -> Tensor:
        p = {k: marked(v, MLP_CUTS[k].split(v.shape, 2)) for k, v in full.items()}
        return torch.func.grad(lambda x: mlp(p, x).square().sum())(x)

    want = torch.func.grad(lambda x: mlp(full, x).square().sum())(x)
    for found in zf.simulate(2)(on_a_rank)():
        torch.testing.assert_close(found, want, **EXACT)


def test_what_belongs_to_a_level_of_torch_func_is_not_taken_again() -> None:
    w = drawn(4, 3)

    def on_a_rank() -> Tensor:
        own = marked(w, Cut(0).split(w.shape, 2))
        x = drawn(2, 3).requires_grad_()
        h = x * 1.0
        torch.func.grad(lambda a: (zf.column(h, own) * a).sum())(torch.ones((), dtype=h.dtype))
        return torch.autograd.grad(zf.column(h, own).sum(), x)[0]

    for found in zf.simulate(2)(on_a_rank)():
        torch.testing.assert_close(found, w.sum(0).expand(2, 3), **EXACT)


def test_second_derivatives() -> None:
    full = leaves_of(**MLP)

    def second(p: Leaves, x: Tensor) -> Tensor:
        first = torch.autograd.grad(mlp(p, x).square().sum(), x, create_graph=True)[0]
        return torch.autograd.grad(first.square().sum(), x)[0]

    def on_a_rank() -> Tensor:
        p = {k: marked(v, MLP_CUTS[k].split(v.shape, 3)) for k, v in full.items()}
        return second(p, drawn(2, 6).requires_grad_())

    want = second(full, drawn(2, 6).requires_grad_())
    for found in zf.simulate(3)(on_a_rank)():
        torch.testing.assert_close(found, want, **EXACT)


def test_a_sum_writes_to_no_memory_that_somebody_has() -> None:
    def on_a_rank() -> bool:
        x = torch.ones(3)
        y = operators.summed(x, group(zf.mesh(tensor=2), "tensor"))
        return torch.equal(x, torch.ones(3)) and torch.equal(y, torch.full((3,), 2.0))

    assert zf.simulate(2)(on_a_rank)() == [True, True]


def test_16_bits() -> None:
    full = {k: v.bfloat16() for k, v in leaves_of(**MLP, down_b=(6,)).items()}
    splits = cut(full, 2, **MLP_CUTS)
    same(mlp, full, splits, drawn(2, 3, 6).bfloat16(), 2, rtol=0.1, atol=0.1)


# --- bad input ------------------------------------------------------------------------------------


@contextmanager
def a_step_that_splits() -> Iterator[None]:
    class Splitting:
        group = group(zf.mesh(tensor=zf.world_size()), "tensor")
        adds_up = False

    token = context.push(context.Context(notes={"split": Splitting()}))
    try:
        yield
    finally:
        context.pop(token)


def test_leaves_that_are_split_otherwise_raise() -> None:
    x = drawn(2, 4)

    def leaf(dim: int | None, *shape: int) -> Tensor:
        return marked(drawn(*shape), None if dim is None else Cut(dim).split(shape, 2))

    def refused(call: Callable[[], Any], *words: str) -> None:
        with pytest.raises(PlacementError) as info:
            call()
        for word in words:
            assert word in str(info.value)

    def on_a_rank() -> None:
        first, last = leaf(0, 4, 4), leaf(1, 4, 4)
        y = zf.column(x, first)
        refused(lambda: zf.column(x, last), "zf.column: w [4, 2]", "dimension 1", "zf.row")
        refused(lambda: zf.row(y, first), "zf.row: w [2, 4]", "dimension 0", "zf.column")
        refused(lambda: zf.row(x, last), "x [2, 4] has 4 inputs", "takes 2 of 4")
        refused(lambda: zf.column(y, leaf(0, 4, 2)), "x [2, 2]", "another column")
        refused(lambda: zf.column(drawn(2, 3), first), "3 inputs", "takes 4")
        refused(lambda: zf.row(y, leaf(None, 4, 2)), "x [2, 2]", "expected a whole input")
        refused(lambda: zf.column(x, first, leaf(None, 4)), "zf.column: b [4]", "whole")
        refused(lambda: zf.row(y, last, leaf(0, 4)), "zf.row: b [2]", "a whole vector")
        refused(lambda: zf.column(x, first, torch.zeros(2)), "b [2] does not say")
        refused(lambda: zf.embed(torch.tensor([1]), last), "zf.embed: table [4, 2]", "dimension 1")
        refused(lambda: zf.cross_entropy(x, torch.tensor([1, 2]), head=last), "head [4, 2]")
        refused(lambda: zf.cross_entropy(first, torch.tensor([1, 2])), "logits [2, 4]")
        refused(lambda: operators.between(first), "a whole leaf")
        shared = marked(drawn(4, 4), Split.of(1, [[0, 1, 2], [2, 3]]))
        refused(lambda: zf.row(drawn(2, shared.shape[1]), shared), "on one rank")

    zf.simulate(2)(on_a_rank)()


def test_copies_raise_in_a_step_that_splits() -> None:
    def on_a_rank() -> None:
        w, x = marked(drawn(4, 4), Cut(0).split((4, 4), 2)), drawn(2, 4)
        with a_step_that_splits():
            for call in (
                lambda: zf.column(x, w * 2),
                lambda: zf.row(x, w.bfloat16()),
                lambda: zf.embed(torch.tensor([1]), w[:1]),
                lambda: zf.cross_entropy(x, torch.tensor([1, 2]), head=w.clone()),
                lambda: zf.cross_entropy(zf.column(x, w)[:, :1], torch.tensor([1, 2])),
            ):
                with pytest.raises(PlacementError, match="and this step splits its leaves"):
                    call()
            whole = marked(drawn(4, 4), None)
            zf.cross_entropy(zf.column(x, whole), torch.tensor([1, 2]))

    zf.simulate(2)(on_a_rank)()
    with a_step_that_splits():  # of one rank
        zf.column(drawn(2, 4), drawn(4, 4))


# --- in a step ------------------------------------------------------------------------------------


@pytest.mark.parametrize("ways", WAYS)
def test_a_step_that_splits(ways: int) -> None:
    """Three steps of AdamW, with leaves as the layout hands them to the loss."""
    full = grouped(4, 4, w=6) | leaves_of(**MLP, table=(11, 6), head=(11, 6))
    by = Cut(0, by=4)
    rules = {"[qkv]": by, "o": Cut(1, by=4), **MLP_CUTS, "table": Cut(0), "head": Cut(0)}
    ids = torch.tensor([[0, 3, 10, 2], [7, 3, 5, 9]])
    tx = zf.optim.adamw(1e-2)

    def loss(p: Leaves, ids: Tensor) -> Tensor:
        x = layer(p, zf.embed(ids[:, :-1], p["table"]))
        return zf.cross_entropy(x, ids[:, 1:], head=p["head"])

    def trained(step: Any) -> tuple[list[float], Leaves]:
        state, losses = step.place(zf.TrainState.create(full, tx)), []
        for _ in range(3):
            state, metrics = step(state, ids)
            losses.append(float(metrics["loss"]))
        return losses, dict(step.unplace(state).params)

    def on_a_rank() -> tuple[list[float], Leaves]:
        return trained(
            splitting.split(zf.train_step(loss, tx), rules=rules, mesh=zf.mesh(tensor=ways))
        )

    want, params = trained(zf.donate(zf.train_step(loss, tx)))
    for losses, found in zf.simulate(ways)(on_a_rank)():
        torch.testing.assert_close(losses, want, **EXACT)
        for name, x in params.items():
            torch.testing.assert_close(found[name], x, **EXACT)
