r"""LAMB over a flat shard that holds many tensors, in two passes.

For each tensor (a *segment* of the buffer), in float32, with :math:`g \leftarrow c\,g`:

.. math::
    m' = m + (1 - \beta_1)(g - m) \qquad v' = \beta_2 v + (1 - \beta_2) g^2 \qquad
    u = \frac{m' / (1 - \beta_1^t)}{\sqrt{v' / (1 - \beta_2^t)} + \epsilon} + \lambda p
    \qquad p' = p - \eta \frac{\lVert p \rVert}{\lVert u \rVert} u

with a ratio of 1 where either norm is 0.

Source: You et al., Large Batch Optimization for Deep Learning: Training BERT in 76 minutes, 2020.

``lamb_moments_`` renews the moments and returns the squares of both norms for each segment.
Where a tensor is spread over ranks, they are summed over the ranks here. ``lamb_apply_`` makes the
step out of the moments again, which is cheaper than to have kept it.

**Traffic** a parameter: 22 bytes (g 2, p 4, m 4+4, v 4+4), then 18 (p 4+4, m 4, v 4, copy 2), in
three launches for any number of tensors. Sums run in a fixed order: the same bits every time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from zfunc.kernels import dispatch
from zfunc.kernels.adamw import HYPER, adamw_hyper
from zfunc.kernels.operators import (
    KernelError,
    Written,
    agree,
    apart,
    contiguous,
    copies,
    dense,
    numbers,
    operator,
    together,
    undifferentiated,
)

__all__ = ["lamb_apply_", "lamb_hyper", "lamb_moments_", "lamb_ratios"]

CHUNK = 1 << 18
INSTEAD = "optim.lamb, whose update is made of plain torch operations"

Segments = Sequence[tuple[int, int]]

lamb_hyper = adamw_hyper  # the same numbers; LAMB's customary eps is 1e-6


class LambStep(NamedTuple):
    """Where each segment begins and ends, and the hyperparameters."""

    starts: list[int]
    stops: list[int]
    hyper: Tensor


def lamb_moments_(
    grad: Tensor, param: Tensor, mu: Tensor, nu: Tensor, segments: Segments, hyper: Tensor
) -> Tensor:
    """The first pass: new moments where the old ones lie, and the squares of the norms.

    Args:
        grad: gradient, ``[n]``; bfloat16, float16 or float32.
        param: ``[n]``; float64 is taken by the twin.
        mu, nu: moments ``[n]``, of the dtype of ``param``; contiguous.
        segments: where each tensor begins and ends. They may not overlap; what is in
            none of them is left alone.
        hyper: from :func:`lamb_hyper`.

    Returns:
        ``[segments, 2]`` in float32 at least: the sums of :math:`p^2` and :math:`u^2`.

    Raises:
        KernelError: shapes, dtypes or devices differ, segments overlap or do not lie in the
            buffer, or gradients are being recorded.

    >>> p, g, m, v = torch.tensor([3.0, 4.0]), torch.ones(2), torch.zeros(2), torch.zeros(2)
    >>> hyper = lamb_hyper(0.1, 1, eps=0.0, weight_decay=0.0)
    >>> lamb_moments_(g, p, m, v, [(0, 2)], hyper)
    tensor([[25.,  2.]])
    """
    undifferentiated("lamb_moments_", INSTEAD, grad, param, mu, nu, hyper)
    return _lamb_moments_(grad, param, mu, nu, *_step(segments, hyper))


def lamb_ratios(squares: Tensor) -> Tensor:
    """The trust ratio of each segment, ``|p| / |u|``; 1 where either is 0.

    Args:
        squares: ``[segments, 2]`` from :func:`lamb_moments_`, summed over ranks.

    >>> lamb_ratios(torch.tensor([[25.0, 4.0], [0.0, 4.0]]))
    tensor([2.5000, 1.0000])
    """
    p, u = squares.sqrt().unbind(-1)
    return torch.where((p > 0) & (u > 0), p / u, torch.ones_like(u))


def lamb_apply_(
    param: Tensor,
    mu: Tensor,
    nu: Tensor,
    segments: Segments,
    ratios: Tensor,
    hyper: Tensor,
    low: Tensor | None = None,
) -> None:
    """The second pass: the step, where the parameters lie.

    Args:
        param, mu, nu, segments, hyper: as :func:`lamb_moments_` left them.
        ratios: ``[segments]``, from :func:`lamb_ratios`.
        low: a buffer ``[n]`` that receives the new parameters in its dtype.

    Raises:
        KernelError: as :func:`lamb_moments_`.

    >>> p, m, v = torch.tensor([3.0, 4.0]), torch.full((2,), 0.1), torch.full((2,), 0.001)
    >>> hyper = lamb_hyper(0.1, 1, eps=0.0, weight_decay=0.0)
    >>> lamb_apply_(p, m, v, [(0, 2)], torch.tensor([2.0]), hyper)
    >>> p
    tensor([2.8000, 3.8000])
    """
    undifferentiated("lamb_apply_", INSTEAD, param, mu, nu, hyper)
    _lamb_apply_(param, mu, nu, low, ratios, *_step(segments, hyper))


def _check_moments(grad: Tensor, param: Tensor, mu: Tensor, nu: Tensor, step: LambStep) -> None:
    name = "lamb_moments_"
    _check(name, step, grad=grad, param=param, mu=mu, nu=nu)
    dense(name, mu=mu, nu=nu)


def _check_apply(
    param: Tensor, mu: Tensor, nu: Tensor, low: Tensor | None, ratios: Tensor, step: LambStep
) -> None:
    name = "lamb_apply_"
    _check(name, step, param=param, mu=mu, nu=nu)
    agree(name, param=param, low=low)
    copies(name, low)
    together(name, param=param, ratios=ratios)
    dense(name, param=param, low=low)
    if ratios.shape != (len(step.starts),) or not numbers(ratios):
        raise KernelError(
            f"kernels.{name}: ratios are {ratios.dtype}{list(ratios.shape)}; expected one "
            f"floating-point number for each of the {len(step.starts)} segments."
        )


def _check(name: str, step: LambStep, **buffers: Tensor) -> None:
    starts, stops, hyper = step
    agree(name, **buffers)
    if not numbers(*buffers.values()) or buffers["param"].dim() != 1:
        found = {label: f"{x.dtype}{list(x.shape)}" for label, x in buffers.items()}
        raise KernelError(
            f"kernels.{name}: {found}; expected flat buffers of floating-point numbers of 16 bits "
            "or more."
        )
    dtypes = {label: x.dtype for label, x in buffers.items() if label != "grad"}
    if len(set(dtypes.values())) > 1:
        raise KernelError(
            f"kernels.{name}: {dtypes}; expected one dtype of parameters and moments."
        )
    if hyper.shape != (len(HYPER),) or hyper.dtype != torch.float64:
        raise KernelError(
            f"kernels.{name}: hyper is {hyper.dtype}{list(hyper.shape)}; expected "
            f"float64[{len(HYPER)}]: make it with kernels.lamb_hyper."
        )
    if len(starts) != len(stops):
        raise KernelError(
            f"kernels.{name}: {len(starts)} segments begin and {len(stops)} end; expected one "
            "end for each."
        )
    (n,) = buffers["param"].shape
    end = 0
    for start, stop in sorted(zip(starts, stops, strict=True)):
        if not end <= start <= stop <= n:
            raise KernelError(
                f"kernels.{name}: segment ({start}, {stop}) overlaps another or leaves the buffer "
                f"of {n}; expected disjoint ranges of it."
            )
        end = stop


def _wide(x: Tensor) -> torch.dtype:
    """In what is computed: squares of 16-bit numbers would neither fit nor add up."""
    return torch.promote_types(x.dtype, torch.float32)


def _step(segments: Segments, hyper: Tensor) -> LambStep:
    return LambStep([start for start, _ in segments], [stop for _, stop in segments], hyper)


@operator(
    lambda grad, param, mu, nu, step: param.new_empty(len(step.starts), 2, dtype=_wide(param)),
    check=_check_moments,
)
def _lamb_moments_(grad: Tensor, param: Tensor, mu: Written, nu: Written, step: LambStep) -> Tensor:
    grad, param = grad.contiguous(), param.contiguous()
    apart("lamb_moments_", grad=grad, mu=mu, nu=nu)
    apart("lamb_moments_", param=param, mu=mu, nu=nu)
    squares = torch.zeros(len(step.starts), 2, dtype=_wide(param), device=param.device)
    dispatch.run("lamb_moments", grad, param, mu, nu, squares, step=step)
    return squares


@operator(check=_check_apply)
def _lamb_apply_(
    param: Written, mu: Tensor, nu: Tensor, low: Written | None, ratios: Tensor, step: LambStep
) -> None:
    mu, nu, ratios = contiguous(mu, nu, ratios)
    for label, x in {"mu": mu, "nu": nu, "ratios": ratios}.items():
        apart("lamb_apply_", param=param, low=low, **{label: x})
    dispatch.run("lamb_apply", param, mu, nu, low, ratios, step=step)


def moments_twin(
    grad: Tensor, param: Tensor, mu: Tensor, nu: Tensor, squares: Tensor, *, step: LambStep
) -> None:
    """The first pass in torch, a block that fits the cache at a time."""
    knobs = dict(zip(HYPER, step.hyper.tolist(), strict=True))
    for i, a, b in _blocks(step):
        g, p, m, v = (x[a:b].to(squares.dtype) for x in (grad, param, mu, nu))
        if knobs["factor"] != 1:
            g = g * knobs["factor"]
        m.mul_(knobs["b1"]).add_(g, alpha=1 - knobs["b1"])
        v.mul_(knobs["b2"]).addcmul_(g, g, value=1 - knobs["b2"])
        if mu.dtype != m.dtype:  # otherwise they are views
            mu[a:b].copy_(m)
            nu[a:b].copy_(v)
        u = _direction(p, m, v, knobs)
        squares[i, 0] += torch.dot(p, p)
        squares[i, 1] += torch.dot(u, u)


def apply_twin(
    param: Tensor, mu: Tensor, nu: Tensor, low: Tensor | None, ratios: Tensor, *, step: LambStep
) -> None:
    """The second pass in torch, a block that fits the cache at a time."""
    knobs = dict(zip(HYPER, step.hyper.tolist(), strict=True))
    for i, a, b in _blocks(step):
        p, m, v = (x[a:b].to(_wide(param)) for x in (param, mu, nu))
        p.sub_(_direction(p, m, v, knobs).mul_(ratios[i] * knobs["lr"]))
        if param.dtype != p.dtype:  # otherwise it is a view
            param[a:b].copy_(p)
        if low is not None:
            low[a:b].copy_(p)


def _direction(p: Tensor, m: Tensor, v: Tensor, knobs: dict[str, float]) -> Tensor:
    """``u`` of the formula."""
    below = v.sqrt().mul_(knobs["scale2"]).add_(knobs["eps"])
    u = (m * knobs["scale1"]).div_(below)
    return u.add_(p, alpha=knobs["weight_decay"]) if knobs["weight_decay"] else u


def _blocks(step: LambStep) -> list[tuple[int, int, int]]:
    pairs = enumerate(zip(step.starts, step.stops, strict=True))
    return [(i, a, min(a + CHUNK, stop)) for i, (x, stop) in pairs for a in range(x, stop, CHUNK)]


dispatch.register(
    "lamb_moments", moments_twin, "lamb_triton", "22 B (bf16 gradient, float32 state)"
)
dispatch.register("lamb_apply", apply_twin, "lamb_triton", "18 B (bf16 copy, float32 state)")
