"""Modules' own casts to fewer bits, turned into float64: results can then be compared to 1e-9."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["Doubled", "close"]

FEWER = (torch.float32, torch.float16, torch.bfloat16)
SHORTER: Any = {
    Tensor.float: Tensor.double,
    Tensor.half: Tensor.double,
    Tensor.bfloat16: Tensor.double,
}


def close(x: Tensor, y: Tensor) -> bool:
    """Whether two results are the same but for rounding."""
    return torch.allclose(x, y, rtol=1e-9, atol=1e-9)


class Doubled(TorchFunctionMode):
    """A block in which what is computed in fewer bits is computed in float64.

    >>> with Doubled():
    ...     torch.ones(2, dtype=torch.float64).to(torch.float32).dtype
    torch.float64
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = {key: _double(x) for key, x in (kwargs or {}).items()}
        return SHORTER.get(func, func)(*map(_double, args), **named)


def _double(x: Any) -> Any:
    return torch.float64 if isinstance(x, torch.dtype) and x in FEWER else x
