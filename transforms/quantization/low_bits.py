"""Inference on low-bit parameters.

Law: ``quantize(fn, bits=b)(place(p), x) == fn(dequantize_tree(quantize_tree(p, b)), x)``, up to
the rounding of inputs in the products (to 16 bits with 8-bit weights, to bf16 with 4-bit ones).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import optree
from torch import Tensor

from zfunc.engine.hooks import Order
from zfunc.engine.inference import Inference
from zfunc.engine.step import Step, Transform
from zfunc.errors import CompositionError, PlacementError
from zfunc.layout.readable import Readable
from zfunc.modules.functional import Functional
from zfunc.quant.choice import Include, fixed, module_of
from zfunc.quant.grids import Format
from zfunc.quant.low_bit import Code
from zfunc.quant.model_files import Choose, MakeCutter, known, quantize_files
from zfunc.quant.qtensor import QTensor
from zfunc.quant.trees import dequantize_tree, format_of, quantize_tree
from zfunc.trees.nodes import NAMESPACE, OPAQUE, Box, leaves_in

__all__ = ["LowBits", "low_bits"]


@dataclass(frozen=True)
class LowBits(Transform):
    """See :func:`zfunc.transforms.quantize`."""

    format: Format
    include: Include = None
    model: Functional | None = field(default=None, repr=False)
    cutter: MakeCutter | None = field(default=None, repr=False, compare=False)
    choose: Choose | None = field(default=None, repr=False, compare=False)

    position: ClassVar[int] = Order.LOW_BITS
    represents: ClassVar[bool] = True
    of_params = True
    name: ClassVar[str] = "quantize"

    def __repr__(self) -> str:
        return f"quantize(bits={self.format.bits})"

    def beside(self, others: Any) -> Transform:
        for other in others:
            if other.name not in ("pipeline", "shard", "split"):
                raise CompositionError(
                    f"quantize(bits={self.format.bits}) is for inference, {other.name} for "
                    "training steps. To train into low bits write "
                    f"quantize(step, start_bits=16, target_bits={self.format.bits})."
                )
        split = next((other for other in others if other.name == "split"), None)
        pipeline = next((other for other in others if other.name == "pipeline"), None)
        choose = getattr(pipeline, "choose", None)
        return replace(self, cutter=getattr(split, "cutter", None), choose=choose)

    def place(self, state: Any) -> Any:
        form = self.format
        how = form.bits, form.group_size, form.symmetric, self.include
        if isinstance(state, str | os.PathLike):
            more: Any = {"dynamic": form.dynamic, "model": known(self.model, state)}
            return quantize_files(state, *how, **more, cutter=self.cutter, choose=self.choose)
        return _copied(quantize_tree(state, *how, dynamic=form.dynamic, model=self.model))

    def unplace(self, state: Any) -> Any:
        return dequantize_tree(state)

    def check(self, state: Any) -> None:
        found = _bits_of(state)
        if found and self.format.bits not in found:
            raise PlacementError(
                f"these parameters are stored in {' and '.join(map(str, sorted(found)))} bits, so "
                f"another function than {self!r} has placed them. Give each function what its own "
                "`place` returned."
            )

    def describe(self, memo: Mapping[Any, Any]) -> list[str]:
        return [f"quantize: parameters in {self.format}"]


def low_bits(
    bits: int,
    *,
    group_size: int | None = 128,
    symmetric: bool = True,
    include: Include = None,
    dynamic: bool = False,
) -> Callable[[Callable[..., Any]], Step]:
    """The inference transform at this many bits."""
    form, chosen = format_of(bits, group_size, symmetric, dynamic), fixed(include)

    def wrap(fn: Callable[..., Any]) -> Step:
        inner = fn if isinstance(fn, Step) else Step(Inference(fn))
        return inner.wrap(LowBits(form, chosen, module_of(inner.fn)))

    return wrap


def _bits_of(params: Any) -> set[int]:
    """In how many bits low-bit leaves are stored."""
    leaves = leaves_in(params, OPAQUE)
    if all(kind is Tensor for kind in set(map(type, leaves))):
        return set()
    leaves += [leaf for x in leaves if isinstance(x, Box) for leaf in leaves_in(x.tree)]
    nodes = [x for x in leaves if isinstance(x, Readable)]
    codes = [slot.code for node in nodes for slot in node.layout.present if slot.code is not None]
    return {x.format.bits for x in (*leaves, *codes) if isinstance(x, QTensor | Code)}


def _copied(low: Any) -> Any:
    """``place`` shares no memory with what it was given: leaves that were not chosen are copied."""
    return optree.tree_map(
        lambda x: x.clone() if isinstance(x, Tensor) and not isinstance(x, QTensor) else x,
        low,
        namespace=NAMESPACE,
    )
