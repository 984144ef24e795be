"""Steps whose gradients are not finite are left out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zfunc.buffers.readings import Reading
from zfunc.buffers.uploads import on_device
from zfunc.errors import NonFiniteError
from zfunc.optim.base import GradientTransformation, nodes
from zfunc.optim.rates import started
from zfunc.optim.updates import Moved
from zfunc.ranks.comm import Group
from zfunc.trees import memory, tree
from zfunc.trees.kinds import kind
from zfunc.trees.nodes import leaves_in
from zfunc.trees.reduction import compressing, linear_map
from zfunc.trees.unitwise import known_norm, streams

__all__ = ["SkipState", "all_finite", "first_nonfinite", "skip_nonfinite"]

Tree = Any


class SkipState(NamedTuple):
    """The inner state; how many updates were skipped, in all and just now in a row."""

    inner_state: Any
    total_skipped: Tensor
    consecutive: Tensor


def skip_nonfinite(
    tx: GradientTransformation, max_consecutive: int | None = None
) -> GradientTransformation:
    """``tx``, but no change at all where a gradient has a NaN or an infinity on any rank.

    Args:
        tx: any transformation; its state stays what it was in a skipped step.
        max_consecutive: so many skipped steps in a row are borne. No limit if left out.

    On a GPU nobody waits for the answer: the update is made, in new memory even under
    ``donate``, and chosen or not by a flag on the device, where the counts move, too. There one
    step too many is noticed in the step after it, which waits for the count of the one before.

    Raises:
        NonFiniteError: (from ``update``) one more; the first leaf concerned is named, if known.

    >>> from zfunc import optim
    >>> tx = skip_nonfinite(optim.sgd(1.0))
    >>> updates, state = tx.update(torch.tensor([1.0, float("nan")]), tx.init(torch.zeros(2)))
    >>> updates.abs(), state.total_skipped
    (tensor([0., 0.]), tensor(1))
    """

    def init(params: Tree) -> SkipState:
        return SkipState(tx.init(params), started(), started())

    def run(grads: Tree, state: SkipState, params: Tree, additive: bool) -> tuple[Tree, SkipState]:
        inner, total, row = state
        if _stays_on_device(grads):
            _check_last(row, max_consecutive)
            return _unless(tx, grads, state, params, watched=max_consecutive is not None)
        if all_finite(grads):
            updates, inner = (tx.additive if additive else tx.update)(grads, inner, params)
            return updates, SkipState(inner, total.clone(), torch.zeros_like(row))
        if max_consecutive is not None and int(row) >= max_consecutive:
            raise NonFiniteError(
                f"the gradient of {first_nonfinite(grads)!r} is not finite, after {int(row)} "
                f"skipped steps in a row (max_consecutive={max_consecutive}). Lower the learning "
                "rate or the loss scale, or look at the loss of the last batches."
            )
        return tree.map(linear_map(_nothing), grads), SkipState(inner, total + 1, row + 1)

    return GradientTransformation(
        init,
        partial(run, additive=False),
        additive=partial(run, additive=True),
        checked=True,
        unfit="skip_nonfinite",
    )


def _stays_on_device(grads: Tree) -> bool:
    """Whether gradients lie on a GPU, so that asking whether they are finite would wait for it."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    return (
        any(isinstance(x, Tensor) and kind(x.device) == "cuda" for x in leaves_in(grads))
        and not compressing()  # what is left of one step goes into the next
        and not streams(grads)
    )


def _check_last(row: Tensor, most: int | None) -> None:
    """Raise if the steps before were too many in a row that were skipped."""
    if most is None:
        return
    reading = row.__dict__.get("_zfunc_reading")
    count = int(row if reading is None else reading.wait())
    if count > most:
        raise NonFiniteError(
            f"gradients were not finite in each of the last {count} steps (max_consecutive="
            f"{most}). Lower the learning rate or the loss scale, or look at the loss of the last "
            "batches."
        )


def _unless(
    tx: GradientTransformation, grads: Tree, state: SkipState, params: Tree, watched: bool
) -> tuple[Tree, SkipState]:
    """The update, if all is finite; which of both is decided on the device."""
    fine = tree.global_norm(_marks(grads)).isfinite()

    def chosen(new: Any, old: Any) -> Any:
        if new is old or not isinstance(new, Tensor):
            return new
        a, b = (x if x.ndim else on_device(x, fine.device) for x in (new, old))
        return torch.where(fine, a, b)

    def update(u: Tensor) -> Tensor:
        return torch.where(fine, u, _nothing(u))

    with keeping():  # the old state may have to be the new one
        updates, inner = tx.update(grads, state.inner_state, params)
    if isinstance(updates, Moved):
        lazy = updates
        updates = Moved(
            tree.map(chosen, lazy.new, params), params, lambda: tree.map(update, lazy.force())
        )
    else:
        updates = tree.map(update, updates)
    total, row = (on_device(x, fine.device) for x in (state.total_skipped, state.consecutive))
    row = torch.where(fine, 0, row + 1)
    if watched:
        row.__dict__["_zfunc_reading"] = Reading(row)
    inner = tree.map(chosen, inner, state.inner_state)
    return updates, SkipState(inner, total + ~fine, row)


def _nothing(grad: Tensor) -> Tensor:
    # Minus zero: adding it leaves every number as it is, adding zero turns -0.0 into 0.0.
    return torch.full_like(grad, -0.0)


def all_finite(grads: Tree) -> bool:
    """The same answer on all ranks: both norms are collectives on placed trees."""
    if bool(known_norm(grads).isfinite()):
        return True
    return bool(known_norm(_marks(grads)).isfinite())  # the squares alone may overflow


def _marks(grads: Tree) -> Tree:
    """0 where a gradient is finite, NaN elsewhere."""
    return tree.map(linear_map(lambda g: g * 0), grads)


def first_nonfinite(grads: Tree, sharing: Group | None = None) -> str:
    """The path of the first leaf with a NaN or an infinity on any rank; a collective.

    Args:
        sharing: ranks on which gradients may differ, and be finite on some alone.

    >>> first_nonfinite({"a": torch.zeros(2), "b": torch.tensor([1.0, float("inf")])})
    'b'
    """
    norms = nodes(tree.leaf_norms(_marks(grads)))
    found = next((path for path, norm in norms if not bool(norm.isfinite())), "")
    told = [found] if sharing is None else sharing.exchange(found, label="first nonfinite")
    return next(filter(None, told), "")


@contextmanager
def keeping() -> Iterator[None]:
    """Within the block the running step donates nothing."""
    running = memory.current()
    donation = running.donation if running is not None else None
    if running is not None:
        running.donation = None
    try:
        yield
    finally:
        if running is not None:
            running.donation = donation
