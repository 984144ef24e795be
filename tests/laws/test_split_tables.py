"""Split tables and losses over a split vocabulary: those of the full leaves."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import zfunc as zf
from tests.laws.split_leaves import (
    EXACT,
    MLP,
    MLP_CUTS,
    WAYS,
    Leaves,
    cut,
    drawn,
    leaves_of,
    marked,
    mlp,
    run,
    same,
)
from zfunc.kernels import KernelError, linear_losses
from zfunc.layout.splits import Cut, Split
from zfunc.ranks.comm import even_cuts


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
