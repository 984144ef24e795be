"""FLOPs of this library's own operators: of what is inside, on tensors without memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from zfunc.foresight.dry_run import DryRun
from zfunc.foresight.inputs import without_values
from zfunc.kernels.dispatch import use
from zfunc.kernels.operators import RUNS

__all__ = ["OwnFlops"]


@dataclass(frozen=True)
class _Geometry:
    """A tensor's, without it."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class _OwnCall:
    """A call of an operator: its name, and its arguments with geometries for tensors."""

    name: str
    given: tuple[Any, ...]
    spec: Any


class OwnFlops:
    """Asked during a step, and answered behind it: an operator is taken apart once."""

    def __init__(self) -> None:
        self._known: dict[_OwnCall, int] = {}

    def asked(self, func: Any, args: Any, kwargs: Any) -> _OwnCall:
        """What to ask :meth:`of` of a call."""
        flat, spec = pytree.tree_flatten((args, kwargs))
        return _OwnCall(func._schema.name, tuple(map(_geometry, flat)), spec)

    def of(self, call: _OwnCall) -> int:
        """The FLOPs of what its twin in torch does."""
        if call not in self._known:
            self._known[call] = _inside(call)
        return self._known[call]


def _geometry(x: Any) -> Any:
    return _Geometry(tuple(x.shape), x.stride(), x.dtype) if isinstance(x, Tensor) else x


def _inside(call: _OwnCall) -> int:
    run = DryRun()
    flat = [
        torch.empty_strided(x.shape, x.stride, dtype=x.dtype, device="meta")
        if isinstance(x, _Geometry)
        else x
        for x in call.given
    ]
    given = [without_values(x, run.storages) if isinstance(x, Tensor) else x for x in flat]
    args, kwargs = pytree.tree_unflatten(given, call.spec)
    with use("torch"), run:
        RUNS[call.name](*args, **kwargs)
    return sum(row.flops for row in run.rows)
