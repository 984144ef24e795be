"""``zf.hf.Trainer`` on real ranks against ``transformers.Trainer`` under DDP."""

from __future__ import annotations

import functools
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import zfunc as zf
from tests.dist.trainer_runs import GROUPED, InDouble, Run, run
from tests.laws.covering import Covering

FAMILIES = ("llama", "bert", "t5")
BRIEFLY = {"max_steps": 2, "per_device_train_batch_size": 1, "eval_strategy": "no"}
GENERATE = {"predict_with_generate": True, "generation_max_length": 6}


def at(stage: int, *around: Any) -> Any:
    def transforms(step: Any) -> Any:
        return functools.reduce(lambda made, wrap: wrap(made), around, zf.shard(step, stage=stage))

    return transforms


def split(step: Any, model: Any) -> Any:
    return zf.shard(zf.split(step, model, tensor=2), stage=3)


def pipe(step: Any) -> Any:
    return zf.pipeline(step, 2, pipe=2)


def pair(family: str, *ours: Any, **same: Any) -> list[Run]:
    """Trainer's own run, and one for each of these transforms."""
    return [run(family, transforms, **same) for transforms in (None, *ours)]


def few(folder: str) -> dict[str, list[Run]]:
    """What ``make test`` compares, in one world: most of its time is in the imports."""
    os.chdir(folder)
    warnings.simplefilter("ignore")
    found = {
        "float64": pair("llama", at(3), at(0, zf.remat), dtype=torch.float64, mixin=InDouble),
        "smoothed": pair("llama", at(3), label_smoothing_factor=0.1, eval_strategy="no"),
        "bert": pair("bert", at(3), optim="sgd", **GROUPED),
        "t5": pair("t5", at(3), **GENERATE),
        "bf16": pair("llama", at(3), bf16=True, gradient_checkpointing=True),
    }
    both = {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 4}
    found["shared rows"] = [
        run("llama", held_out=8),
        *(run("llama", transforms, held_out=8, **both) for transforms in (split, pipe)),
    ]
    found["counted"] = [
        run("llama", at(stage), gradient_accumulation_steps=n, **BRIEFLY)
        for stage in range(4)
        for n in (1, 4)
    ]
    best = {"save_strategy": "steps", "save_steps": 2, "load_best_model_at_end": True}
    best |= {"metric_for_best_model": "eval_sum", "learning_rate": 5e-2}
    found["best"] = pair("llama", at(3), **best)
    whole = found["best"][1]
    again = run("llama", at(3), resume=str(Path(whole.folder) / "checkpoint-2"), **best)
    found["resumed"] = [whole, again]
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Run]]:
    folder = str(tmp_path_factory.mktemp("trainer"))
    found: dict[str, list[Run]] = zf.launch(few, folder, nprocs=2, timeout=120)[0]
    return found


def near(plain: Run, ours: Run, rel: float) -> None:
    assert ours.rates == plain.rates
    assert ours.losses == pytest.approx(plain.losses, rel=rel)
    assert ours.norms == pytest.approx(plain.norms, rel=rel)
    assert len(ours.evals) == len(plain.evals)
    for mine, theirs in zip(ours.evals, plain.evals, strict=True):
        assert mine["eval_loss"] == pytest.approx(theirs["eval_loss"], rel=rel)


def same(plain: Run, ours: Run, rel: float) -> None:
    near(plain, ours, rel)
    assert ours.generated == plain.generated
    for name, want in plain.weights.items():
        assert torch.allclose(ours.weights[name], want, rtol=0, atol=10 * rel), name


def test_losses_and_norms_in_float64(runs: dict[str, list[Run]]) -> None:
    plain, *ours = runs["float64"]
    for each in ours:
        same(plain, each, 1e-9)
        assert each.evals == [pytest.approx(x, rel=1e-9) for x in plain.evals]


@pytest.mark.parametrize("case", ["smoothed", "bert", "t5", "best"])
def test_losses_and_norms_in_float32(runs: dict[str, list[Run]], case: str) -> None:
    same(*runs[case], 1e-6)


def test_ranks_that_share_rows_count_them_once(runs: dict[str, list[Run]]) -> None:
    plain, *ours = runs["shared rows"]
    for each in ours:
        same(plain, each, 1e-6)
        assert each.evals == [pytest.approx(x, rel=1e-6) for x in plain.evals]


def test_generated_tokens_are_the_same(runs: dict[str, list[Run]]) -> None:
    plain, ours = runs["t5"]
    assert [x["eval_sum"] for x in ours.evals] == [x["eval_sum"] for x in plain.evals]


def test_an_update_reduces_once_at_stages_0_and_1(runs: dict[str, list[Run]]) -> None:
    """At stage 2 each microbatch's gradients are reduced, at 3 its parameters are gathered, too."""
    sent = [x.sent or 0 for x in runs["counted"]]
    one, four = sent[::2], sent[1::2]
    assert four[:2] == one[:2]
    assert 2 * one[2] < four[2] < 3 * one[2] and 3.9 * one[3] < four[3] < 4 * one[3]


def test_bf16_is_precision(runs: dict[str, list[Run]]) -> None:
    plain, ours = runs["bf16"]
    near(plain, ours, 1e-2)
    assert ours.losses != plain.losses


def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(runs: dict[str, list[Run]]) -> None:
    whole, again = runs["resumed"]
    assert again.losses == whole.losses[2:]
    assert again.norms == whole.norms and again.evals == whole.evals
    assert all(torch.equal(again.weights[name], x) for name, x in whole.weights.items())


def test_checkpoints_are_hugging_face_folders(runs: dict[str, list[Run]]) -> None:
    from transformers import LlamaForCausalLM

    for each in runs["best"]:
        read = [
            LlamaForCausalLM.from_pretrained(Path(each.folder) / f"checkpoint-{n}").state_dict()
            for n in (2, 4)
        ]
        assert any(all(torch.equal(x[k], w) for k, w in each.weights.items()) for x in read)


def every(folder: str, family: str) -> dict[str, list[Run]]:
    os.chdir(folder)
    warnings.simplefilter("ignore")
    stages = [at(0), at(1), at(2), at(3), at(3, zf.remat), at(0, zf.remat)]
    more: dict[str, Any] = GENERATE if family == "t5" else {}
    mixin = InDouble if family == "llama" else None
    return {
        "float64": pair(family, *stages, dtype=torch.float64, mixin=mixin, **more),
        "float32": pair(family, *stages, **more),
        "bf16": pair(family, *stages, bf16=True, **more),
    }


@pytest.mark.skipif(not Covering.whole, reason="--whole")
@pytest.mark.parametrize("family", FAMILIES)
def test_every_stage(family: str, tmp_path: Path) -> None:
    found = zf.launch(every, str(tmp_path), family, nprocs=2, timeout=200)[0]
    for dtype, rel in (("float64", 1e-9), ("float32", 1e-6)):
        plain, *ours = found[dtype]
        for each in ours:
            same(plain, each, rel)
    plain, *ours = found["bf16"]
    for each in ours:
        near(plain, each, 1e-2)
