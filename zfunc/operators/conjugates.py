"""Pairs of maps between ranks that are each other's derivative.

What is whole is the same on all ranks of a group; what is in parts is this rank's own. In that
sense, and so not in that of ``zf.psum``, the transpose of a sum over ranks is the identity:

| map | forward | backward |
|---|---|---|
| ``copied`` | the identity | the sum over ranks |
| ``summed`` | the sum over ranks | the identity |
| ``added`` | the sum over ranks | the sum over ranks |
| ``gathered`` | parts put together | this rank's part |
| ``gathered_positions`` | positions put together | sum, this rank's positions |
| ``scattered_positions`` | sum, this rank's positions | positions put together |
| ``cut_positions`` | this rank's positions | positions put together |
| ``joined_positions`` | positions put together | this rank's positions |

Source: Shoeybi et al., Megatron-LM, 2019, section 3 (f and g); Korthikanti et al., Reducing
Activation Recomputation in Large Transformer Models, 2022, section 4.2.2 (along positions).
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, Protocol

import torch
from torch import Tensor

from zfunc.errors import PlacementError
from zfunc.layout.splits import Split
from zfunc.ranks.comm import Group, even_cuts

__all__ = [
    "BACKWARD",
    "FORWARD",
    "added",
    "copied",
    "copied_together",
    "cut_positions",
    "gathered",
    "gathered_positions",
    "joined_positions",
    "made_once",
    "scaled_back",
    "scattered_positions",
    "shared",
    "summed",
]

Way = Callable[[Tensor], Tensor]
FORWARD, BACKWARD = "tensor forward", "tensor backward"


class Conjugate(torch.autograd.Function):
    """``way(x)``, whose gradient goes ``back``; and the gradient of that goes ``way`` again.

    Nothing is saved, so what is computed a second time in backward saves as much as before.
    """

    @staticmethod
    def forward(x: Tensor, way: Way, back: Way) -> Tensor:
        return way(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.way, ctx.back = inputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return Conjugate.apply(grad, ctx.back, ctx.way), None, None


def _alias(x: Tensor) -> Tensor:
    """The same memory and version, but no view, which would keep ``x`` itself alive."""
    return x.detach()


def _sum(x: Tensor, ranks: Group, label: str) -> Tensor:
    """In new memory: autograd, or somebody else, may have that of ``x``."""
    new = x.detach().clone(memory_format=torch.contiguous_format)
    return ranks.all_reduce(new, label=label).wait()


def _sum_in_place(x: Tensor, ranks: Group, label: str) -> Tensor:
    return ranks.all_reduce(x.detach().contiguous(), label=label).wait()


# --- sums ----------------------------------------------------------------------------------------


def copied(x: Tensor, ranks: Group, label: str = BACKWARD) -> Tensor:
    """``x``, whole on all ranks, for work that is in parts; gradients are summed over ranks.

    Whoever asks again for the same ``x`` gets the same result, so queries, keys and values that
    are made of one ``x`` have one sum in backward. Under ``torch.func`` each has its own.
    """
    if not _tracked(x, ranks):
        return x
    way, back = _alias, partial(_sum, ranks=ranks, label=label)
    return made_once(x, ("copied", ranks), lambda: Conjugate.apply(x, way, back))


def copied_together(leaves: Sequence[Tensor], ranks: Group, label: str) -> list[Tensor]:
    """Leaves as :func:`copied` gives them, whose gradients are summed in one round.

    Each rank has gradients of the same ones.
    """
    if ranks.size == 1 or not leaves or not torch.is_grad_enabled():
        return list(leaves)
    if torch._C._functorch.maybe_current_level() is not None:
        return [copied(x, ranks, label) for x in leaves]
    return list(_Together.apply(ranks, label, *leaves))


class _Together(torch.autograd.Function):
    """Aliases of leaves; backward sums all gradients that there are, of a dtype in one round."""

    @staticmethod
    def forward(ctx: Any, ranks: Group, label: str, *leaves: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.ranks, ctx.label = ranks, label
        return tuple(map(_alias, leaves))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        found: dict[int, Tensor] = {i: g for i, g in enumerate(grads) if g is not None}
        way = partial(_sum_in_place, ranks=ctx.ranks, label=ctx.label)
        back = partial(_sum, ranks=ctx.ranks, label=ctx.label)
        for dtype in dict.fromkeys(g.dtype for g in found.values()):
            some = [i for i, g in found.items() if g.dtype == dtype]
            flat = torch.cat([found[i].reshape(-1) for i in some])
            total: Tensor = Conjugate.apply(flat, way, back)
            parts = total.split([found[i].numel() for i in some])
            found.update({i: x.view(found[i].shape) for i, x in zip(some, parts, strict=True)})
        return None, None, *(found.get(i) for i in range(len(grads)))


def summed(x: Tensor, ranks: Group, label: str = FORWARD, own: bool = False) -> Tensor:
    """The sum over ranks of what each has, whole on all of them.

    Args:
        x: of one shape on all ranks.
        ranks: the group.
        label: names it in errors and ledgers.
        own: whether nobody else has the memory of ``x``, which is then written.
    """
    if ranks.size == 1:
        return x
    way = partial(_sum_in_place if own else _sum, ranks=ranks, label=label)
    found: Tensor = Conjugate.apply(x, way, _alias)
    return found


def added(x: Tensor, ranks: Group, label: str = FORWARD) -> Tensor:
    """The sum over ranks of what each has, with which parts go on: gradients are summed, too.

    A norm over features that are in parts takes its mean of it.
    """
    if ranks.size == 1:
        return x
    way = partial(_sum, ranks=ranks, label=label)
    found: Tensor = Conjugate.apply(x, way, way)
    return found


def scaled_back(x: Tensor, factor: float) -> Tensor:
    """``x``, whose gradient is multiplied by ``factor``."""
    found: Tensor = Conjugate.apply(x, _alias, partial(torch.mul, other=factor))
    return found


def _tracked(x: Tensor, ranks: Group) -> bool:
    return ranks.size > 1 and x.requires_grad and torch.is_grad_enabled()


ONCE = "_made_once"


def made_once(x: Tensor, kind: tuple[Any, ...], make: Callable[[], Tensor]) -> Tensor:
    """What was made of ``x`` before, if ``x`` has not been written to since.

    ``x`` itself remembers it. A leaf does so weakly, for its gradient's place is its own; it lives
    as long as a product keeps it for backward.
    """
    if torch._C._functorch.maybe_current_level() is not None:
        return make()  # it would belong to a level of torch.func that ends
    memo = x.__dict__.setdefault(ONCE, {})  # simulated ranks may have one tensor: each its entry
    version, ref = memo.get(kind, (None, None))
    before: Tensor | None = ref() if version == x._version else None
    if before is not None:
        return before
    made = make()
    memo[kind] = (x._version, weakref.ref(made) if x.is_leaf else lambda: made)
    return made


# --- rows that several ranks have ----------------------------------------------------------------


def shared(leaf: Tensor, ranks: Group, split: Split) -> Tensor:
    """A split leaf; gradients of rows that several ranks have are summed over those ranks."""
    if not split.shared or not _tracked(leaf, ranks):
        return leaf
    back = partial(_sum_shared, ranks=ranks, split=split)
    return made_once(leaf, ("shared", ranks, split), lambda: Conjugate.apply(leaf, _alias, back))


def _sum_shared(grad: Tensor, ranks: Group, split: Split) -> Tensor:
    """Only those rows are sent: each rank adds its own to zeros."""
    count, runs = _shared_runs(split, ranks.rank)
    new = grad.detach().clone(memory_format=torch.contiguous_format)
    rows = new.movedim(split.dim, 0)
    every = rows.new_zeros((count, *rows.shape[1:]))
    for at, to, size in runs:
        every[to : to + size] = rows[at : at + size]
    ranks.all_reduce(every, label="tensor shared rows").wait()
    for at, to, size in runs:
        rows[at : at + size] = every[to : to + size]
    return new


@lru_cache(maxsize=1024)
def _shared_runs(split: Split, rank: int) -> tuple[int, tuple[tuple[int, int, int], ...]]:
    """How many indices several ranks have; this rank's runs: here, among them, how long."""
    several = [i for i, ranks in enumerate(split.holders) if len(ranks) > 1]
    places = {i: to for to, i in enumerate(several)}
    runs: list[list[int]] = []
    for at, i in enumerate(split.indices(rank)):
        to = places.get(i)
        if to is None:
            continue
        if runs and (sum(runs[-1][::2]), runs[-1][1] + runs[-1][2]) == (at, to):
            runs[-1][2] += 1
        else:
            runs.append([at, to, 1])
    return len(several), tuple((at, to, size) for at, to, size in runs)


