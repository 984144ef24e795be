"""What a rehearsal has found: which layers run, and what goes from chunk to chunk."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from zfunc.layout.layout import Layout
from zfunc.rehearsal.results import Rebuild, containers
from zfunc.rehearsal.shapes import Shape, shape_with

__all__ = [
    "MADE",
    "Called",
    "ChunkRoute",
    "Label",
    "Rehearsed",
    "Repeated",
    "Same",
    "SameContainer",
    "Spec",
]

Label = tuple[int, str, int]
"""A value, by where layers first meet it: which call of a layer, counted from 0, ``"in"`` or
``"out"``, and its position among the flattened arguments or results. One that no layer meets, by
what made it behind which call, -1 before the first: ``"made by add"``, and its number there."""

MADE = "made by "


@dataclass(frozen=True)
class Spec:
    """A tensor without its numbers; ``needs_grad``: whether it may have a gradient."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    needs_grad: bool
    stride: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    @cached_property
    def form(self) -> Shape:
        """Its shape, strides and dtype."""
        return shape_with(self.shape, self.stride, self.dtype)


@dataclass(frozen=True)
class Same:
    """A result of a layer that is one of its arguments: the flattened one at ``position``."""

    position: int


@dataclass(frozen=True)
class Repeated:
    """A result of a layer that stands among them before: the flattened one at ``position``."""

    position: int


@dataclass(frozen=True)
class SameContainer:
    """A list, dict or record that a layer was given and returned: which of those it was given."""

    position: int


@dataclass(frozen=True, eq=False)
class Called:
    """One call of a layer.

    Attributes:
        name: the layer's, for messages.
        layer: its index in the layout's ``layers``.
        chunk: which chunk runs it.
        index: its number among all calls of ``zf.layer`` in the loss.
        inside: how many calls of ``zf.layer`` there are within it.
        arguments: how many leaves its arguments have.
        results: a leaf each: a ``Spec``, a ``Same``, a ``Repeated``, a ``SameContainer``, or what
            is no tensor.
        structure: in which they are.
        rebuild: puts them together.
        writes: positions of arguments that it writes to in place.
    """

    name: str
    layer: int
    chunk: int
    index: int
    inside: int
    arguments: int
    results: tuple[Any, ...]
    structure: Any
    rebuild: Rebuild
    writes: tuple[int, ...]

    def whole(self, given: Any) -> dict[int, Any]:
        """By id the containers among its arguments, if it returns one of them."""
        return {id(x): x for x in containers(given)} if self.returns_containers else {}

    @cached_property
    def returns_containers(self) -> bool:
        """Whether it returns a list, dict or record that it was given."""
        return any(type(x) is SameContainer for x in self.results)


@dataclass(frozen=True, eq=False)
class ChunkRoute:
    """What each run of one chunk comes to.

    Attributes:
        first: the first call of a layer of its own, or -1.
        last: the last call that it comes to: of its own, or one that shows a value that it gives.
        gives: the values that others need of it.
        needs: those that it needs, and from which chunk.
        places: both, by call and side.
        between: whether some of it is made between layers, and met by none.
        uses: the leaves outside layers that it uses.
        ends: whether it is the last chunk.
    """

    first: int
    last: int
    gives: Mapping[Label, Spec]
    needs: Mapping[Label, tuple[int, Spec]]
    places: Mapping[tuple[int, str], Sequence[Label]]
    between: bool
    uses: frozenset[int]
    ends: bool


