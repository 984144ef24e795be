"""What Lion's and LAMB's kernels step through, where there are such for the tensors.

That is on a GPU: plain torch operations pass over memory a dozen times, the kernels once (LAMB
twice). On a CPU, and for what is traced, differentiated or compressed, the callers go on with
plain operations, which give the same numbers up to rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import optree
import torch
from torch import Tensor

from zfunc.kernels.dispatch import choose
from zfunc.optim.buffers import Stretch, runs
from zfunc.optim.fused import Piece, own, pieces_of
from zfunc.optim.paces import Paces
from zfunc.optim.rates import symbolic
from zfunc.optim.updates import Scaled
from zfunc.trees import tree
from zfunc.trees.boxes import in_box, in_flats
from zfunc.trees.nodes import NAMESPACE
from zfunc.trees.unitwise import streams

__all__ = ["FlatRows", "collected"]

Tree = Any
Number = float | Tensor


@dataclass(frozen=True)
class FlatRows:
    """What a kernel is to step through: gradients, what they are multiplied by, and the rest."""

    grads: list[Tensor]
    factor: Number
    state: list[tuple[Tensor, ...]]  # parameters and moments of each buffer
    part: Tree  # parameters, placed as the gradients are
    pieces: list[tuple[int, list[Piece]]]  # of each buffer its length, and what of which leaf it is
    boxes: tuple[Tree, ...]  # what parameters and moments were before

    def renewed(self) -> list[list[Tensor]]:
        """Memory for the new parameters and moments, with the old ones in it."""
        return [own(column) for column in zip(*self.state, strict=True)]

    def stretches(self, decay: Paces) -> list[list[Stretch]]:
        """Of each buffer, what stretches of it decay by how much."""
        if not callable(decay):
            return [[(0, length, decay)] for length, _ in self.pieces]
        return [
            list(runs([(a, decay(path)) for path, a, _ in pieces], length))
            for length, pieces in self.pieces
        ]

    def trees(self, columns: list[list[Tensor]]) -> list[Tree]:
        spec = optree.tree_structure(self.part, namespace=NAMESPACE)
        new = [optree.tree_unflatten(spec, column) for column in columns]
        return [in_box(old, x) for old, x in zip(self.boxes, new, strict=True)]


def collected(name: str, lr: Number, grads: Tree, *state: Tree) -> FlatRows | None:
    """The buffers, if the dispatch has a kernel for all of them; nothing is touched."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return None
    if isinstance(lr, Tensor) and (lr.device.type != "cuda" or symbolic(lr)):
        return None
    factor: Number = 1.0
    if isinstance(grads, Scaled):
        grads, factor = grads.grads, grads.factor
    if streams(grads, *state):
        return None
    trees = in_flats((grads, *state))
    rows: list[tuple[Tensor, ...]] = []

    def collect(*row: Tensor) -> Tensor:
        rows.append(row)
        return row[1]

    part = tree.map(collect, *trees)
    if not rows or not all(_fits(name, row) for row in rows):
        return None
    # Now: the leaves of memory that is donated will have no length.
    pieces = list(pieces_of(part))
    grads = [g.contiguous() for g, *_ in rows]
    return FlatRows(grads, factor, [row[1:] for row in rows], part, pieces, state)


def _fits(name: str, row: tuple[Tensor, ...]) -> bool:
    grad, first = row[:2]
    tracked = torch.is_grad_enabled()
    return (
        all(
            type(x) in (Tensor, torch.nn.Parameter)
            and x.layout == torch.strided
            and x.shape == grad.shape
            and x.device == grad.device
            and not (tracked and x.requires_grad)
            for x in row
        )
        and all(x.dtype == first.dtype and x.is_contiguous() for x in row[1:])
        and choose(name, *row).route == "triton"
    )
