"""Submodules that are columns and rows in one, as experts in three-dimensional leaves are.

Their code cannot be looked into, but tried: the sum of what it gives on each rank's parts must be
what it gives on the whole. Sizes say which parts may be meant.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import islice, product
from typing import Any

import torch
from torch import Tensor, nn

from zfunc.errors import PlacementError
from zfunc.layout.splits import Cut, Split
from zfunc.probing.arguments import cloned, tensors_in
from zfunc.probing.copies import LARGE, LayerInputs
from zfunc.probing.exactness import Doubled, Undropped, close
from zfunc.probing.numbers import Numbers, numbers_read_in
from zfunc.probing.products import product_of
from zfunc.probing.reaches import Refused
from zfunc.probing.stages import Stage
from zfunc.probing.trials import local_parameters, numbers_set

__all__ = ["Network", "networks_in", "split_network"]


TRIES = 600  # of ways to split leaves: of many leaves there are more than anyone tries


@dataclass(frozen=True)
class Network:
    """How a submodule is split that is a column and a row in one.

    Attributes:
        splits: of its parameters, by name within the layer.
        numbers: what differs beside them.
        once: of its own parameters those that the first rank alone counts.
    """

    splits: dict[str, Split]
    numbers: Numbers
    once: tuple[str, ...]


class _Once:
    """What is to be done with a leaf that is added to what ranks sum."""


ONCE = _Once()


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


def split_network(stage: Stage, name: str, ways: int) -> Network:
    """How the parameters of a submodule are split.

    Raises:
        Refused: no way was right.
    """
    part = stage.layer.get_submodule(name)
    call = _seen(stage, part)
    if call is None:
        raise Refused("it was not called")
    shapes = {key: tuple(p.shape) for key, p in part._parameters.items() if p is not None}
    sizes = {n: n for shape in shapes.values() for n in shape}
    tried = part
    if any(p.numel() > LARGE for p in part.parameters()):
        sizes = _smaller(list(shapes.values()), ways)
        tried, call = _small(part, call, sizes)
    modes = sorted({each.training for each in stage.calls})
    wholes = [(each, _ran(tried, each)) for each in (replace(call, training=x) for x in modes)]
    if any(whole is None for _, whole in wholes):
        raise Refused("it gives more than one tensor, or cannot be tried in small")
    for cuts, once, size in islice(_ways_to_split(shapes, ways), TRIES):
        small = {
            key: _split(replace(cut, by=cut.by and sizes[cut.by]), p.shape, ways)
            for key, cut in cuts.items()
            if (p := tried._parameters[key]) is not None
        }
        for numbers in _sets(part, tried, name, call, size, sizes, ways):
            if all(_adds_up(tried, each, small, once, numbers, x, ways) for each, x in wholes):
                splits = {key: _split(cut, shapes[key], ways) for key, cut in cuts.items()}
                real = {n.of(part): _shares(n.of(part).value, size, ways) for n in numbers}
                named = {f"{name}.{key}": split for key, split in splits.items()}
                return Network(named, real, once)
    raise Refused("parts of its leaves do not give parts of what it gives, along any dimension")


def _adds_up(
    part: nn.Module,
    call: LayerInputs,
    splits: dict[str, Split],
    once: Sequence[str],
    numbers: Numbers,
    whole: Tensor | None,
    ways: int,
) -> bool:
    """Whether what parts give adds up to what the whole gives."""
    assert whole is not None
    total = torch.zeros_like(whole)
    for rank in range(ways):
        zeros = once if rank else ()
        mine = _part_of(part, call, splits, zeros, numbers, rank)
        if mine is None or mine.shape != whole.shape:
            return False
        total = total + mine
    return close(total, whole)


def _smaller(shapes: Sequence[Sequence[int]], ways: int) -> dict[int, int]:
    """Small sizes in the place of large ones: which are equal or twice as large stays so."""
    sizes = sorted({n for shape in shapes for n in shape})
    experts = {shape[0] for shape in shapes if len(shape) > 2}
    found: dict[int, int] = {}
    for n in sizes:
        if n in experts:
            found[n] = min(n, 4)
        elif n % 2 == 0 and n // 2 in found and n // 2 not in experts:
            found[n] = 2 * found[n // 2]
        else:
            small = 2 * ways + bool(n % ways)
            while {small, 2 * small} & {m for x in found.values() for m in (x, 2 * x)}:
                small += ways
            found[n] = min(n, small)
    return found


def _small(
    part: nn.Module, call: LayerInputs, sizes: dict[int, int]
) -> tuple[nn.Module, LayerInputs]:
    """The submodule and its call with such sizes."""
    generator = torch.Generator().manual_seed(4)
    experts = min(sizes.values())

    def shrunk(shape: Sequence[int]) -> list[int]:
        return [sizes.get(n, n) for n in shape]

    def each(_: int, x: Tensor) -> Tensor:
        if x.is_floating_point():
            last = sizes.get(x.shape[-1], x.shape[-1]) if x.ndim else 0
            shape = (*x.shape[:-1], last) if x.ndim else ()
            return torch.randn(shape, generator=generator, dtype=torch.float64)
        return x % experts

    twin = copy.copy(part)
    twin.__dict__ = {k: v for k, v in part.__dict__.items() if k != "forward"}
    for key, value in part.__dict__.items():
        if type(value) is int:
            twin.__dict__[key] = sizes.get(value, value)
    twin.__dict__["_parameters"] = {
        key: None
        if p is None
        else nn.Parameter(torch.randn(shrunk(p.shape), generator=generator, dtype=torch.float64))
        for key, p in part._parameters.items()
    }
    args, kwargs = cloned((call.args, call.kwargs), each)
    return twin, LayerInputs(args, kwargs, call.streams)


def _seen(stage: Stage, part: nn.Module) -> LayerInputs | None:
    """What the submodule is given when its layer runs."""
    seen: list[LayerInputs] = []

    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        args, kwargs = cloned((args, kwargs), lambda _, x: x.detach().clone())
        seen.append(LayerInputs(args, kwargs, frozenset()))

    handle = part.register_forward_pre_hook(note, with_kwargs=True)
    try:
        stage.run()
    finally:
        handle.remove()
    return seen[0] if seen else None


def _ran(part: nn.Module, call: LayerInputs) -> Tensor | None:
    args, kwargs = cloned((call.args, call.kwargs), lambda _, x: x.clone())
    part.train(call.training)
    with Doubled(), Undropped():
        out = part(*args, **kwargs)
    part.eval()
    found = tensors_in(out)
    return found[0] if isinstance(out, Tensor) and len(found) == 1 else None


def _part_of(
    part: nn.Module,
    call: LayerInputs,
    splits: dict[str, Split],
    zeros: Sequence[str],
    numbers: Numbers,
    rank: int,
) -> Tensor | None:
    held = dict(part._parameters)
    with ExitStack() as stack:
        stack.enter_context(local_parameters(part, splits, rank))
        stack.callback(part._parameters.update, {key: held[key] for key in zeros})
        for key in zeros:
            part._parameters[key] = nn.Parameter(torch.zeros_like(held[key]))  # type: ignore[arg-type]
        stack.enter_context(numbers_set(numbers, rank))
        try:
            return _ran(part, call)
        except Exception:  # the module's own code on parts that are not right
            return None


def _ways_to_split(
    shapes: Mapping[str, Sequence[int]], ways: int
) -> Iterator[tuple[dict[str, Cut], tuple[str, ...], int]]:
    """Every leaf along a dimension of some size, or of twice that size, as gate and up are.

    Others are whole: they count on every rank, or else on the first one alone.
    """
    sizes = sorted({n for shape in shapes.values() for n in shape if n >= ways}, reverse=True)
    for size in sizes:
        options = [_cuts(shape, size) for shape in shapes.values()]
        for chosen in product(*options):
            found = dict(zip(shapes, chosen, strict=True))
            cuts = {key: cut for key, cut in found.items() if isinstance(cut, Cut)}
            if len(cuts) > 1:
                yield cuts, tuple(key for key, cut in found.items() if cut is ONCE), size


def _cuts(shape: Sequence[int], size: int) -> list[Cut | _Once | None]:
    found: list[Cut | _Once | None] = []
    for dim in reversed(range(len(shape))):
        if shape[dim] == size:
            found.append(Cut(dim))
        elif shape[dim] == 2 * size:
            found += [Cut(dim, parts=2), Cut(dim, by=size)]
    return [*found, None, ONCE]


def _split(cut: Cut, shape: Sequence[int], ways: int) -> Split:
    try:
        return cut.split(shape, ways)
    except PlacementError as error:
        raise Refused(str(error)) from error


def _shares(value: int, size: int, ways: int) -> tuple[int, ...]:
    """What each rank has of a number of as many things, or twice as many."""
    split = Cut(0).split((size,), ways)
    return tuple(value // size * split.width(rank) for rank in range(ways))


def _sets(
    part: nn.Module,
    tried: nn.Module,
    name: str,
    call: LayerInputs,
    size: int,
    sizes: Mapping[int, int],
    ways: int,
) -> Iterator[Numbers]:
    yield {}
    options = [
        (number, _shares(number.value, sizes[size], ways))
        for number in numbers_read_in(tried, name, lambda: _ran(tried, call))
        if number.of(part).value in (size, 2 * size)
    ]
    for n in range(1, 2 ** len(options)):
        yield {number: values for i, (number, values) in enumerate(options) if n >> i & 1}
