"""Adafactor: of a matrix's squares only the means of its rows and of its columns are kept.

These are sums of what each rank has, so nobody needs a whole matrix: a step sums ``rows + columns``
numbers of each matrix over the ranks, in one collective. All ranks keep all of them, in one
tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zfunc.layout.freezing import without_frozen
from zfunc.optim import moments
from zfunc.optim.averaging import ema
from zfunc.optim.base import EmptyState, GradientTransformation, nodes
from zfunc.optim.combining import chain
from zfunc.optim.decay import add_decayed_weights, needs_params
from zfunc.optim.places import LeafPlace, Share, places, shares
from zfunc.optim.rates import Rate, plain, started
from zfunc.optim.scaling import scale
from zfunc.optim.schedules import scale_by_schedule
from zfunc.ranks.comm import Group
from zfunc.trees import tree
from zfunc.trees.kinds import kind
from zfunc.trees.nodes import Placed
from zfunc.trees.reduction import reduced
from zfunc.trees.squares import wide

__all__ = [
    "FactoredState",
    "adafactor",
    "clip_by_block_rms",
    "scale_by_factored_rms",
    "scale_by_param_block_rms",
]

Tree = Any
Dims = tuple[int, int]


class FactoredState(NamedTuple):
    """``count`` updates so far (0-d int64); ``factors`` ``[1, n]``, the means of all factored
    leaves one behind the other; ``v``, running means of squares, of the leaves that are not."""

    count: Tensor  # type: ignore[assignment]  # optax's name; `tuple.count` is not missed
    factors: Tensor
    v: Tree


class _Section(NamedTuple):
    """Where a leaf's means lie in ``factors``; ``dims`` are the longest but one, and the longest.

    ``rows`` are means over the longest dimension, ``columns`` over the other.
    """

    shape: tuple[int, ...]
    dims: Dims
    start: int

    def without(self, dim: int) -> tuple[int, ...]:
        return (*self.shape[:dim], *self.shape[dim + 1 :])

    @property
    def spans(self) -> tuple[tuple[int, slice], tuple[int, slice]]:
        """The dimension that is summed over, and where the means are: rows, then columns."""
        other, longest = self.dims
        middle = self.start + math.prod(self.without(longest))
        stop = middle + math.prod(self.without(other))
        return (longest, slice(self.start, middle)), (other, slice(middle, stop))


def scale_by_factored_rms(
    factored: bool = True,
    decay_rate: float = 0.8,
    step_offset: int = 0,
    min_dim_size_to_factor: int = 128,
    epsilon: float = 1e-30,
) -> GradientTransformation:
    """``g / sqrt(v)``, with ``v`` of a matrix known by its rows' and columns' means alone.

    ``v[i, j] = rows[i] * columns[j] / mean(rows)``. Running means of ``g² + epsilon`` keep
    ``1 - (count + 1)**-decay_rate`` of the past. Of a leaf with more dimensions the two longest
    are factored.

    Args:
        factored: whether anything is.
        decay_rate: see above.
        step_offset: the count to subtract, when a run goes on from another one's.
        min_dim_size_to_factor: leaves whose longest dimension but one is shorter keep ``v`` itself.
        epsilon: keeps the quotient finite.

    Source: Shazeer and Stern, Adafactor: Adaptive Learning Rates with Sublinear Memory Cost, 2018,
    as ``optax.scale_by_factored_rms``.

    >>> tx = scale_by_factored_rms(min_dim_size_to_factor=2)
    >>> state = tx.init(torch.zeros(3, 4))
    >>> state.factors.shape, state.v  # 7 numbers instead of 12
    (torch.Size([1, 7]), None)
    >>> tx.update(torch.full((3, 4), -2.0), state)[0][0]
    tensor([-1., -1., -1., -1.])
    """

    def dims(shape: tuple[int, ...]) -> Dims | None:
        if not factored or len(shape) < 2:
            return None
        order = sorted(range(len(shape)), key=lambda i: shape[i])
        return None if shape[order[-2]] < min_dim_size_to_factor else (order[-2], order[-1])

    def plan(where: Mapping[str, LeafPlace]) -> tuple[dict[str, _Section], int]:
        found, start = dict[str, _Section](), 0
        for path, place in where.items():
            if (both := dims(place.shape)) is not None:
                found[path] = section = _Section(place.shape, both, start)
                start = section.spans[1][1].stop
        return found, start

    def init(params: Tree) -> FactoredState:
        params = without_frozen(params)
        sections, size = plan(places(params))
        factors = _factors(params, size)
        v = moments.zeros(tree.select(params, lambda path: path not in sections))
        return FactoredState(started(), factors, v)

    def update(grads: Tree, state: FactoredState, params: Tree) -> tuple[Tree, FactoredState]:
        grads = reduced(grads)
        where = places(grads)
        sections, size = plan(where)
        if size != state.factors.shape[1]:
            raise ValueError(
                f"adafactor keeps {state.factors.shape[1]} means for the leaves that init saw; "
                f"those of this step have {size}. Give it gradients of the same structure."
            )
        keep = 1 - plain(state.count - step_offset + 1) ** -decay_rate
        means = _means(grads, sections, state.factors[0]) + epsilon
        factors = state.factors * keep + means * (1 - keep)
        others = tree.select(grads, lambda path: path not in sections)
        v = tree.map(
            lambda g, v: (wide(v) * keep + (wide(g).square() + epsilon) * (1 - keep)).to(v.dtype),
            others,
            state.v,
        )
        divided = tree.map(lambda g, v: (wide(g) * wide(v).rsqrt()).to(g.dtype), others, v)
        roots = {path: _roots(section, factors[0]) for path, section in sections.items()}
        along = tree.map_leaves(
            lambda path, g: _divided(g, sections[path], roots[path], where[path]),
            tree.select(grads, sections.__contains__),
        )
        updates = tree.merge(along, tree.merge(divided, grads))
        return updates, FactoredState(state.count + 1, factors, v)

    return GradientTransformation(init, update, checked=True, unfit="adafactor")


def _factors(params: Tree, size: int) -> Tensor:
    """Zeros, float32 at least, where parameters on a GPU are."""
    held = [y for _, x in nodes(params) for y in (x.held() if isinstance(x, Placed) else [x])]
    tensors = [x for x in held if isinstance(x, Tensor)]
    device = next((x.device for x in tensors if kind(x.device) == "cuda"), None)
    dtypes = [torch.promote_types(x.dtype, torch.float32) for x in tensors[:1]]
    return torch.zeros(1, size, dtype=dtypes[0] if dtypes else None, device=device)


def _means(grads: Tree, sections: Mapping[str, _Section], like: Tensor) -> Tensor:
    """Means of squares, laid out as ``like``; a collective where leaves are on several ranks."""
    sums: dict[int, tuple[Group, Tensor]] = {}
    for ranks, some in shares(grads):
        _, out = sums.setdefault(id(ranks), (ranks, torch.zeros_like(like)))
        for share in some:
            if share.path in sections:
                _add(out, sections[share.path], share)
    total = torch.zeros_like(like)
    for ranks, out in sums.values():
        many = ranks.size > 1 and out.numel()
        total += ranks.all_reduce(out, label="means of squares").wait() if many else out
    for section in sections.values():
        for dim, span in section.spans:
            total[span] /= section.shape[dim]
    return total


def _add(out: Tensor, section: _Section, share: Share) -> None:
    squares = wide(share.values).square().to(out)
    for dim, span in section.spans:
        sums = out[span].view(section.without(dim))
        if share.positions is not None:
            at = _without(share.positions, section.shape, dim)
            sums.view(-1).index_add_(0, at, squares)
        elif squares.numel():
            block, first, _ = _block(squares, share.place)
            rows = sums if dim == 0 else sums[first : first + len(block)]
            rows += block.sum(dim)


def _block(x: Tensor, place: LeafPlace) -> tuple[Tensor, int, int]:
    """A piece as whole rows ``[n, ...]`` of its leaf with zeros around it, the number of the
    first row, and where in it the piece begins."""
    inner = math.prod(place.shape[1:])
    first, left = divmod(place.start, inner)
    right = -(left + x.numel()) % inner
    padded = torch.nn.functional.pad(x.reshape(-1), (left, right))
    return padded.view(-1, *place.shape[1:]), first, left


def _without(positions: Tensor, shape: tuple[int, ...], dim: int) -> Tensor:
    """Positions of elements in the flattened leaf as those in one without a dimension."""
    inner = math.prod(shape[dim + 1 :])
    return positions // (inner * shape[dim]) * inner + positions % inner


def _roots(section: _Section, factors: Tensor) -> tuple[Tensor, Tensor]:
    """What rows and columns of a leaf are multiplied by, with its number of dimensions."""
    (longest, rows), (other, columns) = section.spans
    row = factors[rows].view(section.without(longest))
    column = factors[columns].view(section.without(other))
    mean = row.mean(other - (other > longest), keepdim=True)
    return (row / mean).rsqrt().unsqueeze(longest), column.rsqrt().unsqueeze(other)


def _divided(
    g: Tensor, section: _Section, roots: tuple[Tensor, Tensor], place: LeafPlace
) -> Tensor:
    if not g.numel():
        return g
    row, column = roots
    if place.split is not None:
        at = place.positions(g.numel(), g.device)
        (longest, _), (other, _) = section.spans
        row = row.reshape(-1)[_without(at, section.shape, longest)]
        column = column.reshape(-1)[_without(at, section.shape, other)]
        return (wide(g) * (row * column).view(g.shape)).to(g.dtype)
    block, first, left = _block(wide(g), place)
    here = slice(first, first + len(block))
    row, column = (x if x.shape[0] == 1 else x[here] for x in (row, column))
    out = (block * row * column).reshape(-1)[left : left + g.numel()]
    return out.view(g.shape).to(g.dtype)


# --- what is chained to it ------------------------------------------------------------------------


def _rms(x: Tree) -> Tree:
    """The root of the mean square of each full leaf: a plain tree; a collective on placed trees."""
    where = places(x)
    return tree.map_leaves(
        lambda path, norm: norm / math.sqrt(max(1, math.prod(where[path].shape))),
        tree.leaf_norms(x),
    )


def clip_by_block_rms(threshold: float) -> GradientTransformation:
    """Each leaf scaled so that the root of its mean square is ``threshold`` at most.

    Source: as ``optax.clip_by_block_rms``.

    >>> tx = clip_by_block_rms(1.0)
    >>> tx.update(torch.tensor([6.0, 8.0]), EmptyState())[0]
    tensor([0.8485, 1.1314])
    """

    def update(grads: Tree, state: EmptyState, params: Tree) -> tuple[Tree, EmptyState]:
        grads = reduced(grads)
        limits = tree.map(lambda rms: (rms / threshold).clamp(min=1), _rms(grads))
        return tree.map(lambda g, limit: (g / limit).to(g.dtype), grads, limits), state

    return _stateless(update)


def scale_by_param_block_rms(min_scale: float = 1e-3) -> GradientTransformation:
    """Updates of each leaf times the root of its parameters' mean square, ``min_scale`` at least.

    Raises:
        ValueError: (from ``update``) no ``params``.

    Source: as ``optax.scale_by_param_block_rms``.

    >>> tx = scale_by_param_block_rms()
    >>> tx.update(torch.ones(2), EmptyState(), torch.tensor([6.0, 8.0]))[0]
    tensor([7.0711, 7.0711])
    """

    def update(grads: Tree, state: EmptyState, params: Tree) -> tuple[Tree, EmptyState]:
        needs_params("scale_by_param_block_rms", True, params)
        sizes = tree.map(lambda rms: rms.clamp(min=min_scale), _rms(params))
        return tree.map(lambda g, size: (g * size).to(g.dtype), reduced(grads), sizes), state

    return _stateless(update)


def _stateless(update: Callable[..., tuple[Tree, EmptyState]]) -> GradientTransformation:
    return GradientTransformation(
        lambda params: EmptyState(), update, checked=True, unfit="adafactor"
    )


def adafactor(
    lr: Rate | None = None,
    min_dim_size_to_factor: int = 128,
    decay_rate: float = 0.8,
    decay_offset: int = 0,
    multiply_by_parameter_scale: bool = True,
    clipping_threshold: float | None = 1.0,
    momentum: float | None = None,
    weight_decay: float | None = None,
    mask: Tree | Callable[[str], bool] | None = None,
    eps: float = 1e-30,
    factored: bool = True,
) -> GradientTransformation:
    """Adafactor: steps as large as a part of the parameters, scaled by factored second moments.

    The state of a matrix is ``rows + columns`` numbers, on every rank, without momentum.

    Args:
        lr: a number, a 0-d tensor, or a schedule of the count; of the parameters' own size, unless
            ``multiply_by_parameter_scale`` is false. It is not Adam's: larger ones fit.
        min_dim_size_to_factor, decay_rate, decay_offset, eps, factored: see
            :func:`scale_by_factored_rms`.
        multiply_by_parameter_scale: see :func:`scale_by_param_block_rms`.
        clipping_threshold: see :func:`clip_by_block_rms`.
        momentum: of the updates; it has the memory of the parameters.
        weight_decay, mask: what is taken of the parameters in a step, not multiplied by ``lr``;
            see :func:`zfunc.optim.add_decayed_weights`.

    Raises:
        ValueError: (from ``update``) ``params`` are needed, and not given.

    Source: Shazeer and Stern, Adafactor: Adaptive Learning Rates with Sublinear Memory Cost, 2018,
    as ``optax.adafactor``.

    >>> tx = adafactor(0.1)
    >>> params = torch.tensor([3.0, 4.0])
    >>> updates, state = tx.update(torch.tensor([1.0, -1.0]), tx.init(params), params)
    >>> updates
    tensor([-0.3536,  0.3536])
    """
    parts = [scale_by_factored_rms(factored, decay_rate, decay_offset, min_dim_size_to_factor, eps)]
    if clipping_threshold is not None:
        parts.append(clip_by_block_rms(clipping_threshold))
    if lr is not None:
        parts.append(scale_by_schedule(lr))
    if multiply_by_parameter_scale:
        parts.append(scale_by_param_block_rms())
    if momentum is not None:
        parts.append(ema(momentum, debias=False))
    if weight_decay is not None:
        parts.append(add_decayed_weights(weight_decay, mask))
    return chain(*parts, scale(-1.0))
