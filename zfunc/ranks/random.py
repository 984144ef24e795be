"""Functional randomness: the same key gives the same numbers.

Each sampler draws with a fresh ``torch.Generator`` that the key seeds, so the same key gives the
same bits on the same kind of device, and torch's global generator is neither read nor moved. What
a key is, and how code that knows no keys is made to follow one, is in ``zfunc.ranks.keys``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from zfunc.ranks.keys import (
    Key,
    as_key,
    fold_in,
    generator_of,
    is_key,
    key,
    paused,
    scope,
    split,
)

__all__ = [
    "as_key",
    "bernoulli",
    "fold_in",
    "is_key",
    "key",
    "normal",
    "paused",
    "permutation",
    "randint",
    "scope",
    "split",
    "truncated_normal",
    "uniform",
]

Shape = int | Sequence[int]


def _size(shape: Shape) -> Sequence[int]:
    return (shape,) if isinstance(shape, int) else tuple(shape)


def uniform(
    key: Key,
    shape: Shape = (),
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    low: float = 0.0,
    high: float = 1.0,
) -> Tensor:
    """Uniform numbers in ``[low, high)``.

    >>> uniform(key(0), (2, 3)).shape
    torch.Size([2, 3])
    """
    generator = generator_of(key, device)
    out = torch.empty(_size(shape), dtype=dtype, device=generator.device)
    return out.uniform_(low, high, generator=generator)


def normal(
    key: Key,
    shape: Shape = (),
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    mean: float = 0.0,
    std: float = 1.0,
) -> Tensor:
    """Normal numbers of the given mean and standard deviation."""
    generator = generator_of(key, device)
    out = torch.empty(_size(shape), dtype=dtype, device=generator.device)
    return out.normal_(mean, std, generator=generator)


def truncated_normal(
    key: Key,
    shape: Shape = (),
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    lower: float = -2.0,
    upper: float = 2.0,
) -> Tensor:
    """Standard normal numbers conditioned on ``[lower, upper]``, by the inverse distribution.

    Computed in float32 or wider, then cast and clamped to the bounds.
    """
    dtype = dtype or torch.get_default_dtype()
    wide = torch.promote_types(dtype, torch.float32)
    low, high = math.erf(lower / math.sqrt(2)), math.erf(upper / math.sqrt(2))
    out = uniform(key, shape, wide, device, low, high).erfinv_().mul_(math.sqrt(2))
    return out.to(dtype).clamp_(lower, upper)


def bernoulli(
    key: Key,
    p: float | Tensor = 0.5,
    shape: Shape | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Coins: ``True`` with probability ``p``.

    Args:
        key: a key or an int.
        p: a number, or a tensor of probabilities that broadcasts to ``shape``.
        shape: of the result; by default that of ``p``.
        device: of the result; by default that of ``p``.

    Returns:
        bool tensor.

    >>> bernoulli(key(0), 1.0, (3,))
    tensor([True, True, True])
    """
    if isinstance(p, Tensor):
        shape = p.shape if shape is None else shape
        device = p.device if device is None else device
    return uniform(key, () if shape is None else shape, torch.float32, device) < p


def randint(
    key: Key,
    low: int,
    high: int,
    shape: Shape = (),
    dtype: torch.dtype = torch.int64,
    device: torch.device | str | None = None,
) -> Tensor:
    """Integers in ``[low, high)``, of the given shape."""
    generator = generator_of(key, device)
    return torch.randint(
        low, high, _size(shape), generator=generator, dtype=dtype, device=generator.device
    )


def permutation(key: Key, x: int | Tensor, device: torch.device | str | None = None) -> Tensor:
    """A random order: of ``range(x)`` (int64 ``[x]``), or of the rows of a tensor.

    >>> sorted(permutation(key(0), 4).tolist())
    [0, 1, 2, 3]
    """
    if isinstance(x, Tensor):
        return x[permutation(key, x.shape[0], x.device)]
    generator = generator_of(key, device)
    return torch.randperm(x, generator=generator, device=generator.device)
