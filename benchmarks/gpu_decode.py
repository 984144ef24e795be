"""End to end on a GPU: a token through the layers of a decoder, and a step of an optimizer.

The layers have the sizes of Llama 3 8B and random weights. A token goes through each of them in
fused blocks with torch's attention in between, all in one CUDA graph, against the same layers in
torch operations, eager and compiled. A step of ``zf.generate`` on a model of Hugging Face, in fused
blocks and without, is what of that is left with everything around it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import zfunc as zf
from benchmarks.gpu_cases import Size, compiled
from benchmarks.gpu_timing import Ceilings, Clock
from zfunc import kernels
from zfunc.language.decoding import HuggingFaceDecoder
from zfunc.optim import fused

__all__ = ["Decoder", "decoder", "end_to_end"]

BYTES = {"skinny_mm": 2.0, "w8_mm": 1.0, "w4_mm": 0.5}
REACH = {"skinny_mm": 0.82, "w8_mm": 0.75, "w4_mm": 0.6}
CONTEXT = 1024


@dataclass(frozen=True)
class Decoder:
    """The layers of a decoder, for ``rows`` sequences: one row of ``matrices`` for each layer."""

    matrices: list[tuple[kernels.Packed, ...]]
    norm: Tensor
    cos: Tensor
    sin: Tensor
    keys: Tensor
    values: Tensor
    position: Tensor

    def fused(self, x: Tensor) -> Tensor:
        """A token of each sequence through all layers."""
        groups = self.keys.shape[2]
        for i, (heads, out, halves, down) in enumerate(self.matrices):
            cache = self.keys[i], self.values[i]
            turn = (self.cos, self.sin, self.position)
            q = kernels.norm_qkv_rope(x, self.norm, heads, *turn, *cache)
            y = attend(q[:, :, None], *cache, groups)
            x = product(y, out, x)
            x = product(kernels.norm_gate_up(x, self.norm, halves), down, x)
        return x

    def plain(self, x: Tensor) -> Tensor:
        """The same in torch operations, with weights of 16 bits."""
        groups, width = self.keys.shape[2], self.keys.shape[4]
        for i, (heads, out, halves, down) in enumerate(self.matrices):
            y = F.linear(F.rms_norm(x, self.norm.shape, self.norm, 1e-6), heads.data)
            parts = y.view(len(x), -1, width)
            a, b = parts[:, : parts.shape[1] - groups].chunk(2, 2)
            c, s = (t[self.position][:, None].to(x.dtype) for t in (self.cos, self.sin))
            turned = torch.cat([a * c - b * s, b * c + a * s], 2)
            count = turned.shape[1] - groups
            at = self.position[0]
            self.keys[i].index_copy_(2, at[None], turned[:, count:, None])
            self.values[i].index_copy_(2, at[None], parts[:, -groups:, None])
            y = attend(turned[:, :count, None], self.keys[i], self.values[i], groups)
            x = x + F.linear(y, out.data)
            z = F.linear(F.rms_norm(x, self.norm.shape, self.norm, 1e-6), halves.data)
            gate, up = z.chunk(2, 1)
            x = x + F.linear(F.silu(gate) * up, down.data)
        return x


def attend(q: Tensor, keys: Tensor, values: Tensor, groups: int) -> Tensor:
    """``[M, H * D]``; queries share keys where there are fewer of them."""
    shared = q.shape[1] != groups
    y = F.scaled_dot_product_attention(q, keys, values, enable_gqa=shared)
    return y.flatten(1)


def product(x: Tensor, weight: kernels.Packed, residual: Tensor) -> Tensor:
    """``x W^T + residual``."""
    if weight.kind == "skinny_mm":
        return kernels.skinny_mm(x, weight.data, None, residual)
    call = {"w8_mm": kernels.w8_mm, "w4_mm": kernels.w4_mm}[weight.kind]
    assert weight.scale is not None
    return call(x, weight.data, weight.scale, None, None, residual, group=weight.group)


def decoder(kind: str, size: Size, rows: int, device: torch.device) -> Decoder:
    """One with random weights of a kind. The context is full of zeros, which costs as much."""
    k, width = size.width, 128 if size.width >= 1024 else 32
    heads = max(k // width, 1)
    groups = max(heads // 4, 1)
    inner = 7 * k // 2
    shapes = [((heads + 2 * groups) * width, k), (k, heads * width), (2 * inner, k), (k, inner)]
    matrices = [tuple(packed(kind, n, m, device) for n, m in shapes) for _ in range(size.layers)]
    length = CONTEXT if k >= 1024 else 16
    cache = torch.zeros(
        2, size.layers, rows, groups, length, width, dtype=torch.bfloat16, device=device
    )
    angles = torch.rand(length, width // 2, device=device)
    position = torch.full((rows,), length - 1, device=device)
    norm = torch.ones(k, dtype=torch.bfloat16, device=device)
    return Decoder(matrices, norm, angles.cos(), angles.sin(), *cache.unbind(), position)


def packed(kind: str, n: int, k: int, device: torch.device) -> kernels.Packed:
    """A random matrix ``[n, k]`` whose products stay of the size of their inputs."""
    if kind == "skinny_mm":
        return kernels.Packed.of((torch.randn(n, k, device=device) / k**0.5).bfloat16())
    groups = -(-k // 128)
    top = 7 if kind == "w4_mm" else 127
    scale = torch.full((groups, n), 2 / top / k**0.5, device=device).t()
    if kind == "w4_mm":
        words = torch.zeros(n, 16 * groups, dtype=torch.int32, device=device).random_()
        return kernels.Packed(kind, words, k, scale.bfloat16(), None, 128)
    codes = torch.randint(-127, 128, (n, k), device=device, dtype=torch.int8)
    return kernels.Packed(kind, codes, k, scale, None, 128)


def end_to_end(
    add: Callable[..., None],
    clock: Clock,
    roof: Ceilings,
    size: Size,
    device: torch.device,
    deadline: float,
) -> None:
    """A token by each kind of weights, one sequence and eight; a step of an optimizer."""
    for kind in BYTES:
        for rows in (1, 8):
            name = f"decode, {kind}, {rows} sequence{'s' if rows > 1 else ''}"
            if time.monotonic() > deadline:
                add("decode", name, skipped="no time left")
                continue
            model = decoder(kind, size, rows, device)
            x = torch.randn(rows, size.width, device=device).bfloat16()
            calls: dict[str, Callable[[int], object]] = {}
            if kind == "skinny_mm":
                distance = apart(model.fused(x), model.plain(x))
                add("decode", f"{name}: as in torch", right=distance < 0.05, distance=distance)
                quick = compiled(model.plain, size)
                calls = {
                    "torch": lambda i, f=model.plain, x=x: f(x),  # type: ignore[misc]
                    "torch.compile": lambda i, f=quick, x=x: f(x),  # type: ignore[misc]
                }
            moved = sum(m.data.numel() * m.data.itemsize for row in model.matrices for m in row)
            report(add, name, clock, roof, lambda i, f=model.fused, x=x: f(x), calls, moved, kind)  # type: ignore[misc]
    if time.monotonic() > deadline:
        add("decode", GENERATE, skipped="no time left")
    else:
        generating(add, clock, roof, size, device)
    optimizer(add, clock, roof, size, device)


GENERATE = "a step of zf.generate, unmodified Llama, 1 sequence"


def generating(
    add: Callable[..., None], clock: Clock, roof: Ceilings, size: Size, device: torch.device
) -> None:
    """A token through up to 8 layers of Hugging Face's Llama: in fused blocks and without."""
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError:
        add("decode", GENERATE, skipped="transformers is not installed")
        return
    heads = max(size.width // 128, 1)
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=size.width,
        intermediate_size=7 * size.width // 2,
        num_hidden_layers=min(size.layers, 8),
        num_attention_heads=heads,
        num_key_value_heads=max(heads // 4, 1),
        max_position_embeddings=CONTEXT,
    )
    with device:
        model = zf.functionalize(LlamaForCausalLM(config).bfloat16().eval())
    length = CONTEXT if device.type == "cuda" else 16
    ids = torch.randint(1024, (1, length - 1), device=device)

    def step(fused: bool) -> Callable[[int], Tensor]:
        decoder = HuggingFaceDecoder(model, fused=fused)
        with torch.no_grad():
            _, cache = decoder.step(model.params, decoder.start(1, length, None), ids)

        def call(i: int) -> Tensor:
            # From the same cache each time: the token is written where it was before.
            with torch.no_grad(), kernels.use(None if device.type == "cuda" else "torch"):
                return decoder.step(model.params, cache, ids[:, :1])[0]

        return call

    ours, plain = step(True), step(False)
    distance = apart(ours(0), plain(0))
    add("decode", f"{GENERATE}: as without blocks", right=distance < 0.05, distance=distance)
    moved = 2.0 * sum(x.numel() for x in zf.tree.leaves(model.params)) - 2.0 * 1024 * size.width
    report(add, GENERATE, clock, roof, ours, {"without blocks": plain}, moved, "skinny_mm")
    texts(add, clock, roof, model, device, moved)


TEXTS = "a token of zf.generate's texts, with graphs"


def texts(
    add: Callable[..., None],
    clock: Clock,
    roof: Ceilings,
    model: Any,
    device: torch.device,
    moved: float,
) -> None:
    """What a token of a text costs in all, sampling and Python included, with graphs and without.

    From two lengths of text that end within one extent, so that prompts and captures cancel out.
    """
    prompt, few, many = (256, 64, 192) if clock.real else (4, 2, 4)
    ids = torch.randint(1024, (1, prompt), device=device)

    def seconds(count: int, capture: bool) -> float:
        if clock.real:
            torch.cuda.synchronize()
        start = time.perf_counter()
        zf.generate(model, model.params, ids, max_new_tokens=count, capture=capture)
        if clock.real:
            torch.cuda.synchronize()
        return time.perf_counter() - start

    def token(capture: bool) -> float:
        each = [seconds(many, capture) - seconds(few, capture) for _ in range(5)]
        return median(each) / (many - few)

    if not clock.real:
        seconds(few, False)
        add("decode", TEXTS, skipped="graphs need a GPU; the text ran without")
        return
    token(True)
    halves, plain = [token(True) for _ in range(2)], token(False)
    add(
        "decode",
        TEXTS,
        microseconds=round(min(halves) * 1e6, 1),
        share=round(moved / min(halves) / roof.copy, 3),
        predicted=0.75,  # of the step's 82 %, what some twenty launches around it leave
        steady=abs(halves[0] - halves[1]) <= 0.02 * min(halves),
        ratios={"without graphs": round(plain / min(halves), 3)},
    )


def apart(x: Tensor, y: Tensor) -> float:
    return float((x - y).float().norm() / y.float().norm())


def report(
    add: Callable[..., None],
    name: str,
    clock: Clock,
    roof: Ceilings,
    ours: Callable[[int], object],
    others: dict[str, Callable[[int], object]],
    moved: float,
    kind: str,
) -> None:
    """A row: what a token costs, and what it costs by other ways."""
    seconds, steady, graph = clock(ours)
    theirs = {label: clock(call) for label, call in others.items()}
    found = {label: timing.seconds for label, timing in theirs.items()}
    if not clock.real:
        add("decode", name, ran=[*found])
        return
    add(
        "decode",
        name,
        microseconds=round(seconds * 1e6, 1),
        share=round(moved / seconds / roof.copy, 3),
        predicted=REACH.get(kind, 0.9),
        steady=steady,
        eager=["ours"] * (not graph) + [k for k, v in theirs.items() if not v.graph],
        ratios={label: round(value / seconds, 3) for label, value in found.items()},
    )


def optimizer(
    add: Callable[..., None], clock: Clock, roof: Ceilings, size: Size, device: torch.device
) -> None:
    """What a donated step of ``optim.adamw`` runs on a flat buffer, beside torch's fused one."""
    n = size.elements
    g = torch.randn(n, device=device)
    row = (torch.randn(n, device=device), g, torch.zeros_like(g), torch.zeros_like(g))
    how: dict[str, Any] = {"count": torch.tensor(1), "lr": 1e-3, "b1": 0.9, "b2": 0.999}

    def ours(i: int) -> Any:
        return fused.adamw_([row], [[(0, n, 0.01)]], eps=1e-8, **how)

    held = torch.nn.Parameter(row[0].clone())
    held.grad = g
    torch_one = torch.optim.AdamW([held], lr=1e-3, fused=True, capturable=device.type == "cuda")
    others: dict[str, Callable[[int], Any]] = {"torch.optim.AdamW": lambda i: torch_one.step()}
    report(add, "optimizer step, optim.adamw", clock, roof, ours, others, 28.0 * n, "")
