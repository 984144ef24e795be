"""Adapters of peft beside transforms: the numbers of the plain step, and a base that stays."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zfunc as zf
from zfunc import optim, tree

transformers = pytest.importorskip("transformers", reason="the `hf` extra is not installed")
peft = pytest.importorskip("peft", reason="peft is not installed")

pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)
F64 = torch.float64
TX = optim.adamw(1e-2, weight_decay=0.1)
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 32}

Wrap = Callable[[Any, zf.Functional], Any]
WAYS: dict[str, Wrap] = {
    "split": lambda step, model: zf.split(zf.shard(step, stage=0), model, tensor=2),
    "pipeline": lambda step, model: zf.pipeline(step, microbatches=2, pipe=2),
    "precision": lambda step, model: zf.precision(zf.shard(step, stage=3), compute=F64, reduce=F64),
}


@cache
def module() -> nn.Module:
    torch.manual_seed(0)
    base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    lora = peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    made: nn.Module = peft.get_peft_model(base, lora).double()
    return made


def ids(i: int) -> Tensor:
    return torch.randint(32, (4, 8), generator=torch.Generator().manual_seed(i))


def trained(wrap: Wrap) -> tuple[dict[str, Tensor], list[float], set[str]]:
    """Parameters, losses, and of which leaves there are moments."""
    model = zf.functionalize(module(), train=True)

    def loss_fn(params: Any, x: Tensor) -> Tensor:  # that of Hugging Face is in float32
        logits = model.apply(params, x).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), x[:, 1:].flatten())

    step = wrap(zf.train_step(loss_fn, TX), model)
    state, losses = step.place(zf.TrainState.create(model.params, TX)), []
    for i in range(3):
        state, metrics = step(state, step.local_batch(ids(i)))
        losses.append(metrics["loss"].item())
    full = step.unplace(state)
    return tree.flatten_names(full.params), losses, set(tree.flatten_names(full.opt_state.mu))


@pytest.mark.parametrize("way", WAYS)
def test_it_is_the_plain_step(way: str) -> None:
    model = zf.functionalize(module(), train=True)
    before, (want, want_losses, _) = tree.flatten_names(model.params), trained(lambda f, _: f)
    for found, losses, moments in zf.simulate(2)(trained)(WAYS[way]):
        assert losses == pytest.approx(want_losses, rel=1e-9)
        assert moments == {path for path in before if "lora_" in path} and moments
        for path, x in found.items():
            torch.testing.assert_close(x, want[path], rtol=1e-9, atol=1e-9, msg=path)
            assert torch.equal(x, before[path]) == (path in model.frozen), path


def test_a_split_has_parts_of_adapters() -> None:
    splits = zf.split.plan(zf.functionalize(module(), train=True), 2).splits
    assert {path.split(".")[-3] for path in splits if ".q_proj.lora" in path} == {"lora_B"}
    assert {path.split(".")[-3] for path in splits if ".down_proj.lora" in path} == {"lora_A"}
