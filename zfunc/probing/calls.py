"""The arguments that a module's layers get when the module is called.

One call of a copy that has no weights of its own: products give random numbers, and of layers that
are alike only the first one runs. What it costs does not depend on how deep or large the model is.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import optree
import torch
from torch import Tensor, nn

from zfunc.errors import PlacementError
from zfunc.modules.functional import Functional
from zfunc.probing.arguments import cloned, leaves_of, tensors_in
from zfunc.probing.attributes import watched
from zfunc.probing.copies import LARGE, MOST, Copy, LayerInputs, LayerKind, Way
from zfunc.probing.exactness import Doubled
from zfunc.probing.examples import examples_of, larger, shapes_in, smallest
from zfunc.probing.products import Product, product_of, stand_in
from zfunc.probing.reads import ReadParameters
from zfunc.probing.traits import NUMBERS, plain
from zfunc.trees.nodes import NAMESPACE

__all__ = ["Probed", "probed", "use_attention"]


@dataclass
class Probed:
    """A copy of a module after its call.

    Attributes:
        kinds: of its layers.
        ids: the texts that it was given, if it takes any.
        lookups: names of embeddings outside of layers, and whether they got the ids themselves.
        touched: parameters that code outside of layers reads beside lookups and products: names
            of the submodule and the attribute.
        called: names of the products outside of layers that were called.
        failed: what went wrong behind the layers; ``None`` if the call came to its end.
    """

    module: nn.Module
    kinds: list[LayerKind]
    ids: tuple[Tensor, ...] = ()
    lookups: dict[str, bool] = field(default_factory=dict)
    touched: set[tuple[str, str]] = field(default_factory=set)
    called: set[str] = field(default_factory=set)
    failed: str | None = None


def _way(part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Way:
    """What a layer's code may decide by in a call."""
    names = list(inspect.signature(type(part).forward).parameters)[1:]
    given: Any = {**dict(zip(names, args, strict=False)), **kwargs, "*": args[len(names) :]}
    paths = optree.tree_paths(given, none_is_leaf=True, namespace=NAMESPACE)
    place, places = name.rpartition(".")[2], list[int]()

    def told(at: tuple[Any, ...], x: Any) -> Hashable:
        if isinstance(x, Tensor):
            return (at, Tensor, x.ndim)
        if type(x) is int and str(x) == place and any(y in str(at[0]) for y in NUMBERS):
            places.append(x)
            return (at, "its place")
        return (at, type(x), (x > 0) - (x < 0) if isinstance(x, float) else plain(x, 0))

    way = tuple(told(at, x) for at, x in zip(paths, leaves_of(given), strict=True))
    return way, tuple(places)


