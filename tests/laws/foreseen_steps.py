"""Steps to foresee, by name: everything that sends something, for the laws of ``zf.foresee``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import zfunc as zf
from zfunc import optim
from zfunc.language import gpt
from zfunc.language.gpt import GPTConfig

# Leaves of more elements than a dry run computes, and some of fewer.
SHAPE = GPTConfig(vocab=130, width=72, depth=4, heads=4)
CLIPPED = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-3, weight_decay=0.1))
Wrap = Callable[[Any], Any]
# What is compared of two ledgers.
COUNTED = (
    *("by_kind", "by_label", "by_axis", "headers_by_label", "calls_by_label", "calls"),
    *("total_bytes", "payload_bytes"),
)


def loss(params: Any, ids: Tensor) -> Tensor:
    return gpt.loss(params, ids, SHAPE)


def half_loss(params: Any, ids: Tensor) -> Tensor:
    """Without the last layer."""
    return gpt.loss({**params, "blocks": params["blocks"][:-1]}, ids, SHAPE)


@dataclass(frozen=True)
class Foreseeable:
    """A step without ``shard``, its optimizer and what it is trained with.

    Attributes:
        wrap: all that is around it but ``shard``.
        tx: the optimizer.
        loss: of the GPT.
        how: for ``zf.train_step``.
        axes: sizes of mesh axes beside data.
        stages: those of ``shard`` that it goes with; ``None`` is without.
    """

    wrap: Wrap = lambda step: step
    tx: Any = CLIPPED
    loss: Callable[..., Tensor] = loss
    how: tuple[tuple[str, Any], ...] = ()
    axes: tuple[tuple[str, int], ...] = ()
    stages: tuple[int, ...] = (0, 1, 2, 3)

    def step(self, stage: int, ranks: int) -> Any:
        """The step on so many ranks; on a mesh of its own if it has other axes."""
        sizes = dict(self.axes)
        mesh = zf.mesh(**sizes) if sizes else None
        step = self.wrap(zf.train_step(self.loss, self.tx, **dict(self.how)))
        return zf.shard(step, stage=stage, unit_bytes=1 << 17, mesh=mesh)

    def state(self) -> Any:
        """A full state, the same whenever it is called."""
        return zf.TrainState.create(gpt.init(SHAPE, zf.random.key(0)), self.tx, key=7)


def batch(ranks: int) -> Tensor:
    """Rows of all ranks, 4 for each."""
    generator = torch.Generator().manual_seed(ranks)
    return torch.randint(SHAPE.vocab, (4 * ranks, 17), generator=generator)


def compressed(method: str, **how: Any) -> Wrap:
    return lambda step: zf.compress_grads(step, method, **how)


def both(*wraps: Wrap) -> Wrap:
    def wrap(step: Any) -> Any:
        for each in wraps:
            step = each(step)
        return step

    return wrap


def bf16(step: Any) -> Any:
    return zf.precision(step, compute=torch.bfloat16)


def quarters(step: Any) -> Any:
    return zf.accumulate(step, 2)


ADAMW = optim.adamw(1e-3)
STEPS: dict[str, Foreseeable] = {
    "plain": Foreseeable(),
    "donate": Foreseeable(zf.donate),
    "bf16": Foreseeable(bf16),
    "bf16, reduced so": Foreseeable(
        lambda f: zf.precision(f, compute=torch.bfloat16, reduce=torch.bfloat16)
    ),
    "fp16": Foreseeable(lambda f: zf.precision(f, compute=torch.float16, loss_scale="dynamic")),
    "remat": Foreseeable(zf.remat),
    "accumulate": Foreseeable(quarters),
    "onebit": Foreseeable(compressed("onebit", freeze_step=1), ADAMW),
    "int8": Foreseeable(compressed("int8"), ADAMW),
    "powersgd": Foreseeable(compressed("powersgd"), ADAMW),
    "drop_layers": Foreseeable(lambda f: zf.drop_layers(f, theta=0.5, gamma=0.01)),
    "offload": Foreseeable(lambda f: zf.offload(f, to="cpu")),
    "quantize": Foreseeable(lambda f: zf.quantize(f, target_bits=4, period=1)),
    "skip_unused": Foreseeable(loss=half_loss, how=(("skip_unused", True),)),
    "unused": Foreseeable(loss=half_loss),
    "lamb": Foreseeable(tx=optim.lamb(1e-3)),
    "lion": Foreseeable(tx=optim.lion(1e-4)),
    "sgd": Foreseeable(tx=optim.sgd(1e-2, momentum=0.9)),
    "all of them": Foreseeable(both(zf.donate, bf16, zf.remat, quarters)),
    "replicas": Foreseeable(bf16, axes=(("replica", 2),)),
    "split": Foreseeable(
        lambda f: zf.split(f, rules=gpt.rules(SHAPE), tensor=2), axes=(("tensor", 2),)
    ),
    "split, remat": Foreseeable(
        both(lambda f: zf.split(f, rules=gpt.rules(SHAPE), tensor=2), zf.remat, bf16),
        axes=(("tensor", 2),),
    ),
    "1f1b": Foreseeable(lambda f: zf.pipeline(f, 2), axes=(("pipe", 2),), stages=(0, 1)),
    "zero bubble": Foreseeable(
        lambda f: zf.pipeline(f, 2, schedule="zb"), axes=(("pipe", 2),), stages=(0, 1)
    ),
}