@dataclass(frozen=True, eq=False)
class Rehearsed:
    """What a loss does, by shapes alone: alike on all ranks, and never changed.

    Attributes:
        calls: each call of a layer, in order.
        crossing: for each chunk what it needs of others: label -> (from which chunk, what).
        uses: for each chunk the indices of the leaves outside layers that it uses.
        result: what the loss returned, with a ``Spec`` for each tensor.
        flops: operations of each call in forward, two for a multiplication and an addition, in
            products, convolutions and attention.
        flops_outside: the same outside layers, by chunk.
        flops_between: the same before the first call, and behind each of them.
        writes: where the loss writes to a tensor of the user's outside layers, if it does.
        to_the_end: whether each chunk runs the loss to its end, since it changes Python's state:
            what it counts, sets or removes behind its layers the next microbatch may look at.
            A stage with several chunks would count once for each: see ``unlike``.
        draws: whether code outside layers draws from Python's or NumPy's own generator.
        unlike: what is not the same when the loss runs again, if that was to be found out.
        layout, device, compute: of the parameters: where they are, and in which dtype they enter.
    """

    calls: tuple[Called, ...]
    crossing: tuple[Mapping[Label, tuple[int, Spec]], ...]
    uses: tuple[frozenset[int], ...]
    result: Any
    flops: tuple[int, ...]
    flops_outside: tuple[int, ...]
    flops_between: tuple[int, ...]
    writes: str
    to_the_end: bool
    draws: bool
    unlike: str
    layout: Layout
    device: torch.device
    compute: torch.dtype | None

    @property
    def chunks(self) -> int:
        """How many there are."""
        return len(self.crossing)

    def receives(self, chunk: int) -> Mapping[Label, tuple[int, Spec]]:
        """The values that a chunk needs, from which chunk; in one order on all ranks."""
        return self.crossing[chunk]

    def sends(self, chunk: int) -> tuple[tuple[Label, int], ...]:
        """The values that a chunk gives, and to which chunk, in the order of these."""
        return self._sends[chunk]

    def sent_by(self, chunk: int) -> Mapping[int, Sequence[Label]]:
        """By chunk what it needs of this one, in one order on all ranks."""
        return self._sent[chunk]

    def returned_by(self, chunk: int) -> Mapping[int, Sequence[Label]]:
        """By chunk of which of its values this one returns gradients."""
        return self._returned[chunk]

    def roots(self, chunk: int) -> frozenset[int]:
        """The leaves outside layers that a chunk uses."""
        return self.uses[chunk]

    @cached_property
    def positions(self) -> Mapping[int, int]:
        """Which of the calls it is, by its number among all calls of ``zf.layer``."""
        return {call.index: n for n, call in enumerate(self.calls)}

    @cached_property
    def routes(self) -> tuple[ChunkRoute, ...]:
        """What each run of a chunk comes to, by chunk."""
        return tuple(map(self._route, range(self.chunks)))

    def _route(self, chunk: int) -> ChunkRoute:
        own = [n for n, call in enumerate(self.calls) if call.chunk == chunk]
        needs, uses, ends = self.crossing[chunk], self.uses[chunk], chunk == self.chunks - 1
        gives: dict[Label, Spec] = {}
        for label, to in self.sends(chunk):
            gives.setdefault(label, self.crossing[to][label][1])
        places: dict[tuple[int, str], list[Label]] = {}
        for label in (*needs, *gives):
            places.setdefault(label[:2], []).append(label)
        last = max([*own, *(label[0] for label in gives)], default=-1)
        between = any(side.startswith(MADE) for _, side in places)
        first = own[0] if own else -1
        return ChunkRoute(first, last, gives, needs, places, between, uses, ends)

    @cached_property
    def _sends(self) -> tuple[tuple[tuple[Label, int], ...], ...]:
        rows: list[list[tuple[Label, int]]] = [[] for _ in self.crossing]
        for to, row in enumerate(self.crossing):
            for label, (source, _) in row.items():
                rows[source].append((label, to))
        return tuple(map(tuple, rows))

    @cached_property
    def _sent(self) -> tuple[Mapping[int, list[Label]], ...]:
        return tuple(_by_chunk((to, label) for label, to in row) for row in self._sends)

    @cached_property
    def _returned(self) -> tuple[Mapping[int, list[Label]], ...]:
        return tuple(
            _by_chunk((source, label) for label, (source, spec) in row.items() if spec.needs_grad)
            for row in self.crossing
        )


def _by_chunk(pairs: Iterable[tuple[int, Label]]) -> dict[int, list[Label]]:
    found: dict[int, list[Label]] = {}
    for chunk, label in pairs:
        found.setdefault(chunk, []).append(label)
    return dict(sorted(found.items()))
