"""In which order transforms act, and what they and steps hand to each other at hooks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from html import escape
from typing import Any, Protocol

from torch import Tensor

from zfunc.trees.nodes import Tree

__all__ = [
    "Collector",
    "Description",
    "Finish",
    "Gradients",
    "LayerInfo",
    "Order",
    "Pending",
]

Finish = Callable[[Any], tuple[Tensor, Tensor | None, Callable[[], Tensor]]]
"""What becomes of a loss: what to differentiate, its seed, and a function that gives the mean."""


class Order(IntEnum):
    """Where on the way of the data a transform acts: smaller is nearer to storage.

    State comes from storage through all of them to the user's function, and goes back the other
    way. There is room between the numbers for transforms of your own.

    >>> sorted([Order.SHARD, Order.DONATE])[0].name
    'DONATE'
    """

    DONATE = 0  # memory itself: it sees the state first and the result last
    OFFLOAD = 100  # where the state is held
    COMPRESS = 150  # nearer to storage than shard: it takes over what shard leaves
    PIPELINE = 190  # around all that surrounds a layer: most of them run elsewhere
    SHARD = 200  # parameters are gathered, gradients are reduced
    SPLIT = 220  # before leaves are cut, and after all that makes other leaves of them
    ACCUMULATE = 250  # microbatches
    REMAT = 260  # outside of what computes in a layer
    PRECISION = 290  # around whatever may leave a layer out: all streams in one dtype
    DROP_LAYERS = 300
    QUANTIZE = 350  # what layers compute with
    LOW_BITS = 400  # weights of a tree that is no training state
    SKIP_UNUSED = 450  # a step that precision takes back has been missed by nobody
    OTHERS = 500


class Collector(Protocol):
    """Keeps gradients back on their way out; stands among the ``leave`` hooks at ``position``.

    Attributes:
        holding: whether all of this pass's gradients are kept back.
        waiting: which units, as ``(source, unit)``, have gradients kept back that are to
            leave in this pass.
    """

    position: int
    holding: bool

    @property
    def waiting(self) -> Mapping[tuple[int, int], Any]: ...

    def take(self, unit: Any) -> list[Tensor] | None:
        """The sum of a unit to which gradients are added on the spot, if no hook comes before."""

    def leave(self, value: Pending, unit: Any) -> Pending | None: ...


@dataclass(frozen=True)
class Gradients:
    """One call of ``value_and_grad``, as the ``differentiate`` hook sees it.

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


@dataclass(frozen=True)
class LayerInfo:
    """What the ``layer`` hook is told of a layer.

    Attributes:
        index: counts the calls of layers within one loss.
        name: the layer's name in a module; the index where it has none.
        stack: the path of the ``Layers`` that it is in; ``None`` if that is not known.
        depth, of: its position in the stack, from 0, and the stack's length.
        key: identifies its parameters within the running pass.
    """

    index: int
    name: str
    stack: str | None = None
    depth: int = 0
    of: int = 1
    key: Any = None

    @property
    def place(self) -> str:
        """Where the layer is, for messages."""
        return self.name if self.stack is None else f"{self.stack}.{self.depth}".lstrip(".")


class Pending(Protocol):
    """Something under way: ``wait`` gives the tensors, again and again."""

    def wait(self) -> list[Tensor]: ...

    def advance(self) -> None:
        """End a round, if there is another to start; of three there are two to end."""


class Description(str):
    """Text with its figures as attributes.

    Attributes:
        state_bytes: bytes of the placed state on this rank; None before ``place``.
        sent_bytes: bytes that this rank sends in one step, headers included; None before it has
            run, unless a batch was foreseen.
        peak_bytes: the most bytes of tensors alive in a step; None unless a batch was foreseen.
        flops: of a step; likewise.
    """

    state_bytes: int | None = None
    sent_bytes: int | None = None
    peak_bytes: int | None = None
    flops: int | None = None

    __repr__ = str.__str__  # as the last line of a notebook's cell it is lines, not one quoted

    def _repr_html_(self) -> str:
        return f"<pre>{escape(self)}</pre>"
