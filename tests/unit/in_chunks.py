"""A loss in chunks, one after the other in one process: values go through a dict.

The same function is differentiated as a whole, and compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import optree
import torch
from torch import Tensor

from zfunc.engine import context
from zfunc.engine.context import Context
from zfunc.engine.hooks import LayerInfo
from zfunc.engine.primitives import Ref
from zfunc.layout.cutting import make_layout
from zfunc.layout.layout import Layout
from zfunc.rehearsal.chunk_run import ChunkRun
from zfunc.rehearsal.plans import Label, Rehearsed, Spec
from zfunc.rehearsal.refs import Seam
from zfunc.rehearsal.rehearsal import rehearse
from zfunc.trees.nodes import NAMESPACE


class HeldLayer(Ref):
    """A layer's parameters, which are there; counts how often they enter."""

    def __init__(self, layer: int, params: Any, entered: list[int]) -> None:
        self.__dict__.update(layer=layer, params=params, entered=entered, differentiated=True)

    def call(self, fn: Callable[..., Any], xs: tuple[Any, ...], kw: dict[str, Any]) -> Any:
        self.entered.append(self.layer)
        return fn(self.params, *xs, **kw)

    def force(self) -> Any:
        return self.params

    def told(self, index: int, name: str) -> LayerInfo:
        return LayerInfo(index, name, key=("held", self.layer))


