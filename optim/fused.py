"""Adam(W) in one pass over memory: each buffer is read once and written once.

An element must come out with the same bits however its tree is cut into buffers.
On a CPU the kernel rounds the last elements of a buffer, those that do not fill a
vector, in another way than the rest. Therefore it gets whole blocks of 64 elements
only: the flats of a placed tree are such already; of a plain leaf the blocks are
updated where they are, and the ends of all leaves are staged together in one
padded buffer. Threads share a buffer out in whole vectors, so their number does
not matter either.

Where :mod:`zfunc.kernels` has a kernel for the tensors, on a GPU, each buffer goes to
``adamw_flat_``, which scales the gradients on its way and waits for no number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import optree
import torch
from torch import Tensor

from zfunc import kernels, primitives, tree
from zfunc.context import reuse
from zfunc.nodes import NAMESPACE, Placed
from zfunc.optim.base import nodes
from zfunc.optim.updates import Scaled, scale
from zfunc.placed.numbers import at_hand
from zfunc.placed.unitwise import by_unit, streams

__all__ = ["BLOCK", "Piece", "adamw_", "own", "pieces_of", "step", "stretches_of"]

BLOCK = 64
SCRATCH = 1 << 18
DEVICES = ("cpu", "cuda")
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

Tree = Any
Rates = Callable[[str], float] | float
Row = tuple[Tensor, ...]
Stretch = tuple[int, int, float]
Piece = tuple[str, int, int]  # leaf path, start, stop


def step(
    grads: Tree,
    params: Tree,
    mu: Tree,
    nu: Tree,
    *,
    decay: Rates,
    otherwise: Callable[[Tree, Tree, Tree, Tree], tuple[Tree, Tree, Tree]],
    **how: Any,
) -> tuple[Tree, Tree, Tree] | None:
    """One step of AdamW in memory of its own (that of the arguments where it is donated).

    Args:
        grads: gradients; everything is placed as they are.
        params, mu, nu: parameters and moments.
        decay: weight decay, of all leaves or by leaf path.
        otherwise: the same without the kernel, ``(grads, params, mu, nu) -> (params, mu, nu)``;
            for units on disk, of which it turns out later that the kernel cannot do them.
        how: the other keywords of :func:`adamw_`.

    Returns:
        ``(params, mu, nu)``, or ``None``, with nothing touched, where the kernel
        cannot do it: tensors that are traced, differentiated, of unlike dtypes, ...
    """
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return None
    factor = None
    if isinstance(grads, Scaled):
        grads, factor = grads.grads, grads.factor
    grads = primitives.reduced(grads)
    if not streams(grads, params, mu, nu):
        return _step(grads, params, mu, nu, factor, decay, how)

    # Units are updated on the host: what they need of a device is read once, before the first.
    factor, *values = at_hand([factor, *how.values()])
    how = dict(zip(how, values, strict=True))

    def unit(g: Tree, p: Tree, m: Tree, v: Tree) -> tuple[Tree, Tree, Tree]:
        done = _step(g, p, m, v, factor, decay, how)
        return done or otherwise(g if factor is None else scale(g, factor), p, m, v)

    new, mu, nu = by_unit(unit, 3, grads, params, mu, nu)
    return new, mu, nu


def _step(
    grads: Tree,
    params: Tree,
    mu: Tree,
    nu: Tree,
    factor: float | Tensor | None,
    decay: Rates,
    how: dict[str, Any],
) -> tuple[Tree, Tree, Tree] | None:
    rows: list[Row] = []

    def collect(g: Tensor, p: Tensor, m: Tensor, v: Tensor) -> Tensor:
        rows.append((p, g if g.dtype == p.dtype else g.to(p.dtype), m, v))
        return p

    part = tree.map(collect, grads, params, mu, nu)
    if not all(_fits(row) for row in rows):
        return None
    stretches = stretches_of(decay, part)
    with torch.no_grad():
        p, g, m, v = zip(*rows, strict=True) if rows else ((), (), (), ())
        new = [own(column) for column in (p, m, v)]
        fresh = zip(new[0], (x.contiguous() for x in g), new[1], new[2], strict=True)
        adamw_(list(fresh), stretches, factor=factor, **how)
    spec = optree.tree_structure(part, namespace=NAMESPACE)
    done = [optree.tree_unflatten(spec, column) for column in new]
    return done[0], done[1], done[2]


def _fits(row: Row) -> bool:
    first, tracked = row[0], torch.is_grad_enabled()
    shape, dtype, device = first.shape, first.dtype, first.device
    return (
        device.type in DEVICES
        and dtype in DTYPES
        and all(
            type(x) in (Tensor, torch.nn.Parameter)
            and x.layout == torch.strided
            and x.shape == shape
            and x.dtype == dtype
            and x.device == device
            and not (tracked and x.requires_grad)
            for x in row
        )
    )


def own(tensors: Sequence[Tensor]) -> list[Tensor]:
    """``reuse`` of each; two that share their elements get memory each."""
    starts = [x.data_ptr() for x in tensors]
    if len(set(starts)) == len(starts) and not any(x.storage_offset() for x in tensors):
        return [reuse(x) for x in tensors]
    # The first `reuse` of a storage blanks all the tensors in it, but none of these aliases.
    mine = [reuse(x) for x in [x.detach() for x in tensors]]
    seen: set[int] = set()
    for i, x in enumerate(mine):
        if x.data_ptr() in seen:
            mine[i] = x.clone()
        seen.add(x.data_ptr())
    return mine


def pieces_of(part: Tree) -> Iterator[tuple[int, list[Piece]]]:
    """For each buffer of a tree its length, and what of which leaf is in it."""
    for path, node in nodes(part):
        if isinstance(node, Placed):
            yield from _placed_pieces(path, node)
        else:
            yield node.numel(), [(path, 0, node.numel())]


def _placed_pieces(path: str, node: Any) -> Iterator[tuple[int, list[Piece]]]:
    flats = optree.tree_leaves(node, none_is_leaf=True, namespace=NAMESPACE)
    for flat, segments in zip(flats, node.segments(), strict=True):
        if flat is not None:
            yield flat.numel(), [(tree.dotted(path, leaf), a, b) for leaf, a, b in segments]


def stretches_of(decay: Rates, part: Tree) -> list[list[Stretch]]:
    """For each buffer of a tree, what stretches of it decay by how much."""
    if not callable(decay):
        return [[(0, x.numel(), decay)] for x in tree.leaves(part)]
    return [
        list(_runs([(a, decay(path)) for path, a, _ in pieces], length))
        for length, pieces in pieces_of(part)
    ]


def _runs(starts: list[tuple[int, float]], length: int) -> Iterator[Stretch]:
    """``(start, stop, value)`` of the stretches of equal value in a buffer.

    >>> list(_runs([(0, 0.1), (64, 0.1), (128, 0.0)], 192))
    [(0, 128, 0.1), (128, 192, 0.0)]
    """
    changes = [x for i, x in enumerate(starts) if i == 0 or x[1] != starts[i - 1][1]]
    stops = [start for start, _ in changes[1:]] + [length]
    for (start, value), stop in zip(changes, stops, strict=False):
        yield start, stop, value


def adamw_(
    rows: Sequence[Row],
    stretches: Sequence[Sequence[Stretch]],
    *,
    factor: float | Tensor | None = None,
    count: Tensor,
    lr: float | Tensor,
    b1: float,
    b2: float,
    eps: float,
) -> None:
    """One step of AdamW, in place in parameters and moments.

    Args:
        rows: ``(params, grads, mu, nu)`` buffers; those of a row agree in shape,
            dtype and device.
        stretches: for each row ``(start, stop, weight decay)``.
        factor: multiplies the gradients first; a number, or 0-d on their device.
        count: number of this step, from 1; 0-d.

    Source: Loshchilov and Hutter, Decoupled Weight Decay Regularization, 2019.
    """
    groups: dict[tuple[torch.device, torch.dtype, float], _Group] = {}
    for row, pieces in zip(rows, stretches, strict=True):
        for start, stop, rate in pieces:
            if start == stop:
                continue
            group = groups.setdefault((row[0].device, row[0].dtype, rate), _Group())
            group.add(row if stop - start == row[0].numel() else tuple(x[start:stop] for x in row))
    for (device, _, rate), group in groups.items():
        number = count.to(device=device, dtype=torch.float32)
        scale = lr.to(device) if isinstance(lr, Tensor) else lr
        blocks = group.stage()
        if kernels.choose("adamw_flat", *blocks[0]).route == "triton":
            how = {"b1": b1, "b2": b2, "eps": eps, "weight_decay": rate, "device": device}
            gain = 1.0 if factor is None else factor
            hyper = kernels.adamw_hyper(lr, count, factor=gain, **how)  # type: ignore[arg-type]
            for param, grad, mu, nu in blocks:
                kernels.adamw_flat_(grad, param, mu, nu, hyper)
            group.unstage()
            continue
        if isinstance(factor, Tensor) and factor.device != device:
            factor = factor.to(device)  # a norm is known where the step computes
        for batch in [blocks] if factor is None else _scaled(blocks, factor):
            p, g, m, v = (list(column) for column in zip(*batch, strict=True))
            torch._fused_adamw_(
                p,
                g,
                m,
                v,
                [],
                [number] * len(p),
                lr=scale,
                beta1=b1,
                beta2=b2,
                weight_decay=rate,
                eps=eps,
                amsgrad=False,
                maximize=False,
            )
        group.unstage()


def _scaled(blocks: Sequence[Row], factor: float | Tensor) -> Iterator[list[Row]]:
    """The blocks a batch at a time, their gradients multiplied in memory that stays in cache."""
    scratch = torch.empty(SCRATCH, dtype=blocks[0][1].dtype, device=blocks[0][1].device)
    batch: list[Row] = []
    used = 0
    for row in blocks:
        flat = [x.view(-1) for x in row]
        for start in range(0, flat[0].numel(), SCRATCH):
            p, g, m, v = (x[start : start + SCRATCH] for x in flat)
            if used + g.numel() > SCRATCH:
                yield batch
                batch, used = [], 0
            scaled = scratch[used : used + g.numel()]
            batch.append((p, torch.mul(g, factor, out=scaled), m, v))
            used += g.numel()
    if batch:
        yield batch


@dataclass
class _Group:
    """Buffers for one launch: blocks updated in place, and ends to be staged."""

    rows: list[Row] = field(default_factory=list)
    ends: list[Row] = field(default_factory=list)
    staged: list[Tensor] = field(default_factory=list)

    def add(self, row: Row) -> None:
        size = row[0].numel()
        if not all(x.is_contiguous() for x in row):
            self.ends.append(row)
            return
        if size % BLOCK == 0 or row[0].device.type != "cpu":
            self.rows.append(row)
            return
        cut = size - size % BLOCK
        flat = [x.view(-1) for x in row]
        if cut:
            self.rows.append(tuple(x[:cut] for x in flat))
        self.ends.append(tuple(x[cut:] for x in flat))

    def stage(self) -> list[Row]:
        """What the kernel is to update: the blocks, and the ends in one padded buffer."""
        if not self.ends:
            return self.rows
        short = -sum(row[0].numel() for row in self.ends) % BLOCK
        for column in zip(*self.ends, strict=True):
            pad = column[0].new_zeros(short)
            self.staged.append(torch.cat([*(x.reshape(-1) for x in column), pad]))
        return [*self.rows, tuple(self.staged)]

    def unstage(self) -> None:
        """Copy the updated ends back."""
        sizes = [row[0].numel() for row in self.ends]
        for i in (0, 2, 3) if self.ends else ():
            pieces = self.staged[i][: sum(sizes)].split(sizes)
            for row, piece in zip(self.ends, pieces, strict=True):
                row[i].copy_(piece.view(row[i].shape))
