"""The residual stream between a row and the next column: whole, or cut along positions.

Where a running step was made by ``zf.split(..., sequence=True)`` each rank has some positions of
the stream, and norms, residuals and dropout work on these alone. A column's input is put together
along positions, a row's output is summed and cut along them: together as many bytes as the
all-reduce in their place.

Gradients of what all ranks have whole are parts there, which add up over ranks. So each rank
begins backward with ``1 / T``, and the gradients of whole leaves are summed once as they leave.

Source: Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, 2022,
section 4.2.2.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from zfunc.errors import PlacementError
from zfunc.operators.conjugates import (
    BACKWARD,
    FORWARD,
    copied,
    gathered_positions,
    made_once,
    scaled_back,
    scattered_positions,
    summed,
)
from zfunc.ranks.comm import Group, even_cuts
from zfunc.trees.memory import current

__all__ = ["counted_once", "gathered_stream", "in_parts_of", "is_cut", "own_positions", "positions"]

LENGTH = "positions of the stream"


def is_cut() -> bool:
    """Whether a step is running whose stream is cut along positions."""
    return _split() is not None


def _split() -> Any:
    running = current()
    split: Any = None if running is None else running.notes.get("split")
    return split if split is not None and split.adds_up else None


# --- from the stream to work in parts, and back --------------------------------------------------


def gathered_stream(x: Tensor, ranks: Group, label: str = BACKWARD) -> Tensor:
    """The stream ``[..., s, w]`` for work in parts: all positions, on every rank.

    Whoever asks again for the same ``x`` gets the same result, as with ``copied``.
    """
    if not is_cut():
        return copied(x, ranks, label)
    length = _length(x, ranks)

    def make() -> Tensor:
        return gathered_positions(x, ranks, length, x.dim() - 2)

    return made_once(x, ("positions", ranks, length), make)


def in_parts_of(y: Tensor, ranks: Group, label: str = FORWARD) -> Tensor:
    """The stream after work in parts, from what each rank adds to it, ``[..., s, w]``.

    Args:
        y: whose memory nobody else has.
        ranks: the group.
        label: names it in errors and ledgers.
    """
    if not is_cut():
        return summed(y, ranks, label, own=True)
    _remember(y, -2)
    return scattered_positions(y, ranks, y.dim() - 2, label)


def positions(x: Tensor, dim: int = -2) -> Tensor:
    """This rank's positions of what every rank has whole: what joins the stream.

    For tables of positions, masks and features that are not made by ``zf.embed`` or ``zf.row``.

    Args:
        x: ``[..., s, w]``, the same on all ranks of the axis.
        dim: the dimension of positions.

    Returns:
        ``[..., s / T, w]``, as even as can be, the first ranks have more; ``x`` itself where no
        step is running that was split with ``sequence=True``.

    >>> import torch
    >>> positions(torch.ones(2, 3)).shape
    torch.Size([2, 3])
    """
    split = _split()
    return x if split is None else own_positions(x, split.group, dim)


def own_positions(x: Tensor, ranks: Group, dim: int) -> Tensor:
    """This rank's positions of what every rank has whole, where the stream is cut."""
    if not is_cut():
        return x
    _remember(x, dim)
    cuts = even_cuts(x.shape[dim], ranks.size)
    return x.narrow(dim, cuts[ranks.rank], cuts[ranks.rank + 1] - cuts[ranks.rank])


def counted_once(loss: Tensor, ranks: Group) -> Tensor:
    """A loss that ranks computed of their parts: the ``1 / T`` of each of them add up."""
    return scaled_back(loss, ranks.size) if is_cut() else loss


# --- how long it is ------------------------------------------------------------------------------


def _remember(x: Tensor, dim: int) -> None:
    """What cuts the stream knows how long it is, and what puts it together has to."""
    if x.dim() < -dim:
        raise PlacementError(
            f"sequence=True cuts the stream along positions, and {list(x.shape)} has none: "
            "expected [..., positions, width]."
        )
    running = current()
    assert running is not None
    running.notes[LENGTH] = x.shape[dim]


def _length(x: Tensor, ranks: Group) -> int:
    """How many positions all ranks have of ``x``.

    Raises:
        PlacementError: it is no stream that was cut last.
    """
    running = current()
    assert running is not None
    length: int | None = running.notes.get(LENGTH)
    cuts = even_cuts(length or 0, ranks.size)
    own = cuts[ranks.rank + 1] - cuts[ranks.rank]
    if length is None or x.dim() < 2 or x.shape[-2] != own:
        of = "nothing was cut yet" if length is None else f"it has {own} of {length}"
        raise PlacementError(
            f"x {list(x.shape)} is not this rank's positions of the stream: {of} on rank "
            f"{ranks.rank} of {ranks.size}, and split(sequence=True) cuts what goes on between "
            "zf.row and the next zf.column. The stream begins with zf.embed, or with "
            "zf.operators.positions(x). Slice positions of ids and targets, not of the stream: "
            "embed(ids[:, :-1]), and streams of several lengths one after the other."
        )
    return length
