"""Zeros that take no memory yet: moments of an optimizer that has seen nothing.

A full state has two or three times the memory of its parameters in moments, all of them zero. They
are tensors of the full shape that have one element in memory; ``place`` makes what a rank keeps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _get_current_dispatch_mode

from zfunc.trees.nodes import Tree

__all__ = ["begun", "is_unmade"]


class _Unmade(TorchFunctionMode):
    """``zeros_like`` gives one zero, expanded."""

    def __init__(self) -> None:
        super().__init__()
        self.zeros: list[Tensor] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.zeros_like and len(args) == 1 and kwargs.keys() <= {"dtype", "device"}:
            like = args[0]
            plain = like.layout == torch.strided and like.is_contiguous() and not like.is_quantized
            if plain and like.numel() > 1:
                self.zeros.append(zero := like.new_zeros((), **kwargs))
                return zero.expand(like.shape)
        return func(*args, **kwargs)


def begun(tx: Any, params: Tree) -> Any:
    """``tx.init(params)``, whose zeros take no memory."""
    watched = getattr(mode := _get_current_dispatch_mode(), "every_operation", mode is not None)
    if watched or torch.is_inference_mode_enabled():  # whose tensors do not say who wrote to them
        return tx.init(params)
    try:
        with _Unmade() as unmade:
            state = tx.init(params)
    except RuntimeError:  # it writes into its zeros
        return tx.init(params)
    written = any(x._version for x in unmade.zeros)  # one of them is all of them
    return tx.init(params) if written else state


def is_unmade(x: Any) -> bool:
    """Whether a tensor is one element in memory that stands for many."""
    return isinstance(x, Tensor) and x.numel() > 1 and not any(x.stride())
