"""Numbers of a device among tensors of the host.

A norm, a rate or a count may be a 0-d tensor on the device while what it multiplies is computed on
the host. PyTorch accepts 0-d tensors of the host among tensors of the device, but not the reverse.
This file adds the reverse. Each number is read once, and those that are known at the same time are
read together, so that the host waits once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import optree
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from zfunc.buffers.pages import ACCOUNT
from zfunc.trees.nodes import NAMESPACE

__all__ = ["Numbers", "at_hand", "numbers_of"]

_HOST = torch.device("cpu")


def _far(x: Any) -> bool:
    return isinstance(x, Tensor) and x.ndim == 0 and x.device.type not in ("cpu", "meta")


def at_hand(values: Sequence[Any]) -> list[Any]:
    """The same values, 0-d tensors of a device as tensors of the host: read together.

    >>> at_hand([1.0, torch.tensor(2)])
    [1.0, tensor(2)]
    """
    far = [x.detach() for x in values if _far(x)]
    if not far:
        return list(values)
    ACCOUNT.waits["numbers"] += 1
    # In float64 every float32 and every count below 2**53 is itself.
    found = iter(torch.stack([x.double() for x in far]).cpu())
    return [next(found).to(x.dtype) if _far(x) else x for x in values]


def numbers_of(tree: Any) -> Any:
    """A tree of leaves, those that are numbers of a device on the host."""
    leaves, spec = optree.tree_flatten(tree, none_is_leaf=True, namespace=NAMESPACE)
    if not any(map(_far, leaves)):
        return tree
    return optree.tree_unflatten(spec, at_hand(leaves))


class Numbers(TorchFunctionMode):
    """Within, a 0-d tensor of a device counts as its value where it meets tensors of the host."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if len(args) + len(kwargs) > 1 and _meet(args, kwargs):
            args, kwargs = pytree.tree_map(self._near, (args, kwargs))
        return func(*args, **kwargs)

    def _near(self, x: Any) -> Any:
        if not _far(x):
            return x
        if id(x) not in self._known:
            self._known[id(x)] = (x, at_hand([x])[0])
        return self._known[id(x)][1]


def _meet(args: Any, kwargs: Any) -> bool:
    found = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    return any(map(_far, found)) and any(x.ndim and x.device == _HOST for x in found)
