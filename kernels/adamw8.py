r"""AdamW over a flat shard with moments of 8 bits: less than half the traffic.

The step is that of :mod:`zfunc.kernels.adamw`. Between steps each group of 128 neighbours keeps
its greatest :math:`|m|` and :math:`\sqrt v` in float32, and of each element a byte,

.. math::
    m = s_m \frac{q|q|}{127^2} \qquad \sqrt v = s_v \frac{q^2}{255^2}

The square makes codes dense near zero: within a group :math:`\sqrt v` spans five decimal digits,
and one that is not 0 never becomes 0, or the next quotient would explode. Arithmetic does it, no
table: for gradients whose sizes are spread log-normally in a group (by a factor of e) steps are
within 9 % of those with float32 moments; linear codes of :math:`\sqrt v` and softsign codes of
:math:`m` leave 20 %. The greatest of each group is exact, and as it decays the whole grid does.

Source: Dettmers et al., 8-bit Optimizers via Block-wise Quantization, 2022 (block-wise scales);
Loshchilov and Hutter, Decoupled Weight Decay Regularization, 2019.

**Parameters** are a float32 master, with a 16-bit copy if wanted, or 24 bits: bfloat16, which the
model uses as it is, and an int8 ``tail`` of what rounding took away:
``bits24 = 256 * bfloat16 bits + tail``, to nearest.

**Traffic** a parameter: 12.1 bytes with a bfloat16 gradient and 24-bit parameters (g 2, p 2+2,
tail 1+1, m 1+1, v 1+1, scales 1/8), 16.1 with a float32 master and a copy, where ``adamw_flat``
moves 28. A NaN or an infinity makes the moments of its whole group NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zfunc.kernels import dispatch
from zfunc.kernels.adamw import HYPER
from zfunc.kernels.flat_updates import Buffers, FlatUpdate, check_hyper
from zfunc.kernels.operators import BatchRule, KernelError, agree, looped, numbers, together

__all__ = ["GROUP", "Moments8", "adamw8_flat", "adamw8_flat_", "moments8", "split24", "whole24"]

GROUP = 128
CHUNK = 1 << 16  # elements whose float32 scratch stays in a core's cache
SMALLEST = 2.0**-100  # a group whose greatest is below has nothing to divide by


class Moments8(NamedTuple):
    """The moments of ``n`` parameters: ``mu`` int8 ``[n]``, ``nu`` uint8 ``[n]``, and ``scales``
    float32 ``[ceil(n / 128), 2]`` of ``mu`` and of the root of ``nu``."""

    mu: Tensor
    nu: Tensor
    scales: Tensor


class _Update(FlatUpdate):
    """Moments in bytes go group by group, and bfloat16 parameters with a tail."""

    def rule(self) -> BatchRule:
        return looped

    def fits(
        self, grad: Tensor, state: Sequence[Any], hyper: Tensor, low: torch.dtype | None
    ) -> None:
        param, tail, mu, nu, scales = state
        agree(self.name, grad=grad, param=param, tail=tail, mu=mu, nu=nu)
        wanted = [torch.float32] if tail is None else [torch.bfloat16, torch.int8]
        wanted += [torch.int8, torch.uint8, torch.float32]
        found = [x.dtype for x in state if x is not None]
        if param.dim() != 1 or found != wanted:
            raise KernelError(
                f"kernels.{self.name}: param, tail, mu, nu, scales are {found} with param of "
                f"{param.dim()} dimensions; expected flat buffers of {wanted}: float32 parameters "
                "alone, or bfloat16 ones with the tail of kernels.split24, and moments from "
                "kernels.moments8."
            )
        if not numbers(grad):
            raise KernelError(
                f"kernels.{self.name}: grad is {grad.dtype}; expected floating-point numbers of "
                "16 bits or more."
            )
        together(self.name, param=param, scales=scales)
        if scales.shape != (groups := -(-param.numel() // GROUP), 2):
            raise KernelError(
                f"kernels.{self.name}: scales are {tuple(scales.shape)}; expected {(groups, 2)} "
                f"for {param.numel()} parameters."
            )
        check_hyper(self.name, hyper, HYPER)
        if tail is not None and low is not None:
            raise KernelError(
                f"kernels.{self.name}: low is the copy of a float32 master; bfloat16 parameters "
                "with a tail are their own copy: leave low out."
            )


UPDATE = _Update(
    "adamw8_flat",
    state=("param", "tail?", "mu", "nu", "scales"),
    hyper=HYPER,
    instead="optim.adamw, whose update is made of plain torch operations",
)
_adamw8, _adamw8_ = UPDATE.define()


def moments8(n: int, device: torch.device | str | None = None) -> Moments8:
    """Moments of nothing seen yet.

    >>> sum(x.nbytes for x in moments8(1024))  # two bytes a parameter, and eight a group
    2112
    """
    return Moments8(
        torch.zeros(n, dtype=torch.int8, device=device),
        torch.zeros(n, dtype=torch.uint8, device=device),
        torch.zeros(-(-n // GROUP), 2, device=device),
    )


def split24(x: Tensor) -> tuple[Tensor, Tensor]:
    """Float32 numbers as bfloat16 and an int8 tail: 24 bits, to nearest.

    >>> p, tail = split24(torch.tensor([1.0, 0.1]))
    >>> p, tail
    (tensor([1.0000, 0.1001], dtype=torch.bfloat16), tensor([  0, -51], dtype=torch.int8))
    >>> whole24(p, tail)
    tensor([1.0000, 0.1000])
    """
    bits = torch.where(x == x, x.float().contiguous().view(torch.int32), 0x7FC00000)
    t = (bits + 0x7F + ((bits >> 8) & 1)) >> 8
    high = (t + 128) >> 8
    return high.to(torch.int16).view(torch.bfloat16), (t - (high << 8)).to(torch.int8)


def whole24(p: Tensor, tail: Tensor) -> Tensor:
    """The float32 numbers that :func:`split24` took apart."""
    high = p.contiguous().view(torch.int16).to(torch.int32) << 16
    return (high + (tail.to(torch.int32) << 8)).view(torch.float32)


def adamw8_flat(
    grad: Tensor,
    param: Tensor,
    moments: Moments8,
    hyper: Tensor,
    *,
    tail: Tensor | None = None,
    low: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None, Moments8, Tensor | None]:
    """One step of AdamW in fresh memory.

    Args:
        grad: gradient, ``[n]``; bfloat16, float16 or float32.
        param: ``[n]``; a float32 master, or bfloat16 with a ``tail``.
        moments: from :func:`moments8` or the step before.
        hyper: from :func:`~zfunc.kernels.adamw_hyper`.
        tail: int8 ``[n]``, from :func:`split24`.
        low: dtype of a copy of a float32 master.

    Returns:
        ``(param, tail, moments, copy)``; ``None`` for what was not given or asked for.

    Raises:
        KernelError: shapes, dtypes or devices are not these, or gradients are being recorded.

    >>> from zfunc.kernels import adamw_hyper
    >>> p, g = torch.ones(2), torch.tensor([1.0, -2.0])
    >>> adamw8_flat(g, p, moments8(2), adamw_hyper(0.1, 1, weight_decay=0.0))[0]
    tensor([0.9000, 1.1000])
    """
    UPDATE.undifferentiated(grad, param, hyper)
    new = _adamw8(grad, param, tail, *moments, hyper, low)
    p, t, *after, copy = new
    return p, t if tail is not None else None, Moments8(*after), copy if low is not None else None


def adamw8_flat_(
    grad: Tensor,
    param: Tensor,
    moments: Moments8,
    hyper: Tensor,
    *,
    tail: Tensor | None = None,
    low: Tensor | None = None,
) -> None:
    """One step of AdamW in the memory of ``param``, ``tail`` and ``moments``, which are donated.

    Args:
        grad, param, moments, hyper, tail: see :func:`adamw8_flat`; contiguous.
        low: a buffer ``[n]`` that receives the new parameters in its dtype.

    Raises:
        KernelError: as :func:`adamw8_flat`, or something is not contiguous.

    >>> from zfunc.kernels import adamw_hyper
    >>> p, tail = split24(torch.ones(2))
    >>> state = moments8(2)
    >>> adamw8_flat_(torch.ones(2), p, state, adamw_hyper(0.1, 1, weight_decay=0.0), tail=tail)
    >>> whole24(p, tail), state.mu
    (tensor([0.9000, 0.9000]), tensor([127, 127], dtype=torch.int8))
    """
    UPDATE.undifferentiated(grad, param, hyper)
    _adamw8_(grad, param, tail, *moments, low, hyper)


def twin(grad: Tensor, state: Buffers, new: Buffers, low: Tensor | None, *, hyper: Tensor) -> None:
    """The same in torch, a block of whole groups that fits the cache at a time."""
    param, tail, mu, nu, scales = state
    new_param, new_tail, new_mu, new_nu, new_scales = new
    knobs = dict(zip(HYPER, hyper.tolist(), strict=True))
    n = param.numel()
    for a in range(0, n, CHUNK):
        at = slice(a, min(a + CHUNK, n))
        groups = slice(a // GROUP, -(-at.stop // GROUP))
        tails = None if tail is None else tail[at]
        p = param[at].float() if tails is None else whole24(param[at], tails)
        g = grad[at].float() * knobs["factor"]
        m, r = _moments(mu[at], nu[at], scales[groups])
        m = m.mul_(knobs["b1"]).add_(g * (1 - knobs["b1"]))
        v = r.mul_(r).mul_(knobs["b2"]).add_(g.mul_(g).mul_(1 - knobs["b2"]))
        r = v.sqrt_()
        below = (r * knobs["scale2"]).add_(knobs["eps"])
        step = (m * (knobs["lr"] * knobs["scale1"])).div_(below)
        p = (p * (1 - knobs["lr"] * knobs["weight_decay"])).sub_(step)
        new_mu[at], new_nu[at], new_scales[groups] = _codes(m, r)
        if new_tail is not None:
            new_param[at], new_tail[at] = split24(p)
        else:
            new_param[at] = p
        if low is not None:
            low[at] = p


def _moments(mu: Tensor, nu: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """``m`` and the root of ``v``."""
    m, r = _rows(mu.float()), _rows(nu.float())
    m = m.mul_(m.abs()).mul_(scales[:, :1] * (1 / 127**2))
    r = r.mul_(r).mul_(scales[:, 1:] * (1 / 255**2))
    return m.view(-1)[: len(mu)], r.view(-1)[: len(nu)]


def _codes(m: Tensor, r: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Bytes and scales of ``m`` and the root of ``v``."""
    n, m, r = len(m), _rows(m), _rows(r)
    size = m.abs()
    scales = torch.stack([size.amax(1), r.amax(1)], 1)
    usable = (scales > SMALLEST) & (scales < torch.inf)
    tops = scales.new_tensor([127.0**2, 255.0**2])
    inverse = torch.where(usable, tops / scales, 0)
    y = torch.where(usable[:, :1], (size * inverse[:, :1]).sqrt_(), 0).copysign_(m)
    z = torch.where(usable[:, 1:], (r * inverse[:, 1:]).sqrt_(), 0)
    z = torch.where(z > 0, z.clamp_min(1), z)
    codes = y.round_().to(torch.int8), z.round_().to(torch.uint8)
    return codes[0].view(-1)[:n], codes[1].view(-1)[:n], scales


def _rows(x: Tensor) -> Tensor:
    """``[groups, 128]``, the end filled with zeros."""
    return torch.nn.functional.pad(x, (0, -len(x) % GROUP)).view(-1, GROUP)


dispatch.register(
    "adamw8_flat",
    twin,
    "adamw8_triton",
    "12.1 B (bf16 gradient, 24-bit parameters, 8-bit moments)",
    dtypes=dispatch.NUMBERS,
)
