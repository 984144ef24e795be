"""Operators on split leaves: what they give, and their gradients, are those of the full leaves."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import zfunc as zf
from zfunc import operators
from zfunc.engine import context
from zfunc.errors import PlacementError
from zfunc.kernels import KernelError, linear_losses
from zfunc.layout.splits import Cut, Part, Split, mark
from zfunc.operators.conjugates import copied_together, cut_positions, joined_positions
from zfunc.ranks.axes import group
from zfunc.ranks.comm import even_cuts
from zfunc.transforms import splitting
from zfunc.trees.nodes import part_of

Leaves = dict[str, Tensor]
Splits = Mapping[str, Split | None]
Model = Callable[[Leaves, Tensor], Tensor]
WAYS = (1, 2, 3, 4)
EXACT = {"rtol": 1e-9, "atol": 1e-9}


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def leaves_of(**shapes: tuple[int, ...]) -> Leaves:
    return {name: drawn(*shape, seed=i + 1) for i, (name, shape) in enumerate(shapes.items())}


def cut(full: Leaves, ways: int, **cuts: Cut) -> Splits:
    return {
        name: cuts[name].split(x.shape, ways) if name in cuts else None for name, x in full.items()
    }


def marked(x: Tensor, split: Split | None) -> Tensor:
    """This rank's part of a leaf, as the layout hands it to a loss."""
    ways = zf.world_size()
    own = x if split is None else split.local(x, zf.rank())
    own = own.detach().clone().requires_grad_(x.is_floating_point())
    return mark(own, Part(split, zf.mesh(tensor=ways), "tensor"))


@dataclass
class Result:
    out: Tensor
    x: Tensor | None
    leaves: Leaves
    calls: dict[str, int]
    sent: dict[str, int]


def run(model: Model, leaves: Leaves, x: Tensor) -> Result:
    x = x.detach().clone()
    wrt = dict(leaves)
    if x.is_floating_point():
        x.requires_grad_()
        wrt["x"] = x * 1.0  # as in a model, no leaf
        stream = wrt.pop("x")
    else:
        stream = x
    with zf.comm.ledger() as led:
        out = model(leaves, stream)
        probe = torch.linspace(0.5, 1.5, out.numel(), dtype=out.dtype).view(out.shape)
        named = list(leaves)
        ends = [leaves[k] for k in named] + ([x] if x.requires_grad else [])
        grads = torch.autograd.grad((out * probe).sum(), ends)
    of_x = grads[-1] if x.requires_grad else None
    found = dict(zip(named, grads[: len(named)], strict=True))
    return Result(out.detach(), of_x, found, dict(led.calls_by_label), dict(led.by_label))


def same(
    model: Model, full: Leaves, splits: Splits, x: Tensor, ways: int, **tol: float
) -> list[Result]:
    """A model on split leaves against itself on full ones, which is plain torch."""
    want = run(model, {k: v.clone().requires_grad_() for k, v in full.items()}, x)

    def on_a_rank() -> Result:
        return run(model, {k: marked(v, splits[k]) for k, v in full.items()}, x)

    results: list[Result] = zf.simulate(ways)(on_a_rank)()
    limits = tol or EXACT
    for rank, got in enumerate(results):
        torch.testing.assert_close(got.out, want.out, **limits)
        assert torch.equal(got.out, results[0].out)
        if want.x is not None:
            torch.testing.assert_close(got.x, want.x, **limits)
            assert torch.equal(got.x, results[0].x)
        for name, split in splits.items():
            expected = want.leaves[name] if split is None else split.local(want.leaves[name], rank)
            torch.testing.assert_close(
                got.leaves[name], expected, **limits, msg=lambda m, n=name: f"{n}: {m}"
            )
            if split is None:
                assert torch.equal(got.leaves[name], results[0].leaves[name]), name
        if ways == 1:
            assert torch.equal(got.out, want.out)
            assert all(torch.equal(got.leaves[k], want.leaves[k]) for k in full)
            assert sum(got.calls.values()) == 0
    return results


# --- products ------------------------------------------------------------------------------------


