"""What an operator's schema says: whether it is made of others, and which arguments it writes."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

__all__ = ["ALLOCATES", "is_causal", "is_composite", "shares", "writes", "written_by"]

ALLOCATES = frozenset({"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided"})
SHARES = frozenset(  # no views, and of the same memory
    {"_unsafe_view", "unsafe_split", "unsafe_split_with_sizes", "lift_fresh", "set_", "resize_"}
)


@cache
def shares(func: Any) -> bool:
    """Whether an operator only looks at memory otherwise, as ``x.view`` and ``x.unsqueeze_`` do."""
    again = torch.Tag.inplace_view in func.tags
    return bool(func.is_view or again or func._opname in SHARES)


@cache
def is_composite(func: Any) -> bool:
    """Whether autograd knows the operator only by those that it calls."""
    return bool(
        torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
    )


@cache
def writes(func: Any) -> tuple[tuple[int, str], ...]:
    """The arguments that an operator writes: their positions and names."""
    arguments = enumerate(func._schema.arguments)
    return tuple((i, x.name) for i, x in arguments if x.alias_info and x.alias_info.is_write)


def written_by(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors that a call writes."""
    given = [args[i] if i < len(args) else kwargs.get(name) for i, name in writes(func)]
    return [x for x in pytree.tree_leaves(given) if isinstance(x, Tensor)]


@cache
def _causal_at(func: Any) -> int:
    names = [argument.name for argument in func._schema.arguments]
    return names.index("is_causal") if "is_causal" in names else -1


def is_causal(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a call is attention under a causal mask."""
    at = _causal_at(func)
    return at >= 0 and bool(args[at] if at < len(args) else kwargs.get("is_causal", False))
