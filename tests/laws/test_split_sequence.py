"""``split(sequence=True)``: a stream cut along positions gives what a whole one does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import zfunc as zf
from tests.laws.cases import assert_near, assert_same, numbers
from tests.laws.covering import Covering
from tests.laws.split_steps import (
    KV,
    RULES,
    TX,
    WIDTH,
    WORDS,
    Batch,
    batch,
    block,
    on_mesh,
    params,
    ranks_of,
    run,
)
from tests.laws.test_split_gpt import config, exact_losses, made, trained
from zfunc.language import gpt

__all__ = ["exact_losses"]  # a fixture

SOME = {"blocks.*.[qko]*": None, **RULES}
"""Attention is whole: fewer key and value heads than ranks."""


layer = block


def loss_of(params: Any, batch: Batch) -> Tensor:
    """That of ``test_split``, which slices ids and not the stream: 4 positions."""
    x = zf.scan(layer, params["blocks"], zf.embed(batch["ids"][:, :-1], params["table"]))
    return zf.cross_entropy(zf.column(x, params["table"]), batch["ids"][:, 1:])


def by_head(params: Any, batch: Batch) -> Tensor:
    """With rows of positions, whole work beside the stream, and logits that nobody holds."""
    ids = batch["ids"]
    x = zf.embed(ids, params["table"])
    x = x + zf.embed(torch.arange(ids.shape[1]), params["places"])
    x = x + zf.operators.positions(params["more"])
    x = zf.scan(block, params["blocks"], x)
    loss = zf.cross_entropy(x, ids.roll(-1, 1), head=params["head"], chunk=7)
    return loss + 0.1 * params["places"].square().sum() + params["blocks"][0]["norm"].sum()


def more_params() -> Any:
    more = {"places": numbers((8, WIDTH), 97), "more": numbers((5, WIDTH), 96)}
    return {**params(), **more, "head": numbers((WORDS, WIDTH), 98)}


LOSSES: dict[str, tuple[Callable[..., Tensor], Callable[[], Any]]] = {
    "logits": (loss_of, params),
    "head": (by_head, more_params),
}
PLACES = [
    *((data, 2, stage) for data in (1, 2) for stage in (0, 3)),
    *((1, 2, None), (1, 3, 0), (2, 3, 3), (1, 4, 1), (2, 4, 2)),
]
_ALONE: dict[str, Any] = {}


def alone(name: str) -> Any:
    if name not in _ALONE:
        loss, start = LOSSES[name]
        _ALONE[name] = run(zf.train_step(loss, TX), lambda f: zf.shard(f, stage=0), start)
    return _ALONE[name]


def rules_for(ways: int, **more: Any) -> Any:
    return {**more, **(SOME if ways > KV else RULES)}


def cut(ways: int, data: int, stage: int | None, **more: Any) -> Callable[[Any], zf.Step]:
    return on_mesh(ways, data, stage, rules=rules_for(ways, **more), sequence=True)


MET = [
    (name, data, ways, stage)
    for name in LOSSES
    for data, ways, stage in PLACES
    if Covering.whole or name != "head" or data * ways <= 4
]


@pytest.mark.parametrize(("name", "data", "ways", "stage"), MET)
def test_it_trains_as_in_one_process(name: str, data: int, ways: int, stage: int | None) -> None:
    """5 or 4 positions over 2, 3 and 4 ranks; 4 heads."""
    loss, start = LOSSES[name]
    wrap = cut(ways, data, stage, head=zf.Cut(0))
    wrap = wrap if name == "head" else cut(ways, data, stage)
    for mine in ranks_of(ways, data, lambda: run(zf.train_step(loss, TX), wrap, start)):
        assert_near(mine, alone(name), 1e-9)


@pytest.mark.parametrize("name", LOSSES)
def test_a_whole_table_and_head(name: str) -> None:
    loss, start = LOSSES[name]
    wrap = cut(3, 1, 1, table=None, head=None)
    wrap = (
        wrap if name == "head" else on_mesh(3, 1, 1, rules={"table": None, **SOME}, sequence=True)
    )
    for mine in ranks_of(3, 1, lambda: run(zf.train_step(loss, TX), wrap, start)):
        assert_near(mine, alone(name), 1e-9)


BESIDE: dict[str, Callable[[Any], Any]] = {
    "remat": zf.remat,
    "accumulate": lambda f: zf.accumulate(f, 3),
    "both": lambda f: zf.remat(zf.accumulate(f, 3)),
    "donate": zf.donate,
    "offload": lambda f: zf.offload(f, to="cpu"),
}


@pytest.mark.parametrize(
    ("name", "stage"),
    [(x, stage) for x in BESIDE for stage in (None, 0, 3) if x != "offload" or stage is not None],
)
def test_beside_another_transform(name: str, stage: int | None) -> None:
    data = 1 if stage is None else 2
    step, other = zf.train_step(loss_of, TX), BESIDE[name]
    for mine in ranks_of(2, data, lambda: run(step, lambda f: other(cut(2, data, stage)(f)))):
        assert_near(mine, alone("logits"), 1e-9)


ROUNDING: dict[str, tuple[Callable[[Any], Any], torch.dtype]] = {
    "precision": (zf.precision, torch.float32),
    "int8": (lambda f: zf.compress_grads(f, "int8", freeze_step=1), torch.float64),
}


@pytest.mark.parametrize("name", ROUNDING)
def test_what_rounds_leaves_no_leaf_to_drift(name: str) -> None:
    """``ranks_of`` compares bits; against data ranks alone it is near."""
    (other, dtype), step = ROUNDING[name], zf.train_step(loss_of, TX)
    found = ranks_of(
        2, 2, lambda: run(step, lambda f: other(cut(2, 2, 3)(f)), lambda: params(dtype))
    )
    bare = zf.simulate(2)(
        lambda: run(step, lambda f: other(zf.shard(f, stage=3)), lambda: params(dtype))
    )()
    assert_near(found[0][1].params, bare[0][1].params, 0.2)


@pytest.mark.usefixtures("exact_losses")
def test_the_gpt_of_train() -> None:
    shape = config()

    def loss(params: Any, ids: Tensor) -> Tensor:
        return gpt.loss(params, ids, shape)

    def on_a_rank() -> Any:
        step = zf.split(zf.train_step(loss, TX), rules=gpt.rules(shape), tensor=3, sequence=True)
        step = zf.shard(step, stage=3)
        return trained(step, step.place(zf.TrainState.create(made(shape), TX)))

    want = trained(zf.train_step(loss, TX), zf.TrainState.create(made(shape), TX))
    for found in zf.simulate(3)(on_a_rank)():
        assert_near(found[1], want[1], 1e-9)


def test_more_ranks_than_positions() -> None:
    """The last rank has none."""

    def short(params: Any, batch: Batch) -> Tensor:
        return loss_of(params, {"ids": batch["ids"][:, :4]})

    step = zf.train_step(short, TX)
    want = run(step, lambda f: zf.shard(f, stage=0))
    for mine in ranks_of(4, 1, lambda: run(step, cut(4, 1, 3))):
        assert_near(mine, want, 1e-9)


def test_on_one_rank_nothing_changes() -> None:
    assert_same(run(zf.train_step(loss_of, TX), cut(1, 1, 3)), alone("logits"))


# What is sent, and what is kept

ROWS, STREAM = 6, 6 * 4 * WIDTH * 8
"""Rows of a batch, and bytes of a stream of 4 positions of theirs."""


def measured(sequence: bool, beside: Callable[[Any], Any] = lambda f: f) -> tuple[Any, int]:
    """On one of 2 ranks what a step sends, and bytes that it keeps for backward."""
    kept: dict[int, Tensor] = {}

    def note(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x
        return x

    def watched(params: Any, batch: Batch) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            return loss_of(params, batch)

    step = beside(zf.split(zf.train_step(watched, TX), rules=RULES, tensor=2, sequence=sequence))
    state = step.place(zf.TrainState.create(params(), TX))
    with zf.comm.ledger() as led:
        step(state, batch(0))
    return led, sum(x.untyped_storage().nbytes() for x in kept.values())


def sent(led: Any) -> dict[str, int]:
    """Bytes of the stream by label; each all-reduce is a reduce-scatter and an all-gather."""
    labels = ("tensor forward", "tensor backward", "tensor embed")
    return {label: led.by_label.get(label, 0) for label in labels}


def test_as_many_bytes_are_sent() -> None:
    """An all-reduce is a reduce-scatter and an all-gather; whole leaves are summed once beside."""
    (whole, _), _ = zf.simulate(2)(lambda: measured(False))()
    (parts, _), _ = zf.simulate(2)(lambda: measured(True))()
    assert sum(sent(parts).values()) == sum(sent(whole).values())
    assert parts.calls_by_label["tensor forward"] == 9  # 2 layers x 4, and the head
    assert parts.calls_by_label["tensor whole leaves"] == 1


def test_what_is_kept_of_the_stream_is_divided() -> None:
    """Norms keep their inputs; columns keep theirs, which have been put together."""
    (_, whole), _ = zf.simulate(2)(lambda: measured(False))()
    (_, parts), _ = zf.simulate(2)(lambda: measured(True))()
    norms = 2 * (STREAM + 2 * ROWS * 4 * 8)  # what goes in, its means and deviations
    assert whole - parts == norms // 2


def test_recomputed_layers_keep_their_positions_and_gather_once_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[tuple[int, ...]] = []

    def spied(p: Any, x: Tensor) -> Tensor:
        given.append(tuple(x.shape))
        return block(p, x)

    monkeypatch.setitem(globals(), "layer", spied)
    (whole, _), _ = zf.simulate(2)(lambda: measured(False, zf.remat))()
    assert set(given) == {(ROWS, 4, WIDTH)}
    given.clear()
    (parts, _), _ = zf.simulate(2)(lambda: measured(True, zf.remat))()
    assert set(given) == {(ROWS, 2, WIDTH)}
    blocks, gather = 2, STREAM // 2
    assert sum(sent(parts).values()) == sum(sent(whole).values()) + blocks * gather


# Randomness


def dropping(rate: float, seen: list[Tensor]) -> Callable[..., Tensor]:
    def one(p: Any, x: Tensor) -> Tensor:
        y = zf.column(F.layer_norm(x, (WIDTH,), p["norm"]), p["up"], p["up_bias"])
        with zf.operators.in_parts():
            seen.append(F.dropout(torch.ones(64), rate))
            y = F.dropout(F.gelu(y), rate)
        seen.append(F.dropout(torch.ones(64), rate))
        return x + F.dropout(zf.row(y, p["down"], p["bias"]), rate)

    def loss(params: Any, batch: Batch) -> Tensor:
        x = zf.embed(batch["ids"][:, :-1], params["table"])
        x = zf.scan(one, params["blocks"], F.dropout(x, rate))
        return zf.cross_entropy(zf.column(x, params["table"]), batch["ids"][:, 1:])

    return loss


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("stage", [None, 3])
def test_masks_between_column_and_row_differ_and_those_of_the_stream_do_not(
    sequence: bool, stage: int | None
) -> None:
    def body() -> tuple[Any, list[Tensor]]:
        seen: list[Tensor] = []
        step = zf.train_step(dropping(0.2, seen), TX)
        return run(step, on_mesh(2, 1, stage, rules=SOME, sequence=sequence)), seen

    (mine, masks), (theirs, others) = zf.simulate(2)(body)()
    assert_same(mine, theirs)
    alike = [torch.equal(a, b) for a, b in zip(masks, others, strict=True)]
    assert alike == [False, not sequence] * (len(masks) // 2)
    every = [tuple(x.tolist()) for x in masks + others[::2]]
    assert len(set(every)) == len(every)  # each layer and step its own


@pytest.mark.parametrize("sequence", [False, True])
def test_recomputed_masks_are_those_of_the_forward(sequence: bool) -> None:
    wrap, step = (
        on_mesh(2, 1, 3, rules=SOME, sequence=sequence),
        zf.train_step(dropping(0.2, []), TX),
    )
    want = ranks_of(2, 1, lambda: run(step, wrap))
    assert_near(ranks_of(2, 1, lambda: run(step, lambda f: zf.remat(wrap(f)))), want, 1e-12)


# Bad input


def failing(loss: Callable[..., Tensor], match: str) -> None:
    def body() -> None:
        run(zf.train_step(loss, TX), cut(2, 1, 0), steps=1)

    with pytest.raises(zf.PlacementError, match=match):
        zf.simulate(2)(body)()


def test_a_slice_of_the_stream_is_refused() -> None:
    def loss(params: Any, batch: Batch) -> Tensor:
        x = zf.scan(block, params["blocks"], zf.embed(batch["ids"], params["table"]))
        return zf.cross_entropy(zf.column(x[:, :-1], params["table"]), batch["ids"][:, 1:])

    failing(loss, "not this rank's positions of the stream")


def test_a_stream_that_nothing_cut_is_refused() -> None:
    def loss(params: Any, batch: Batch) -> Tensor:
        x = block(params["blocks"][0], numbers((2, 4, WIDTH), 1))
        return zf.cross_entropy(zf.column(x, params["table"]), batch["ids"][:2, 1:])

    failing(loss, "nothing was cut yet")


def test_a_loss_of_own_positions_is_refused() -> None:
    def loss(params: Any, batch: Batch) -> Tensor:
        x = zf.scan(block, params["blocks"], zf.embed(batch["ids"], params["table"]))
        return x.square().mean()

    failing(loss, r"a loss, which is whole .* cuts the stream along positions")
