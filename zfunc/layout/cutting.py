"""Deciding how a tree is cut: which leaves travel together, and where each one lies."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import optree
import torch
from torch import Tensor

from zfunc.errors import PlacementError
from zfunc.layout.freezing import check_trainable, frozen_among, is_frozen
from zfunc.layout.layout import ALIGN, Flat, Layer, Layout, Slot, Unit, aligned, find_layers
from zfunc.layout.splits import Encoded, Part, Split
from zfunc.layout.stages import Stages, spread
from zfunc.ranks.meshes import Axes, Mesh
from zfunc.trees.marks import part_of
from zfunc.trees.nodes import NAMESPACE, Tree
from zfunc.trees.tree import dotted

__all__ = ["aligned_cuts", "make_layout", "settle_origin", "sharing"]

ALONE = 1 << 16  # bytes from which a leaf of the root is worth a message of its own


def settle_origin(leaf: Tensor, dtype: torch.dtype) -> Tensor:
    """Remember what dtype a cast leaf's original has, whose tree is to be cut alike."""
    leaf.__dict__["_zfunc_origin"] = dtype
    return leaf


def _origin_of(leaf: Tensor) -> torch.dtype:
    """The dtype that :func:`settle_origin` stored, or the leaf's own."""
    return leaf.__dict__.get("_zfunc_origin", leaf.dtype)


def _check_leaf(path: str, leaf: Any) -> None:
    if not isinstance(leaf, Tensor):
        raise PlacementError(
            f"parameter {path} is a {type(leaf).__name__}, not a tensor. Keep what is no "
            "parameter out of the params tree (close over it, or make it an entry of the state)."
        )
    check_trainable(path, leaf)


