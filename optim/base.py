"""The contract: ``GradientTransformation(init, update)``, as in optax.

``init(params) -> state`` and ``update(grads, state, params=None) -> (updates, state)``
are pure functions of trees, and updates are *added* by ``apply_updates``. A tree
may be placed; whatever goes through ``zfunc.tree`` is right on it.

Source: optax (DeepMind, 2020), https://optax.readthedocs.io.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import optree
from torch import Tensor

from zfunc.errors import PlacementError
from zfunc.layout.freezing import without_frozen
from zfunc.optim.elementwise import check_on
from zfunc.trees.marks import spent
from zfunc.trees.memory import RUNNING
from zfunc.trees.nodes import NAMESPACE, OPAQUE, Placed
from zfunc.trees.reduction import reduced
from zfunc.trees.tree import dotted, paths

__all__ = ["EmptyState", "GradientTransformation", "by_path", "identity", "nodes", "present"]

Tree = Any
T = TypeVar("T")
OWN = "a GradientTransformation of your own"
InitFn = Callable[[Tree], Any]
UpdateFn = Callable[..., tuple[Tree, Any]]


class EmptyState(NamedTuple):
    """The state of a transformation that remembers nothing."""


class GradientTransformation:
    """A pair of pure functions that turn gradients into updates.

    Iterates as ``(init, update)``. A transformation of the user's own is tried
    once, on the first placed tree that it meets, for being elementwise
    (see :func:`zfunc.optim.check_elementwise`).

    Args:
        init: ``init(params) -> state``; leaves of ``params`` may be ``None``.
        update: ``update(grads, state, params) -> (updates, state)``.
        additive: the same as ``update`` for a caller that goes on to compute with
            the updates: they may be lazy, but no ``Moved``, which has spent the old
            parameters. ``update`` if left out.
        checked: whether it is known to be right on placed trees, and to call ``zf.reduced``
            where it needs the mean over the ranks. Others are given the mean.
        unfit: what in it would touch leaves that a step has not used (see
            :mod:`zfunc.optim.paces`), for messages; ``None`` if nothing does.
        unreduced: makes the transformation, of the same states, that takes this one's place where
            a step compresses what its ranks hold each for themselves (1-bit Adam for Adam), and
            is given gradients that are not reduced. Without it they are reduced first, as any.

    >>> import torch
    >>> halve = GradientTransformation(
    ...     lambda params: EmptyState(), lambda grads, state, params: (grads * 0.5, state)
    ... )
    >>> halve.update(torch.ones(2), halve.init(torch.ones(2)))
    (tensor([0.5000, 0.5000]), EmptyState())
    """

    def __init__(
        self,
        init: InitFn,
        update: UpdateFn,
        *,
        additive: UpdateFn | None = None,
        checked: bool = False,
        unfit: str | None = OWN,
        unreduced: Callable[[], GradientTransformation] | None = None,
    ) -> None:
        self._init = init
        self._unreduced = unreduced
        self._rule: GradientTransformation | None = None
        self.checked, self.unfit = checked, unfit
        self._tried = False
        self._update = update
        self._additive = additive or update

    def init(self, params: Tree) -> Any:
        """The state before the first update; frozen leaves of ``params`` count as ``None``."""
        return self._init(without_frozen(params))

    def update(self, grads: Tree, state: Any, params: Tree | None = None) -> tuple[Tree, Any]:
        """``(updates, new_state)``; the arguments are left as they are.

        A leaf whose gradient is ``None`` has no update, and what is kept of it stays.

        Raises:
            CompositionError: a transformation that is not elementwise met a placed tree.
            PlacementError: ``state`` is that of a transform (``precision`` keeps masters in it),
                and this is no step of it: the rest of it would be lost.
        """
        if by := getattr(type(state), "placed_by", None):
            raise PlacementError(
                f"this optimizer state was placed by {by}(step), and holds more than the optimizer "
                f"knows of. Call that step, or take the state back with its `unplace`."
            )
        tx = self._fit()
        return _resting(tx._update, tx._checked(grads), state, params)

    def additive(self, grads: Tree, state: Any, params: Tree | None = None) -> tuple[Tree, Any]:
        """As ``update``, with updates that have not spent the parameters yet."""
        tx = self._fit()
        return _resting(tx._additive, tx._checked(grads), state, params)

    def _fit(self) -> GradientTransformation:
        """The transformation that fits the running step: itself, but where gradients are local."""
        running = RUNNING.get()
        if self._unreduced is None or running is None or running.reduction is None:
            return self
        if not running.reduction.freezes:
            return self
        if self._rule is None:
            self._rule = self._unreduced()
        return self._rule

    def _checked(self, grads: Tree) -> Tree:
        if self.checked:
            return grads
        grads = reduced(grads)
        placed = [] if self._tried else [x for _, x in nodes(grads) if isinstance(x, Placed)]
        if placed:
            check_on(self, placed[0].sample)
            self._tried = True
        return grads

    def __iter__(self) -> Iterator[Callable[..., Any]]:
        return iter((self.init, self.update))


def _resting(update: UpdateFn, grads: Tree, state: Any, params: Tree | None) -> tuple[Tree, Any]:
    """The update, and the old state of leaves that have no gradient."""
    leaves = optree.tree_leaves(grads, none_is_leaf=True, namespace=OPAQUE)
    if not any(x is None for x in leaves):
        return update(grads, state, params)
    old, spec = optree.tree_flatten(state, none_is_leaf=True, namespace=OPAQUE)
    # Aliases: what shares memory with a leaf that is updated in place is spent with it.
    old = [x.view_as(x) if isinstance(x, Tensor) and not spent(x) else x for x in old]
    updates, state = update(grads, state, params)
    new, after = optree.tree_flatten(state, none_is_leaf=True, namespace=OPAQUE)
    if after == spec:
        both = zip(new, old, strict=True)
        state = optree.tree_unflatten(spec, [a if x is None else x for x, a in both])
    return updates, state


def nodes(tree: Tree) -> list[tuple[str, Any]]:
    """``(dotted path, leaf)`` of the leaves that have a value; a placed node counts as one.

    >>> nodes({"a": None, "b": [1, 2]})
    [('b.0', 1), ('b.1', 2)]
    """
    keys, found, _ = optree.tree_flatten_with_path(
        tree, is_leaf=lambda node: isinstance(node, Placed), namespace=NAMESPACE
    )
    return [(dotted(*key), node) for key, node in zip(keys, found, strict=True)]


def present(params: Tree) -> Iterator[str]:
    """Dotted paths of the leaves that have a value, in leaf order."""
    for path, node in nodes(params):
        if isinstance(node, Placed):
            yield from (dotted(path, name) for name in node.names())
        else:
            yield path


def identity() -> GradientTransformation:
    """Updates are the gradients.

    >>> identity().update({"w": 1}, EmptyState())
    ({'w': 1}, EmptyState())
    """
    return GradientTransformation(
        lambda params: EmptyState(),
        lambda grads, state, params: (grads, state),
        checked=True,
        unfit=None,
    )


def by_path(choice: Tree | Callable[[str], T]) -> Callable[[str], T]:
    """What masks and labels mean: one value for each leaf path.

    Args:
        choice: a function of the dotted leaf path, or a tree of values: of the
            parameters' structure, or a prefix of it (a value then holds for its
            whole subtree). Paths, because a placed leaf's local part has lost
            its shape; for ``ndim`` and the like build the tree from the full
            parameters: ``tree.map(lambda p: p.ndim > 1, params)``.

    Raises:
        PlacementError: (from the function returned) the tree says nothing about a path.

    >>> by_path({"a": True, "b": {"c": False}})("a.weight")
    True
    """
    if callable(choice):
        return choice
    leaves = optree.tree_leaves(choice, none_is_leaf=True, namespace=NAMESPACE)
    values = dict(zip(paths(choice), leaves, strict=True))

    def look_up(path: str) -> T:
        prefix = path
        while prefix not in values:
            if not prefix:
                raise PlacementError(
                    f"the mask or label tree says nothing about the leaf {path!r}; it knows "
                    f"{', '.join(list(values)[:3])}. Give it the structure of the parameters, "
                    "or pass a function of the leaf path."
                )
            prefix = prefix.rpartition(".")[0]
        return values[prefix]

    return look_up
