"""Whether all ranks start from the same state: what ``place`` asks before it cuts anything."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import optree
from torch import Tensor

from zfunc.errors import PlacementError
from zfunc.layout.splits import Encoded
from zfunc.ranks.comm import Group
from zfunc.ranks.digests import digest_of_all, digests
from zfunc.trees.nodes import PLACED, Tree
from zfunc.trees.tree import dotted

__all__ = ["COUNTED", "check_same"]

COUNTED = ("buffers", "aux", "transforms")  # entries that no optimizer updates
_PLAIN = (bool, int, float, str, type(None))
Row = list[str]  # path, what it is, where it lies, digest


def check_same(group: Group, entries: Mapping[str, Tree]) -> None:
    """Raise ``PlacementError`` if ranks start from different states; a collective.

    Compares a digest of each leaf that sees positions, and values that are no tensors.

    Args:
        entries: trees by the name that messages give them; nodes that are placed already, of
            which each rank has a part of its own, are passed over.
    """
    if group.size == 1:
        return
    paths, leaves = _leaves(entries)
    if any(isinstance(x, Tensor) and x.is_meta for x in leaves):
        return
    kinds = [(x.dtype, x.shape) if isinstance(x, Tensor) else _kind(x) for x in leaves]
    text = repr((paths, kinds, digest_of_all(_bits(leaves))))
    whole = hashlib.sha256(text.encode()).hexdigest()
    if len(set(group.exchange(whole, label="same state"))) == 1:
        return
    rows = group.exchange(_rows(paths, leaves), label="same state")
    if _elsewhere(rows):  # digests of hosts and of devices tell nothing of each other
        rows = group.exchange(_rows(paths, leaves, weighed=True), label="same state")
    for rank, theirs in enumerate(rows):
        if found := _difference(rows[0], theirs):
            raise PlacementError(f"ranks 0 and {rank} start from different {found}")


def _leaves(entries: Mapping[str, Tree]) -> tuple[list[str], list[Any]]:
    paths, leaves = [], []
    for name, tree in entries.items():
        items, spec = optree.tree_flatten(tree, none_is_leaf=True, namespace=PLACED)
        paths += [dotted(name, *path) for path in spec.paths()]
        leaves += items
    return paths, leaves


def _bits(leaves: Sequence[Any]) -> list[Tensor]:
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    return [x.to_bytes() if isinstance(x, Encoded) else x for x in tensors]


def _rows(paths: Sequence[str], leaves: Sequence[Any], weighed: bool = False) -> list[Row]:
    each = iter(digests(_bits(leaves), weighed))
    return [[path, *_kind(x), next(each) if isinstance(x, Tensor) else ""]
            for path, x in zip(paths, leaves, strict=True)]  # fmt: skip


def _kind(leaf: Any) -> tuple[str, str]:
    if isinstance(leaf, Tensor):
        return f"{leaf.dtype} {list(leaf.shape)}", leaf.device.type
    return repr(leaf) if isinstance(leaf, _PLAIN) else f"a {type(leaf).__name__}", ""


def _elsewhere(rows: Sequence[Sequence[Row]]) -> bool:
    return any(
        a[:2] == b[:2] and a[2] != b[2]
        for theirs in rows
        for a, b in zip(rows[0], theirs, strict=False)
    )


def _difference(ours: Sequence[Row], theirs: Sequence[Row]) -> str:
    """The entry and the first leaf in which another rank's rows differ from rank 0's, or ``""``."""
    for (path, kind, _, bits), (path2, kind2, _, bits2) in zip(ours, theirs, strict=False):
        entry = path.partition(".")[0]
        if path != path2:
            return f"{entry}: the leaf {path} of rank 0 is {path2} there. {_remedy(path)}"
        if kind != kind2:
            return f"{entry}: {path} is {kind} on rank 0 and {kind2} there. {_remedy(path)}"
        if bits != bits2:
            return f"{entry}: {path} has other values. {_remedy(path)}"
    if len(ours) != len(theirs):
        return f"states: they have {len(ours)} and {len(theirs)} leaves. {_remedy('')}"
    return ""


def _remedy(path: str) -> str:
    if path.partition(".")[0] in COUNTED:
        return (
            "A state is one value, of which ranks hold parts: average what each rank computes by "
            "itself (zf.pmean), or keep it out of the state."
        )
    return (
        "Seed all ranks alike before the model is built (and the data differently), or build the "
        "state with step.init. What each rank computes by itself is averaged with zf.pmean."
    )
