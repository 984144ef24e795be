"""How much work each layer is on an example of a batch, found before a state is placed.

The step's function runs as far as its ``value_and_grad``, and the loss that it gives that is
rehearsed on the shapes of the parameters. Nothing is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import optree
import torch
from torch import Tensor

from zfunc.layout.cutting import make_layout
from zfunc.rehearsal.failures import located
from zfunc.rehearsal.first_loss import first_asked
from zfunc.rehearsal.plans import Rehearsed
from zfunc.rehearsal.rehearsal import rehearse
from zfunc.trees.nodes import NAMESPACE, leaves_in, opened

__all__ = ["Measured", "measured"]


@dataclass(frozen=True)
class Measured:
    """The work of each layer of a tree, by the index of its first leaf.

    Attributes:
        structure: of the tree.
        flops: in forward, with what runs behind the layer, and before it if it runs first.
        calls: which layer each call runs.
    """

    structure: Any
    flops: Mapping[int, int]
    calls: tuple[int, ...]


def measured(fn: Callable[..., Any], state: Any, example: Any) -> Measured:
    """What a step's layers do on an example.

    Args:
        fn: the function ``fn(state, batch)`` that is wrapped.
        state: a full state; its tensors may have no data.
        example: a batch: tensors, or what has a ``shape`` and a ``dtype``.

    Raises:
        CompositionError: the step cannot be run on it as far as its ``value_and_grad``.
        Exception: whatever the loss raises on these shapes.
    """
    asked = first_asked(fn, state, optree.tree_map(_filled, example, namespace=NAMESPACE))
    params = opened(asked.params)
    device = next(
        (x.device for x in leaves_in(params) if isinstance(x, Tensor)), torch.device("cpu")
    )
    device = torch.get_default_device() if device.type == "meta" else device
    given = asked.loss_fn, make_layout(params), asked.args, asked.kwargs
    try:
        with torch.enable_grad():
            plan = rehearse(*given, device=device, about="the example")
    except Exception as error:
        if (found := located(error, "pipeline(example=...), a batch of the step")) is error:
            raise
        raise found from error
    structure = optree.tree_structure(params, none_is_leaf=True, namespace=NAMESPACE)
    return Measured(structure, *_by_layer(plan))


def _by_layer(plan: Rehearsed) -> tuple[dict[int, int], tuple[int, ...]]:
    starts = [plan.layout.layers[call.layer].start for call in plan.calls]
    found = dict.fromkeys(starts, 0)
    for n, start in enumerate(starts):
        found[start] += plan.flops[n] + plan.flops_between[n + 1]
    if starts:
        found[starts[0]] += plan.flops_between[0]
    return found, tuple(starts)


def _filled(x: Any) -> Any:
    """A leaf of the example as a real tensor: zeros where it has a shape alone."""
    if isinstance(x, Tensor) and not x.is_meta:
        return x
    shape, dtype = getattr(x, "shape", None), getattr(x, "dtype", None)
    if isinstance(dtype, torch.dtype) and shape is not None:
        return torch.zeros(tuple(shape), dtype=dtype)
    return x
