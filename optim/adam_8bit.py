"""AdamW with moments in 8 bits: two bytes a parameter instead of eight.

Each group of 64 neighbours has its greatest ``|m|`` and ``sqrt(v)`` as float32, and of each element
a sign and a logarithm of ``|m|``, and a logarithm of ``sqrt(v)``, in steps of an eighth of a power
of two, over 15 powers of two below the greatest. What is rounded is within 9 % of what it was.
The threshold of rounding moves from step to step, by the golden ratio, so that means that change
more slowly than a step of the grid are not lost: rounded to nearest, ``v`` would never decay.

An element has 16 bits, in a tensor of the parameters' shape: the sign, 7 bits of ``sqrt(v)``, one
of the 64 that make up its group's two scales, 7 bits of ``|m|``. The tensor says it is bfloat16,
but stands for no such numbers (and for no NaN: codes of ``sqrt(v)`` end at 126).

**The law**: the same gradients give the same bits of updates and moments in every world, on any
number of ranks and at any stage. A group lies in one row of the last dimension, and cuts are at
multiples of 64 elements, so groups are the same everywhere; the rest is elementwise. A split that
cuts a group is refused. But gradients that ranks have added up differ from those of one process in
their last bits, and a number at a threshold then gets the code beside the other's: 9 % of that
element's step.

Source: Dettmers et al., 8-bit Optimizers via Block-wise Quantization, 2022 (scales of blocks, and
float32 moments for small leaves); Loshchilov and Hutter, Decoupled Weight Decay Regularization,
2019.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zfunc.errors import CompositionError
from zfunc.layout.freezing import without_frozen
from zfunc.optim.adaptive import adamw
from zfunc.optim.base import GradientTransformation
from zfunc.optim.choices import unjudged
from zfunc.optim.combining import multi_transform
from zfunc.optim.decay import Rates, decay_rates, needs_params, with_mask
from zfunc.optim.places import LeafPlace, places
from zfunc.optim.rates import Rate, at, plain, started
from zfunc.trees import tree
from zfunc.trees.reduction import reduced
from zfunc.trees.squares import wide

__all__ = ["Adam8State", "decoded", "encoded", "few_bits"]

Tree = Any
GROUP = 64
SMALLEST = 4096  # elements; leaves of fewer keep float32 moments
STEPS = 8  # of the grid, in a power of two
TOPS = 127, 126  # codes of the greatest |m| and sqrt(v)
GOLDEN = (math.sqrt(5) - 1) / 2


class Adam8State(NamedTuple):
    """``count`` updates so far (0-d int64), and 16 bits for both moments of each element."""

    count: Tensor  # type: ignore[assignment]  # optax's name; `tuple.count` is not missed
    moments: Tree


def few_bits(
    bits: int,
    lr: Rate,
    b1: float,
    b2: float,
    eps: float,
    weight_decay: float,
    mask: Tree | Callable[[str], bool] | None,
) -> GradientTransformation:
    """:func:`zfunc.optim.adamw` with moments of ``bits`` bits, where leaves have groups.

    Raises:
        ValueError: ``bits`` is not 8.
        CompositionError: (from ``init`` and ``update``) ``zf.split`` cuts a group of a leaf.
    """
    if bits != 8:
        raise ValueError(f"adamw: moments={bits}; they have 32 bits, or 8.")
    rates = decay_rates(weight_decay, mask)
    how: dict[str, Any] = {"b1": b1, "b2": b2, "eps": eps}
    both = {"8": _in_groups(lr, rates, how), "32": adamw(lr, b1, b2, eps, weight_decay, mask)}

    def by_size(params: Tree) -> GradientTransformation:
        labels = {p: "8" if _has_groups(p, place) else "32" for p, place in places(params).items()}
        here = {name: tx for name, tx in both.items() if name in labels.values()}
        return multi_transform(here, labels.get)  # others are a caller's labels

    def init(params: Tree) -> Any:
        with unjudged():  # a label is that of leaves that are here
            return by_size(params).init(params)

    def run(grads: Tree, state: Any, params: Tree, additive: bool) -> tuple[Tree, Any]:
        needs_params("adamw", weight_decay, params)
        tx = by_size(without_frozen(grads))
        return (tx.additive if additive else tx.update)(grads, state, params)

    return GradientTransformation(
        with_mask(init, "adamw", rates),
        partial(run, additive=False),
        additive=partial(run, additive=True),
        checked=True,
        unfit="adamw(moments=8)",
    )


def _has_groups(path: str, place: LeafPlace) -> bool:
    """Whether a leaf is one of groups; then all of them are whole on whatever rank has them."""
    shape, split = place.shape, place.split
    if math.prod(shape) < SMALLEST or shape[-1] % GROUP:
        return False
    if split is None or split.dim < len(shape) - 1:
        return True
    cuts = [at for runs in split.runs for run in runs for at in run if at % GROUP]
    if cuts:
        raise CompositionError(
            f"adamw(moments=8): split cuts the rows of {path} at {cuts[0]}, inside of {GROUP} "
            "elements that share scales. Split over so many ranks that parts are multiples of "
            f"{GROUP}, or give such leaves adamw with moments=32: optim.multi_transform."
        )
    return True


def _in_groups(lr: Rate, rates: Rates, how: dict[str, Any]) -> GradientTransformation:
    def init(params: Tree) -> Adam8State:
        zeros = tree.map(lambda p: torch.zeros_like(p, dtype=torch.bfloat16), params)
        return Adam8State(started(), zeros)

    def update(grads: Tree, state: Adam8State, params: Tree) -> tuple[Tree, Adam8State]:
        grads, count = reduced(grads), state.count + 1
        rate, number = at(lr, state.count), plain(count)
        threshold = number * GOLDEN % 1.0

        def step(path: str, g: Tensor, codes: Tensor, p: Tensor | None = None) -> Tensor:
            m, r = _next(g, codes, how["b1"], how["b2"])
            m, r = m / (1 - how["b1"] ** number), r / (1 - how["b2"] ** number) ** 0.5
            out = (m / (r + how["eps"])).view(g.shape)
            decay = rates(path) if callable(rates) else rates
            if decay and p is not None:
                out = out + wide(p) * decay
            return (out * -rate).to(g.dtype)

        def after(g: Tensor, codes: Tensor) -> Tensor:
            return encoded(*_next(g, codes, how["b1"], how["b2"]), threshold).view(codes.shape)

        decays = [params] if callable(rates) or rates else []
        updates = tree.map_leaves(step, grads, state.moments, *decays)
        moments = tree.map_leaves(lambda _, g, codes: after(g, codes), grads, state.moments)
        return updates, Adam8State(count, moments)

    return GradientTransformation(init, update, checked=True, unfit="adamw(moments=8)")


def _next(g: Tensor, codes: Tensor, b1: float, b2: float) -> tuple[Tensor, Tensor]:
    m, r = decoded(codes)
    g = g.reshape(-1, GROUP).float()
    return m * b1 + g * (1 - b1), (r * r * b2 + g * g * (1 - b2)).sqrt()


def decoded(codes: Tensor) -> tuple[Tensor, Tensor]:
    """``m`` and ``sqrt(v)``, float32 ``[groups, 64]``, of what :func:`encoded` made.

    >>> m = torch.linspace(-1, 1, 64)[None]
    >>> again, root = decoded(encoded(m, m.abs(), 0.5))
    >>> bool(((again - m).abs() <= 0.0906 * m.abs()).all() and (root == again.abs()).all())
    True
    """
    bits = codes.reshape(-1, GROUP).view(torch.int16).to(torch.int32)
    halves = ((bits >> 7) & 1).view(-1, 2, GROUP // 2)
    places = torch.arange(GROUP // 2, device=bits.device, dtype=torch.int32)
    scales = (halves << places).sum(-1).to(torch.int32).view(torch.float32)
    of = zip((bits & 127, (bits >> 8) & 127), TOPS, scales.split(1, dim=1), strict=True)
    m, r = (
        torch.where(code > 0, scale * torch.exp2((code - top) / STEPS), 0.0)
        for code, top, scale in of
    )
    return torch.where(bits < 0, -m, m), r


def encoded(m: Tensor, r: Tensor, threshold: float) -> Tensor:
    """16 bits for each element, in bfloat16 ``[groups, 64]``.

    Args:
        m, r: ``m`` and ``sqrt(v)``, float32 ``[groups, 64]``.
        threshold: from 0 to 1; from ``1 - threshold`` of a step of the grid on it is rounded up.
    """
    size = m.abs()
    scales = torch.stack([size.amax(1), r.amax(1)], 1)
    of = zip((size, r), TOPS, scales.split(1, dim=1), strict=True)
    small, root = (_logarithm(x, top, scale, threshold) for x, top, scale in of)
    root = torch.where(r > 0, root.clamp(min=1), root)  # or the next quotient would explode
    places = torch.arange(GROUP // 2, device=m.device, dtype=torch.int32)
    halves = (scales.view(torch.int32)[..., None] >> places) & 1
    bits = small | (halves.view(-1, GROUP) << 7) | (root << 8)
    bits = torch.where((m < 0) & (small > 0), bits - (1 << 15), bits)
    return bits.to(torch.int16).view(torch.bfloat16)


def _logarithm(x: Tensor, top: int, scale: Tensor, threshold: float) -> Tensor:
    """Codes from 0 to ``top``, which stands for the greatest; NaN goes there, too."""
    code = top + STEPS * torch.log2(x / torch.where(scale > 0, scale, 1.0))
    code = torch.nan_to_num((code + threshold).floor(), nan=top, neginf=0.0)
    return code.clamp(0, top).to(torch.int32)
