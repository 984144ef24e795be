"""Modules of every kind, and how a functional is compared with the module that it came from."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zfunc import random, tree
from zfunc.engine.primitives import Ref
from zfunc.modules.functional import Functional, functionalize
from zfunc.modules.lazy import LazyTensor
from zfunc.trees.tree import Layers


class FakeRef(Ref):
    """A layer's parameters that enter as fresh copies, for one call, perhaps recomputed."""

    def __init__(self, params: Any, remat: bool = False) -> None:
        self.params, self.remat, self.resolved = params, remat, 0

    def enter(self) -> Any:
        return tree.map(lambda x: x * 1, self.params)

    def force(self) -> Any:
        self.resolved += 1
        return self.enter()

    def call(self, fn: Callable[..., Any], xs: tuple[Any, ...], kw: dict[str, Any]) -> Any:
        def run(*xs: Any) -> Any:
            return fn(self.enter(), *xs, **kw)

        return checkpoint(run, *xs, use_reentrant=False) if self.remat else run(*xs)


def as_refs(params: Any, remat: bool = False) -> Any:
    """The tree as a step under ``shard`` would hand it over."""
    if isinstance(params, Layers):
        return Layers(FakeRef(layer, remat) for layer in params)
    if isinstance(params, dict):
        return {key: as_refs(value, remat) for key, value in params.items()}
    return params


def run(
    f: Functional,
    loss: Callable[[Any], Tensor],
    prepare: Callable[[Any], Any],
    *args: Any,
    **kw: Any,
) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Loss and all gradients by name."""
    params = tree.map(lambda x: x.clone().requires_grad_(), f.params)
    named = tree.flatten_names(params)
    value = loss(f.apply(prepare(params), *args, **kw))
    grads = torch.autograd.grad(value, list(named.values()), allow_unused=True)
    return value, dict(zip(named, grads, strict=True))


WAYS: dict[str, Callable[[Any], Any]] = {
    "plain": lambda params: params,
    "refs": as_refs,
    "remat": lambda params: as_refs(params, remat=True),
}


def assert_like_module(
    module: nn.Module, loss: Callable[[Any], Tensor], *args: Any, **kw: Any
) -> None:
    """Loss and gradients of ``apply``, in every way, against the module's own backward."""
    f = functionalize(module, train=None if module.training else False)  # off on purpose
    assert set(tree.flatten_names(f.params)) == set(dict(module.named_parameters()))
    before = {name: b.clone() for name, b in module.named_buffers()}
    results = {}
    for way, prepare in WAYS.items():
        with random.scope(0):
            results[way] = run(f, loss, prepare, *args, **kw)
    for name, b in module.named_buffers():
        assert torch.equal(b, before[name]), f"buffer {name} was changed"
    with random.scope(0):
        expected = loss(module(*args, **kw))
    expected.backward()
    for way, (value, grads) in results.items():
        assert torch.equal(value, expected), way
        for name, p in module.named_parameters():
            if p.requires_grad:
                got = grads[name]
                assert (got is None) == (p.grad is None), f"{way}: {name}"
                assert got is None or torch.equal(got, p.grad), f"{way}: {name}"  # type: ignore[arg-type]


def square(out: Any) -> Tensor:
    out = out[0] if isinstance(out, tuple) else out
    return (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum() + out.square().mean()


# --- plain modules -----------------------------------------------------------------------------


class ConvBlock(nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(n, n, 3, padding=1), nn.BatchNorm2d(n)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.relu(self.norm(self.conv(x)))


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3)
        self.stages = nn.ModuleList(nn.ModuleList(ConvBlock(4) for _ in range(2)) for _ in range(2))
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for stage in self.stages:
            for block in stage:  # type: ignore[attr-defined]
                x = block(x)
        return self.head(x.mean((2, 3)))


class Tied(nn.Module):
    """Embedding and head tied; the layers share one matrix among themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.layers[2].weight = self.layers[1].weight  # type: ignore[assignment]
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, i: Tensor) -> Tensor:
        x = self.embed(i)
        for layer in self.layers:
            x = layer(x).tanh()
        return self.head(x)


class Peeking(nn.Module):
    """Reads its layers' parameters outside their calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.out = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        first: Any = self.layers[0]
        assert first.weight.shape == (4, 4) and first.weight.device == x.device
        x = x.to(first.weight.dtype)
        for layer in self.layers:
            x = layer(x).sin()
        return self.out(x) @ first.weight.T + first.bias.square().sum()


class TwiceUsed(nn.Module):
    """One module as two layers (ALBERT), and one layer called again."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.Linear(4, 4)
        self.layers = nn.ModuleList([layer, nn.Linear(4, 4), layer])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).sin()
        return self.layers[1](x)


class Aliased(nn.Module):
    """A layer that also has a name outside its list."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.layers = nn.ModuleList([self.first, nn.Linear(4, 4)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).sin()
        return self.first(x)


def weight_norms() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        old = nn.utils.weight_norm(nn.Linear(4, 4))
    new = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)).eval()
    return nn.Sequential(old, nn.Tanh(), new, nn.Tanh(), spectral)


def transformer(**kw: Any) -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, **kw)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


X = torch.randn(5, 4)
MODULES: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "linear": (lambda: nn.Linear(4, 3), X),
    "mlp": (lambda: nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1)), X),
    "convnet": (ConvNet, torch.randn(2, 3, 8, 8)),
    "tied": (Tied, torch.randint(11, (2, 5))),
    "peeking": (Peeking, X),
    "twice": (TwiceUsed, X),
    "aliased": (Aliased, X),
    "lstm": (lambda: nn.LSTM(4, 3, num_layers=2, bidirectional=True), torch.randn(6, 2, 4)),
    "gru_stack": (lambda: nn.Sequential(nn.GRU(4, 4)), X),
    "weight_norms": (weight_norms, X),
    "attention": (lambda: transformer(dropout=0.0), torch.randn(2, 5, 8)),
    "attention_dropout": (lambda: transformer(dropout=0.3), torch.randn(2, 5, 8)),
    "attention_eval": (lambda: transformer().eval(), torch.randn(2, 5, 8)),
    "double": (lambda: ConvNet().double(), torch.randn(2, 3, 8, 8, dtype=torch.float64)),
}


class Counting(nn.Module):
    """Assigns one buffer anew, adds to another, registers a third while it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(()))
        self.register_buffer("assigned", torch.zeros(()))
        self.register_buffer("added", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.assigned = self.assigned + x.mean() * self.w
        self.added += 1
        assert not hasattr(self, "late")
        self.register_buffer("late", torch.zeros(()))
        return x * self.w + self.added


def at_rest(f: Functional) -> None:
    for template in f._pool.idle:
        for part in template.module.modules():
            for x in [*part._parameters.values(), *part._buffers.values()]:
                assert x is None or isinstance(x, LazyTensor) or x.device.type == "meta"
            if isinstance(part, nn.RNNBase):
                assert all(x.device.type == "meta" for x in part._flat_weights)
