r"""Cross-entropy of logits, with label smoothing and a z-loss.

For a row of logits :math:`x` of V classes and the target class t, in float32, with
:math:`l = \log \sum_v e^{x_v}`:

.. math::
    L = l - (1 - \epsilon)\,x_t - \frac{\epsilon}{V} \sum_v x_v + \zeta\,l^2, \qquad
    \frac{\partial L}{\partial x_v} = (1 + 2 \zeta l)\,e^{x_v - l} - (1 - \epsilon)\,[v = t]
    - \frac{\epsilon}{V}

Rows whose target is ``ignore_index`` count for nothing.

Source: Szegedy et al., Rethinking the Inception Architecture, 2016 (smoothing); Chowdhery et al.,
PaLM, 2022 (z-loss); Milakov and Gimelshein, Online normalizer calculation for softmax, 2018.

**Traffic** a logit in 16 bits: 2 bytes forward, 4 backward. Some 8 operations each, one of them an
exponential: bound by memory. :mod:`zfunc.kernels.linear_losses` writes the gradient over the
logits in the launch that finds the loss: 6 bytes in all, or 4 where a row is still in the L2 cache.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from zfunc.kernels import dispatch
from zfunc.kernels.gradients import gradient
from zfunc.kernels.losses_torch import (
    Terms,
    backward_formula,
    backward_twin,
    forward_twin,
    grad_twin,
)
from zfunc.kernels.operators import (
    KernelError,
    folded,
    fresh,
    numbers,
    operator,
    together,
    wide,
)
from zfunc.kernels.rows import rows_of
from zfunc.kernels.tracing import in_graph
from zfunc.trees.kinds import kind

__all__ = ["cross_entropy"]

Reduction = Literal["mean", "sum", "none"]


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: Reduction = "mean",
) -> Tensor:
    """Cross-entropy of each row of logits with its target, in nats.

    Args:
        logits: ``[..., V]``, bfloat16, float16 or float32 (float64 is taken by the twin). There
            is no need to widen them: sums are in float32.
        target: ``[...]`` int64 classes, or ``ignore_index``.
        ignore_index: rows with this target are left out.
        label_smoothing: the share of the target that is spread over all classes.
        z_loss: weight of the squared log-sum of exponentials, which keeps logits small.
        reduction: ``"mean"`` over the rows that count (NaN if none does, as in torch), ``"sum"``
            or ``"none"``.

    Returns:
        float32 (float64 for float64), 0-d; ``[...]`` with ``"none"``.

    Raises:
        KernelError: shapes or dtypes do not fit, or on a CPU a target is no class (on a GPU
            its loss is NaN: a check would wait for the device).

    >>> cross_entropy(torch.zeros(2, 4), torch.tensor([1, -100]))
    tensor(1.3863)
    """
    check("cross_entropy", logits, target, label_smoothing, reduction)
    rule = (ignore_index, label_smoothing, z_loss)
    losses = CrossEntropy.apply(logits, target, *rule)[0]
    return reduced(losses, target, ignore_index, reduction)


def reduced(losses: Tensor, target: Tensor, ignore_index: int, reduction: str) -> Tensor:
    """Losses of rows, as one number if so wished."""
    if reduction == "none":
        return losses
    total = losses.sum()
    return total if reduction == "sum" else total / (target != ignore_index).sum()


def check(
    name: str, logits: Tensor, target: Tensor, smoothing: float, reduction: str, classes: int = 0
) -> None:
    """Refuse what has no cross-entropy.

    Raises:
        KernelError: shapes, dtypes, smoothing or reduction do not fit.
    """
    if reduction not in ("mean", "sum", "none"):
        raise KernelError(
            f'kernels.{name}: reduction={reduction!r}; expected "mean", "sum" or "none".'
        )
    if not 0 <= smoothing <= 1:
        raise KernelError(f"kernels.{name}: label_smoothing={smoothing}; expected 0 to 1.")
    fits = logits.dim() and logits.shape[:-1] == target.shape
    nothing = not classes and target.numel() and not logits.shape[-1:].numel()
    if not fits or nothing or not numbers(logits) or target.dtype != torch.int64:
        what = "x" if classes else "logits"
        raise KernelError(
            f"kernels.{name}: {what} is {logits.dtype}{list(logits.shape)}, target is "
            f"{target.dtype}{list(target.shape)}; expected floating-point numbers of 16 bits "
            f"or more [..., N], N at least 1, and int64 [...]."
        )
    together(name, **{"x" if classes else "logits": logits, "target": target})


def check_classes(name: str, target: Tensor, ignore: int, classes: int) -> None:
    """Refuse targets that are no class, where looking costs nothing: on a CPU.

    Raises:
        KernelError: there is such a target.
    """
    if kind(target.device) != "cpu":
        return
    wrong = (target != ignore) & ((target < 0) | (target >= classes))
    if wrong.any():
        raise KernelError(
            f"kernels.{name}: target {int(target[wrong][0])} is no class; expected 0 to "
            f"{classes - 1}, or ignore_index={ignore}."
        )


@in_graph
@dispatch.steady
class CrossEntropy(torch.autograd.Function):
    """``(losses, total)``: that is, for the backward, of each row the greatest logit and the sum of
    exponentials relative to it. (Their sum as a logarithm would be rounded where logits are great.)
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(logits: Tensor, target: Tensor, *rule: Any) -> Any:
        return _cross_entropy(logits, target, *rule)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        logits, target, *ctx.rule = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(logits, target, output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
        logits, target, total = ctx.saved_tensors
        args = (grad, logits, target, total, *ctx.rule)
        new = gradient(_cross_entropy_backward, backward_formula, *args)
        return new, None, None, None, None


def _rooms(logits: Tensor, target: Tensor, terms: Terms) -> tuple[Tensor, Tensor]:
    losses = logits.new_empty(target.shape, dtype=wide(logits))
    return losses, losses.new_empty((*target.shape, 2))


@operator(_rooms, batch=folded(2))
def _cross_entropy(logits: Tensor, target: Tensor, terms: Terms) -> tuple[Tensor, Tensor]:
    check_classes("cross_entropy", target, terms.ignore, logits.shape[-1])
    losses, total = _rooms(logits, target, terms)
    if target.numel():
        rooms = (losses.view(-1), total.view(-1, 2))
        goals = target.reshape(-1).contiguous()
        dispatch.run("cross_entropy", rows_of(logits), goals, *rooms, terms=terms)
    return losses, total


@operator(lambda grad, logits, *rest: fresh(logits), batch=folded(4))
def _cross_entropy_backward(
    grad: Tensor, logits: Tensor, target: Tensor, total: Tensor, terms: Terms
) -> Tensor:
    new = fresh(logits)
    if new.numel():
        grads, goals = (x.reshape(-1).contiguous() for x in (grad, target))
        args = (grads, rows_of(logits), goals, rows_of(total), new.view(-1, new.shape[-1]))
        dispatch.run("cross_entropy_backward", *args, terms=terms)
    return new


KINDS = (*dispatch.FLOATS, torch.int64)
for _name, _twin, _traffic in (
    ("cross_entropy", forward_twin, "2 B (bf16)"),
    ("cross_entropy_backward", backward_twin, "4 B (bf16)"),
    ("cross_entropy_grad", grad_twin, "6 B, 4 B with rows in L2 (bf16)"),
):
    dispatch.register(_name, _twin, "losses_triton", _traffic, dtypes=KINDS)
