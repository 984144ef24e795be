"""What a plain leaf of a placed state carries along: that it is frozen, and where it lives.

Tensors of plain trees are handed to user code as they are, so what the core must
remember of them is written on the tensor itself and copied to its successors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zfunc.errors import PlacementError
from zfunc.placed.layout import Layout

__all__ = [
    "check_trainable",
    "freeze",
    "home_of",
    "is_frozen",
    "is_placed",
    "mark_placed",
    "origin_of",
    "settle_home",
    "settle_origin",
]


def check_trainable(path: str, leaf: Any) -> None:
    """Raise ``PlacementError`` if a leaf cannot be a parameter: it is no floating-point tensor."""
    if isinstance(leaf, Tensor) and leaf.is_floating_point():
        return
    path = path or "(the whole tree)"
    if isinstance(leaf, Tensor) and leaf.is_complex():
        raise PlacementError(
            f"parameter {path} has dtype {leaf.dtype}; parameters are floating-point tensors. "
            "Keep its real view (torch.view_as_real), and call torch.view_as_complex on it where "
            "it is used. (Complex tensors that are not trained may be `buffers`.)"
        )
    what = f"dtype {leaf.dtype}" if isinstance(leaf, Tensor) else f"type {type(leaf).__name__}"
    raise PlacementError(
        f"parameter {path} has {what}; parameters are floating-point tensors. Integer tensors "
        "belong into `buffers` or `aux` (module.register_buffer), or are further arguments of the "
        "loss; other things belong outside the state."
    )


def freeze(leaf: Tensor) -> Tensor:
    """Mark a plain leaf as frozen: it gets no gradient."""
    leaf.__dict__["_zfunc_frozen"] = True
    return leaf


def is_frozen(leaf: Any) -> bool:
    """Whether a plain leaf was marked by :func:`freeze`."""
    return isinstance(leaf, Tensor) and leaf.__dict__.get("_zfunc_frozen", False)


def settle_home(leaf: Tensor, layout: Layout, index: int) -> Tensor:
    """Remember in which layout a plain leaf of a placed state lies (ZeRO 0 to 2)."""
    leaf.__dict__["_zfunc_home"] = layout.homes[index]
    return leaf


def home_of(leaf: Any) -> tuple[Layout, int] | None:
    """The layout and the leaf index that :func:`settle_home` stored."""
    return leaf.__dict__.get("_zfunc_home") if isinstance(leaf, Tensor) else None


def settle_origin(leaf: Tensor, dtype: torch.dtype) -> Tensor:
    """Remember what dtype a cast leaf's original has, whose tree is to be cut alike."""
    leaf.__dict__["_zfunc_origin"] = dtype
    return leaf


def origin_of(leaf: Tensor) -> torch.dtype:
    """The dtype that :func:`settle_origin` stored, or the leaf's own."""
    return leaf.__dict__.get("_zfunc_origin", leaf.dtype)


def mark_placed(leaf: Tensor) -> Tensor:
    """Remember that a plain leaf belongs to a placed state (parameters at ZeRO 0 to 2)."""
    leaf.__dict__["_zfunc_placed"] = True
    return leaf


def is_placed(leaf: Any) -> bool:
    """Whether a plain leaf was marked by :func:`mark_placed`."""
    return isinstance(leaf, Tensor) and "_zfunc_placed" in leaf.__dict__
