"""Noise on gradients, the same however many ranks there are."""

from __future__ import annotations

import math
import zlib
from typing import Any, NamedTuple

from torch import Tensor

from zfunc.optim.base import GradientTransformation
from zfunc.optim.places import places
from zfunc.optim.rates import plain, started
from zfunc.ranks.keys import Key, as_key, fold_in
from zfunc.trees import tree
from zfunc.trees.reduction import reduced
from zfunc.trees.squares import wide

__all__ = ["AddNoiseState", "add_noise", "normal_at"]

Tree = Any
GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # splitmix64's, as signed 64-bit integers
MIX = ((30, 0xBF58476D1CE4E5B9 - (1 << 64)), (27, 0x94D049BB133111EB - (1 << 64)))


class AddNoiseState(NamedTuple):
    """``count`` updates so far (0-d int64), and the key of all noise."""

    count: Tensor  # type: ignore[assignment]  # optax's name; `tuple.count` is not missed
    key: Tensor


def add_noise(eta: float, gamma: float, key: Key) -> GradientTransformation:
    """Add normal noise of variance ``eta / count**gamma`` to gradients.

    The noise of an element is a function of the key, the count, the leaf's path, and where the
    element lies in the full leaf. So it is the same on any number of ranks, at every stage.

    Args:
        eta: the variance in the first step.
        gamma: how fast it falls.
        key: a random key, or a seed.

    Raises:
        ValueError: ``eta`` is negative.

    Source: Neelakantan et al., Adding Gradient Noise Improves Learning for Very Deep Networks,
    2015, as ``optax.add_noise``, which draws other numbers.

    >>> import torch
    >>> tx = add_noise(0.01, 0.55, key=0)
    >>> noisy, state = tx.update(torch.ones(3), tx.init(torch.ones(3)))
    >>> bool(((noisy - 1).abs() < 0.5).all()), state.count
    (True, tensor(1))
    """
    if eta < 0:
        raise ValueError(f"eta is {eta}; a variance is 0 or more.")

    def update(grads: Tree, state: AddNoiseState, params: Tree) -> tuple[Tree, AddNoiseState]:
        grads, count = reduced(grads), state.count + 1
        where, now = places(grads), fold_in(state.key, count)
        std = (eta / plain(count) ** gamma) ** 0.5

        def noisy(path: str, g: Tensor) -> Tensor:
            at = where[path].positions(g.numel(), g.device)
            noise = normal_at(fold_in(now, zlib.crc32(path.encode())), at)
            return (wide(g) + (noise * std).view(g.shape)).to(g.dtype)

        return tree.map_leaves(noisy, grads), AddNoiseState(count, state.key)

    return GradientTransformation(
        lambda params: AddNoiseState(started(), as_key(key)),
        update,
        checked=True,
        unfit="add_noise",
    )


def normal_at(key: Tensor, positions: Tensor) -> Tensor:
    """A normal number for each position, in float64; each depends on the key and on itself alone.

    Args:
        key: a random key.
        positions: int64, of any shape.

    Source: Steele, Lea and Flood, Fast Splittable Pseudorandom Number Generators, 2014 (the bits);
    Box and Muller, A Note on the Generation of Random Normal Deviates, 1958.

    >>> from zfunc.ranks.keys import key
    >>> import torch
    >>> every = normal_at(key(0), torch.arange(5))
    >>> bool((every[2:] == normal_at(key(0), torch.arange(2, 5))).all())
    True
    """
    start = int(key)
    radius = _uniform(start, positions * 2 + 1).log_().mul_(-2).sqrt_()
    return radius.mul_(_uniform(start, positions * 2 + 2).mul_(2 * math.pi).cos_())


def _uniform(start: int, numbers: Tensor) -> Tensor:
    """In ``(0, 1]``, of 53 bits: splitmix64's outputs of these numbers."""
    x = numbers * GOLDEN + start
    for shift, factor in MIX:
        x = (x ^ _shifted(x, shift)) * factor
    return (_shifted(x ^ _shifted(x, 31), 11) + 1).double().mul_(2.0**-53)


def _shifted(x: Tensor, by: int) -> Tensor:
    """To the right, zeros coming in: torch's own shift copies the sign."""
    return (x >> by) & ((1 << (64 - by)) - 1)
