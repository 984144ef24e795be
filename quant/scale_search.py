"""The scales of symmetric grids of a few bits: those of least squared error.

With few codes, the scale that just reaches the largest weight is not the best one. The codes are
``-2**(b-1), ..., 2**(b-1) - 1``: the negative ones reach further. So the weight of largest
magnitude, ``x``, gets the lowest code, by the scale ``x / -2**(b-1)``, whose sign is the opposite
of its own. A smaller scale clips it, and brings all other weights nearer to a code. For each group
the candidates in :data:`CLIPPED` are tried, and the one with the least sum of squared errors is
taken.

Sources: the scale with a sign is that of ggml's ``Q4_0``, https://github.com/ggml-org/ggml;
clipping at the least squared error is from Banner et al., Post Training 4-bit Quantization of
Convolutional Networks for Rapid-Deployment, 2019, https://arxiv.org/abs/1810.05723.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["CLIPPED", "searched"]

# At which multiples of the lowest code the weight of largest magnitude would lie, beside 1 and the
# highest code over the lowest. These two find a tensor that is on such a grid already unchanged.
CLIPPED = (15 / 16, 17 / 16, 9 / 8, 19 / 16, 5 / 4, 11 / 8, 3 / 2)
ON_CPU, ELSEWHERE = 1 << 18, 1 << 26  # errors at once: on a CPU, what its cache holds


def searched(
    x: Tensor, bits: int, dtype: torch.dtype, shares: Sequence[float] | None = None
) -> Tensor:
    """The step of each group with the least squared error.

    Args:
        x: ``[rows, groups, width]``, fp32 or float64: what has one step lies in the last dimension.
        bits: of a code.
        dtype: of the steps, to which candidates are rounded before their errors are compared.
        shares: at which multiples of the lowest code the weight of largest magnitude is tried; the
            first one is taken where others are no better.

    Returns:
        ``[rows, groups]`` of either sign, never 0: a group of zeros has 1, one with a value that
        is not finite a step that is not finite.

    >>> searched(torch.tensor([[[8.0, -7.0, 3.0], [0.0, 0.0, 0.0]]]), 4, torch.float32)
    tensor([[-1.,  1.]])
    """
    low, high = x.aminmax(dim=-1)
    most, lowest = torch.where(-low >= high, low, high), -(2 ** (bits - 1))
    shares = (1.0, 1 + 1 / lowest, *CLIPPED) if shares is None else shares
    steps = torch.stack([most / (share * lowest) for share in shares]).to(dtype)
    steps = torch.where(steps == 0, torch.ones_like(steps), steps)  # NaN stays
    limit = ON_CPU if x.device.type == "cpu" else ELSEWHERE
    row = x.shape[1] * x.shape[2]
    count = max(1, limit // (len(shares) * row))
    parts = zip(x.split(count), steps.split(count, dim=1), most.split(count), strict=True)
    return torch.cat([_best(*part, lowest, max(1, limit // (count * row))) for part in parts])


def _best(x: Tensor, steps: Tensor, most: Tensor, lowest: int, some: int) -> Tensor:
    """Of steps ``[candidates, rows, groups]`` the best, looking at ``some`` candidates at once."""
    x = x.contiguous()  # so that how a tensor lies in memory has no part in the sums
    found = []
    for few in steps.to(x.dtype).split(some):
        off = x / few[..., None]
        off -= off.round().clamp_(lowest, -lowest - 1)
        # In units of the largest weight: squares of small weights would be 0.
        found.append(off.square_().sum(-1) * (few / most).square())
    errors = torch.cat(found).nan_to_num_(nan=torch.inf)  # then the first one is taken
    return steps.gather(0, errors.argmin(0, keepdim=True))[0]
