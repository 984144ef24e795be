"""Whether Triton's interpreter computes in bfloat16, or with its bits as if they were integers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["knows_bfloat16"]


@triton.jit
def _sums(x, y, out):
    at = tl.arange(0, 16)
    tl.store(out + at, tl.load(x + at) + tl.load(y + at))


def knows_bfloat16() -> bool:
    """By a sum, on the CPU. Triton has to have been imported with ``TRITON_INTERPRET=1``."""
    x = torch.tensor([1.0, 1.0 + 2**-7, 3.0, -2.5] * 4).to(torch.bfloat16)
    out = torch.zeros_like(x)
    _sums[(1,)](x, x.flip(0), out)
    return torch.equal(out, x + x.flip(0))
