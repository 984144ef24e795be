"""What ``zf.foresee`` says is what simulated ranks send and hold."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import zfunc as zf
from tests.laws.covering import STAGES, Covering
from tests.laws.foreseen_steps import COUNTED, STEPS, batch
from tests.laws.plans_by_hand import llama

pytestmark = pytest.mark.usefixtures("thawed")

WORLDS = (2, 3, 4)
# What tests/laws/test_foreseen_compositions.py does not have.
ALONE = ("bf16, reduced so", "skip_unused", "unused", "lamb", "lion", "sgd", "zero bubble")


def places(turn: int, name: str) -> list[tuple[int, int]]:
    """Pairs of a stage and a world: one for each step, all of them with ``--whole``."""
    case = STEPS[name]
    if not Covering.whole and name not in ALONE:
        return []
    every = [
        (stage, ranks)
        for ranks in WORLDS
        for stage in STAGES
        if stage in case.stages and not (case.axes and ranks % 2)
    ]
    return every if Covering.whole else [every[5 * turn % len(every)]]


CASES = [(name, *place) for turn, name in enumerate(STEPS) for place in places(turn, name)]


def observed(name: str, stage: int, ranks: int) -> list[Any]:
    """Of each rank: the ledgers of two steps, the bytes of its state, and its rows."""

    def body() -> Any:
        step = STEPS[name].step(stage, ranks)
        state, rows, ledgers = step.place(STEPS[name].state()), step.local_batch(batch(ranks)), []
        size = zf.tree.size_bytes(state)
        for _ in range(2):
            with zf.comm.ledger() as sent:
                state, _ = step(state, rows)
            ledgers.append(sent)
        return *ledgers, size, rows

    return zf.simulate(ranks)(body)()


@pytest.mark.parametrize(("name", "stage", "ranks"), CASES)
def test_bytes_and_calls_are_those_of_simulated_ranks(name: str, stage: int, ranks: int) -> None:
    """By label, in the first and in a steady step; state bytes are those of the placed state."""
    seen = observed(name, stage, ranks)
    for rank in range(ranks) if Covering.whole else [(stage + 1) % ranks]:
        first, steady, size, rows = seen[rank]
        step, state = STEPS[name].step(stage, ranks), STEPS[name].state()
        told = zf.foresee(step, state, rows, ranks=ranks, rank=rank, device="cpu")
        for counted in COUNTED:
            assert getattr(told.first, counted) == getattr(first, counted), (rank, counted)
            assert getattr(told.sent, counted) == getattr(steady, counted), (rank, counted)
        assert told.sent.calls_by_kind.total() == told.sent.calls == told.sent.calls_by_axis.total()
        assert told.state_bytes == size


@cache
def plain() -> Any:
    """What is foreseen of a step on given tensors."""
    return foreseen(STEPS["plain"].state())


def foreseen(state: Any, rows: Any = None) -> Any:
    rows = batch(1) if rows is None else rows
    return zf.foresee(STEPS["plain"].step(3, 4), state, rows, ranks=4, rank=1)


def counts(told: Any) -> tuple[Any, ...]:
    """All figures that do not depend on values."""
    figures = told.state_bytes, told.peak_bytes, told.flops, told.rows, told.timeline
    return *figures, told.sent.by_label, told.sent.calls_by_label


def on_meta(tree: Any) -> Any:
    """The same tree without values; counters keep theirs, as an optimizer makes them."""
    return zf.tree.map(lambda x: x.to("meta") if x.is_floating_point() and x.dim() else x, tree)


def test_a_state_on_meta_is_foreseen_as_a_real_one() -> None:
    state = STEPS["plain"].state()
    assert counts(foreseen(on_meta(state), batch(1).to("meta"))) == counts(plain())


def test_a_state_that_is_made_on_call_is_foreseen_as_a_real_one() -> None:
    assert counts(foreseen(STEPS["plain"].state, lambda: batch(1))) == counts(plain())


def test_other_values_are_foreseen_alike() -> None:
    state = zf.tree.map(lambda x: x * 3 if x.is_floating_point() else x, STEPS["plain"].state())
    assert counts(foreseen(state, batch(1).flip(0))) == counts(plain())


def test_what_is_real_is_not_changed() -> None:
    """Not even by a step that gives memory back, nor is a generator drawn from."""
    state, rows = STEPS["donate"].state(), batch(1)
    before = [x.clone() for x in zf.tree.leaves(state)]
    seeded = torch.get_rng_state()
    zf.foresee(STEPS["donate"].step(1, 3), state, rows, ranks=3)
    assert all(map(torch.equal, zf.tree.leaves(state), before))
    assert torch.equal(rows, batch(1)) and torch.equal(torch.get_rng_state(), seeded)


def test_a_tensor_of_the_caller_is_never_written() -> None:
    """One that the function holds, and writes to, too."""
    seen, large = torch.zeros(3), torch.zeros(100, 100)

    def step(state: Any, x: Tensor) -> Any:
        seen.add_(1.0)
        large.mul_(2.0).add_(1.0)
        return {"params": state["params"] * 2.0}, large.sum() + seen.sum()

    zf.foresee(step, {"params": torch.zeros(4)}, torch.zeros(4), ranks=1)
    assert not seen.any() and not large.any()


@pytest.mark.parametrize("bits", [4, 8] if Covering.whole else [4])
def test_inference_in_low_bits_and_texts_send_what_simulated_ranks_do(bits: int) -> None:
    """All steps of ``generate``; the check of rows is that of a step that is called."""
    pytest.importorskip("transformers")
    model = zf.functionalize(llama(8, 4, intermediate_size=52), train=False)
    ids = torch.randint(2, 40, (3, 5))

    def generated(params: Any, ids: Tensor) -> Tensor:
        return zf.generate(model, params, ids, max_new_tokens=4)

    def placed(fn: Any) -> Any:
        return zf.split(zf.quantize(fn, bits=bits, group_size=4), model, tensor=2)

    def body() -> Any:
        predict = placed(model.apply)
        params = predict.place(model.params)
        with zf.comm.ledger() as once:
            predict(params, ids)
        with zf.comm.ledger() as text:
            generated(params, ids)
        return once.by_label, text.by_label, zf.tree.size_bytes(params)

    once, text, size = zf.simulate(2)(body)()[1]
    told = [
        zf.foresee(placed(fn), model.params, ids, ranks=2, rank=1, device="cpu")
        for fn in (model.apply, generated)
    ]
    assert told[0].sent.by_label == once
    rows = "rows of step.local_batch"
    assert {name: n for name, n in told[1].sent.by_label.items() if name != rows} == text
    assert [each.state_bytes for each in told] == [size, size]


LLAMA = {
    "vocab_size": 300,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.mark.parametrize("stage", STAGES if Covering.whole else [3])
def test_an_unmodified_llama_on_meta_is_that_of_simulated_ranks(stage: int) -> None:
    """Its rotary tables are on meta, too."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(**LLAMA)
    ids, tx = torch.randint(300, (6, 17)), STEPS["plain"].tx

    def made() -> tuple[Any, Any]:
        model = zf.functionalize(transformers.AutoModelForCausalLM.from_config(config))

        def loss(params: Any, ids: Tensor) -> Tensor:
            return model.apply(params, input_ids=ids, labels=ids, use_cache=False).loss

        step = zf.shard(zf.train_step(loss, tx), stage=stage, unit_bytes=1 << 17)
        return zf.remat(step), zf.TrainState.create(model.params, tx)

    def body() -> Any:
        step, state = real
        state, ledgers = step.place(state), []
        size, rows = zf.tree.size_bytes(state), step.local_batch(ids)
        for _ in range(2):
            with zf.comm.ledger() as sent:
                state, _ = step(state, rows)
            ledgers.append(sent)
        return *ledgers, size

    real = made()
    first, steady, size = zf.simulate(3)(body)()[1]
    with torch.device("meta"):
        step, state = made()
    told = zf.foresee(step, state, ids[:2], ranks=3, rank=1, device="cpu")
    for counted in COUNTED:
        assert getattr(told.first, counted) == getattr(first, counted), counted
        assert getattr(told.sent, counted) == getattr(steady, counted), counted
    assert told.state_bytes == size
