"""From a state trained into low bits to the parameters that inference loads."""

from __future__ import annotations

from typing import Any

import optree
from torch import Tensor

from zfunc.engine import carried
from zfunc.engine.entries import Entries
from zfunc.engine.step import Step
from zfunc.errors import PlacementError
from zfunc.quant.qtensor import QTensor
from zfunc.transforms.quantization.moq import NAME, MoQ
from zfunc.trees.nodes import NAMESPACE, Tree
from zfunc.trees.tree import dotted

__all__ = ["exported"]

STORED = 8  # the most bits that a QTensor has


def exported(step: Step, state: Any, entry: str = "params") -> Tree:
    """The parameters of a state that ``quantize(step, ...)`` trains, in the bits they are at.

    Args:
        step: the step that placed the state.
        state: placed; a collective where it is sharded.
        entry: which entry of the state.

    Returns:
        A plain tree: a :class:`QTensor`, equal to what the loss sees, for each weight that has
        come down to 8 bits or fewer, the unrounded tensor for every other leaf.

    Raises:
        PlacementError: the step does not train into low bits, or did not place the state.
    """
    moq = next((t for t in step.transforms if isinstance(t, MoQ)), None)
    schedule = carried.take(state, NAME)[0]
    if moq is None or schedule is None:
        raise PlacementError(
            f"{step!r} and this state have no bit schedule. Export from the step that trains into "
            "low bits, quantize(step, start_bits=16, ...), or use quant.quantize_tree(params)."
        )
    full = step.unplace(state)
    bits = dict(zip(moq.chosen(full), schedule["bits"].tolist(), strict=True))
    if int(schedule["steps"]) < moq.rules.offset:
        bits = {}

    def low(key: tuple[Any, ...], x: Any) -> Any:
        path = dotted(*key)
        if not isinstance(x, Tensor) or bits.get(path, STORED + 1) > STORED:
            return x
        return QTensor.quantize(x, moq.grouping.format(x.shape, bits[path]), False, path)

    params = Entries(full)[entry]
    keys, leaves, spec = optree.tree_flatten_with_path(
        params, none_is_leaf=True, namespace=NAMESPACE
    )
    return optree.tree_unflatten(spec, [low(k, x) for k, x in zip(keys, leaves, strict=True)])