def mlp(p: Leaves, x: Tensor) -> Tensor:
    h = F.layer_norm(x, x.shape[-1:])
    gate, up = zf.column(h, p["gate"], p.get("gate_b")), zf.column(h, p["up"])
    return x + zf.row(F.silu(gate) * up, p["down"], p.get("down_b"))


MLP = {"gate": (7, 6), "up": (7, 6), "down": (6, 7)}
MLP_CUTS = {"gate": Cut(0), "up": Cut(0), "down": Cut(1)}


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


# --- tables and losses ----------------------------------------------------------------------------


def tables(vocab: int, ways: int) -> dict[str, Split]:
    ends = even_cuts(vocab, ways)
    odd = [[i for i in range(vocab) if i % ways == r] for r in range(ways)]
    last = [range(vocab) if r == ways - 1 else () for r in range(ways)]
    even = [range(ends[r], ends[r + 1]) for r in range(ways)]
    return {"runs": Split.of(0, even), "odd": Split.of(0, odd), "empty": Split.of(0, last)}


@pytest.mark.parametrize("ways", WAYS)
@pytest.mark.parametrize("kind", ["runs", "odd", "empty"])
@pytest.mark.parametrize("padding", [None, 3, -1])
def test_rows_of_a_split_table(ways: int, kind: str, padding: int | None) -> None:
    full = leaves_of(table=(11, 4))
    split = tables(11, ways)[kind]
    ids = torch.tensor([[0, 3, 10], [7, 3, 5]])

    def model(p: Leaves, ids: Tensor) -> Tensor:
        return zf.embed(ids, p["table"], padding)

    for result in same(model, full, {"table": split}, ids, ways, rtol=0.0, atol=0.0):
        assert result.calls == ({} if ways == 1 else {"tensor embed": 1})
    same(model, full, {"table": split}, torch.tensor(4), ways)
    same(model, full, {"table": split}, torch.empty((0, 2), dtype=torch.int64), ways)
    same(model, full, {"table": split}, ids.int(), ways)


@pytest.mark.parametrize("wrong", [-1, 11])
def test_an_id_that_is_no_row_raises(wrong: int) -> None:
    def on_a_rank() -> None:
        table = marked(drawn(11, 4), Cut(0).split((11, 4), 2))
        with pytest.raises(IndexError, match=f"id {wrong} is no row of a table of 11"):
            zf.embed(torch.tensor([1, wrong]), table)
        with pytest.raises(IndexError, match="padding_idx=11"):
            zf.embed(torch.tensor([1]), table, 11)

    zf.simulate(2)(on_a_rank)()


RULES: list[dict[str, Any]] = [
    {},
    {"label_smoothing": 0.1, "z_loss": 0.01},
    {"reduction": "sum", "label_smoothing": 0.3, "ignore_index": 5},
    {"reduction": "none", "z_loss": 0.1},
]
TARGETS = torch.tensor([[0, 3, -100], [10, 3, 5]])


def plain(x: Tensor, head: Tensor, target: Tensor, **rule: Any) -> Tensor:
    """By torch."""
    rule = dict(rule)
    z, ignore, how = (
        rule.pop("z_loss", 0.0),
        rule.pop("ignore_index", -100),
        rule.pop("reduction", "mean"),
    )
    logits = (x @ head.T).flatten(0, -2)
    counts = target.flatten() != ignore
    rows = F.cross_entropy(logits, target.flatten(), reduction="none", ignore_index=ignore, **rule)
    rows = rows + z * logits.logsumexp(-1).square() * counts
    return {"none": rows.view(target.shape), "sum": rows.sum(), "mean": rows.sum() / counts.sum()}[
        how
    ]


