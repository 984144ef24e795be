"""What kernels that work row by row ask of their arguments."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from zfunc.kernels.operators import KernelError, numbers, together

__all__ = ["in_columns", "in_rows", "rows_of"]


def in_rows(name: str, **tensors: Tensor) -> None:
    """Check that tensors have rows, of numbers.

    Raises:
        KernelError: one of them is 0-d, or of another dtype.
    """
    for label, x in tensors.items():
        if not x.dim() or not numbers(x):
            raise KernelError(
                f"kernels.{name}: {label} is {x.dtype}{list(x.shape)}; expected floating-point "
                "numbers of 16 bits or more with at least one dimension."
            )


def in_columns(name: str, x: Tensor, **tensors: Tensor | None) -> None:
    """Check that tensors have a number for each column of ``x``, on its device.

    Raises:
        KernelError: one of them does not.
    """
    for label, p in tensors.items():
        if p is not None and (p.shape != x.shape[-1:] or not numbers(p)):
            raise KernelError(
                f"kernels.{name}: {label} is {p.dtype}{list(p.shape)}; expected floating-point "
                f"numbers {list(x.shape[-1:])}, one for each element of a row of x."
            )
    together(name, x=x, **tensors)


def rows_of(x: Tensor | None) -> Any:
    """Contiguous rows: ``[R, K]``; ``None`` stays what it is."""
    if x is None:
        return None
    return x.reshape(x.numel() // max(x.shape[-1], 1), x.shape[-1]).contiguous()
