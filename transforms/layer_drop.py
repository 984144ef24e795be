"""``drop_layers``: progressive layer dropping.

Law: in the mean over keys a residual stack does what the full one does, for the branch of
layer i = 1..L is kept with probability ``p = 1 - (i / L) (1 - theta(t))`` and then scaled
by ``1 / p``; with ``theta=1`` the step is the bare one, bitwise. The coins are the same on
all ranks, so under ``shard`` a dropped layer is neither gathered nor reduced.

``theta(t) = (1 - theta) exp(-gamma t) + theta`` after t steps: training starts with all
layers. Evaluation runs all of them.

Source: Zhang and He, Accelerating Training of Transformer-Based Language Models with
Progressive Layer Dropping, 2020, sections 4.1 and 4.2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import optree
import torch
from torch import Tensor

from zfunc.buffers.readings import number
from zfunc.engine import context
from zfunc.engine.context import Context
from zfunc.engine.entries import Entries
from zfunc.engine.hooks import LayerInfo, Order
from zfunc.engine.keys import key_of
from zfunc.engine.passes import Pass
from zfunc.engine.sources import Source
from zfunc.engine.step import Transform, transform_of
from zfunc.errors import CompositionError, PlacementError
from zfunc.layout.readable import Readable
from zfunc.ranks import random
from zfunc.trees.nodes import NAMESPACE, Layers

__all__ = ["DropLayers", "drop_layers", "keep_probability", "theta_at"]

Skip = Callable[..., Any]
Call = Callable[..., Any]
TAG = -3  # sets the coins' key apart from the other keys of a step


def theta_at(step: int, theta: float, gamma: float) -> float:
    """``(1 - theta) exp(-gamma step) + theta``: 1 at first, ``theta`` in the end.

    >>> theta_at(0, 0.5, 0.001), round(theta_at(1000, 0.5, 0.001), 4)
    (1.0, 0.6839)
    """
    return (1 - theta) * math.exp(-gamma * step) + theta


def keep_probability(depth: int, of: int, theta: float) -> float:
    """That of layer ``depth`` (from 0) in a stack of ``of`` layers.

    >>> [keep_probability(i, 4, 0.5) for i in range(4)]
    [0.875, 0.75, 0.625, 0.5]
    """
    return 1 - (depth + 1) / of * (1 - theta)


@dataclass(frozen=True)
class DropLayers(Transform):
    """See :func:`drop_layers`."""

    theta: float = 0.5
    gamma: float = 0.001
    skip: Skip | None = None

    position: ClassVar[int] = Order.DROP_LAYERS
    by_unit: ClassVar[bool] = True
    by_layer: ClassVar[bool] = True  # else a dropped layer would be gathered with its neighbours
    name: ClassVar[str] = "drop_layers"

    def __post_init__(self) -> None:
        if not 0 <= self.theta <= 1:
            raise ValueError(
                f"theta={self.theta!r}: expected a probability, 0 <= theta <= 1: that with which "
                "the last layer is kept in the end."
            )
        if not (self.gamma >= 0 and math.isfinite(self.gamma)):
            raise ValueError(
                f"gamma={self.gamma!r}: expected a rate per step, gamma >= 0. 100 divided by the "
                "number of steps is a good one."
            )

    def __repr__(self) -> str:
        return f"drop_layers(theta={self.theta:g}, gamma={self.gamma:g})"

    def obstacle(self) -> str:
        return "leaves out other layers in each step, by coins that the host tosses"

    def check(self, state: Any) -> None:
        entries = Entries(state)
        for name, what in (("step", "the number of steps taken"), ("key", "a random key")):
            if entries.get(name) is None:
                raise PlacementError(
                    f"drop_layers needs the entry {name!r} ({what}), which the state ({entries}) "
                    "lacks: theta depends on the step, and the coins on the key. zf.TrainState "
                    "has both; in a dict keep step=torch.tensor(0) and key=zf.random.key(0)."
                )
        if not _has_layers(state):
            raise CompositionError(
                "drop_layers found no stack of layers in this state. Mark the layers' parameters "
                "with zf.Layers([...]) and run them by zf.scan or zf.layer; zf.functionalize does "
                "so for the lists of blocks in a module."
            )

    def configure(self, running: Context, state: Any) -> None:
        step = int(number(Entries(state)["step"]))
        running.notes[DropLayers] = _Coins(theta_at(step, self.theta, self.gamma))

    def foresee(self, plan: Sequence[tuple[int, int]], owner: Pass) -> Sequence[tuple[int, int]]:
        """Toss the coins of this pass, and expect only the units of layers that are kept."""
        running = context.current()
        assert running is not None
        key = key_of(running)
        assert key is not None
        coins: _Coins = running.notes[DropLayers]
        memo, call = running.memo, running.differentiated
        if not memo.get(("dropped", call)):
            memo["undropped", call] = plan  # recorded when all layers ran, or not recorded yet
        coins.toss(owner, random.fold_in(key, TAG), running.asked)
        memo["dropped", call] = owner.thinned = bool(coins.idle)
        owner.idle.update(coins.idle)
        return [row for row in memo["undropped", call] if row not in coins.idle]

    def layer(self, call: Call, info: LayerInfo) -> Call:
        running = context.current()
        assert running is not None
        coin = running.notes[DropLayers].of(info)
        if coin is None or coin == (1.0, True):
            return call
        p, kept = coin
        idle = self._idle if self.skip is None else self._as_told

        def dropping(*xs: Any, **kw: Any) -> Any:
            out: Any = call(*xs, **kw) if kept else None
            nothing = idle(call, info, running.memo, out, xs, kw)
            if not kept:
                return nothing
            streams = {id(x) for x in (*xs, *kw.values()) if isinstance(x, Tensor)}
            return optree.tree_map(
                lambda x, y: x.lerp(y, 1 / p) if id(x) in streams and x is not y else y,
                nothing,
                out,
                **_OPTREE,
            )

        return dropping

    def _as_told(self, call: Call, info: LayerInfo, memo: Any, out: Any, xs: Any, kw: Any) -> Any:
        assert self.skip is not None
        nothing = self.skip(*xs, **kw)
        mine, its = (optree.tree_structure(x, **_OPTREE) for x in (nothing, out))
        if out is not None and mine != its:
            raise CompositionError(
                f"layer {info.place} returned {its}, but `skip` of drop_layers {mine}: it is to "
                "return what the block would if it did nothing, in the same structure."
            )
        return nothing

    def _idle(self, call: Call, info: LayerInfo, memo: Any, out: Any, xs: Any, kw: Any) -> Any:
        """What a block returns that does nothing: its hidden states, in the form of its output."""
        stream, key = _stream(info, xs, kw), ("form", info.stack)
        if out is not None:
            memo[key] = _form(info, stream, out)
        elif key not in memo:  # nothing of this stack has run in this process: see what it returns
            with torch.no_grad():
                memo[key] = _form(info, stream, call(*xs, **kw))
        return optree.tree_map(lambda mine: stream if mine else None, memo[key], **_OPTREE)

    def describe(self, memo: Mapping[Any, Any]) -> list[str]:
        return [
            "drop_layers: layer i of L is kept with probability 1 - i/L (1 - theta(t)), "
            f"theta(t) = {1 - self.theta:g} exp(-{self.gamma:g} t) + {self.theta:g}"
        ]


_OPTREE: dict[str, Any] = {"none_is_leaf": True, "namespace": NAMESPACE}


class _Coins:
    """The coins of one call of a step.

    Attributes:
        idle: ``(source, unit)`` of the units that serve dropped layers only.
    """

    def __init__(self, theta: float) -> None:
        self.theta = theta
        self.idle: set[tuple[int, int]] = set()
        # The coins of a tree's layers; trees know their pass, and that whose coins these are.
        self._tossed: WeakKeyDictionary[Source, list[tuple[float, bool]]] = WeakKeyDictionary()

    def toss(self, owner: Pass, key: Tensor, call: int) -> None:
        """Decide about the layers of all trees that this pass differentiates."""
        for source in owner.sources:
            places = source.layout.stacks
            if not places:
                continue
            here = random.fold_in(random.fold_in(key, call), source.index)
            draw = random.uniform(here, (len(places),), device="cpu")
            used: set[int] = set()
            tossed = self._tossed[source] = []
            for k, ((_, depth, of), coin) in enumerate(zip(places, draw.tolist(), strict=True)):
                p = keep_probability(depth, of, self.theta)
                tossed.append((p, kept := coin < p))
                used.update(source.layer_units[k] if kept else ())
            dropped = {unit for units in source.layer_units for unit in units} - used
            self.idle.update((source.index, unit) for unit in dropped)

    def of(self, info: LayerInfo) -> tuple[float, bool] | None:
        """Probability and coin of a layer; ``None`` where it is not ours to drop: a teacher's,
        or one that is evaluated."""
        source, k = info.key or (None, 0)
        coins = None if source is None else self._tossed.get(source)
        return None if coins is None else coins[k]


def _has_layers(state: Any) -> bool:
    nodes = optree.tree_leaves(
        state, is_leaf=lambda x: isinstance(x, Layers | Readable), namespace=NAMESPACE
    )
    return any(
        isinstance(x, Layers) or (isinstance(x, Readable) and bool(x.layout.layers)) for x in nodes
    )


def _stream(info: LayerInfo, xs: tuple[Any, ...], kw: dict[str, Any]) -> Tensor:
    """The hidden states that a block is given."""
    found = next((x for x in xs if isinstance(x, Tensor)), kw.get("hidden_states"))
    if isinstance(found, Tensor):
        return found
    raise CompositionError(
        f"drop_layers does not know what layer {info.place} adds to: it was called with no tensor "
        f"as a positional argument and without hidden_states= (but {sorted(kw) or 'nothing'}). Say "
        "what a dropped layer returns: drop_layers(step, skip=lambda *args, **kwargs: ...)."
    )


def _form(info: LayerInfo, stream: Tensor, out: Any) -> Any:
    """The structure of a block's output: True at the hidden states, None elsewhere."""
    leaves = optree.tree_leaves(out, **_OPTREE)
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    if len(tensors) != 1 or tensors[0].shape != stream.shape or tensors[0].dtype != stream.dtype:
        found = ", ".join(f"{tuple(x.shape)} {x.dtype}" for x in tensors) or "no tensor"
        raise CompositionError(
            f"layer {info.place} got hidden states of {tuple(stream.shape)} {stream.dtype} and "
            f"returned {found}: drop_layers cannot tell what it would return if it did nothing. "
            "Say so: drop_layers(step, skip=lambda x, *args, **kwargs: ...), a function of the "
            "layer's inputs (for a block that also hands on a position bias: (x, bias))."
        )
    return optree.tree_map(lambda x: True if isinstance(x, Tensor) else None, out, **_OPTREE)


