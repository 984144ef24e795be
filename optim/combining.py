"""Transformations of transformations: in a row, on some leaves, by label."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial, reduce
from typing import Any, NamedTuple

from zfunc.errors import CompositionError
from zfunc.optim.base import GradientTransformation, by_path, identity, present
from zfunc.optim.choices import judged
from zfunc.optim.updates import Moved, moved
from zfunc.trees import tree

__all__ = [
    "MaskedState",
    "MultiTransformState",
    "chain",
    "masked",
    "multi_transform",
]

Tree = Any


def chain(*txs: GradientTransformation) -> GradientTransformation:
    """Each transformation on the updates of the one before; the state is a tuple.

    An optimizer with a fused kernel uses it where it comes last, as it mostly does.

    >>> import torch
    >>> from zfunc import optim
    >>> tx = chain(optim.clip_by_global_norm(1.0), optim.sgd(0.1))
    >>> updates, _ = tx.update(torch.tensor([3.0, 4.0]), tx.init(torch.zeros(2)))
    >>> updates
    tensor([-0.0600, -0.0800])
    """
    if not txs:
        return chain(identity())
    *before, last = txs

    def run(
        updates: Tree, states: tuple[Any, ...], params: Tree, additive: bool
    ) -> tuple[Tree, tuple[Any, ...]]:
        if len(states) != len(txs):
            raise CompositionError(
                f"a chain of {len(txs)} transformations got {len(states)} states. "
                "Pass the state that its own init or update returned."
            )
        new = []
        for tx, state in zip(before, states[:-1], strict=True):
            updates, state = tx.additive(updates, state, params)
            new.append(state)
        end = last.additive if additive else last.update
        updates, state = end(updates, states[-1], params)
        return updates, (*new, state)

    return GradientTransformation(
        lambda params: tuple(tx.init(params) for tx in txs),
        partial(run, additive=False),
        additive=partial(run, additive=True),
        checked=True,
        unfit=_unfit(txs),
    )


def _unfit(txs: Iterable[GradientTransformation]) -> str | None:
    return next((tx.unfit for tx in txs if tx.unfit is not None), None)


class MaskedState(NamedTuple):
    """The state of the inner transformation, with ``None`` at the leaves left out."""

    inner_state: Any


def masked(
    tx: GradientTransformation, mask: Tree | Callable[[str], bool]
) -> GradientTransformation:
    """``tx`` on the leaves that ``mask`` chooses; the others' updates pass through.

    Args:
        tx: any transformation. It sees ``None`` at the leaves left out.
        mask: a tree of bools (or a prefix of it), or a predicate on leaf paths.

    >>> import torch
    >>> from zfunc import optim
    >>> tx = masked(optim.scale_by_schedule(2.0), lambda path: path == "w")
    >>> grads = {"b": torch.ones(1), "w": torch.ones(1)}
    >>> tx.update(grads, tx.init(grads))[0]
    {'b': tensor([1.]), 'w': tensor([2.])}
    """
    keep = by_path(mask)

    def update(grads: Tree, state: MaskedState, params: Tree) -> tuple[Tree, MaskedState]:
        here = _among(grads, keep)
        updates, inner = tx.additive(
            tree.select(grads, here), state.inner_state, _select(params, here)
        )
        return tree.merge(updates, grads), MaskedState(inner)

    def init(params: Tree) -> MaskedState:
        return MaskedState(tx.init(tree.select(params, keep)))

    said = {"masked: the mask chooses": keep}
    return GradientTransformation(judged(init, said), update, checked=True, unfit=_unfit([tx]))


class MultiTransformState(NamedTuple):
    """One state per label, each with ``None`` at the leaves of the other labels."""

    inner_states: dict[str, Any]


def multi_transform(
    transforms: Mapping[str, GradientTransformation], labels: Tree | Callable[[str], str]
) -> GradientTransformation:
    """A transformation for each label.

    Args:
        transforms: ``{label: transformation}``.
        labels: a tree of labels (or a prefix of it), or a function of the leaf path.

    Raises:
        CompositionError: (from ``init``) a leaf's label has no transformation.

    >>> import torch
    >>> from zfunc import optim
    >>> tx = multi_transform({"fast": optim.sgd(1.0), "slow": optim.sgd(0.1)},
    ...                      {"w": "fast", "b": "slow"})
    >>> grads = {"b": torch.ones(1), "w": torch.ones(1)}
    >>> tx.update(grads, tx.init(grads))[0]
    {'b': tensor([-0.1000]), 'w': tensor([-1.])}
    """
    label = by_path(labels)
    keeps = {name: partial(_has_label, label, name) for name in transforms}

    def init(params: Tree) -> MultiTransformState:
        for path in present(params):
            if label(path) not in transforms:
                raise CompositionError(
                    f"leaf {path!r} has the label {label(path)!r}, but there are transformations "
                    f"for {sorted(transforms)} only. Add one, or change the label."
                )
        inner = {k: tx.init(tree.select(params, keeps[k])) for k, tx in transforms.items()}
        return MultiTransformState(inner)

    def run(
        grads: Tree, state: MultiTransformState, params: Tree, additive: bool
    ) -> tuple[Tree, MultiTransformState]:
        # Aliases: a fused member may spend memory in which another member's leaves lie.
        alive = None if params is None else tree.map(lambda p: p.view_as(p), params)
        here = {name: _among(grads, keep) for name, keep in keeps.items()}
        mine = {name: _select(alive, keep) for name, keep in here.items()}
        parts, states = {}, {}
        for name, tx in transforms.items():
            parts[name], states[name] = (tx.additive if additive else tx.update)(
                tree.select(grads, here[name]), state.inner_states[name], mine[name]
            )
        return _united(parts, mine, grads, params), MultiTransformState(states)

    said = {f"multi_transform: the label {name!r} is that of": keeps[name] for name in keeps}
    return GradientTransformation(
        judged(init, said),
        partial(run, additive=False),
        additive=partial(run, additive=True),
        checked=True,
        unfit=_unfit(transforms.values()),
    )


def _among(grads: Tree, keep: Callable[[str], bool]) -> Callable[[str], bool]:
    """``keep``, of the leaves that have a gradient."""
    trained = frozenset(present(grads))
    return lambda path: path in trained and keep(path)


def _has_label(label: Callable[[str], str], name: str, path: str) -> bool:
    return label(path) == name


def _select(params: Tree | None, keep: Callable[[str], bool]) -> Tree | None:
    return None if params is None else tree.select(params, keep)


def _united(parts: dict[str, Tree], mine: dict[str, Tree], grads: Tree, params: Tree) -> Tree:
    """The updates of all labels as one tree, or as one ``Moved`` if one of them is."""

    def merged(trees: Iterable[Tree]) -> Tree:
        # Onto the gradients, of which every leaf is replaced: they have the whole structure.
        return reduce(lambda whole, part: tree.merge(part, whole), trees, grads)

    if any(isinstance(part, Moved) for part in parts.values()):
        new = merged(moved(mine[name], part) for name, part in parts.items())
        return Moved(new, params, lambda: merged(parts.values()))
    return merged(parts.values())