@pytest.mark.parametrize("ways", WAYS)
@pytest.mark.parametrize("kind", ["runs", "odd", "empty"])
@pytest.mark.parametrize(
    ("rule", "fused"),
    [(rule, fused) for rule in RULES for fused in (False, True)][:-1],  # "none" has no gradient
    ids=str,
)
def test_cross_entropy(ways: int, kind: str, rule: dict[str, Any], fused: bool) -> None:
    full = leaves_of(head=(11, 4))
    split = tables(11, ways)[kind]
    target = TARGETS if "ignore_index" not in rule else TARGETS.clamp(min=0)

    def model(p: Leaves, x: Tensor) -> Tensor:
        if fused:
            return zf.cross_entropy(x, target, head=p["head"], chunk=4, **rule)
        return zf.cross_entropy(zf.column(x, p["head"]), target, **rule)

    x = drawn(2, 3, 4)
    want = run(
        lambda p, x: plain(x, p["head"], target, **rule),
        {"head": full["head"].clone().requires_grad_()},
        x,
    )
    for result in same(model, full, {"head": split}, x, ways):
        torch.testing.assert_close(result.out, want.out, **EXACT)
        torch.testing.assert_close(result.x, want.x, **EXACT)
        if ways > 1:
            assert result.calls == {"tensor loss": 2 if fused else 1, "tensor backward": 1}


@pytest.mark.parametrize("ways", [2, 3, 4])
@pytest.mark.parametrize("fused", [False, True])
def test_a_table_that_is_the_head_too(ways: int, fused: bool) -> None:
    full = leaves_of(table=(11, 6), **MLP)
    splits = cut(full, ways, table=Cut(0), **MLP_CUTS)
    ids = torch.tensor([[0, 3, 10, 2], [7, 3, 5, 9]])

    def model(p: Leaves, ids: Tensor) -> Tensor:
        x = mlp(p, zf.embed(ids[:, :-1], p["table"]))
        if fused:
            return zf.cross_entropy(x, ids[:, 1:], head=p["table"])
        return zf.cross_entropy(zf.column(x, p["table"]), ids[:, 1:])

    same(model, full, splits, ids, ways)


def test_great_logits_and_masked_classes() -> None:
    logits = drawn(3, 7) + 1e8
    logits[1, :4] = -torch.inf  # all that rank 0 has
    target = torch.tensor([2, 5, 6])

    def loss(x: Tensor) -> Tensor:
        return zf.cross_entropy(x, target, z_loss=1e-9)

    def on_a_rank() -> tuple[Tensor, Tensor]:
        own = marked(logits, Split.of(1, [range(4), range(4, 7)]))
        value = loss(own)
        return value.detach(), torch.autograd.grad(value, own)[0]

    x = logits.clone().requires_grad_()
    want = torch.autograd.grad(loss(x), x)[0]
    results = zf.simulate(2)(on_a_rank)()
    for value, _ in results:
        torch.testing.assert_close(value, loss(x).detach(), **EXACT)
    torch.testing.assert_close(torch.cat([grad for _, grad in results], 1), want, **EXACT)


def test_small_losses_of_great_logits_keep_their_digits() -> None:
    logits = torch.full((1, 6), 1e8, dtype=torch.float64)
    logits[0, 4] += 30

    def on_a_rank() -> Tensor:
        own = marked(logits, Split.of(1, [range(3), range(3, 6)]))
        return zf.cross_entropy(own, torch.tensor([4])).detach()

    want = torch.tensor(5 * math.exp(-30), dtype=torch.float64)
    for value in zf.simulate(2)(on_a_rank)():
        torch.testing.assert_close(value, want, rtol=1e-2, atol=0.0)


def test_ranks_with_more_classes_have_chunks_of_as_many_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(linear_losses, "CHUNK_BYTES", 310 * 4 * 8)  # 300 rows of 4, but not of 5
    full, target = leaves_of(head=(9, 4)), torch.arange(300) % 9

    def model(p: Leaves, x: Tensor) -> Tensor:
        return zf.cross_entropy(x, target, head=p["head"])

    for result in same(model, full, cut(full, 2, head=Cut(0)), drawn(300, 4), 2):
        assert result.calls["tensor loss"] == 3


