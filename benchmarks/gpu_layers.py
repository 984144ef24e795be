"""What the GPU benchmark times of a transformer's layers, beside torch, torch.compile and Liger."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu_cases import Call, Case, Size, compiled, predicted
from zfunc import kernels

__all__ = ["layers"]


@dataclass(frozen=True)
class Layer:
    """A function of a layer: its kernel, its inputs, the bytes of a forward and of a backward."""

    name: str
    kernel: str
    given: tuple[Tensor, ...]
    bytes: tuple[float, float]
    ours: Callable[..., Any]
    plain: Callable[..., Any]


def layers(size: Size, device: torch.device) -> Iterator[Case]:
    """Norms, activations, rotations and losses, forward and with their gradients."""
    liger = liger_functions() if device.type == "cuda" else {}
    for layer in pointwise(size, device):
        ways = {"torch": layer.plain, "torch.compile": compiled(layer.plain, size)}
        ways |= {"Liger": liger[layer.name]} if layer.name in liger else {}
        for full in (False, True):
            moved = layer.bytes[0] + layer.bytes[1] * full
            yield Case(
                f"{layer.name}, {'with gradients' if full else 'forward'}",
                layer.kernel,
                moved,
                whole(layer.ours, layer.given, full),
                {k: whole(f, layer.given, full) for k, f in ways.items()},
                predicted=predicted(moved, 0.85 if full else 0.92, 1 + 2 * full),
            )
    yield head(size, device, liger)


def pointwise(size: Size, device: torch.device) -> Iterator[Layer]:
    """Those that memory limits."""

    def give(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).bfloat16()

    x, weight, bias = give(size.tokens, size.width), give(size.width), give(size.width)
    n = x.numel()
    yield Layer("rms_norm", "rms_norm", (x, weight), (4.0 * n, 6.0 * n), kernels.rms_norm,
                lambda x, w: F.rms_norm(x, w.shape, w, 1e-6))  # fmt: skip
    yield Layer("layer_norm", "layer_norm", (x, weight, bias), (4.0 * n, 6.0 * n),
                kernels.layer_norm, lambda x, w, b: F.layer_norm(x, w.shape, w, b))  # fmt: skip
    gate, up = give(size.tokens, 4 * size.width), give(size.tokens, 4 * size.width)
    n = gate.numel()
    yield Layer("swiglu", "glu", (gate, up), (6.0 * n, 10.0 * n), kernels.swiglu,
                lambda a, b: F.silu(a) * b)  # fmt: skip
    features = min(128, size.width // 2)
    heads = size.width // features
    q = give(1, heads, size.tokens, features)
    k = give(1, max(1, heads // 4), size.tokens, features)
    angles = torch.rand(size.tokens, features // 2, device=device)
    cos, sin = angles.cos(), angles.sin()
    n = q.numel() + k.numel()
    yield Layer("rotary", "rotary", (q, k), (4.0 * n, 4.0 * n),
                lambda q, k: kernels.rotary(q, k, cos, sin),
                lambda q, k: (turned(q, cos, sin), turned(k, cos, sin)))  # fmt: skip
    logits = give(size.tokens, size.classes)
    target = torch.zeros(size.tokens, dtype=torch.int64, device=device)
    n = logits.numel()
    yield Layer("cross_entropy", "cross_entropy", (logits, target), (2.0 * n, 4.0 * n),
                kernels.cross_entropy, F.cross_entropy)  # fmt: skip


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Halves of features rotated, as the models of Hugging Face write it."""
    cos, sin = (torch.cat([t, t], -1).to(x.dtype) for t in (cos, sin))
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


def head(size: Size, device: torch.device, liger: dict[str, Callable[..., Any]]) -> Case:
    """The loss of logits that are never held, with gradients: three products of the matrices."""
    x = torch.randn(size.tokens, size.width, device=device).bfloat16()
    weight = torch.randn(size.classes, size.width, device=device).bfloat16()
    target = torch.zeros(size.tokens, dtype=torch.int64, device=device)

    def plain(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
        return F.cross_entropy(x @ w.t(), t)

    ways = {"torch": plain, "torch.compile": compiled(plain, size)}
    ways |= {"Liger": liger["linear_cross_entropy"]} if liger else {}
    given = (x, weight, target)
    return Case(
        "linear_cross_entropy, with gradients",
        "cross_entropy_grad",
        4.0 * (x.numel() + weight.numel()),
        whole(kernels.linear_cross_entropy, given, True),
        {k: whole(f, given, True) for k, f in ways.items()},
        operations=6.0 * size.tokens * size.width * size.classes,
        predicted=0.8,
    )


def whole(f: Callable[..., Any], given: tuple[Any, ...], full: bool) -> Call:
    """A call of ``f``, with the gradients of what is floating-point in ``given`` if ``full``."""
    if not full:
        return lambda i: f(*given)
    inputs = [t.detach().requires_grad_(t.is_floating_point()) for t in given]
    asked = [t for t in inputs if t.requires_grad]

    def run(i: int) -> object:
        y = f(*inputs)
        out = y if isinstance(y, tuple) else (y,)
        return torch.autograd.grad(out, asked, [torch.ones_like(t) for t in out])

    return run


def liger_functions() -> dict[str, Callable[..., Any]]:
    """Liger's, by our names, if it is installed."""
    if importlib.util.find_spec("liger_kernel") is None:
        return {}
    found = importlib.import_module("liger_kernel.transformers.functional")
    return {
        "rms_norm": lambda x, w: found.liger_rms_norm(x, w, 1e-6),
        "layer_norm": lambda x, w, b: found.liger_layer_norm(x, w, b, 1e-5),
        "swiglu": found.liger_swiglu,
        "cross_entropy": found.liger_cross_entropy,
        "linear_cross_entropy": found.liger_fused_linear_cross_entropy,
    }
