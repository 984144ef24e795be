"""How the arguments of a loss are cut into microbatches."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from itertools import count
from typing import Any

import optree
import torch
from torch import Tensor

from zfunc.engine.batches import described, has_rows, is_plain, leaves_of, mapped, mislaid
from zfunc.engine.hooks import Gradients
from zfunc.errors import CompositionError
from zfunc.ranks import random
from zfunc.ranks.comm import even_cuts
from zfunc.trees.nodes import NAMESPACE, Lazy, Placed
from zfunc.trees.tree import dotted

__all__ = ["Arguments", "microbatches", "own_leaves"]

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def own_leaves(state: Any) -> dict[int, Tensor]:
    """The tensors that a state holds itself, by identity: they belong to no batch."""
    leaves = optree.tree_leaves(state, is_leaf=lambda x: isinstance(x, Placed), namespace=NAMESPACE)
    return {id(x): x for x in leaves if isinstance(x, Tensor)}


def microbatches(
    asked: Gradients,
    n: int,
    own: dict[int, Tensor],
    exact: bool = False,
    by: str = "",
) -> Iterator[Arguments]:
    """``(args, kwargs)`` of each of n microbatches.

    Args:
        asked: the call.
        n: number of microbatches.
        own: what belongs to the state and is passed whole.
        exact: whether the mean over uneven ones is right, too.
        by: what cuts, for messages: ``accumulate(n=...)`` if nothing is said.

    Raises:
        CompositionError: there is nothing to cut, or it cannot be cut evenly; names the
            argument and the leaf.
    """
    by = by or f"accumulate(n={n})"
    given = list(zip(_names(asked), [*asked.args, *asked.kwargs.values()], strict=True))
    batch: dict[int, tuple[str, Any]] = {}
    folded: set[int] = set()
    i = -1
    for name, value in given:
        for path, x in leaves_of(value):
            i += 1
            if name == "buffers":
                continue
            if has_rows(x) and id(x) not in own:
                batch[i] = dotted(name, *path), x
            elif isinstance(x, Tensor):
                if random.is_key(x) or (not path and _called_key(name, x)):
                    folded.add(i)
            elif not (is_plain(x) or isinstance(x, Placed | Lazy) or callable(x)):
                raise CompositionError(
                    f"{by} cannot cut {dotted(name, *path)}, {described(x)}. {WAYS}"
                )
    rows = _rows(list(batch.values()), n, exact, given, by)
    for name, value in given:
        for path, x in mislaid(value, rows) if name != "buffers" else ():
            raise CompositionError(
                f"{by} cannot cut {dotted(name, *path)}, {described(x)}, as long as "
                f"the batch has rows ({rows}). {WAYS}"
            )
    cuts = even_cuts(rows, n)

    def of(k: int) -> list[Any]:
        part, leaf = slice(cuts[k], cuts[k + 1]), count()

        def cut(x: Any) -> Any:
            if (i := next(leaf)) in batch:
                return x[part]
            return random.fold_in(x, k) if i in folded and k else x

        def lists(some: list[Any]) -> list[Any]:
            return some[part] if len(some) == rows else some

        return [mapped(cut, value, lists) for _, value in given]

    for k in range(n):
        values, free = of(k), len(asked.args)
        yield tuple(values[:free]), dict(zip(asked.kwargs, values[free:], strict=True))


WAYS = (
    "A batch is made of tensors and NumPy arrays in dicts, lists, tuples or dataclasses; let the "
    "loss close over what is no part of it."
)


def _called_key(name: str, x: Tensor) -> bool:
    return name.endswith("key") and x.ndim == 0 and x.dtype == torch.int64


def _rows(
    batch: list[tuple[str, Any]], n: int, exact: bool, given: list[tuple[str, Any]], by: str
) -> int:
    """How many rows the batch has."""
    if not batch:
        met = ", ".join(f"{name} is {described(value)}" for name, value in given)
        raise CompositionError(
            f"{by} found no batch: the loss has no tensor of one or more dimensions "
            f"among its arguments behind the parameters ({met or 'there are none'}). Pass the "
            "batch to it, zf.value_and_grad(loss_fn)(params, batch), instead of closing over it."
        )
    first, size = next((path, len(x)) for path, x in batch)
    for path, x in batch:
        if len(x) != size:
            raise CompositionError(
                f"{by} cuts tensors along dim 0: {first} has {size} rows there and "
                f"{path} has {len(x)}, expected as many. Let the loss close over what is no part "
                "of the batch, or keep it in the state."
            )
    if size < n or (size % n and not exact):
        raise CompositionError(
            f"{by} cannot cut {first} of {size} rows into {n} equal microbatches. "
            f"Give each rank a multiple of {n} rows, or let the loss return zf.Mean(total, count), "
            "which is exact for uneven ones (of at least one row each)."
        )
    return size


def _names(asked: Gradients) -> list[str]:
    """The loss's names for its arguments behind the parameters."""
    named = list(asked.kwargs)
    try:
        parameters = list(inspect.signature(asked.loss_fn).parameters.values())[1:]
    except (TypeError, ValueError):
        parameters = []
    free = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    free += [f"argument {i + 1}" for i in range(len(free), len(asked.args))]
    return [*free[: len(asked.args)], *named]
