"""The stack of blocks as one unit: one flat buffer holds it, as the papers' algorithms have it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import zfunc as zf
from tests.laws.cases import regression
from tests.laws.models import stack, stack_loss
from zfunc import tree
from zfunc.layout.dense import dense_of

__all__ = ["flat", "gradient", "layout_of", "one", "one_loss"]

F64 = torch.float64


def one() -> Any:
    """The stack without its ``Layers``, so that one buffer holds the model."""
    params = stack(F64)
    return {**params, "blocks": list(params["blocks"])}


def one_loss(params: Any, batch: Any) -> Tensor:
    return stack_loss({**params, "blocks": zf.Layers(params["blocks"])}, batch)


def layout_of(ranks: int) -> Any:
    make = zf.simulate(ranks)(lambda: zf.shard(lambda s, b: (s, {})).transforms[0].layout(one()))
    return make()[0]


def flat(layout: Any, params: Any) -> Tensor:
    leaves = tree.flatten_names(params)
    return torch.cat([leaves[slot.path].reshape(-1) for slot in dense_of(layout, 0).slots])


def gradient(layout: Any, p: Tensor, i: int, ranks: int, rank: int) -> Tensor:
    dense = dense_of(layout, 0)
    views = {slot.index: view for slot, view in zip(dense.slots, dense.views(p), strict=True)}
    params = layout.spec.unflatten([views[k] for k in range(len(views))])
    rows = 12 // ranks
    mine = {name: x[rank * rows : (rank + 1) * rows] for name, x in regression(i, F64).items()}
    return flat(layout, zf.value_and_grad(one_loss)(params, mine)[1])
