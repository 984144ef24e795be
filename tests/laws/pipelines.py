"""Models, and runs of pipelined steps of them, for tests of ``pipeline``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import zfunc as zf
from tests.laws import architectures
from tests.laws.cases import numbers
from tests.laws.models import block, dense, mean_square
from tests.laws.plans_by_hand import spread, widened
from zfunc import optim, tree

F64 = torch.float64
TX = optim.chain(optim.clip_by_global_norm(0.5), optim.adamw(0.02, weight_decay=0.1))
Wrap = Callable[[Any], Any]


@dataclass(frozen=True, eq=False)
class Model:
    """Parameters, a loss, and batches of two shapes.

    Attributes:
        params: the full parameters, in float64.
        loss: ``loss(params, batch)``.
        batch: ``batch(i)``, of step i.
        tied: whether stages share a leaf, so that sums go in another order.
        more: for ``zf.TrainState.create``.
    """

    params: Any
    loss: Callable[..., Any]
    batch: Callable[[int], Any]
    tied: bool = False
    more: dict[str, Any] = field(default_factory=dict)

    def trained(
        self, wrap: Wrap, n: int = 4, steps: int = 3, tx: Any = TX, local: bool = False, **how: Any
    ) -> tuple[list[Any], Any]:
        """Metrics of each step, and the full state behind them."""
        step = wrap(zf.train_step(self.loss, tx, **how))
        state = step.place(zf.TrainState.create(self.params, tx, key=7, **self.more))
        metrics = []
        for i in range(steps):
            batch = self.batch(i)
            state, out = step(state, step.local_batch(batch) if local else batch)
            metrics.append(out)
        return metrics, step.unplace(state)


def stack(layers: int = 6) -> Any:
    return {
        "first": dense(1, F64),
        "blocks": zf.Layers([dense(10 * (i + 1), F64) for i in range(layers)]),
        "head": dense(2, F64, columns=1),
    }


def stack_loss(params: Any, batch: Any) -> Tensor:
    x = zf.scan(block, params["blocks"], block(params["first"], batch["x"]))
    return mean_square(x @ params["head"]["w"] + params["head"]["b"], batch["y"])


def rows(i: int, n: int = 24) -> Any:
    return {"x": numbers((n, 6), 1000 + i, F64, 1.0), "y": numbers((n, 1), 2000 + i, F64, 1.0)}


def skipping(params: Any, batch: Any) -> Tensor:
    """What the first block was given is added in the last one, whatever lies between."""
    x = first = block(params["first"], batch["x"])
    blocks = params["blocks"]
    for i in range(len(blocks)):
        x = zf.layer(block if i < len(blocks) - 1 else _joined, blocks[i], x, *([first] * (i == 5)))
    return mean_square(x @ params["head"]["w"] + params["head"]["b"], batch["y"])


def _joined(p: Any, x: Tensor, first: Tensor) -> Tensor:
    return block(p, x) + first


def gpt(tied: bool, depth: int = 6) -> Model:
    from zfunc.language import gpt as model

    config = model.GPTConfig(vocab=13, width=16, depth=depth, heads=2, tied=tied)
    params = tree.map(lambda x: x.double(), model.init(config, zf.random.key(3)))
    params = tree.map(lambda x: x + numbers(x.shape, x.numel(), F64, 0.02), params)

    def loss(params: Any, ids: Tensor) -> Tensor:
        logits = model.apply(params, ids[:, :-1], config)
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

    return Model(params, loss, partial(texts, words=13), tied)


def texts(i: int, words: int, n: int = 24) -> Tensor:
    """Token ids; every third batch is longer."""
    generator = torch.Generator().manual_seed(i)
    return torch.randint(words, (n, 9 if i % 3 else 12), generator=generator)


# Unmodified modules of Hugging Face: kind, configuration; padded texts.

MODULES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", architectures.GROUPED),
    "tied llama": ("LlamaForCausalLM", {**architectures.GROUPED, "tie_word_embeddings": True}),
    "gpt2": ("GPT2LMHeadModel", {**architectures.GPT, **architectures.STILL}),
    "qwen3": ("Qwen3ForCausalLM", architectures.GROUPED),
    "gemma2": ("Gemma2ForCausalLM", {**architectures.GROUPED, "sliding_window": 4}),
    "bert": ("BertForMaskedLM", architectures.ENCODER),
    "t5": ("T5ForConditionalGeneration", architectures.T5),
    "vit": ("ViTForImageClassification", {**architectures.VISION, **architectures.IMAGES}),
}


def of_layers(name: str, n: int) -> dict[str, int]:
    """The part of the configuration that says how many layers there are."""
    if name == "t5":
        return {"num_layers": n - n // 2, "num_decoder_layers": n // 2}
    return {"n_layer" if name == "gpt2" else "num_hidden_layers": n}


def module(name: str, layers: int | None = None) -> Model:
    """An unmodified module in float64, with a loss from float64 logits."""
    kind, settings = MODULES[name]
    depth = of_layers(name, layers or (7 if name == "t5" else 5))
    torch.manual_seed(0)
    made = widened(spread(architectures.built(kind, **{**settings, **depth})))
    model = zf.functionalize(made)

    def loss(params: Any, batch: dict[str, Tensor]) -> Tensor:
        labels = batch["labels"]
        logits = model.apply(params, **{k: x for k, x in batch.items() if k != "labels"}).logits
        return F.cross_entropy(logits.flatten(0, -2), labels.flatten())

    tied = bool(getattr(made.config, "tie_word_embeddings", False)) or name == "t5"
    return Model(model.params, loss, partial(inputs, name), tied)


def inputs(name: str, i: int, n: int = 24, masks: bool = True) -> dict[str, Tensor]:
    """A padded batch; every third one is longer."""
    generator = torch.Generator().manual_seed(i)
    if name == "vit":
        images = torch.randn(n, 3, 16, 16, generator=generator, dtype=F64)
        labels = torch.randint(architectures.LABELS, (n,), generator=generator)
        return {"pixel_values": images, "labels": labels}
    ids = texts(i, architectures.VOCAB, n)
    mask = torch.ones_like(ids)
    mask[1::3, -2:] = 0
    more = {"attention_mask": mask} if masks else {}
    if name == "t5":
        more["decoder_input_ids"] = ids.flip(1)[:, 2:]
    labels = ids[:, 2:] if name == "t5" else ids
    return {"input_ids": ids, **more, "labels": labels}


MODELS: dict[str, Callable[[], Model]] = {
    "stack": lambda: Model(stack(), stack_loss, rows),
    "skips": lambda: Model(stack(), skipping, rows),
    "gpt": lambda: gpt(False),
    "tied gpt": lambda: gpt(True),
    **{name: partial(module, name) for name in MODULES},
}


@cache
def model_of(name: str) -> Model:
    """A model by name, made once."""
    return MODELS[name]()


@cache
def alone(name: str, n: int, steps: int = 3) -> Any:
    """One process, which accumulates."""
    return model_of(name).trained(lambda f: zf.accumulate(f, n), n, steps)


def staged(
    name: str, n: int, pipe: int, data: int = 1, stage: int | None = 0, steps: int = 3, **how: Any
) -> list[Any]:
    """The same on simulated ranks: what each of them has."""

    def wrap(f: Any) -> Any:
        step = zf.pipeline(f, n, **how, mesh=zf.mesh(data=data, pipe=pipe))
        return step if stage is None else zf.shard(step, stage=stage)

    model = model_of(name)
    return zf.simulate(pipe * data)(lambda: model.trained(wrap, n, steps, local=True))()
