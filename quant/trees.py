"""Trees of parameters, quantised and taken back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
from torch import Tensor

from zfunc.engine.placement import placed_nodes
from zfunc.errors import PlacementError
from zfunc.modules.functional import Functional
from zfunc.quant.choice import Include, accepts, check_met, transposed_names
from zfunc.quant.grids import BITS, Format
from zfunc.quant.qtensor import QTensor
from zfunc.trees.nodes import NAMESPACE, Tree
from zfunc.trees.tree import dotted

__all__ = ["dequantize_tree", "format_of", "quantize_tree"]


def format_of(
    bits: int, group_size: int | None = 128, symmetric: bool = True, dynamic: bool = False
) -> Format:
    """The format of these settings.

    Raises:
        ValueError: bits other than 8 and 4, or a group size below 1.

    >>> str(format_of(4, 32))
    'int4, groups of 32, symmetric'
    """
    if bits not in BITS or isinstance(bits, bool):
        raise ValueError(
            f"bits={bits!r}: weights are stored in 8 or 4 bits. For training at other widths see "
            "quantize(step, start_bits=16, target_bits=...)."
        )
    return Format(bits, group_size, symmetric, dynamic)


def quantize_tree(
    params: Tree,
    bits: int = 8,
    group_size: int | None = 128,
    symmetric: bool = True,
    include: Include = None,
    *,
    dynamic: bool = False,
    model: Functional | None = None,
) -> Tree:
    """A params tree with :class:`QTensor` leaves in place of its linear layers' weights.

    Args:
        params: a plain tree of tensors.
        bits: 8 or 4.
        group_size: weights of a row that share a scale (the last group of a row may be
            shorter); None: one scale for each row.
        symmetric: whether 0 lies in the middle of the grid. With 4 bits each scale is then the one
            of least squared error among a few, and the largest weights may be clipped
            (:mod:`zfunc.quant.scale_search`); with 8 nothing is. An asymmetric grid fits 4 bits
            somewhat better still, for a byte more in each group.
        include: which leaves: patterns of dotted paths, or a predicate on them. By default
            the weights of the linear layers if ``model`` is given, else every 2-D leaf that
            is not named like an embedding.
        dynamic: products round their inputs to 8 bits too, row by row (W8A8).
        model: the functionalized module that the params belong to.

    Returns:
        The same structure. Leaves that are not chosen are passed on as they are.

    Raises:
        ValueError: settings that mean nothing.
        PlacementError: ``include`` fits no leaf (the closest paths are named), or the tree
            is placed.
        NonFiniteError: a weight is NaN or infinite.

    >>> import torch
    >>> quantize_tree({"embed": torch.ones(4, 8), "head": torch.ones(4, 8)})["head"]
    QTensor((4, 8) float32 in int8, per row, symmetric, 48 bytes)
    """
    form = format_of(bits, group_size, symmetric, dynamic)
    return mapped(
        params, lambda path, x, turned: QTensor.quantize(x, form, turned, path), include, model
    )


def mapped(
    params: Tree,
    make: Callable[[str, Tensor, bool], Any],
    include: Include = None,
    model: Functional | None = None,
) -> Tree:
    """The tree with ``make(path, leaf, transposed)`` at each chosen leaf; tied leaves stay tied."""
    keys, leaves, spec = optree.tree_flatten_with_path(
        params, none_is_leaf=True, namespace=NAMESPACE
    )
    names = [dotted(*key) for key in keys]
    _check_plain(params)
    wanted, turned = accepts(include, model), transposed_names(model)
    dims = {
        name: x.ndim
        for name, x in zip(names, leaves, strict=True)
        if isinstance(x, Tensor) and x.is_floating_point()
    }
    chosen = [name for name, ndim in dims.items() if wanted(name, ndim)]
    check_met(include, dims, chosen)
    made: dict[int, Any] = {}
    out, picked = [], set(chosen)
    for name, x in zip(names, leaves, strict=True):
        if name in picked and not isinstance(x, QTensor):
            if id(x) not in made:
                made[id(x)] = make(name, x, name in turned)
            x = made[id(x)]
        out.append(x)
    return optree.tree_unflatten(spec, out)


def _check_plain(params: Tree) -> None:
    if placed_nodes(params):
        raise PlacementError(
            "these params are placed: each rank holds a part. Quantise the full tree, "
            "zf.full(params), or place a function instead: zf.quantize(fn, bits=8).place(params)."
        )


def dequantize_tree(params: Tree) -> Tree:
    """The tree with plain tensors in place of its :class:`QTensor` leaves.

    >>> import torch
    >>> dequantize_tree(quantize_tree({"w": torch.tensor([[127.0, 1.0]])}))
    {'w': tensor([[127.,   1.]])}
    """
    return optree.tree_map(
        lambda x: x.dequantize() if isinstance(x, QTensor) else x,
        params,
        namespace=NAMESPACE,
    )
