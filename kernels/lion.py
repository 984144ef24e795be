r"""Lion over a flat shard: unscale, clip, sign, decay, momentum and 16-bit copy in one pass.

For each element, in float32, with :math:`g \leftarrow c\,g`:

.. math::
    p' = (1 - \eta\lambda)\,p - \eta \,\mathrm{sign}(\beta_1 m + (1 - \beta_1) g) \qquad
    m' = \beta_2 m + (1 - \beta_2) g

Source: Chen et al., Symbolic Discovery of Optimization Algorithms, 2023.

**Traffic.** 20 bytes a parameter with a bfloat16 gradient and a bfloat16 copy: g 2, p 4+4,
m 4+4, copy 2. Some 12 operations: bound by memory. The usual sequence of torch operations
moves 60 and more.

The sign of a sum may hang on its last bit. The kernel and the twin therefore round each product
and each sum by itself, with no fused multiply-add, and agree to the last bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zfunc.kernels import dispatch
from zfunc.kernels.flat_updates import Buffers, FlatUpdate, Number, blocks, hyper_tensor

__all__ = ["HYPER", "lion_flat", "lion_flat_", "lion_hyper"]

HYPER = ("lr", "b1", "b2", "weight_decay", "factor")
UPDATE = FlatUpdate(
    "lion_flat",
    state=("param", "mu"),
    hyper=HYPER,
    instead="optim.lion, whose update is made of plain torch operations",
)
_lion, _lion_ = UPDATE.define()


def lion_hyper(
    lr: Number,
    *,
    b1: float = 0.9,
    b2: float = 0.99,
    weight_decay: float = 0.0,
    factor: Number = 1.0,
    device: torch.device | str | None = None,
) -> Tensor:
    """The hyperparameters of one step, as :func:`lion_flat` takes them.

    Args:
        lr: learning rate, a number or a 0-d tensor.
        b1, b2, weight_decay: as in ``optim.lion``.
        factor: multiplies the gradients: clipping over loss scale, say.
        device: where the parameters are.

    Returns:
        ``float64[5]`` on ``device``, in the order of :data:`HYPER`.

    >>> lion_hyper(0.5)
    tensor([0.5000, 0.9000, 0.9900, 0.0000, 1.0000], dtype=torch.float64)
    """
    return hyper_tensor(lambda _: [lr, b1, b2, weight_decay, factor], (lr, factor), device)


def lion_flat(
    grad: Tensor, param: Tensor, mu: Tensor, hyper: Tensor, low: torch.dtype | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """One step of Lion in fresh memory.

    Args:
        grad: gradient, ``[n]``; bfloat16, float16 or float32.
        param: float32 master ``[n]``; float64 is taken by the twin.
        mu: momentum ``[n]``, of the dtype of ``param``.
        hyper: from :func:`lion_hyper`.
        low: dtype of a copy of the new parameters, such as ``torch.bfloat16``.

    Returns:
        ``(param, mu, copy)``; the copy is ``None`` without ``low``.

    Raises:
        KernelError: shapes, dtypes or devices differ, or gradients are being recorded.

    >>> p, g = torch.ones(2), torch.tensor([3.0, -2.0])
    >>> lion_flat(g, p, torch.zeros(2), lion_hyper(0.25))[0]
    tensor([0.7500, 1.2500])
    """
    UPDATE.undifferentiated(grad, param, mu, hyper)
    new = _lion(grad, param, mu, hyper, low)
    return new[0], new[1], new[2] if low is not None else None


def lion_flat_(
    grad: Tensor, param: Tensor, mu: Tensor, hyper: Tensor, low: Tensor | None = None
) -> None:
    """One step of Lion in the memory of ``param`` and ``mu``, which must be donated.

    Args:
        grad, param, mu, hyper: see :func:`lion_flat`; contiguous.
        low: a buffer ``[n]`` that receives the new parameters in its dtype.

    Raises:
        KernelError: as :func:`lion_flat`, or something is not contiguous, or what is written
            shares memory (an element may take the place of its own gradient).

    >>> p, g, m = torch.ones(2), torch.ones(2), torch.zeros(2)
    >>> lion_flat_(g, p, m, lion_hyper(0.25))
    >>> p
    tensor([0.7500, 0.7500])
    """
    UPDATE.undifferentiated(grad, param, mu, hyper)
    _lion_(grad, param, mu, low, hyper)


def twin(grad: Tensor, state: Buffers, new: Buffers, low: Tensor | None, *, hyper: Tensor) -> None:
    """The same in torch, a block that fits the cache at a time."""
    lr, b1, b2, weight_decay, factor = hyper.tolist()
    rooms: list[Tensor] = []
    for g, p, m in blocks(grad, state, new, low, factor):
        rooms = rooms or [torch.empty_like(g), torch.empty_like(g)]
        step, part = (room[: g.numel()] for room in rooms)
        torch.mul(m, b1, out=step)
        step.add_(torch.mul(g, 1 - b1, out=part)).sign_()
        p.mul_(1 - lr * weight_decay).sub_(step.mul_(lr))
        m.mul_(b2).add_(g.mul_(1 - b2))


dispatch.register("lion_flat", twin, "lion_triton", "20 B (bf16 gradient and copy, float32 state)")
