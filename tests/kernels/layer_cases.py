"""The kernels of a transformer's layers, each beside what it is in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zfunc import kernels

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """A function of floating-point tensors, fused and plain.

    Attributes:
        name: of the case.
        fused, plain: take the same tensors, return a tensor or a tuple of them.
        shapes: of the arguments, for a row length and a number of rows.
        batched: whether the argument has rows, so that a batch of it is one more dimension.
        second: whether there is a second derivative.
    """

    name: str
    fused: Callable[..., Any]
    plain: Callable[..., Any]
    shapes: Callable[[int, int], tuple[Shape, ...]]
    batched: tuple[bool, ...]
    second: bool = True

    def tensors(self, n: int, rows: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
        """Random arguments, the same each time."""
        generator = torch.Generator().manual_seed(n + rows)
        return [
            torch.randn(s, generator=generator, dtype=torch.float64).to(dtype)
            for s in self.shapes(n, rows)
        ]


def outputs(out: Any) -> tuple[Tensor, ...]:
    return out if isinstance(out, tuple) else (out,)


def loss(f: Callable[..., Any]) -> Callable[..., Tensor]:
    """A number that depends on every element of every output in another way."""

    def number(*args: Tensor) -> Tensor:
        total = torch.zeros(())
        for i, out in enumerate(outputs(f(*args))):
            weights = torch.arange(out.shape[-1] if out.dim() else 1, dtype=out.dtype)
            total = total + (out * torch.cos(weights + i)).sum() + (out * out).sum() / 3
        return total

    return number


def _rms(x: Tensor, w: Tensor | None = None, offset: float = 0.0) -> Tensor:
    y = F.rms_norm(x, x.shape[-1:], None, 1e-6)
    return y if w is None else y * (w + offset)


def _with_residual(norm: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    def summed(x: Tensor, residual: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        s = x + residual
        return norm(s, *rest), s

    return summed


def _layer(x: Tensor, w: Tensor | None = None, b: Tensor | None = None) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], w, b, 1e-5)


CASES = [
    Case("rms_norm", kernels.rms_norm, _rms, lambda n, m: ((m, n), (n,)), (True, False)),
    Case("rms_norm, no weight", kernels.rms_norm, _rms, lambda n, m: ((m, n),), (True,)),
    Case(
        "rms_norm, residual",
        lambda x, r, w: kernels.rms_norm(x, w, residual=r, offset=1.0),
        _with_residual(lambda s, w: _rms(s, w, 1.0)),
        lambda n, m: ((m, n), (m, n), (n,)),
        (True, True, False),
    ),
    Case(
        "layer_norm",
        kernels.layer_norm,
        _layer,
        lambda n, m: ((m, n), (n,), (n,)),
        (True, False, False),
    ),
    Case(
        "layer_norm, residual",
        lambda x, r, w, b: kernels.layer_norm(x, w, b, residual=r),
        _with_residual(_layer),
        lambda n, m: ((m, n), (m, n), (n,), (n,)),
        (True, True, False, False),
    ),
]
BY_NAME = {case.name: case for case in CASES}
