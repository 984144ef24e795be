"""How near a result must be: the rule for every kernel, in one place."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

# One rounding of each dtype, as a relative Frobenius error.
ROUNDING = {torch.bfloat16: 2e-3, torch.float16: 3e-4, torch.float32: 1e-6, torch.float64: 1e-12}
# Nothing, one element, primes, around a warp, around and beyond a block.
LENGTHS = (0, 1, 7, 64, 127, 1024, 1031, 3001)


def distance(found: Tensor, expected: Tensor) -> float:
    """Relative Frobenius distance; NaN if NaNs do not coincide."""
    x, y = found.double(), expected.double()
    if not torch.equal(x.isnan(), y.isnan()):
        return float("nan")
    x, y = x.nan_to_num(), y.nan_to_num()
    return float((x - y).norm() / y.norm().clamp_min(1e-30))


def assert_near(found: Tensor, expected: Tensor, eager: Tensor | None = None) -> None:
    """Within one rounding of ``expected``, or as near as the eager torch result is."""
    assert found.shape == expected.shape
    bound = ROUNDING[found.dtype]
    if eager is not None:
        bound = max(bound, 1.05 * distance(eager, expected))
    assert distance(found, expected) <= bound, (distance(found, expected), bound)


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Fresh memory is full of NaN: what a kernel leaves unwritten shows."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
