"""One layer, run by itself on given arguments; its products are stand-ins that give numbers.

No weight of a product is read, so that a layer on ``meta`` runs, and what it costs is what lies
between its products.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

from zfunc.modules.split_reductions import Reductions, given_features
from zfunc.probing.arguments import cloned, tensors_in
from zfunc.probing.calls import use_attention
from zfunc.probing.copies import LayerInputs, LayerKind
from zfunc.probing.exactness import Decisions, Doubled, Undrawn, Undropped
from zfunc.probing.products import Product, product_of, stand_in

__all__ = ["Stage", "Trace", "Whole", "call_in_training", "differs"]

Values = Mapping[str, Tensor]


@dataclass
class Trace:
    """What happened in a run.

    Attributes:
        inputs, outputs: of products, by name.
        order: their names as they were called.
        calls: of products, also of those that are called again: name, input and output.
        given: the tensors among the layer's arguments.
        result: the first tensor that the layer gave.
        further: the other ones.
        entered: what norms were given, by name.
        sums: over features, of each norm in order.
        decided: by what numbers, and by which functions, in order.
        draw, scale: which random numbers it had, and how large ones.
    """

    inputs: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    calls: list[tuple[str, Tensor, Tensor]] = field(default_factory=list)
    given: list[Tensor] = field(default_factory=list)
    result: Tensor | None = None
    further: list[Tensor] = field(default_factory=list)
    entered: dict[str, Tensor] = field(default_factory=dict)
    sums: dict[str, list[Tensor]] = field(default_factory=dict)
    decided: list[tuple[str, Tensor]] = field(default_factory=list)
    draw: int = 0
    scale: float = 1.0


@dataclass(frozen=True)
class Whole:
    """What a rank is told of a norm: how many features all ranks have, and their sums.

    Attributes:
        share: of each of its features the part that it counts; None where all are its own.
    """

    total: int
    sums: Sequence[Tensor]
    share: Tensor | None


def differs(x: Tensor, base: Tensor) -> Tensor:
    """Where two results differ by more than rounding."""
    largest = base.abs().amax() if base.numel() else 0.0  # an expert that got no tokens
    return (x - base).abs() > 1e-11 * largest


class Stage:
    """A layer whose products give random numbers, or those that they are told.

    Attributes:
        products: by name within the layer.
        parameters: of all other submodules, by name within the layer.
        repeated: names of products that are called more than once; they stay whole.
        fixed: numbers that code outside of the layer reads, too: (submodule, attribute).
    """

    def __init__(
        self,
        layer: nn.Module,
        calls: Sequence[LayerInputs],
        fixed: Collection[tuple[str, str]] = (),
    ) -> None:
        self.layer, self.calls, self.fixed = layer, calls, fixed
        self.call = calls[0]
        self._own: dict[tuple[str, str], float] = {}
        self.products: dict[str, Product] = {}
        self.parameters: dict[str, nn.Parameter] = {}
        self.repeated: set[str] = set()
        self.trace = Trace()
        self._graphs: list[weakref.ref[Trace]] = []  # runs that can be differentiated
        self.values: dict[str, Tensor] = {}
        self.apart, self.told = False, dict[str, Whole]()
        self.on_product: Callable[[str], None] = lambda name: None
        for name, part in layer.named_modules():
            product = product_of(part)
            if product is None:
                own = {k: p for k, p in part._parameters.items() if p is not None}
                self.parameters.update({f"{name}.{k}" if name else k: p for k, p in own.items()})
            else:
                self.products[name] = product
                part.__dict__["forward"] = self._stand_in(name, product)

    @contextmanager
    def called(self, call: LayerInputs) -> Iterator[None]:
        """A block in which the layer is given other arguments."""
        before = self.call
        self._use(call)
        try:
            yield
        finally:
            self._use(before)

    def _use(self, call: LayerInputs) -> None:
        self.call = call
        use_attention(self.layer, call.attention)
        self.layer.train(call.training)
        self._keep(self._own)
        self._own = self._keep(call.floats)

    def _keep(self, floats: Mapping[tuple[str, str], float]) -> dict[tuple[str, str], float]:
        """Let submodules keep other floats; returns those that they had."""
        before = {}
        for (name, key), value in floats.items():
            kept = self.layer.get_submodule(name).__dict__
            before[name, key], kept[key] = kept[key], value
        return before

    @contextmanager
    def reducing(self, norms: Sequence[str]) -> Iterator[None]:
        """A block in which sums over features in these submodules are noted, and may be given."""
        parts = {name: self.layer.get_submodule(name) for name in norms}
        before = {name: part.__dict__.get("forward") for name, part in parts.items()}
        for name, part in parts.items():
            part.__dict__["forward"] = self._norm(name, part.forward)
        try:
            yield
        finally:
            for name, part in parts.items():
                del part.__dict__["forward"]
                if before[name] is not None:
                    part.__dict__["forward"] = before[name]

    def _norm(self, name: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            like = given_features(args, kwargs)
            if like is None:
                return inner(*args, **kwargs)
            trace, whole = self.trace, self.told.get(name)
            trace.entered[name] = like
            sums = trace.sums.setdefault(name, [])

            def added(x: Tensor) -> Tensor:
                sums.append(x)
                if self.apart:
                    return torch.ones_like(x)
                return x if whole is None else whole.sums[len(sums) - 1]

            total, share = (like.shape[-1], None) if whole is None else (whole.total, whole.share)
            with Reductions(like, total, added, share):
                return inner(*args, **kwargs)

        return forward

    def _stand_in(self, name: str, product: Product) -> Callable[[Tensor], Tensor]:
        number = len(self.products)

        def forward(x: Tensor) -> Tensor:
            if torch._C._current_graph_task_id() >= 0:
                return self._given_again(name, x) + 0
            trace = self.trace
            self.on_product(name)
            if name in trace.inputs:
                self.repeated.add(name)
            trace.inputs[name] = x
            trace.order.append(name)
            shape = x.shape[:-1]
            y = self.values.get(name)
            if y is None or y.shape[:-1].numel() != shape.numel():  # routed otherwise
                seed = 1000 * trace.draw + number
                generator = torch.Generator().manual_seed(seed)
                y = torch.randn(*shape, product.outputs, generator=generator, dtype=torch.float64)
                y *= trace.scale
            y = y.reshape(*shape, y.shape[-1])
            if torch.is_grad_enabled():
                y = y.detach().requires_grad_()
            trace.outputs[name] = y
            trace.calls.append((name, x, y))
            return y + 0  # some write into it

        return stand_in(forward)

    def _given_again(self, name: str, x: Tensor) -> Tensor:
        """What a product gave in the run whose backward computes it anew (a checkpoint in a layer).

        Raises:
            CheckpointError: nobody knows in which one, or it was given something else there.
        """
        for trace in filter(None, (ref() for ref in reversed(self._graphs))):
            for other, given, y in trace.calls:
                if other == name and torch.equal(given, x):
                    return y
        raise CheckpointError(f"{name} is given something else when it is computed anew")

    def run(
        self,
        values: Values | None = None,
        *,
        draw: int = 0,
        scale: float = 1.0,
        grad: bool = False,
        change: Callable[[int, Tensor], Tensor] | None = None,
        apart: bool = False,
        told: Mapping[str, Whole] | None = None,
    ) -> Trace:
        """Let the layer run.

        Args:
            values: outputs of products; of others random ones.
            draw: which random ones.
            scale: how large these are.
            grad: keep a graph, from everything that is given to every input of a product.
            change: what tensors among the arguments are replaced by.
            apart: sums over features of norms are one, whatever the features are.
            told: of norms, what is known of all features where these are a rank's.
        """
        self.trace, self.values = Trace(draw=draw, scale=scale), dict(values or {})
        if grad:
            alive = [ref for ref in self._graphs if ref() is not None]
            self._graphs = [*alive, weakref.ref(self.trace)]
        self.apart, self.told = apart, dict(told or {})
        generator = torch.Generator().manual_seed(draw)

        def each(i: int, x: Tensor) -> Tensor:
            if i in self.call.streams:
                x = torch.randn(x.shape, generator=generator, dtype=x.dtype)
            x = x.clone() if change is None else change(i, x).clone()
            return x.requires_grad_() if grad and x.is_floating_point() else x

        args, kwargs = cloned((self.call.args, self.call.kwargs), each)
        trace, trace.given = self.trace, tensors_in((args, kwargs))
        drawing = Undrawn() if self.call.training else nullcontext()
        with Doubled(), Undropped(), drawing, torch.set_grad_enabled(grad):
            args, kwargs = cloned(
                (args, kwargs), lambda _, x: x + 0 if x.is_floating_point() else x
            )
            with Decisions() as decisions:
                out = tensors_in(self.layer(*args, **kwargs))
        trace.decided = decisions.given
        trace.result, trace.further = (out[0] if out else None), out[1:]
        return trace


def call_in_training(kind: LayerKind) -> None:
    """Add a call in training mode, if layers of the kind do more in it than to drop numbers.

    Not where it does not run on these arguments, or draws numbers of a generator of its own.
    """
    if not kind.calls or kind.replaced:
        return
    stage, call = Stage(kind.module, kind.calls), replace(kind.calls[0], training=True)
    try:
        base = stage.run()
        with stage.called(call):
            traces = stage.run(), stage.run()
    except Exception:  # the module's own code, in a way that nobody asked for
        return
    if _alike(*traces) and not _alike(base, traces[0]):
        kind.calls.append(call)


def _alike(a: Trace, b: Trace) -> bool:
    every = ([*x.inputs.values(), x.result, *x.further] for x in (a, b))
    return a.order == b.order and all(
        x is y if x is None or y is None else torch.equal(x, y) for x, y in zip(*every, strict=True)
    )
