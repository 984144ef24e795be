"""``pipeline`` on real gloo ranks: the simulated ranks' bits, the single process's numbers."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import zfunc as zf
from tests.laws.cases import assert_near, assert_same
from tests.laws.covering import Covering
from tests.laws.models import block, mean_square
from tests.laws.pipelines import TX, alone, model_of, rows, stack
from zfunc.errors import DesyncError

How = tuple[str, int]  # a schedule, and a ZeRO stage
# Ranks along pipe and data.
RUNS: dict[tuple[int, int], list[How]] = {
    (2, 1): [("1f1b", 0), ("zb", 1), ("zbv", 3)],
    (2, 2): [("1f1b", 1), ("zbv", 3), ("interleaved", 0)],
}
MICROBATCHES = 4
Found = dict[How, tuple[Any, dict[str, int]]]


def trained(name: str, hows: list[How], pipe: int, data: int) -> Found:
    """Metrics and the full state under each schedule, and what a step has sent."""
    found: Found = {}
    for schedule, stage in hows:

        def wrap(step: Any, schedule: str = schedule, stage: int = stage) -> Any:
            mesh = zf.mesh(data=data, pipe=pipe)
            step = zf.pipeline(step, MICROBATCHES, schedule=schedule, mesh=mesh)
            return zf.shard(step, stage=stage)

        with zf.comm.ledger() as led:
            run = model_of(name).trained(wrap, local=True)
        found[schedule, stage] = run, dict(led.by_label)
    return found


# Each rank that has a model of Hugging Face imports transformers, which takes longer than the rest.
NAMES = ["stack", "tied gpt", "skips", *(["tied llama", "t5"] if Covering.whole else [])]


def each(pipe: int, data: int, hows: dict[str, list[How]]) -> dict[str, Found]:
    return {name: trained(name, hows[name], pipe, data) for name in hows}


@pytest.mark.parametrize(("pipe", "data"), RUNS)
def test_stages_train_as_on_simulated_ranks(pipe: int, data: int) -> None:
    """Without ``--whole`` each model in two of three ways, and each way for two models."""
    every = RUNS[pipe, data]
    hows = {name: [*every] for name in NAMES}
    for turn, name in enumerate([] if Covering.whole else NAMES):
        hows[name].remove(every[turn % len(every)])
    for name in NAMES:
        model_of(name)  # once, and not by several threads that seed one generator
    real = zf.launch(each, pipe, data, hows, nprocs=pipe * data, timeout=240)
    twins = zf.simulate(pipe * data)(each)(pipe, data, hows)
    for mine, twin in zip(real, twins, strict=True):
        for name in NAMES:
            for how, (run, sent) in mine[name].items():
                same = data == 1 and not model_of(name).tied
                if same:
                    assert_same(run, alone(name, MICROBATCHES), f"{name} {how}")
                assert_near(run, alone(name, MICROBATCHES), 1e-9, f"{name} {how}")
                assert_same(run, twin[name][how][0], f"{name} {how}")
                assert sent == twin[name][how][1], f"{name} {how}"


# A rank that goes in the middle of a step


def going(p: Any, x: Tensor, how: str) -> Tensor:
    if type(x) is Tensor:  # and no ghost
        if how == "dies":
            os._exit(7)
        if how == "raises":
            raise ZeroDivisionError("on purpose")
        if how == "sleeps":
            time.sleep(20)
    return block(p, x)


def going_loss(params: Any, batch: Any) -> Tensor:
    """The last rank goes in a layer of its own, with the third microbatch of the second step."""
    now = zf.rank() == zf.world_size() - 1 and bool(batch["now"].any())
    x = block(params["first"], batch["x"])
    for i, p in enumerate(params["blocks"]):
        x = zf.layer(going, p, x, batch["how"] if now and i == 3 else "")
    return mean_square(x @ params["head"]["w"], batch["y"])


def part_way(folder: str, how: str, pipe: int, data: int, schedule: str) -> None:
    step = zf.train_step(going_loss, TX)
    step = zf.pipeline(step, 6, schedule=schedule, mesh=zf.mesh(pipe=pipe, data=data))
    step = zf.shard(step, stage=1)
    state = step.place(zf.TrainState.create(stack(), TX))
    try:
        for i in range(3):
            now = torch.zeros(24, dtype=torch.bool)
            now[8:12] = now[20:24] = i == 1
            batch = {**step.local_batch({**rows(i), "now": now}), "how": how}
            state, _ = step(state, batch)
    except DesyncError as error:
        Path(folder, str(zf.rank())).write_text(f"{time.time()} {i} {error}")
        time.sleep(2)  # the others hear of it from this rank, not from its end
        raise


@pytest.mark.parametrize(
    ("how", "timeout", "told"),
    [
        ("dies", 60, (DesyncError, r"rank \d exited with status 7")),
        ("raises", 60, (ZeroDivisionError, "on purpose")),
        ("sleeps", 3, (DesyncError, r"rank 3 did not take part within 3")),
    ],
)
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_when_a_rank_goes_in_the_middle_all_others_hear_of_it(
    how: str, timeout: float, told: Any, schedule: str, tmp_path: Path
) -> None:
    began = time.time()
    with pytest.raises(told[0], match=told[1]):
        zf.launch(part_way, str(tmp_path), how, 2, 2, schedule, nprocs=4, timeout=timeout)
    if how == "raises":  # which ends the others
        return
    texts = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert {"0", "1", "2"} <= {*texts}, texts
    waited = [texts[rank].split(maxsplit=2) for rank in "012"]
    assert all(step == "1" for _, step, _ in waited)
    # Of one that is silent only those know who wait for it; all give up at the same time.
    named = ["rank 3" in message for *_, message in waited]
    assert named[1:] == [True, True] and (named[0] or how == "sleeps"), waited
    times = [float(when) for when, *_ in waited]
    assert max(times) - min(times) < 1.5 and max(times) - began < 40
