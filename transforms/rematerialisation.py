"""``remat``: a layer's activations are not kept but computed again in backward.

Law: ``remat(f)(s, b) == f(s, b)``, bitwise: the second forward pass of a layer has the
inputs, the parameters and the random keys of the first.

The recomputation surrounds the layer from outside, before its parameters enter: they
enter again in backward, which at stage 3 they do anyway, and neither they nor what
they were cast from are kept in between.

Source: Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016,
https://arxiv.org/abs/1604.06174; torch's non-reentrant checkpoint does the work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.utils.checkpoint import checkpoint

from zfunc.engine.hooks import LayerInfo, Order
from zfunc.engine.recomputation import Twice, cannot
from zfunc.engine.step import Transform, transform_of
from zfunc.errors import CompositionError
from zfunc.modules.caches import caches_in, without_caches

__all__ = ["Remat", "remat"]

Policy = str | int | Callable[[LayerInfo], bool]


@dataclass(frozen=True)
class Remat(Transform):
    """See :func:`remat`."""

    policy: Policy = "layer"

    position: ClassVar[int] = Order.REMAT
    name: ClassVar[str] = "remat"

    def __post_init__(self) -> None:
        ok = (
            self.policy >= 1
            if isinstance(self.policy, int) and not isinstance(self.policy, bool)
            else self.policy == "layer" or callable(self.policy)
        )
        if not ok:
            raise ValueError(
                f'remat(policy={self.policy!r}): expected "layer" (every layer), a number n (every '
                "n-th), or a function of LayerInfo(index, name) that says which."
            )

    def __repr__(self) -> str:
        return "remat" if self.policy == "layer" else f"remat(policy={self.policy!r})"

    def chooses(self, info: LayerInfo) -> bool:
        """Whether this layer is computed again."""
        if isinstance(self.policy, int):
            return info.index % self.policy == 0
        return bool(self.policy(info)) if callable(self.policy) else True

    def layer(self, call: Callable[..., Any], info: LayerInfo) -> Callable[..., Any]:
        if not self.chooses(info):
            return call

        def run(*xs: Any, **kw: Any) -> Any:
            if cannot() or not torch.is_grad_enabled():
                return call(*xs, **kw)
            xs, kw = _without_caches(info, xs, kw)
            body = Twice(call)
            return checkpoint(body, kw, *xs, use_reentrant=False, preserve_rng_state=body.keyless)

        return run

    def describe(self, memo: Mapping[Any, Any]) -> list[str]:
        if self.policy in ("layer", 1):
            which = "each layer is"
        else:
            which = f"one layer in {self.policy} is" if isinstance(self.policy, int) else "some are"
        return [f"remat: {which} computed again in backward; what lies between is not kept"]


def _without_caches(
    info: LayerInfo, xs: tuple[Any, ...], kw: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A layer's inputs without caches: a layer writes to its cache, so it could not run twice.

    Raises:
        CompositionError: the loss has given the model a cache that holds something.
    """
    found = caches_in(xs, kw)
    for cache in found:
        if int(cache.get_seq_length(info.depth)):
            raise CompositionError(
                f"layer {info.place} would attend to a cache that holds keys already, and remat "
                "would run it twice. Leave this layer out: remat(step, policy=lambda layer: ...)."
            )
    return without_caches(xs, kw) if found else (xs, kw)


@transform_of
def remat(policy: Policy = "layer") -> Remat:
    """Trade compute for memory: run layers a second time instead of keeping activations.

    Call it as ``remat(step)``, ``remat(step, policy=2)`` or as the decorator ``@remat()``.
    It acts on what goes through ``zf.layer``: the layers of ``zf.scan`` and of
    functionalized modules. Layers inside a recomputed layer are part of it.

    Args:
        policy: ``"layer"`` for every layer; a number n for every n-th call, the first
            included; or a function of ``LayerInfo(index, name)``.

    Raises:
        ValueError: another policy.
        CompositionError: the step has a remat already.
    """
    return Remat(policy)
