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

**The twin** is the CPU's way as well: blocks that stay in cache go through
``torch._fused_adamw_``, so memory is passed over once there too. Blocks, and where they are
cut, are multiples of 64 elements: a cut anywhere else would change last bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from zfunc.kernels import dispatch
from zfunc.kernels.operators import (
    KernelError,
    agree,
    apart,
    define,
    dense,
    folded,
    undifferentiated,
)

__all__ = ["HYPER", "adamw_flat", "adamw_flat_", "adamw_hyper"]

HYPER = ("lr", "b1", "b2", "eps", "weight_decay", "factor", "count", "scale1", "scale2")
BLOCK = 64
CHUNK = 1 << 18  # a float32 gradient of 1 MiB stays in the caches of today's CPUs

Number = float | Tensor
INSTEAD = "optim.adamw, whose update is made of plain torch operations"


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
    if not any(isinstance(x, Tensor) for x in (lr, count, factor)):
        scales = (1 / (1 - b1**count), (1 - b2**count) ** -0.5)
        row = [lr, b1, b2, eps, weight_decay, factor, count, *scales]
        return torch.tensor(row, dtype=torch.float64, device=device)

    def wide(x: Number) -> Tensor:
        return torch.as_tensor(x, dtype=torch.float64, device=device)

    t = wide(count)
    scales = (1 / (1 - b1**t), (1 - b2**t) ** -0.5)
    return torch.stack([wide(x) for x in (lr, b1, b2, eps, weight_decay, factor, t, *scales)])


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
    undifferentiated("adamw_flat", INSTEAD, grad, param, mu, nu, hyper)
    _check("adamw_flat", hyper, grad=grad, param=param, mu=mu, nu=nu)
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
        KernelError: as :func:`adamw_flat`, or something is not contiguous.

    >>> p, g, m, v = torch.ones(2), torch.ones(2), torch.zeros(2), torch.zeros(2)
    >>> adamw_flat_(g, p, m, v, adamw_hyper(0.1, 1, weight_decay=0.0))
    >>> p
    tensor([0.9000, 0.9000])
    """
    undifferentiated("adamw_flat_", INSTEAD, grad, param, mu, nu, hyper)
    _check("adamw_flat_", hyper, grad=grad, param=param, mu=mu, nu=nu)
    agree("adamw_flat_", param=param, low=low)
    dense("adamw_flat_", param=param, mu=mu, nu=nu, low=low)
    _adamw_(grad, param, mu, nu, low, hyper)


def _check(name: str, hyper: Tensor, **buffers: Tensor) -> None:
    agree(name, **buffers)
    state = {label: x.dtype for label, x in buffers.items() if label != "grad"}
    if len(set(state.values())) > 1:
        raise KernelError(
            f"kernels.{name}: {state}; expected one dtype for parameters and moments."
        )
    if hyper.shape != (len(HYPER),) or hyper.dtype != torch.float64:
        raise KernelError(
            f"kernels.{name}: hyper is {hyper.dtype}{list(hyper.shape)}; expected "
            f"float64[{len(HYPER)}]: make it with kernels.adamw_hyper."
        )


def _functional(
    grad: Tensor, param: Tensor, mu: Tensor, nu: Tensor, hyper: Tensor, low: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    new = _shapes(grad, param, mu, nu, hyper, low)
    old = [x.contiguous() for x in (grad, param, mu, nu)]
    dispatch.run("adamw_flat", *old, *new[:3], new[3] if low is not None else None, hyper=hyper)
    return new


def _shapes(
    grad: Tensor, param: Tensor, mu: Tensor, nu: Tensor, hyper: Tensor, low: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Fresh buffers for the results. Under ``vmap`` an absent copy still has the batch in front."""
    kind = torch.contiguous_format
    new = [torch.empty_like(x, memory_format=kind) for x in (param, mu, nu)]
    shape = param.shape if low is not None else (*param.shape[:-1], 0)
    return new[0], new[1], new[2], param.new_empty(shape, dtype=low)


def _inplace(
    grad: Tensor, param: Tensor, mu: Tensor, nu: Tensor, low: Tensor | None, hyper: Tensor
) -> None:
    apart("adamw_flat_", param=param, mu=mu, nu=nu, low=low)
    grad = grad.contiguous()
    dispatch.run("adamw_flat", grad, param, mu, nu, param, mu, nu, low, hyper=hyper)


_adamw: Callable[..., Any] = define(
    "adamw_flat(Tensor grad, Tensor param, Tensor mu, Tensor nu, Tensor hyper, ScalarType? low)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _functional,
    _shapes,
    folded(lambda: _adamw, 4),
)
_adamw_: Callable[..., Any] = define(
    "adamw_flat_(Tensor grad, Tensor(a!) param, Tensor(b!) mu, Tensor(c!) nu, Tensor(d!)? low,"
    " Tensor hyper) -> ()",
    _inplace,
    lambda *args: None,
)


def twin(
    grad: Tensor,
    param: Tensor,
    mu: Tensor,
    nu: Tensor,
    new_param: Tensor,
    new_mu: Tensor,
    new_nu: Tensor,
    low: Tensor | None,
    *,
    hyper: Tensor,
) -> None:
    """The same in torch, a block that fits the cache at a time."""
    knobs = dict(zip(HYPER, hyper.tolist(), strict=True))
    knobs["count"] = hyper[HYPER.index("count")].float()
    old = [x.view(-1) for x in (grad, param, mu, nu)]
    new = [x.view(-1) for x in (new_param, new_mu, new_nu)]
    n = param.numel()
    scratch = torch.empty(min(CHUNK, n + -n % BLOCK), dtype=param.dtype, device=param.device)
    whole = n - n % BLOCK
    for a in range(0, whole, CHUNK):
        b = min(a + CHUNK, whole)
        _update([x[a:b] for x in old], [x[a:b] for x in new], scratch[: b - a], knobs)
        if low is not None:
            low.view(-1)[a:b].copy_(new[0][a:b])
    if whole < n:  # the end, padded: the vectorised loop of torch rounds a remainder in another way
        padded = [torch.nn.functional.pad(x[whole:], (0, BLOCK - n % BLOCK)) for x in old]
        _update(padded, padded[1:], scratch[:BLOCK], knobs)
        for x, end in zip(new, padded[1:], strict=True):
            x[whole:].copy_(end[: n - whole])
        if low is not None:
            low.view(-1)[whole:].copy_(new[0][whole:])


def _update(old: list[Tensor], new: list[Tensor], scratch: Tensor, knobs: dict[str, Any]) -> None:
    for before, after in zip(old[1:], new, strict=True):
        if before.data_ptr() != after.data_ptr():
            after.copy_(before)
    scratch.copy_(old[0])
    if knobs["factor"] != 1:
        scratch.mul_(knobs["factor"])
    torch._fused_adamw_(
        new[:1],
        [scratch],
        new[1:2],
        new[2:],
        [],
        [knobs["count"]],
        lr=knobs["lr"],
        beta1=knobs["b1"],
        beta2=knobs["b2"],
        weight_decay=knobs["weight_decay"],
        eps=knobs["eps"],
        amsgrad=False,
        maximize=False,
    )


dispatch.register(
    dispatch.Kernel(
        "adamw_flat",
        twin,
        "zfunc.kernels.adamw_triton:launch",
        "28 B (bf16 gradient and copy, float32 state)",
        dtypes=dispatch.FLOATS,
    )
)
