"""The kernels on this CPU, against the usual sequence of torch operations.

    python -m benchmarks.cpu_kernels            # two threads, 16.8M elements
    python -m benchmarks.cpu_kernels --threads 1 --only onebit --route torch

Other programs come and go while it runs, so everything is measured in many short turns, STREAM's
triad (McCalpin, 1995) between any two of them, in one process. The table has medians: nanoseconds
an element of ours, and the least; of the naive way, over ours; and the speed at which ours moves
the bytes that it must, as a share of that of the two triads beside it. The exit status says whether
what is promised held: a whole one-bit compression in 2 ns, levels in 1.1 ns.
"""

from __future__ import annotations

import argparse
import functools
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median

import torch
import torch.nn.functional as F

from zfunc import kernels


@dataclass(frozen=True)
class Race:
    """Two ways to the same numbers, each a function without arguments.

    ``bytes`` of an element must move, read and written; ``most`` nanoseconds are promised.
    """

    name: str
    ours: Callable[[], object]
    naive: Callable[[], object]
    bytes: float
    most: float = math.inf


def onebit(n: int) -> Iterator[Race]:
    """Compression with error feedback, with one scale and with groups, against torch operations."""
    x, error, left = torch.randn(n), torch.zeros(n), torch.zeros(n)
    weights = 2 ** torch.arange(8, dtype=torch.uint8)

    def sequence() -> None:
        c = x + left
        scale = c.norm() / n**0.5
        positive = c >= 0
        left.copy_(c - scale * (2.0 * positive - 1.0))
        (positive.view(-1, 8) * weights).sum(1, dtype=torch.uint8)

    for group in (None, 2048):
        ours = functools.partial(kernels.onebit_pack_, x, error, group=group)
        yield Race(f"onebit_pack, group={group}", ours, sequence, 12.1 if group else 20.1, most=2)
    bits, scale = kernels.onebit_pack_(x, error)
    received, scales = torch.stack([bits] * 4), torch.stack([scale] * 4)

    def expand(row: torch.Tensor) -> torch.Tensor:
        return 2.0 * ((row[:, None] & weights) != 0).float().view(-1) - 1.0

    def average() -> None:
        c = left + sum(s * expand(b) for b, s in zip(received, scales, strict=True)) / 4
        left.copy_(c - c.norm() / n**0.5 * c.sign())

    mean = functools.partial(kernels.onebit_mean_, received, scales, error)
    yield Race("onebit_mean of 4 (naive: unpacked)", mean, average, 4 / 8 + 8.1)
    unpack = functools.partial(kernels.onebit_unpack, bits, scale, n)
    yield Race("onebit_unpack", unpack, lambda: scale * expand(bits), 4.1)


def frozen(n: int) -> Iterator[Race]:
    """Updates with frozen second moments, against torch operations on whole buffers."""
    p, m, g, v = torch.randn(n), torch.randn(n), torch.randn(n), torch.rand(n) + 0.5
    mean = torch.randn(n)

    def shared() -> None:
        root = (v / 0.5).sqrt_()
        mean.mul_(0.9).add_(g, alpha=1 - 0.9).div_(root)

    def stepped() -> None:
        root = (v.mul_(1.0) / 0.5).sqrt_()
        p.mul_(0.99).sub_((m * 1e-3).div_(root.add_(1e-8)).clamp_(-0.01, 0.01))

    units = kernels.shares_hyper(0.9, 0.5)
    yield Race("momentum_shares", lambda: kernels.momentum_shares_(g, mean, v, units), shared, 16)
    hyper = kernels.frozen_hyper(1e-3, 1.0, 0.5, most=0.01, kept=0.99)
    yield Race("adamw_frozen", lambda: kernels.adamw_frozen_(p, m, v, hyper), stepped, 20)


def groupwise(n: int) -> Iterator[Race]:
    """Levels in groups of 256, against torch operations on whole buffers."""
    x = torch.randn(n).bfloat16()
    wide = x.float()

    def sequence(x: torch.Tensor) -> object:
        rows = x.view(-1, 256).float()
        scale = rows.abs().amax(1, keepdim=True) / 127
        return (rows / scale).round().clamp(-127, 127).to(torch.int8), scale

    for name, y, moved in (("bf16", x, 3.02), ("fp32", wide, 5.02)):
        ours = functools.partial(kernels.quantize_groups, y)
        theirs = functools.partial(sequence, y)
        yield Race(f"quantize_groups, 8 bits, {name}", ours, theirs, moved, most=1.1)
    four = functools.partial(kernels.quantize_groups, x, bits=4)
    yield Race("quantize_groups, 4 bits (naive: 8)", four, lambda: sequence(x), 2.52, most=1.1)
    random = functools.partial(kernels.quantize_groups, x, seed=1)

    def noisy() -> object:
        rows = x.view(-1, 256).float()
        scale = rows.abs().amax(1, keepdim=True) / 127
        return (rows / scale + torch.rand_like(rows)).floor().to(torch.int8)

    yield Race("quantize_groups, stochastic", random, noisy, 3.02)
    form = kernels.Payload(n, bits=4)
    received = torch.stack([kernels.quantize_payload(x, form)[0]] * 4)

    def average() -> object:
        total = sum(kernels.dequantize_payload(row, form) for row in received)
        return sequence(total / 4)

    mean = functools.partial(kernels.mean_payloads, received, form)
    yield Race("mean_payloads of 4, 4 bits (naive: 8)", mean, average, 5 * 0.516)
    q, scale, _ = kernels.quantize_groups(x)
    back = functools.partial(kernels.dequantize_groups, q, scale, None, n)
    yield Race(
        "dequantize_groups, 8 bits", back, lambda: q.view(-1, 256).float() * scale[:, None], 5.02
    )


