"""Arguments of layers of which each rank takes a part: those made outside for all heads."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from zfunc.layout.splits import Split

__all__ = ["take", "taking"]

Forward = Callable[..., Any]


def take(x: Tensor, split: Split, rank: int) -> Tensor:
    """A rank's part of an argument, in which a dimension may repeat for each text of a batch.

    >>> import torch
    >>> take(torch.arange(8), Split.of(0, [[0, 1], [2, 3]]), 1)
    tensor([2, 3, 6, 7])
    """
    count = x.shape[split.dim] // split.size
    if count == 1:
        found: Tensor = split.local(x, rank)
        return found
    rows = x.unflatten(split.dim, (count, split.size))
    part: Tensor = replace(split, dim=split.dim + 1).local(rows, rank)
    return part.flatten(split.dim, split.dim + 1)


def taking(
    part: nn.Module, inputs: Mapping[str, Split], rank: int, enter: Callable[[Tensor], Tensor]
) -> Forward:
    """A submodule's forward on a rank's part of some arguments.

    Args:
        part: the submodule.
        inputs: by an argument's name how it is split.
        rank: whose part.
        enter: what is done with the whole argument before.
    """
    inner = part.forward
    names = list(inspect.signature(inner).parameters)

    def own(name: str, x: Any) -> Any:
        split = inputs.get(name)
        return take(enter(x), split, rank) if split and isinstance(x, Tensor) else x

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        mine = [own(name, x) for name, x in zip(names, args, strict=False)]
        named = {name: own(name, x) for name, x in kwargs.items()}
        return inner(*mine, *args[len(mine) :], **named)

    return forward
