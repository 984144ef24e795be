"""Muon: matrices of layers step along directions whose singular values are all near one.

The full matrix is needed. Ranks deal the matrices out among them by the work that each is, and
none is done twice: pieces of momentum go to the rank that has a matrix, and pieces of the direction
come back (:mod:`zfunc.layout.dealing`). Of ``n`` ranks over which a tree is cut each sends
``2 * (n - 1) / n`` of the elements of matrices that it holds, which is ``1 / n`` of what a gather
of all would be. At stage 0, where every rank holds all, it sends its matrices' directions to the
others, and no momentum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import optree
import torch
from torch import Tensor

from zfunc.engine.communication import communication
from zfunc.engine.context import current
from zfunc.errors import CompositionError
from zfunc.layout.dealing import dealt, dealt_leaves
from zfunc.layout.layout import Layout
from zfunc.layout.sharded import Sharded
from zfunc.optim import moments
from zfunc.optim.adaptive import adamw
from zfunc.optim.base import GradientTransformation, by_path
from zfunc.optim.choices import judged, unjudged
from zfunc.optim.combining import multi_transform
from zfunc.optim.decay import add_decay, decay_rates, needs_params
from zfunc.optim.paces import held
from zfunc.optim.rates import Rate, at, started
from zfunc.ranks.axes import alone
from zfunc.trees import tree
from zfunc.trees.nodes import PLACED, Layers, Placed, opened
from zfunc.trees.reduction import reduced
from zfunc.trees.squares import wide
from zfunc.trees.tree import dotted

__all__ = ["MuonState", "muon", "orthogonal", "scale_by_muon"]

Tree = Any
Adjust = Literal["original", "match_rms_adamw"]
COEFFICIENTS = (3.4445, -4.775, 2.0315)
MATRIX, OTHER = "muon", "adamw"


class MuonState(NamedTuple):
    """``count`` updates so far (0-d int64) and the momentum."""

    count: Tensor  # type: ignore[assignment]  # optax's name; `tuple.count` is not missed
    mu: Tree


def muon(
    lr: Rate,
    momentum: float = 0.95,
    nesterov: bool = True,
    weight_decay: float = 0.1,
    mask: Tree | Callable[[str], bool] | None = None,
    *,
    matrices: Tree | Callable[[str], bool] | None = None,
    others: GradientTransformation | None = None,
    ns_steps: int = 5,
    ns_coefficients: tuple[float, float, float] = COEFFICIENTS,
    ns_dtype: torch.dtype | None = torch.bfloat16,
    eps: float = 1e-7,
    adjust: Adjust = "original",
) -> GradientTransformation:
    """Muon for matrices, AdamW for the rest.

    ``-lr * (r * O + weight_decay * p)``, with ``O`` the :func:`orthogonal` direction of the
    momentum ``m = momentum * m + g`` (nesterov: of ``g + momentum * m``).

    Args:
        lr: a number, a 0-d tensor, or a schedule of the count.
        momentum, nesterov: of the gradients, before they are made orthogonal.
        weight_decay, mask: see :func:`zfunc.optim.adamw`; of the matrices.
        matrices: which leaves these are: a tree of bools (or a prefix), or a predicate on leaf
            paths. By default what lies in ``zf.Layers`` and has two dimensions, or three: then it
            is a stack of matrices, as of experts. Embeddings, heads and vectors are none.
        others: what updates all other leaves. By default ``adamw(lr)``.
        ns_steps, ns_coefficients, ns_dtype, eps: see :func:`orthogonal`.
        adjust: ``r`` is ``sqrt(max(1, rows / columns))``, or with ``"match_rms_adamw"``
            ``0.2 * sqrt(max(rows, columns))``, with which AdamW's learning rates and decays fit.

    Raises:
        ValueError: an unknown ``adjust``; (from ``update``) there is weight decay, no ``params``.
        CompositionError: (from ``update``) a leaf that is chosen is no matrix.

    Source: Jordan et al., Muon: An optimizer for hidden layers in neural networks, 2024; Liu et
    al., Muon is Scalable for LLM Training, 2025 (``match_rms_adamw``); as ``torch.optim.Muon``.

    >>> import zfunc as zf
    >>> from zfunc import optim
    >>> params = {"head": torch.ones(2, 2), "layers": zf.Layers([{"w": torch.ones(2, 2)}])}
    >>> tx = optim.muon(0.1, weight_decay=0.0, ns_dtype=None)
    >>> grads = tree.map(lambda p: torch.tensor([[3.0, 0.0], [0.0, 4.0]]), params)
    >>> updates, state = tx.update(grads, tx.init(params), params)
    >>> updates["layers"][0]["w"]
    tensor([[-0.0723, -0.0000],
            [-0.0000, -0.1119]])
    """
    how: dict[str, Any] = {"steps": ns_steps, "coefficients": ns_coefficients, "dtype": ns_dtype}
    along = scale_by_muon(momentum, nesterov, adjust, eps=eps, **how)
    rates = decay_rates(weight_decay, mask)

    def update(grads: Tree, state: MuonState, params: Tree) -> tuple[Tree, MuonState]:
        needs_params("muon", weight_decay, params)
        rate = at(lr, state.count)
        step, after = along.additive(grads, state, params)
        step = add_decay(rates, step, params)
        return held(tree.map(lambda u: (wide(u) * -rate).to(u.dtype), step)), after

    inner = GradientTransformation(along.init, update, checked=True, unfit="muon")
    both = {MATRIX: inner, OTHER: adamw(lr) if others is None else others}

    def chosen_in(params: Tree) -> Callable[[str], bool]:
        return _in_layers(params).__contains__ if matrices is None else by_path(matrices)

    def by_kind(params: Tree) -> GradientTransformation:
        chosen = chosen_in(params)
        return multi_transform(both, lambda path: MATRIX if chosen(path) else OTHER)

    def init(params: Tree) -> Any:
        said: dict[str, Any] = {"muon: `matrices` chooses": chosen_in(params)}
        if callable(rates):
            said["muon: the mask chooses"] = rates
        return judged(quietly, said)(params)

    def quietly(params: Tree) -> Any:
        with unjudged():  # there need be no others
            return by_kind(params).init(params)

    def run(grads: Tree, state: Any, params: Tree, additive: bool) -> tuple[Tree, Any]:
        tx = by_kind(grads if params is None else params)
        return (tx.additive if additive else tx.update)(grads, state, params)

    return GradientTransformation(
        init,
        partial(run, additive=False),
        additive=partial(run, additive=True),
        checked=True,
        unfit="muon",
    )


def scale_by_muon(
    momentum: float = 0.95,
    nesterov: bool = True,
    adjust: Adjust = "original",
    *,
    steps: int = 5,
    coefficients: tuple[float, float, float] = COEFFICIENTS,
    dtype: torch.dtype | None = torch.bfloat16,
    eps: float = 1e-7,
) -> GradientTransformation:
    """``r * O``, the direction of :func:`muon`, of every leaf; each is a matrix.

    >>> tx = scale_by_muon(dtype=None)
    >>> grad = torch.tensor([[3.0, 0.0], [0.0, 4.0]])
    >>> tx.update(grad, tx.init(torch.zeros(2, 2)))[0]
    tensor([[0.7229, 0.0000],
            [0.0000, 1.1192]])
    """
    if adjust not in ("original", "match_rms_adamw"):
        raise ValueError(f"adjust is {adjust!r}; it is 'original' or 'match_rms_adamw'.")

    def direction(x: Tensor) -> Tensor:
        found = orthogonal(x, steps, coefficients, dtype, eps)
        return (wide(found) * _gain(x.shape, adjust)).to(x.dtype)

    def update(grads: Tree, state: MuonState, params: Tree) -> tuple[Tree, MuonState]:
        grads = reduced(grads)
        mu = moments.blend(grads, state.mu, momentum, 1)
        ahead = lambda g, m: (wide(g) + wide(m) * momentum).to(g.dtype)  # noqa: E731
        along = tree.map(ahead, grads, mu) if nesterov else mu
        return _of_matrices(direction, along, steps), MuonState(state.count + 1, mu)

    return GradientTransformation(
        lambda params: MuonState(started(), moments.zeros(params)),
        update,
        checked=True,
        unfit="scale_by_muon",
    )


def orthogonal(
    x: Tensor,
    steps: int = 5,
    coefficients: tuple[float, float, float] = COEFFICIENTS,
    dtype: torch.dtype | None = torch.bfloat16,
    eps: float = 1e-7,
) -> Tensor:
    """A matrix of the same singular vectors, and of singular values near one.

    ``X -> a X + (b A + c A²) X`` with ``A = X Xᵀ``, several times, from ``X / |X|``. With the usual
    coefficients singular values end up between about 0.7 and 1.2, whatever they were.

    Args:
        x: ``[rows, columns]``, or ``[n, rows, columns]``, a stack of matrices.
        steps: how often.
        coefficients: ``a``, ``b`` and ``c``.
        dtype: in which it is computed; ``None`` for that of ``x``.
        eps: the norm that it is divided by is at least this.

    Returns:
        It, in ``dtype``.

    Source: Jordan et al., Muon: An optimizer for hidden layers in neural networks, 2024; Bernstein
    and Newhouse, Old Optimizer, New Norm, 2024.

    >>> x = torch.tensor([[3.0, 0.0], [0.0, 4.0]], dtype=torch.float64)
    >>> y = orthogonal(x, 20, (1.875, -1.25, 0.375), dtype=None)  # these converge
    >>> torch.allclose(y, torch.eye(2, dtype=torch.float64))
    True
    """
    a, b, c = coefficients
    tall = x.shape[-2] > x.shape[-1]
    y = x.to(dtype or x.dtype)
    y = y.mT if tall else y  # the smaller product of the two
    y = y / y.norm(dim=(-2, -1), keepdim=True).clamp(min=eps)
    add = torch.addmm if y.ndim == 2 else torch.baddbmm
    for _ in range(steps):
        gram = y @ y.mT
        y = add(y, add(gram, gram, gram, beta=b, alpha=c), y, beta=a)
    return y.mT if tall else y


def _gain(shape: Sequence[int], adjust: Adjust) -> float:
    rows, columns = shape[-2:]
    if adjust == "original":
        return math.sqrt(max(1.0, rows / max(columns, 1)))
    return 0.2 * math.sqrt(max(rows, columns))


def _flops(shape: Sequence[int], steps: int) -> float:
    """Of :func:`orthogonal`: two products of three sides, the longer once, and a cube."""
    short, long = sorted(shape[-2:])
    return steps * math.prod(shape[:-2]) * (4.0 * short * short * long + 2.0 * short**3)


def _of_matrices(direction: Callable[[Tensor], Tensor], along: Tree, steps: int) -> Tree:
    """``direction`` of each full leaf, on one rank where several share the state."""

    def cost(shape: tuple[int, ...]) -> float:
        if len(shape) not in (2, 3):
            raise CompositionError(
                f"muon: a leaf of shape {shape} is no matrix, and no stack of matrices. Leave it "
                "to `others`: matrices=lambda path: ... says which leaves are matrices."
            )
        return _flops(shape, steps)

    nodes, spec = optree.tree_flatten(opened(along), none_is_leaf=True, namespace=PLACED)
    plain = [i for i, x in enumerate(nodes) if isinstance(x, Tensor)]
    running = current()
    copies = alone() if running is None else communication(running).everyone
    found = dealt_leaves([nodes[i] for i in plain], direction, cost, copies) if plain else []
    for i, x in enumerate(nodes):
        if isinstance(x, Sharded):
            nodes[i] = dealt(x, direction, cost)
        elif isinstance(x, Placed):  # one unit at a time is in memory
            nodes[i] = x.whole(direction, [x])
    for i, x in zip(plain, found, strict=True):
        nodes[i] = x
    return optree.tree_unflatten(spec, nodes)


def _in_layers(params: Tree) -> set[str]:
    """Paths of the matrices that lie in ``Layers``."""
    found: set[str] = set()
    keys, nodes, _ = optree.tree_flatten_with_path(
        params, is_leaf=lambda x: isinstance(x, Layers), none_is_leaf=True, namespace=PLACED
    )
    for key, node in zip(keys, nodes, strict=True):
        if isinstance(node, Layers):
            inner = [(name, tuple(x.shape)) for name, x in tree.flatten_names(node).items()]
        else:
            layout = getattr(node, "layout", None)  # of what is placed; torch's of a tensor
            inner = _layered(layout) if isinstance(layout, Layout) else []
        found |= {dotted(*key, name) for name, shape in inner if len(shape) in (2, 3)}
    return found


def _layered(layout: Layout) -> list[tuple[str, tuple[int, ...]]]:
    """Paths and shapes of the full leaves that lie in layers."""
    inside = {i for layer in layout.layers for i in range(layer.start, layer.stop)}
    return [(slot.path, slot.full) for slot in layout.present if slot.index in inside]
