r"""``cross_entropy``: of logits of which each rank has some classes.

Each rank sends three numbers a row: its greatest logit, the sum of exponentials relative to it, and
the target's logit where it has that one; with label smoothing also the sum of its logits. From
these all ranks compute the same loss, and each one the gradient of its own logits, by the formula
of :mod:`zfunc.kernels.losses`.

With ``head`` the logits are made a chunk of rows at a time, and forward computes the gradients,
as in :mod:`zfunc.kernels.linear_losses`: one all-gather a chunk, and in backward one all-reduce of
the size of ``x``.

Source: Shoeybi et al., Megatron-LM, 2019, section 3 (the fused cross-entropy); there are three
all-reduces in it, here is one all-gather.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from zfunc.errors import PlacementError
from zfunc.kernels import linear_losses, losses
from zfunc.kernels.losses import Reduction
from zfunc.kernels.losses_torch import Terms
from zfunc.kernels.operators import KernelError, fresh, wide
from zfunc.kernels.pieces_torch import row_pieces
from zfunc.layout.splits import Part, Split
from zfunc.operators.parts import found, refused, splits_now
from zfunc.operators.stream import counted_once, gathered_stream, is_cut
from zfunc.operators.vocabulary import local_indices
from zfunc.ranks.comm import Group
from zfunc.trees.marks import part_of

__all__ = ["cross_entropy"]

LABEL = "tensor loss"


def cross_entropy(
    x: Tensor,
    target: Tensor,
    *,
    head: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: Reduction = "mean",
    chunk: int | None = None,
) -> Tensor:
    """Cross-entropy with targets, in nats, where each rank has some of the classes.

    Args:
        x: without ``head`` the logits ``[..., vocab / T]`` that ``zf.column`` gave: that very
            tensor, since a slice or a cast of it does not know of which classes it is. Slice what
            goes into the column instead. With ``head`` what goes into it, ``[..., H]``, and
            under ``zf.split(sequence=True)`` this rank's positions of that.
        target: ``[...]`` int64 classes of the full vocabulary, or ``ignore_index``.
        head: ``[vocab / T, H]``, split along dimension 0, or a whole leaf: the logits are
            ``x @ head.T``, and never held all at once.
        ignore_index, label_smoothing, z_loss, reduction: see :func:`zfunc.kernels.cross_entropy`,
            and with ``head`` :func:`zfunc.kernels.linear_cross_entropy`, which they are for on
            one rank, and for logits and heads that are whole.
        chunk: with ``head``, rows at a time; by default as many as have 256 MiB of logits.

    Returns:
        0-d (``[...]`` with ``"none"``), float32 (float64 for float64), the same bits on all ranks.
        Where classes are in parts it has a first derivative, and no second one.

    Raises:
        KernelError: shapes or dtypes do not fit, or on a CPU a target is no class (on a GPU
            its loss is NaN).
        PlacementError: the logits, or the head, do not say of which classes they are, or are split
            in another way.

    >>> cross_entropy(torch.zeros(2, 4), torch.tensor([1, -100]))
    tensor(1.3863)
    """
    terms = Terms(ignore_index, label_smoothing, z_loss)
    if head is None:
        if chunk is not None:
            raise KernelError(f"zf.cross_entropy: chunk={chunk} is for logits that head= makes.")
        return _of_logits(x, target, terms, reduction)
    return _of_head(x, head, target, terms, reduction, chunk)


def _of_logits(logits: Tensor, target: Tensor, terms: Terms, reduction: Reduction) -> Tensor:
    part = part_of(logits)
    if part is None and splits_now():
        raise PlacementError(
            f"zf.cross_entropy: logits {list(logits.shape)} do not say of which classes they are, "
            "and this step splits its leaves. Give what zf.column returned, and slice or cast what "
            "goes into it: column(x[:, :-1], head); or cross_entropy(x, target, head=head)."
        )
    if part is None or part.split is None or part.group.size == 1:
        return losses.cross_entropy(logits, target, reduction=reduction, **_named(terms))
    split = part.split
    _check_split(logits, "logits", part, logits.dim() - 1)
    losses.check(NAME, logits, target, terms.smoothing, reduction, split.size)
    losses.check_classes(NAME, target, terms.ignore, split.size)
    rows: Tensor = SplitCrossEntropy.apply(logits, target, Classes(part.group, split, terms))[0]
    return counted_once(losses.reduced(rows, target, terms.ignore, reduction), part.group)


def _of_head(
    x: Tensor, head: Tensor, target: Tensor, terms: Terms, reduction: Reduction, chunk: int | None
) -> Tensor:
    part = found(NAME, head, "head")
    if part is None or part.split is None:
        if part is not None and is_cut():
            x = gathered_stream(x, part.group)
        return linear_losses.linear_cross_entropy(
            x, head, target, reduction=reduction, chunk=chunk, **_named(terms)
        )
    _check_split(head, "head", part, 0)
    classes = Classes(part.group, part.split, terms)
    x = gathered_stream(x, part.group)
    losses.check(NAME, x, target, terms.smoothing, reduction, part.split.size)
    losses.check_classes(NAME, target, terms.ignore, part.split.size)
    grads = linear_losses.check_product(NAME, x, head, reduction, chunk)
    args = (x, head, target, classes, reduction, grads, chunk or 0)
    loss: Tensor = SplitLinearCrossEntropy.apply(*args)[0]
    return counted_once(loss, part.group)


NAME = "cross_entropy"


def _named(terms: Terms) -> dict[str, Any]:
    return {
        "ignore_index": terms.ignore,
        "label_smoothing": terms.smoothing,
        "z_loss": terms.z,
    }


def _check_split(leaf: Tensor, what: str, part: Part, dim: int) -> None:
    assert part.split is not None
    if part.split.dim != dim or part.split.shared:
        wish = f"classes along dimension {dim}, each on one rank"
        raise refused(NAME, leaf, what, part, wish, "Cut the head by zf.Cut(0).")


# --- the loss of rows ----------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Classes:
    """Which classes each rank has, and what the loss is of."""

    ranks: Group
    split: Split
    terms: Terms

    def losses(self, logits: Tensor, goals: Tensor) -> tuple[Tensor, Tensor]:
        """Of rows ``[n, c]`` and targets ``[n]`` the losses ``[n]``, and ``[n, 2]``: the greatest
        logit of all ranks, and the sum of exponentials relative to it. A collective."""
        at, mine = local_indices(goals, self.split.runs[self.ranks.rank])
        count = 4 if self.terms.smoothing else 3
        numbers = logits.new_zeros((len(goals), count), dtype=wide(logits))
        if logits.shape[1]:
            for part in row_pieces(logits, at, mine, numbers):
                _measure(*part)
        else:
            numbers[:, 0] = -torch.inf
        every = numbers.new_empty((self.ranks.size, *numbers.shape))
        self.ranks.all_gather(every.view(-1), numbers.view(-1), label=LABEL).wait()
        return self._joined(every, goals)

    def _joined(self, every: Tensor, goals: Tensor) -> tuple[Tensor, Tensor]:
        """From the numbers ``[T, n, 3 or 4]`` of all ranks; alike on all of them."""
        (ignore, smoothing, z), tops, size = self.terms, every[..., 0], self.split.size
        top, counts = tops.amax(0), goals != ignore
        exps = (every[..., 1] * (tops - _level(top)).exp()).sum(0)
        exps = exps.masked_fill(counts & ((goals < 0) | (goals >= size)), torch.nan)
        at = every[..., 2].sum(0)
        # Differences of logits, not of sums: great logits have no room for a small loss's digits.
        anchor = at.masked_fill(at == -torch.inf, 0.0)
        logs = exps.log()
        loss = logs + (top - anchor) - (1 - smoothing) * (at - anchor)
        if smoothing:
            widths = [self.split.width(rank) for rank in range(self.ranks.size)]
            levels = zip(widths, _level(tops), strict=True)
            moved = sum(width * (level - anchor) for width, level in levels)
            loss = loss - smoothing / size * (every[..., 3].sum(0) + moved)
        if z:
            loss = loss + z * (logs + top).square()
        return loss.where(counts, 0.0), torch.stack([top, exps], -1)

    def gradient(
        self, grad: Tensor, logits: Tensor, goals: Tensor, total: Tensor, new: Tensor
    ) -> None:
        """Write that of this rank's logits ``[n, c]`` to ``new``, which may be ``logits``."""
        if not new.numel():
            return
        at, mine = local_indices(goals, self.split.runs[self.ranks.rank])
        grad = grad.where(goals != self.terms.ignore, 0.0)
        for part in row_pieces(logits, grad, goals, at, mine, total, new):
            self._gradient(*part)

    def _gradient(
        self,
        logits: Tensor,
        grad: Tensor,
        goals: Tensor,
        at: Tensor,
        mine: Tensor,
        total: Tensor,
        new: Tensor,
    ) -> None:
        ignore, smoothing, z = self.terms
        top, exps = total.unbind(-1)
        lift = (1 + 2 * z * (top + exps.log())) / exps if z else exps.reciprocal()
        room = new if new.dtype == total.dtype else torch.empty_like(new, dtype=total.dtype)
        x = torch.sub(logits, top[:, None], out=room).exp_().mul_(lift[:, None])
        if smoothing:
            x.sub_(smoothing / self.split.size)
        x.scatter_add_(-1, at[:, None], (mine.to(x.dtype) * (smoothing - 1))[:, None])
        x.mul_(grad[:, None]).masked_fill_((goals == ignore)[:, None], 0.0)
        if x is not new:
            new.copy_(x)


