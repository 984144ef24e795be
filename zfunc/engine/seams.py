"""What a pass and the transforms say to each other: units, seams, and values under way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from zfunc.layout.layout import Layout
from zfunc.layout.pool import pool
from zfunc.layout.rounds import Rounds
from zfunc.ranks.comm import Group
from zfunc.trees.nodes import Tree

__all__ = [
    "Collector",
    "Finish",
    "Gradients",
    "Pending",
    "Ready",
    "Total",
    "UnitInfo",
    "Waiting",
    "gather",
]

Finish = Callable[[Any], tuple[Tensor, Tensor | None, Callable[[], Tensor]]]
"""What becomes of a loss: what to differentiate, its seed, and a function that gives the mean."""


class Collector(Protocol):
    """Keeps gradients back on their way out; stands among the ``leave`` seams at ``position``.

    Attributes:
        holding: whether all of this pass's gradients are kept back.
        waiting: which units, as ``(source, unit)``, have gradients kept back that are to
            leave in this pass.
    """

    position: int
    holding: bool

    @property
    def waiting(self) -> Mapping[tuple[int, int], Any]: ...

    def leave(self, value: Pending, unit: UnitInfo) -> Pending | None: ...


@dataclass(frozen=True)
class Gradients:
    """One call of ``value_and_grad``, as the ``differentiate`` seam sees it.

    Attributes:
        loss_fn, has_aux, params, args, kwargs: what it was called with.
        finish: how losses are averaged; over the ranks if None.
        seed: 0-d; backward begins with it instead of 1.
        collector: keeps gradients back; see there.
    """

    loss_fn: Callable[..., Any]
    has_aux: bool
    params: Tree
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    finish: Finish | None = None
    seed: Tensor | None = None
    collector: Collector | None = None


class Pending(Protocol):
    """Something under way: ``wait`` gives the tensors, again and again."""

    def wait(self) -> list[Tensor]: ...

    def advance(self) -> None:
        """End a first round, if there is a second to start."""


@dataclass
class Ready:
    """A ``Pending`` that is there already."""

    values: list[Tensor]

    def wait(self) -> list[Tensor]:
        return self.values

    def advance(self) -> None:
        """Nothing is left to do."""


@dataclass
class Waiting:
    """Tensors, and collectives that will end in one."""

    parts: list[Any]

    def wait(self) -> list[Tensor]:
        return [part if isinstance(part, Tensor) else part.wait() for part in self.parts]

    def advance(self) -> None:
        for part in self.parts:
            if isinstance(part, Rounds):
                part.advance()
            elif not isinstance(part, Tensor):
                part.wait()


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


@dataclass(frozen=True)
class UnitInfo:
    """What a seam is told of the unit: its place in the layout and the ranks that share it.

    ``running`` is the context of the call, which backward on a thread of its own cannot ask for.
    """

    layout: Layout
    index: int
    group: Group
    cut: bool
    source: int = 0
    running: Any = field(default=None, compare=False, repr=False)

    @property
    def key(self) -> tuple[int, int]:
        """Which unit it is among all that take part in a pass."""
        return self.source, self.index

    @property
    def kept(self) -> bool:
        """Whether its gradients leave as they are, since a transform averages them otherwise."""
        return self.running is not None and self.running.keeps(self)

    @property
    def name(self) -> str:
        return self.layout.units[self.index].name

    @property
    def flats(self) -> tuple[int, ...]:
        return self.layout.units[self.index].flats

    @property
    def trainable(self) -> list[int]:
        return [i for i in self.flats if self.layout.flats[i].trainable]


def gather(value: Pending, unit: UnitInfo) -> Pending:
    """Start the all-gathers of a unit's cut flats; flats kept whole pass through."""
    parts: list[Any] = []
    for i, local in zip(unit.flats, value.wait(), strict=True):
        spec = unit.layout.flats[i]
        if unit.group.size == 1 or spec.whole or not unit.cut:
            parts.append(local)
            continue
        full = pool().take(spec.length, local.dtype, local.device)
        label = f"gather {unit.name}"
        parts.append(unit.group.all_gather(full, local, cuts=spec.cuts, label=label))
    return Waiting(parts)
