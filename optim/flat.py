"""Lion and LAMB in the kernels of :mod:`zfunc.kernels`, where there are such for the tensors.

That is on a GPU: plain torch operations pass over memory a dozen times, the kernels once (LAMB
twice). On a CPU, and for what is traced, differentiated or compressed, the callers go on with
plain operations, which give the same numbers up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import optree
import torch
from torch import Tensor

from zfunc import kernels, primitives, tree
from zfunc.nodes import NAMESPACE, Placed
from zfunc.optim.base import nodes
from zfunc.optim.fused import Rates, own, stretches_of
from zfunc.optim.schedules import symbolic
from zfunc.optim.updates import Scaled
from zfunc.placed.unitwise import streams

__all__ = ["lamb_step", "lion_step"]

Tree = Any
Number = float | Tensor


@dataclass(frozen=True)
class _Buffers:
    """What a kernel is to step through: gradients, what they are multiplied by, and the rest."""

    grads: list[Tensor]
    factor: Number
    state: list[tuple[Tensor, ...]]  # parameters and moments of each buffer
    part: Tree  # parameters, placed as the gradients are

    def renewed(self) -> list[list[Tensor]]:
        """Memory for the new parameters and moments, with the old ones in it."""
        return [own(column) for column in zip(*self.state, strict=True)]

    def trees(self, columns: list[list[Tensor]]) -> list[Tree]:
        spec = optree.tree_structure(self.part, namespace=NAMESPACE)
        return [optree.tree_unflatten(spec, column) for column in columns]


def lion_step(
    grads: Tree, params: Tree, mu: Tree, *, decay: Rates, lr: Number, b1: float, b2: float
) -> tuple[Tree, Tree] | None:
    """One step of Lion in memory of its own (that of the arguments where it is donated).

    Args:
        grads: gradients, or a ``Scaled`` of them; everything is placed as they are.
        params, mu: parameters and momentum, of one dtype.
        decay: weight decay, of all leaves or by leaf path.
        lr, b1, b2: see :func:`zfunc.optim.lion`.

    Returns:
        ``(params, mu)``, or ``None``, with nothing touched, where there is no kernel.
    """
    found = _collected("lion_flat", lr, grads, params, mu)
    if found is None:
        return None
    with torch.no_grad():
        stretches = stretches_of(decay, found.part)
        new = found.renewed()
        for g, p, m, pieces in zip(found.grads, *new, stretches, strict=True):
            for start, stop, rate in pieces:
                how = {"b1": b1, "b2": b2, "weight_decay": rate, "device": p.device}
                hyper = kernels.lion_hyper(lr, factor=found.factor, **how)
                grad, param, mean = (x.view(-1)[start:stop] for x in (g, p, m))
                kernels.lion_flat_(grad, param, mean, hyper)
    params, mu = found.trees(new)
    return params, mu


def lamb_step(
    grads: Tree,
    params: Tree,
    mu: Tree,
    nu: Tree,
    *,
    decay: Rates,
    lr: Number,
    steady: Callable[[Tree], tuple[Tree, Tensor]],
    **how: Any,
) -> tuple[Tree, Tree, Tree, Tree, Tensor] | None:
    """One step of LAMB, as :func:`lion_step`; of plain leaves only.

    Args:
        grads, params, mu, nu: as there, and second moments.
        decay, lr: as there.
        steady: from the trust ratios of this step to those that are used, and their mean.
        how: ``count``, ``b1``, ``b2`` and ``eps`` of :func:`kernels.lamb_hyper`.

    Returns:
        ``(params, mu, nu, ratios, mean)``, or ``None``.
    """
    if any(isinstance(node, Placed) for _, node in nodes(mu)):
        return None
    found = _collected("lamb_moments", lr, grads, params, mu, nu)
    if found is None:
        return None
    with torch.no_grad():
        rates = [rate for ((_, _, rate),) in stretches_of(decay, found.part)]
        new = found.renewed()
        hypers, squares = [], []
        for g, p, m, v, rate in zip(found.grads, *new, rates, strict=True):
            hyper = kernels.lamb_hyper(
                lr, factor=found.factor, weight_decay=rate, device=p.device, **how
            )
            grad, param, one, two = (x.view(-1) for x in (g, p, m, v))
            whole = [(0, p.numel())]
            squares.append(kernels.lamb_moments_(grad, param, one, two, whole, hyper))
            hypers.append(hyper)
        (ratios,) = found.trees([list(kernels.lamb_ratios(torch.cat(squares)).unbind())])
        ratios, mean = steady(ratios)
        for p, m, v, r, hyper in zip(*new, tree.leaves(ratios), hypers, strict=True):
            param, one, two = (x.view(-1) for x in (p, m, v))
            kernels.lamb_apply_(param, one, two, [(0, p.numel())], r[None], hyper)
    params, mu, nu = found.trees(new)
    return params, mu, nu, ratios, mean


def _collected(name: str, lr: Number, grads: Tree, *state: Tree) -> _Buffers | None:
    """The buffers, if the dispatch has a kernel for all of them; nothing is touched."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return None
    if primitives.compressing() or primitives.frozen():
        return None
    if isinstance(lr, Tensor) and (lr.device.type != "cuda" or symbolic(lr)):
        return None
    factor: Number = 1.0
    if isinstance(grads, Scaled):
        grads, factor = grads.grads, grads.factor
    if streams(grads, *state):
        return None
    grads = primitives.reduced(grads)
    rows: list[tuple[Tensor, ...]] = []

    def collect(*row: Tensor) -> Tensor:
        rows.append(row)
        return row[1]

    part = tree.map(collect, grads, *state)
    if not rows or not all(_fits(name, row) for row in rows):
        return None
    return _Buffers([g.contiguous() for g, *_ in rows], factor, [row[1:] for row in rows], part)


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
        and kernels.choose(name, *row).route == "triton"
    )
