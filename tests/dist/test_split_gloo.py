"""``split`` on real gloo ranks: the simulated ranks' bits, the single process's numbers."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from torch import Tensor
from torch.nn import functional as F

import zfunc as zf
from tests.laws.cases import assert_near, assert_same
from tests.laws.covering import Covering
from tests.laws.plans_by_hand import llama
from tests.laws.split_steps import RULES, TX, Batch, alone, loss_of, on_mesh, run

STAGES = {(2, 1): (None, 0, 3), (2, 2): (1, 3)}  # of tensor and data ranks
Runs = dict[int | None, Any]


def functional(ways: int, data: int) -> tuple[Runs, list[int]]:
    """Metrics and the full state at each stage, and what one of these steps sent."""
    step, runs, sent = zf.train_step(loss_of, TX), Runs(), []
    for stage in STAGES[ways, data]:
        with zf.comm.ledger() as led:
            runs[stage] = run(step, on_mesh(ways, data, stage, rules=RULES))
        sent.append(led.payload_bytes)
    return runs, sent


def on_both(body: Callable[..., Any], ways: int, data: int) -> tuple[list[Any], list[Any]]:
    """What real ranks give, and what simulated ones give."""
    real = zf.launch(body, ways, data, nprocs=ways * data, timeout=240)
    return real, zf.simulate(ways * data)(body)(ways, data)


@pytest.mark.parametrize(("ways", "data"), STAGES)
def test_a_functional_model_trains_as_on_simulated_ranks(ways: int, data: int) -> None:
    for (runs, sent), (twins, counted) in zip(*on_both(functional, ways, data), strict=True):
        for stage, mine in runs.items():
            assert_near(mine, alone(), 1e-9, f"stage {stage}")
            assert_same(mine, twins[stage], f"stage {stage}")
        assert sent == counted


@cache
def small_llama() -> tuple[Any, Any, int]:
    """As Hugging Face wrote it; made once in a process, whose threads share a generator."""
    module = llama(4, 2)
    model = zf.functionalize(module)
    return model, model.params, module.config.vocab_size


def trained_llama(wrap: Callable[[Any], Any]) -> Any:
    model, start, words = small_llama()

    def loss(params: Any, batch: Batch) -> Tensor:
        logits = model.apply(params, batch["ids"]).logits[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), batch["ids"][:, 1:].flatten())

    return run(zf.train_step(loss, TX), wrap, lambda: start, words=words)


def split_llama(ways: int, data: int) -> list[Any]:
    """On the whole stream, and on positions of it."""
    model = small_llama()[0]
    wraps = [on_mesh(ways, data, 3, model=model, sequence=how) for how in (False, True)]
    return [trained_llama(wrap) for wrap in wraps]


# Each rank imports transformers, which takes longer than all else here.
@pytest.mark.parametrize(("ways", "data"), STAGES if Covering.whole else [(2, 1)])
def test_a_llama_trains_as_on_simulated_ranks(ways: int, data: int) -> None:
    pytest.importorskip("transformers")
    want = trained_llama(lambda f: zf.shard(f, stage=0))
    for mine, twin in zip(*on_both(split_llama, ways, data), strict=True):
        assert_near(mine, [want, want], 1e-9)
        assert_same(mine, twin)


def families(ways: int, data: int) -> dict[tuple[str, int], Any]:
    """Metrics and the full state of each family of the law of training, at each stage."""
    from tests.laws import test_split_training as law

    return {
        (name, stage): law.trained(name, law.model_of(name).split(data, ways, stage))
        for name in law.FAMILIES
        for stage in (0, 1, 2, 3)
    }


@pytest.mark.parametrize(("ways", "data"), STAGES if Covering.whole else [])
def test_families_train_as_in_one_process(ways: int, data: int) -> None:
    law = pytest.importorskip("tests.laws.test_split_training")
    runs = zf.launch(families, ways, data, nprocs=ways * data, timeout=1800)
    for mine in runs:
        for (name, stage), found in mine.items():
            assert_near(found, law.alone(name), 1e-9, f"{name}, stage {stage}")
            assert_same(found, runs[0][name, stage], f"{name}, stage {stage}")
