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
        most: rows that the interpreter gets through in a moment.
    """

    name: str
    fused: Callable[..., Any]
    plain: Callable[..., Any]
    shapes: Callable[[int, int], tuple[Shape, ...]]
    batched: tuple[bool, ...]
    second: bool = True
    most: int = 20

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


def _one(n: int, m: int) -> tuple[Shape, ...]:
    return ((m, n),)


def _two(n: int, m: int) -> tuple[Shape, ...]:
    return ((m, n), (m, n))


def _packed(x: Tensor) -> Tensor:
    return kernels.geglu(*x.chunk(2, -1), "none")


def _tables(length: int, half: int, batch: int = 0) -> tuple[Tensor, Tensor]:
    angles = torch.arange(length)[:, None] * 0.7 ** torch.arange(half)
    if batch:
        angles = angles + torch.arange(batch)[:, None, None]
    return angles.cos().double(), angles.sin().double()


def _table(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _rotary(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Of heads behind positions, with tables for each of two sequences."""
    cos, sin = _tables(q.shape[1], q.shape[-1] // 2, 2)
    q, k = q.transpose(1, 2), k.transpose(1, 2)
    return kernels.rotary(q, k, cos.to(_table(q)), sin.to(_table(q)))


def _plain_rotary(q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
    cos, sin = (x[:, None].to(q.dtype) for x in _tables(q.shape[1], q.shape[-1] // 2, 2))
    return tuple(_turned(x.transpose(1, 2), cos, sin) for x in (q, k))


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)


def _neighbours(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = _tables(q.shape[2], (q.shape[-1] - 1) // 2)
    return kernels.rotary(q, k, cos.to(_table(q)), sin.to(_table(q)), "interleaved")


def _plain_neighbours(q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
    half = (q.shape[-1] - 1) // 2
    cos, sin = (x.to(q.dtype) for x in _tables(q.shape[2], half))
    out = []
    for x in (q, k):
        a, b = x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]
        both = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
        out.append(torch.cat([both, x[..., 2 * half :]], -1))
    return tuple(out)


def _entropy(f: Callable[..., Tensor], **how: Any) -> Callable[[Tensor], Tensor]:
    """Of logits ``[m, n]``, whose targets are ``_targets``."""
    return lambda logits: f(logits, _targets(*logits.shape), **how)


def _targets(rows: int, classes: int) -> Tensor:
    """Every third is ignored, but not the first."""
    wanted = torch.arange(rows) * 5 % classes
    return wanted.where(torch.arange(rows) % 3 != 1, -100)


def _plain_entropy(logits: Tensor, target: Tensor, **how: Any) -> Tensor:
    z = how.pop("z_loss", 0.0)
    x = logits if logits.dtype == torch.float64 else logits.float()
    loss = F.cross_entropy(x, target, reduction="sum" if z else "mean", **how)
    if z:
        loss = loss + z * (torch.logsumexp(x, -1).square() * (target != -100)).sum()
    return loss


def _head(x: Tensor, weight: Tensor) -> Tensor:
    return kernels.linear_cross_entropy(x, weight, _targets(len(x), len(weight)), chunk=16)


def _plain_head(x: Tensor, weight: Tensor) -> Tensor:
    return _plain_entropy(x @ weight.t(), _targets(len(x), len(weight)))


CASES = [
    Case("rms_norm", kernels.rms_norm, _rms, lambda n, m: ((m, n), (n,)), (True, False), most=515),
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
        most=515,
    ),
    Case(
        "layer_norm, a bias alone",
        lambda x, b: kernels.layer_norm(x, None, b),
        lambda x, b: F.layer_norm(x, x.shape[-1:], None, b, 1e-5),
        lambda n, m: ((m, n), (n,)),
        (True, False),
    ),
    Case(
        "layer_norm, a weight alone",
        kernels.layer_norm,
        lambda x, w: F.layer_norm(x, x.shape[-1:], w, None, 1e-5),
        lambda n, m: ((m, n), (n,)),
        (True, False),
    ),
    Case(
        "layer_norm, alone",
        kernels.layer_norm,
        lambda x: F.layer_norm(x, x.shape[-1:]),
        _one,
        (True,),
    ),
    Case(
        "layer_norm, residual",
        lambda x, r, w, b: kernels.layer_norm(x, w, b, residual=r),
        _with_residual(_layer),
        lambda n, m: ((m, n), (m, n), (n,), (n,)),
        (True, True, False, False),
    ),
    Case("swiglu", kernels.swiglu, lambda g, u: F.silu(g) * u, _two, (True, True)),
    Case(
        "swiglu, of itself", lambda x: kernels.swiglu(x, x), lambda x: F.silu(x) * x, _one, (True,)
    ),
    Case(
        "rms_norm, residual of itself",
        lambda x, w: kernels.rms_norm(x, w, residual=x),
        lambda x, w: _with_residual(_rms)(x, x, w),
        lambda n, m: ((m, n), (n,)),
        (True, False),
    ),
    Case(
        "rotary, of itself",
        lambda x: _rotary(x, x),
        lambda x: _plain_rotary(x, x),
        lambda n, m: ((2, m, 3, 2 * n),),
        (True,),
        most=3,
    ),
    Case(
        "geglu, packed",
        _packed,
        lambda x: F.gelu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
        lambda n, m: ((m, 2 * n),),
        (True,),
    ),
    Case(
        "geglu",
        kernels.geglu,
        lambda g, u: F.gelu(g, approximate="tanh") * u,
        _two,
        (True, True),
    ),
    Case(
        "bias_gelu",
        kernels.bias_gelu,
        lambda x, b: F.gelu(x + b, approximate="tanh"),
        lambda n, m: ((m, n), (n,)),
        (True, False),
    ),
    Case("bias_gelu, no bias", lambda x: kernels.bias_gelu(x, None, "none"), F.gelu, _one, (True,)),
    Case(
        "rotary",
        _rotary,
        _plain_rotary,
        lambda n, m: ((2, m, 3, 2 * n), (2, m, 2, 2 * n)),
        (True, True),
        most=3,
    ),
    Case(
        "rotary, interleaved",
        _neighbours,
        _plain_neighbours,
        lambda n, m: ((2, 1, m, 2 * n + 1), (2, 3, m, 2 * n + 1)),
        (True, True),
        most=3,
    ),
    Case(
        "cross_entropy",
        _entropy(kernels.cross_entropy),
        _entropy(_plain_entropy),
        lambda n, m: ((m + 1, n),),
        (True,),
    ),
    Case(
        "cross_entropy, smooth",
        _entropy(kernels.cross_entropy, label_smoothing=0.1, z_loss=0.01, reduction="sum"),
        _entropy(_plain_entropy, label_smoothing=0.1, z_loss=0.01),
        _one,
        (True,),
    ),
    Case(
        "linear_cross_entropy",
        _head,
        _plain_head,
        lambda n, m: ((m + 17, n), (61, n)),
        (True, False),
        second=False,
    ),
]


def offset(x: Tensor, by: float = 1000.0) -> Tensor:
    """Numbers far from 0, which lose digits where sums of them are subtracted."""
    return (x.double() + by).to(x.dtype)


BY_NAME = {case.name: case for case in CASES}
