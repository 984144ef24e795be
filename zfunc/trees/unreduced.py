"""``Unreduced``: a gradient that is this rank's own, until somebody averages it.

1-bit Adam averages momentum in place of gradients, so between ``value_and_grad`` and the
optimizer's first moments the ranks hold different numbers. This node keeps anybody from
taking them for the mean: linear maps (:func:`~zfunc.trees.reduction.linear_map`) pass through it,
since the mean may be taken before or behind them, and :func:`~zfunc.trees.reduction.reduced` ends
it. Every other map is refused. Its norm is one number that all ranks agree on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from zfunc.errors import CompositionError
from zfunc.trees.nodes import Placed, register
from zfunc.trees.reduction import is_linear
from zfunc.trees.squares import square_sum, square_sums, wide_dtype

__all__ = ["Unreduced"]


class Unreduced(Placed):
    """One leaf of a tree of gradients that differ from rank to rank.

    Attributes:
        value: this rank's tensor, of the leaf's shape.
        home: the layout of the params tree that the leaf belongs to, and its index there.
        done: whether ``value`` is the mean already. It is until compression begins; the
            rules are the same, so that a step that breaks them fails in its first call.
        square: the mean over the ranks of the square of its norm, if that is known, 0-d.
    """

    def __init__(
        self,
        value: Tensor,
        home: tuple[Any, int] | None = None,
        done: bool = False,
        square: Tensor | None = None,
    ) -> None:
        self.value = value
        self.home = home
        self.done = done
        self._square = None if square is None else (square, value._version)

    def __repr__(self) -> str:
        return f"Unreduced({'mean' if self.done else 'local'}, shape={tuple(self.value.shape)})"

    @property
    def square(self) -> Tensor | None:
        if self._square is None or self._square[1] != self.value._version:
            return None
        return self._square[0]

    @property
    def counted(self) -> Tensor:
        """The elements that count when ranks add up: of several that have the same ones, once."""
        return self.value if self.home is None else self.home[0].counts(self.home[1], self.value)

    def like(self, value: Tensor) -> Unreduced:
        """Another value of the same leaf, as much or as little averaged."""
        return Unreduced(value, self.home, self.done)

    def map(self, f: Callable[..., Any], others: Sequence[Any]) -> Unreduced:
        if not is_linear(f):
            raise CompositionError(_not_linear(f))
        return self.like(f(*(x.value if isinstance(x, Unreduced) else x for x in others)))

    def map_leaves(self, f: Callable[..., Any], others: Sequence[Any], prefix: str) -> Unreduced:
        if not is_linear(f):
            raise CompositionError(_not_linear(f))
        return self.like(f(prefix, *(x.value if isinstance(x, Unreduced) else x for x in others)))

    @classmethod
    def sums_of(cls, nodes: Sequence[Any], f: Callable[[Tensor], Tensor]) -> list[Tensor]:
        """``f`` of each, averaged over the ranks in one collective: of squares, their mean."""
        if f is square_sum:
            rows = zip(cls.square_sums_of(nodes), nodes, strict=True)
            return [row[0].to(wide_dtype(node.value)) for row, node in rows]
        mine = [f(node.counted) for node in nodes]
        means = cls._means(nodes, torch.stack([x.double() for x in mine]))
        return [x.to(y.dtype) for x, y in zip(means.unbind(), mine, strict=True)]

    @classmethod
    def square_sums_of(cls, nodes: Sequence[Any]) -> list[Tensor]:
        known = [node.square for node in nodes]
        if all(x is not None for x in known):
            rows = zip(known, nodes, strict=True)
            return [x.view(1).to(wide_dtype(node.value)) for x, node in rows]
        mine = square_sums([node.counted for node in nodes])
        return list(cls._means(nodes, mine.double()).to(mine.dtype).split(1))

    @staticmethod
    def _means(nodes: Sequence[Any], mine: Tensor) -> Tensor:
        homes = [node.home for node in nodes if node.home]
        if not homes:
            return mine
        layout, done = homes[0][0], all(node.done for node in nodes if node.home)
        over = layout.parts if done else layout.holders
        if over.size > 1:
            over.all_reduce(mine, label="norms").wait()
        return mine if done else mine / layout.ranks.size

    def sums(self, f: Callable[[Tensor], Tensor]) -> Any:
        return self.sums_of([self], f)[0]

    def held(self) -> Sequence[Tensor | None]:
        return [self.value]

    def names(self) -> list[str]:
        return [""]

    @property
    def num_leaves(self) -> int:
        return 1

    def full(self) -> Any:
        raise CompositionError(_not_linear("zf.full"))

    def select(self, keep: Callable[[str], bool]) -> Unreduced | None:
        return self if keep("") else None

    def merge(self, other: Any) -> Unreduced:
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in ("value", "home", "done"):
            raise AttributeError(name)
        raise CompositionError(_not_linear(f"`.{name}`"))

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        raise CompositionError(_not_linear(func))


def _not_linear(what: Any) -> str:
    name = what if isinstance(what, str) else getattr(what, "__name__", repr(what))
    return (
        f"{name} met gradients that compress_grads leaves unaveraged, so it would see this rank's "
        "own. Average them first (grads = zf.reduced(grads): then gradients are what is "
        "compressed), or, if it is linear in the gradients, say so: "
        "zf.tree.map(zf.linear_map(f), grads)."
    )


register(
    Unreduced,
    lambda node: ((node.value,), (node.home, node.done), ("",)),
    lambda static, children: Unreduced(children[0], *static),
)
