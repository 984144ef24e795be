"""Law of training: steps on parts of leaves give what one process gives, whatever the model.

Three steps of AdamW with clipping, to 1e-9 in float64, also where a model casts by itself; ranks
that share layers have the same bits. Modules are unmodified, and planned by ``split``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import zfunc as zf
from tests.laws.architectures import TEXT, built
from tests.laws.cases import assert_near, named
from tests.laws.covering import STAGES, Covering, each
from tests.laws.planned import T5, share_split
from tests.laws.plans_by_hand import gpt2, llama, qwen3, spread
from tests.laws.split_steps import TX, Batch, on_mesh, ranks_of, run
from zfunc import optim
from zfunc.language import gpt
from zfunc.language.gpt import GPTConfig
from zfunc.probing.exactness import Doubled

pytest.importorskip("transformers")

WORLDS = ((1, 2), (1, 3), (1, 4), (2, 2), (2, 3))  # data, tensor


class Module:
    """A Hugging Face model whose loss is that of its logits, in float64."""

    def __init__(self, make: Callable[[], Any]) -> None:
        module = make()
        self.model = zf.functionalize(module, train=False)
        self.params, self.words = self.model.params, module.config.vocab_size
        self.example: Any = None
        ids = torch.zeros(2, 5, dtype=torch.long)
        self.decodes = "decoder_input_ids" in self.model.signature.parameters
        self.causal = not self.decodes and "labels" in self.model.signature.parameters
        if self.decodes:
            self.example = {"input_ids": ids, "decoder_input_ids": ids}

    def loss(self, params: Any, batch: Batch) -> Tensor:
        ids, more = batch["ids"], {}
        if self.decodes:
            more["decoder_input_ids"] = ids.roll(1, 1)
        with Doubled():
            logits = self.model.apply(params, input_ids=ids, **more).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    def split(self, data: int, ways: int, stage: int | None) -> Callable[[Any], Any]:
        return on_mesh(ways, data, stage, model=self.model, example=self.example)


class Functions:
    """The GPT of ``zfunc train``, with 5 heads and a table that is the head, too."""

    words = 11

    def __init__(self) -> None:
        self.config = GPTConfig(vocab=self.words, width=20, depth=2, heads=5, tied=True)
        generator = torch.Generator().manual_seed(0)

        def moved(x: Tensor) -> Tensor:
            return x.double() + 0.2 * torch.randn(x.shape, generator=generator).double()

        self.params = zf.tree.map(moved, gpt.init(self.config, zf.random.key(0)))

    def loss(self, params: Any, batch: Batch) -> Tensor:
        with Doubled():
            return gpt.loss(params, batch["ids"], self.config)

    def split(self, data: int, ways: int, stage: int | None) -> Callable[[Any], Any]:
        return on_mesh(ways, data, stage, rules=gpt.rules(self.config))


def bert() -> Any:
    torch.manual_seed(0)
    return spread(built("BertForMaskedLM", **{**TEXT, "num_attention_heads": 4})).double()


def t5() -> Any:
    """Its table is that of encoder, decoder and head; one layer of each has relative positions."""
    torch.manual_seed(0)
    return spread(built("T5ForConditionalGeneration", **{**T5, "num_layers": 2})).double()


def olmo2() -> Any:
    """Queries and keys are normed over all heads."""
    torch.manual_seed(0)
    settings = {**TEXT, "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}
    return spread(built("Olmo2ForCausalLM", **settings)).double()


FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: Module(lambda: llama(4, 2)),
    "llama with one kv head": lambda: Module(lambda: llama(4, 1)),
    "tied llama": lambda: Module(lambda: llama(6, 2, tie_word_embeddings=True)),
    "gpt2": lambda: Module(gpt2),
    "hand-written gpt": Functions,
    "bert": lambda: Module(bert),
    "t5": lambda: Module(t5),
    "qwen3": lambda: Module(qwen3),
    "olmo2": lambda: Module(olmo2),
}


@cache
def model_of(name: str) -> Any:
    return FAMILIES[name]()


@cache
def alone(name: str) -> Any:
    """The bare steps in one process."""
    return trained(name, lambda f: zf.shard(f, stage=0))


def trained(name: str, wrap: Callable[[Any], Any]) -> Any:
    known = model_of(name)
    return run(zf.train_step(known.loss, TX), wrap, lambda: known.params, words=known.words)


def places() -> list[tuple[str, int, int, int | None]]:
    """Each family in two worlds at two stages; with ``--whole`` all three of all.

    Logits and gradients of modules in every number of ways are in ``test_split_modules``.
    """
    met = each(FAMILIES, WORLDS, STAGES, times=2)
    bare = FAMILIES if Covering.whole else ["llama", "t5"]
    return [(name, *world, stage) for name, world, stage in met] + [
        (name, 1, 2, None) for name in bare
    ]


@pytest.mark.parametrize(("name", "data", "ways", "stage"), places())
def test_a_split_step_trains_as_one_process_does(
    name: str, data: int, ways: int, stage: int | None
) -> None:
    wrap = model_of(name).split(data, ways, stage)
    for mine in ranks_of(ways, data, lambda: trained(name, wrap)):
        assert_near(mine, alone(name), 1e-9)


@pytest.mark.parametrize("name", FAMILIES)
def test_all_of_a_family_is_split(name: str) -> None:
    """Else the law would hold of steps that split nothing."""
    if name == "hand-written gpt":
        return
    known = model_of(name)
    for ways in (2, 3, 4):
        plan = zf.split.plan(known.model, ways, example=known.example)
        assert share_split(known.model, plan) > 0.95, (ways, str(plan))


@pytest.mark.parametrize("method", ["onebit", "int8"])
@pytest.mark.parametrize(("stage", "gather"), [(0, None), (1, None), (1, "int8"), (3, None)])
def test_rows_that_several_ranks_have_are_not_compressed(
    method: str, stage: int, gather: Any
) -> None:
    """Each rank would round them beside other rows, and the copies would drift apart."""
    known, tx = model_of("llama with one kv head"), optim.sgd(0.1)

    def params(wrap: Callable[[Any], Any]) -> dict[str, Tensor]:
        step = zf.train_step(known.loss, tx)
        how: dict[str, Any] = {"tx": tx, "steps": 2, "words": known.words}
        return named(run(step, wrap, lambda: known.params, **how)[1].params)

    def compressed(step: Any) -> Any:
        step = zf.compress_grads(
            step, method, freeze_step=1, gather=gather
        )  # the second call compresses
        return known.split(2, 2, stage)(step)

    want = params(lambda f: zf.shard(f, stage=0))
    for mine in ranks_of(2, 2, lambda: params(compressed)):
        far = {name: float((x - want[name]).abs().max()) for name, x in mine.items()}
        assert far["model.layers.0.self_attn.k_proj.weight"] < 1e-12
        assert far["model.layers.0.self_attn.q_proj.weight"] > 1e-8
