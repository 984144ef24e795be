"""Modules' own casts to fewer bits, turned into float64, and no dropout: results can then be
compared to 1e-9."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from zfunc.modules.dropout_check import DROPOUTS
from zfunc.trees.function_modes import FunctionMode

__all__ = ["Decisions", "Doubled", "Undrawn", "Undropped", "close"]

FEWER = (torch.float32, torch.float16, torch.bfloat16)
ATTENTION: Any = {F.scaled_dot_product_attention: 4, F.multi_head_attention_forward: 10}
"""Functions that drop numbers themselves, and where their probability stands."""
SHORTER: Any = {
    Tensor.float: Tensor.double,
    Tensor.half: Tensor.double,
    Tensor.bfloat16: Tensor.double,
}


COMPUTED = "attention", "dropout", "rrelu"
"""What computes and draws in one."""
DRAWN = 0.3


_COMPARISONS = (
    "gt ge lt le eq ne greater greater_equal less less_equal not_equal isclose allclose item "
    "tolist bool float int index"
)
_STEPS = (
    "sign signbit heaviside floor ceil round trunc fix floor_divide clamp clamp_min clamp_max clip "
    "maximum minimum relu relu6 hardtanh threshold bucketize searchsorted"
)
DECIDING = frozenset(f"{_COMPARISONS} {_STEPS}".split())
"""Functions that give the same for some numbers, and something else for others."""


def _check_norms(v: Tensor, g: Tensor, dim: int = 0) -> None:
    if g.numel() != (1 if dim == -1 else v.shape[dim]):
        raise ValueError(f"norms {list(g.shape)} do not fit {list(v.shape)} along {dim}")


UNCHECKED: Any = dict.fromkeys((torch._weight_norm, torch._weight_norm_interface), _check_norms)
"""Functions that write beyond their results where sizes do not fit, as those of a trial may not."""


def close(x: Tensor, y: Tensor) -> bool:
    """Whether two results are the same but for rounding."""
    return torch.allclose(x, y, rtol=1e-9, atol=1e-9)


class Doubled(FunctionMode):
    """A block in which what is computed in fewer bits is computed in float64.

    >>> with Doubled():
    ...     torch.ones(2, dtype=torch.float64).to(torch.float32).dtype
    torch.float64
    """

    def called(self, func: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        named = {key: _double(x) for key, x in named.items()}
        if func in UNCHECKED:
            UNCHECKED[func](*args, **named)
        return SHORTER.get(func, func)(*map(_double, args), **named)


class Undropped(FunctionMode):
    """A block in which dropout drops nothing, in training mode, too.

    >>> with Undropped():
    ...     F.dropout(torch.ones(3), 0.5)
    tensor([1., 1., 1.])
    """

    def called(self, func: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if getattr(func, "__name__", "").rstrip("_") in DROPOUTS:
            return args[0] if args else named["input"]
        if (at := ATTENTION.get(func)) is not None:
            args = (*args[:at], *([0.0] if len(args) > at else []), *args[at + 1 :])
            named |= {"dropout_p": 0.0} if "dropout_p" in named else {}
        return func(*args, **named)


class Undrawn(TorchDispatchMode):
    """A block in which what is drawn, but by a generator of one's own, is one number everywhere.

    >>> with Undrawn():
    ...     torch.rand(2)
    tensor([0.3000, 0.3000])
    """

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        out = func(*args, **named)
        drawn = torch.Tag.nondeterministic_seeded in func.tags and named.get("generator") is None
        if drawn and isinstance(out, Tensor) and not any(x in func.name() for x in COMPUTED):
            out.fill_(DRAWN if out.is_floating_point() else 0)
        return out


class Decisions(FunctionMode):
    """A block in which is noted what functions such as ``x > 3`` are given.

    Two sums of other features may lie on one side of a threshold, and what is computed of them is
    the same: in a trial, and not for other numbers.

    >>> with Decisions() as decisions:
    ...     bool(torch.ones(2).sum() > 3)
    False
    >>> [(name, x.item()) for name, x in decisions.given[:1]]
    [('gt', 2.0)]
    """

    def __init__(self) -> None:
        super().__init__()
        self.given: list[tuple[str, Tensor]] = []

    def called(self, func: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        name = getattr(func, "__name__", "").strip("_")
        if name in DECIDING:
            tensors = (x for x in (*args, *named.values()) if isinstance(x, Tensor))
            floats = (x for x in tensors if x.is_floating_point())
            self.given += [(name, x.detach().clone()) for x in floats]
        return func(*args, **named)


def _double(x: Any) -> Any:
    return torch.float64 if isinstance(x, torch.dtype) and x in FEWER else x