def test_cross_entropy_in_16_bits() -> None:
    full = {"head": drawn(11, 4).bfloat16()}
    for fused in (False, True):

        def model(p: Leaves, x: Tensor, fused: bool = fused) -> Tensor:
            if fused:
                return zf.cross_entropy(x, TARGETS, head=p["head"], chunk=2)
            return zf.cross_entropy(zf.column(x, p["head"]), TARGETS)

        results = same(
            model,
            full,
            cut(full, 2, head=Cut(0)),
            drawn(2, 3, 4).bfloat16(),
            2,
            rtol=0.05,
            atol=0.02,
        )
        assert results[0].out.dtype == torch.float32


def test_losses_without_gradients_and_targets_that_are_no_class() -> None:
    def on_a_rank() -> None:
        head, x = marked(drawn(11, 4), Cut(0).split((11, 4), 2)), drawn(2, 3, 4)
        with torch.no_grad():
            logits = zf.column(x, head)
            one, other = zf.cross_entropy(logits, TARGETS), zf.cross_entropy(x, TARGETS, head=head)
            rows = zf.cross_entropy(x, TARGETS, head=head, reduction="none")
        torch.testing.assert_close(one, other, **EXACT)
        torch.testing.assert_close(rows.sum() / 5, one, **EXACT)
        assert torch.cat([rows.flatten()])[2] == 0
        for call in (partial(zf.cross_entropy, logits), partial(zf.cross_entropy, x, head=head)):
            with pytest.raises(KernelError, match="target 11 is no class; expected 0 to 10"):
                call(torch.full((2, 3), 11))
        with pytest.raises(KernelError, match="cannot be differentiated"):
            zf.cross_entropy(x.requires_grad_(), TARGETS, head=head, reduction="none")

    zf.simulate(2)(on_a_rank)()


# --- conjugate pairs ------------------------------------------------------------------------------


@pytest.mark.parametrize("ways", WAYS)
@pytest.mark.parametrize("dim", [0, 1, -2])
@pytest.mark.parametrize("length", [7, 2])
def test_positions_put_together_and_summed_are_adjoint(ways: int, dim: int, length: int) -> None:
    """``<gather(x), y> == <x, scatter(y)>`` with sums over ranks, forward and by gradients."""

    def on_a_rank() -> tuple[Tensor, ...]:
        ranks, ends = group(zf.mesh(tensor=ways), "tensor"), even_cuts(length, ways)
        own = ends[ranks.rank + 1] - ends[ranks.rank]
        shape, full = [2, 2, 3], [2, 2, 3]
        shape[dim], full[dim] = own, length
        x = drawn(*shape, seed=ranks.rank).requires_grad_()
        y = drawn(*full, seed=10 + ranks.rank).requires_grad_()
        whole = operators.gathered_positions(x, ranks, length, dim)
        part = operators.scattered_positions(y, ranks, dim)
        assert list(whole.shape) == full and list(part.shape) == shape
        back_x = torch.autograd.grad(whole, x, y.detach())[0]
        back_y = torch.autograd.grad(part, y, x.detach())[0]
        assert torch.equal(back_x, part.detach()) and torch.equal(back_y, whole.detach())
        return (whole * y).sum().detach(), (x * part).sum().detach()

    left, right = map(sum, zip(*zf.simulate(ways)(on_a_rank)(), strict=True))
    torch.testing.assert_close(left, right, **EXACT)


@pytest.mark.parametrize("ways", WAYS)
@pytest.mark.parametrize("dim", [0, 1, -2])
@pytest.mark.parametrize("length", [7, 2])
def test_positions_of_what_is_alike_are_put_together_again(
    ways: int, dim: int, length: int
) -> None:
    """Cut and joined is the identity, forward and backward: nothing is counted twice."""

    def on_a_rank() -> Tensor:
        ranks, full = group(zf.mesh(tensor=ways), "tensor"), [2, 2, 3]
        full[dim] = length
        x = drawn(*full).requires_grad_()
        part = cut_positions(x, ranks, dim)
        whole = joined_positions(part, ranks, length, dim)
        assert torch.equal(whole, x)
        y = drawn(*full, seed=1)
        assert torch.equal(torch.autograd.grad(whole, x, y)[0], y)
        if ways > 1:
            with pytest.raises(PlacementError, match="positions in"):
                joined_positions(part, ranks, length + ways, dim)
        return part.detach()

    found = zf.simulate(ways)(on_a_rank)()
    full = [2, 2, 3]
    full[dim] = length
    assert torch.equal(torch.cat(found, dim), drawn(*full))


