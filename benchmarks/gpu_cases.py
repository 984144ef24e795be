"""What the GPU benchmark times: each kernel's call, its bytes, and what it is held against."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zfunc import kernels

__all__ = ["CASES", "COPY", "PRODUCT", "Case", "Size", "predicted"]

COPY, PRODUCT = 4.3e12, 780e12  # an H200's, read off one: only predictions use them
LAUNCH = 1.5e-6  # seconds that a launch in a CUDA graph adds to what it moves
CACHE = 240e6  # buffers that together are larger do not stay in a cache of 60 MB

Call = Callable[[int], object]
Weights = tuple[Tensor, ...]


@dataclass(frozen=True)
class Size:
    """How large the problems are.

    Attributes:
        elements: of a flat buffer.
        copy: bytes that the ceiling of memory is measured with.
        square: rows of the product that the other ceiling is measured with.
        shapes: ``(N, K)`` of the weights that few rows are multiplied with; configurations are
            tuned on the first.
        rows: how many rows.
        tokens, width, classes: of the layers of a transformer.
        layers: of the decoder, whose sizes are those of Llama 3 8B (``width`` 4096).
        backend: of ``torch.compile``.
    """

    elements: int = 1 << 28
    copy: int = 8 << 30
    square: int = 8192
    shapes: tuple[tuple[int, int], ...] = (
        (28672, 8192),
        (4096, 4096),
        (6144, 4096),
        (28672, 4096),
        (4096, 14336),
        (128256, 4096),
    )
    rows: tuple[int, ...] = (1, 4, 16)
    tokens: int = 8192
    width: int = 4096
    classes: int = 128256
    layers: int = 32
    backend: str = "inductor"

    @staticmethod
    def small() -> Size:
        """What a CPU does in a blink."""
        return Size(3001, 1 << 16, 32, ((96, 160),), (1, 3), 4, 64, 50, 2, "eager")


@dataclass(frozen=True)
class Case:
    """One row of the table.

    Attributes:
        name: of the row.
        kernel: whose launch configuration is tuned.
        bytes: that must move.
        ours: the call; gets the number of the copy of its buffers.
        baselines: other ways to the same.
        copies: of the buffers.
        operations: floating-point ones, where they could be the limit.
        predicted: the share of the ceiling that was predicted.
        tune: whether configurations are tried, the best of which becomes that of the kernel.
    """

    name: str
    kernel: str
    bytes: float
    ours: Call
    baselines: dict[str, Call] = field(default_factory=dict)
    copies: int = 1
    operations: float = 0.0
    predicted: float = 0.9
    tune: bool = False


def predicted(moved: float, reach: float, launches: int = 1) -> float:
    """The share of copy speed that some bytes reach, if their kernel alone reaches ``reach``.

    >>> round(predicted(8.6e9, 0.93), 2), round(predicted(8.4e6, 0.75, launches=2), 2)
    (0.93, 0.35)
    """
    floor = moved / COPY
    return floor / (floor / reach + launches * LAUNCH)


def compiled(f: Callable[..., Any], size: Size) -> Callable[..., Any]:
    return torch.compile(f, dynamic=False, backend=size.backend)


def flat_optimizers(size: Size, device: torch.device) -> Iterator[Case]:
    """One step over a flat buffer."""
    n, give = size.elements, partial(torch.randn, device=device)
    grad, low = give(n).bfloat16(), torch.empty(n, dtype=torch.bfloat16, device=device)
    p, m, v = give(n), torch.zeros(n, device=device), torch.zeros(n, device=device)
    hyper = kernels.adamw_hyper(1e-3, 1, factor=0.5, device=device)
    count = torch.ones((), device=device)

    def three(i: int) -> None:
        how = {"beta1": 0.9, "beta2": 0.999, "weight_decay": 0.01, "eps": 1e-8, "lr": 1e-3}
        wide = grad.float().mul_(0.5)
        rest: tuple[Any, ...] = ([p], [wide], [m], [v], [], [count])
        torch._fused_adamw_(*rest, amsgrad=False, maximize=False, **how)
        low.copy_(p)

    whole = 28.0 * n
    step = partial(kernels.adamw_flat_, grad, p, m, v, hyper, low)
    usual: dict[str, Call] = {"torch fused, 3 passes": three}
    yield Case("adamw_flat", "adamw_flat", whole, lambda i: step(), usual,
               predicted=predicted(whole, 0.93), tune=True)  # fmt: skip
    lion = kernels.lion_hyper(1e-3, device=device)
    yield Case("lion_flat", "lion_flat", 20.0 * n,
               lambda i: kernels.lion_flat_(grad, p, m, lion, low),
               predicted=predicted(20.0 * n, 0.93), tune=True)  # fmt: skip
    units, wide = kernels.shares_hyper(0.9, 0.5, device), give(n)
    yield Case("momentum_shares", "momentum_shares", 16.0 * n,
               lambda i: kernels.momentum_shares_(wide, m, v, units),
               predicted=predicted(16.0 * n, 0.93), tune=True)  # fmt: skip
    frozen = kernels.frozen_hyper(1e-3, 1.0, 0.5, most=1e-2, device=device)
    yield Case("adamw_frozen, from units", "adamw_frozen", 24.0 * n,
               lambda i: kernels.adamw_frozen_(p, m, v, frozen, shares=True),
               predicted=predicted(24.0 * n, 0.93), tune=True)  # fmt: skip
    segments = [(a, min(a + n // 8, n)) for a in range(0, n, max(n // 8, 1))]

    def lamb(i: int) -> None:
        squares = kernels.lamb_moments_(grad, p, m, v, segments, hyper)
        kernels.lamb_apply_(p, m, v, segments, kernels.lamb_ratios(squares), hyper, low)

    yield Case("lamb, both passes", "lamb_moments", 40.0 * n, lamb,
               predicted=predicted(40.0 * n, 0.9, 6))  # fmt: skip
    state, tail = kernels.moments8(n, device), torch.zeros(n, dtype=torch.int8, device=device)
    eight = partial(kernels.adamw8_flat_, grad, low, state, hyper, tail=tail)
    yield Case("adamw8_flat, 24 bits", "adamw8_flat", 12.125 * n, lambda i: eight(),
               {"adamw_flat": lambda i: step()}, predicted=predicted(12.125 * n, 0.85),
               tune=True)  # fmt: skip
    yield Case("norm_clip", "sum_squares", 2.0 * n, lambda i: kernels.norm_clip([grad], 1.0),
               {"torch": lambda i: torch.linalg.vector_norm(grad)},
               predicted=predicted(2.0 * n, 0.95, 8), tune=True)  # fmt: skip


def compression(size: Size, device: torch.device) -> Iterator[Case]:
    """One bit, eight and four."""
    n = size.elements - size.elements % 256 or 256
    x, error = torch.randn(n, device=device), torch.zeros(n, device=device)
    low = x.bfloat16()

    def sequence(i: int) -> None:
        c = x + error
        scale = c.norm() / n**0.5
        error.copy_(c - scale * torch.where(c >= 0, 1.0, -1.0))

    for group, moved, passes in ((None, 20.1, 4), (2048, 12.1, 1)):
        pack = partial(kernels.onebit_pack_, x, error, group=group)
        share = predicted(moved * n, 0.9, passes)
        yield Case(f"onebit_pack, group {group}", "onebit_pack", moved * n,
                   lambda i, pack=pack: pack(), {"torch": sequence}, predicted=share)  # type: ignore[misc]  # fmt: skip

    def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
        rows = x.view(-1, 256).float()
        scale = rows.abs().amax(1, keepdim=True) / 127
        return (rows / scale).round().to(torch.int8), scale

    quick = compiled(rounded, size)
    for bits, moved in ((8, 3.02), (4, 2.53)):
        quantize = partial(kernels.quantize_groups, low, bits=bits)
        baselines: dict[str, Call] = {
            "torch, 8 bits": lambda i: rounded(low),
            "torch.compile, 8 bits": lambda i: quick(low),
        }
        yield Case(f"quantize_groups, {bits} bits", "quantize_groups", moved * n,
                   lambda i, q=quantize: q(), baselines, predicted=predicted(moved * n, 0.93))  # type: ignore[misc]  # fmt: skip
    q = torch.zeros(n, dtype=torch.int8, device=device)
    scale = torch.ones(n // 256, device=device)
    back = partial(kernels.dequantize_groups, q, scale, None, n, dtype=torch.bfloat16)
    yield Case("dequantize_groups, 8 bits", "dequantize_groups", 3.02 * n, lambda i: back(),
               predicted=predicted(3.02 * n, 0.93))  # fmt: skip


def payloads(size: Size, device: torch.device) -> Iterator[Case]:
    """What a collective carries: made, averaged and opened, beside torch in separate passes."""
    n = size.elements - size.elements % 256 or 256
    x, error = torch.randn(n, device=device), torch.zeros(n, device=device)
    low = x.bfloat16()

    def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
        rows = x.view(-1, 256).float()
        scale = rows.abs().amax(1, keepdim=True) / 7
        q = (rows / scale).round().to(torch.int8)
        return q[:, ::2] & 15 | q[:, 1::2] << 4, scale

    def opened(q: Tensor, scale: Tensor) -> Tensor:
        both = torch.stack([q << 4 >> 4, q >> 4], -1).flatten(-2)
        return both.float() * scale

    def row(name: str, kernel: str, moved: float, ours: Callable[[], object], plain: Any,
            *given: Tensor, reach: float = 0.9) -> Case:  # fmt: skip
        quick = compiled(plain, size)
        ways: dict[str, Call] = {
            "torch": lambda i: plain(*given),
            "torch.compile": lambda i: quick(*given),
        }
        return Case(
            name, kernel, moved, lambda i: ours(), ways, predicted=predicted(moved, reach, 2)
        )

    form, senders = kernels.Payload(n, bits=4), 8
    made = partial(kernels.quantize_payload, low, form)
    yield row("quantize_payload, 4 bits", "quantize_groups", 2.52 * n, made, rounded, low)
    fed = partial(kernels.quantize_payload_, x, form, error)

    def feeding(x: Tensor, error: Tensor) -> Tensor:
        c = x + error
        q, scale = rounded(c)
        return c.sub_(opened(q, scale).view(-1))

    yield row("quantize_payload, 4 bits with an error", "quantize_groups", 12.52 * n, fed, feeding,
              x, error)  # fmt: skip
    received = torch.zeros(senders, form.bytes, dtype=torch.uint8, device=device)
    q = torch.zeros(senders, n // 256, 128, dtype=torch.int8, device=device)
    scale = torch.ones(senders, n // 256, 1, device=device)

    def averaging(q: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        return rounded(opened(q, scale).mean(0))

    mean = partial(kernels.mean_payloads, received, form)
    yield row(f"mean_payloads, 4 bits from {senders}", "mean_payloads", 0.516 * (senders + 1) * n,
              mean, averaging, q, scale, reach=0.75)  # bound by its instructions  # fmt: skip
    part = kernels.Payload(n // senders)
    parts = torch.zeros(senders, part.bytes, dtype=torch.uint8, device=device)
    levels = torch.zeros(senders, max(n // senders // 256, 1), 256, dtype=torch.int8, device=device)
    their = torch.ones(*levels.shape[:2], 1, device=device)
    back = partial(kernels.dequantize_payload, parts, part, torch.bfloat16)
    yield row(f"dequantize_payload, 8 bits from {senders}", "dequantize_groups", 3.02 * n, back,
              lambda q, s: (q * s).bfloat16(), levels, their)  # fmt: skip


REACH = {"skinny_mm": 0.85, "w8_mm": 0.85, "w8a8_mm": 0.85, "w4_mm": 0.7}


def few_rows(kind: str, size: Size, device: torch.device) -> Iterator[Case]:
    """Decoding products, beside cuBLAS with weights of 16 bits; weights come from memory."""
    for n, k in size.shapes:
        moved = n * k * {"skinny_mm": 2.0, "w8_mm": 1.0, "w8a8_mm": 1.0, "w4_mm": 0.5}[kind]
        copies = 1 if device.type != "cuda" else max(1, round(CACHE / moved + 0.5))
        plain = [torch.randn(n, k, device=device).bfloat16() for _ in range(copies)]
        held = [weights(kind, w) for w in plain]
        other = low_bit_module(kind, plain[0])
        for m in size.rows:
            x = torch.randn(m, k, device=device).bfloat16()
            call = getattr(kernels, kind)
            group = {"group": 128} if kind == "w4_mm" else {}
            baselines: dict[str, Call] = {"cuBLAS": lambda i, x=x, w=plain: F.linear(x, w[i])}  # type: ignore[misc]
            if other is not None:
                baselines["torchao"] = lambda i, x=x, f=other: f(x)  # type: ignore[misc]
            yield Case(
                f"{kind}, {m} x {n} x {k}",
                kind,
                moved + 2.0 * (m * k + m * n),
                lambda i, x=x, w=held, call=call, group=group: call(x, *w[i], **group),  # type: ignore[misc]
                baselines,
                copies,
                2.0 * m * n * k,
                predicted(moved, REACH[kind], 2),
                tune=(n, k) == size.shapes[0] and m == size.rows[0],
            )


def weights(kind: str, w: Tensor) -> Weights:
    """A weight of this kind, of any values."""
    n, k = w.shape
    if kind == "skinny_mm":
        return (w,)
    if kind == "w4_mm":
        words = torch.zeros(n, 16 * -(-k // 128), dtype=torch.int32, device=w.device)
        return words.random_(), torch.rand(-(-k // 128), n, device=w.device).bfloat16().t()
    return w.to(torch.int8), torch.rand(n, 1, device=w.device)


def low_bit_module(kind: str, w: Tensor) -> Callable[[Tensor], Tensor] | None:
    """torchao's linear layer with such weights, if it is installed and has one."""
    if not w.is_cuda or importlib.util.find_spec("torchao") is None or kind == "skinny_mm":
        return None
    quantization = importlib.import_module("torchao.quantization")
    names = {
        "w8_mm": "Int8WeightOnlyConfig",
        "w4_mm": "Int4WeightOnlyConfig",
        "w8a8_mm": "Int8DynamicActivationInt8WeightConfig",
    }
    try:
        layer = torch.nn.Linear(w.shape[1], w.shape[0], bias=False, device=w.device, dtype=w.dtype)
        quantization.quantize_(layer, getattr(quantization, names[kind])())
        layer(torch.randn(1, w.shape[1], device=w.device, dtype=w.dtype))
    except Exception:  # each release of it wants other things; the row says that it is absent
        return None
    return layer


CASES: dict[str, Callable[[Size, torch.device], Iterator[Case]]] = {
    "optimizers": flat_optimizers,
    "compression": compression,
    **{kind: partial(few_rows, kind) for kind in REACH},
    "payloads": payloads,
}
