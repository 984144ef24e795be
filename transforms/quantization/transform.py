"""``quantize``: low bits, in training and in inference.

Laws: :mod:`zfunc.transforms.quantization.moq` (training) and
:mod:`zfunc.transforms.quantization.low_bits` (inference).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from zfunc.engine.entries import Roles
from zfunc.engine.step import transform_of
from zfunc.quant.choice import Include, fixed
from zfunc.quant.fake import Grouping
from zfunc.quant.schedules import Rules
from zfunc.transforms.quantization.low_bits import low_bits
from zfunc.transforms.quantization.moq import MoQ

__all__ = ["quantize"]


@transform_of
def _train(
    start_bits: int = 16,
    target_bits: int = 8,
    period: int = 100,
    offset: int = 0,
    groups: int = 1,
    symmetric: bool = True,
    rounding: str = "nearest",
    curvature: str | None = None,
    group_size: int | None = None,
    mix_rate: float | None = None,
    include: Include = None,
    roles: Mapping[str, str] | None = None,
) -> MoQ:
    rules = Rules(start_bits, target_bits, period, offset, mix_rate)
    grouping = Grouping(groups, group_size, symmetric)
    return MoQ(rules, grouping, rounding, curvature, fixed(include), Roles.of(roles))


def quantize(
    fn: Callable[..., Any] | None = None, /, *, bits: int | None = None, **settings: Any
) -> Any:
    """Train a step into low bits, or run a function on low-bit parameters.

    ``quantize(step, start_bits=16, target_bits=8, ...)`` is a transform of training steps (MoQ):
    the loss sees rounded weights, with fewer and fewer bits, while the optimizer goes on with the
    unrounded ones. The schedule is part of the state, begun by ``place`` with ``start_bits`` and
    ``period``: a step with others refuses it. Everything else may change from step to step, like a
    learning rate. ``quantize(fn, bits=8, ...)``, whenever ``bits=`` is given, is inference:
    ``fn(params, ...)`` on parameters that ``.place(params)`` has stored in low bits. Both are
    decorators with keywords as well.

    Args:
        fn: the step, or the function of parameters.
        bits: 8 or 4, for inference.
        start_bits, target_bits: training: 16 rounds nothing; bits fall one at a time, and never
            rise where a later target lies higher.
        period: steps until the first bit falls; each further one takes twice as long.
        offset: steps before anything is rounded or counted.
        groups: how many scales each weight has (blocks of rows).
        group_size: weights of a row that share a scale; instead of ``groups`` in training;
            in inference 128, and None is one scale for each row.
        symmetric: whether 0 lies in the middle of the grid; scales of up to 4 bits are then those
            of least squared error (:mod:`zfunc.quant.scale_search`).
        rounding: ``"nearest"`` or ``"stochastic"``, by the state's key.
        curvature: ``"power_iteration"`` measures, when bits are about to fall, the top Hessian
            eigenvalue of each layer, and delays the sensitive layers' next bits.
        mix_rate: mix weights with their rounded form after each lost bit, less by this a step.
        include: which leaves: patterns of dotted paths, or a predicate on them. By default the
            matrices that are not named like embeddings, and for a functionalized module's
            ``apply`` the weights of its linear layers.
        roles: training: which entries of the state are ``"params"``, beside that of this name.
        dynamic: inference: products round their inputs to 8 bits too (W8A8).

    Returns:
        A :class:`~zfunc.Step`.

    Raises:
        ValueError: settings that mean nothing, such as a schedule that ends above its start.
        CompositionError: the step is quantised already.
        PlacementError: (from ``place``) ``include`` fits no leaf; the closest are named. (From the
            step) the schedule is of other weights, or began with other bits or another period.
        NonFiniteError: a weight is NaN or infinite.

    >>> import torch
    >>> fn = quantize(lambda params, x: x @ params["w"].t(), bits=8)
    >>> params = fn.place({"w": torch.tensor([[1.0, 127.0]])})
    >>> fn(params, torch.ones(1, 2))
    tensor([[128.]])
    """
    if bits is None:
        return _train(fn, **settings)
    wrap = low_bits(bits, **settings)
    return wrap if fn is None else wrap(fn)
