"""What a dry run begins with: a state and a batch of the same geometry, which nobody else has.

And what a profile shares with it: which steps can be watched, and the state behind one.
"""

from __future__ import annotations

from typing import Any

import optree
import torch
from torch import Tensor, nn

from zfunc.engine.step import Step
from zfunc.errors import CompositionError
from zfunc.foresight.pageless import pageless
from zfunc.foresight.storages import SMALL, SMALL_BYTES, Storages, whole
from zfunc.trees.marks import carry
from zfunc.trees.nodes import NAMESPACE

__all__ = ["check_step", "state_after", "without_values"]


def check_step(step: Any, who: str) -> None:
    """Raise if something is no step whose operations can be seen.

    Args:
        who: asks, ``"foresee"`` or ``"profile"``.

    Raises:
        TypeError: it is no function of a state and a batch.
        CompositionError: it is replayed as a CUDA graph, in which there are no operations.
    """
    if not callable(step) or isinstance(step, nn.Module):
        raise TypeError(
            f"{who}: step is a {type(step).__name__}, expected a step or a function (state, batch) "
            "-> (state, metrics)."
        )
    if isinstance(inner := getattr(step, "step", None), Step):
        raise CompositionError(
            f"{who}: {step!r} is replayed as a whole, and no operation in it can be seen. "
            f"{who.capitalize()} its .step, {inner!r}."
        )


def state_after(step: Step, state: Any, out: Any) -> Any:
    """The state behind a step: what it returns first, or alone; inference leaves it as it was."""
    if any(t.of_params for t in step.transforms):
        return state
    return out[0] if isinstance(out, tuple) and out else out


def without_values(given: Any, storages: Storages) -> Any:
    """A tree for a dry run: large tensors without values, small ones with those that they have.

    Args:
        given: a tree whose tensors are real or on meta, or a function without arguments that
            makes one. What shares memory there shares it here.
    """
    if callable(given) and not isinstance(given, nn.Module):
        given = given()
    made: dict[int, Tensor] = {}
    return optree.tree_map(
        lambda x: _instead(x, made, storages) if isinstance(x, Tensor) else x,
        given,
        none_is_leaf=True,
        namespace=NAMESPACE,
    )


def _instead(x: Tensor, made: dict[int, Tensor], storages: Storages) -> Tensor:
    if storages.has_made(x):
        return x
    if x.layout is not torch.strided:
        raise TypeError(f"a tensor of layout {x.layout} cannot be foreseen: give dense ones.")
    key = x.untyped_storage()._cdata
    if key not in made:
        made[key] = _memory(x, storages)
    data = made[key].view(x.dtype) if made[key].dtype != x.dtype else made[key]
    out = data.as_strided(x.size(), x.stride(), x.storage_offset())
    out = nn.Parameter(out, x.requires_grad) if isinstance(x, nn.Parameter) else _as(x, out)
    return carry(out, x)


def _as(x: Tensor, out: Tensor) -> Tensor:
    return out.requires_grad_() if x.requires_grad and x.is_leaf else out


def _memory(x: Tensor, storages: Storages) -> Tensor:
    """What stands for a whole storage, 1-D."""
    nbytes = x.untyped_storage().nbytes()
    out = pageless((nbytes // x.itemsize,), (1,), x.dtype)
    storages.made(out)
    if nbytes <= SMALL_BYTES and x.numel() <= SMALL and not x.is_meta:
        out.copy_(whole(x))
        return out
    storages.wrote(out)
    if nbytes <= SMALL_BYTES and not x.dtype.is_floating_point:
        out.zero_()  # counters begin there
    return out
