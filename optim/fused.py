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
from typing import Any

import optree
import torch
from torch import Tensor

from zfunc.buffers.numbers import at_hand
from zfunc.buffers.uploads import on_device
from zfunc.kernels.adamw import adamw_flat_, adamw_hyper
from zfunc.kernels.dispatch import choose
from zfunc.optim.base import nodes
from zfunc.optim.buffers import SMALL, Launch, Row, Stretch, joined, parted, runs
from zfunc.optim.paces import Paces, own_count, own_pace, remembering
from zfunc.optim.updates import Scaled, scale
from zfunc.trees import memory, tree
from zfunc.trees.boxes import in_box, in_flats
from zfunc.trees.memory import reuse
from zfunc.trees.nodes import NAMESPACE, Placed
from zfunc.trees.unitwise import by_unit

__all__ = ["Piece", "adamw_", "own", "pieces_of", "step", "stretches_of"]

SCRATCH = 1 << 18
DEVICES = ("cpu", "cuda")
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

Tree = Any
Piece = tuple[str, int, int]  # leaf path, start, stop


def step(
    grads: Tree,
    params: Tree,
    mu: Tree,
    nu: Tree,
    *,
    decay: Paces,
    otherwise: Callable[[Tree, Tree, Tree, Tree], tuple[Tree, Tree, Tree]],
    **how: Any,
) -> tuple[Tree, Tree, Tree] | None:
    """One step of AdamW in memory of its own (that of the arguments where it is donated).

    Args:
        grads: gradients; everything is placed as they are.
        params, mu, nu: parameters and moments.
        decay: weight decay, of all leaves or by leaf path; see :mod:`zfunc.optim.paces`.
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
    trees = in_flats((grads, params, mu, nu))
    columns, spec = tree.align(trees)
    placed = [x for row in columns for x in row if isinstance(x, Placed)]
    if not placed:
        return _leafwise(columns, spec, factor, decay, how)
    if not any(node.streams for node in placed):
        done = _step(columns, spec, factor, decay, how)
        if done is None:
            return None
        return in_box(params, done[0]), in_box(mu, done[1]), in_box(nu, done[2])

    # Units are updated on the host: what they need of a device is read once, before the first.
    factor, *values = at_hand([factor, *how.values()])
    how, later = dict(zip(how, values, strict=True)), remembering(otherwise)

    def unit(g: Tree, p: Tree, m: Tree, v: Tree) -> tuple[Tree, Tree, Tree]:
        done = _step(*tree.align((g, p, m, v)), factor, decay, how)
        return done or later(g if factor is None else scale(g, factor), p, m, v)

    new, mu, nu = by_unit(unit, 3, grads, params, mu, nu)
    return new, mu, nu


def _leafwise(
    columns: Sequence[Sequence[Any]],
    spec: optree.PyTreeSpec,
    factor: float | Tensor | None,
    decay: Paces,
    how: dict[str, Any],
) -> tuple[Tree, Tree, Tree] | None:
    """:func:`step` on plain trees: ``(gradient, parameter, mean, square)`` of each leaf."""
    rows = [
        (p, g if g.dtype == p.dtype else g.to(p.dtype), m, v)
        for g, p, m, v in columns
        if g is not None
    ]
    if not _fit(rows):
        return None
    rates = [decay] * len(rows) if not callable(decay) else _rates(decay, columns, spec)
    with torch.no_grad():
        new = [iter(column) for column in _plain(rows, rates, factor, how)]
    done = [[None if row[0] is None else next(column) for row in columns] for column in new]
    p, m, v = (optree.tree_unflatten(spec, leaves) for leaves in done)
    return p, m, v


def _rates(
    decay: Callable[[str], Any], columns: Sequence[Sequence[Any]], spec: optree.PyTreeSpec
) -> list[Any]:
    rows = zip(spec.paths(), columns, strict=True)
    return [decay(tree.dotted(*path)) for path, row in rows if row[0] is not None]


def _step(
    columns: Sequence[list[Any]],
    spec: optree.PyTreeSpec,
    factor: float | Tensor | None,
    decay: Paces,
    how: dict[str, Any],
) -> tuple[Tree, Tree, Tree] | None:
    rows: list[Row] = []

    def collect(g: Tensor, p: Tensor, m: Tensor, v: Tensor) -> Tensor:
        rows.append((p, g if g.dtype == p.dtype else g.to(p.dtype), m, v))
        return p

    part = tree.map_rows(collect, columns, spec)
    if not _fit(rows):
        return None
    with torch.no_grad():
        new = _renewed(rows, stretches_of(decay, part), factor, how)
    spec = optree.tree_structure(part, namespace=NAMESPACE)  # flats are its leaves
    done = [optree.tree_unflatten(spec, column) for column in new]
    return done[0], done[1], done[2]


def _fit(rows: Sequence[Row]) -> bool:
    """Whether the kernel can take all rows: asked column by column, which takes a third."""
    if not rows:
        return True
    columns = list(zip(*rows, strict=True))
    shapes, dtypes = [x.shape for x in columns[0]], [x.dtype for x in columns[0]]
    devices = [x.device for x in columns[0]]
    tracked = torch.is_grad_enabled()
    return (
        all(x.type in DEVICES for x in set(devices))
        and set(dtypes) <= set(DTYPES)
        and all(set(map(type, column)) <= {Tensor, torch.nn.Parameter} for column in columns)
        and all([x.shape for x in column] == shapes for column in columns[1:])
        and all([x.dtype for x in column] == dtypes for column in columns[1:])
        and all([x.device for x in column] == devices for column in columns[1:])
        and all(x.layout == torch.strided for column in columns for x in column)
        and not (tracked and any(x.requires_grad for column in columns for x in column))
    )


def _renewed(
    rows: Sequence[Row],
    stretches: Sequence[Sequence[Stretch]],
    factor: float | Tensor | None,
    how: dict[str, Any],
) -> list[list[Tensor]]:
    """New parameters and moments, in memory of their own."""
    p, g, *moments = zip(*rows, strict=True) if rows else ((), (), (), ())
    new = [own(column) for column in (p, *moments)]
    grads = [x.contiguous() for x in g]
    adamw_(list(zip(new[0], grads, *new[1:], strict=True)), stretches, factor=factor, **how)
    return new


def _plain(
    rows: Sequence[Row], rates: Sequence[Any], factor: float | Tensor | None, how: dict[str, Any]
) -> list[list[Tensor]]:
    """:func:`_renewed` of plain leaves."""
    if memory.donates():
        return _renewed(rows, whole_stretches(rows, rates), factor, how)
    # New memory anyway: small leaves get theirs together, which a step renews like one leaf.
    made = joined(rows, rates)
    fresh = _renewed(made.alone, whole_stretches(made.alone, made.rates), factor, how)
    adamw_(made.together, whole_stretches(made.together, made.common), factor=factor, **how)
    return made.leaves(fresh)


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


def whole_stretches(rows: Sequence[Row], rates: Sequence[Any]) -> list[list[Stretch]]:
    """Each buffer decays alike."""
    return [[(0, row[0].numel(), rate)] for row, rate in zip(rows, rates, strict=True)]


def stretches_of(decay: Paces, part: Tree) -> list[list[Stretch]]:
    """For each buffer of a tree, what stretches of it decay by how much."""
    if not callable(decay):
        return [[(0, x.numel(), decay)] for x in tree.leaves(part)]
    return [
        list(runs([(a, decay(path)) for path, a, _ in pieces], length))
        for length, pieces in pieces_of(part)
    ]


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
        stretches: for each row ``(start, stop, weight decay)``; see :mod:`zfunc.optim.paces`.
        factor: multiplies the gradients first; a number, or 0-d on their device.
        count: number of this step, from 1; 0-d.

    Source: Loshchilov and Hutter, Decoupled Weight Decay Regularization, 2019.
    """
    groups: dict[tuple[torch.device, torch.dtype, Any], Launch] = {}
    for row, pieces in zip(rows, stretches, strict=True):
        for part, rate in parted(row, pieces):
            if rate is not None:  # else these leaves rest
                key = (part[0].device, part[0].dtype, rate)
                groups.setdefault(key, Launch()).add(part)
    knobs: dict[tuple[torch.device, Any], Tensor] = {}
    for (device, _, pace), group in groups.items():
        blocks, (rate, missed) = group.stage(), own_pace(pace)
        own = own_count(count, missed)
        if choose("adamw_flat", *blocks[0]).route == "triton":
            if (device, pace) not in knobs:
                hyper = {"b1": b1, "b2": b2, "eps": eps, "weight_decay": rate, "device": device}
                gain = 1.0 if factor is None else factor
                knobs[device, pace] = adamw_hyper(lr, own, factor=gain, **hyper)  # type: ignore[arg-type]
            for param, grad, mu, nu in blocks:
                adamw_flat_(grad, param, mu, nu, knobs[device, pace])
            group.unstage()
            continue
        if isinstance(factor, Tensor) and factor.device != device:
            factor = factor.to(device)  # a norm is known where the step computes
        # What the device lacks it is sent: `Tensor.to` of a host tensor would wait for it.
        number = on_device(own.to(torch.float32), device)
        scale = on_device(lr, device) if isinstance(lr, Tensor) else lr
        for batch in [blocks] if factor is None else _scaled(blocks, factor):
            p, g, m, v = (list(column) for column in zip(*batch, strict=True))
            torch._fused_adamw_(
                *(p, g, m, v, [], [number] * len(p)),
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
    small = [row for row in blocks if row[1].numel() <= SMALL]
    if small:
        scaled = torch._foreach_mul([row[1] for row in small], factor)
        yield [(row[0], g, *row[2:]) for row, g in zip(small, scaled, strict=True)]
    scratch = torch.empty(SCRATCH, dtype=blocks[0][1].dtype, device=blocks[0][1].device)
    for row in blocks:
        if row[1].numel() > SMALL:
            flat = [x.view(-1) for x in row]
            for start in range(0, flat[0].numel(), SCRATCH):
                p, g, m, v = (x[start : start + SCRATCH] for x in flat)
                yield [(p, torch.mul(g, factor, out=scratch[: g.numel()]), m, v)]
