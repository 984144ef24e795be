"""Updates and how parameters take them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
from torch import Tensor

from zfunc import context, tree
from zfunc.tree import NAMESPACE, Lazy, Placed, register

__all__ = ["Moved", "apply_updates", "moved"]

Tree = Any


class Moved(Lazy):
    """Updates of which the sum with the parameters is known already.

    A fused kernel reads gradients, moments and parameters once and writes the new
    parameters in the same pass. The additive updates that the contract asks for
    are computed only if somebody looks at them.

    Attributes:
        new: the new parameters, placed like the gradients; ``None`` where they are.
    """

    def __init__(self, new: Tree, params: Tree, additive: Callable[[], Tree]) -> None:
        self.new = new
        self._params = params
        self._additive = additive
        self._forced: Tree = None

    def force(self) -> Tree:
        """The updates as ordinary tensors, computed once."""
        if self._forced is None:
            self._forced = self._additive()
        return self._forced

    def starts_from(self, params: Tree) -> bool:
        """Whether ``new`` is the sum for just these parameters."""
        if params is self._params:
            return True
        mine, theirs = tree.leaves(self._params), tree.leaves(params)
        return len(mine) == len(theirs) and all(a is b for a, b in zip(mine, theirs, strict=True))


# Whoever flattens a `Moved` looks at the updates, and what he builds again is the plain tree.
register(Moved, lambda moved: ((moved.force(),), None, ("",)), lambda _, children: children[0])


def apply_updates(params: Tree, updates: Tree) -> Tree:
    """``params + updates``, in the representation and the dtypes of ``params``.

    Args:
        params: a tree, plain or placed.
        updates: a tree of the same structure; where it has ``None`` the parameter
            itself is passed on. Placed updates of plain parameters (ZeRO 1 and 2)
            are gathered: then it is a collective.

    Returns:
        The new parameters.

    Raises:
        PlacementError: the trees differ in structure.
        DonatedStateError: the parameters' memory is spent, and these are not the
            updates for which it was.

    >>> import torch
    >>> apply_updates({"b": None, "w": torch.ones(2)}, {"b": None, "w": torch.ones(2)})
    {'b': None, 'w': tensor([2., 2.])}
    """
    return _return_to(params, moved(params, updates))


def moved(params: Tree, updates: Tree) -> Tree:
    """``params + updates``, placed like the updates and ``None`` where they are."""
    if isinstance(updates, Moved) and updates.starts_from(params):
        return updates.new
    context.check_alive(("params", leaf) for leaf in tree.leaves(params))
    return tree.map(_add, updates, params)


def _add(update: Tensor, param: Tensor) -> Tensor:
    return (param + update).to(param.dtype)


def _return_to(params: Tree, new: Tree) -> Tree:
    """``new`` where ``params`` keep it, with the leaves that only ``params`` have."""

    def place(node: Any, param: Any) -> Any:
        if node is None:
            return param
        if isinstance(node, Placed):
            return node.merge(param) if isinstance(param, Placed) else node.join(param)
        return node

    return optree.tree_map(
        place,
        new,
        params,
        is_leaf=lambda node: isinstance(node, Placed),
        none_is_leaf=True,
        namespace=NAMESPACE,
    )
