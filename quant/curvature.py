"""The curvature of a loss, layer by layer: the top eigenvalue of each layer's Hessian.

Power iteration on Hessian-vector products, ``H v = d(g . v) / dw``. One layer at a time is a plain
tensor; the others enter as placed parameters do, so this works on sharded ones. The loss is
computed once for each layer. Each iteration is one more backward pass through its gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from threading import Lock
from typing import Any

import optree
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from zfunc.engine import context
from zfunc.engine.communication import communication
from zfunc.engine.context import Context
from zfunc.engine.passes import Pass, enter
from zfunc.engine.placement import placed_nodes
from zfunc.engine.primitives import Mean, Ref
from zfunc.layout.sharded import Sharded
from zfunc.ranks import random
from zfunc.ranks.comm import Group
from zfunc.trees.nodes import NAMESPACE, Layers, Placed, Tree
from zfunc.trees.tree import dotted

__all__ = ["ROOT", "layer_names", "top_eigenvalues"]

ROOT = ""  # the name under which everything outside of layers goes

Ranks = tuple[Group, Group]  # over which losses are averaged; which share the work on a layer

_lock, _asking, _switched = Lock(), 0, ExitStack()


def top_eigenvalues(
    loss_fn: Callable[..., Any],
    params: Tree,
    *args: Any,
    key: Tensor | int = 0,
    max_iter: int = 100,
    tol: float = 1e-4,
    has_aux: bool = False,
    **kwargs: Any,
) -> dict[str, Tensor]:
    """The eigenvalue of largest magnitude of each layer's Hessian.

    Args:
        loss_fn: ``loss_fn(params, *args)`` -> a 0-d loss or a ``zf.Mean``.
        params: plain or placed. For placed ones, and in a step that averages over ranks, it
            is a collective, and the Hessian that of the mean loss.
        key: decides the first vectors and the loss's own randomness.
        max_iter, tol: iteration ends when the estimate changes by less than ``tol`` of itself.
        has_aux: whether the loss comes with something else.

    Returns:
        ``{path of the layer: 0-d tensor}`` in the order of the tree; ``""`` is everything
        outside of layers. Not finite estimates are 0.

    >>> loss = lambda p: 0.5 * (torch.tensor([3.0, 1.0]) * p["w"] ** 2).sum()
    >>> top_eigenvalues(loss, {"w": torch.ones(2)})[""].round(decimals=3)
    tensor(3.)
    """
    outer = context.current()
    running = Context()
    over = communication(running)
    if outer is not None:
        of_step = communication(outer)
        over.group, over.everyone = of_step.group, of_step.everyone
        over.mesh, over.averaged = of_step.mesh, of_step.averaged
    placed = [node for node in placed_nodes(params) if isinstance(node, Sharded)]
    if placed:
        over.group = placed[0].group
    if outer is None and placed:
        cut = placed[0].layout.axis != ()
        over.everyone = placed[0].layout.everyone if cut else over.group
        over.mesh, axis = placed[0].layout.mesh, placed[0].layout.axis
        over.averaged += (axis,) if isinstance(axis, str) else axis
    ranks, fixed = (group := over.everyone, over.sharing), random.fold_in(key, -1)
    fixed = random.fold_in(fixed, group.rank)

    def loss(view: Tree) -> Tensor:
        """This rank's part of the mean over the ranks, times their number."""
        with random.scope(fixed):  # so that it is the same loss each time
            given, named = _entered((args, kwargs))
            out = loss_fn(view, *given, **named)
        value = out[0] if has_aux else out
        if not isinstance(value, Mean):
            return value
        count = torch.as_tensor(value.count, dtype=torch.float64).detach().clone()
        if group.size > 1:
            count = group.all_reduce(count, label="curvature").wait() / group.size
        return value.total / count.to(value.total.dtype)

    token = context.push(running)
    try:
        found: dict[str, Tensor] = {}
        for i, name in enumerate(layer_names(params)):
            owner = Pass()
            running.passes.append(owner)
            try:
                with torch.enable_grad(), _attention_differentiable_twice():
                    start = random.fold_in(key, i)
                    found[name] = _of_layer(loss, params, name, ranks, start, max_iter, tol)
                owner.finish()
            finally:
                running.passes.pop()
                owner.close()
        return found
    finally:
        context.pop(token)


@contextmanager
def _attention_differentiable_twice() -> Iterator[None]:
    """By its definition, in the whole process: torch has one switch, and simulated ranks threads.

    So the last one to leave puts it back as the first one found it.
    """
    global _asking
    with _lock:
        if _asking == 0:
            _switched.enter_context(sdpa_kernel(SDPBackend.MATH))
        _asking += 1
    try:
        yield
    finally:
        with _lock:
            _asking -= 1
            if _asking == 0:
                _switched.close()


