"""Layers that ``torch.compile`` compiles: each layer's forward, on weights that are there.

What surrounds a layer stays outside of the compiled region: gathering its parameters, freeing
them, its key, its second run in backward. So transforms work as before, and all layers of one
kind have one graph.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zfunc.errors import CompositionError
from zfunc.layout.splits import Encoded
from zfunc.modules.caches import caches_in, without_caches
from zfunc.modules.units import Anatomy

__all__ = ["Compile", "check_split", "compile_of", "compiles"]

Forward = Callable[..., Any]

_LOW_BITS = (
    "torch.compile cannot follow products with low-bit weights as parts of one graph. Write "
    'compile={"fullgraph": False}, and they run between graphs, or leave compile out.'
)


@dataclass(frozen=True, eq=False)
class Compile:
    """Compiles the layers of a copy of a module; of no other part.

    Attributes:
        layers: the names of their modules, and at which place of its stack each is.
        options: keywords of ``torch.compile``.
    """

    layers: Mapping[str, int]
    options: Mapping[str, Any]

    def __call__(self, module: nn.Module) -> None:
        """Give them another ``forward``, in place."""
        for name, index in self.layers.items():
            part = module.get_submodule(name)
            part.__dict__["forward"] = self._compiled(part, index)

    def _compiled(self, part: nn.Module, index: int) -> Forward:
        forward = part.forward
        compiled = torch.compile(forward, **self.options)

        @functools.wraps(forward)
        def call(*xs: Any, **kw: Any) -> Any:
            if found := caches_in(xs, kw):
                # One that is filled counts, and one that is wanted: each layer would be unlike
                # the one before, and have a graph of its own.
                if not torch.is_grad_enabled() or any(int(x.get_seq_length(index)) for x in found):
                    return forward(*xs, **kw)
                xs, kw = without_caches(xs, kw)
            try:
                return compiled(*xs, **kw)
            except torch._dynamo.exc.Unsupported as error:
                if any(isinstance(x, Encoded) for x in _held(part)):
                    raise CompositionError(_LOW_BITS) from error
                raise

        return call


def _held(part: nn.Module) -> Iterator[Any]:
    """What stands in a layer in the place of its parameters."""
    return (x for module in part.modules() for x in module._parameters.values())


def compile_of(how: bool | Mapping[str, Any], anatomy: Anatomy) -> Compile | None:
    """What ``functionalize(compile=how)`` asks for, if it asks for anything.

    Raises:
        TypeError: ``how`` is neither a bool nor keywords of ``torch.compile``.
        ValueError: there are no layers to compile.
    """
    if how is False:
        return None
    if how is not True and not isinstance(how, Mapping):
        raise TypeError(
            f"compile={how!r}: expected True, or a dict of torch.compile's keywords, such as "
            '{"mode": "max-autotune-no-cudagraphs"}'
        )
    if not anatomy.units:
        raise ValueError("compile: this module has no layers; name some, functionalize(units=...)")
    importlib.import_module("torch._dynamo")  # once it is there, `uncompiled` blocks hold it back
    options = {"fullgraph": True} | (dict(how) if isinstance(how, Mapping) else {})
    return Compile({unit.module: unit.index for unit in anatomy.units}, options)


def compiles(fuses: Iterable[Any]) -> bool:
    """Whether one of a pool's changes to its templates compiles layers."""
    return any(isinstance(fuse, Compile) for fuse in fuses)


def check_split(fuses: Iterable[Any]) -> None:
    """Raise ``CompositionError`` if they compile layers, which then cannot be split over ranks."""
    if compiles(fuses):
        raise CompositionError(
            "split puts collectives into layers, which torch.compile cannot follow. Leave "
            "compile out of functionalize() where a step splits layers."
        )
