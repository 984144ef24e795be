"""The arguments with which a module is called to see how it is split."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, combinations
from typing import Any

import torch
from torch import Tensor, nn

from zfunc.modules.functional import Functional
from zfunc.probing.arguments import cloned, tensors_in

__all__ = ["examples_of", "larger", "shapes_in", "smallest"]

TEXTS, LENGTH = 2, 5
MOST = 4  # shapes of which each may be that of ids: 16 calls
Example = tuple[str, tuple[Any, ...], Any]
"""What it is, positional arguments, and named ones."""


def examples_of(functional: Functional, example: Any) -> list[Example]:
    """What is tried, one after the other: a user's, or else ids and the module's own."""
    named = functional.signature.parameters
    quiet = {"use_cache": False} if "use_cache" in named else {}
    if example is not None:
        return [
            (f"the example{told}", args, {**quiet, **kwargs})
            for told, args, kwargs in _of_user(functional, example)
        ]
    ids = _ids((TEXTS, LENGTH), _vocabulary(functional))
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


def shapes_in(functional: Functional, example: Any) -> dict[str, tuple[int, ...]]:
    """The arguments, by name, of which a user's example gives the shape alone."""
    given = _arguments(example).items()
    return {_name(functional, key): tuple(x) for key, x in given if _is_shape(x)}


def larger(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    """Arguments of one text more, that are longer, too, where all of them are texts.

    What is for each head may lie in one dimension with texts or positions, in either order.
    """
    if not _are_batches(given := tensors_in((args, kwargs))):
        return
    for more in (2, 0) if _are_texts(given) else (0,):

        def grown(_: int, x: Tensor, more: int = more) -> Tensor:
            x = torch.cat([x, x[:1]])
            return torch.cat([x, x[:, :more]], 1) if more else x

        yield cloned((args, kwargs), grown)


def smallest(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    """Arguments of one text, of one position where all of them are texts.

    Some code does something else where it generates, or where there is nothing to choose from.
    """
    if _are_batches(given := tensors_in((args, kwargs))):
        length = 1 if _are_texts(given) else None
        yield cloned((args, kwargs), lambda _, x: x[:1] if length is None else x[:1, :length])


def _are_batches(given: Sequence[Tensor]) -> bool:
    """Whether there are tensors, of as many rows each."""
    return bool(given) and all(x.ndim and len(x) == len(given[0]) for x in given)


def _are_texts(given: Sequence[Tensor]) -> bool:
    """Whether the first of them is text, and the others go with it position for position."""
    same = all(x.ndim == 2 and x.shape == given[0].shape for x in given)
    return same and not given[0].is_floating_point()


def _of_user(functional: Functional, example: Any) -> Iterable[Example]:
    """What a user gave. A shape does not say of what: of floats, or of ids where those fail."""
    given = _arguments(example)
    shapes = [key for key, x in given.items() if _is_shape(x)]
    sizes = range(len(shapes) + 1) if len(shapes) <= MOST else (0, len(shapes))
    for ids in chain.from_iterable(combinations(shapes, n) for n in sizes):
        size = _vocabulary(functional, least=len(ids) > 1)  # nobody knows which is for which table
        values = {key: _ids(x, size) if key in ids else _value(x) for key, x in given.items()}
        args = tuple(x for key, x in values.items() if isinstance(key, int))
        names = ", ".join(_name(functional, key) for key in ids)
        told = f" with integer ids for {names}" if ids else ""
        yield told, args, {key: x for key, x in values.items() if isinstance(key, str)}


def _name(functional: Functional, key: int | str) -> str:
    names = list(functional.signature.parameters)
    return names[key] if isinstance(key, int) and key < len(names) else str(key)


def _ids(shape: Iterable[int], size: int) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randint(2 if size > 4 else 0, size, tuple(shape), generator=generator)


def _vocabulary(functional: Functional, least: bool = False) -> int:
    """How many different ids every table has, be it one of few positions; ``least``: or kinds."""
    sizes = [
        part.num_embeddings
        for part in functional._pool.skeleton.modules()
        if isinstance(part, nn.Embedding)
    ]
    return min([n for n in sizes if n > LENGTH and not least] or sizes or [2])


def _arguments(example: Any) -> dict[int | str, Any]:
    """By place or by name."""
    if isinstance(example, Mapping):
        return dict(example)
    if isinstance(example, tuple | list) and not _is_shape(example):
        return dict(enumerate(example))
    return {0: example}


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