def layer_names(params: Tree) -> list[str]:
    """The layers of a tree, plain or placed, and ``""`` if anything lies outside of them."""
    rows = _blocks(_entered(params))
    root = any(name == ROOT and isinstance(item, Tensor) for name, item in rows)
    return [name for name, _ in rows if name != ROOT] + [ROOT] * root


def _entered(params: Tree) -> Tree:
    return optree.tree_map(
        enter, params, is_leaf=lambda x: isinstance(x, Placed), none_is_leaf=True,
        namespace=NAMESPACE,
    )  # fmt: skip


def _blocks(view: Tree) -> list[tuple[str, Any]]:
    """``(name, layer)`` for each layer, and ``("", leaf)`` for each leaf outside of layers."""
    keys, items, _ = _flat(view)
    rows: list[tuple[str, Any]] = []
    for key, item in zip(keys, items, strict=True):
        if isinstance(item, Layers):
            rows.extend((dotted(*key, i), layer) for i, layer in enumerate(item))
        else:
            rows.append((ROOT, item))
    return rows


def _flat(view: Tree) -> tuple[list[Any], list[Any], optree.PyTreeSpec]:
    return optree.tree_flatten_with_path(
        view, is_leaf=lambda x: isinstance(x, Layers), none_is_leaf=True, namespace=NAMESPACE
    )


def _of_layer(
    loss_fn: Callable[[Tree], Tensor],
    params: Tree,
    name: str,
    ranks: Ranks,
    key: Tensor,
    max_iter: int,
    tol: float,
) -> Tensor:
    view = _entered(params)
    keys, items, spec = _flat(view)
    leaves: list[Tensor] = []
    for at, (path, item) in enumerate(zip(keys, items, strict=True)):
        if isinstance(item, Layers):
            items[at] = Layers(
                _live(layer, leaves) if dotted(*path, i) == name else layer
                for i, layer in enumerate(item)
            )
        elif name == ROOT:
            items[at] = _live(item, leaves)
    loss = loss_fn(optree.tree_unflatten(spec, items))
    if not leaves or not loss.requires_grad:
        return torch.zeros(())
    grads = torch.autograd.grad(
        loss, leaves, create_graph=True, allow_unused=True, materialize_grads=True
    )
    return _power(list(grads), leaves, ranks, key, max_iter, tol)


def _live(layer: Tree, leaves: list[Tensor]) -> Tree:
    """A layer's leaves as plain tensors to be differentiated, noted in ``leaves``."""

    def live(x: Any) -> Any:
        if not (isinstance(x, Tensor) and x.is_floating_point()):
            return x
        leaves.append(x.detach().clone().requires_grad_())
        return leaves[-1]

    plain = layer.force() if isinstance(layer, Ref) else layer
    return optree.tree_map(live, plain, none_is_leaf=True, namespace=NAMESPACE)


def _power(
    grads: list[Tensor], leaves: list[Tensor], ranks: Ranks, key: Tensor, max_iter: int, tol: float
) -> Tensor:
    """Ranks that share work on the layer iterate as often, and find the same: the largest."""
    averaging, sharing = ranks
    flat = torch.cat([x.detach().reshape(-1) for x in leaves])
    v = random.normal(key, flat.shape, dtype=torch.float32, device="cpu").to(flat)
    v, value = v / v.norm(), torch.zeros((), dtype=flat.dtype, device=flat.device)
    if not any(g.requires_grad for g in grads):  # linear in the layer: nothing is curved
        return value
    for _ in range(max_iter):
        product = _hessian_times(v, grads, leaves, averaging)
        before, value = value, torch.dot(product, v)
        size = product.norm()
        nothing = not bool(torch.isfinite(size)) or float(size) == 0
        near = abs(float(value - before)) < tol * abs(float(value))
        if sharing.size > 1:
            told = sharing.exchange([nothing, near], label="curvature")
            nothing, near = any(row[0] for row in told), all(row[1] for row in told)
        if nothing:
            return torch.zeros_like(value)
        v = product / size
        if near:
            break
    if sharing.size > 1:
        found = sharing.exchange(float(value), label="curvature")
        value = torch.full_like(value, max(found, key=abs))
    return value


def _hessian_times(v: Tensor, grads: list[Tensor], leaves: list[Tensor], group: Group) -> Tensor:
    """The product of the mean Hessian and ``v``, flat."""
    parts = v.split([x.numel() for x in leaves])
    outs = [(g, p.view_as(g)) for g, p in zip(grads, parts, strict=True) if g.requires_grad]
    rows = torch.autograd.grad(
        [g for g, _ in outs],
        leaves,
        [p for _, p in outs],
        retain_graph=True,
        allow_unused=True,
        materialize_grads=True,
    )
    product = torch.cat([x.reshape(-1) for x in rows])
    if group.size > 1:
        product = group.all_reduce(product, label="curvature").wait() / group.size
    return product
