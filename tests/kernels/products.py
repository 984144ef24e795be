"""Weights of every kind, and what they stand for, for the tests of products."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from zfunc import kernels
from zfunc.kernels.packed import BITS


@dataclass(frozen=True)
class Weights:
    """A matrix of one kind, and its values in float64."""

    packed: kernels.Packed
    exact: Tensor

    def __call__(self, x: Tensor, *rest: Tensor | None) -> Tensor:
        w = self.packed
        if w.kind == "skinny_mm":
            return kernels.skinny_mm(x, w.data, *rest)
        product = getattr(kernels, w.kind)
        found: Tensor = product(x, w.data, w.scale, w.zero, *rest, group=w.group)
        return found


def weights(
    kind: str,
    n: int,
    k: int,
    *,
    group: int | None = None,
    zeros: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> Weights:
    """Random ones. Scales lie as they like: the transpose of a contiguous matrix."""
    if kind == "skinny_mm":
        w = torch.randn(n, k).to(dtype)
        return Weights(kernels.Packed.of(w), w.double())
    bits = BITS[kind]
    top = 2 ** (bits - 1)
    codes = torch.randint(-top, top, (n, k)).to(torch.int8)
    groups = -(-k // group) if group else 1
    scale = torch.rand(groups, n).t() + 0.1
    zero = torch.randint(-top, top, (n, groups)).to(torch.int8) if zeros else None
    width = group or max(k, 1)
    s = scale.double().repeat_interleave(width, 1)[:, :k]
    z = 0 if zero is None else zero.double().repeat_interleave(width, 1)[:, :k]
    data = kernels.pack_words(codes) if bits == 4 else codes
    return Weights(kernels.Packed(kind, data, k, scale, zero, group), (codes.double() - z) * s)


def rounded(x: Tensor) -> Tensor:
    """Rows rounded to 8 bits, in float64."""
    scale = x.double().abs().amax(1, keepdim=True) / 127
    return (x.double() / scale).round() * scale
