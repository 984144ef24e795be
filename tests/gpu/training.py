"""Training on the pretended device: a few steps of a model, each with its report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import zfunc as zf
from tests.gpu.cuda import Cuda, pretended
from tests.gpu.record import Report
from zfunc.language import gpt

__all__ = ["GPT", "Model", "Trained", "trained"]


@dataclass(frozen=True)
class Model:
    """What is trained.

    Attributes:
        params: on the host.
        loss: ``loss(params, batch)``.
        batch: ``batch(i)``, the global batch of step i, on the host.
    """

    params: Callable[[], Any]
    loss: Callable[..., Any]
    batch: Callable[[int], Any]


def gpt_model(depth: int = 3, width: int = 16, dtype: torch.dtype = torch.float32) -> Model:
    """A small GPT, whose layers are units of their own where they exceed ``unit_bytes``.

    Its own loss is fp32 whatever it computes in; that in float64 is float64 to the end.
    """
    config = gpt.GPTConfig(vocab=48, width=width, depth=depth, heads=2)

    def loss(params: Any, batch: Tensor) -> Tensor:
        if dtype != torch.float64:
            return gpt.loss(params, batch, config)
        logits = gpt.apply(params, batch[:, :-1], config)
        return F.cross_entropy(logits.flatten(0, 1).to(dtype), batch[:, 1:].flatten())

    return Model(
        lambda: zf.tree.map(lambda x: x.to(dtype), gpt.init(config, zf.random.key(0))),
        loss,
        lambda i: zf.random.randint(zf.random.key(100 + i), 0, 48, (4, 9)),
    )


GPT = gpt_model()


@dataclass
class Trained:
    """A run.

    Attributes:
        metrics: of each step, on the host.
        state: the last one, unplaced, on the host.
        reports: of each step; none where there was no GPU.
        placing: the report of placing the state.
    """

    metrics: list[Any] = field(default_factory=list)
    state: Any = None
    reports: list[Report] = field(default_factory=list)
    placing: Report = field(default_factory=Report)


def trained(
    wrap: Callable[[Any], Any],
    tx: Any,
    model: Model = GPT,
    *,
    steps: int = 3,
    on_gpu: bool = True,
    key: int | None = None,
    **how: Any,
) -> Trained:
    """Train for some steps under ``wrap``, on the GPU of this rank or on the host.

    The GPU is the pretended one where there is one, and tells of each step.

    The batch of each step lies where that of the step before lay, as a captured step needs it.

    Args:
        wrap: of ``zf.train_step(model.loss, tx)``.
        tx: the optimizer.
        model: what is trained.
        steps: how many.
        on_gpu: whether on the GPU; else on the host.
        key: of the state's randomness.
        how: for ``zf.train_step``.
    """
    cuda = pretended() if on_gpu else None
    run = Trained()
    step = wrap(zf.train_step(model.loss, tx, **how))
    params = model.params()
    if on_gpu:
        params = zf.tree.map(_up, params)
    if cuda is not None:
        cuda.take()
    more = {} if key is None else {"key": key}
    state = step.place(zf.TrainState.create(params, tx, **more))
    del params
    batch: Any = None
    for i in range(steps):
        batch = _into(batch, step.local_batch(model.batch(i)), on_gpu)
        if cuda is not None:
            taken = cuda.take()
            run.placing = run.placing if i else taken
        state, metrics = step(state, batch)
        if cuda is not None:
            run.reports.append(cuda.take())
        run.metrics.append(_down(metrics))
    run.state = _down(step.unplace(state))
    if cuda is not None:
        cuda.take()
    return run


def _up(x: Any) -> Any:
    return x.cuda() if isinstance(x, Tensor) else x


def _down(tree: Any) -> Any:
    return zf.tree.map(lambda x: x.detach().cpu() if isinstance(x, Tensor) else x, tree)


def _into(held: Any, batch: Any, on_gpu: bool) -> Any:
    """The next batch, in the memory of the one before."""
    if held is None:
        return zf.tree.map(lambda x: _up(x) if on_gpu else x.clone(), batch)
    for into, x in zip(zf.tree.leaves(held), zf.tree.leaves(batch), strict=True):
        into.copy_(x)
    return held


def on_one_gpu(wrap: Callable[[Any], Any], tx: Any, model: Model = GPT, **how: Any) -> Trained:
    """:func:`trained` in this process, with a GPU pretended for the time."""
    with Cuda(arguments=how.pop("arguments", False)):
        return trained(wrap, tx, model, **how)