@pytest.mark.parametrize("ways", WAYS)
def test_gradients_of_several_leaves_are_summed_in_one_round(ways: int) -> None:
    """Of each dtype; leaves that are not used have none, and those of gradients are right, too."""

    def on_a_rank() -> tuple[Tensor, int]:
        ranks = group(zf.mesh(tensor=ways), "tensor")
        leaves = [drawn(3), drawn(2, 2), drawn(4).float(), drawn(5)]
        leaves = [x.requires_grad_() for x in leaves]
        a, b, c, _ = copied_together(leaves, ranks, "together")
        loss = (1 + ranks.rank) * ((a**3).sum() + (b**2).sum() + c.sum().double())
        with zf.comm.ledger() as led:
            grads = torch.autograd.grad(loss, leaves, create_graph=True, allow_unused=True)
        total = sum(range(1, ways + 1))
        assert grads[3] is None and grads[2].dtype == torch.float32
        torch.testing.assert_close(grads[0], total * 3 * leaves[0] ** 2, **EXACT)
        torch.testing.assert_close(grads[1], total * 2 * leaves[1], **EXACT)
        curved = torch.autograd.grad(grads[0].sum(), leaves[0])[0]
        torch.testing.assert_close(curved, total * 6 * leaves[0], **EXACT)
        return led.calls_by_label.get("together", 0)

    assert zf.simulate(ways)(on_a_rank)() == [2 if ways > 1 else 0] * ways


@pytest.mark.parametrize("ways", WAYS)
def test_a_stream_in_positions_is_the_whole_one(ways: int) -> None:
    """Sequence parallelism by hand: norms on this rank's positions, their gradients summed."""
    full = leaves_of(**MLP, norm=(6,))
    splits = cut(full, ways, **MLP_CUTS)
    length = 5

    def model(p: Leaves, x: Tensor) -> Tensor:
        if part_of(p["up"]) is None:
            h = F.layer_norm(x, x.shape[-1:], p["norm"])
            return x + F.linear(F.silu(F.linear(h, p["gate"])) * F.linear(h, p["up"]), p["down"])
        ranks, ends = group(zf.mesh(tensor=ways), "tensor"), even_cuts(length, ways)
        x = operators.copied(x, ranks)[:, ends[ranks.rank] : ends[ranks.rank + 1]]
        h = F.layer_norm(x, x.shape[-1:], operators.between(p["norm"]))
        h = operators.gathered_positions(h, ranks, length)
        y = F.linear(F.silu(F.linear(h, p["gate"])) * F.linear(h, p["up"]), p["down"])
        x = x + operators.scattered_positions(y, ranks)
        # What is behind is whole again: each rank takes the gradient of its own positions.
        split = Split.of(0, [range(ends[r], ends[r + 1]) for r in range(ways)])
        return operators.gathered(x.transpose(1, 2), ranks, split).transpose(1, 2)

    same(model, full, splits, drawn(2, length, 6), ways)


def test_another_number_of_positions_raises() -> None:
    def on_a_rank() -> None:
        ranks = group(zf.mesh(tensor=2), "tensor")
        with pytest.raises(PlacementError, match="has 1 of 5 positions in"):
            operators.gathered_positions(drawn(2, 1, 3), ranks, 5)

    zf.simulate(2)(on_a_rank)()


@pytest.mark.parametrize("ways", [2, 3])
def test_outputs_put_together(ways: int) -> None:
    full = leaves_of(head=(7, 4), after=(7,))
    splits = cut(full, ways, head=Cut(0))

    def model(p: Leaves, x: Tensor) -> Tensor:
        y = zf.column(x, p["head"])
        part = part_of(y)
        if part is not None and part.split is not None:
            y = operators.gathered(y, part.group, part.split)
        return y.tanh() * p["after"]

    same(model, full, splits, drawn(2, 3, 4), ways)


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
