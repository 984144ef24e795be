"""``check_elementwise``: whether a transformation is right on placed trees."""

from __future__ import annotations

from typing import Any

from zfunc.layout.cutting import make_layout
from zfunc.layout.sharded import cut
from zfunc.optim.elementwise import check_on

__all__ = ["check_elementwise"]


def check_elementwise(tx: Any) -> None:
    """Compare two updates of a tiny plain tree with those of its placed twin.

    The trial runs in a world of one rank, outside any step: no collectives.

    Args:
        tx: a ``GradientTransformation``.

    Raises:
        CompositionError: the updates differ beyond rounding, or it cannot be tried
            because it wants a tree of its own.

    >>> from zfunc import tree
    >>> from zfunc.optim.base import EmptyState, GradientTransformation
    >>> check_elementwise(GradientTransformation(
    ...     lambda params: EmptyState(),
    ...     lambda grads, state, params: (tree.map(lambda g: g / g.norm(), grads), state)))
    Traceback (most recent call last):
    ...
    zfunc.errors.CompositionError: this GradientTransformation ... not elementwise: ...
    """
    check_on(tx, lambda plain: cut(make_layout(plain, world=1), plain, 0))
