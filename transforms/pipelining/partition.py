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
        PlacementError: there are fewer layers than chunks.
        CompositionError: the given cuts are none.
    """
    tree = opened(params)
    leaves, spec = optree.tree_flatten(tree, none_is_leaf=True, namespace=NAMESPACE)
    items = list(_defined(optree.tree_unflatten(spec, list(range(len(leaves))))))
    layers = [some for kind, some in items if kind == "layer"]
    if len(layers) < chunks:
        raise PlacementError(
            f"the parameters have {len(layers)} layers (zf.Layers), and a pipeline divides them "
            f"into {chunks} chunks. Take fewer ranks along pipe, fewer chunks, or mark layers: "
            "zf.functionalize does so for the lists of blocks in a module, and for others with "
            'units=: zf.functionalize(model, units="layers.*").'
        )
    known = work if work is not None and work.structure == spec else None
    order = _order(layers, known)
    weights = _sizes(leaves, items, partition) if known is None else _flops(layers, known)
    row = [weights[i] for i in order]
    if isinstance(partition, str):
        cuts = balanced_cuts(row, chunks)
    else:
        cuts = checked_cuts(partition, len(layers), chunks)
    of_layer = [0] * len(layers)
    for chunk, (low, high) in enumerate(pairwise(cuts)):
        for i in order[low:high]:
            of_layer[i] = chunk
    heavy = tuple(sum(row[low:high]) for low, high in pairwise(cuts))
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


def _order(layers: Sequence[list[int]], work: Measured | None) -> list[int]:
    """Layers in the order in which they run, if that is known; what does not run stays behind the
    layer that is defined before it."""
    if work is None:
        return list(range(len(layers)))
    when = {start: n for n, start in enumerate(work.order)}
    keys, last = [], -1
    for layer in layers:
        last = when.get(layer[0], last) if layer else last
        keys.append(last)
    return sorted(range(len(layers)), key=lambda i: keys[i])


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
