"""What functions give beside tensors that can be compared: numbers, texts, enums, arrays."""

from __future__ import annotations

import sys
from enum import Enum
from typing import Any

import torch

from zfunc.rehearsal.results import is_array

__all__ = ["is_number", "is_same", "is_value"]


def is_value(x: Any) -> bool:
    """Whether something that is no tensor is to be the same on all stages."""
    return is_number(x) or isinstance(x, str | bytes | Enum | torch.dtype) or is_array(x)


def is_number(x: Any) -> bool:
    """Whether something is a number of Python or of NumPy."""
    numpy = sys.modules.get("numpy")
    if isinstance(x, bool | int | float | complex):
        return True
    return numpy is not None and isinstance(x, numpy.generic)


def is_same(x: Any, then: Any) -> bool:
    """Whether two values are one, and of one type. Of objects that cannot be compared it is the
    code, and the numbers and texts that they have as attributes."""
    if type(x) is not type(then):
        return False
    if is_number(x):  # NaN is NaN, and -0. is not 0.
        return repr(x) == repr(then)
    if is_array(x):
        return x.dtype == then.dtype and x.shape == then.shape and x.tobytes() == then.tobytes()
    if getattr(type(x), "__eq__", None) != _UNEQUAL or isinstance(x, torch.dtype):
        try:
            return bool(x == then)
        except (RuntimeError, TypeError, ValueError):  # as of a table
            return True
    was, own = getattr(then, "__dict__", {}), getattr(x, "__dict__", {})
    same = all(is_same(y, was.get(name)) for name, y in own.items() if is_value(y))
    return same and getattr(x, "__code__", None) == getattr(then, "__code__", None)


_UNEQUAL = object.__eq__  # of what is equal to itself alone
