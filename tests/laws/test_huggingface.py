"""Unmodified Hugging Face models, at every stage, train as they do in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zfunc as zf
from tests.laws.architectures import ENCODER, GPT, GROUPED, LENGTH, STILL, T5, VOCAB, built
from zfunc import optim

pytest.importorskip("transformers")

TX = optim.adamw(1e-3, weight_decay=0.1)
DEEP = {"num_hidden_layers": 3}
# The model's class, its configuration, and what its rates of dropout are called.
MODELS: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "llama": ("LlamaForCausalLM", GROUPED | DEEP, ["attention_dropout"]),
    "gpt2": ("GPT2LMHeadModel", GPT | {"n_layer": 3}, list(STILL)),
    "bert": ("BertForMaskedLM", ENCODER | DEEP, [key for key in ENCODER if "dropout" in key]),
    "t5": ("T5ForConditionalGeneration", T5, ["dropout_rate"]),
}


def module_of(name: str, dropout: float = 0.0) -> Any:
    model, settings, rates = MODELS[name]
    return built(model, **settings | dict.fromkeys(rates, dropout))


def build(name: str, dtype: torch.dtype, dropout: float = 0.0) -> Any:
    torch.manual_seed(0)
    return zf.functionalize(module_of(name, dropout).to(dtype))


def tokens(i: int) -> torch.Tensor:
    return torch.randint(0, VOCAB, (4, LENGTH), generator=torch.Generator().manual_seed(i))


def train(step: Any, state: Any, steps: int, ranks: int = 1) -> tuple[list[float], Any]:
    state = step.place(state)
    losses = []
    for i in range(steps):
        batch = tokens(i) if ranks == 1 else zf.local_batch(tokens(i))
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses, step.unplace(state)


def step_of(model: Any) -> Any:
    def loss_fn(params: Any, ids: torch.Tensor) -> torch.Tensor:
        # Not the model's own loss: that is computed in float32, whatever the model's dtype.
        extra = {"decoder_input_ids": ids} if "T5" in type(model.config).__name__ else {}
        logits = model.apply(params, input_ids=ids, **extra).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())

    return zf.train_step(loss_fn, TX)


def gap(a: Any, b: Any) -> float:
    return max(
        float((x - y).abs().max())
        for x, y in zip(zf.tree.leaves(a), zf.tree.leaves(b), strict=True)
    )


@pytest.mark.parametrize("name", MODELS)
def test_float64(name: str) -> None:
    model = build(name, torch.float64)
    full = zf.TrainState.create(model.params, TX)
    losses, end = train(step_of(model), full, 4)
    for stage in range(4):
        step = zf.donate(zf.shard(step_of(model), stage=stage))
        for ranks in (2, 4) if stage == 3 else (2,):
            for got, state in zf.simulate(ranks)(train)(step, full, 4, ranks):
                assert got == pytest.approx(losses, abs=1e-9)
                assert gap(state.params, end.params) < 1e-9


@pytest.mark.parametrize("name", MODELS)
def test_float32(name: str) -> None:
    model = build(name, torch.float32)
    full = zf.TrainState.create(model.params, TX)
    losses, _ = train(step_of(model), full, 10)
    for stage in (1, 3):
        got, _ = zf.simulate(2)(train)(zf.shard(step_of(model), stage=stage), full, 10, 2)[0]
        assert got == pytest.approx(losses, rel=2e-6)


@pytest.mark.parametrize("name", MODELS)
def test_dropout_is_a_function_of_the_key_and_the_world(name: str) -> None:
    model = build(name, torch.float64, dropout=0.2)
    full = zf.TrainState.create(model.params, TX, key=3)
    other = full.replace(key=zf.random.key(4))
    torch.manual_seed(123)
    before = torch.get_rng_state()
    runs = [
        zf.simulate(2)(train)(zf.shard(step_of(model), stage=stage), state, 2, 2)[0][0]
        for stage, state in ((0, full), (2, full), (3, full), (3, other))
    ]
    assert runs[0] == pytest.approx(runs[1], abs=1e-9)
    assert runs[0] == pytest.approx(runs[2], abs=1e-9)
    assert runs[2] != runs[3]
    assert torch.equal(before, torch.get_rng_state())
    alone, _ = train(step_of(model), full, 2)
    one, _ = train(zf.shard(step_of(model), stage=3), full, 2)
    assert alone == one  # bitwise, on one rank


@pytest.mark.parametrize("name", MODELS)
def test_layers_that_are_computed_again(name: str) -> None:
    """They hand caches of keys around, into which a layer must not write twice."""
    model = build(name, torch.float64)
    full = zf.TrainState.create(model.params, TX)
    losses, end = train(step_of(model), full, 3)
    again, same = train(zf.remat(step_of(model)), full, 3)
    assert max(abs(a - b) for a, b in zip(again, losses, strict=True)) < 1e-12
    assert gap(same.params, end.params) < 1e-12
    step = zf.remat(zf.shard(step_of(model), stage=3))
    for theirs, state in zf.simulate(2)(train)(step, full, 3, 2):
        assert max(abs(a - b) for a, b in zip(theirs, losses, strict=True)) < 1e-9
        assert gap(state.params, end.params) < 1e-9


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_dropped_layers(name: str) -> None:
    model = build(name, torch.float64)
    full = zf.TrainState.create(model.params, TX)
    dropping = zf.drop_layers(step_of(model), theta=0.2, gamma=0.5)
    losses, end = train(dropping, full, 5)
    everything, _ = train(step_of(model), full, 5)
    assert losses[0] == everything[0] and losses[1:] != everything[1:]
    step = zf.shard(dropping, stage=3)
    for theirs, state in zf.simulate(2)(train)(step, full, 5, 2):
        assert max(abs(a - b) for a, b in zip(theirs, losses, strict=True)) < 1e-9
        assert gap(state.params, end.params) < 1e-9


def test_blocks_that_hand_on_a_bias_are_not_dropped_by_guessing() -> None:
    model = build("t5", torch.float64)
    full = zf.TrainState.create(model.params, TX).replace(step=torch.tensor(50))
    with pytest.raises(zf.CompositionError, match=r"encoder\.block.*skip="):
        zf.drop_layers(step_of(model), theta=0.2, gamma=0.5)(full, tokens(0))
