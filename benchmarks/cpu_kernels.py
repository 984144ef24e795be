"""The twins of the kernels on this CPU, against the usual sequence of torch operations.

    python -m benchmarks.cpu_kernels            # one thread, 16.8M elements
    python -m benchmarks.cpu_kernels --threads 2 --only adamw_flat

Every pair runs interleaved, in one process; the table has the least time of each, in
nanoseconds an element, and their ratio. Beside them stands the speed of memory as this
process sees it: a copy, and an update in place.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from zfunc import kernels


@dataclass(frozen=True)
class Race:
    """Two ways to the same numbers, each a function without arguments."""

    name: str
    ours: Callable[[], object]
    naive: Callable[[], object]


def adamw_flat(n: int) -> Iterator[Race]:
    """bfloat16 gradient, float32 state, bfloat16 copy: one pass against three."""
    grad, low = torch.randn(n).bfloat16(), torch.empty(n, dtype=torch.bfloat16)
    state = [torch.randn(n), torch.zeros(n), torch.zeros(n)]
    hyper = kernels.adamw_hyper(1e-3, 1, factor=0.5)
    count = torch.tensor(1.0)

    def three_passes() -> None:
        wide = grad.float().mul_(0.5)
        p, m, v = ([x] for x in state)
        how = {"beta1": 0.9, "beta2": 0.999, "weight_decay": 0.01, "eps": 1e-8}
        torch._fused_adamw_(
            p, [wide], m, v, [], [count], lr=1e-3, amsgrad=False, maximize=False, **how
        )
        low.copy_(state[0])

    yield Race("adamw_flat", lambda: kernels.adamw_flat_(grad, *state, hyper, low), three_passes)


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
        yield Race(f"onebit_pack, group={group}", ours, sequence)
    bits, scale = kernels.onebit_pack_(x, error)
    received, scales = torch.stack([bits] * 4), torch.stack([scale] * 4)

    def expand(row: torch.Tensor) -> torch.Tensor:
        return 2.0 * ((row[:, None] & weights) != 0).float().view(-1) - 1.0

    def average() -> None:
        c = left + sum(s * expand(b) for b, s in zip(received, scales, strict=True)) / 4
        left.copy_(c - c.norm() / n**0.5 * c.sign())

    mean = functools.partial(kernels.onebit_mean_, received, scales, error)
    yield Race("onebit_mean of 4 (naive: unpacked)", mean, average)
    unpack = functools.partial(kernels.onebit_unpack, bits, scale, n)
    yield Race("onebit_unpack", unpack, lambda: scale * expand(bits))


RACES: dict[str, Callable[[int], Iterator[Race]]] = {
    "adamw_flat": adamw_flat,
    "onebit": onebit,
}


def least(functions: list[Callable[[], object]], rounds: int) -> list[float]:
    """Seconds of each, the least of ``rounds``, one after the other in every round."""
    best = [float("inf")] * len(functions)
    for i in range(rounds + 1):
        for k, function in enumerate(functions):
            start = time.perf_counter()
            function()
            if i:  # the first round warms up
                best[k] = min(best[k], time.perf_counter() - start)
    return best


def memory(n: int, rounds: int) -> str:
    """What this process moves, read plus written."""
    x, y = torch.randn(n), torch.randn(n)
    copy, inplace = least([lambda: y.copy_(x), lambda: y.add_(1.0)], rounds)
    return f"memory: copy {8 * n / copy / 1e9:.1f} GB/s, in place {8 * n / inplace / 1e9:.1f} GB/s"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--elements", type=int, default=1 << 24)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--only", choices=RACES, nargs="+", default=list(RACES))
    found = parser.parse_args()
    torch.set_num_threads(found.threads)
    n = found.elements
    print(f"{n:,} elements, {found.threads} thread(s), least of {found.rounds}")
    print(memory(n, found.rounds))
    print(f"{'kernel':34s} {'ours':>8s} {'naive':>8s}  ns/element  naive over ours")
    for name in found.only:
        for race in RACES[name](n):
            ours, naive = least([race.ours, race.naive], found.rounds)
            row = f"{race.name:34s} {ours / n * 1e9:8.2f} {naive / n * 1e9:8.2f}"
            print(f"{row}              {naive / ours:5.2f}")


if __name__ == "__main__":
    main()
