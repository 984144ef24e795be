"""How the arguments of a loss are cut into microbatches."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import optree
import torch
from torch import Tensor

from zfunc import random
from zfunc.comm import even_cuts
from zfunc.errors import CompositionError
from zfunc.nodes import NAMESPACE, Lazy, Placed
from zfunc.seams import Gradients
from zfunc.tree import dotted

__all__ = ["microbatches", "own_leaves"]

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def own_leaves(state: Any) -> dict[int, Tensor]:
    """The tensors that a state holds itself, by identity: they belong to no batch."""
    leaves = optree.tree_leaves(state, is_leaf=lambda x: isinstance(x, Placed), namespace=NAMESPACE)
    return {id(x): x for x in leaves if isinstance(x, Tensor)}


def microbatches(
    asked: Gradients, n: int, own: dict[int, Tensor], exact: bool = False
) -> Iterator[Arguments]:
    """``(args, kwargs)`` of each of n microbatches.

    Args:
        asked: the call.
        n: number of microbatches.
        own: what belongs to the state and is passed whole.
        exact: whether the mean over uneven ones is right, too.

    Raises:
        CompositionError: there is nothing to cut, or it cannot be cut evenly; names the
            argument and the leaf.
    """
    names = _names(asked)
    given: Any = [*asked.args, *asked.kwargs.values()]
    keys, leaves, spec = optree.tree_flatten_with_path(
        given,
        is_leaf=lambda x: isinstance(x, Placed | Lazy),
        none_is_leaf=True,
        namespace=NAMESPACE,
    )
    batch: dict[int, str] = {}
    folded: set[int] = set()
    for i, (key, x) in enumerate(zip(keys, leaves, strict=True)):
        name = names[key[0]]
        if not isinstance(x, Tensor) or name == "buffers":
            continue
        if x.ndim and id(x) not in own:
            batch[i] = dotted(name, *key[1:])
        elif random.is_key(x) or (len(key) == 1 and _called_key(name, x)):
            folded.add(i)
    cuts = even_cuts(_rows({path: leaves[i] for i, path in batch.items()}, n, exact), n)

    def part(k: int) -> Iterator[Any]:
        for i, x in enumerate(leaves):
            if i in batch:
                yield x[cuts[k] : cuts[k + 1]]
            else:
                yield random.fold_in(x, k) if i in folded and k else x

    for k in range(n):
        values = optree.tree_unflatten(spec, part(k))
        cut = len(asked.args)
        yield tuple(values[:cut]), dict(zip(asked.kwargs, values[cut:], strict=True))


def _called_key(name: str, x: Tensor) -> bool:
    return name.endswith("key") and x.ndim == 0 and x.dtype == torch.int64


def _rows(batch: dict[str, Tensor], n: int, exact: bool) -> int:
    """How many rows the batch has."""
    if not batch:
        raise CompositionError(
            f"accumulate(n={n}) found no batch: the loss has no tensor of one or more dimensions "
            "among its arguments behind the parameters. Pass the batch to it, "
            "zf.value_and_grad(loss_fn)(params, batch), instead of closing over it."
        )
    first, size = next((path, len(x)) for path, x in batch.items())
    for path, x in batch.items():
        if len(x) != size:
            raise CompositionError(
                f"accumulate(n={n}) cuts tensors along dim 0: {first} has {size} rows there and "
                f"{path} has {len(x)}, expected as many. Let the loss close over what is no part "
                "of the batch, or keep it in the state."
            )
    if size < n or (size % n and not exact):
        raise CompositionError(
            f"accumulate(n={n}) cannot cut {first} of {size} rows into {n} equal microbatches. "
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
