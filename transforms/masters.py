"""Master parameters: where ``precision`` keeps them, and how copies follow them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import optree
import torch
from torch import Tensor

from zfunc import tree
from zfunc.context import Context, spend
from zfunc.errors import NonFiniteError
from zfunc.nodes import NAMESPACE, Placed, Tree, register, spent
from zfunc.optim.guarding import all_finite, first_nonfinite
from zfunc.placed.pieces import leaves_of
from zfunc.placed.placement import Entries, reassembled
from zfunc.placed.sharded import Sharded
from zfunc.placed.unitwise import streams
from zfunc.placed.unreduced import linear_map

__all__ = ["Mastered", "Masters", "recast", "returned"]


@dataclass(frozen=True)
class Mastered:
    """An optimizer state with the master parameters beside it; reads like the former.

    Attributes:
        inner: the optimizer state.
        masters: parameters in full precision, by the name of their entry in the state.
    """

    inner: Any
    masters: Mapping[str, Tree]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("inner", "masters"):
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __getitem__(self, key: Any) -> Any:
        return self.inner[key]


register(
    Mastered,
    lambda node: ((node.inner, node.masters), None, ("inner", "masters")),
    lambda _, children: Mastered(*children),
)


@dataclass
class Masters:
    """What one call of a step under ``precision`` knows of its parameters.

    Attributes:
        state: as the function saw it, with the masters in it.
        masters, lows: parameters in full precision and in 16 bits, by entry.
        scale: 0-d fp32, what the loss is multiplied by.
        carried: the state of a dynamic loss scale.
        overflow: whether a gradient was not finite; None before there are any.
        leaf: the path of the first such gradient.
    """

    state: Any
    masters: Mapping[str, Tree]
    lows: Mapping[str, Tree]
    scale: Tensor
    carried: Any = None
    overflow: bool | None = None
    leaf: str = ""
    _copies: dict[Any, tuple[Any, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, master in self.masters.items():
            nodes, spec = _nodes(master)
            for node, low in zip(nodes, spec.flatten_up_to(self.lows[name]), strict=True):
                if node is not None:
                    self._copies[_identity(node)] = (node, low)
        dtypes = {x.dtype for x in tree.leaves(dict(self.masters)) if isinstance(x, Tensor)}
        self._dtype = dtypes.pop() if len(dtypes) == 1 else None

    def lowered(self, params: Tree) -> Tree:
        """``params`` with 16-bit copies in place of masters; others are cast as they enter."""
        nodes, spec = _nodes(params)
        lows = [self._low(node) for node in nodes]
        kinds = {isinstance(x, Placed) for low in lows for x in _nodes(low)[0] if x is not None}
        if len(kinds) > 1:  # whole copies beside cut trees would be neither the one nor the other
            return params
        return optree.tree_unflatten(spec, lows)

    def _low(self, node: Any) -> Any:
        master, low = self._copies.get(_identity(node), (None, None))
        if master is None or (isinstance(node, Sharded) and node.layout != master.layout):
            return node
        return low

    def raised(self, grads: Tree, params: Tree) -> Tree:
        """Gradients in the dtypes of the masters, without the loss scale."""
        factor = 1.0 / float(self.scale)

        def unscaled(g: Tensor, dtype: torch.dtype) -> Tensor:
            g = g.to(dtype)
            return g if factor == 1.0 else g * factor

        if (dtype := self._dtype) is not None:
            return tree.map(linear_map(lambda g: unscaled(g, dtype)), grads)
        return tree.map(linear_map(lambda g, p: unscaled(g, p.dtype)), grads, params)

    def look(self, grads: Tree, running: Context, scaled: Tree) -> None:
        """Find out, on all ranks alike, whether a gradient is not finite; a collective.

        Args:
            grads: the gradients.
            scaled: what they were made of; asked instead where they are not in memory, since
                its norms are known.
        """
        flags = (
            [torch.tensor(all_finite(scaled))]
            if streams(grads)
            else [
                torch.linalg.vector_norm(x, ord=float("inf")).isfinite().cpu()
                for x in tree.leaves(grads)
                if isinstance(x, Tensor) and x.numel()
            ]
        )
        bad = (~torch.stack(flags).all()).float() if flags else torch.zeros(())
        if running.group.size > 1:
            bad = running.group.all_reduce(bad, label="overflow").wait()
        overflow = bool(bad > 0)
        if overflow and not self.overflow:
            self.leaf = first_nonfinite(grads)
            running.donation = None  # the old state is the new one: nobody may write into it
        self.overflow = overflow or bool(self.overflow)

    def metrics(self) -> dict[str, Any]:
        """What is added to the step's metrics."""
        found = {"loss_scale": self.scale.clone(), "overflow": torch.tensor(bool(self.overflow))}
        return {**found, "overflow_leaf": self.leaf} if self.overflow else found

    def revert(self, entries: Entries, kept: Collection[str]) -> None:
        """Take back what a step with an overflow did to the state.

        Raises:
            NonFiniteError: the old values are gone, for the step wrote over donated memory
                before it took the gradient that overflowed.
        """
        before = Entries(self.state)
        for name in entries.names:
            if name not in kept and name in before:
                if any(spent(x) for x in tree.leaves(before[name])):
                    raise NonFiniteError(
                        f"the gradient of {self.leaf} is not finite, and the step cannot be left "
                        f"out: it had donated and overwritten the memory of {name!r} before it "
                        "took that gradient. Take all gradients first, or leave out `donate`."
                    )
                entries[name] = before[name]


def _nodes(params: Tree) -> tuple[list[Any], optree.PyTreeSpec]:
    return optree.tree_flatten(
        params, is_leaf=lambda x: isinstance(x, Placed), none_is_leaf=True, namespace=NAMESPACE
    )


def _identity(node: Any) -> Any:
    """Which tensors a node is, whoever rebuilt the tree around them."""
    held = node.held() if isinstance(node, Placed) else ()
    return tuple(map(id, held)) if held else id(node)


def returned(old: Tree, new: Tree) -> Tree:
    """Masters as a step returned them, in the representation that they had."""
    return reassembled(old, new) if isinstance(old, Sharded) else new


def recast(low: Tree, old: Tree, new: Tree) -> Tree:
    """The 16-bit copies of new masters, represented as those of the old ones are.

    Written into the old copies' memory where that is donated. Masters that are cut have
    copies that are whole (ZeRO 1 and 2): these are gathered in 16 bits, a collective.
    """
    kept = {id(x) for x in tree.leaves(old)}
    if isinstance(new, Sharded) and not isinstance(low, Sharded):
        return _gathered(low, new, kept)

    def copy(was: Tensor, master: Tensor) -> Tensor:
        if id(master) in kept:
            return was
        alias = was.detach()
        return alias.copy_(master) if spend(was) else master.to(was.dtype, copy=True)

    return tree.map(copy, low, new)


def _gathered(low: Tree, new: Sharded, kept: Collection[int]) -> Tree:
    layout, rank = new.layout, new.group.rank
    leaves = leaves_of(layout, low)
    parts: list[Tensor | None] = []
    for i, master in enumerate(new.flats):
        row = [leaves[slot.index] for slot in layout.by_flat[i]]
        if master is None or not row or id(master) in kept:
            parts.append(None)
            continue
        base = layout.buffer_under(i, row)
        if base is None or not spend(base):
            base = torch.empty(layout.flats[i].length, dtype=row[0].dtype, device=master.device)
        start, stop = layout.flats[i].bounds(rank)
        parts.append(base[start:stop].copy_(master))
    return Sharded(layout, parts).join(low)
