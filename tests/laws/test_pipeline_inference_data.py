"""Inference on stages beside ranks along ``data``, which have texts or rows of their own.

At stages 1 to 3 these gather layers from each other, for each token and each microbatch.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import zfunc as zf
from tests.laws.covering import pairs
from tests.laws.test_pipeline_generate import CONFIG, MODELS
from zfunc import optim
from zfunc.errors import PlacementError
from zfunc.language import generation, gpt

NEW = 8
# How many texts of how many tokens each rank along `data` has.
TEXTS = {
    "of two lengths": ((3, 4), (3, 9)),
    "more of them": ((1, 5), (4, 5)),
    "one token": ((2, 1), (2, 7)),
}
HOWS: dict[str, dict[str, Any]] = {
    "that stop": {"stop": (2, 3, 5, 7, 11)},
    "drawn, that stop": {"stop": (4, 6), "temperature": 1.0, "key": 3},
    "that end with the last token": {},
}


def prompts(name: str) -> list[Tensor]:
    draw = torch.Generator().manual_seed(5)
    return [torch.randint(2, 13, shape, generator=draw) for shape in TEXTS[name]]


def placed(stage: int, schedule: str) -> tuple[Any, int]:
    """The parameters of a state in training on 2 x 2 ranks, and this rank's place along `data`."""
    _, _, params = MODELS["gpt"]()
    tx = optim.sgd(0.1)
    step = zf.train_step(lambda p, batch: gpt.loss(p, batch, CONFIG), tx)
    step = zf.shard(
        zf.pipeline(step, 2, schedule=schedule), stage=stage, mesh=zf.mesh(data=2, pipe=2)
    )
    state = step.place(zf.TrainState.create(params, tx))
    assert step.mesh is not None
    return state.params, step.mesh.coordinates(zf.rank())["data"]


@pytest.mark.parametrize(
    ("texts", "how", "stage", "schedule"), pairs(TEXTS, HOWS, [0, 1, 3], ["1f1b", "zbv"])
)
def test_each_has_those_of_one_process(
    texts: str, how: str, stage: int, schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "CHUNK", 3)
    decoder, _, params = MODELS["gpt"]()
    given = prompts(texts)
    wanted = [zf.generate(decoder, params, x, max_new_tokens=NEW, **HOWS[how]) for x in given]

    def rank() -> bool:
        mine, at = placed(stage, schedule)
        found = zf.generate(decoder, mine, given[at], max_new_tokens=NEW, **HOWS[how])
        return torch.equal(found, wanted[at])

    assert zf.simulate(4)(rank)() == [True] * 4


def test_they_take_as_many_steps() -> None:
    (decoder, *_), given = MODELS["gpt"](), prompts("of two lengths")

    def rank() -> str:
        mine, at = placed(1, "1f1b")
        with pytest.raises(PlacementError) as caught:
            zf.generate(decoder, mine, given[at], max_new_tokens=NEW + at)
        return str(caught.value)

    for text in zf.simulate(4)(rank)():
        assert "[8, 9] tokens" in text and "max_new_tokens" in text


@pytest.mark.parametrize("rows", [(4, 3), (1, 3), (2, 5)])
@pytest.mark.parametrize("stage", [0, 3])
def test_outputs_of_more_and_fewer_rows(rows: tuple[int, int], stage: int) -> None:
    model, _, params = MODELS["uncached"]()
    given = [torch.full((n, 4), 2 + i) for i, n in enumerate(rows)]
    wanted = [model.apply(params, x) for x in given]

    def rank() -> bool:
        mesh = zf.mesh(data=2, pipe=2)
        predict = zf.shard(zf.pipeline(model.apply, 4), stage=stage, mesh=mesh)
        at = mesh.coordinates(zf.rank())["data"]
        return torch.allclose(predict(predict.place(params), given[at]), wanted[at], 1e-9, 1e-9)

    assert zf.simulate(4)(rank)() == [True] * 4
