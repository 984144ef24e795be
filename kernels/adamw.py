r"""AdamW over a flat shard: unscale, clip, moments, decay, step and 16-bit copy in one pass.

For each element, all of it in float32, with :math:`g \leftarrow c\,g` (:math:`c` unscales and
clips):

.. math::
    m' = m + (1 - \beta_1)(g - m) \qquad v' = \beta_2 v + (1 - \beta_2) g^2 \\
    p' = (1 - \eta\lambda)\,p - \frac{\eta}{1 - \beta_1^t} \,
         \frac{m'}{\sqrt{v'} / \sqrt{1 - \beta_2^t} + \epsilon}

Source: Loshchilov and Hutter, Decoupled Weight Decay Regularization, 2019.

**Traffic.** 28 bytes a parameter with a bfloat16 gradient and a bfloat16 copy: g 2, p 4+4,
m 4+4, v 4+4, copy 2. Some 25 operations a parameter: bound by memory anywhere. The usual
sequence (unscale; fused AdamW; cast) moves 42.

**Hyperparameters** are one float64 tensor on the device of the parameters: a new learning rate
compiles nothing and waits for nothing. Bias corrections are taken in float64, because
:math:`1 - 0.999` has only three digits in float32.

**The twin** takes blocks that stay in cache through ``torch._fused_adamw_``, so memory is passed
over once there too. Blocks, and where they are cut, are multiples of 64 elements: a cut anywhere
else would change last bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from zfunc.kernels import dispatch
from zfunc.kernels.flat_updates import Buffers, FlatUpdate, Number, blocks, hyper_tensor

__all__ = ["HYPER", "adamw_flat", "adamw_flat_", "adamw_hyper"]

HYPER = ("lr", "b1", "b2", "eps", "weight_decay", "factor", "count", "scale1", "scale2")
UPDATE = FlatUpdate(
    "adamw_flat",
    state=("param", "mu", "nu"),
    hyper=HYPER,
    instead="optim.adamw, whose update is made of plain torch operations",
)
_adamw, _adamw_ = UPDATE.define()


def adamw_hyper(
    lr: Number,
    count: Number,
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    factor: Number = 1.0,
    device: torch.device | str | None = None,
) -> Tensor:
    """The hyperparameters of one step, as :func:`adamw_flat` takes them.

    Args:
        lr: learning rate, a number or a 0-d tensor.
        count: number of this step, from 1; a number or a 0-d tensor.
        b1, b2, eps, weight_decay: as in ``optim.adamw``.
        factor: multiplies the gradients: clipping over loss scale, say.
        device: where the parameters are.

    Returns:
        ``float64[9]`` on ``device``, in the order of :data:`HYPER`. Nothing waits for the
        device, whether numbers or tensors come in.

    >>> adamw_hyper(0.1, 1, b1=0.5, b2=0.75)[-2:]  # what corrects the bias of m and sqrt(v)
    tensor([2., 2.], dtype=torch.float64)
    """

    def row(wide: Callable[[Number], Any]) -> list[Number]:
        t = wide(count)
        scales = (1 / (1 - b1**t), (1 - b2**t) ** -0.5)
        return [lr, b1, b2, eps, weight_decay, factor, count, *scales]

    return hyper_tensor(row, (lr, count, factor), device)


def adamw_flat(
    grad: Tensor,
    param: Tensor,
    mu: Tensor,
    nu: Tensor,
    hyper: Tensor,
    low: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """One step of AdamW in fresh memory.

    Args:
        grad: gradient, ``[n]``; bfloat16, float16 or float32 (float64 where all are).
        param: float32 master ``[n]``; float64 is taken by the twin.
        mu, nu: moments ``[n]``, of the dtype of ``param``.
        hyper: from :func:`adamw_hyper`.
        low: dtype of a copy of the new parameters, such as ``torch.bfloat16``.

    Returns:
        ``(param, mu, nu, copy)``; the copy is ``None`` without ``low``.

    Raises:
        KernelError: shapes, dtypes or devices differ, or gradients are being recorded.

    >>> p, g, zero = torch.ones(2), torch.tensor([1.0, -2.0]), torch.zeros(2)
    >>> hyper = adamw_hyper(0.1, 1, weight_decay=0.0)
    >>> adamw_flat(g, p, zero, zero, hyper)[0]
    tensor([0.9000, 1.1000])
    """
    UPDATE.undifferentiated(grad, param, mu, nu, hyper)
    new = _adamw(grad, param, mu, nu, hyper, low)
    return new[0], new[1], new[2], new[3] if low is not None else None


def adamw_flat_(
    grad: Tensor, param: Tensor, mu: Tensor, nu: Tensor, hyper: Tensor, low: Tensor | None = None
) -> None:
    """One step of AdamW in the memory of ``param``, ``mu`` and ``nu``, which must be donated.

    Args:
        grad, param, mu, nu, hyper: see :func:`adamw_flat`; contiguous.
        low: a buffer ``[n]`` that receives the new parameters in its dtype.

    Raises:
        KernelError: as :func:`adamw_flat`, or something is not contiguous, or what is written
            shares memory (an element may take the place of its own gradient).

    >>> p, g, m, v = torch.ones(2), torch.ones(2), torch.zeros(2), torch.zeros(2)
    >>> adamw_flat_(g, p, m, v, adamw_hyper(0.1, 1, weight_decay=0.0))
    >>> p
    tensor([0.9000, 0.9000])
    """
    UPDATE.undifferentiated(grad, param, mu, nu, hyper)
    _adamw_(grad, param, mu, nu, low, hyper)


def twin(grad: Tensor, state: Buffers, new: Buffers, low: Tensor | None, *, hyper: Tensor) -> None:
    """The same in torch, a block that fits the cache at a time."""
    lr, b1, b2, eps, decay, factor, *_ = hyper.tolist()
    count = hyper[HYPER.index("count")].float()
    how = {"lr": lr, "beta1": b1, "beta2": b2, "weight_decay": decay, "eps": eps}
    for g, p, m, v in blocks(grad, state, new, low, factor):
        torch._fused_adamw_([p], [g], [m], [v], [], [count], amsgrad=False, maximize=False, **how)


dispatch.register(
    "adamw_flat", twin, "adamw_triton", "28 B (bf16 gradient and copy, float32 state)"
)
