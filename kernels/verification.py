"""Run kernels and their twins on the same numbers, here, and compare."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zfunc.kernels import dispatch
from zfunc.kernels.activations import bias_gelu, geglu
from zfunc.kernels.adamw import adamw_flat, adamw_hyper
from zfunc.kernels.adamw8 import Moments8, adamw8_flat, split24, whole24
from zfunc.kernels.decode import norm_gate_up, norm_qkv_rope
from zfunc.kernels.frozen import adamw_frozen_, frozen_hyper, momentum_shares_, shares_hyper
from zfunc.kernels.gradient_norm import norm_clip
from zfunc.kernels.groupwise import dequantize_groups, fake_quant, quantize_groups
from zfunc.kernels.lamb import lamb_apply_, lamb_moments_, lamb_ratios
from zfunc.kernels.linear_losses import linear_cross_entropy
from zfunc.kernels.lion import lion_flat, lion_hyper
from zfunc.kernels.losses import cross_entropy
from zfunc.kernels.normalization import layer_norm, rms_norm
from zfunc.kernels.onebit import onebit_mean, onebit_pack, onebit_unpack
from zfunc.kernels.operators import KernelError
from zfunc.kernels.packed import Packed, pack_words
from zfunc.kernels.payloads import Payload, mean_payloads, quantize_payload
from zfunc.kernels.rotation import rotary
from zfunc.kernels.skinny import skinny_mm, w4_mm, w8_mm, w8a8_mm

__all__ = ["Verdict", "verify", "verify_interpreted"]

LENGTHS = (3001, 1, 70001, 16384)  # of flat samples, by the seed: a prime beyond a block first
BOUND = 1e-5
RARE = 1000  # of so many numbers rounded to 16 bits one may come out as its neighbour
# A level at a tie may fall either way on a GPU, whose division is not rounded exactly.
TIES = {"adamw8_flat", "quantize_groups", "fake_quant", "mean_payloads"}


# Both round to bfloat16, and what stands before a product may be rounded in another place.
ROUNDED = {"skinny_mm", "w8_mm", "w4_mm", "w8a8_mm", "norm_qkv_rope", "norm_gate_up"}
# Samples in bfloat16, whose bits Triton's interpreter takes for integers until it is taught.
HALF = {"adamw_flat", "lion_flat", *ROUNDED}


@dataclass(frozen=True)
class Verdict:
    """What became of one kernel.

    Attributes:
        kernel: its name.
        ran: whether Triton or machine code could run it here.
        note: on what it ran, or why it did not.
        error: the greatest relative (Frobenius) distance from the twin; 0 if it did not run.
        right: whether that is within the bound.
    """

    kernel: str
    ran: bool
    note: str
    error: float = 0.0
    right: bool = True

    def __str__(self) -> str:
        if not self.ran:
            return f"{self.kernel}: not run, {self.note}"
        return f"{self.kernel}: {'right' if self.right else 'WRONG'}, {self.error:.1e}, {self.note}"


def verify(
    names: Iterable[str] | None = None,
    device: torch.device | str | None = None,
    *,
    seed: int = 0,
) -> list[Verdict]:
    """Compare kernels with their twins on random numbers of this device.

    Args:
        names: of kernels; all of them if left out.
        device: where to run; the first GPU if there is one, else the CPU (where Triton
            runs only in its interpreter, with ``TRITON_INTERPRET=1``; without that, what has
            machine code is compared).
        seed: of the numbers; others have other lengths, too.

    Returns:
        A verdict for each kernel, in the order of the table.

    Raises:
        KernelError: there is no kernel of that name.

    >>> print(verify(["rms_norm"], "cpu")[0])
    rms_norm: not run, tensors are on cpu
    """
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    wanted = list(dispatch.KERNELS if names is None else names)
    for name in wanted:
        if name not in dispatch.KERNELS:
            known = ", ".join(dispatch.KERNELS)
            raise KernelError(f"kernels.verify: no kernel {name!r}; expected some of {known}.")
    return [_verdict(name, place, seed) for name in wanted]


def verify_interpreted(seconds: float = 600.0) -> list[Verdict]:
    """Compare every Triton kernel with its twin in Triton's interpreter: in a process of its own.

    No GPU is needed, and none is asked: what its compiler makes of a kernel is not verified.

    Args:
        seconds: after which that process is ended.

    Returns:
        A verdict for each kernel, in the order of the table.

    Raises:
        KernelError: there is no Triton here, or that process failed or took too long.
    """
    if not dispatch.installed():
        raise KernelError("kernels.verify_interpreted: Triton is not installed; pip install triton")
    command = [sys.executable, "-m", "zfunc.kernels.interpreted"]
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    try:
        ran = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise KernelError(
            f"kernels.verify_interpreted: not done within {seconds:g} s; give it more time."
        ) from error
    if ran.returncode:
        raise KernelError(f"kernels.verify_interpreted: the process failed: {ran.stderr[-500:]}")
    return [Verdict(**json.loads(line)) for line in ran.stdout.splitlines()]


def _verdict(name: str, device: torch.device, seed: int = 0) -> Verdict:
    choice = dispatch.choose(name, torch.empty(0, dtype=torch.bfloat16, device=device))
    interpreted = device.type == "cpu" and dispatch.interpreting()
    if choice.route == "torch" and not interpreted:
        return Verdict(name, False, choice.why)
    if interpreted and name in HALF and not _interpreter_knows_bfloat16():
        return Verdict(name, False, "Triton's interpreter does not know bfloat16")
    sample = SAMPLES[name](torch.Generator().manual_seed(seed), device)
    with dispatch.use("torch"):
        expected = sample()
    with dispatch.use("triton" if interpreted else None):
        found = sample()
    bound = 1e-2 if name in TIES else BOUND
    bound = 8e-3 if name in ROUNDED else bound
    errors = [_distance(x, y) for x, y in zip(found, expected, strict=True)]
    near = [_neighbours(x, y) for x, y in zip(found, expected, strict=True)]
    right = all(error <= bound or close for error, close in zip(errors, near, strict=True))
    note = choice.why if device.type == "cpu" else torch.cuda.get_device_name(device)
    note = "in the interpreter" if interpreted else note
    return Verdict(name, True, note, max(errors), right)


def _neighbours(found: Tensor, expected: Tensor) -> bool:
    """Whether copies in 16 bits are the same, but for a few that fell to the next number: what was
    rounded differs in its last bits, where a device has its own order."""
    if found.dtype not in (torch.bfloat16, torch.float16):
        return False
    x, y = found.double(), expected.double()
    near = (x - y).abs() <= torch.finfo(found.dtype).eps * torch.maximum(x.abs(), y.abs())
    return bool(near.all()) and int((x != y).sum()) <= 1 + x.numel() // RARE


def _interpreter_knows_bfloat16() -> bool:
    from zfunc.kernels.interpreter_triton import knows_bfloat16  # imports Triton

    return knows_bfloat16()


def _distance(found: Tensor, expected: Tensor) -> float:
    x, y = found.double(), expected.double()
    return float((x - y).norm() / y.norm().clamp_min(1e-30))


Sample = Callable[[torch.Generator, torch.device], Callable[[], tuple[Tensor, ...]]]


def _length(generator: torch.Generator) -> int:
    return LENGTHS[generator.initial_seed() % len(LENGTHS)]


def _numbers(generator: torch.Generator, device: torch.device, count: int) -> list[Tensor]:
    n = _length(generator)
    return [torch.randn(n, generator=generator).to(device) for _ in range(count)]


def _adamw(generator: torch.Generator, device: torch.device) -> Callable[[], Any]:
    g, p, m, v = _numbers(generator, device, 4)
    hyper = adamw_hyper(0.1, 3, factor=0.5, device=device)
    return lambda: adamw_flat(g.bfloat16(), p, m, v.abs(), hyper, torch.bfloat16)


def _adamw8(generator: torch.Generator, device: torch.device) -> Callable[[], Any]:
    """Values, not bytes: a code at a tie may fall either way."""
    g, p, m, v = _numbers(generator, device, 4)
    hyper = adamw_hyper(0.1, 3, factor=0.5, device=device)
    scales = torch.rand(-(-g.numel() // 128), 2, generator=generator).to(device)
    codes = (40 * m).clamp(-127, 127).to(torch.int8), (40 * v.abs()).clamp(0, 255).to(torch.uint8)
    low, tail = split24(p)

    def run() -> tuple[Tensor, ...]:
        state = Moments8(*codes, scales)
        new, rest, after, _ = adamw8_flat(g.bfloat16(), low, state, hyper, tail=tail)
        assert rest is not None
        return whole24(new, rest), after.mu.float(), after.nu.float(), after.scales

    return run


def _squares(generator: torch.Generator, device: torch.device) -> Callable[[], Any]:
    x, y = _numbers(generator, device, 2)
    return lambda: tuple(norm_clip([x, y.bfloat16()], 1.0))


def _lion(generator: torch.Generator, device: torch.device) -> Callable[[], Any]:
    g, p, m = _numbers(generator, device, 3)
    hyper = lion_hyper(0.1, weight_decay=0.1, device=device)
    return lambda: lion_flat(g.bfloat16(), p, m, hyper, torch.bfloat16)


def _lamb(generator: torch.Generator, device: torch.device) -> Callable[[], Any]:
    g, p, m, v = _numbers(generator, device, 4)
    hyper = adamw_hyper(0.1, 3, eps=1e-6, device=device)
    n, a = p.numel(), p.numel() // 48 * 16
    segments = [(0, a), (a + 16, a + 17), (a + 32, n)] if a else [(0, n)]

    def run() -> tuple[Tensor, ...]:
        new, mu, nu = p.clone(), m.clone(), v.abs()
        squares = lamb_moments_(g.bfloat16(), new, mu, nu, segments, hyper)
        lamb_apply_(new, mu, nu, segments, lamb_ratios(squares), hyper)
        return new, mu, nu, squares

    return run


def _shares(generator: torch.Generator, device: torch.device) -> Callable[[], Any]:
    g, m, v = _numbers(generator, device, 3)
    hyper = shares_hyper(0.9, 0.5, device)

    def run() -> tuple[Tensor, ...]:
        mean = m.clone()
        momentum_shares_(g, mean, v.square(), hyper)
        return (mean,)

    return run


def _frozen(generator: torch.Generator, device: torch.device) -> Callable[[], Any]:
    p, m, v = _numbers(generator, device, 3)
    hyper = frozen_hyper(0.1, 1.1, 0.5, most=0.5, kept=0.99, device=device)

    def run() -> tuple[Tensor, ...]:
        new, mean, squares = p.clone(), m.clone(), v.square()
        for shares in (True, False):
            adamw_frozen_(new, mean, squares, hyper, shares=shares)
        return new, mean, squares

    return run


def _pack(generator: torch.Generator, device: torch.device) -> Callable[[], Any]:
    x, e = _numbers(generator, device, 2)
    return lambda: (*onebit_pack(x, e), *onebit_pack(x, e, group=128, scaling="mean"))


def _mean(generator: torch.Generator, device: torch.device) -> Callable[[], Any]:
    x, y, e = _numbers(generator, device, 3)
    sent = [onebit_pack(z, e, group=128) for z in (x, y)]
    bits, scale = (torch.stack([s[i] for s in sent]) for i in (0, 1))
    return lambda: onebit_mean(bits, scale, e, group=128)


def _unpack(generator: torch.Generator, device: torch.device) -> Callable[[], Any]:
    x, e = _numbers(generator, device, 2)
    bits, scale, _ = onebit_pack(x, e, group=128)
    return lambda: (onebit_unpack(bits, scale, x.numel(), group=128),)


def _levels(generator: torch.Generator, device: torch.device) -> Callable[[], Any]:
    """Values, not bytes: a level more or less in a half byte is 16 in the other."""
    x = _numbers(generator, device, 1)[0].bfloat16()

    def run() -> tuple[Tensor, ...]:
        out = []
        for bits, symmetric, seed in ((8, True, None), (4, False, None), (4, True, 1)):
            q, scale, zero = quantize_groups(x, bits=bits, symmetric=symmetric, seed=seed)
            with dispatch.use("torch"):
                out += [dequantize_groups(q, scale, zero, x.numel(), bits=bits), scale]
        return tuple(out)

    return run


def _values(generator: torch.Generator, device: torch.device) -> Callable[[], Any]:
    x = _numbers(generator, device, 1)[0]
    parts = quantize_groups(x), quantize_groups(x, bits=4, symmetric=False)
    return lambda: tuple(
        dequantize_groups(*p, x.numel(), bits=b) for p, b in zip(parts, (8, 4), strict=True)
    )


def _fake(generator: torch.Generator, device: torch.device) -> Callable[[], Any]:
    x = _numbers(generator, device, 1)[0]
    return lambda: (fake_quant(x, bits=5), fake_quant(x, bits=4, symmetric=False, seed=1))


def _products(kind: str) -> Sample:
    """A row and several; with zeros in groups and without; a length that is no whole block."""

    def sample(generator: torch.Generator, device: torch.device) -> Callable[[], Any]:
        n, k = 70, 300
        rows = (5, 1, 16, 2)[generator.initial_seed() % 4]
        x = torch.randn(rows, k, generator=generator).bfloat16().to(device)
        w = torch.randn(n, k, generator=generator).bfloat16().to(device)
        codes = torch.randint(-8, 8, (n, k), generator=generator).to(torch.int8).to(device)
        scale, grouped = (torch.rand(n, g, generator=generator).to(device) for g in (1, 3))
        zero = torch.randint(-8, 8, (n, 3), generator=generator).to(torch.int8).to(device)
        if kind == "skinny_mm":
            return lambda: (skinny_mm(x, w), skinny_mm(x[:1], w, x[0, :n]))
        product = {"w8_mm": w8_mm, "w4_mm": w4_mm, "w8a8_mm": w8a8_mm}[kind]
        q = pack_words(codes) if kind == "w4_mm" else codes
        return lambda: (product(x, q, scale), product(x[:1], q, grouped, zero, group=128))

    return sample


def _decode(generator: torch.Generator, device: torch.device) -> Callable[[], Any]:
    x, norm, w = (
        torch.randn(*shape, generator=generator).bfloat16().to(device)
        for shape in ((3, 300), (300,), (4 * 32, 300))
    )
    angles = torch.rand(8, 16, generator=generator).to(device)
    positions = torch.tensor([0, 7, 3], device=device)

    def run() -> tuple[Tensor, ...]:
        keys, values = torch.zeros(2, 3, 1, 8, 32, dtype=x.dtype, device=device).unbind()
        turn = angles.cos(), angles.sin()
        weight = Packed.of(w)
        q = norm_qkv_rope(x, norm, weight, *turn, positions, keys, values)
        return q, keys, values, norm_gate_up(x, norm, weight)

    return run


def _payloads(generator: torch.Generator, device: torch.device) -> Callable[[], Any]:
    x, y, e = _numbers(generator, device, 3)
    form = Payload(x.numel())
    received = torch.stack([quantize_payload(z, form)[0] for z in (x, y)])

    def run() -> tuple[Tensor, ...]:
        payload, left = mean_payloads(received, form, e)
        assert left is not None
        q, scale, _ = form.parts(payload)
        with dispatch.use("torch"):
            return dequantize_groups(q, scale, None, x.numel()) + left, scale

    return run


def _pulled(f: Callable[..., Any], shapes: tuple[tuple[int, ...], ...]) -> Sample:
    """What a layer gives, and its gradients for all that it takes."""

    def sample(generator: torch.Generator, device: torch.device) -> Callable[[], Any]:
        args = [torch.randn(s, generator=generator).to(device) for s in shapes]

        def run() -> tuple[Tensor, ...]:
            leaves = [x.detach().requires_grad_() for x in args]
            out = f(*leaves)
            several = out if isinstance(out, tuple) else (out,)
            found = torch.autograd.grad([y.square().sum() for y in several], leaves)
            return *(y.detach() for y in several), *found

        return run

    return sample


def _turned(q: Tensor, k: Tensor) -> Any:
    turn = torch.arange(11 * 24, device=q.device).view(11, 24).float()
    return rotary(q, k, turn.cos(), turn.sin())


def _entropy(logits: Tensor) -> Tensor:
    classes = torch.arange(len(logits), device=logits.device) * 7 % logits.shape[1]
    return cross_entropy(logits, classes, ignore_index=7, label_smoothing=0.1, z_loss=0.01)


def _linear_entropy(x: Tensor, weight: Tensor) -> Tensor:
    classes = torch.arange(len(x), device=x.device) * 7 % len(weight)
    return linear_cross_entropy(x, weight, classes, chunk=8)


LAYERS = {
    "rms_norm": _pulled(
        lambda x, residual, w: rms_norm(x, w, residual=residual), ((37, 257), (37, 257), (257,))
    ),
    "layer_norm": _pulled(layer_norm, ((37, 257), (257,), (257,))),
    "glu": _pulled(geglu, ((3, 1031), (3, 1031))),
    "bias_gelu": _pulled(bias_gelu, ((37, 257), (257,))),
    "cross_entropy": _pulled(_entropy, ((23, 1031),)),
}

SAMPLES: dict[str, Sample] = {
    **LAYERS,
    **{f"{name}_backward": sample for name, sample in LAYERS.items()},
    "cross_entropy_grad": _pulled(_linear_entropy, ((23, 16), (257, 16))),
    "rotary": _pulled(_turned, ((2, 3, 11, 50), (2, 1, 11, 50))),
    "adamw8_flat": _adamw8,
    "adamw_flat": _adamw,
    "adamw_frozen": _frozen,
    "lamb_apply": _lamb,
    "lamb_moments": _lamb,
    "lion_flat": _lion,
    "momentum_shares": _shares,
    "sum_squares": _squares,
    **{kind: _products(kind) for kind in ("skinny_mm", "w8_mm", "w4_mm", "w8a8_mm")},
    "norm_qkv_rope": _decode,
    "norm_gate_up": _decode,
    "onebit_pack": _pack,
    "onebit_mean": _mean,
    "onebit_unpack": _unpack,
    "quantize_groups": _levels,
    "dequantize_groups": _values,
    "fake_quant": _fake,
    "mean_payloads": _payloads,
}
