"""How kernels of :mod:`zfunc.kernels.flat_updates` are launched: they differ in their buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
from torch import Tensor

from zfunc.kernels import dispatch

__all__ = ["over_flat"]


def over_flat(name: str, kernel: Any) -> Callable[..., None]:
    """The launcher of a kernel ``(grad, *state, *new state, low, hyper, n)``.

    Args:
        name: whose configuration it is launched with.
        kernel: jitted, with the constants ``LOW`` and ``BLOCK``.
    """

    def launch(grad: Tensor, *buffers: Any, hyper: Tensor) -> None:
        *state, low = buffers
        if not (n := grad.numel()):
            return
        how = dispatch.config(name, grad.device)
        copy = low if low is not None else state[0]  # stands for a pointer that is not read
        kernel[(triton.cdiv(n, how["BLOCK"]),)](
            *(grad, *state, copy, hyper, n), LOW=low is not None, **how
        )

    return launch
