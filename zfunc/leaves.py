"""What a plain leaf of a placed state carries along: that it is frozen, and where it lives.

Tensors of plain trees are handed to user code as they are, so what the core must
remember of them is written on the tensor itself and copied to its successors.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from zfunc.layout import Layout

__all__ = ["freeze", "home_of", "inherit", "is_frozen", "settle_home"]


def freeze(leaf: Tensor) -> Tensor:
    """Mark a plain leaf as frozen: it gets no gradient."""
    leaf.__dict__["_zfunc_frozen"] = True
    return leaf


def is_frozen(leaf: Any) -> bool:
    """Whether a plain leaf was marked by :func:`freeze`."""
    return isinstance(leaf, Tensor) and leaf.__dict__.get("_zfunc_frozen", False)


def settle_home(leaf: Tensor, layout: Layout, index: int) -> Tensor:
    """Remember in which layout a plain leaf of a placed state lies (ZeRO 0 to 2)."""
    leaf.__dict__["_zfunc_home"] = (layout, index)
    return leaf


def home_of(leaf: Any) -> tuple[Layout, int] | None:
    """The layout and the leaf index that :func:`settle_home` stored."""
    return leaf.__dict__.get("_zfunc_home") if isinstance(leaf, Tensor) else None


def inherit(new: Tensor, old: Any) -> Tensor:
    """Carry the marks of a plain leaf over to its successor."""
    if isinstance(old, Tensor):
        for mark in ("_zfunc_frozen", "_zfunc_home"):
            if mark in old.__dict__:
                new.__dict__[mark] = old.__dict__[mark]
    return new
