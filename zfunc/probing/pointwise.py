"""Submodules outside of layers that do the same to each position, which may run on some of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from zfunc.modules.split_plans import Role
from zfunc.probing.calls import Probed
from zfunc.probing.exactness import Doubled, close
from zfunc.probing.products import product_of

__all__ = ["forward_of", "pointwise_in", "written"]


def pointwise_in(found: Probed, roles: Mapping[str, Role], width: int) -> tuple[str, ...]:
    """Submodules outside of layers that do the same to each position, and none of them widens it.

    Args:
        found: a module that was called.
        roles: of submodules outside of layers.
        width: of the stream.
    """
    layers = {name for kind in found.kinds for name in kind.names}
    names: list[str] = []

    def walk(name: str, part: nn.Module) -> None:
        if name in layers or name in roles or isinstance(part, nn.Embedding):
            return
        inside = [f"{name}.{x}" if name else x for x, _ in part.named_modules() if x]
        alone = not any(x in layers or x in roles for x in inside)
        if name and alone and _is_pointwise(part, width):
            names.append(name)
            return
        for key, child in part.named_children():
            walk(f"{name}.{key}" if name else key, child)

    walk("", found.module)
    return tuple(names)


def _is_pointwise(part: nn.Module, width: int) -> bool:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(2, 5, width, generator=generator, dtype=torch.float64)
    with ExitStack() as undo, Doubled():
        for child in part.modules():
            product = product_of(child)
            if product is not None:
                undo.enter_context(forward_of(child, _some_product(product.outputs)))
        try:
            if written(part, lambda: part(x.clone())):
                return False
            whole = part(x.clone())
            parts = [part(x[:, some].clone()) for some in (slice(0, 2), slice(2, 5), slice(5, 5))]
        except Exception:  # the module's own code, which may take something else
            return False
    tensors = [y for y in (whole, *parts) if isinstance(y, Tensor)]
    if len(tensors) != 4 or whole.shape[:-1] != x.shape[:-1] or whole.shape[-1] > width:
        return False
    joined = torch.cat(parts, 1)
    return joined.shape == whole.shape and close(joined, whole)


def _some_product(outputs: int) -> Callable[[Tensor], Tensor]:
    """In the place of one whose weight is not there: one that costs little."""
    generator = torch.Generator().manual_seed(6)
    rows = torch.randn(2, outputs, generator=generator, dtype=torch.float64)

    def forward(x: Tensor) -> Tensor:
        mean, first = x.mean(-1, keepdim=True), x[..., :1]
        return mean * rows[0] + first * rows[1]

    return forward


# --- runs of submodules ----------------------------------------------------------------------


@contextmanager
def forward_of(part: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """A block in which a submodule has another forward."""
    before = part.__dict__.get("forward")
    part.__dict__["forward"] = forward
    try:
        yield
    finally:
        if before is None:
            del part.__dict__["forward"]
        else:
            part.__dict__["forward"] = before


def written(part: nn.Module, run: Callable[[], Any]) -> list[str]:
    """Buffers that change when a submodule of the copy runs in training, as running statistics do.

    Trials run as in evaluation, where such statistics are used and not made.
    """
    before = {name: x.clone() for name, x in part.named_buffers()}
    modes = [(x, x.training) for x in part.modules()]
    part.train()
    try:
        run()
    finally:
        for x, mode in modes:
            x.training = mode
    now = dict(part.named_buffers())
    return [name for name, x in before.items() if name not in now or not _same(x, now[name])]


def _same(x: Tensor, y: Tensor) -> bool:
    return x.shape == y.shape and bool(((x == y) | ((x != x) & (y != y))).all())
