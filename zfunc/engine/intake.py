"""What a step does with a state before it looks into it: is it placed, tracked, keyed?"""

from __future__ import annotations

from typing import Any, cast

import optree
from torch import Tensor

from zfunc.ranks import keys
from zfunc.trees import tree
from zfunc.trees.nodes import HELD, OPAQUE, PLACED, Box, any_spent, carry, held_in

__all__ = ["admitted", "copied", "entry", "first_leaf", "first_placed", "key_of"]


def first_placed(state: Any) -> str | None:
    """The path of a placed node, if there is one."""
    nodes, spec = optree.tree_flatten(state, namespace=PLACED)
    for i, node in enumerate(nodes):
        if isinstance(node, tree.Placed | Box):
            return tree.dotted(*spec.paths()[i]) or "the state"
    return None


def copied(state: Any) -> Any:
    """The state in memory of its own."""
    return optree.tree_map(
        lambda x: x.clone() if isinstance(x, Tensor) else x, state, namespace=tree.NAMESPACE
    )


def admitted(state: Any) -> tuple[Any, list[Tensor]]:
    """The state without leaves that autograd tracks (modules' Parameters, say), and its tensors.

    A step decides itself what to track; otherwise every state would drag along the
    graph of all steps before it.

    Raises:
        DonatedStateError: a leaf's memory belongs to a later state.
    """
    tensors = held_in(state)
    if any_spent(tensors):
        tree.check_alive(state)  # says which
    if not any(x.requires_grad for x in tensors) or not any(map(_is_tracked, tensors)):
        return state, tensors
    free = optree.tree_map(_free, state, namespace=HELD)
    return free, held_in(free)


def _free(x: Any) -> Any:
    if isinstance(x, Box) and any(map(_is_tracked, x.held())):
        return optree.tree_map(_free, cast(Any, x), namespace=tree.NAMESPACE)
    return carry(x.detach(), x) if _is_tracked(x) else x


def _is_tracked(x: Any) -> bool:
    return isinstance(x, Tensor) and x.requires_grad and x.is_leaf


def entry(state: Any, name: str) -> Any:
    """What a state has under a name, or None."""
    return state.get(name) if isinstance(state, dict) else getattr(state, name, None)


def first_leaf(state: Any) -> Any:
    """The first tensor or placed node of the params, or of the state; None if there is none."""
    found = entry(state, "params")
    leaves = optree.tree_iter(state if found is None else found, namespace=OPAQUE)
    return next(iter(leaves), None)


def key_of(state: Any) -> Tensor | None:
    """The key of this step's randomness: that of the state and its step count."""
    key, step = entry(state, "key"), entry(state, "step")
    if key is None:
        return None
    return keys.fold_in(key, step) if isinstance(step, Tensor | int) else keys.as_key(key)
