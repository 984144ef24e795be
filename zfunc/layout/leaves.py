"""What a plain leaf carries along: that it is frozen, and of what dtype it was.

``TrainState`` remembers which leaves are frozen, and renews the marks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zfunc.errors import PlacementError

__all__ = [
    "check_trainable",
    "freeze",
    "is_frozen",
    "origin_of",
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


def settle_origin(leaf: Tensor, dtype: torch.dtype) -> Tensor:
    """Remember what dtype a cast leaf's original has, whose tree is to be cut alike."""
    leaf.__dict__["_zfunc_origin"] = dtype
    return leaf


def origin_of(leaf: Tensor) -> torch.dtype:
    """The dtype that :func:`settle_origin` stored, or the leaf's own."""
    return leaf.__dict__.get("_zfunc_origin", leaf.dtype)
