"""Updates and how parameters take them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
from torch import Tensor

from zfunc.errors import PlacementError
from zfunc.trees import tree
from zfunc.trees.boxes import elementwise
from zfunc.trees.marks import carry
from zfunc.trees.nodes import (
    NAMESPACE,
    OPAQUE,
    Box,
    Lazy,
    Placed,
    boxes_in,
    held_in,
    opened,
    register,
)
from zfunc.trees.reduction import linear_map, reduced

__all__ = ["Moved", "Scaled", "apply_updates", "means", "moved", "scale"]

Tree = Any


class _Deferred(Lazy):
    """A tree that is computed when somebody looks into it, and only once."""

    def __init__(self, compute: Callable[[], Tree]) -> None:
        self._compute = compute
        self._forced: Tree = None

    def force(self) -> Tree:
        """The tree, of ordinary tensors."""
        if self._forced is None:
            self._forced = self._compute()
        return self._forced


class Moved(_Deferred):
    """Updates of which the sum with the parameters is known already.

    A fused kernel reads gradients, moments and parameters once and writes the new
    parameters in the same pass. The additive updates that the contract asks for
    are computed only if somebody looks at them.

    Attributes:
        new: the new parameters, placed like the gradients; ``None`` where they are.
    """

    def __init__(self, new: Tree, params: Tree, additive: Callable[[], Tree]) -> None:
        super().__init__(additive)
        self.new = new
        self._params = params

    def starts_from(self, params: Tree) -> bool:
        """Whether ``new`` is the sum for just these parameters."""
        if params is self._params:
            return True
        mine, theirs = held_in(self._params), held_in(params)
        return len(mine) == len(theirs) and all(a is b for a, b in zip(mine, theirs, strict=True))


class Scaled(_Deferred):
    """``factor * grads``, for a fused kernel that multiplies on its way through memory."""

    def __init__(self, grads: Tree, factor: float | Tensor) -> None:
        super().__init__(lambda: scale(grads, factor))
        self.grads = grads
        self.factor = factor


def scale(grads: Tree, factor: float | Tensor) -> Tree:
    """``factor * grads`` in the dtypes of ``grads``."""
    return elementwise(linear_map(lambda g: (g * factor).to(g.dtype)), grads)


def means(grads: Tree) -> Tree:
    """The means of gradients that are a rank's own, still to be scaled if these are."""
    if isinstance(grads, Scaled):
        return Scaled(reduced(grads.grads), grads.factor)
    return reduced(grads)


# Whoever flattens one looks at its tensors, and what he builds again is the plain tree.
for _kind in (Moved, Scaled):
    register(_kind, lambda lazy: ((lazy.force(),), None, ("",)), lambda _, children: children[0])


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
    tree.check_alive(params)
    return tree.map(_add, reduced(updates), params)


def _add(update: Tensor, param: Tensor) -> Tensor:
    if update.shape != param.shape:
        raise PlacementError(
            f"an update of shape {tuple(update.shape)} meets a parameter of shape "
            f"{tuple(param.shape)}. Updates have the shapes of the parameters."
        )
    return (param + update).to(param.dtype)


def _return_to(params: Tree, new: Tree) -> Tree:
    """``new`` where ``params`` keep it, with the leaves that only ``params`` have."""
    if isinstance(params, Box):
        if isinstance(new, Placed):
            return new.join(params)
        if isinstance(new, Box):
            return new.merged(params)
        new = _return_to(params.tree, opened(new))
        return new if isinstance(new, Lazy) else params.boxed(new)
    if isinstance(params, Placed) and isinstance(new, Placed):
        return new.merge(params)
    if boxes_in(params):
        nodes, spec = optree.tree_flatten(params, none_is_leaf=True, namespace=OPAQUE)
        rows = zip(nodes, spec.flatten_up_to(new), strict=True)
        return optree.tree_unflatten(spec, [_return_to(*row) for row in rows])
    new = opened(new)

    def place(node: Any, param: Any) -> Any:
        if node is None:
            return param
        if isinstance(node, Placed):
            return node.merge(param) if isinstance(param, Placed) else node.join(param)
        return carry(node, param)

    return optree.tree_map(
        place,
        new,
        params,
        is_leaf=lambda node: isinstance(node, Placed),
        none_is_leaf=True,
        namespace=NAMESPACE,
    )
