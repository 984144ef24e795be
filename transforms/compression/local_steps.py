"""What each rank has done by itself under 0/1 Adam: it is carried, saved, and gone on from.

The steps are those of :mod:`zfunc.optim.adam_zero_one`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import optree
import torch
from torch import Tensor

from zfunc.engine.placement import homes_of
from zfunc.errors import CompositionError
from zfunc.layout.dense import dense_of
from zfunc.layout.layout import Layout
from zfunc.layout.replicated import Replicated
from zfunc.layout.residuals import Residual, one_of
from zfunc.optim.adam_zero_one import Own
from zfunc.transforms.compression.averaging import averaged
from zfunc.transforms.compression.error_feedback import Call, Carried
from zfunc.trees.boxes import alike
from zfunc.trees.marks import carry
from zfunc.trees.memory import reuse
from zfunc.trees.nodes import NAMESPACE, Tree, opened
from zfunc.trees.unreduced import Unreduced

__all__ = ["LocalCall", "begun", "drifted", "gone_on"]


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

    @property
    def averages(self) -> bool:
        """See :class:`zfunc.optim.adam_zero_one.Apart`."""
        return self.kind == "average"

    def own(self, grads: Sequence[Unreduced]) -> list[Own]:
        """See :class:`zfunc.optim.adam_zero_one.Apart`."""
        homes = [(self.entry_of(g.home[0]), g.home[1]) for g in grads if g.home is not None]
        if len(homes) < len(grads) or any(name is None for name, _ in homes):
            raise CompositionError(
                "compress_grads(method='zero_one') met the gradient of a tensor that is in no "
                "params entry of the state. Put it there, or name its entry in shard(..., "
                "roles=...)."
            )
        names = {name for name, _ in homes if name is not None}
        self._renew(names)
        drift = {name: self.views(self.drift, name) for name in names}
        momentum = {name: self.views(self.momentum, name) for name in names}
        return [
            Own(drift[name][i], momentum[name][i], self.rates[name][i])
            for name, i in homes
            if name is not None
        ]

    def averaged(self, sums: Sequence[Unreduced]) -> list[Tensor]:
        """See :class:`zfunc.optim.adam_zero_one.Apart`."""
        means: list[Tensor] = averaged(self, sums)
        return means

    def _renew(self, names: Collection[str]) -> None:
        """Drift and momentum of these entries in memory that may be overwritten."""
        for flats in (self.drift, self.momentum):
            for name in names:
                if (id(flats), name) not in self.owned:
                    flats[name] = [None if x is None else reuse(x) for x in flats[name]]
                    self.owned.add((id(flats), name))

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
