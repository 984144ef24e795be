"""What the leaves of a placed tree are, told from its layout: no value is made or waited for."""

from __future__ import annotations

from typing import Any

import optree

from zfunc.layout.layout import Layout, Slot
from zfunc.trees.forms import Shown, short

__all__ = ["forms"]


def forms(layout: Layout) -> Any:
    """The tree of a layout, with the form of the full leaf in the place of each leaf.

    >>> import torch
    >>> from zfunc.layout.cutting import make_layout
    >>> forms(make_layout({"w": torch.zeros(2, 3)}))["w"].head
    'f32[2,3]'
    """
    leaves = [Shown("None" if slot is None else _leaf(layout, slot)) for slot in layout.slots]
    return optree.tree_unflatten(layout.spec, leaves)


def _leaf(layout: Layout, slot: Slot) -> str:
    flat = layout.flats[slot.flat]
    frozen = "" if flat.trainable else " frozen"
    if slot.code is not None:
        return f"{slot.code.bytes} bytes of {list(slot.full)}{frozen}"
    return short(flat.dtype, slot.full) + frozen
