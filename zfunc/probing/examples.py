"""The arguments with which a module is called to see how it is split."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zfunc.modules.functional import Functional

__all__ = ["examples_of"]

TEXTS, LENGTH = 2, 5
Example = tuple[str, tuple[Any, ...], Any]
"""What it is, positional arguments, and named ones."""


def examples_of(functional: Functional, example: Any) -> list[Example]:
    """What is tried, one after the other: a user's, or else ids and the module's own."""
    named = functional.signature.parameters
    quiet = {"use_cache": False} if "use_cache" in named else {}
    if example is not None:
        args, kwargs = _arguments(example)
        return [("the example", args, {**quiet, **kwargs})]
    generator = torch.Generator().manual_seed(2)
    size = _vocabulary(functional)
    ids = torch.randint(2 if size > 4 else 0, size, (TEXTS, LENGTH), generator=generator)
    found: list[Example] = [("integer ids", (ids,), quiet)]
    if "input_ids" in named:
        found = [("integer ids", (), {"input_ids": ids, **quiet})]
    dummy = getattr(functional._pool.skeleton, "dummy_inputs", None)
    if isinstance(dummy, Mapping):
        dummy = {key: _value(x) for key, x in dummy.items() if key in named}
        if "decoder_input_ids" in named and "input_ids" in dummy:
            dummy = {**dummy, "input_ids": ids, "decoder_input_ids": ids.flip(0)}
        found.append(("its dummy_inputs", (), {**dummy, **quiet}))
    return found


def _vocabulary(functional: Functional) -> int:
    """How many different ids every table has, be it one of few positions."""
    sizes = [
        part.num_embeddings
        for part in functional._pool.skeleton.modules()
        if isinstance(part, nn.Embedding)
    ]
    return min([n for n in sizes if n > LENGTH] or sizes or [2])


def _arguments(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example, Mapping):
        return (), {key: _value(x) for key, x in example.items()}
    if isinstance(example, tuple | list) and not _is_shape(example):
        return tuple(map(_value, example)), {}
    return (_value(example),), {}


def _is_shape(x: Any) -> bool:
    return isinstance(x, tuple | list) and bool(x) and all(type(n) is int for n in x)


def _value(x: Any) -> Any:
    generator = torch.Generator().manual_seed(3)
    if _is_shape(x):
        return torch.randn(*x, generator=generator, dtype=torch.float64)
    if not isinstance(x, Tensor):
        return x
    if x.is_meta:
        draw = torch.randn(x.shape, generator=generator, dtype=torch.float64)
        return draw if x.is_floating_point() else torch.zeros(x.shape, dtype=x.dtype)
    x = x.detach().cpu()
    return x.double() if x.is_floating_point() else x
