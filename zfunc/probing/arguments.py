"""Arguments of a call: the tensors in them, and copies with others in their place.

Arguments are trees, and code under trial may write into what it is given: each call gets a copy.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import optree
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from zfunc.trees.nodes import NAMESPACE

__all__ = ["cloned", "leaves_of", "tensors_in"]


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors among some arguments, in order."""
    return [x for x in leaves_of(tree) if isinstance(x, Tensor)]


def leaves_of(tree: Any) -> list[Any]:
    """All that some arguments have, ``None`` included, in the order of ``optree``'s paths."""
    return optree.tree_leaves(tree, none_is_leaf=True, namespace=NAMESPACE)


def cloned(tree: Any, each: Callable[[int, Tensor], Tensor]) -> Any:
    """Some arguments with ``each(position, tensor)`` in the place of tensors, the rest copied."""
    leaves, spec = optree.tree_flatten(tree, none_is_leaf=True, namespace=NAMESPACE)
    out, at = [], 0
    for x in leaves:
        if isinstance(x, Tensor):
            out.append(each(at, x))
            at += 1
        else:
            out.append(_copied(x))
    return optree.tree_unflatten(spec, out)


def _copied(x: Any) -> Any:
    if x is None or isinstance(x, int | float | str | nn.Module):
        return x
    with _Detaching():
        return copy.deepcopy(x)


class _Detaching(TorchFunctionMode):
    """A block in which tensors are copied without their graphs, which torch refuses to copy: those
    of a cache that layers before have filled, say."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is Tensor.__deepcopy__ and args[0].grad_fn is not None:
            return args[0].detach().clone()
        return func(*args, **(kwargs or {}))
