"""``accumulate``: a batch in n microbatches, one after the other, and one update.

Law: ``accumulate(f, n)(s, b) == f(s, b)`` up to the rounding of sums, where the loss is a
mean over the rows of the batch: gradients and losses are means over the microbatches,
exact ones for ``zf.Mean``. Randomness differs from microbatch to microbatch, and is that
of the whole batch in the first.

At ZeRO stages 0 and 1 whole gradients are summed on each rank and reduced once, with
the last microbatch; at 2 and 3 each microbatch's are reduced and their parts summed.
Sums are taken in the dtype in which gradients are reduced.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import optree
import torch
from torch import Tensor

from zfunc.buffers.readings import Reading, number, on_host, sent
from zfunc.engine.communication import communication
from zfunc.engine.context import Context
from zfunc.engine.differentiation import checked
from zfunc.engine.hooks import Gradients, Order, Pending
from zfunc.engine.primitives import Mean
from zfunc.engine.step import Differentiate, Transform, transform_of
from zfunc.engine.unit_info import Ready, UnitInfo
from zfunc.ranks.comm import Group
from zfunc.transforms.microbatches import Arguments, microbatches, own_leaves
from zfunc.trees import tree
from zfunc.trees.nodes import NAMESPACE
from zfunc.trees.reduction import linear_map
from zfunc.trees.unitwise import streams

__all__ = [
    "Accumulate",
    "Losses",
    "UnitSums",
    "accumulate",
    "accumulated",
    "averaged",
    "mean_of_aux",
    "times",
]


@dataclass(frozen=True)
class Accumulate(Transform):
    """See :func:`accumulate`."""

    n: int = 1

    position: ClassVar[int] = Order.ACCUMULATE
    name: ClassVar[str] = "accumulate"

    def __post_init__(self) -> None:
        if not isinstance(self.n, int) or isinstance(self.n, bool) or self.n < 1:
            raise ValueError(
                f"accumulate(n={self.n!r}): expected a number of microbatches, 1 or more"
            )

    def __repr__(self) -> str:
        return f"accumulate(n={self.n})"

    def configure(self, running: Context, state: Any) -> None:
        running.notes[self.name] = own_leaves(state)

    def differentiate(self, call: Differentiate, running: Context) -> Differentiate:
        def run(asked: Gradients) -> tuple[tuple[Tensor, Any], Any]:
            return accumulated(call, running, asked, self.n, running.notes[self.name])

        return call if self.n == 1 else run

    def expect(self, state: Any, memo: dict[Any, Any]) -> None:
        """What was expected of one ``value_and_grad`` is expected n times."""
        calls = 0
        while ("sources", calls) in memo:
            calls += 1
        rows = [(memo["sources", i], memo["plan", "grad", i]) for i in range(calls)]
        for i in range(calls * self.n):
            memo["sources", i], memo["plan", "grad", i] = rows[i // self.n]

    def describe(self, memo: Mapping[Any, Any]) -> list[str]:
        how = (
            "gradients are reduced once"
            if memo.get("reduce once")
            else "each one's gradients leave"
        )
        return [f"accumulate: {self.n} microbatches per step, {how}"]


def accumulated(
    call: Differentiate,
    running: Context,
    asked: Gradients,
    n: int,
    own: dict[int, Tensor],
    by: str = "",
) -> tuple[tuple[Tensor, Any], Any]:
    """``((loss, aux), grads)`` of a batch in n microbatches, one after the other.

    Args:
        call: differentiates one.
        own: the tensors of the state, which are no part of a batch.
        by: what cuts it, for messages, if that is not ``accumulate``.
    """
    losses = Losses(communication(running).everyone, n)

    def parts() -> Iterator[Arguments]:
        for i, part in enumerate(microbatches(asked, n, own, exact=True, by=by)):
            yield part
            if losses.count is None and i == 0:
                next(microbatches(asked, n, own, by=by))  # raises where that is no mean

    return averaged(call, running, asked, parts(), losses)


def averaged(
    call: Differentiate,
    running: Context,
    asked: Gradients,
    parts: Iterable[Arguments],
    losses: Losses,
) -> tuple[tuple[Tensor, Any], Any]:
    """``((loss, aux), grads)``, means over microbatches.

    Args:
        call: differentiates one.
        parts: the loss's arguments behind the parameters, of each.
        losses: takes the loss of each; knows how many there are.
    """
    over = communication(running)
    sums = _Sums() if over.reduce_once and over.everyone.size > 1 else None
    auxes: list[Any] = []
    buffers, grads = asked.kwargs.get("buffers"), None
    for i, (args, kwargs) in enumerate(parts):
        if sums is not None:
            sums.holding = i < losses.n - 1
        if "buffers" in kwargs:
            kwargs = {**kwargs, "buffers": buffers}
        part = replace(asked, args=args, kwargs=kwargs, finish=losses, collector=sums)
        (_, aux), new = call(part)
        if buffers is not None and asked.has_aux:
            buffers, aux = _threaded(buffers, aux)
        auxes.append(aux)
        grads = new if sums is not None else _added(grads, new, i)
        del new
    factor = losses.correction()
    if isinstance(factor, Tensor) and streams(grads):
        factor = Reading(factor).wait()  # gradients are on the host
    if isinstance(factor, Tensor) or factor != 1.0:
        grads = tree.map(linear_map(partial(times, factor=factor)), grads)
    return (losses.mean(), _with_buffers(mean_of_aux(auxes), buffers)), grads


def _added(total: Any, new: Any, i: int) -> Any:
    """The sum, in memory of its own: no third set of gradients is ever there beside two."""
    if streams(new):
        return new if i == 0 else tree.map(torch.add, total, new)
    if i == 0:  # perhaps memory that autograd or the user has as well
        return tree.map(linear_map(torch.clone), new)
    return tree.map(linear_map(lambda t, g: t.add_(g)), total, new)


def times(g: Tensor, factor: float | Tensor) -> Tensor:
    """A gradient times a number; in its own memory where the number is a device's, for then it
    is multiplied in every step, and mostly by 1."""
    if not isinstance(factor, Tensor):
        return g * factor
    if g.dtype.itemsize < 4:
        return g.copy_(g.float().mul_(factor.float()))
    return g.mul_(factor.to(g.dtype))


class Losses:
    """The losses of all microbatches on all ranks, as one mean.

    Backward of the first microbatch runs when the elements of the others have not been
    counted yet. It assumes that they have as many; ``correction`` says how wrong that was.
    """

    def __init__(self, group: Group, n: int) -> None:
        self.group, self.n = group, n
        self.total: Tensor | None = None
        self.count: Tensor | None = None
        self.assumed: Tensor | None = None

    def __call__(self, loss: Any) -> tuple[Tensor, Tensor | None, Any]:
        exact = isinstance(loss, Mean)
        if self.total is not None and exact != (self.count is not None):
            raise ValueError(
                "the loss returned zf.Mean for one microbatch and a plain scalar for another; "
                "expected the same for all of a batch."
            )
        value = checked(loss.total if exact else loss)
        if not exact:
            self._add(value.detach())
            parts = self.group.size * self.n
            return value, torch.full_like(value, 1.0 / parts), value.detach
        count = sent(loss.count, value, torch.float64)
        sums = torch.stack([value.detach().double(), count])
        if self.group.size > 1:
            sums = self.group.all_reduce(sums, label="loss").wait()
        if self.assumed is None:
            self.assumed = sums[1].clamp_min(1.0) * self.n
        self._add(sums[0], sums[1])
        self.dtype = value.dtype
        return value, (1.0 / self.assumed).to(value.dtype), value.detach

    def _add(self, total: Tensor, count: Tensor | None = None) -> None:
        self.total = total if self.total is None else self.total + total
        if count is not None:
            self.count = count if self.count is None else self.count + count

    def correction(self) -> float | Tensor:
        """What the sum of the gradients is to be multiplied by; a tensor where the host would
        have to wait for the number."""
        if self.count is None or self.assumed is None:
            return 1.0
        factor = self.assumed / self.count * (self.count / self.count)  # NaN of no elements
        return number(factor) if on_host(factor) else factor

    def mean(self) -> Tensor:
        """The loss of the whole batch; a collective where losses are plain scalars."""
        assert self.total is not None
        if self.count is not None:
            return (self.total / self.count).to(self.dtype)
        total = self.total
        if self.group.size > 1:
            total = self.group.all_reduce(total.clone(), label="loss").wait()
        return total / (self.group.size * self.n)


class UnitSums:
    """Whole gradients of a rank, summed unit by unit.

    Attributes:
        kept: full flats of what has come, by unit.
    """

    def __init__(self) -> None:
        self.kept: dict[tuple[int, int], list[Tensor]] = {}
        self._own: set[tuple[int, int]] = set()  # whose flats are nobody else's memory

    def add(self, key: tuple[int, int], value: Pending) -> None:
        """Add the gradients of one microbatch."""
        old, new = self.kept.get(key), value.wait()
        if old is not None:
            own = key in self._own
            new = [a.add_(b) if own else a + b for a, b in zip(old, new, strict=True)]
            self._own.add(key)
        elif isinstance(value, Ready) and value.own:
            self._own.add(key)
        self.kept[key] = new

    def take(self, unit: UnitInfo) -> list[Tensor] | None:
        """What is kept of a unit, to be written to; it comes back with more in it.

        The flats of several leaves were made for them. One leaf's may be autograd's, and of others
        as well: the first time its sum moves to memory of its own.
        """
        kept = self.kept.pop(unit.key, None)
        if kept is None or unit.key in self._own:
            return kept
        if all(len(unit.layout.by_flat[i]) > 1 for i in unit.trainable):
            return kept
        self._own.add(unit.key)
        return [unit.memory(x.numel(), x.dtype, x.device).copy_(x) for x in kept]


class _Sums:
    """A sum over microbatches, which leaves with the last one."""

    position: int = Order.ACCUMULATE

    def __init__(self) -> None:
        self.holding, self._sums = True, UnitSums()

    @property
    def waiting(self) -> Mapping[tuple[int, int], Any]:
        return {} if self.holding else self._sums.kept

    def take(self, unit: UnitInfo) -> list[Tensor] | None:
        return self._sums.take(unit)

    def leave(self, value: Pending, unit: UnitInfo) -> Pending | None:
        self._sums.add(unit.key, value)
        return None if self.holding else Ready(self._sums.kept.pop(unit.key))


def _structure(x: Any) -> Any:
    return optree.tree_structure(x, none_is_leaf=True, namespace=NAMESPACE)


def _threaded(buffers: Any, aux: Any) -> tuple[Any, Any]:
    """The buffers that a loss returned, and the rest of its aux; see ``zf.train_step``."""
    want = _structure(buffers)
    if isinstance(aux, tuple) and len(aux) == 2 and _structure(aux[0]) == want:
        return aux[0], (_BUFFERS, aux[1])
    if _structure(aux) == want:
        return aux, _BUFFERS
    return buffers, aux


_BUFFERS = "buffers of the last microbatch"  # stands for them in aux


def _with_buffers(aux: Any, buffers: Any) -> Any:
    if isinstance(aux, tuple) and len(aux) == 2 and aux[0] is _BUFFERS:
        return buffers, aux[1]
    return buffers if aux is _BUFFERS else aux


def mean_of_aux(auxes: list[Any]) -> Any:
    """Floating-point tensors as means over the microbatches, anything else as the last has it."""

    def mean(*xs: Any) -> Any:
        last = xs[-1]
        if not (isinstance(last, Tensor) and last.is_floating_point()):
            return last
        if any(x.shape != last.shape for x in xs):
            raise ValueError(
                f"aux tensors of shapes {[tuple(x.shape) for x in xs]} come from the microbatches "
                "of one batch: expected one shape, for they are averaged."
            )
        return torch.stack(xs).mean(0)

    return optree.tree_map(mean, *auxes, none_is_leaf=True, namespace=NAMESPACE)


@transform_of
def accumulate(n: int) -> Accumulate:
    """Take the gradients of a batch in n parts, of which only one is in memory at a time.

    Call it as ``accumulate(step, 4)`` or as the decorator ``@accumulate(n=4)``.

    Every ``value_and_grad`` of the step runs its loss n times. Of the loss's arguments
    behind the parameters, tensors are cut along dim 0; all of them must have the same
    number of rows, a multiple of n. Passed whole: 0-d tensors, what is no tensor, placed
    trees, and what belongs to the state. Keys (from ``zf.random``, or arguments called
    ``key``) differ from microbatch to microbatch. A keyword argument ``buffers`` is
    threaded: each microbatch gets those that the one before returned in its aux.
    Floating-point tensors of the aux are averaged; anything else is the last one's.

    Args:
        n: number of microbatches.

    Raises:
        ValueError: n is no positive integer.
        CompositionError: the step accumulates already; (in a call) the loss has no batch
            among its arguments, or one that does not split evenly.
    """
    return Accumulate(n)
