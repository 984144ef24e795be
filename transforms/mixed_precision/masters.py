"""Master parameters: where ``precision`` keeps them, and how the 16-bit copies follow them.

:class:`Mastered` holds the masters beside the optimizer state. :class:`Masters` is what one call of
a step knows: masters, copies, the loss scale, and whether a gradient overflowed. It casts
parameters down, scales gradients back, and leaves the step out if a gradient is not finite.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import optree
import torch
from torch import Tensor

from zfunc.buffers.readings import Reading, number, on_host, sent
from zfunc.engine.communication import communication
from zfunc.engine.context import Context
from zfunc.engine.entries import Entries
from zfunc.engine.placement import reassembled, rejoined
from zfunc.engine.signs import sign
from zfunc.errors import NonFiniteError
from zfunc.layout.replicated import Replicated
from zfunc.layout.sharded import Sharded
from zfunc.optim.guarding import all_finite, first_nonfinite
from zfunc.trees import tree
from zfunc.trees.boxes import elementwise
from zfunc.trees.marks import spent
from zfunc.trees.memory import spend
from zfunc.trees.nodes import PLACED, Box, Placed, Tree, held_in, register
from zfunc.trees.reduction import linear_map
from zfunc.trees.unitwise import streams
from zfunc.trees.withheld import Withheld

__all__ = ["Mastered", "Masters", "recast", "returned"]


@dataclass(frozen=True)
class Mastered:
    """An optimizer state with the master parameters beside it; reads like the former.

    Attributes:
        inner: the optimizer state.
        masters: parameters in full precision, by the name of their entry in the state.
        placed_by: the transform whose steps alone may take it; see `GradientTransformation.update`.
    """

    placed_by: ClassVar[str] = "precision"

    inner: Any
    masters: Mapping[str, Tree]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("inner", "masters"):
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __getitem__(self, key: Any) -> Any:
        return self.inner[key]


sign(Mastered, "precision")
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
        overflow: whether a gradient was not finite; None before there are any, or where nobody
            waits to learn it.
        leaf: the path of the first such gradient.
        unseen: the same where nobody waits, 0-d on the device.
    """

    state: Any
    masters: Mapping[str, Tree]
    lows: Mapping[str, Tree]
    scale: Tensor
    carried: Any = None
    overflow: bool | None = None
    leaf: str = ""
    unseen: Tensor | None = None
    _asked: list[tuple[Reading, Tree, Context]] = field(default_factory=list)
    _copies: dict[Any, tuple[Any, Any]] = field(default_factory=dict)
    _leaves: dict[int, tuple[Any, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, master in self.masters.items():
            nodes, spec = _nodes(master)
            for node, low in zip(nodes, spec.flatten_up_to(self.lows[name]), strict=True):
                if node is not None:
                    self._copies[_identity(node)] = (node, low)
        dtypes = {x.dtype for x in held_in(dict(self.masters))}
        self._dtype = dtypes.pop() if len(dtypes) == 1 else None
        self.factor = number(self.scale)

    def lowered(self, params: Tree) -> Tree:
        """``params`` with 16-bit copies in place of masters; others are cast as they enter."""
        nodes, spec = _nodes(params)
        lows = [self._low(node) for node in nodes]
        kinds = {isinstance(x, Placed) for low in lows for x in _nodes(low)[0] if x is not None}
        if len(kinds) > 1:  # replicated copies beside sharded trees: no map could take both
            return params
        return optree.tree_unflatten(spec, lows)

    def _low(self, node: Any) -> Any:
        master, low = self._copies.get(_identity(node)) or self._part(node)
        if master is None or (isinstance(node, Sharded) and node.layout != master.layout):
            return node
        return low

    def _part(self, leaf: Any) -> tuple[Any, Any]:
        """A leaf of a replicated tree of masters, and its copy."""
        for box, low in self._copies.values():
            if isinstance(box, Replicated) and isinstance(low, Replicated) and box.views():
                pairs = zip(box.leaves, low.leaves, strict=True)
                self._leaves.update((id(x), (x, y)) for x, y in pairs)
        return self._leaves.get(id(leaf), (None, None))

    def raised(self, grads: Tree, params: Tree) -> Tree:
        """Gradients in the dtypes of the masters, without the loss scale."""
        factor = 1.0 / self.factor

        def unscaled(g: Tensor, dtype: torch.dtype) -> Tensor:
            g = g.to(dtype)
            return g if factor == 1.0 else g * factor

        if (dtype := self._dtype) is not None:
            if (
                factor == 1.0
                and isinstance(grads, Box)
                and all(x.dtype == dtype for x in grads.held())
            ):
                return grads
            return elementwise(linear_map(lambda g: unscaled(g, dtype)), grads)
        return tree.map(linear_map(lambda g, p: unscaled(g, p.dtype)), grads, params)

    def look(self, grads: Tree, running: Context, scaled: Tree, own: bool) -> Tree:
        """See to it that a gradient that is not finite leaves the step out; a collective.

        On a CPU the host knows at once. From a GPU it reads the flag later, once, before donated
        memory is written or the step ends, if a dynamic scale depends on it. Otherwise it is
        never read: the device takes the old state, or, if the step donates it, the gradients
        count as zeros.

        Args:
            grads: the gradients.
            scaled: what they were made of; asked instead where they are not in memory, since
                its norms are known.
            own: whether nobody else holds the gradients.

        Returns:
            The gradients to go on with.
        """
        bad = self._not_finite(grads, scaled)
        group = communication(running).deciding
        if group.size > 1:
            bad = group.all_reduce(bad, label="overflow").wait()
        if self.carried is None and not on_host(bad):
            self.unseen = bad > 0 if self.unseen is None else self.unseen | (bad > 0)
            return grads if running.donation is None else _without(grads, bad > 0, own)
        reading = Reading(bad)
        self._asked.append((reading, grads, running))
        if reading.known or streams(self.state):
            self.settle()
        elif running.donation is not None:
            running.donation = Withheld.until(running.donation, self._counts)
        return grads

    def _not_finite(self, grads: Tree, scaled: Tree) -> Tensor:
        """1 if a gradient of this rank is not finite, 0-d, where the gradients are."""
        if streams(grads):
            return torch.tensor(float(not all_finite(scaled)), device="cpu")
        found = held_in(grads)
        device = next((x.device for x in found if not on_host(x)), torch.device("cpu"))
        norms = [torch.linalg.vector_norm(x, ord=float("inf")) for x in found if x.numel()]
        if not norms:
            return torch.zeros((), device=device)
        widest = max((x.dtype for x in norms), key=lambda dtype: dtype.itemsize)
        wide = torch.promote_types(torch.float32, widest)
        flags = torch.stack([x.to(device, wide) for x in norms]).isfinite()
        return flags.all().logical_not().float()

    def settle(self) -> None:
        """Read what was asked for. The old state is the new one if a gradient was not finite:
        then nobody may write into it."""
        asked, self._asked = self._asked, []
        for reading, grads, running in asked:
            overflow = reading.wait() > 0
            if overflow and not self.overflow:
                self.leaf = first_nonfinite(grads, communication(running).sharing)
                running.donation = None
            self.overflow = overflow or bool(self.overflow)

    def _counts(self) -> bool:
        self.settle()
        return not self.overflow

    def metrics(self) -> dict[str, Any]:
        """What is added to the step's metrics."""
        self.settle()
        bad = torch.tensor(bool(self.overflow)) if self.unseen is None else self.unseen
        found = {"loss_scale": sent(self.scale, bad, self.scale.dtype), "overflow": bad}
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
                if any(spent(x) for x in held_in(before[name])):
                    raise NonFiniteError(
                        f"the gradient of {self.leaf} is not finite, and the step cannot be left "
                        f"out: it had donated and overwritten the memory of {name!r} before it "
                        "took that gradient. Take all gradients first, or leave out `donate`."
                    )
                entries[name] = before[name]

    def hold(self, entries: Entries, kept: Collection[str], ours: Collection[str]) -> None:
        """The same on the device, which alone knows whether there was an overflow.

        What is on the host (counts) goes on.

        Args:
            ours: entries whose new tensors nobody else holds, so that they may be written.
        """
        bad, before = self.unseen, Entries(self.state)
        assert bad is not None
        old = {x.untyped_storage().data_ptr() for x in held_in(self.state)}
        written: set[int] = set()

        def one(new: Any, was: Any, own: bool, bad: Tensor = bad) -> Any:
            if new is was or not (_alike(new, was) and new.device == bad.device):
                return new
            fresh = own and new.untyped_storage().data_ptr() not in old
            if not fresh or new.data_ptr() in written:
                return torch.where(bad, was, new)
            written.add(new.data_ptr())
            return torch.where(bad, was, new, out=new)

        for name in entries.names:
            if name in kept or name not in before:
                continue
            now, then = entries[name], before[name]
            if _nodes(now)[1] == _nodes(then)[1] and not streams(now, then):
                entries[name] = elementwise(partial(one, own=name in ours), now, then)


def _without(grads: Tree, bad: Tensor, own: bool) -> Tree:
    """The gradients, or zeros."""
    fill = Tensor.masked_fill_ if own else Tensor.masked_fill
    return elementwise(linear_map(lambda g: fill(g, bad, 0)), grads)


def _alike(new: Any, was: Any) -> bool:
    """Whether one tensor may take the place of another."""
    both = isinstance(new, Tensor) and isinstance(was, Tensor)
    return both and not spent(was) and (new.shape, new.dtype) == (was.shape, was.dtype)


def _nodes(params: Tree) -> tuple[list[Any], optree.PyTreeSpec]:
    return optree.tree_flatten(params, none_is_leaf=True, namespace=PLACED)


def _identity(node: Any) -> Any:
    """Which tensors a node is, whoever rebuilt the tree around them."""
    held = node.held() if isinstance(node, Placed | Box) else ()
    return tuple(map(id, held)) if held else id(node)


def returned(old: Tree, new: Tree) -> Tree:
    """Masters as a step returned them, in the representation that they had."""
    if isinstance(old, Sharded):
        return reassembled(old, new)
    return rejoined(old, new) if isinstance(old, Replicated) else new


def recast(low: Tree, old: Tree, new: Tree) -> Tree:
    """The 16-bit copies of new masters, represented as those of the old ones are.

    Written into the old copies' memory where that is donated. Sharded masters may have replicated
    copies (ZeRO 1 and 2). These are gathered in 16 bits, a collective.
    """
    kept = {id(x) for x in held_in(old)}
    if isinstance(new, Sharded) and not isinstance(low, Sharded):
        return _gathered(low, new, kept)

    def copy(was: Tensor, master: Tensor) -> Tensor:
        if id(master) in kept:
            return was
        alias = was.detach()
        return alias.copy_(master) if spend(was) else master.to(was.dtype, copy=True)

    return elementwise(copy, low, new)


def _gathered(low: Replicated, new: Sharded, kept: Collection[int]) -> Tree:
    layout, rank = new.layout, new.group.rank
    packed = low.packed()
    assert packed is not None and packed.flats is not None
    parts: list[Tensor | None] = []
    for i, (base, master) in enumerate(zip(packed.flats, new.flats, strict=True)):
        if master is None or base is None or id(master) in kept:
            parts.append(None)
            continue
        alias = base.detach()
        if not spend(base):
            alias = torch.empty(layout.flats[i].length, dtype=base.dtype, device=master.device)
        start, stop = layout.flats[i].bounds(rank)
        parts.append(alias[start:stop].copy_(master))
    return Sharded(layout, parts).join(packed)