# --- parts put together --------------------------------------------------------------------------


def gathered(x: Tensor, ranks: Group, split: Split, label: str = FORWARD) -> Tensor:
    """Parts of the last dimension put together; each rank takes its part of the gradient.

    Args:
        x: ``[..., width of this rank]``.
        ranks: the group.
        split: which indices of the last dimension each rank has; its own ``dim`` does not count.
        label: names it in errors and ledgers.

    Returns:
        ``[..., split.size]``, whole on all ranks.
    """
    if ranks.size == 1:
        return x
    split = replace(split, dim=x.dim() - 1)
    way = partial(split.gathered, ranks=ranks, label=label)
    found: Tensor = Conjugate.apply(x, way, partial(_own, split=split, rank=ranks.rank))
    return found


def _own(x: Tensor, split: Split, rank: int) -> Tensor:
    part: Tensor = split.local(x.detach(), rank)
    return part.clone(memory_format=torch.contiguous_format)


# --- positions -----------------------------------------------------------------------------------


def gathered_positions(
    x: Tensor, ranks: Group, length: int, dim: int = 1, label: str = FORWARD
) -> Tensor:
    """All positions, of which each rank has some, for work that is in parts.

    Args:
        x: ``[b, length / T, ...]``; ranks have positions as even as can be, the first ones more.
        ranks: the group.
        length: how many positions all ranks have.
        dim: the dimension of positions.
        label: names it in errors and ledgers.

    Returns:
        ``[b, length, ...]``; its gradient is summed over ranks, and each has that of its positions.

    Raises:
        PlacementError: this rank has another number of positions.
    """
    if ranks.size == 1:
        return x
    cuts = even_cuts(length, ranks.size)
    own = cuts[ranks.rank + 1] - cuts[ranks.rank]
    if x.shape[dim] != own:
        raise PlacementError(
            f"{label}: rank {ranks.rank} of {ranks.size} has {x.shape[dim]} of {length} positions "
            f"in {list(x.shape)}, expected {own}. Cut them with scattered_positions, or evenly, "
            "the longer parts first."
        )
    found: Tensor = Conjugate.apply(x, *_ways(*_along(ranks, cuts, dim % x.dim()), label))
    return found


