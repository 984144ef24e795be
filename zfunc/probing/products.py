"""Which submodules are products with a weight, whatever their class is called."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["Product", "product_of", "stand_in"]


@dataclass(frozen=True)
class Product:
    """A submodule that gives ``x @ weight.T + bias``, or ``x @ weight + bias``.

    Attributes:
        inputs, outputs: its widths.
        turned: its weight is ``[inputs, outputs]``, as in GPT-2.
    """

    inputs: int
    outputs: int
    turned: bool

    @property
    def numel(self) -> int:
        """Elements of its weight."""
        return self.inputs * self.outputs


class _StandIn:
    """A forward in the place of a product's, which is told from one that a user has put there."""

    def __init__(self, forward: Callable[[Tensor], Tensor]) -> None:
        self.forward = forward

    def __call__(self, x: Tensor) -> Tensor:
        return self.forward(x)


def stand_in(forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """What gives other numbers in the place of a product."""
    return _StandIn(forward)


def product_of(part: nn.Module) -> Product | None:
    """What a submodule is as a product; ``None`` if it is none.

    >>> product_of(nn.Linear(3, 4))
    Product(inputs=3, outputs=4, turned=False)
    >>> product_of(nn.Embedding(3, 4)) is None
    True
    """
    held = {key: p for key, p in part._parameters.items() if p is not None}
    weight = held.get("weight")
    own = part.__dict__.get("forward")
    if own is not None and not isinstance(own, _StandIn):
        return None  # a forward of its own, which is not that of its class
    if part._modules or weight is None or weight.ndim != 2 or held.keys() - {"weight", "bias"}:
        return None
    turned = _turned(part, held)
    if turned is None:
        return None
    a, b = weight.shape
    return Product(a, b, True) if turned else Product(b, a, False)


def _turned(part: nn.Module, held: dict[str, nn.Parameter]) -> bool | None:
    """Whether it multiplies by the weight as it lies, tried on a small one; None: by neither."""
    if type(part).forward is nn.Linear.forward:
        return False
    if isinstance(part, nn.Embedding):
        return None
    for turned in (False, True):
        if all(_multiplies(part, held, turned, training) for training in (False, True)):
            return turned
    return None


def _multiplies(
    part: nn.Module, held: dict[str, nn.Parameter], turned: bool, training: bool
) -> bool:
    a, b = held["weight"].shape
    rows, columns = (3, 3) if a == b else (3, 2)
    width, out = (rows, columns) if turned else (columns, rows)
    generator = torch.Generator().manual_seed(0)
    draw = functools.partial(torch.randn, generator=generator, dtype=torch.float64)
    x, weight = draw(2, 2, width), draw(rows, columns)
    bias = draw(out) if "bias" in held else None
    twin = copy.copy(part)
    twin.__dict__ = {k: v for k, v in part.__dict__.items() if k != "forward"}
    twin.__dict__["training"] = training
    for key, value in part.__dict__.items():  # some keep their widths beside the weight
        if type(value) is int and value in (a, b):
            twin.__dict__[key] = rows if value == a else columns
    twin.__dict__["_parameters"] = dict.fromkeys(part._parameters)
    values: dict[str, Tensor | None] = {"weight": weight, "bias": bias}
    twin._parameters.update({key: values[key] for key in held})  # type: ignore[misc]
    try:
        with torch.no_grad():
            found = twin.forward(x)
    except Exception:  # whatever it is, it is no product: any module is asked
        return False
    expected = F.linear(x, weight.mT if turned else weight, bias)
    return (
        isinstance(found, Tensor)
        and found.shape == expected.shape
        and torch.allclose(found, expected, rtol=1e-9, atol=1e-9)
    )