def layers(n: int) -> Iterator[Race]:
    """Layers of a transformer in float32, forward and backward, against torch and autograd."""
    width = 2048
    x, y = (torch.randn(n // width, width, requires_grad=True) for _ in range(2))
    w, b = (torch.randn(width, requires_grad=True) for _ in range(2))
    target = torch.randint(width, (n // width,))
    turn = torch.randn(1, 256, 32)
    table = torch.cat([turn, turn], -1)
    heads = torch.randn(n // (16 * 256 * 64), 16, 256, 64, requires_grad=True)

    def both(f: Callable[..., torch.Tensor], *args: torch.Tensor) -> Callable[[], object]:
        ones = torch.ones_like(f(*args))
        return lambda: torch.autograd.grad(f(*args), args, ones)

    def rms(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))

    def rotated(q: torch.Tensor) -> torch.Tensor:
        return q * table + torch.cat([-q[..., 32:], q[..., :32]], -1) * table

    nothing = heads[:, :0].detach()
    rotary = functools.partial(kernels.rotary, k=nothing, cos=turn, sin=turn)
    yield Race("rms_norm", both(kernels.rms_norm, x, w), both(rms, x, w), 20)
    yield Race(
        "layer_norm",
        both(kernels.layer_norm, x, w, b),
        both(lambda x, w, b: F.layer_norm(x, (width,), w, b), x, w, b),
        20,
    )
    yield Race("swiglu", both(kernels.swiglu, x, y), both(lambda x, y: F.silu(x) * y, x, y), 32)
    gelu = functools.partial(kernels.bias_gelu, approximate="none")
    yield Race("bias_gelu", both(gelu, x, b), both(lambda x, b: F.gelu(x + b), x, b), 20)
    yield Race("rotary", both(lambda q: rotary(q)[0], heads), both(rotated, heads), 16)
    yield Race(
        "cross_entropy",
        both(lambda x: kernels.cross_entropy(x, target), x),
        both(lambda x: F.cross_entropy(x, target), x),
        12,
    )


RACES: dict[str, Callable[[int], Iterator[Race]]] = {
    "onebit": onebit,
    "frozen": frozen,
    "groupwise": groupwise,
    "layers": layers,
}


@dataclass(frozen=True)
class Found:
    """Seconds of every turn, and of the triads around each of ours."""

    ours: list[float]
    naive: list[float]
    stream: list[float]

    def share(self, bytes: float) -> float:
        """Of the triad's speed, turn by turn, and the median of that."""
        return median(bytes / x / (12 / y) for x, y in zip(self.ours, self.stream, strict=True))


def timed(race: Race, stream: Callable[[], object], turns: int) -> Found:
    """Turns of ours between two triads; the naive way has every fourth."""
    found = Found([], [], [])
    for call in (race.naive, race.ours, stream):
        call()  # warms up
    before = seconds(stream)
    for i in range(turns):
        found.ours.append(seconds(race.ours))
        after = seconds(stream)
        found.stream.append((before + after) / 2)
        if i % 4 == 0:
            found.naive.append(seconds(race.naive))
            after = seconds(stream)
        before = after
    return found


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def triad(n: int) -> Callable[[], object]:
    """``c = a + 3 b`` over float32: 12 bytes an element."""
    a, b, c = torch.randn(n), torch.randn(n), torch.empty(n)
    return lambda: torch.add(a, b, alpha=3.0, out=c)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--elements", type=int, default=1 << 24)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--route", choices=("llvm", "torch"), help="default: as the dispatch says")
    parser.add_argument("--only", choices=RACES, nargs="+", default=list(RACES))
    found = parser.parse_args()
    torch.set_num_threads(found.threads)
    if (n := found.elements) % 2048:
        parser.error(f"--elements is {n}; expected a multiple of 2048, the longest group.")
    for line in about(n, found):
        print(line)
    print(f"{'ns/element':38s}   median    least  naive  naive over ours  of STREAM")
    stream, speeds, held = triad(n), [], True
    for name in found.only:
        for each in RACES[name](n):
            with kernels.use("torch" if name == "layers" else found.route):  # they have no other
                took = timed(each, stream, found.turns)
            ours, naive = (median(x) / n * 1e9 for x in (took.ours, took.naive))
            speeds.append(12 * n / median(took.stream) / 1e9)
            share = took.share(each.bytes)
            row = f"{each.name:38s} {ours:8.2f} {min(took.ours) / n * 1e9:8.2f} {naive:6.2f}"
            kept = ours <= each.most
            held &= kept
            note = "" if kept else f"  MISSED: {each.most} ns wanted"
            print(f"{row} {naive / ours:16.2f} {share:10.0%}{note}")
    print(f"STREAM's triad beside them: {min(speeds):.1f} to {max(speeds):.1f} GB/s")
    return 0 if held else 1


def about(n: int, found: argparse.Namespace) -> Iterator[str]:
    yield f"{n:,} elements, {found.threads} thread(s), {found.turns} turns"
    route = found.route or kernels.choose("onebit_pack", torch.ones(1))
    yield f"torch {torch.__version__}; {route}"


if __name__ == "__main__":
    sys.exit(main())