def scattered_positions(x: Tensor, ranks: Group, dim: int = 1, label: str = FORWARD) -> Tensor:
    """The sum over ranks of what each has for all positions; each rank gets its positions.

    Args:
        x: ``[b, length, ...]``, of one shape on all ranks.
        ranks: the group.
        dim: the dimension of positions.
        label: names it in errors and ledgers.

    Returns:
        ``[b, length / T, ...]``, as even as can be, the first ranks have more.
    """
    if ranks.size == 1:
        return x
    dim %= x.dim()
    gather, scatter = _along(ranks, even_cuts(x.shape[dim], ranks.size), dim)
    found: Tensor = Conjugate.apply(x, *_ways(scatter, gather, label))
    return found


def cut_positions(x: Tensor, ranks: Group, dim: int = 1, label: str = BACKWARD) -> Tensor:
    """This rank's positions of what all ranks have whole, and whose gradient they have whole, too.

    Args:
        x: ``[b, length, ...]``, the same on all ranks.
        ranks: the group.
        dim: the dimension of positions.
        label: names it in errors and ledgers.

    Returns:
        ``[b, length / T, ...]``, as even as can be, the first ranks have more.
    """
    if ranks.size == 1:
        return x
    dim %= x.dim()
    cuts = even_cuts(x.shape[dim], ranks.size)
    gather, _ = _along(ranks, cuts, dim)
    way = partial(_narrowed, dim=dim, start=cuts[ranks.rank], stop=cuts[ranks.rank + 1])
    found: Tensor = Conjugate.apply(x, way, partial(gather, label=label))
    return found


def joined_positions(
    x: Tensor, ranks: Group, length: int, dim: int = 1, label: str = FORWARD
) -> Tensor:
    """All positions, for work that ranks do alike: the transpose of :func:`cut_positions`.

    Args:
        x: ``[b, length / T, ...]``, this rank's positions.
        ranks: the group.
        length: how many positions all ranks have.
        dim: the dimension of positions.
        label: names it in errors and ledgers.

    Returns:
        ``[b, length, ...]``, the same on all ranks, as its gradient must be.
    """
    if ranks.size == 1:
        return x
    dim %= x.dim()
    cuts = even_cuts(length, ranks.size)
    gather, _ = _along(ranks, cuts, dim)
    back = partial(_narrowed, dim=dim, start=cuts[ranks.rank], stop=cuts[ranks.rank + 1])
    found: Tensor = Conjugate.apply(x, partial(gather, label=label), back)
    return found


def _narrowed(x: Tensor, dim: int, start: int, stop: int) -> Tensor:
    """In memory of its own, so that nobody keeps all positions alive."""
    part = x.detach().narrow(dim, start, stop - start)
    return part.clone(memory_format=torch.contiguous_format)


class Labelled(Protocol):
    def __call__(self, x: Tensor, label: str) -> Tensor: ...


def _ways(there: Labelled, back: Labelled, label: str) -> tuple[Way, Way]:
    """A map and its transpose; the ledger tells backward apart where nobody named the two."""
    behind = BACKWARD if label == FORWARD else label
    return partial(there, label=label), partial(back, label=behind)


def _along(ranks: Group, cuts: Sequence[int], dim: int) -> tuple[Labelled, Labelled]:
    """Positions put together, and the sum of which each rank gets its own."""

    def spread(x: Tensor) -> tuple[Tensor, list[int], torch.Size]:
        front = x.detach().movedim(dim, 0)
        rest = front.shape[1:]
        return front.reshape(-1), [cut * math.prod(rest) for cut in cuts], rest

    def gather(x: Tensor, label: str) -> Tensor:
        own, ends, rest = spread(x)
        full = own.new_empty(ends[-1])
        ranks.all_gather(full, own, cuts=ends, label=label).wait()
        return full.view(cuts[-1], *rest).movedim(0, dim).contiguous()  # once for all who read it

    def scatter(x: Tensor, label: str) -> Tensor:
        every, ends, rest = spread(x)
        own = ranks.reduce_scatter(every, cuts=ends, label=label).wait()
        own = own.view(cuts[ranks.rank + 1] - cuts[ranks.rank], *rest)
        return own.movedim(0, dim).contiguous()

    return gather, scatter
