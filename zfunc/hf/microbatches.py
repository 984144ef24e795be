"""The microbatches of an update, as Trainer has them: one ``value_and_grad`` takes them all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from zfunc.engine.communication import communication
from zfunc.engine.context import Context
from zfunc.engine.hooks import Gradients, Order
from zfunc.engine.step import Differentiate, Transform
from zfunc.transforms.accumulation import Losses, averaged
from zfunc.transforms.pipelining.transform import Pipeline
from zfunc.trees import tree
from zfunc.trees.reduction import linear_map

__all__ = ["Microbatches"]


@dataclass(frozen=True)
class Microbatches(Transform):
    """``zf.accumulate`` for a list of microbatches in place of rows that are cut.

    The step calls ``value_and_grad(loss_fn)(params, microbatches)``, and the loss is called with
    the arguments that each microbatch is: ``loss_fn(params, *microbatch)``. Losses and gradients
    are means over them. At stages 0 and 1 gradients are reduced once.
    """

    position: ClassVar[int] = Order.ACCUMULATE
    name: ClassVar[str] = "microbatches"

    def differentiate(self, call: Differentiate, running: Context) -> Differentiate:
        def run(asked: Gradients) -> tuple[tuple[Any, Any], Any]:
            parts = [replace(asked, args=args) for args in asked.args[0]]
            if len(parts) == 1:
                return call(parts[0])
            if any(isinstance(t, Pipeline) for t in running.transforms):
                return _one_by_one(call, parts)  # which sums microbatches of its own
            losses = Losses(communication(running).everyone, len(parts))
            return averaged(call, running, asked, [(x.args, {}) for x in parts], losses)

        return run

    def describe(self, memo: Mapping[Any, Any]) -> list[str]:
        how = "once an update" if memo.get("reduce once") else "with each microbatch"
        return [f"gradient accumulation: gradients are reduced {how}"]


def _one_by_one(call: Differentiate, parts: list[Gradients]) -> tuple[tuple[Any, Any], Any]:
    (loss, _), grads = call(parts[0])
    for part in parts[1:]:
        (more, _), new = call(part)
        loss, grads = loss + more, tree.map(linear_map(torch.add), grads, new)
    n = len(parts)
    return (loss / n, None), tree.map(linear_map(lambda g: g / n), grads)
