r"""0/1 Adam: 1-bit Adam whose ranks take steps of their own, and average what they have moved.

Second moments :math:`v` are frozen, so that what a rank has moved since the last average is linear
in its gradients. With corrected means :math:`\hat m = m / (1 - \beta_1^t)` and
:math:`d = \sqrt{\hat v} + \epsilon` a rank moves away from the shared parameters :math:`x` by

.. math::
    D \leftarrow D + \gamma_t \hat m / d

and its gradients are taken at :math:`x - D`. An average sends :math:`D d`, sums of momentum, in
two phases with error feedback, and what comes back, :math:`\bar u`, is everybody's:

.. math::
    x \leftarrow x - \bar u / d \qquad \hat m \leftarrow \bar u / \sum \gamma \qquad D \leftarrow 0

Weight decay acts on :math:`x`, which is alike on all ranks, and never becomes momentum. What each
rank has done by itself (:class:`Apart`) is carried by the transform that lets it.

Source: Lu et al., Maximizing Communication Efficiency for Large-scale Training via 0/1 Adam, 2022,
algorithm 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import optree
import torch
from torch import Tensor

from zfunc.optim.adam_onebit import onebit_adam
from zfunc.optim.adaptive import AdamState
from zfunc.optim.base import GradientTransformation
from zfunc.optim.decay import Rates, decay_rates
from zfunc.optim.frozen import growth
from zfunc.optim.fused import own
from zfunc.optim.rates import Rate, at
from zfunc.optim.updates import Moved
from zfunc.trees.boxes import alike
from zfunc.trees.memory import reuse
from zfunc.trees.nodes import NAMESPACE, Placed, Tree
from zfunc.trees.reduction import current_reduction
from zfunc.trees.squares import wide
from zfunc.trees.tree import dotted
from zfunc.trees.unreduced import Unreduced

__all__ = ["Apart", "Own", "zero_one_adam"]


class Own(NamedTuple):
    """What a rank did of one leaf by itself since the last average; to be overwritten.

    Attributes:
        drift: how far it has moved, ``D``.
        momentum: its own.
        rate: the sum of learning rates, 0-d.
    """

    drift: Tensor
    momentum: Tensor
    rate: Tensor


class Apart(Protocol):
    """One step in which ranks go their own ways."""

    @property
    def averages(self) -> bool:
        """Whether it ends with an average."""
        ...

    def own(self, grads: Sequence[Unreduced]) -> Sequence[Own]:
        """Of the leaves of which these are the gradients.

        Raises:
            CompositionError: of one nothing is carried.
        """
        ...

    def averaged(self, sums: Sequence[Unreduced]) -> Sequence[Tensor]:
        """The means of movements, which are compressed; a collective."""
        ...


def zero_one_adam(
    lr: Rate,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    mask: Tree | Callable[[str], bool] | None = None,
) -> GradientTransformation:
    """:func:`zfunc.optim.onebit_adam`, and 0/1 Adam where ranks go their own ways.

    ``adam`` and ``adamw`` are this under ``compress_grads(method="zero_one")``, and nobody else
    needs it by name. Without ``compress_grads`` it is AdamW.

    Args:
        lr, b1, b2, eps, weight_decay, mask: see :func:`zfunc.optim.adamw`; no weight decay if
            left out.

    Raises:
        ValueError: (from ``update``) there is weight decay and no ``params``.
        CompositionError: (from ``update``) gradients were averaged before, or belong to no params
            of the state.

    Source: Lu et al., Maximizing Communication Efficiency for Large-scale Training via 0/1 Adam,
    2022.

    >>> tx = zero_one_adam(0.1)
    >>> params = torch.zeros(2)
    >>> updates, state = tx.update(torch.tensor([1.0, -2.0]), tx.init(params), params)
    >>> updates.force()
    tensor([-0.1000,  0.1000])
    """
    onebit = onebit_adam(lr, b1, b2, eps, weight_decay, mask)
    rates = decay_rates(weight_decay, mask)

    def update(grads: Tree, state: AdamState, params: Tree) -> tuple[Tree, AdamState]:
        mine, count, apart = current_reduction(), state.count + 1, None
        if mine is not None and params is not None:
            apart = mine.apart(grads, int(count), b2)
        if apart is None:
            return onebit._update(grads, state, params)
        rate, after = float(at(lr, state.count)), state._replace(count=count)
        new, after, added = _local_step(apart, grads, params, after, rate, rates, (b1, b2, eps))
        return Moved(new, params, added), after

    return GradientTransformation(
        onebit._init, update, additive=onebit._additive, checked=True, unfit=None
    )


@dataclass
class _Leaf:
    """One leaf in one step: its tensors, and what of it weight decay keeps; ``size`` is ``d``."""

    grad: Unreduced
    kept: float
    param: Tensor
    mu: Tensor
    nu: Tensor
    own: Own
    size: Tensor = field(default_factory=lambda: torch.zeros(()))
    moved: Tensor | None = None


def _local_step(
    apart: Apart,
    grads: Tree,
    params: Tree,
    state: AdamState,
    rate: float,
    decay: Rates,
    how: tuple[float, float, float],
) -> tuple[Tree, AdamState, Callable[[], Tree]]:
    """One step in which ranks go their own ways.

    An element whose second moment is 0 never had a gradient: it stays.

    Args:
        state: with the number of this step, and the moments before it.
        how: ``b1``, ``b2``, ``eps``.

    Returns:
        ``(params, state, updates)``, the last a function that gives what was added to the
        parameters.
    """
    (b1, b2, eps), number = how, float(state.count)
    m_corrected, v_corrected = 1 - b1**number, 1 - b2**number
    nodes, spec = optree.tree_flatten(
        grads, is_leaf=_is_placed, none_is_leaf=True, namespace=NAMESPACE
    )
    leaves = _leaves(apart, grads, params, state, lambda path: 1 - rate * _rate_of(path, decay))
    for leaf in leaves.values():
        drift, momentum, total = leaf.own
        if not float(total):
            momentum.copy_(leaf.mu)
        momentum.mul_(b1).add_(leaf.grad.value, alpha=1 - b1)
        leaf.nu.mul_(growth(b2, state.count, leaf.nu.dtype))
        leaf.size = (wide(leaf.nu) / v_corrected).sqrt_().add_(eps)
        step = (momentum * (rate / m_corrected)).div_(leaf.size)
        drift.add_(step.masked_fill_(leaf.nu == 0, 0.0))
        total.add_(rate)
        if leaf.kept != 1:
            leaf.param.mul_(leaf.kept)
    if apart.averages:
        _average(apart, list(leaves.values()), m_corrected)

    def tree_of(tensor: Callable[[_Leaf], Any], empty: Tree) -> Tree:
        rows = zip(range(len(nodes)), nodes, _flat(empty), strict=True)
        out = [tensor(leaves[i]) if i in leaves else None if g is None else x for i, g, x in rows]
        return alike(empty, optree.tree_unflatten(spec, out))

    new = tree_of(lambda leaf: leaf.param, params)
    mu, nu = tree_of(lambda leaf: leaf.mu, state.mu), tree_of(lambda leaf: leaf.nu, state.nu)
    return new, AdamState(state.count, mu, nu), lambda: tree_of(_update, new)


def _average(apart: Apart, leaves: Sequence[_Leaf], corrected: float) -> None:
    """Everybody where the mean is; the old drift is spent.

    Where rates were 0 nothing has moved, which tells nothing of momentum: it stays.
    """
    sums = [
        Unreduced((leaf.own.drift * leaf.size).to(leaf.own.drift.dtype), leaf.grad.home)
        for leaf in leaves
    ]
    for leaf, mean in zip(leaves, apart.averaged(sums), strict=True):
        mean = wide(mean).masked_fill(leaf.nu == 0, 0.0)
        leaf.moved = mean / leaf.size
        leaf.param.sub_(leaf.moved)
        if total := float(leaf.own.rate):
            leaf.mu = reuse(leaf.mu).copy_(mean * (corrected / total))
        leaf.own.drift.zero_()
        leaf.own.rate.zero_()


def _leaves(
    apart: Apart, grads: Tree, params: Tree, state: AdamState, kept: Callable[[str], float]
) -> dict[int, _Leaf]:
    """The leaves that have gradients and elements, by position, in memory of their own."""
    paths = optree.tree_paths(grads, is_leaf=_is_placed, none_is_leaf=True, namespace=NAMESPACE)
    rows = zip(paths, *map(_flat, (grads, params, state.mu, state.nu)), strict=True)
    known = {i: row for i, row in enumerate(rows) if row[1] is not None and row[1].value.numel()}
    _, mine, old, _, squares = zip(*known.values(), strict=True) if known else ((),) * 5
    owned = zip(known.items(), apart.own(mine), own(old), own(squares), strict=True)
    return {
        i: _Leaf(g, kept(dotted(*path)), param, mu, nu, did)
        for (i, (path, g, _, mu, _)), did, param, nu in owned
    }


def _update(leaf: _Leaf) -> Tensor:
    """What was added to the shared parameters, told from what they are now."""
    old = leaf.param if leaf.moved is None else leaf.param + leaf.moved
    return leaf.param - old / leaf.kept


def _rate_of(path: str, decay: Rates) -> float:
    """A leaf's weight decay."""
    return float(decay(path) if callable(decay) else decay)


def _is_placed(node: Any) -> bool:
    return isinstance(node, Placed)


def _flat(tree_: Tree) -> list[Any]:
    return optree.tree_leaves(tree_, is_leaf=_is_placed, none_is_leaf=True, namespace=NAMESPACE)
