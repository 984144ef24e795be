"""Layers that run on this rank's positions of the stream, unmodified, as a plan says.

A layer is given its positions, whole leaves and further arguments enter together, inputs of columns
are put together, and rows give positions: ``split_products`` does so where ``Wiring.layer`` is set.

Source: Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, 2022,
section 4.2.2.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import optree
from torch import Tensor, nn

from zfunc.modules.cut_streams import LEAVES, CutStream, cut_stream, drawing_apart, without_cuts
from zfunc.modules.dropout_check import probability
from zfunc.modules.split_modules import split_homes
from zfunc.modules.split_plans import LayerStream, SplitPlan
from zfunc.modules.split_products import CutLayer, Wiring
from zfunc.modules.units import Anatomy
from zfunc.operators.conjugates import copied, copied_together, cut_positions, scaled_back
from zfunc.trees.nodes import NAMESPACE

__all__ = ["cut_layers", "cut_within", "names_of"]

Forward = Callable[..., Any]
Slots = Sequence[tuple[dict[str, Any], str]]
"""Where parameters are: dicts and keys."""


def cut_within(wiring: Wiring, module: nn.Module, anatomy: Anatomy, plan: SplitPlan) -> None:
    """Let what is in layers, and submodules beside them, know what to do with positions.

    Behind everything else that gives submodules another forward, and before calls of layers are
    sent elsewhere.
    """
    names = {part: name for name, part in module.named_modules()}
    split = split_homes(anatomy, plan) if plan.streams else {}
    # Layers may share submodules, and agree on them: each is wrapped once.
    gathered: dict[nn.Module, Any] = {}
    ended: dict[nn.Module, None] = {}
    for layer, stream in plan.streams.items():
        for name, arguments in stream.gathered.items():
            gathered[module.get_submodule(_joined(layer, name))] = arguments
        for name in stream.ended:
            ended[module.get_submodule(_joined(layer, name))] = None
    for part, arguments in gathered.items():
        part.__dict__["forward"] = _gathering(wiring, part.forward, arguments)
    for part in ended:
        part.__dict__["forward"] = _narrowing(wiring, part.forward)
    for layer in plan.streams:
        part = module.get_submodule(layer)
        part.__dict__["forward"] = _in_layer(wiring, part, _whole(part, names, split))
    for name in plan.pointwise:
        part = module.get_submodule(name)
        part.__dict__["forward"] = _on_positions(wiring, part, _whole(part, names, split))


def cut_layers(wiring: Wiring, module: nn.Module, anatomy: Anatomy, plan: SplitPlan) -> None:
    """Let layers take and give positions; other layers, and who calls the module, get all."""
    if not plan.streams:
        return
    for layer, stream in plan.streams.items():
        part = module.get_submodule(layer)
        part.__dict__["forward"] = _between(wiring, part.forward, stream)
    for unit in anatomy.units:
        if unit.module not in plan.streams:
            part = module.get_submodule(unit.module)
            part.__dict__["forward"] = _on_whole_streams(wiring, part.forward)
    module.__dict__["forward"] = _plain(wiring, module.forward)


def _joined(layer: str, name: str) -> str:
    return f"{layer}.{name}" if layer and name else layer or name


def _whole(
    part: nn.Module, names: dict[nn.Module, str], split: Container[tuple[str, str]]
) -> Slots:
    """Where a submodule and those in it have leaves that are not split."""
    return [
        (x._parameters, key)
        for x in part.modules()
        for key, p in x._parameters.items()
        if p is not None and (names[x], key) not in split
    ]


def names_of(forward: Forward, count: int) -> list[str]:
    """The names of so many positional arguments: their places, of those that have none."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    given = inspect.signature(forward).parameters.items()
    names = [name for name, p in given if p.kind in kinds][:count]
    return names + [str(i) for i in range(len(names), count)]