def _level(top: Tensor) -> Tensor:
    """What logits are taken relative to: 0 where all of them are minus infinity."""
    return top.masked_fill(top == -torch.inf, 0.0)


def _measure(logits: Tensor, at: Tensor, mine: Tensor, numbers: Tensor) -> None:
    """What a rank sends of rows ``[n, c]``."""
    x = logits.to(numbers.dtype)
    top = x.amax(-1)
    numbers[:, 0] = top
    numbers[:, 2] = x.gather(-1, at[:, None])[:, 0].where(mine, 0.0)
    low = x - _level(top)[:, None]
    if numbers.shape[1] > 3:
        numbers[:, 3] = low.sum(-1)
    numbers[:, 1] = low.exp_().sum(-1)


class SplitCrossEntropy(torch.autograd.Function):
    """``(losses, total)``, as in :class:`zfunc.kernels.losses.CrossEntropy`."""

    @staticmethod
    def forward(logits: Tensor, target: Tensor, classes: Classes) -> tuple[Tensor, Tensor]:
        rows = logits.detach().reshape(target.numel(), logits.shape[-1])
        found, total = classes.losses(rows, target.reshape(-1))
        return found.view(target.shape), total

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        logits, target, ctx.classes = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(logits, target, output[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
        logits, target, total = ctx.saved_tensors
        new = fresh(logits)
        rows = logits.reshape(target.numel(), logits.shape[-1])
        goals = target.reshape(-1)
        ctx.classes.gradient(grad.reshape(-1), rows, goals, total, new.view(rows.shape))
        return new, None, None


class SplitLinearCrossEntropy(torch.autograd.Function):
    """``(loss, its gradients)``; those are for the backward. Of ``x`` it is this rank's part."""

    @staticmethod
    def forward(
        x: Tensor,
        head: Tensor,
        target: Tensor,
        classes: Classes,
        reduction: str,
        grads: bool,
        chunk: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        scale = (
            linear_losses.scale_of(x, target, classes.terms.ignore, reduction) if grads else None
        )

        def run(logits: Tensor, goals: Tensor, sums: Tensor) -> None:
            found, total = classes.losses(logits, goals)
            sums.copy_(found)
            if scale is not None:
                classes.gradient(scale.expand_as(found), logits, goals, total, logits)

        most = max(map(classes.split.width, range(classes.ranks.size)))  # chunks alike on all
        with torch.autocast(x.device.type, enabled=False):
            rows, dx, dw = linear_losses.in_chunks(x, head, target, grads, most, chunk, run)
        return losses.reduced(rows, target, classes.terms.ignore, reduction), dx, dw

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.grads = inputs[5]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*output[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *second: Tensor | None) -> tuple[Any, ...]:
        parts = linear_losses.scaled(NAME, ctx.grads, ctx.saved_tensors, grad, second)
        return *parts, None, None, None, None, None
