r"""The norm of gradients, the factor that clips them, and whether they are finite.

Gradients are read once, and the host waits for nothing.

.. math:: \mathrm{norm} = \sqrt{\sum_i g_i^2} \qquad
   \mathrm{factor} = \min(1, \mathrm{max\_norm} / \mathrm{norm})

Everything stays on the device as 0-d tensors: ``factor`` goes into ``adamw_hyper(factor=...)``, so
a clipped step asks the host for nothing. Sums are float32 (float64 of float64), in a fixed order:
the same bits every time. Numbers whose squares overflow are finite all the same.

Source: Pascanu et al., On the Difficulty of Training Recurrent Neural Networks, 2013.

**Traffic** an element: its own 2 bytes (bfloat16), with some 5 operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from zfunc.kernels import dispatch
from zfunc.kernels.operators import (
    KernelError,
    looped,
    numbers,
    operator,
    together,
    undifferentiated,
    wide,
)
from zfunc.trees.kinds import kind

__all__ = ["Clip", "norm_clip", "sum_squares"]

CHUNK = 1 << 16
INSTEAD = "torch.linalg.vector_norm"


class Clip(NamedTuple):
    """0-d tensors: the ``norm``, the ``factor`` that clips, and whether all are ``finite``."""

    norm: Tensor
    factor: Tensor
    finite: Tensor


def sum_squares(x: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of squares of a tensor, and whether all of it is finite.

    Args:
        x: any shape; bfloat16, float16 or float32 (float64 is taken by the twin).

    Returns:
        ``(squares, finite)``, 0-d: float32 (float64 of float64) and bool.

    Raises:
        KernelError: ``x`` is not floating-point, or gradients are being recorded.

    >>> sum_squares(torch.tensor([3.0, -4.0]))
    (tensor(25.), tensor(True))
    """
    undifferentiated("sum_squares", INSTEAD, x)
    if not numbers(x):
        raise KernelError(
            f"kernels.sum_squares: x is {x.dtype}; expected floating-point numbers of 16 bits "
            "or more."
        )
    squares, finite = _sum_squares(x)
    return squares, finite


def norm_clip(grads: Sequence[Tensor], max_norm: float) -> Clip:
    """The norm of several buffers together, and what to multiply them by.

    Args:
        grads: flat gradients, on one device; at least one.
        max_norm: what the norm is clipped to; infinity for none.

    Raises:
        KernelError: there are no gradients, they are on several devices, ``max_norm`` is not
            positive, or as :func:`sum_squares`.

    >>> norm_clip([torch.tensor([3.0]), torch.tensor([4.0])], 1.0)
    Clip(norm=tensor(5.), factor=tensor(0.2000), finite=tensor(True))
    """
    if not grads or not max_norm > 0:
        raise KernelError(
            f"kernels.norm_clip: {len(grads)} buffers and max_norm={max_norm}; expected at least "
            "one, and a positive norm."
        )
    together("norm_clip", **{f"grads[{i}]": g for i, g in enumerate(grads)})
    squares, finite = zip(*(sum_squares(g) for g in grads), strict=True)
    norm = torch.stack(squares).sum().sqrt()
    factor = torch.where(norm <= max_norm, 1.0, max_norm / norm)  # NaN is within no norm
    return Clip(norm, factor, torch.stack(finite).all())


def _room(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty((), dtype=wide(x)), x.new_empty((), dtype=torch.bool)


@operator(_room, batch=looped)
def _sum_squares(x: Tensor) -> tuple[Tensor, Tensor]:
    squares, finite = _room(x)
    dispatch.run("sum_squares", x.contiguous(), squares, finite)
    return squares, finite


def twin(x: Tensor, squares: Tensor, finite: Tensor) -> None:
    """In torch, a block that fits the cache at a time."""
    squares.zero_()
    finite.fill_(True)
    for part in x.view(-1).split(CHUNK):
        v = part.to(squares.dtype)
        square = (v * v).sum()
        squares += square
        # The elements themselves are looked at where their squares alone could be the reason.
        if kind(x.device) != "cpu" or not square.isfinite():
            finite &= part.isfinite().all()


dispatch.register(
    "sum_squares", twin, "gradient_norm_triton", "2 B (bf16)", dtypes=(*dispatch.FLOATS, torch.bool)
)
