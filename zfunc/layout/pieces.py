"""From plain leaves to this rank's flats: cutting a tree, and putting pieces together."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import optree
import torch
from torch import Tensor

from zfunc.errors import PlacementError
from zfunc.layout.layout import Layout, Slot
from zfunc.layout.splits import Encoded
from zfunc.trees.memory import spend
from zfunc.trees.nodes import PLACED, Placed, Tree, leaves_in, opened
from zfunc.trees.tree import paths

__all__ = [
    "assemble",
    "assemble_all",
    "cut_flats",
    "full_around",
    "leaves_of",
    "pieces_of_parts",
    "stored",
]


def cut_flats(
    layout: Layout,
    tree: Tree,
    rank: int,
    copy: bool = False,
    only: Collection[int] | None = None,
) -> list[Tensor | None]:
    """``rank``'s flats of a plain tree of the layout's structure; 0-d leaves are spread.

    Unless ``copy``, views where the leaves lie in one buffer of this layout already. Flats
    that are not among ``only`` are left out as ``None``.
    """
    if _holds_parts(tree):
        return assemble_all(layout, pieces_of_parts(layout, tree, rank), rank)
    leaves = stored(layout, leaves_of(layout, tree))
    flats: list[Tensor | None] = []
    for i, slots in enumerate(layout.by_flat):
        some = [leaves[slot.index] for slot in slots]
        if only is not None and i not in only:
            flats.append(None)
        elif not some:
            flats.append(torch.zeros(0, dtype=layout.flats[i].dtype))
        elif some[0] is None and all(x is None for x in some):
            flats.append(None)
        elif any(x is None for x in some):
            lacking = next(s.path for s, x in zip(slots, some, strict=True) if x is None)
            raise PlacementError(
                f"{lacking} is None in one tree of a map and has a value in the first. Let the "
                "tree with fewer leaves come first (`tree.select` restricts a tree)."
            )
        else:
            flats.append(_cut_flat(layout, i, slots, some, rank, copy))
    return flats


def _cut_flat(
    layout: Layout, flat: int, slots: Sequence[Slot], leaves: list[Any], rank: int, copy: bool
) -> Tensor:
    leaves = [x if isinstance(x, Tensor) else torch.as_tensor(x) for x in leaves]
    if layout.along is not None:
        leaves = [_own(layout, slot, x) for slot, x in zip(slots, leaves, strict=True)]
    if [x.shape for x in leaves] == layout.shapes[flat]:
        return layout.cut(flat, leaves, rank, copy)
    for slot, x in zip(slots, leaves, strict=True):
        if x.ndim and tuple(x.shape) != slot.shape:
            raise PlacementError(
                f"{slot.path} has shape {slot.shape} in one tree and {tuple(x.shape)} in another. "
                "Leaves of one map must agree in shape, or be 0-d."
            )
    low, high = layout.flats[flat].bounds(rank)
    out = torch.zeros(high - low, dtype=leaves[0].dtype, device=leaves[0].device)
    by_index = {slot.index: x for slot, x in zip(slots, leaves, strict=True)}
    for slot, a, b, offset in layout.segments(flat, rank):
        x = by_index[slot.index]
        out[a:b] = x.reshape(-1)[offset : offset + b - a] if x.ndim else x
    return out


def _own(layout: Layout, slot: Slot, leaf: Tensor) -> Tensor:
    """This rank's part of a leaf that may be full."""
    full = slot.code is None and tuple(leaf.shape) == slot.full
    mine: Tensor = layout.own(slot, leaf) if full else leaf
    return mine


def stored(layout: Layout, leaves: Sequence[Any]) -> list[Any]:
    """Leaves as they lie in flats: low-bit ones as the bytes of this rank's part."""
    out = list(leaves)
    for slot in layout.present:
        x = out[slot.index]
        if isinstance(x, Encoded):
            mine = layout.own(slot, x) if x.code.shape == slot.full else x
            out[slot.index] = mine.to_bytes()
    return out


