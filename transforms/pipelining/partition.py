"""Which part of a model each chunk of a pipeline has.

Layers are divided in the order in which they are defined, or, where an example of a batch was
given, in that in which they run. What is outside of all layers goes with the layer before it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import optree
from torch import Tensor

from zfunc.errors import CompositionError, PlacementError
from zfunc.schedules.partition import balanced_cuts, checked_cuts
from zfunc.transforms.pipelining.measuring import Measured
from zfunc.trees.marks import part_of
from zfunc.trees.nodes import NAMESPACE, Layers, Tree, opened

__all__ = ["Division", "Partition", "check_partition", "parts_of"]

Partition = str | tuple[int, ...]
"""``"flops"``, ``"parameters"``, or at which layers chunks begin and end: ``(0, 3, 6)``."""


@dataclass(frozen=True)
class Division:
    """Which chunk of a model each leaf is in.

    Attributes:
        chunk_of: by leaf index.
        weights: of each chunk, by which they are balanced.
    """

    chunk_of: tuple[int, ...]
    weights: tuple[int, ...]


def parts_of(
    params: Tree, chunks: int, partition: Partition, work: Measured | None = None
) -> Division:
    """The parts into which a model is divided.

    Args:
        params: the full tree, or a rank's parts of split leaves.
        chunks: how many there are.
        partition: by what they are balanced.
        work: of its layers, if that is known.

    Raises:
        PlacementError: there are fewer layers than chunks, or a given chunk has no parameters.
        CompositionError: the given cuts are none.
    """
    tree = opened(params)
    leaves, spec = optree.tree_flatten(tree, none_is_leaf=True, namespace=NAMESPACE)
    items = list(_defined(optree.tree_unflatten(spec, list(range(len(leaves))))))
    layers = [some for kind, some in items if kind == "layer"]
    known = work if work is not None and work.structure == spec else None
    given = None if isinstance(partition, str) else partition
    rows = _inseparable(layers, known) if given is None else [[i] for i in range(len(layers))]
    if len(rows) < chunks:
        raise PlacementError(
            f"the parameters have {len(layers)} layers (zf.Layers){_told(layers, rows)}, and a "
            f"pipeline divides them into {chunks} chunks. Take fewer ranks along pipe, fewer "
            "chunks, or mark layers: zf.functionalize does so for the lists of blocks in a module, "
            'and for others with units=: zf.functionalize(model, units="layers.*").'
        )
    sizes = _sizes(leaves, items, partition) if known is None else _flops(layers, known)
    weights = [sum(sizes[i] for i in row) for row in rows]
    if given is None:
        cuts = balanced_cuts(weights, chunks)
    else:
        cuts = checked_cuts(given, len(layers), chunks)
    of_layer = [0] * len(layers)
    for chunk, (low, high) in enumerate(pairwise(cuts)):
        some = [i for row in rows[low:high] for i in row]
        if not any(layers[i] for i in some):
            raise PlacementError(
                f"partition={list(partition)} gives chunk {chunk} the layers from {low} up to "
                f"{high}, and those have no parameters of their own: none, or those of layers "
                "before them. Cut elsewhere: each chunk has a layer with some."
            )
        for i in some:
            of_layer[i] = chunk
    heavy = tuple(sum(weights[low:high]) for low, high in pairwise(cuts))
    return Division(_with_the_rest(len(leaves), items, of_layer), heavy)


def _with_the_rest(
    count: int, items: Sequence[tuple[str, list[int]]], of_layer: Sequence[int]
) -> tuple[int, ...]:
    """The chunk of each leaf: outside of layers that of the layer before it."""
    found, at, layer = [0] * count, 0, 0
    for kind, some in items:
        if kind == "layer":
            at, layer = of_layer[layer], layer + 1
        for i in some:
            found[i] = at
    return tuple(found)


def _inseparable(layers: Sequence[list[int]], work: Measured | None) -> list[list[int]]:
    """Layers in the order in which they run, if that is known; those together that no cut parts.

    What does not run, or has no leaves of its own, stays with the layer that is defined before it;
    what runs between two calls of one layer, with that.
    """
    calls = [layer[0] for layer in layers if layer] if work is None else work.calls
    first = {start: n for n, start in reversed(list(enumerate(calls)))}
    last = {start: n for n, start in enumerate(calls)}
    runs: list[tuple[int, int, list[int]]] = []  # first and last call, and the layers
    waiting: list[int] = []
    for i, layer in enumerate(layers):
        if layer and layer[0] in first:
            runs.append((first[layer[0]], last[layer[0]], [*waiting, i]))
            waiting = []
        else:
            (runs[-1][2] if runs else waiting).append(i)
    rows: list[list[int]] = []
    end = -1
    for begin, until, some in sorted(runs):
        if begin < end:
            rows[-1] += some
        else:
            rows.append(some)
        end = max(end, until)
    return rows or [waiting]


def _told(layers: Sequence[list[int]], rows: Sequence[list[int]]) -> str:
    if len(layers) == len(rows):
        return ""
    return (
        f", which are enough for {len(rows)} (a layer that has no parameters of its own, that does "
        "not run, or that runs between two calls of another goes with that)"
    )


def _flops(layers: Sequence[list[int]], work: Measured) -> list[int]:
    return [work.flops.get(layer[0], 0) if layer else 0 for layer in layers]


def _sizes(
    leaves: Sequence[Any], items: Sequence[tuple[str, list[int]]], partition: Partition
) -> list[int]:
    layers = [some for kind, some in items if kind == "layer"]
    weights = [sum(_weight(leaves[i], partition) for i in some) for some in layers]
    weights[-1] += sum(_weight(leaves[i], partition) for i in _behind_the_last(items))
    return weights


def _defined(node: Any) -> Iterator[tuple[str, list[int]]]:
    """Layers and other leaves, as lists of leaf indices, in the order of their definition."""
    if isinstance(node, Layers):
        for layer in node:
            yield "layer", optree.tree_leaves(layer, none_is_leaf=True, namespace=NAMESPACE)
    elif isinstance(node, int):
        yield "leaf", [node]
    elif isinstance(node, dict):  # optree sorts its keys
        for child in node.values():
            yield from _defined(child)
    else:
        children, *_ = optree.tree_flatten_one_level(node, none_is_leaf=True, namespace=NAMESPACE)
        for child in children:
            yield from _defined(child)


def _behind_the_last(items: Sequence[tuple[str, list[int]]]) -> list[int]:
    """The leaves defined behind all layers: heads, but no tables."""
    last = max(i for i, (kind, _) in enumerate(items) if kind == "layer")
    return [j for kind, some in items[last + 1 :] for j in some]


def _weight(leaf: Any, partition: Partition) -> int:
    """What a leaf counts: its elements; to balance work, those of matrices alone."""
    if not isinstance(leaf, Tensor):
        return 0
    part = part_of(leaf)
    shape = leaf.shape if part is None or part.split is None else part.split.full(leaf.shape)
    return 0 if partition == "flops" and len(shape) < 2 else math.prod(shape)


def check_partition(partition: Any) -> Partition:
    """A partition as a user wrote it.

    Raises:
        CompositionError: it is none.
    """
    if isinstance(partition, str) and partition in ("flops", "parameters"):
        return partition
    cuts = tuple(partition) if isinstance(partition, Sequence) else ()
    if not cuts or not all(type(x) is int for x in cuts):
        raise CompositionError(
            f'partition={partition!r}: expected "flops", "parameters", or the layers at which '
            "chunks begin and end, such as [0, 3, 6]."
        )
    return cuts
