"""Submodules that are columns and rows in one, as experts in three-dimensional leaves are.

Their code cannot be looked into, but tried: the sum of what it gives on each rank's parts must be
what it gives on the whole. Sizes say which parts may be meant.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from fractions import Fraction
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from zfunc.errors import PlacementError
from zfunc.layout.splits import Cut, Split
from zfunc.probing.calls import LARGE, Call, cloned, tensors_in
from zfunc.probing.numbers import Numbers, numbers_read_in
from zfunc.probing.products import product_of
from zfunc.probing.reaches import Refused
from zfunc.probing.stages import Stage
from zfunc.probing.trials import close, divided, local_parameters, numbers_set

__all__ = ["networks_in", "split_network"]


def networks_in(stage: Stage) -> list[str]:
    """Names of the submodules that multiply by parameters of their own and are no products."""
    found = []
    for name, part in stage.layer.named_modules():
        held = [p for p in part._parameters.values() if p is not None]
        multiplies = any(p.ndim > 1 for p in held) and len(held) > 1
        if name and multiplies and product_of(part) is None and not _has_parts(part):
            found.append(name)
    return found


def _has_parts(part: nn.Module) -> bool:
    return any(True for child in part.children() for _ in child.parameters())


def split_network(stage: Stage, name: str, ways: int) -> tuple[dict[str, Split], Numbers]:
    """How the parameters of a submodule are split, by name within the layer.

    Raises:
        Refused: no way was right.
    """
    part = stage.layer.get_submodule(name)
    if any(p.numel() > LARGE for p in part.parameters()):
        raise Refused("it is too large to be tried")
    call = _seen(stage, part)
    if call is None:
        raise Refused("it was not called")
    whole = _ran(part, call)
    if whole is None:
        raise Refused("it gives more than one tensor")
    for splits, size in _ways_to_split(part, ways):
        for numbers in _sets(part, name, call, size, ways):
            total: Tensor | None = torch.zeros_like(whole)
            for rank in range(ways):
                mine = _part_of(part, call, splits, numbers, rank)
                total = None if mine is None or mine.shape != whole.shape else total + mine
                if total is None:
                    break
            if total is not None and close(total, whole):
                return {f"{name}.{key}": split for key, split in splits.items()}, numbers
    raise Refused("parts of its leaves do not give parts of what it gives, along any dimension")


def _seen(stage: Stage, part: nn.Module) -> Call | None:
    """What the submodule is given when its layer runs."""
    seen: list[Call] = []

    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        args, kwargs = cloned((args, kwargs), lambda _, x: x.detach().clone())
        seen.append(Call(args, kwargs, frozenset()))

    handle = part.register_forward_pre_hook(note, with_kwargs=True)
    try:
        stage.run()
    finally:
        handle.remove()
    return seen[0] if seen else None


def _ran(part: nn.Module, call: Call) -> Tensor | None:
    args, kwargs = cloned((call.args, call.kwargs), lambda _, x: x.clone())
    out = part(*args, **kwargs)
    found = tensors_in(out)
    return found[0] if isinstance(out, Tensor) and len(found) == 1 else None


def _part_of(
    part: nn.Module, call: Call, splits: dict[str, Split], numbers: Numbers, rank: int
) -> Tensor | None:
    with ExitStack() as stack:
        stack.enter_context(local_parameters(part, splits, rank))
        stack.enter_context(numbers_set(numbers, rank))
        try:
            return _ran(part, call)
        except Exception:  # the module's own code on parts that are not right
            return None


def _ways_to_split(part: nn.Module, ways: int) -> Iterator[tuple[dict[str, Split], int]]:
    """Every leaf along a dimension of some size, or of twice that size, as gate and up are."""
    shapes = {key: tuple(p.shape) for key, p in part._parameters.items() if p is not None}
    sizes = sorted({n for shape in shapes.values() for n in shape if n >= ways}, reverse=True)
    for size in sizes:
        options = {key: _cuts(shape, size) for key, shape in shapes.items()}
        for chosen in product(*options.values()):
            named = zip(shapes.items(), chosen, strict=True)
            cuts = {key: (cut, shape) for (key, shape), cut in named if cut is not None}
            if len(cuts) > 1:
                yield {key: _split(*pair, ways) for key, pair in cuts.items()}, size


def _cuts(shape: Sequence[int], size: int) -> list[Cut | None]:
    found: list[Cut | None] = []
    for dim in reversed(range(len(shape))):
        if shape[dim] == size:
            found.append(Cut(dim))
        elif shape[dim] == 2 * size:
            found += [Cut(dim, parts=2), Cut(dim, by=size)]
    return [*found, None]


def _split(cut: Cut, shape: Sequence[int], ways: int) -> Split:
    try:
        return cut.split(shape, ways)
    except PlacementError as error:
        raise Refused(str(error)) from error


def _sets(part: nn.Module, name: str, call: Call, size: int, ways: int) -> Iterator[Numbers]:
    yield {}
    split = Cut(0).split((size,), ways)
    share = [Fraction(split.width(r), size) for r in range(ways)]
    options = [
        (number, values[0])
        for number in numbers_read_in(part, name, lambda: _ran(part, call))
        if number.value in (size, 2 * size) and (values := divided(number.value, [share]))
    ]
    for n in range(1, 2 ** len(options)):
        yield {number: v for i, (number, v) in enumerate(options) if n >> i & 1}
