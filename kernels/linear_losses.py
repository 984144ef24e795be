r"""Cross-entropy of ``x @ weight.T`` that never holds all the logits.

Rows are taken a chunk at a time: a product makes the chunk's logits, one launch turns them into
losses and, in the same memory, into their gradient, and two more products make of that the
gradients of ``x`` and of ``weight``. So the forward pass computes the gradients, nothing is
computed twice, and backward multiplies them by a number (in 16 bits that is one more rounding,
but for powers of two, which loss scales are). Losses, and the sum of the weight's gradient over
chunks, are in float32.

**Work** for M rows of H features and V classes: 6 M H V operations, three products; held are one
chunk of logits and the gradients, instead of logits of M V and their gradient. No step waits for
the device.

Source: the chunking is that of Liger Kernel (Hsu et al., 2024) and of Cut Your Losses (Wijmans et
al., 2024), the formula that of :mod:`zfunc.kernels.losses`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from zfunc.kernels import dispatch
from zfunc.kernels.losses import Reduction, check, check_classes, reduced
from zfunc.kernels.losses_torch import Terms
from zfunc.kernels.operators import KernelError, looped, operator, together, wide
from zfunc.kernels.tracing import in_graph
from zfunc.trees.kinds import kind

__all__ = ["check_product", "in_chunks", "linear_cross_entropy", "scale_of", "scaled"]

CHUNK_BYTES = 1 << 28  # of logits: 1024 rows of 128 thousand classes in 16 bits


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: Reduction = "mean",
    chunk: int | None = None,
) -> Tensor:
    """Cross-entropy of the logits ``x @ weight.T`` with targets, in nats.

    Args:
        x: ``[..., H]``, bfloat16, float16, float32 or float64, which autocast does not change.
        weight: ``[V, H]`` of the same dtype.
        target, ignore_index, label_smoothing, z_loss: see :func:`zfunc.kernels.cross_entropy`.
        reduction: ``"mean"`` or ``"sum"``; with ``"none"`` nothing can be differentiated, since
            the weight's gradient is summed over rows before theirs is known.
        chunk: rows at a time; by default as many as have 256 MiB of logits.

    Returns:
        0-d (``[...]`` with ``"none"``), float32 (float64 for float64). It has a first derivative
        under every transform; a second one is refused.

    Raises:
        KernelError: shapes or dtypes do not fit, ``reduction="none"`` while gradients are
            recorded, or on a CPU a target is no class.

    >>> x, weight = torch.zeros(2, 3, requires_grad=True), torch.eye(3)
    >>> loss = linear_cross_entropy(x, weight, torch.tensor([0, 2]))
    >>> loss, torch.autograd.grad(loss, x)[0]
    (tensor(1.0986, grad_fn=<...>), tensor([[-0.3333,  0.1667,  0.1667],
            [ 0.1667,  0.1667, -0.3333]]))
    """
    name = "linear_cross_entropy"
    check(name, x, target, label_smoothing, reduction, weight.shape[0])
    rule = (ignore_index, label_smoothing, z_loss, chunk or 0)
    grads = check_product(name, x, weight, reduction, chunk)
    loss: Tensor = LinearCrossEntropy.apply(x, weight, target, reduction, grads, *rule)[0]
    return loss


def check_product(name: str, x: Tensor, weight: Tensor, reduction: str, chunk: int | None) -> bool:
    """Whether gradients are wanted.

    Raises:
        KernelError: ``x`` and ``weight`` make no logits, there are no such chunks, or gradients
            would be wanted of what is not summed.
    """
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1] or weight.dtype != x.dtype:
        raise KernelError(
            f"kernels.{name}: weight is {weight.dtype}{list(weight.shape)}, x is "
            f"{x.dtype}{list(x.shape)}; expected one dtype and weight [V, {x.shape[-1]}]."
        )
    together(name, x=x, weight=weight)
    if chunk is not None and chunk < 1:
        raise KernelError(f"kernels.{name}: chunk={chunk}; expected rows, at least 1.")
    recorded = torch.is_grad_enabled()
    if reduction == "none" and recorded and (x.requires_grad or weight.requires_grad):
        raise KernelError(f"kernels.{name}: {_NONE}")
    return recorded and reduction != "none"


_NONE = (
    'reduction="none" cannot be differentiated; take "sum" or "mean", or apply the head by itself '
    "and use kernels.cross_entropy."
)
_SECOND = (
    "has a first derivative and no second one: its gradients are computed in the forward pass, so "
    "that the logits need not be kept. Where a second one is wanted, apply the head by itself and "
    "use kernels.cross_entropy."
)


@in_graph
class LinearCrossEntropy(torch.autograd.Function):
    """``(loss, its gradients)``; those are for the backward."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, weight: Tensor, target: Tensor, reduction: str, grads: bool, *rule: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        scale = scale_of(x, target, rule[0], reduction) if grads else None
        losses, dx, dw = _linear_cross_entropy(x, weight, target, scale, *rule)
        return reduced(losses, target, rule[0], reduction), dx, dw

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.grads = inputs[4]
        # The gradients are results like the loss: one that arrives for them is a second one.
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*output[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *second: Tensor | None) -> tuple[Any, ...]:
        parts = scaled("linear_cross_entropy", ctx.grads, ctx.saved_tensors, grad, second)
        return *parts, None, None, None, None, None, None, None


