"""``TrainState``: everything that a step reads and writes, as one frozen pytree."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import optree
import torch
from torch import Tensor

from zfunc.errors import PlacementError
from zfunc.layout.freezing import (
    all_frozen,
    check_trainable,
    freeze,
    frozen_paths,
    is_frozen,
    leaves_at,
    thawed,
    without_frozen,
)
from zfunc.layout.low_bits import check_none_trains
from zfunc.ranks.keys import as_key
from zfunc.trees import tree
from zfunc.trees.nodes import PLACED, Box, Lazy, leaves_in
from zfunc.trees.zeros import begun

__all__ = ["TrainState"]

_LEAVES = ("params", "opt_state", "step", "key", "buffers", "aux")


@dataclass(frozen=True)
class TrainState:
    """The state of a training run.

    Attributes:
        params: pytree of floating-point tensors.
        opt_state: what the optimizer keeps.
        step: 0-d int64 tensor, the number of steps taken.
        key: random key (:mod:`zfunc.random`); with ``step`` it decides what losses draw.
        buffers: what the model keeps besides parameters (BatchNorm statistics), or None.
        aux: what transforms and users carry along.
        frozen: static; dotted paths of the parameters that have no gradient.
    """

    params: Any
    opt_state: Any
    step: Tensor
    key: Tensor
    buffers: Any = None
    aux: Any = field(default_factory=dict)
    frozen: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.frozen:
            object.__setattr__(self, "params", _marked(self.params, self.frozen))

    @classmethod
    def create(
        cls,
        params: Any,
        tx: Any,
        key: int | Tensor = 0,
        buffers: Any = None,
        trainable: Callable[[str], bool] | None = None,
        aux: Any = None,
    ) -> TrainState:
        """The state before the first step.

        Args:
            params: pytree of floating-point tensors; not copied.
            tx: the optimizer; ``tx.init`` sees ``None`` at frozen leaves.
            key: a seed or a random key.
            trainable: predicate on dotted leaf paths; the other leaves stay frozen. By default
                those that ``functionalize`` found frozen in its module, which it overrides.

        Raises:
            PlacementError: a parameter is no floating-point tensor, or one in low bits that is
                not frozen; or all are frozen.
            TypeError: ``tx`` is no ``GradientTransformation``.

        >>> from zfunc import optim
        >>> TrainState.create({"w": torch.zeros(2)}, optim.sgd(0.1)).step
        tensor(0)
        """
        check_optimizer(tx, "TrainState.create()")
        paths = tree.paths(params)
        for path, leaf in zip(
            paths,
            optree.tree_leaves(params, none_is_leaf=True, namespace=tree.NAMESPACE),
            strict=False,
        ):
            _check(path, leaf)
        if trainable is None:
            frozen = frozen_paths(params)
            if frozen and not leaves_in(without_frozen(params)):
                raise all_frozen(frozen)
        else:
            params, frozen = thawed(params), tuple(p for p in paths if not trainable(p))
            if len(frozen) == len(paths):
                raise PlacementError(
                    f"`trainable` accepts none of the {len(paths)} parameters; it is called with "
                    f"dotted paths such as {paths[0] if paths else '(none)'!r}."
                )
        still = frozenset(frozen)
        held = tree.select(params, lambda path: path not in still) if frozen else params
        check_none_trains(held)
        return cls(
            params=params,
            opt_state=begun(tx, held),
            step=torch.zeros((), dtype=torch.int64),
            key=as_key(key),
            buffers=buffers,
            aux={} if aux is None else aux,
            frozen=frozen,
        )

    def replace(self, **changes: Any) -> TrainState:
        """A copy with some attributes changed.

        >>> from zfunc import optim
        >>> state = TrainState.create({"w": torch.zeros(2)}, optim.sgd(0.1))
        >>> state.replace(step=state.step + 1).step
        tensor(1)
        """
        return dataclasses.replace(self, **changes)

    def __repr__(self) -> str:
        from zfunc.trees.forms import as_text, fields  # where something is shown

        return as_text(fields(self, _LEAVES))

    def _repr_html_(self) -> str:
        from zfunc.trees.forms import as_html, fields

        return as_html(fields(self, _LEAVES))


def check_optimizer(tx: Any, where: str) -> None:
    """Raise ``TypeError`` if ``tx`` is no pair of ``init`` and ``update``."""
    if callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None)):
        return
    kind = tx if isinstance(tx, type) else type(tx)
    raise TypeError(
        f"{where} got {kind.__module__}.{kind.__name__} for the optimizer; expected a "
        "GradientTransformation with `init` and `update`, such as zf.optim.adamw(1e-3). (Those of "
        "torch.optim change a module's own parameters.)"
    )


def _check(path: str, leaf: Any) -> None:
    if isinstance(leaf, torch.nn.Module):
        raise PlacementError(
            f"{path or 'params'} is a module ({type(leaf).__name__}); parameters are a tree of "
            "tensors: model = zf.functionalize(module), and give model.params."
        )
    if not path and hasattr(leaf, "params"):
        raise PlacementError(
            f"params is a {type(leaf).__name__}; give its .params, a tree of tensors."
        )
    if leaf is not None:
        check_trainable(path, leaf)


def _marked(params: Any, frozen: tuple[str, ...]) -> Any:
    """Plain frozen leaves carry a mark, which copies may lose: renew it."""
    if isinstance(params, tree.Placed | Box | Lazy):
        return params  # what a lazy tree is filled into has its marks
    leaves, spec = optree.tree_flatten(params, none_is_leaf=True, namespace=PLACED)
    lost = [i for i in leaves_at(spec, frozen) if _unmarked(leaves[i])]
    if not lost:
        return params
    for i in lost:
        leaves[i] = freeze(leaves[i].detach())
    return optree.tree_unflatten(spec, leaves)


def _unmarked(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and not is_frozen(leaf)


def _flatten(state: TrainState) -> tuple[tuple[Any, ...], tuple[str, ...], tuple[str, ...]]:
    return tuple(getattr(state, name) for name in _LEAVES), state.frozen, _LEAVES


tree.register(
    TrainState,
    _flatten,
    lambda frozen, children: TrainState(**dict(zip(_LEAVES, children, strict=True)), frozen=frozen),
)
