"""Models on meshes of data, tensor and pipe ranks: for tests."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor

import zfunc as zf
from tests.laws import split_steps
from tests.laws.pipelines import TX, Model, texts
from tests.laws.plans_by_hand import llama
from zfunc import tree

MICROBATCHES = 2


class Place(NamedTuple):
    """So many ranks along each axis, and how stages work."""

    data: int
    tensor: int
    pipe: int
    stage: int = 1
    schedule: str = "1f1b"

    @property
    def world(self) -> int:
        return self.data * self.tensor * self.pipe

    def __str__(self) -> str:
        return f"{self.data}x{self.tensor}x{self.pipe} {self.schedule} stage {self.stage}"


ALONE = Place(1, 1, 1)


@cache
def parts(name: str) -> tuple[Model, dict[str, Any]]:
    """A model with a tied table, and how it is split."""
    if name == "gpt":
        full = split_steps.params()
        blocks = [tree.map(lambda x, i=i: x * (1 + i / 8), full["blocks"][i % 2]) for i in range(4)]
        params = {"table": full["table"], "blocks": zf.Layers(blocks)}
        batch = partial(split_steps.batch, rows=8)
        return Model(params, split_steps.loss_of, batch, True), {"rules": split_steps.RULES}
    module = llama(4, 2, num_hidden_layers=4, tie_word_embeddings=True)
    model = zf.functionalize(module)

    def loss(params: Any, ids: Tensor) -> Tensor:
        logits = model.apply(params, ids).logits[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

    words = module.config.vocab_size
    return Model(model.params, loss, partial(texts, words=words, n=8), True), {"model": model}


def how(name: str, ways: int) -> dict[str, Any]:
    """How the model is split over so many ranks."""
    more = parts(name)[1]
    if name == "gpt" and ways > split_steps.KV:  # attention stays whole
        whole = ("blocks.*.q*", "blocks.*.kv", "blocks.*.out")
        return {"rules": {k: cut for k, cut in more["rules"].items() if k not in whole}}
    return more


def wrapped(name: str, place: Place) -> Callable[[Any], Any]:
    """How a step of a model becomes one on a mesh; on one rank it accumulates."""

    def wrap(step: Any) -> Any:
        if place.world == 1:
            return zf.shard(zf.accumulate(step, MICROBATCHES), stage=0)
        mesh = zf.mesh(data=place.data, tensor=place.tensor, pipe=place.pipe)
        if place.tensor > 1:
            step = zf.split(step, mesh=mesh, **how(name, place.tensor))
        step = zf.pipeline(step, MICROBATCHES, schedule=place.schedule, mesh=mesh)
        return zf.shard(step, stage=place.stage, mesh=mesh)

    return wrap


def step_of(name: str, place: Place, tx: Any = TX) -> Any:
    return wrapped(name, place)(zf.train_step(parts(name)[0].loss, tx))


def begun(name: str, place: Place, tx: Any = TX) -> tuple[Any, Any]:
    """A step, and the state that it begins with."""
    step = step_of(name, place, tx)
    return step, step.place(zf.TrainState.create(parts(name)[0].params, tx, key=7))


def advanced(name: str, step: Any, state: Any, steps: range) -> tuple[list[Any], Any]:
    """Metrics of some steps, and the state behind them."""
    metrics = []
    for i in steps:
        state, out = step(state, step.local_batch(parts(name)[0].batch(i)))
        metrics.append(out)
    return metrics, state


def run(name: str, place: Place, tx: Any = TX, steps: int = 3) -> list[Any]:
    """Metrics and the full state, by rank."""
    parts(name)  # threads that import a module together may see a part of it

    def body() -> Any:
        step, state = begun(name, place, tx)
        metrics, state = advanced(name, step, state, range(steps))
        return metrics, step.unplace(state)

    return zf.simulate(place.world)(body)() if place.world > 1 else [body()]


@cache
def alone(name: str, tx: Any = TX) -> Any:
    """One process, which accumulates."""
    return run(name, ALONE, tx)[0]