def even(layers: int, chunks: int) -> list[int]:
    """Layers dealt out to chunks."""
    return [k * chunks // layers for k in range(layers)]


@dataclass
class InChunks:
    """One call of a loss in chunks.

    Attributes:
        result: what the last chunk returned.
        grads: by leaf, in leaf order.
        entered: by chunk the layers whose parameters entered.
        sent: by chunk the labels that it gave.
    """

    plan: Rehearsed
    result: Any
    grads: list[Tensor | None]
    entered: list[list[int]] = field(default_factory=list)
    sent: list[list[Label]] = field(default_factory=list)


def run(
    fn: Callable[..., Any],
    params: Any,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    chunk_of: Sequence[int],
    scope_of: Callable[[int], Any] | None = None,
    loss_of: Callable[[Any], Tensor] = lambda out: out,
    plan: Rehearsed | None = None,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> InChunks:
    """Rehearse, run every chunk forward, each ``around`` by itself, then every chunk backward."""
    layout = make_layout(params, world=1)
    plan = plan or rehearse(fn, layout, args, kwargs, chunk_of)
    leaves = optree.tree_leaves(params, none_is_leaf=True, namespace=NAMESPACE)
    mine = [
        [x if x is None else x.detach().requires_grad_() for x in leaves]
        for _ in range(plan.chunks)
    ]
    result, runs, entered = _forward(fn, layout, mine, args, kwargs, plan, scope_of, around)
    total: list[Tensor | None] = [None] * len(leaves)
    _backward(plan, runs, mine, loss_of(result), total)
    sent = [[label for label, _ in plan.sends(k)] for k in range(plan.chunks)]
    return InChunks(plan, result, total, entered, sent)


def forward(
    fn: Callable[..., Any], params: Any, args: tuple[Any, ...], *, chunk_of: Sequence[int]
) -> Any:
    """What the last chunk returns, without gradients."""
    layout = make_layout(params, world=1)
    plan = rehearse(fn, layout, args, None, chunk_of)
    leaves = optree.tree_leaves(params, none_is_leaf=True, namespace=NAMESPACE)
    with torch.no_grad():
        rows = [leaves] * plan.chunks
        return _forward(fn, layout, rows, args, None, plan, None, nullcontext)[0]


def _forward(
    fn: Callable[..., Any],
    layout: Layout,
    rows: list[Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    plan: Rehearsed,
    scope_of: Callable[[int], Any] | None,
    around: Callable[[], AbstractContextManager[Any]],
) -> tuple[Any, list[ChunkRun], list[list[int]]]:
    """Every chunk in turn, each on a row of leaves."""
    wire: dict[tuple[int, Label], Tensor] = {}
    runs, entered, result = [], [], None
    for k, row in enumerate(rows):
        refs = _Refs(layout, row)
        chunk = ChunkRun(
            plan, k, _receiver(wire, k), lambda which, row=row: {i: row[i] for i in which}
        )
        token = context.push(Context(transforms=(Seam(),), layer_scope=scope_of))
        try:
            with around():
                out = chunk.run(fn, refs.tree, args, kwargs)
        finally:
            context.pop(token)
        result = out if out is not None else result
        for label, to in plan.sends(k):
            x = chunk.outs[label].detach()
            wire[to, label] = torch.empty(x.shape, dtype=x.dtype).copy_(x)  # in one stretch
        runs.append(chunk)
        entered.append(refs.entered)
    return result, runs, entered


def _receiver(wire: dict[Any, Tensor], chunk: int) -> Callable[[Label, Spec], Tensor]:
    return lambda label, spec: wire[chunk, label].clone()


class _Refs:
    """The layers of a run, which remember that they were entered."""

    def __init__(self, layout: Layout, leaves: Sequence[Any]) -> None:
        self.layout, self.entered = layout, list[int]()
        self.layers = [
            HeldLayer(j, optree.tree_unflatten(y.spec, leaves[y.start : y.stop]), self.entered)
            for j, y in enumerate(layout.layers)
        ]

    def tree(self, root: Mapping[int, Any]) -> Any:
        return self.layout.tree(root, self.layers.__getitem__)


def _backward(
    plan: Rehearsed, runs: list[ChunkRun], mine: list[Any], loss: Tensor, total: list[Any]
) -> None:
    back: dict[Label, Tensor] = {}
    for k in reversed(range(plan.chunks)):
        labels = list(dict.fromkeys(label for label, _ in plan.sends(k)))
        pairs = [
            (runs[k].outs[x], back[x])
            for x in labels
            if x in back and runs[k].outs[x].requires_grad
        ]
        ends, seeds = [x for x, _ in pairs], [g for _, g in pairs]
        if k == plan.chunks - 1:
            ends, seeds = [loss, *ends], [torch.ones_like(loss), *seeds]
        inputs = {label: x for label, x in runs[k].inputs.items() if x.requires_grad}
        live = [i for i, x in enumerate(mine[k]) if x is not None]
        wrt = [*inputs.values(), *(mine[k][i] for i in live)]
        grads = torch.autograd.grad(ends, wrt, seeds, allow_unused=True)
        for label, g in zip(inputs, grads, strict=False):
            if g is not None:
                back[label] = g if label not in back else back[label] + g
        for i, g in zip(live, grads[len(inputs) :], strict=True):
            if g is not None:
                total[i] = g if total[i] is None else total[i] + g


def whole(
    fn: Callable[..., Any],
    params: Any,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    scope_of: Callable[[int], Any] | None = None,
    loss_of: Callable[[Any], Tensor] = lambda out: out,
) -> tuple[Any, list[Tensor | None]]:
    """The same function in one piece."""
    leaves, spec = optree.tree_flatten(params, none_is_leaf=True, namespace=NAMESPACE)
    own = [x if x is None else x.detach().requires_grad_() for x in leaves]
    token = context.push(Context(layer_scope=scope_of))
    try:
        out = fn(optree.tree_unflatten(spec, own), *args, **dict(kwargs or {}))
    finally:
        context.pop(token)
    live = [x for x in own if x is not None]
    grads = iter(torch.autograd.grad(loss_of(out), live, allow_unused=True))
    return out, [x if x is None else next(grads) for x in own]


def worst(
    got: InChunks, want: tuple[Any, list[Tensor | None]], layout: Layout | None = None
) -> float:
    """The largest difference of any gradient's element; what only one has is infinite."""
    most = 0.0
    for a, b in zip(got.grads, want[1], strict=True):
        if (a is None) != (b is None):
            other = b if a is None else a
            assert other is not None
            most = max(most, float("inf") if bool((other != 0).any()) else 0.0)
        elif a is not None and b is not None and a.numel():
            most = max(most, float((a - b).abs().max()))
    return most
