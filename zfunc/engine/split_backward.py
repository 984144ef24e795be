"""Backward of a piece of a computation in two parts: gradients of its inputs, and of its weights.

A schedule of pipeline stages without bubbles (Qi et al., Zero Bubble Pipeline Parallelism, 2023,
https://arxiv.org/abs/2401.10241) wants the first part at once, since the stage before waits for
it, and the second one when there is nothing else to do. Together they do the work of one backward.

Autograd runs towards the inputs, once. Where an edge of a node on this way leads to weights,

- a product keeps the gradient that has come. The second part calls the node once more, and asks
  for what the first has left out: torch computes those products that are asked for;
- a cheap operation (a sum, a scale, a norm) is called so at the end of the first part, and then
  its activations are free;
- an ``autograd.Function`` computes all of its gradients in one go. Those for weights are kept.

The second part runs autograd from there through what is left of the graph, branch by branch
(:mod:`zfunc.engine.branches`), so that each node runs once, with the whole of its gradient. A
weight that is used twice on one way is nothing special: what parts is the edges, not the nodes.

Where a hook makes what nodes have saved, at a price, nothing is left for the second part: a layer
of ``torch.utils.checkpoint`` is computed again once, and its branch runs with the first part. So
does the branch behind an attention or a recurrence that gets some of its operands from weights.
Where something on the way is compiled by torch, the first part is the whole backward.

What the first part has used up is freed, though its nodes are not: nodes hold those that follow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, _engine_run_backward
from torch.utils.hooks import RemovableHandle

from zfunc.engine.branches import (
    Branch,
    Edge,
    Kind,
    Node,
    Ways,
    edge_of,
    saved_by,
)
from zfunc.engine.unit_runs import WEIGHTS_UNREAD
from zfunc.errors import BackwardError

__all__ = ["SplitBackward"]

NOWHERE = Ways((), (), ())  # of a graph that is used up


class SplitBackward:
    """Backward from ``outs`` in two parts: towards ``inputs``, then towards ``ends``.

    The graph is used up by it, as by any backward. Outputs that lead to weights alone are welcome,
    and so are inputs and ends that no output leads to.

    Args:
        outs: results of the piece, of any shapes. Those without a graph are passed over.
        inputs: what the piece was given.
        ends: its weights, or what stands before them: tensors, or edges of the graph. An end of no
            elements says that gradients are handed over on the way to it. Branches that lead to
            such ends only run one by one, and few gradients exist at a time.

    >>> x = torch.ones(1, 2, requires_grad=True)
    >>> w = torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True)
    >>> back = SplitBackward([x @ w @ w], [x], [w])
    >>> back.of_inputs([torch.ones(1, 2)])
    [tensor([[17., 37.]])]
    >>> back.of_weights()
    [tensor([[ 7., 11.],
            [ 9., 13.]])]
    """

    def __init__(
        self,
        outs: Sequence[Tensor],
        inputs: Sequence[Tensor | GradientEdge],
        ends: Sequence[Tensor | GradientEdge],
    ) -> None:
        self._shapes = [x.shape for x in outs]
        self._ways = Ways([*map(edge_of, outs)], [*map(edge_of, inputs)], [*map(edge_of, ends)])
        self._kept: list[_Kept | _Parted] = []
        self._grads: list[Tensor | None] = [None] * len(ends)
        self._parts_run = 0

    def of_inputs(
        self,
        seeds: Sequence[Tensor | None],
        tell: Callable[[list[Tensor | None]], None] | None = None,
    ) -> list[Tensor | None]:
        """The first part.

        Args:
            seeds: the gradient of each output, of its shape; ``None`` where none has come.
            tell: is called with what is returned as soon as that is known, before the graph is
                freed.

        Returns:
            The gradient of each input; ``None`` where no output depends on it.

        Raises:
            BackwardError: seeds do not fit, or this part was run before.
        """
        self._check(seeds)
        self._next_part("of_inputs", 0)
        ways = self._ways
        early = ways.early_ends()
        goals = [*ways.inputs, *map(ways.ends.__getitem__, early)]
        parted = [_Parted(node, ways.way[node], leaving) for node, leaving in ways.parting]
        handles = [self._watch(x) for x in parted]
        try:
            found = _run(self._roots(seeds), goals, keep=bool(parted))
        finally:
            for handle in handles:
                handle.remove()
        grads = found[: len(ways.inputs)]
        for k, grad in zip(early, found[len(grads) :], strict=True):
            self._grads[k] = grad
        for edge, grad in zip(ways.inputs, grads, strict=True):
            if edge is not None:
                self._keep(edge, ways.branch(edge), grad)
        if tell is not None:
            tell(grads)
        self._free(parted)
        return grads

    def of_weights(self) -> list[Tensor | None]:
        """The second part.

        Returns:
            The gradient of each end; ``None`` where no output depends on it.

        Raises:
            BackwardError: the first part was not run, this one was, or a gradient that is needed
                here has been written to in between.
        """
        self._next_part("of_weights", 1)
        by_branch, weights = self._by_branch(), _Weights()
        while by_branch:
            branch = next(iter(by_branch))
            kept = by_branch.pop(branch)
            weights.compute([x for x in kept if isinstance(x, _Parted) and x.grads is not None])
            roots: list[tuple[Edge, Tensor]] = []
            for x in kept:
                roots += x.into(branch)
            del kept, x
            ends = sorted(branch.ends)
            found = _run(roots, [self._ways.ends[k] for k in ends], keep=False)
            for k, grad in zip(ends, found, strict=True):
                self._grads[k] = grad
        grads, self._grads, self._ways = self._grads, [], NOWHERE
        return grads

    def _check(self, seeds: Sequence[Tensor | None]) -> None:
        if len(seeds) != len(self._shapes):
            raise BackwardError(
                f"of_inputs() got {len(seeds)} gradients for {len(self._shapes)} outputs. Give one "
                "for each, None where none has come."
            )
        for i, (seed, expected) in enumerate(zip(seeds, self._shapes, strict=True)):
            if seed is not None and seed.shape != expected:
                raise BackwardError(
                    f"the gradient of output {i} has shape {tuple(seed.shape)}; expected that of "
                    f"the output, {tuple(expected)}."
                )

    def _next_part(self, name: str, part: int) -> None:
        if self._parts_run != part:
            first = "of_inputs() comes first" if self._parts_run < part else "it was called before"
            raise BackwardError(
                f"{name}() cannot run: {first}. Each part runs once, and uses up the graph."
            )
        self._parts_run += 1

    def _roots(self, seeds: Sequence[Tensor | None]) -> list[tuple[Edge, Tensor]]:
        """Where the first part begins. What leads to weights alone is kept for the second."""
        found = []
        for edge, seed in zip(self._ways.outs, seeds, strict=True):
            if edge is None or seed is None:
                continue
            if self._ways.is_early(edge):
                found.append((edge, seed))
            else:
                self._keep(edge, self._ways.branch(edge), seed)
        return found

    def _keep(self, edge: Edge, branch: Branch | None, grad: Tensor | None) -> None:
        if branch is not None and not branch.early and grad is not None:
            self._kept.append(_Kept(branch, edge, grad))

    def _watch(self, parted: _Parted) -> RemovableHandle:
        """Keep gradients that come to a node, until the handle is removed."""
        if parted.kind.function:
            return parted.node.register_hook(self._computed(parted))
        return parted.node.register_prehook(self._arriving(parted))

    def _arriving(self, parted: _Parted) -> Callable[..., None]:
        def keep(grads: tuple[Tensor | None, ...]) -> None:
            come = [None if x is None else _Unwritten(x) for x in grads]
            if any(come):
                parted.grads = come
                self._kept.append(parted)

        return keep

    def _computed(self, parted: _Parted) -> Callable[..., None]:
        def keep(grads: tuple[Tensor | None, ...], _: tuple[Tensor | None, ...]) -> None:
            for at, edge, branch in parted.leaving:
                self._keep(edge, branch, grads[at])

        return keep

    def _free(self, parted: Sequence[_Parted]) -> None:
        """Compute what is cheap, and drop what is not needed any more."""
        if not parted:
            return  # autograd has freed everything by itself
        cheap, needed, shapes = [], set(), dict[Node, list[tuple[int, ...]]]()
        for x in self._kept:
            if isinstance(x, _Parted):
                if x.kind.product:
                    needed.add(x.node)
                elif x.kind.hands_on:  # nothing to leave out, so it needs no run of autograd
                    x.compute(shapes)
                else:
                    cheap.append(x)
        _Weights().compute(cheap)
        for node, kind in self._ways.run_early():
            if kind.saved and node not in needed:
                _drop(node, kind)

    def _by_branch(self) -> dict[Branch, list[_Kept | _Parted]]:
        """What goes into each branch. The one for which everything had come first is first."""
        found: dict[Branch, list[_Kept | _Parted]] = {}
        kept, self._kept = self._kept, []
        for x in kept:
            for branch in x.branches:
                found[branch] = [*found.pop(branch, ()), x]
        return found


class _Unwritten:
    """A gradient that nobody may write to until it is used."""

    __slots__ = ("grad", "version")

    def __init__(self, grad: Tensor) -> None:
        self.grad, self.version = grad, grad._version

    def get(self) -> Tensor:
        if self.grad._version != self.version:
            raise BackwardError(
                f"a gradient of shape {tuple(self.grad.shape)} was written to before of_weights() "
                "could use it: by the backward of an autograd.Function, which must not change what "
                "it is given, or by a user of what of_inputs() was given or has returned. Clone it "
                "there."
            )
        return self.grad


class _Kept:
    """A gradient for an edge into a branch."""

    __slots__ = ("branches", "edge", "value")

    def __init__(self, branch: Branch, edge: Edge, grad: Tensor) -> None:
        self.branches, self.edge, self.value = [branch], edge, _Unwritten(grad)

    def into(self, branch: Branch) -> list[tuple[Edge, Tensor]]:
        return [(self.edge, self.value.get())]


class _Parted:
    """A node on the way to inputs, some of whose edges lead into branches.

    Attributes:
        kind: what is known of it.
        leaving: these edges, with their positions and branches.
        grads: what has come for the node's outputs.
        found: what it makes of that for its edges.
    """

    __slots__ = ("branches", "found", "grads", "kind", "leaving", "node")

    def __init__(self, node: Node, kind: Kind, leaving: Sequence[tuple[int, Edge, Branch]]) -> None:
        self.node, self.kind, self.leaving = node, kind, leaving
        self.branches = [*{branch: None for *_, branch in leaving}]
        self.grads: list[_Unwritten | None] | None = None
        self.found: list[_Kept] = []

    def compute(self, shapes: dict[Node, list[tuple[int, ...]]]) -> None:
        """Ask the node for what leads into branches, where nothing else is asked for.

        Args:
            shapes: those of the gradients that come to a node, of nodes that were looked at.
        """
        assert self.grads is not None
        grads, self.grads = [None if x is None else x.get() for x in self.grads], None
        token = WEIGHTS_UNREAD.set(self.kind.matmul)
        try:
            found = self.node(*grads)
        finally:
            WEIGHTS_UNREAD.reset(token)
        for at, edge, branch in self.leaving:
            if found[at] is not None:
                if (into := edge[0]) not in shapes:
                    shapes[into] = [tuple(x.shape) for x in into._input_metadata]
                grad = _fitting(found[at], shapes[into][edge[1]])
                self.found.append(_Kept(branch, edge, grad))
        if self.kind.saved:
            _drop(self.node, self.kind)

    def into(self, branch: Branch) -> list[tuple[Edge, Tensor]]:
        roots: list[tuple[Edge, Tensor]] = []
        found, self.found = self.found, []
        for x in found:
            if branch in x.branches:
                roots += x.into(branch)
            else:
                self.found.append(x)
        return roots


def _run(
    roots: Sequence[tuple[Edge, Tensor]], goals: Sequence[Edge | None], keep: bool
) -> list[Tensor | None]:
    """Autograd from some edges, each with its gradient, to others; None where there is none."""
    found: list[Tensor | None] = [None] * len(goals)
    starts, seeds, ends, at = [], [], [], []
    for edge, seed in roots:
        starts.append(GradientEdge(*edge))
        seeds.append(seed)
    for k, goal in enumerate(goals):
        if goal is not None:
            ends.append(GradientEdge(*goal))
            at.append(k)
    if not starts or not ends:
        return found
    # Not by torch.autograd.grad, which looks at every shape again: a third of the time of a unit.
    came = _engine_run_backward(
        tuple(starts),
        tuple(seeds),
        keep,
        False,  # no graph of it
        tuple(ends),
        allow_unreachable=True,
        accumulate_grad=False,
    )
    for k, grad in zip(at, came, strict=True):
        found[k] = grad
    return found


class _Weights:
    """Calls nodes within a run of autograd that asks for their edges into branches: they look up
    what is asked for there, and leave out the rest. It runs from a tensor of its own, whose hook
    calls them, and finds no way to the edges."""

    def __init__(self) -> None:
        self._waiting: list[_Parted] = []
        self._begin: tuple[Edge, Tensor] | None = None

    def _beginning(self) -> tuple[Edge, Tensor]:
        start, waiting = torch.zeros((), requires_grad=True), self._waiting

        def call(_: Tensor) -> None:
            shapes: dict[Node, list[tuple[int, ...]]] = {}
            for x in waiting:
                x.compute(shapes)

        start.register_hook(call)
        begin = edge_of(start)
        assert begin is not None
        return begin, torch.ones((), device=start.device)

    def compute(self, parted: Sequence[_Parted]) -> None:
        """Call these nodes, which have not been called yet."""
        if parted:
            self._waiting[:] = parted
            begin = self._begin = self._begin or self._beginning()
            edges = {edge: None for x in parted for _, edge, _ in x.leaving}
            _run([begin], [begin[0], *edges], keep=False)
            self._waiting.clear()


def _fitting(grad: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The sum over dimensions along which the operand was repeated, as autograd takes it."""
    return grad if grad.shape == shape else grad.sum_to_size(shape)


def _drop(node: Node, kind: Kind) -> None:
    """Free what a node that will not run any more has saved."""
    for saved in saved_by(node, kind.saved):
        data = saved.data
        if saved.unpack_hook is not None:
            getattr(data, "forget", _nothing)()
        elif data is not None and data.dim():  # a number is no tensor under a dispatch mode
            saved.register_hooks(_nothing, _used_up)


def _nothing(*_: Any) -> None:
    """Keep nothing."""


def _used_up(_: Any) -> Tensor:
    raise BackwardError("backward runs a second time through what a SplitBackward has used up.")