@transform_of
def drop_layers(theta: float = 0.5, gamma: float = 0.001, skip: Skip | None = None) -> DropLayers:
    """Leave out layers of the stacks that a step trains, deeper ones more often, as it goes on.

    Call it as ``drop_layers(step, theta=0.5)`` or as the decorator ``@drop_layers(theta=0.5)``.
    Layer i of L is kept with probability ``1 - i/L (1 - theta(t))``; what it adds to the hidden
    states is then scaled by the inverse, so that the mean is that of the full stack. For
    residual blocks whose normalisation is on the branch (pre-LN). The coins come from the
    state's key and step count and are equal on all ranks and in all microbatches.

    Args:
        theta: the last layer's probability in the end, between 0 and 1; 1 drops nothing.
        gamma: how fast theta gets there, per step; the paper has about 100 / number of steps.
        skip: ``skip(*args, **kwargs)``, what a block returns that does nothing, for blocks
            that return more than their first tensor. An input that it returns is taken for
            a residual stream, which a kept block's scale applies to.

    Raises:
        ValueError: theta or gamma is out of range.
        CompositionError: the step has it already; (from the step) there is no stack of
            layers, or a block does not map hidden states to hidden states.
        PlacementError: (from the step) the state has no ``step`` or no ``key``.
    """
    if skip is not None and not callable(skip):
        raise TypeError(f"skip={skip!r}: expected a function of a block's inputs.")
    return DropLayers(float(theta), float(gamma), skip)
