"""Units of parameters on their way: what a hook is told of one, its all-gather, and collectives.

Leaves of a unit that passes have in common are here, too, and the sums of their gradients.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from zfunc.engine.communication import communication
from zfunc.engine.hooks import Pending
from zfunc.layout.layout import Layout
from zfunc.layout.pool import empty, pool
from zfunc.layout.stages import cuts_among
from zfunc.ranks.comm import Group

__all__ = ["CommonLeaves", "OwnHooks", "Ready", "Total", "UnitInfo", "Waiting"]
__all__ += ["add_into", "gather"]


@dataclass
class Waiting:
    """Tensors, and collectives that will end in one."""

    parts: list[Any]

    def wait(self) -> list[Tensor]:
        return [part if isinstance(part, Tensor) else part.wait() for part in self.parts]

    def advance(self) -> None:
        for k, part in enumerate(self.parts):
            if isinstance(part, Tensor):
                continue
            if hasattr(part, "advance"):  # it comes in rounds
                part.advance()
            else:
                self.parts[k] = part.wait()


@dataclass
class Ready:
    """A ``Pending`` that is there already.

    Attributes:
        own: whether its memory was made for it, and is nobody else's.
    """

    values: list[Tensor]
    own: bool = False

    def wait(self) -> list[Tensor]:
        return self.values

    def advance(self) -> None:
        """Nothing is left to do."""


@dataclass
class Total:
    """The sum of what came in two parts."""

    first: Pending
    second: Pending

    def wait(self) -> list[Tensor]:
        return [a + b for a, b in zip(self.first.wait(), self.second.wait(), strict=True)]

    def advance(self) -> None:
        self.first.advance()
        self.second.advance()


@dataclass(eq=False)
class UnitInfo:
    """What a hook is told of a unit: its place in the layout and the ranks that share it.

    ``running`` is the context of the call, which backward on a thread of its own cannot ask for.

    Attributes:
        key: which unit it is among all that take part in a pass.
        name: what it is called.
        flats, trainable: its flats in the layout, and those of them that are trained.
    """

    layout: Layout
    index: int
    group: Group
    cut: bool
    source: int = 0
    running: Any = field(default=None, repr=False)

    def __post_init__(self) -> None:
        unit = self.layout.units[self.index]
        self.key, self.name, self.flats = (self.source, self.index), unit.name, unit.flats
        self.trainable: tuple[int, ...] = self.layout.trainable_of_units[self.index]

    @property
    def kept(self) -> bool:
        """Whether its gradients leave as they are, since a transform averages them otherwise."""
        keeps = None if self.running is None else communication(self.running).keeps
        return keeps is not None and keeps(self)

    @property
    def memory(self) -> Callable[[int, torch.dtype, torch.device | None], Tensor]:
        """Gives a 1-D tensor for its full gradients, of a length, dtype and device. Recycled ones
        lie idle in the next forward pass: leaves are split where memory is scarce."""
        return pool(self.group).take if self.layout.along is None else empty

    def cuts(self, flat: int) -> tuple[int, ...]:
        """How one of its flats is cut over the ranks of ``group``."""
        return cuts_among(self.layout, flat, self.group)

    def borrowed(self, flat: int, full: Tensor) -> bool:
        """Whether a flat's gradient may be autograd's own, perhaps that of other leaves as well
        (``a + b`` has one for both): one of another dtype than its leaf is a copy."""
        layout = self.layout
        return len(layout.by_flat[flat]) == 1 and full.dtype == layout.flats[flat].dtype


def gather(value: Pending, unit: UnitInfo) -> Pending:
    """Start the all-gathers of a unit's cut flats; flats kept whole pass through."""
    parts: list[Any] = []
    for i, local in zip(unit.flats, value.wait(), strict=True):
        spec = unit.layout.flats[i]
        if unit.group.size == 1 or spec.whole or not unit.cut:
            parts.append(local)
            continue
        label, cuts = f"gather {unit.name}", unit.cuts(i)
        full = pool(unit.group).take(spec.length, local.dtype, local.device)
        parts.append(unit.group.all_gather(full, local, cuts=cuts, label=label))
    return Waiting(parts)


class CommonLeaves:
    """The entered leaves of a unit that passes have in common.

    Attributes:
        leaves: all of them, once a pass has made them.
        sums: the flats whose parts are their gradients, while a backward runs.
        parts: those, of the trainable ones.
    """

    def __init__(self) -> None:
        self.leaves: list[Tensor] = []
        self.sums: list[Tensor] = []
        self.parts: list[Tensor] = []

    @property
    def usable(self) -> bool:
        """Whether another pass may enter them: hooks that somebody has given them are for his."""
        return bool(self.leaves) and not any(x._backward_hooks for x in self.leaves)

    def has(self, leaves: Sequence[Tensor]) -> bool:
        """Whether some leaves of one unit are among these."""
        return any(x is leaves[0] for x in self.leaves)

    def adds_into(self, sums: Sequence[Tensor]) -> bool:
        """Whether the parts are those of these flats."""
        return len(sums) == len(self.sums) and all(map(operator.is_, sums, self.sums))


class OwnHooks:
    """The hooks that one pass has given to a leaf that passes have in common. Gradients of others
    must not see them: they are there in a block, which is its backward, and not otherwise."""

    def __init__(self, leaf: Tensor) -> None:
        self._there: dict[int, Any] = leaf._backward_hooks or {}
        self._own = dict(self._there)
        self._there.clear()

    def __enter__(self) -> None:
        self._there.update(self._own)

    def __exit__(self, *_: object) -> None:
        self._there.clear()


def add_into(
    sums: Sequence[Tensor],
    leaves: Sequence[Tensor],
    layout: Layout,
    flats: Sequence[int],
    common: CommonLeaves | None,
) -> None:
    """Let gradients of a unit's leaves be parts of flats.

    Args:
        sums: the flats, of the unit's indices ``flats``.
        leaves: the trainable ones, in the order of the layout.
        common: what may have them in common with other passes.
    """
    if common is None or not common.has(leaves):
        parts = layout.parts_of(flats, sums)
    else:
        if not common.adds_into(sums):
            common.sums, common.parts = [*sums], layout.parts_of(flats, sums)
        parts = common.parts
    for leaf, part in zip(leaves, parts, strict=True):
        leaf.grad = part
