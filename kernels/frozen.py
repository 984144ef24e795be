r"""1-bit Adam with frozen second moments: momentum in units of their roots, and the step.

.. math::
    s = \sqrt{v / c} \qquad
    m' = \frac{\beta m + (1 - \beta)\, g}{s}

before momentum is compressed, and with the average of it, in units or not:

.. math::
    m' = s\, m \ \text{ or }\ m \qquad v' = \gamma v \qquad
    p' = \kappa\, p - \mathrm{clamp}\Bigl(\frac{\alpha\, m'}{s + \epsilon}, \pm\mu\Bigr)

An element whose second moment is 0 never had a gradient: its share and its move are 0. Without
units :math:`s` is the root of the new second moment, :math:`v'`; a frozen one without its bias is
the same before the step and after.

Source: Tang et al., 1-bit Adam: Communication Efficient Large-Scale Training with Adam's
Convergence Speed, 2021.

**Traffic**, bytes an element in float32: ``momentum_shares_`` 16 (g 4, m 4+4, v 4),
``adamw_frozen_`` 24 (p, m and v 4+4 each), or 20. The usual sequences of torch operations move
several times as much.

Each product, sum, quotient and root is rounded by itself, so that it does not matter how a tree is
cut or which code runs. A root is the inverse of ``1 / s``: that torch takes with the instruction of
the CPU, but ``sqrt`` from MKL, whose last bit hangs on the make of the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from zfunc.kernels import dispatch
from zfunc.kernels.flat_updates import Number, check_hyper, hyper_tensor
from zfunc.kernels.operators import (
    KernelError,
    Written,
    agree,
    alike,
    apart,
    contiguous,
    dense,
    numbers,
    operator,
    together,
    undifferentiated,
)
from zfunc.kernels.pieces_torch import element_pieces
from zfunc.trees.squares import wide

__all__ = ["adamw_frozen_", "frozen_hyper", "momentum_shares_", "roots", "shares_hyper"]

HYPER = ("rate", "grown", "correction", "most", "eps", "kept")
SHARES_HYPER = ("decay", "correction")
INSTEAD = "the formula in plain torch operations"


def shares_hyper(
    decay: float, correction: Number, device: torch.device | str | None = None
) -> Tensor:
    """The hyperparameters of :func:`momentum_shares_`.

    Args:
        decay: of the running mean.
        correction: of the bias of the second moments, a number or a 0-d tensor.
        device: where the moments are.

    Returns:
        ``float64[2]`` on ``device``.

    >>> shares_hyper(0.9, 0.5)
    tensor([0.9000, 0.5000], dtype=torch.float64)
    """
    return hyper_tensor(lambda fit: [decay, fit(correction)], (correction,), device)


def momentum_shares_(grad: Tensor, mu: Tensor, nu: Tensor, hyper: Tensor) -> None:
    """The running mean of gradients in units of roots of second moments, where the mean lies.

    Args:
        grad: gradient, of any shape; bfloat16, float16, float32 or float64.
        mu: the mean before, of that shape; contiguous; overwritten. float32 is computed by kernels,
            other dtypes, which are rounded before the division and after it, by the twin.
        nu: second moments, of that shape.
        hyper: from :func:`shares_hyper`.

    Raises:
        KernelError: shapes, dtypes or devices do not fit, ``mu`` shares memory with another, or
            gradients are being recorded.

    >>> mean = torch.tensor([2.0, 1.0])
    >>> momentum_shares_(torch.zeros(2), mean, torch.tensor([4.0, 0.0]), shares_hyper(0.5, 1.0))
    >>> mean
    tensor([0.5000, 0.0000])
    """
    undifferentiated("momentum_shares_", INSTEAD, grad, mu, nu, hyper)
    _momentum_shares_(grad, mu, nu, hyper)


def frozen_hyper(
    rate: Number,
    grown: Number,
    correction: Number,
    *,
    most: float,
    eps: float = 1e-8,
    kept: float = 1.0,
    device: torch.device | str | None = None,
) -> Tensor:
    """The hyperparameters of :func:`adamw_frozen_`.

    Args:
        rate: learning rate over the correction of the momentum's bias.
        grown: by how much second moments grow in this step, as their correction does.
        correction: of the bias of the second moments whose roots are taken.
        most: that an element may move, from 0.
        eps: added to the root.
        kept: what weight decay leaves of a parameter.
        device: where the parameters are.

    Returns:
        ``float64[6]`` on ``device``, in the order of :data:`HYPER`.

    Raises:
        KernelError: ``most`` is negative or NaN.

    >>> frozen_hyper(0.5, 1.0, 1.0, most=2.0)[:4]
    tensor([0.5000, 1.0000, 1.0000, 2.0000], dtype=torch.float64)
    """
    if not most >= 0:
        raise KernelError(f"kernels.frozen_hyper: most={most}; expected 0 or more.")
    given = (rate, grown, correction)
    return hyper_tensor(lambda fit: [*map(fit, given), most, eps, kept], given, device)


def adamw_frozen_(
    param: Tensor, mu: Tensor, nu: Tensor, hyper: Tensor, *, shares: bool = False
) -> None:
    """One step of AdamW with frozen second moments, where all of it lies.

    Args:
        param: parameters, of any shape; float32, or float64, which the twin takes.
        mu: the new momentum, of that shape and dtype; in units if ``shares``, then overwritten by
            what they stand for.
        nu: second moments, likewise; overwritten.
        hyper: from :func:`frozen_hyper`.
        shares: whether ``mu`` is in units, as from :func:`momentum_shares_`.

    Raises:
        KernelError: shapes, dtypes or devices do not fit, something is not contiguous or shares
            memory, or gradients are being recorded.

    >>> p, m, v = torch.ones(2), torch.tensor([1.0, 1.0]), torch.tensor([4.0, 0.0])
    >>> adamw_frozen_(p, m, v, frozen_hyper(0.5, 1.0, 1.0, most=1.0))
    >>> p
    tensor([0.7500, 1.0000])
    """
    undifferentiated("adamw_frozen_", INSTEAD, param, mu, nu, hyper)
    _adamw_frozen_(param, mu, nu, hyper, shares)


def _check_shares(grad: Tensor, mu: Tensor, nu: Tensor, hyper: Tensor) -> None:
    name = "momentum_shares_"
    agree(name, grad=grad, mu=mu, nu=nu)
    if not numbers(grad, mu, nu):
        raise KernelError(
            f"kernels.{name}: grad is {grad.dtype}, mu {mu.dtype}, nu {nu.dtype}; expected "
            "floating-point numbers of 16 bits or more."
        )
    dense(name, mu=mu)
    together(name, moments=mu, hyper=hyper)
    check_hyper(name, hyper, SHARES_HYPER)


def _check_adamw(param: Tensor, mu: Tensor, nu: Tensor, hyper: Tensor, shares: bool) -> None:
    name = "adamw_frozen_"
    alike(name, param=param, mu=mu, nu=nu)
    if param.dtype not in (torch.float32, torch.float64):
        raise KernelError(
            f"kernels.{name}: param is {param.dtype}; expected float32 or float64: in 16 bits "
            "second moments would not grow."
        )
    dense(name, param=param, mu=mu, nu=nu)
    together(name, moments=param, hyper=hyper)
    check_hyper(name, hyper, HYPER)


@operator(check=_check_shares)
def _momentum_shares_(grad: Tensor, mu: Written, nu: Tensor, hyper: Tensor) -> None:
    grad, nu, hyper = contiguous(grad, nu, hyper)
    for label, x in {"grad": grad, "nu": nu}.items():
        apart("momentum_shares_", mu=mu, **{label: x})
    dispatch.run("momentum_shares", grad, mu, nu, hyper=hyper)


@operator(check=_check_adamw)
def _adamw_frozen_(param: Written, mu: Written, nu: Written, hyper: Tensor, shares: bool) -> None:
    apart("adamw_frozen_", param=param, mu=mu, nu=nu)
    dispatch.run("adamw_frozen", param, mu, nu, hyper=hyper.contiguous(), shares=shares)


def roots(v: Tensor, correction: Number) -> Tensor:
    """The units: roots of second moments, their bias corrected; in float32 at least.

    >>> roots(torch.tensor([2.0]), 0.5)
    tensor([2.])
    """
    return (wide(v) / correction).rsqrt_().reciprocal_()


def shares_twin(grad: Tensor, mu: Tensor, nu: Tensor, *, hyper: Tensor) -> None:
    """The first in torch, a piece that fits the cache at a time."""
    decay, correction = _values(hyper)
    for g, m, v in _pieces(grad, mu, nu):
        mean = wide(m).mul_(decay).add_(wide(g) * (1 - decay))
        squares = torch.threshold_(wide(v) / correction, 0.0, math.inf)
        m.copy_(wide(mean.to(m.dtype)).mul_(squares.rsqrt_()))


def adamw_twin(param: Tensor, mu: Tensor, nu: Tensor, *, hyper: Tensor, shares: bool) -> None:
    """The second in torch, likewise."""
    rate, grown, correction, most, eps, kept = _values(hyper)
    for p, m, v in _pieces(param, mu, nu):
        if shares:
            size = roots(v, correction)
            m.mul_(size)
            v.mul_(grown)
        else:
            size = roots(v.mul_(grown), correction)
        below = torch.threshold_(size, 0.0, math.inf).add_(eps)
        move = (m * rate).div_(below).clamp_(-most, most)  # type: ignore[arg-type]
        p.mul_(kept).sub_(move)


def _pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    return element_pieces(*(x.view(1, x.numel()) for x in tensors))


def _values(hyper: Tensor) -> list[float] | tuple[Tensor, ...]:
    """Hyperparameters as they are read without waiting for a device."""
    return hyper.tolist() if hyper.device.type == "cpu" else hyper.unbind()


for _name, _twin, _traffic in (
    ("momentum_shares", shares_twin, "16 B (float32)"),
    ("adamw_frozen", adamw_twin, "24 B, or 20 B of momentum that is not in units (float32)"),
):
    dispatch.register(_name, _twin, "frozen_triton", _traffic, machine=dispatch.in_float32)