def assemble(layout: Layout, flat: int, pieces: dict[int, Tensor], rank: int) -> Tensor:
    """A local flat from this rank's pieces of its leaves."""
    low, high = layout.flats[flat].bounds(rank)
    if not layout.by_flat[flat]:
        return torch.zeros(high - low, dtype=layout.flats[flat].dtype)
    sample = pieces[layout.by_flat[flat][0].index]
    out = torch.zeros(high - low, dtype=sample.dtype, device=sample.device)
    for slot, a, b, _ in layout.segments(flat, rank):
        piece = pieces[slot.index]
        if piece.numel() != b - a:
            raise PlacementError(
                f"{slot.path} is cut differently in two trees of one map ({piece.numel()} and "
                f"{b - a} elements on rank {rank}). Initialise the optimizer on the same (part of "
                "the) params tree that is differentiated."
            )
        out[a:b] = piece
    return out


def assemble_all(layout: Layout, pieces: dict[int, Tensor], rank: int) -> list[Tensor | None]:
    """All local flats; ``None`` where there are no pieces."""
    return [
        assemble(layout, i, pieces, rank) if not row or row[0].index in pieces else None
        for i, row in enumerate(layout.by_flat)
    ]


def _holds_parts(tree: Tree) -> bool:
    return any(isinstance(node, Placed) for node in leaves_in(tree, PLACED))


def pieces_of_parts(layout: Layout, tree: Tree, rank: int) -> dict[int, Tensor]:
    """``rank``'s pieces, by leaf index, of a tree made of placed parts and plain leaves.

    Raises:
        PlacementError: it has not the leaves of ``layout``.
    """
    pieces: dict[int, Tensor] = {}
    at = 0
    for node in optree.tree_leaves(opened(tree), none_is_leaf=True, namespace=PLACED):
        if isinstance(node, Placed):
            pieces.update({at + i: piece for i, piece in node.pieces().items()})
            at += node.num_leaves
            continue
        slot = layout.slots[at] if at < len(layout.slots) else None
        if slot is not None and node is not None:
            node = _own(layout, slot, node)
            if tuple(node.shape) != slot.shape:
                raise PlacementError(
                    f"{slot.path} has shape {tuple(node.shape)}; expected {slot.shape}, as before."
                )
            pieces[at] = node.reshape(-1)[:0]
            for other, a, b, offset in layout.segments(slot.flat, rank):
                if other.index == at:
                    pieces[at] = node.reshape(-1)[offset : offset + b - a]
        at += 1
    if at != len(layout.slots):
        raise PlacementError(
            f"a tree of {at} leaves stands where one of {len(layout.slots)} was expected "
            f"({layout.spec}). A step must keep the structure of its params."
        )
    return pieces


def leaves_of(layout: Layout, tree: Tree) -> list[Any]:
    """Leaves of a plain tree in the layout's order; subtrees may be missing as ``None``."""
    try:
        return list(layout.spec.flatten_up_to(tree))
    except (ValueError, TypeError):
        raise PlacementError(_misfit(layout, tree)) from None


def _misfit(layout: Layout, tree: Tree) -> str:
    want, have = [slot.path for slot in layout.present], paths(tree)
    missing = [path for path in want if path not in have]
    extra = [path for path in have if path not in want]
    return (
        f"a plain tree does not fit the placed one: it lacks {', '.join(missing[:3]) or 'nothing'} "
        f"and has {', '.join(extra[:3]) or 'nothing'} besides. All trees of one map have the "
        "structure of the first."
    )


def full_around(local: Tensor, length: int, low: int) -> Tensor:
    """The full flat whose part is ``local``: the buffer it lies in, or a new one."""
    storage = local.untyped_storage()
    if storage.nbytes() == length * local.element_size() and local.storage_offset() == low:
        full = local.as_strided((length,), (1,), 0)
        spend(full)  # of which only this rank's part was, until now
        return full
    return torch.empty(length, dtype=local.dtype, device=local.device)
