r"""Steps of Adam that each rank takes by itself, and their average: the second phase of 0/1 Adam.

Second moments :math:`v` are frozen, so that what a rank has moved since the last average is linear
in its gradients. With corrected means :math:`\hat m = m / (1 - \beta_1^t)` and
:math:`d = \sqrt{\hat v} + \epsilon` a rank moves away from the shared parameters :math:`x` by

.. math::
    D \leftarrow D + \gamma_t \hat m / d

and its gradients are taken at :math:`x - D`. An average sends :math:`D d`, sums of momentum, in
two phases with error feedback, and what comes back, :math:`\bar u`, is everybody's:

.. math::
    x \leftarrow x - \bar u / d \qquad \hat m \leftarrow \bar u / \sum \gamma \qquad D \leftarrow 0

Weight decay acts on :math:`x`, which is alike on all ranks, and never becomes momentum.

Source: Lu et al., Maximizing Communication Efficiency for Large-scale Training via 0/1 Adam, 2022,
algorithm 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import optree
import torch
from torch import Tensor

from zfunc.engine.placement import homes_of
from zfunc.errors import CompositionError
from zfunc.layout.dense import dense_of
from zfunc.layout.layout import Layout
from zfunc.layout.replicated import Replicated, alike
from zfunc.layout.residuals import Residual, one_of
from zfunc.layout.unreduced import Unreduced
from zfunc.optim.fused import own
from zfunc.optim.moments import growth, wide
from zfunc.transforms.compression.averaging import averaged
from zfunc.transforms.compression.error_feedback import Call, Carried
from zfunc.trees.memory import reuse
from zfunc.trees.nodes import NAMESPACE, Placed, Tree, carry, opened
from zfunc.trees.tree import dotted

__all__ = ["LocalCall", "begun", "drifted", "gone_on", "local_step"]


@dataclass
class LocalCall(Call):
    """One call of a step under 0/1 Adam, on one rank.

    Attributes:
        kind: ``"dense"``, ``"compressed"``, ``"local"`` or ``"average"``.
        drift, momentum: by params entry, the flats of ``D``, and of this rank's own momentum since
            the last average.
        rates: by params entry, the sums of learning rates since then, ``[leaves]``.
        number: which update of the optimizer this is, from 1; 0 until it has asked.
        learnt: whether second moments have taken in the gradients of this call.
        owned: which of the dicts' flats have memory of their own.
    """

    kind: str = "dense"
    drift: dict[str, list[Tensor | None]] = field(default_factory=dict)
    momentum: dict[str, list[Tensor | None]] = field(default_factory=dict)
    rates: dict[str, Tensor] = field(default_factory=dict)
    number: int = 0
    learnt: bool = False
    owned: set[tuple[int, str]] = field(default_factory=set)

    def restore(self) -> None:
        """Errors, and what this rank did by itself, as they were before the call."""
        super().restore()
        was = self.carried["zero_one"]
        self.drift = {name: list(node.flats) for name, node in was["drift"].items()}
        self.momentum = {name: list(node.flats) for name, node in was["momentum"].items()}
        self.rates = {name: sums.clone() for name, sums in was["rates"].items()}

    def own_nodes(self) -> dict[str, Any]:
        """What this rank did by itself as nodes, for the next state."""
        drift = {name: Residual(self.layouts[name], x) for name, x in self.drift.items()}
        momentum = {name: Residual(self.layouts[name], x) for name, x in self.momentum.items()}
        return {"drift": drift, "momentum": momentum, "rates": self.rates}

    def views(self, flats: Mapping[str, Sequence[Tensor | None]], name: str) -> dict[int, Tensor]:
        """Leaves in dense buffers, by index; those without elements have none."""
        layout, out = self.layouts[name], {}
        for i, flat in enumerate(flats[name]):
            if flat is not None:
                dense = dense_of(layout, i)
                for slot, view in zip(dense.slots, dense.views(flat), strict=True):
                    out[slot.index] = view
        return out


def begun(worker: Mapping[str, Residual]) -> dict[str, Any]:
    """No steps taken by anybody alone; ``worker``, errors of the same layouts."""

    def nothing() -> dict[str, Residual]:
        return {name: node.map(torch.zeros_like, [node]) for name, node in worker.items()}

    rates = {
        name: torch.zeros(len(node.layout.slots), dtype=torch.float64, device="cpu")
        for name, node in worker.items()
    }
    return {"drift": nothing(), "momentum": nothing(), "rates": rates}


def gone_on(empty: dict[str, Any], full: Carried) -> dict[str, Any]:
    """What ranks of an unplaced state did by themselves, in this world.

    On another number of ranks each goes on from where all were in the mean.
    """
    out = {kind: dict(empty[kind]) for kind in ("drift", "momentum", "rates")}
    for name in empty["rates"].keys() & full["rates"].keys():
        for kind in ("drift", "momentum"):
            out[kind][name] = one_of(empty[kind][name], full[kind][name])
        out["rates"][name] = full["rates"][name].clone()
    return out


def drifted(call: LocalCall, params: Tree) -> Tree:
    """The parameters where this rank has gone by itself, from those that all share."""
    known: dict[str, dict[int, Tensor]] = {}

    def moved(p: Any, home: tuple[Layout, int] | None) -> Any:
        name = call.entry_of(home[0]) if home else None
        if home is None or name is None or not float(call.rates[name][home[1]]):
            return p
        if name not in known:
            known[name] = call.views(call.drift, name)
        return carry((p - known[name][home[1]]).to(p.dtype), p)

    leaves, spec = optree.tree_flatten(opened(params), none_is_leaf=True, namespace=NAMESPACE)
    if isinstance(params, Replicated):
        homes: Sequence[Any] = [(params.layout, i) for i in range(len(leaves))]
    else:
        homes = homes_of(leaves)
    new = optree.tree_unflatten(spec, [moved(*row) for row in zip(leaves, homes, strict=True)])
    return alike(params, new)


@dataclass
class _Leaf:
    """One leaf in one step: where it is, and its tensors; ``size`` is ``d``."""

    name: str
    index: int
    grad: Unreduced
    kept: float
    param: Tensor
    mu: Tensor
    nu: Tensor
    drift: Tensor
    momentum: Tensor
    size: Tensor = field(default_factory=lambda: torch.zeros(()))
    moved: Tensor | None = None


def local_step(
    call: LocalCall,
    grads: Tree,
    params: Tree,
    mu: Tree,
    nu: Tree,
    *,
    decay: Any,
    count: Tensor,
    lr: float | Tensor,
    b1: float,
    b2: float,
    eps: float,
) -> tuple[Tree, Tree, Tree, Callable[[], Tree]]:
    """See :func:`zfunc.engine.primitives.own_step`; an average if ``call.kind`` says so.

    An element whose second moment is 0 never had a gradient: it stays.
    """
    rate, number = float(lr), float(count)
    m_corrected, v_corrected = 1 - b1**number, 1 - b2**number
    nodes, spec = (
        _flat(grads),
        optree.tree_structure(grads, is_leaf=_is_placed, none_is_leaf=True, namespace=NAMESPACE),
    )
    leaves = _leaves(call, grads, (params, mu, nu), lambda path: 1 - rate * _decay_of(path, decay))
    for leaf in leaves.values():
        if not float(call.rates[leaf.name][leaf.index]):
            leaf.momentum.copy_(leaf.mu)
        leaf.momentum.mul_(b1).add_(leaf.grad.value, alpha=1 - b1)
        leaf.nu.mul_(growth(b2, count, leaf.nu.dtype))
        leaf.size = (wide(leaf.nu) / v_corrected).sqrt_().add_(eps)
        step = (leaf.momentum * (rate / m_corrected)).div_(leaf.size)
        leaf.drift.add_(step.masked_fill_(leaf.nu == 0, 0.0))
        call.rates[leaf.name][leaf.index] += rate
        if leaf.kept != 1:
            leaf.param.mul_(leaf.kept)
    if call.kind == "average":
        _average(call, list(leaves.values()), m_corrected)

    def tree_of(tensor: Callable[[_Leaf], Any], empty: Tree) -> Tree:
        rows = zip(range(len(nodes)), nodes, _flat(empty), strict=True)
        out = [tensor(leaves[i]) if i in leaves else None if g is None else x for i, g, x in rows]
        return alike(empty, optree.tree_unflatten(spec, out))

    new = tree_of(lambda leaf: leaf.param, params)
    mu, nu = tree_of(lambda leaf: leaf.mu, mu), tree_of(lambda leaf: leaf.nu, nu)
    return new, mu, nu, lambda: tree_of(_update, new)


def _average(call: LocalCall, leaves: list[_Leaf], corrected: float) -> None:
    """Everybody where the mean is; the old drift is spent.

    Where rates were 0 nothing has moved, which tells nothing of momentum: it stays.
    """
    sums = [
        Unreduced((leaf.drift * leaf.size).to(leaf.drift.dtype), leaf.grad.home) for leaf in leaves
    ]
    for leaf, mean in zip(leaves, averaged(call, sums), strict=True):
        mean = wide(mean).masked_fill(leaf.nu == 0, 0.0)
        leaf.moved = mean / leaf.size
        leaf.param.sub_(leaf.moved)
        total = float(call.rates[leaf.name][leaf.index])
        if total:
            leaf.mu = reuse(leaf.mu).copy_(mean * (corrected / total))
        leaf.drift.zero_()
        call.rates[leaf.name][leaf.index] = 0


def _leaves(
    call: LocalCall, grads: Tree, trees: tuple[Tree, Tree, Tree], kept: Callable[[str], float]
) -> dict[int, _Leaf]:
    """The leaves that have gradients and elements, by position, in memory of their own."""
    paths = optree.tree_paths(grads, is_leaf=_is_placed, none_is_leaf=True, namespace=NAMESPACE)
    rows = zip(paths, _flat(grads), *map(_flat, trees), strict=True)
    known = {i: row for i, row in enumerate(rows) if row[1] is not None and row[1].value.numel()}
    if any(g.home is None or call.entry_of(g.home[0]) is None for _, g, *_ in known.values()):
        raise CompositionError(
            "compress_grads(method='zero_one') met the gradient of a tensor that is in no params "
            "entry of the state. Put it there, or name its entry in shard(..., roles=...)."
        )
    names = {i: call.entry_of(row[1].home[0]) or "" for i, row in known.items()}
    _own_flats(call, set(names.values()))
    drift = {name: call.views(call.drift, name) for name in set(names.values())}
    momentum = {name: call.views(call.momentum, name) for name in set(names.values())}
    params = own([row[2] for row in known.values()])
    nus = own([row[4] for row in known.values()])
    return {
        i: _Leaf(
            name=names[i],
            index=(at := g.home[1]),
            grad=g,
            kept=kept(dotted(*path)),
            param=param,
            mu=mu,
            nu=nu,
            drift=drift[names[i]][at],
            momentum=momentum[names[i]][at],
        )
        for (i, (path, g, _, mu, _)), param, nu in zip(known.items(), params, nus, strict=True)
    }


def _own_flats(call: LocalCall, names: set[str]) -> None:
    """Drift and momentum of these entries in memory that may be overwritten."""
    for flats in (call.drift, call.momentum):
        for name in names:
            if (id(flats), name) not in call.owned:
                flats[name] = [None if x is None else reuse(x) for x in flats[name]]
                call.owned.add((id(flats), name))


def _update(leaf: _Leaf) -> Tensor:
    """What was added to the shared parameters, told from what they are now."""
    old = leaf.param if leaf.moved is None else leaf.param + leaf.moved
    return leaf.param - old / leaf.kept


def _decay_of(path: str, decay: Any) -> float:
    """A leaf's weight decay."""
    return float(decay(path) if callable(decay) else decay)


def _is_placed(node: Any) -> bool:
    return isinstance(node, Placed)


def _flat(tree_: Tree) -> list[Any]:
    return optree.tree_leaves(tree_, is_leaf=_is_placed, none_is_leaf=True, namespace=NAMESPACE)