class _ProbedCall:
    """Lets a filled copy run, and keeps what its layers are given."""

    def __init__(self, made: Copy) -> None:
        self.made, self.found = made, Probed(made.module, made.kinds)
        self.generator = torch.Generator().manual_seed(1)
        self.before = 0
        self.attention: str | None = None
        self.parts = [[x for _, x in kind.module.named_modules()] for kind in made.kinds]
        self.own: dict[nn.Module, Any] = {}  # forwards that layers have beside their class's
        self.reads = ReadParameters(self._homes())
        self.ways: dict[int, Way] = {}  # by kind how its first layer is called
        self.given: list[tuple[Tensor, tuple[int, int]]] = []  # what layers gave, and which did
        for name, product in made.products.items():
            part = made.module.get_submodule(name)
            part.__dict__["forward"] = self._multiply(name, part, product)
        for _, part in made.parts({n for kind in made.kinds for n in kind.names[1:]}):
            held = [p for p in part._parameters.values() if p is not None]
            bare = product_of(part) is not None or isinstance(part, nn.Embedding)
            if not bare and any(p.numel() > LARGE for p in held):
                part.__dict__["forward"] = _handed_on
        for name, part in made.parts({n for kind in made.kinds for n in kind.names}):
            if isinstance(part, nn.Embedding):
                part.__dict__["forward"] = self._look_up(name, part)
        for kind in made.kinds:
            for name in kind.names:
                part = made.module.get_submodule(name)
                self.own[part] = part.__dict__.get("forward")
                part.__dict__["forward"] = self._layer(kind, part, name)

    def _homes(self) -> dict[int, list[tuple[str, str]]]:
        found: dict[int, list[tuple[str, str]]] = {}
        for name, part in self.found.module.named_modules():
            for key, p in part._parameters.items():
                if p is not None:
                    found.setdefault(id(p), []).append((name, key))
        return found

    def _draw(self, *shape: int) -> Tensor:
        x = torch.randn(*shape, generator=self.generator, dtype=torch.float64)
        return x.requires_grad_(torch.is_grad_enabled())

    def states_like(self, x: Tensor) -> Tensor:
        """Other numbers, that no parameter made."""
        return torch.randn(x.shape, generator=self.generator, dtype=torch.float64)

    def _multiply(self, name: str, part: nn.Module, product: Product) -> Callable[..., Tensor]:
        def forward(x: Tensor) -> Tensor:
            self.found.called.add(name)
            return self._draw(*x.shape[:-1], product.outputs) + 0

        return stand_in(forward)

    def _look_up(self, name: str, part: nn.Embedding) -> Callable[..., Tensor]:
        inner = part.forward

        def forward(*args: Any, **kwargs: Any) -> Tensor:
            ids = next(iter(tensors_in((args, kwargs))), None)
            same = ids is not None and any(torch.equal(ids, x) for x in self.found.ids)
            self.found.lookups[name] = self.found.lookups.get(name, True) and same
            with self.reads.paused():
                out: Tensor = inner(*args, **kwargs)
            drawn = self._draw(*out.shape) + 0
            return drawn if out.requires_grad else drawn.detach()  # some look up constants

        return forward

    def _layer(self, kind: LayerKind, part: nn.Module, name: str) -> Callable[..., Any]:
        inner, first = part.forward, name == kind.names[0]

        def forward(*args: Any, **kwargs: Any) -> Any:
            with self.reads.paused():
                if first and len(kind.calls) == self.before:
                    self.ways[id(kind)] = _way(part, args, kwargs, name)
                    kind.calls.append(self._call(args, kwargs))
                    kind.result = inner(*args, **kwargs)
                if kind.result is None:  # a later one before the first
                    raise PlacementError("layers that are alike are not called in their order")
                if self.before == 0 and not kind.varied:
                    way = _way(part, args, kwargs, name)
                    known = {self.ways[id(kind)], *kind.others}
                    alike = way[0] in {before for before, _ in known}
                    if way not in known and (not alike or len(kind.others) < MOST):
                        kind.others[way] = self._call(args, kwargs)
                return cloned(kind.result, functools.partial(self._handed, kind))

        return forward

    def _handed(self, kind: LayerKind, position: int, x: Tensor) -> Tensor:
        """What a layer gave, for the one that comes next."""
        x = x.detach().clone().requires_grad_(x.requires_grad)
        x = x + 0 if x.requires_grad else x  # some write into it
        at = next(i for i, each in enumerate(self.found.kinds) if each is kind)
        self.given.append((x, (at, position)))
        return x

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LayerInputs:
        streams = {
            i
            for i, x in enumerate(tensors_in((args, kwargs)))
            if x.requires_grad and x.is_floating_point()
        }
        origins = {
            i: origin
            for i, x in enumerate(tensors_in((args, kwargs)))
            for given, origin in self.given
            if given is x
        }
        args, kwargs = cloned((args, kwargs), lambda _, x: x.detach().clone())
        return LayerInputs(args, kwargs, frozenset(streams), self.attention, origins)

    def run(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], attention: str | None = None
    ) -> None:
        """One call. Layers remember what they are given, of each call."""
        self.before = max((len(kind.calls) for kind in self.found.kinds), default=0)
        self.attention = attention
        use_attention(self.found.module, attention)
        self.found.ids = tuple(
            x
            for x in tensors_in((args, dict(kwargs)))
            if not x.is_floating_point() and x.dtype != torch.bool
        )
        with Doubled(), self.reads, torch.enable_grad():
            self.found.module(*args, **kwargs)

    def forget(self, calls: int) -> None:
        """What layers were given behind so many calls of the module."""
        for kind in self.found.kinds:
            del kind.calls[calls:]

    def end(self) -> None:
        """Let layers be called by themselves."""
        for part, own in self.own.items():
            part.__dict__.pop("forward", None)
            if own is not None:
                part.__dict__["forward"] = own

    def look(self) -> None:
        """What a call has done, when it is over."""
        for kind, parts in zip(self.found.kinds, self.parts, strict=True):
            kind.replaced |= [x for _, x in kind.module.named_modules()] != parts
        self.found.touched |= self.reads.found
        for kind in self.found.kinds:
            for layer in kind.names:
                begin = f"{layer}."
                kind.read |= {
                    (name.removeprefix(layer).removeprefix("."), key)
                    for name, key in self.reads.found
                    if name == layer or name.startswith(begin)
                }

    def watch(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """A further call, in which layers tell which of their numbers other code reads."""
        undo, seen = [], set[nn.Module]()
        for kind in self.found.kinds:

            def note(_: nn.Module, name: str, attribute: str, value: int, k: Any = kind) -> None:
                if self.reads.counts:
                    k.fixed.add((name, attribute))

            for layer in kind.names:
                for name, part in self.found.module.get_submodule(layer).named_modules():
                    if part not in seen:
                        seen.add(part)
                        undo.append(watched(part, name, note))
        try:
            self.run(args, kwargs, attention_of(self.found.module))
        except Exception:  # the module's own code, which may ask for classes
            pass
        finally:
            for back in reversed(undo):
                back()
            self.forget(self.before)


def _handed_on(*args: Any, **kwargs: Any) -> Tensor:
    """In the place of what is too large to be run (experts): something of the same shape."""
    return next(x for x in tensors_in((args, kwargs)) if x.is_floating_point()) + 0


def probed(
    functional: Functional, example: Any = None, read: Collection[tuple[str, str]] = ()
) -> Probed:
    """A copy of the module, called once.

    Args:
        example: arguments of ``apply``, tensors or shapes: a tuple of positional ones, a dict of
            named ones, or the one argument. A shape is that of random floats, or of integer ids
            where the module takes no floats. By default integer ids, else the module's
            ``dummy_inputs``.
        read: numbers in which layers of a kind are not to differ, which one they are among them.

    Raises:
        PlacementError: the module takes neither, or not the example.
    """
    tried: list[str] = []
    in_part: Probed | None = None
    for what, args, kwargs in examples_of(functional, example):
        found = _probed_with(Copy(functional, read), functional, what, args, kwargs, tried)
        if found is not None and (found.failed is None or example is None):
            return found
        in_part = in_part or found  # other numbers of a shape may bring it to the end
    if in_part is not None:
        return in_part
    shapes = {} if example is None else shapes_in(functional, example)
    if shapes:  # many ways fail alike
        tried = list({text.partition(": ")[2]: text for text in reversed(tried)}.values())[::-1]
    raise PlacementError(
        f"{functional._name} cannot be called to see how it is split ({'; '.join(tried)}). "
        + _remedy(shapes)
    )


def _remedy(shapes: Mapping[str, tuple[int, ...]]) -> str:
    if not shapes:
        return (
            "Give arguments of apply, tensors or shapes: example={'pixel_values': (1, 3, 32, 32)}."
        )
    name, shape = list(shapes.items())[-1]
    return (
        f"Shapes were given for {', '.join(shapes)}, and tried as those of floats and of integer "
        f"ids. Give a tensor for what is neither: example={{..., {name!r}: torch.ones({shape}, "
        "dtype=torch.bool)}."
    )


def _probed_with(
    made: Copy,
    functional: Functional,
    what: str,
    args: tuple[Any, ...],
    kwargs: Any,
    tried: list[str],
) -> Probed | None:
    """A copy called with this, or ``None`` if it went wrong before: ``tried`` gets the reason."""
    recorder = _ProbedCall(made)
    found = recorder.found
    try:
        recorder.run(args, kwargs, attention_of(found.module))
    except Exception as error:  # the module's own code, which may raise whatever it likes
        tried.append(f"{what}: {type(error).__name__}: {error}".splitlines()[0])
        if not found.kinds or any(not kind.calls for kind in found.kinds):
            return None
        found.failed = tried[-1]
    recorder.look()
    if found.failed is None:
        _run_with_more(functional, recorder, args, kwargs)
        _run_otherwise(functional, recorder, args, kwargs)
        recorder.watch(args, kwargs)
        recorder.look()
    recorder.end()
    for kind in found.kinds:
        more = [replace(kind.calls[0], floats=x) for x in kind.floats if kind.calls]
        kind.calls += [*kind.others.values(), *more]
    if found.kinds and all(not kind.calls for kind in found.kinds):
        tried.append(f"{what}: no layer was called")
        return None
    if not found.kinds:
        found.kinds.append(LayerKind([""], found.module, [_whole_call(args, kwargs)]))
    return found


def _run_with_more(
    functional: Functional, recorder: _ProbedCall, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """A call that calls more products, if there is one: with states that layers can take, too.

    A decoder may be called alone, and its layers have products for an encoder's states: they take
    an argument of the same name as the module, and got None.
    """
    for kind in recorder.found.kinds:
        inside = {name for name in recorder.made.products if name.startswith(f"{kind.names[0]}.")}
        if not kind.calls or inside <= recorder.found.called:
            continue
        given = tensors_in((kind.calls[0].args, kind.calls[0].kwargs))
        states = next((given[i] for i in sorted(kind.calls[0].streams)), None)
        if states is None:
            continue
        for name in _open(functional, kind):
            called = set(recorder.found.called)
            more = {**kwargs, name: recorder.states_like(states)}
            try:
                recorder.run(args, more, attention_of(recorder.found.module))
            except Exception:  # the module's own code: it takes something else by that name
                recorder.found.called = called
            if recorder.found.called <= called:
                recorder.forget(recorder.before)
                continue
            for each in recorder.found.kinds:  # the one that says most is asked first
                if len(each.calls) > recorder.before:
                    each.calls.insert(0, each.calls.pop())
            kwargs.update(more)
            return


def _open(functional: Functional, kind: LayerKind) -> list[str]:
    """Names of arguments that the module and a layer have, and that the layer got None for."""
    named = inspect.signature(type(kind.module).forward).parameters
    bound = dict(zip(list(named)[1:], kind.calls[0].args, strict=False)) | kind.calls[0].kwargs
    return [x for x in named if x in functional.signature.parameters and bound.get(x) is None]


def _run_otherwise(
    functional: Functional, recorder: _ProbedCall, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Further calls: of padded texts, with attention written out, which reads other numbers, and of
    other shapes.

    What a module cannot do is not asked of its parts.
    """
    own = attention_of(recorder.found.module)
    more = dict(kwargs)
    ids = kwargs.get("input_ids", args[0] if args else None)
    masked = functional.signature.parameters.get("attention_mask") is not None
    if masked and isinstance(ids, Tensor) and ids.ndim == 2 and ids.shape[1] > 2:
        more["attention_mask"] = torch.ones_like(ids)
        more["attention_mask"][-1, -2:] = 0  # behind: some code gives NaN where all is masked
    for attention in dict.fromkeys((own, None if own is None else "eager")):
        try:
            recorder.run(args, more, attention)
        except Exception:  # the module's own code, in a way that nobody asked for
            recorder.forget(recorder.before)
    for sizes in larger(args, kwargs), smallest(args, kwargs):
        for more_args, more in sizes:
            try:
                recorder.run(more_args, more, own)
                break
            except Exception:  # a table has no more positions, say
                recorder.forget(recorder.before)
    use_attention(recorder.found.module, own)


def attention_of(module: nn.Module) -> str | None:
    """Which code for attention a model of Hugging Face uses; ``None`` of others."""
    found: str | None = getattr(getattr(module, "config", None), "_attn_implementation", None)
    return found


def use_attention(module: nn.Module, attention: str | None) -> None:
    """Let all submodules use this code for attention; ``None``: as they are."""
    if attention is None:
        return
    for part in module.modules():
        config = getattr(part, "config", None)
        if getattr(config, "_attn_implementation", attention) != attention:
            config._attn_implementation = attention  # type: ignore[union-attr]


def _whole_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> LayerInputs:
    leaves = tensors_in((args, kwargs))
    streams = frozenset(i for i, x in enumerate(leaves) if x.is_floating_point())
    return LayerInputs(args, kwargs, streams)
