"""Where a row of layers is cut into stages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction
from functools import reduce
from itertools import accumulate, pairwise
from math import lcm
from operator import index

from zfunc.errors import CompositionError

__all__ = ["balanced_cuts", "checked_cuts"]


def balanced_cuts(weights: Iterable[float], stages: int, *, empty: bool = False) -> tuple[int, ...]:
    """Cut a row of layers into stages so that the heaviest stage is as light as can be.

    Of the cuts with the least heaviest stage those are taken whose sum of squares is least, so that
    one heavy layer does not leave the others uneven; of these the ones in which earlier stages have
    more layers. Sums are exact: floats are taken as the fractions that they are.

    What stands before the first layer or behind the last one, a head for example, is counted with
    that layer, which is always in the same stage.

    Args:
        weights: of each layer in its order, not negative: FLOPs, bytes or parameters.
        stages: how many there are to be, of a layer or more each.
        empty: stages may have no layers. Then there may be more stages than layers.

    Returns:
        ``stages + 1`` rising numbers from 0 to the number of layers. Stage s has the layers
        from the s-th number up to the next one.

    Raises:
        CompositionError: there are fewer layers than stages, there is no stage, or a weight is
            negative or no number.

    >>> balanced_cuts([0, 1, 2, 3, 3, 3], 4)
    (0, 3, 4, 5, 6)
    >>> balanced_cuts([0, 1.1, 1.9, 3, 30], 2)
    (0, 4, 5)
    >>> balanced_cuts([9, 1, 1, 1, 1], 3)
    (0, 1, 3, 5)
    """
    whole = _as_integers(weights)
    _check_sizes(len(whole), stages, empty)
    sums = [0, *accumulate(whole)]
    least = 0 if empty else 1
    return _most_even(sums, stages, _limit(sums, whole, stages, least), least)


def checked_cuts(cuts: Sequence[int], layers: int, stages: int) -> tuple[int, ...]:
    """Cuts that somebody has chosen, as :func:`balanced_cuts` gives them.

    Args:
        cuts: the first layer of each stage but the first, or the same with 0 before them and the
            number of layers behind them.
        layers: how many there are.
        stages: how many there are to be.

    Raises:
        CompositionError: it is not as many cuts as it takes, or a stage has no layer.

    >>> checked_cuts([3, 4], layers=6, stages=3)
    (0, 3, 4, 6)
    """
    _check_sizes(layers, stages, empty=False)
    told = f"the partition {list(cuts)} of {layers} layers into {stages} stages"
    try:
        found = [index(c) for c in cuts]
    except TypeError:
        raise CompositionError(f"{told}: cuts are whole numbers") from None
    if len(found) == stages - 1:
        found = [0, *found, layers]
    if len(found) != stages + 1:
        raise CompositionError(
            f"{told} has {len(cuts)} cuts: it takes {stages - 1}, "
            f"or {stages + 1} with 0 and {layers}"
        )
    if found[0] != 0 or found[-1] != layers:
        raise CompositionError(f"{told} must go from 0 to {layers}")
    for stage, (a, b) in enumerate(pairwise(found)):
        if a >= b:
            raise CompositionError(f"{told}: stage {stage}, from {a} to {b}, has no layer")
    return tuple(found)


def _check_sizes(layers: int, stages: int, empty: bool) -> None:
    if stages < 1:
        raise CompositionError(f"{layers} layers cannot be cut into {stages} stages: 1 at least")
    if stages > layers and not empty:
        raise CompositionError(
            f"{layers} layers cannot be cut into {stages} stages: every stage has one at least. "
            "Take fewer stages (ranks times chunks), or a deeper model"
        )


def _as_integers(weights: Iterable[float]) -> list[int]:
    """Weights in the same proportions, so that no sum is rounded."""
    exact = []
    for layer, w in enumerate(weights):
        if not 0 <= w < float("inf"):
            raise CompositionError(f"the weight of layer {layer} is {w}: weights are not negative")
        exact.append(Fraction(w))
    unit = reduce(lcm, (x.denominator for x in exact), 1)
    return [int(x * unit) for x in exact]


def _limit(sums: list[int], weights: list[int], stages: int, least: int) -> int:
    """The least weight that no stage needs to exceed, by halving the interval where it lies."""
    low, high = max(weights, default=0), sums[-1]
    while low < high:
        middle = (low + high) // 2
        if _fits(sums, stages, middle, least):
            high = middle
        else:
            low = middle + 1
    return low


def _fits(sums: list[int], stages: int, limit: int, least: int) -> bool:
    """Whether stages that take as many layers as the limit allows reach the end."""
    layers = len(sums) - 1
    at = 0
    for left in range(stages - 1, -1, -1):
        end = at
        while end < layers - least * left and sums[end + 1] - sums[at] <= limit:
            end += 1
        at = end
    return at == layers


def _most_even(sums: list[int], stages: int, limit: int, least: int) -> tuple[int, ...]:
    """By dynamic programming from the last stage: the least sum of squares within a limit."""
    layers = len(sums) - 1
    best: dict[int, int] = {layers: 0}  # the sum of squares of the stages that follow a cut
    choices: list[dict[int, int]] = []
    for _ in range(stages):
        new: dict[int, int] = {}
        choice: dict[int, int] = {}
        for a in range(layers + 1):
            for b in range(a + least, layers + 1):
                weight = sums[b] - sums[a]
                if weight > limit:
                    break
                if b in best:
                    total = weight * weight + best[b]
                    if a not in new or total <= new[a]:  # of equals the latest cut
                        new[a], choice[a] = total, b
        best = new
        choices.append(choice)
    cuts = [0]
    for choice in reversed(choices):
        cuts.append(choice[cuts[-1]])
    return tuple(cuts)
