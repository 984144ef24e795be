"""Parameters stay as they are while a function of them runs: what writes to them is refused.

A state is never changed by a function of it. ``F.embedding(..., max_norm=)`` renormalises its
table where it lies, and ``weight.clamp_()`` under ``torch.no_grad`` does likewise: on one process
that changes the state itself, and at stage 3 a gathered copy that nobody ever sees again. torch
counts what is written to a tensor, and all its views share the count; so it is compared before and
after. (Nobody counts what is written through ``x.data``.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import optree
import torch
from torch import Tensor, nn

from zfunc.errors import PlacementError
from zfunc.trees.nodes import OPAQUE, Tree
from zfunc.trees.tree import dotted

__all__ = ["FirstCall", "blind", "check", "versions"]

_PLAIN = (Tensor, nn.Parameter)


def blind() -> bool:
    """In inference mode and inside torch.func, versions and identities say nothing."""
    if torch.is_inference_mode_enabled():
        return True
    return torch._C._functorch.maybe_current_level() is not None


def versions(xs: Sequence[Any]) -> list[int] | None:
    """How often each of these leaves has been written to; ``None`` where nobody counts."""
    if blind() or torch.compiler.is_compiling():
        return None
    try:
        return [x._version for x in xs]
    except (RuntimeError, AttributeError):  # tensors of inference mode have no such count
        return [x._version if type(x) in _PLAIN and not x.is_inference() else 0 for x in xs]


def check(leaves: Sequence[Any], before: list[int] | None, name: Callable[[int], str]) -> None:
    """Refuse that leaves have been written to since :func:`versions`.

    Args:
        name: what the leaf at an index is called.

    Raises:
        PlacementError: one was; it is named.
    """
    if before is None:
        return
    now = versions(leaves)
    if now is None or now == before:
        return
    where = next(i for i, (a, b) in enumerate(zip(before, now, strict=True)) if a != b)
    raise PlacementError(
        f"{name(where)} was written to in place by the function that was given it: by max_norm of "
        "F.embedding or F.embedding_bag, say, or by weight.clamp_(). The state, whose memory that "
        "may be, is not what it was: take it anew. A function of parameters must leave them alone: "
        "set max_norm to None, and scale the rows in the loss, or the new parameters after the "
        "update."
    )


class FirstCall:
    """Compares at the first call of a function alone, so that later ones are free of it."""

    def __init__(self) -> None:
        self.open = True

    @contextmanager
    def watched(self, params: Tree) -> Iterator[None]:
        """Around a call with these parameters; layers that have not entered see to themselves."""
        keys, leaves, _ = optree.tree_flatten_with_path(params, namespace=OPAQUE)
        rows = [(key, x) for key, x in zip(keys, leaves, strict=True) if isinstance(x, Tensor)]
        tensors = [x for _, x in rows]
        before = versions(tensors)
        yield
        check(tensors, before, lambda i: f"parameter {dotted(*rows[i][0])}")
        self.open = before is None
