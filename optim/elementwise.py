"""Is a transformation right on placed trees? Try it, once.

A placed tree keeps many leaves in one flat buffer. What looks at shapes, or at
more than one element at a time (Muon, per-leaf norms), would be silently wrong on
it unless it goes through ``tree.leaf_norms``, ``map_leaves`` or ``whole``.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from typing import Any

import torch

from zfunc.errors import CompositionError
from zfunc.optim.choices import unjudged
from zfunc.ranks.world import World, entered
from zfunc.trees import tree

__all__ = ["check_on"]

Tree = Any
SHAPES = {"a": (4, 3), "b": (5,)}


def check_on(tx: Any, place: Callable[[Tree], Tree]) -> None:
    """:func:`zfunc.optim.check_elementwise`, told how a plain tree is placed."""
    # An empty context: neither the running step nor a simulated world is seen from inside.
    contextvars.Context().run(_try, tx, place)


def _try(tx: Any, place: Callable[[Tree], Tree]) -> None:
    with entered(World()), unjudged():
        plain = _sample(0)
        try:
            expected = [tree.full(u) for u in _updates(tx, plain, lambda grads: grads)]
        except Exception as error:
            raise CompositionError(
                f"cannot try whether this GradientTransformation is elementwise: on a tree "
                f"{SHAPES} it raises {error!r}. If it is right on flat buffers that hold many "
                "leaves, say so with GradientTransformation(init, update, checked=True)."
            ) from error
        try:
            # On one rank map_leaves hands on whole leaves, and the trial is to hold on several.
            tree.TRIED.set(_halved)
            found = [tree.full(u) for u in _updates(tx, plain, place)]
            same = all(_close(a, b) for a, b in zip(expected, found, strict=True))
        except Exception as error:
            raise CompositionError(_not_elementwise(f"it raises {error!r}")) from error
        if not same:
            raise CompositionError(_not_elementwise("its updates come out differently"))


def _halved(f: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A function of pieces, as two ranks call it that have half of each."""

    def run(path: str, *parts: torch.Tensor) -> torch.Tensor:
        n = len(parts[0]) // 2
        return torch.cat([f(path, *(x[:n] for x in parts)), f(path, *(x[n:] for x in parts))])

    return run


def _sample(seed: int) -> Tree:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64)
        for name, shape in SHAPES.items()
    }


def _updates(tx: Any, plain: Tree, place: Any) -> list[Tree]:
    params = place(plain)
    state, out = tx.init(params), []
    for seed in (1, 2):
        updates, state = tx._update(place(_sample(seed)), state, params)
        out.append(updates)
    return out


def _close(a: Tree, b: Tree) -> bool:
    flat_a, flat_b = tree.flatten_names(a), tree.flatten_names(b)
    return flat_a.keys() == flat_b.keys() and all(
        x.shape == flat_b[name].shape
        and torch.allclose(x.double(), flat_b[name].double(), rtol=1e-5, atol=1e-7, equal_nan=True)
        for name, x in flat_a.items()
    )


def _not_elementwise(what: str) -> str:
    return (
        "this GradientTransformation is not elementwise: on a tiny tree that is placed as `shard` "
        f"places it, {what}. A placed tree holds many leaves in one flat buffer: use "
        "tree.leaf_norms for norms, tree.map_leaves for what depends on the path (it hands on "
        "pieces of leaves), and tree.whole for what needs a full leaf."
    )