def scale_of(x: Tensor, target: Tensor, ignore: int, reduction: str) -> Tensor:
    """By what the gradient of each row's loss is multiplied."""
    scale = torch.ones((), dtype=wide(x), device=x.device)
    return scale / (target != ignore).sum() if reduction == "mean" else scale


def scaled(
    name: str,
    grads: bool,
    saved: Sequence[Tensor],
    grad: Tensor | None,
    second: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """The gradients that forward computed, times that of the loss.

    Raises:
        KernelError: there are none, or a second derivative is asked for.
    """
    if not grads:
        raise KernelError(f"kernels.{name}: {_NONE}")
    if any(x is not None for x in second):
        raise KernelError(f"kernels.{name} {_SECOND}")
    if grad is None:
        return [None] * len(saved)
    # Multiplied in its dtype; in that of a part it would be rounded.
    return [(x.to(grad.dtype) * grad).to(x.dtype) for x in saved]


def rows_of_a_chunk(rows: int, classes: int, itemsize: int) -> int:
    """As many as have :data:`CHUNK_BYTES` of logits, a multiple of 128 if not all."""
    fit = CHUNK_BYTES // max(1, classes * itemsize)
    return rows if rows <= fit else max(128, fit - fit % 128)


def _wide_product(a: Tensor, b: Tensor) -> Tensor:
    """A product of 16-bit matrices that is not rounded to 16 bits where that can be had."""
    if kind(a.device) != "cuda":
        return a.float() @ b.float()
    return a @ b if torch.version.hip else torch.mm(a, b, out_dtype=torch.float32)


def _rooms(
    x: Tensor, weight: Tensor, target: Tensor, scale: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    losses = x.new_empty(target.shape, dtype=wide(x))
    if scale is None:
        return losses, x.new_empty(0), x.new_empty(0)
    return losses, x.new_empty(x.shape), weight.new_empty(weight.shape)


@operator(_rooms, batch=looped)
def _linear_cross_entropy(
    x: Tensor, weight: Tensor, target: Tensor, scale: Tensor | None, terms: Terms, chunk: int
) -> tuple[Tensor, Tensor, Tensor]:
    # In the dtypes that came, also under autocast, which would round products in between.
    with torch.autocast(x.device.type, enabled=False):
        return _run(x, weight, target, scale, terms, chunk)


def _run(
    x: Tensor, weight: Tensor, target: Tensor, scale: Tensor | None, terms: Terms, chunk: int
) -> tuple[Tensor, Tensor, Tensor]:
    classes = weight.shape[0]
    check_classes("linear_cross_entropy", target, terms.ignore, classes)

    def run(logits: Tensor, goals: Tensor, sums: Tensor) -> None:
        if scale is None:
            room = sums.new_empty((len(logits), 2))
            dispatch.run("cross_entropy", logits, goals, sums, room, terms=terms)
        else:
            dispatch.run("cross_entropy_grad", logits, goals, scale, sums, terms=terms)

    return in_chunks(x, weight, target, scale is not None, classes, chunk, run)


def in_chunks(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    grads: bool,
    classes: int,
    chunk: int,
    run: Callable[[Tensor, Tensor, Tensor], None],
) -> tuple[Tensor, Tensor, Tensor]:
    """Losses of rows, and the gradients of ``x`` and ``weight``, if they are wanted.

    Args:
        x, weight, target: as :func:`linear_cross_entropy` has them.
        grads: whether gradients are wanted.
        classes: of so many a chunk holds logits.
        chunk: rows at a time; 0 for as many as :func:`rows_of_a_chunk` says.
        run: gets logits ``[n, V]``, targets and memory for losses ``[n]``, which it writes, and
            writes the gradient over the logits if it is wanted.
    """
    losses, dx, dw = _rooms(x, weight, target, x if grads else None)
    rows = x.reshape(target.numel(), x.shape[-1])
    goals, sums = target.reshape(-1).contiguous(), losses.view(-1)
    chunk = max(1, chunk or rows_of_a_chunk(len(rows), classes, x.element_size()))
    exact = x.dtype == wide(x) or chunk >= len(rows)  # sums of chunks need no wider dtype
    total = dw.zero_() if exact else torch.zeros_like(dw, dtype=wide(x))
    for part in (slice(a, a + chunk) for a in range(0, len(rows), chunk)):
        logits = rows[part] @ weight.t()
        run(logits, goals[part], sums[part])
        if not grads:
            continue
        torch.mm(logits, weight, out=dx.view(rows.shape)[part])
        if exact:
            total.addmm_(logits.t(), rows[part])
        else:
            total += _wide_product(logits.t(), rows[part])
    if grads and not exact:
        dw.copy_(total)
    return losses, dx, dw
