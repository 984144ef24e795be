"""Learning rates, and the counts of updates that they and bias corrections depend on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["Rate", "Schedule", "at", "plain", "started", "symbolic"]

Schedule = Callable[[Any], Tensor]
Rate = float | Tensor | Schedule


def started() -> Tensor:
    """A count of no updates: 0-d, int64, on the CPU, where hyperparameters live."""
    return torch.zeros((), dtype=torch.int64, device="cpu")


def symbolic(x: Tensor) -> bool:
    """Whether the value of ``x`` must stay a tensor: it is traced or differentiated."""
    traced = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    return traced or (torch.is_grad_enabled() and x.requires_grad)


def plain(value: Any) -> Any:
    """A number as a float wherever it can be read without waiting, else as a tensor: of a count
    in float64, for ``1 - b2**n`` has few digits left in float32."""
    if not isinstance(value, Tensor):
        return float(value)
    if value.device.type == "cpu" and not symbolic(value):
        return float(value.item())
    return value if value.is_floating_point() else value.double()


def at(rate: Rate, count: Tensor) -> float | Tensor:
    """The value of ``rate`` after ``count`` updates.

    >>> from zfunc.optim.schedules import linear
    >>> at(linear(0.0, 1.0, 4), torch.tensor(3))
    0.75
    """
    return plain(rate(count) if callable(rate) else rate)