def _groups(
    layers: Sequence[Layer],
    root: Sequence[int],
    sizes: Sequence[int],
    unit_bytes: int,
    merge: bool,
    first: int | None,
    stages: Stages | None,
) -> list[tuple[str, list[int]]]:
    """Leaf indices that travel together, named: the root's first, then the layers'."""
    spans = [("", list(root))] if root and stages is None else []
    chunk_of = None if stages is None else stages.chunk_of
    for run in _merged(layers, sizes, unit_bytes // 8 if merge else 0, first, chunk_of):
        last = run[-1].name.rpartition(".")[2]
        name = run[0].name if len(run) == 1 else f"{run[0].name}-{last}"
        spans.append((name, [i for layer in run for i in range(layer.start, layer.stop)]))
    groups = [] if stages is None else _apart(root, sizes, unit_bytes // 8, stages.chunk_of)
    for name, leaves in spans:
        # The root's leaves (embedding, head) have little to do with each other in time.
        if name:
            groups.extend(_split(name, leaves, sizes, unit_bytes))
        elif first is None:
            groups.extend(_split(name, leaves, sizes, unit_bytes // 8))
        else:
            groups.extend(_apart(leaves, sizes, unit_bytes // 8))
    return groups


def _apart(
    leaves: Sequence[int],
    sizes: Sequence[int],
    unit_bytes: int,
    chunk_of: Sequence[int] | None = None,
) -> list[tuple[str, list[int]]]:
    """The root's small leaves together (those of a chunk), each that is a good part by itself.

    A gradient leaves when all of its unit are there: a head's long before an embedding's.
    """
    least = max(ALONE, sum(sizes[i] for i in leaves) // 8)
    small: dict[int, list[int]] = {}
    for i in leaves:
        if sizes[i] < least:
            small.setdefault(0 if chunk_of is None else chunk_of[i], []).append(i)
    parts = [part for some in small.values() for part in _parts(some, sizes, unit_bytes)]
    parts += [[i] for i in leaves if sizes[i] >= least]
    parts.sort(key=lambda part: part[0])
    return _named("root", parts)


def _merged(
    layers: Sequence[Layer],
    sizes: Sequence[int],
    most: int,
    first: int | None,
    chunk_of: Sequence[int] | None = None,
) -> list[list[Layer]]:
    """Consecutive layers of one stack (and of one chunk) that make a unit of up to ``most`` bytes.

    With ``first`` they are taken from the end: the last unit has up to ``first`` bytes, that before
    it up to twice as many, and so on.
    """
    limit, filled = most if first is None else min(first, most), 0
    runs: list[list[Layer]] = []
    for layer in layers if first is None else reversed(layers):
        weight = sum(sizes[layer.start : layer.stop])
        fits = limit > 0 and filled + weight <= limit
        if runs and fits and _stack(runs[-1][0], chunk_of) == _stack(layer, chunk_of):
            runs[-1].append(layer)
            filled += weight
            continue
        limit = min(2 * limit, most) if runs else limit
        runs.append([layer])
        filled = weight
    return runs if first is None else [run[::-1] for run in reversed(runs)]


def _stack(layer: Layer, chunk_of: Sequence[int] | None) -> tuple[str, int]:
    chunk = 0 if chunk_of is None or layer.start == layer.stop else chunk_of[layer.start]
    return layer.name.rpartition(".")[0], chunk


def _split(
    name: str, leaves: list[int], sizes: Sequence[int], unit_bytes: int
) -> list[tuple[str, list[int]]]:
    """Cut a huge group between leaves, so that no part but a single leaf exceeds the limit."""
    return _named(name or "root", _parts(leaves, sizes, unit_bytes))


def _parts(leaves: Sequence[int], sizes: Sequence[int], unit_bytes: int) -> list[list[int]]:
    parts: list[list[int]] = [[]]
    filled = 0
    for i in leaves:
        if parts[-1] and filled + sizes[i] > unit_bytes:
            parts.append([])
            filled = 0
        parts[-1].append(i)
        filled += sizes[i]
    return parts


def _named(label: str, parts: Sequence[list[int]]) -> list[tuple[str, list[int]]]:
    if len(parts) == 1:
        return [(label, parts[0])]
    return [(f"{label}[{k}]", part) for k, part in enumerate(parts)]


def make_layout(
    tree: Tree,
    *,
    world: int = 1,
    mesh: Mesh | None = None,
    axis: Axes = "data",
    unit_bytes: int = 1 << 26,
    persist_below: int = 0,
    merge: bool = True,
    first: int | None = None,
    alone: int | None = None,
    frozen: Callable[[Tensor], bool] = is_frozen,
    by: tuple[str, str] | None = None,
    stages: Stages | None = None,
) -> Layout:
    """Decide how a plain tree of parameters is cut over ``world`` ranks.

    Args:
        tree: plain tree of floating-point tensors (real or on ``meta``).
        unit_bytes: a layer that is larger is split between leaves, the root at an eighth
            of it; consecutive layers of one stack are merged up to an eighth of it.
        merge: whether tiny layers travel together, as said.
        first: bytes up to which the last layers are merged, whose gradients are ready first: over
            a slow link they should leave soon. Twice as many before them, and so on.
        alone: bytes from which on a leaf lies in a flat of its own: its gradient stays where
            autograd has put it, and is not copied. For trees of which no flat is sent.
        persist_below: leaves of fewer elements are kept whole on every rank.
        frozen: which leaves are marked as having no gradient, beside those of which the tree's
            structure says so (:mod:`zfunc.layout.freezing`).
        by: the transform that asks, see ``Layout``.
        stages: which ranks have which leaves, if not all ranks have a part of each.

    Raises:
        PlacementError: a leaf that is no floating-point tensor, named by its path.
    """
    keys, leaves, spec = optree.tree_flatten_with_path(tree, none_is_leaf=True, namespace=NAMESPACE)
    names = [dotted(*key) for key in keys]
    for name, leaf in zip(names, leaves, strict=True):
        if leaf is not None:
            _check_leaf(name, leaf)
    parts = [part_of(leaf) for leaf in leaves]
    sizes = [_bytes(leaf, part) for leaf, part in zip(leaves, parts, strict=True)]
    along = next((part for part in parts if part is not None), None)
    still = frozen_among(leaves, spec, frozen)
    outer, layers = find_layers(tree)
    inside = {i for layer in layers for i in range(layer.start, layer.stop)}
    root = [i for i in range(len(leaves)) if i not in inside]
    slots: list[Slot | None] = [None] * len(leaves)
    flats: list[Flat] = []
    units: list[Unit] = []
    for name, members in _groups(layers, root, sizes, unit_bytes, merge, first, stages):
        chunk = stages.chunk_of[members[0]] if stages is not None and members else 0
        kinds: dict[tuple[Any, ...], list[int]] = {}
        kind: tuple[Any, ...]
        for i in members:
            if (leaf := leaves[i]) is not None:
                if isinstance(leaf, Encoded):
                    kind = (torch.uint8, False, leaf.code.bytes < persist_below, None)
                else:
                    small = sizes[i] < persist_below * leaf.itemsize
                    kind = (leaf.dtype, not still[i], small, _origin_of(leaf))
                split = None if (part := parts[i]) is None else part.split
                own = i if alone is not None and sizes[i] >= alone else None
                kinds.setdefault((*kind, sharing(split), own), []).append(i)
        mine = []
        for (dtype, trainable, whole, *_), some in kinds.items():
            end = 0
            for i in some:
                slots[i] = _slot(names[i], leaves[i], len(flats), end, i, parts[i])
                end += aligned(slots[i].numel)  # type: ignore[union-attr]
            mine.append(len(flats))
            if stages is None:
                cuts = aligned_cuts(end, 1 if whole else world)
            else:
                cuts = spread(end, world, stages.holders[chunk])
            flats.append(Flat(dtype, trainable, whole, cuts))
        slots_here = tuple(i for i in members if leaves[i] is not None)
        units.append(Unit(name, tuple(mine), slots_here, chunk))
    return Layout(
        spec,
        tuple(slots),
        tuple(flats),
        tuple(units),
        outer,
        layers,
        mesh if along is None else along.mesh,
        axis,
        world,
        None if along is None else along.axis,
        None if along is None else along.plan,
        by,
    )


def _bytes(leaf: Any, part: Part | None) -> int:
    """Of a leaf, or of an even share of one that is split: alike on all ranks."""
    if leaf is None:
        return 0
    if part is None or part.split is None:
        return int(leaf.nbytes)
    return math.prod(part.split.full(leaf.shape)) // part.split.ways * int(leaf.itemsize)


def sharing(split: Split | None) -> int:
    """Which leaves may lie in one flat: whole ones, split ones, and those of shared elements.

    What is computed of a flat, a scale say, would make copies of the same leaf differ otherwise.
    """
    return 0 if split is None else 2 if split.shared else 1


def _slot(name: str, leaf: Any, flat: int, start: int, index: int, part: Part | None) -> Slot:
    split = None if part is None else part.split
    if isinstance(leaf, Encoded):
        return Slot(name, (leaf.code.bytes,), flat, start, index, leaf.code, split)
    return Slot(name, tuple(leaf.shape), flat, start, index, None, split)


def aligned_cuts(length: int, world: int) -> tuple[int, ...]:
    part = -(-length // (ALIGN * world)) * ALIGN
    return tuple(part * r for r in range(world + 1))