def _changed(
    forward: Forward, change: Callable[[str, Any], Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """``forward`` called with other arguments."""
    rows = zip(names_of(forward, len(args)), args, strict=True)
    some = [change(name, x) for name, x in rows]
    return forward(*some, **{name: change(name, x) for name, x in kwargs.items()})


# --- in a layer ----------------------------------------------------------------------------------


def _gathering(wiring: Wiring, inner: Forward, arguments: Sequence[str]) -> Forward:
    def change(name: str, x: Any) -> Any:
        return wiring.gathered(x) if name in arguments and isinstance(x, Tensor) else x

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if wiring.layer is None:
            return inner(*args, **kwargs)
        return _changed(inner, change, args, kwargs)

    return forward


def _narrowing(wiring: Wiring, inner: Forward) -> Forward:
    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return wiring.narrowed(inner(*args, **kwargs))

    return forward


def _in_layer(wiring: Wiring, part: nn.Module, slots: Slots) -> Forward:
    inner, drops = part.forward, _drops(part)

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if wiring.layer is None:
            return inner(*args, **kwargs)
        with _entering(wiring, slots), _drawing(wiring, part, drops):
            return inner(*args, **kwargs)

    return forward


def _on_positions(wiring: Wiring, part: nn.Module, slots: Slots) -> Forward:
    """The forward of a submodule outside of layers, which may be called with the stream."""
    inner, drops = part.forward, _drops(part)

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        stream = args[0] if len(args) == 1 and not kwargs else None
        if not isinstance(stream, CutStream):
            return inner(*args, **kwargs)
        with _entering(wiring, slots), _drawing(wiring, part, drops):
            return cut_stream(inner(stream.local()), stream.ranks, stream.length)

    return forward


def _drops(part: nn.Module) -> bool:
    parts = list(part.modules())
    kept = [*parts, *filter(None, [getattr(x, "config", None) for x in parts])]
    return any(probability(x) is not None for x in kept)


def _drawing(wiring: Wiring, part: nn.Module, drops: bool) -> Any:
    """Ranks have other positions, and masks of their own for them."""
    return drawing_apart(wiring.group) if drops and part.training else nullcontext()


@contextmanager
def _entering(wiring: Wiring, slots: Slots) -> Iterator[None]:
    """A block in which whole leaves have gradients that are parts: they are summed, all at once."""
    held = [(holder, key, holder[key]) for holder, key in slots]
    leaves = list({id(p): p for _, _, p in held if p.requires_grad}.values())
    made = zip(leaves, copied_together(leaves, wiring.group, LEAVES), strict=True)
    new = {id(p): x for p, x in made}
    for holder, key, p in held:
        holder[key] = new.get(id(p), p)
    try:
        yield
    finally:
        for holder, key, p in held:
            holder[key] = p


# --- between layers ------------------------------------------------------------------------------


def _between(wiring: Wiring, inner: Forward, stream: LayerStream) -> Forward:
    """A layer, to the code around it, which has whole streams or such as look so."""

    def enter(x: Any) -> Any:
        if isinstance(x, CutStream):
            return x.gathered()
        return copied(x, wiring.group) if isinstance(x, Tensor) else x

    def change(name: str, x: Any) -> Any:
        if name in stream.given and isinstance(x, Tensor):
            return x.local() if isinstance(x, CutStream) else cut_positions(x, wiring.group, -2)
        if name in stream.parts_given:
            return x
        return optree.tree_map(enter, x, none_is_leaf=True, namespace=NAMESPACE)

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if not wiring.streaming:
            return inner(*args, **kwargs)
        every = {**dict(zip(names_of(inner, len(args)), args, strict=True)), **kwargs}
        given = every[stream.given[0]]
        *texts, length, width = given.shape
        with wiring.along(CutLayer(length, math.prod(texts), width)):
            return _results(wiring, _changed(inner, change, args, kwargs), stream)

    return forward


def _results(wiring: Wiring, out: Any, stream: LayerStream) -> Any:
    """What a layer gives, to the code around it: streams for positions."""
    leaves, spec = optree.tree_flatten(out, none_is_leaf=True, namespace=NAMESPACE)
    at, layer, ranks = 0, wiring.layer, wiring.group
    assert layer is not None
    for i, x in enumerate(leaves):
        if not isinstance(x, Tensor):
            continue
        if at == 0:
            leaves[i] = cut_stream(x, ranks, layer.length)
        elif at in stream.made:
            leaves[i] = wiring.joined(x)
        elif at not in stream.parts_made and x.requires_grad:  # each rank begins with its share
            leaves[i] = scaled_back(x, 1 / ranks.size)
        at += 1
    return optree.tree_unflatten(spec, leaves)


def _on_whole_streams(wiring: Wiring, inner: Forward) -> Forward:
    """A layer that does not run on positions: all positions are put together before."""

    def whole(x: Any) -> Any:
        return x.whole() if isinstance(x, CutStream) else x

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if not wiring.streaming:
            return inner(*args, **kwargs)
        given: Any = (args, kwargs)
        some, named = optree.tree_map(whole, given, none_is_leaf=True, namespace=NAMESPACE)
        return inner(*some, **named)

    return forward


def _plain(wiring: Wiring, inner: Forward) -> Forward:
    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        out = inner(*args, **kwargs)
        return without_cuts(out) if wiring.streaming else out

    return forward
