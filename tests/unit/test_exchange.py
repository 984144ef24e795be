"""The compressed collective against the published algorithm, literally, and its bytes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import zfunc as zf
from tests.laws.cases import numbers
from tests.laws.compression import TwoPhases, integers, signs
from tests.laws.covering import each
from zfunc.ranks.axes import group as group_of
from zfunc.ranks.routes import all_gather_bytes
from zfunc.transforms.compression.exchange import Gathered, Scattered
from zfunc.transforms.compression.onebit import OneBit
from zfunc.transforms.compression.quantized import Int4, Int8

Rounds = list[tuple[Tensor, Tensor]]


def cuts_of(n: int, ranks: int, seed: int) -> tuple[int, ...]:
    """Uneven ones: a part may be empty."""
    inner = torch.randint(0, n + 1, (ranks - 1,), generator=torch.Generator().manual_seed(seed))
    return (0, *sorted(inner.tolist()), n)


def exchanged(
    codec: Any, cuts: tuple[int, ...], dtype: torch.dtype, rounds: int
) -> list[tuple[Rounds, Tensor, Tensor, int, list[int]]]:
    """What each rank gets in each round (whole and part), its errors, and what it sends."""
    ranks, n = len(cuts) - 1, cuts[-1]

    def body() -> Any:
        group, rank = group_of(None, "data"), zf.rank()
        low, high = cuts[rank], cuts[rank + 1]
        worker, server = torch.zeros(n, dtype=dtype), torch.zeros(high - low, dtype=dtype)
        seen: Rounds = []
        with zf.comm.ledger() as led:
            for i in range(rounds):
                x = numbers((n,), 100 * i + rank, dtype)
                first = Scattered(group, codec, x, cuts, worker, "first")
                part = first.wait()
                second, out = Gathered(first, server, "second"), torch.empty(n, dtype=dtype)
                second.write(out)
                seen.append((out, part))
        sent = [led.by_label["first"] // rounds, led.by_label["second"] // rounds]
        return seen, worker, server, rank, sent

    return zf.simulate(ranks)(body)()


CODECS: dict[str, tuple[Any, Callable[[Tensor], Tensor]]] = {
    "rms": (OneBit(None, "rms"), lambda c: signs(c, None, "rms")),
    "rms of 128": (OneBit(128, "rms"), lambda c: signs(c, 128, "rms")),
    "mean of 256": (OneBit(256), lambda c: signs(c, 256, "mean")),
    "int8": (Int8(), lambda c: integers(c, 256, 127)),
    "int8 of 10": (Int8(10), lambda c: integers(c, 10, 127)),
    "int4": (Int4(), lambda c: integers(c, 128, 7)),
}


@pytest.mark.parametrize(("name", "ranks"), each(CODECS, [1, 2, 3, 4, 5], times=2))
@given(n=st.integers(1, 700), seed=st.integers(0, 99))
@settings(max_examples=5)
def test_it_is_the_published_algorithm(name: str, ranks: int, n: int, seed: int) -> None:
    for dtype in (torch.float64, torch.float32):
        check(*CODECS[name], cuts_of(n, ranks, seed), dtype)


def check(codec: Any, sent: Any, cuts: tuple[int, ...], dtype: torch.dtype) -> None:
    """Three rounds, each rank against the book; the errors afterwards; the bytes."""
    ranks, n = len(cuts) - 1, cuts[-1]
    runs = exchanged(codec, cuts, dtype, rounds=3)
    paper, one_phase = (TwoPhases(cuts, sent, whole=w) for w in (True, False))
    for i in range(3):
        inputs = [numbers((n,), 100 * i + rank, dtype) for rank in range(ranks)]
        whole, first = paper.mean(inputs), one_phase.mean(inputs)
        for seen, _, _, rank, _ in runs:
            near(seen[i][0], whole)
            near(seen[i][1], first[cuts[rank] : cuts[rank + 1]])
            assert torch.equal(seen[i][0], runs[0][0][i][0])  # every rank the same bits
    for _, worker, server, rank, nbytes in runs:
        near(worker, paper.worker[rank])
        near(server, paper.server[cuts[rank] : cuts[rank + 1]])
        assert nbytes == [0, 0] if ranks == 1 else phase_bytes(codec, cuts, dtype, rank)


def phase_bytes(codec: Any, cuts: tuple[int, ...], dtype: torch.dtype, rank: int) -> list[int]:
    """What a rank sends: to each other one that one's part, and then its own part to all."""
    sizes = [codec.nbytes(b - a, dtype) for a, b in pairwise(cuts)]
    gathered = all_gather_bytes((0, *accumulate(sizes)), 1, rank, len(sizes))
    return [sum(sizes) - sizes[rank], gathered]


def near(x: Tensor, expected: Tensor) -> None:
    """Within 1e-6; in float32 a number on the verge may fall to the other side, once in long."""
    off = (x.double() - expected).abs() > 1e-6
    assert int(off.sum()) <= (0 if x.dtype == torch.float64 else 1)


@given(ranks=st.integers(1, 5), n=st.integers(1, 300), seed=st.integers(0, 99))
@settings(max_examples=15)
def test_nothing_is_lost(ranks: int, n: int, seed: int) -> None:
    """What went in is what came out and what the errors hold."""
    cuts, rounds = cuts_of(n, ranks, seed), 4
    codec = (OneBit(128), Int8(16), Int4(30))[seed % 3]
    runs = exchanged(codec, cuts, torch.float64, rounds)
    went_in = torch.stack(
        [numbers((n,), 100 * i + rank) for i in range(rounds) for rank in range(ranks)]
    )
    came_out = torch.stack([out for out, _ in runs[0][0]]).sum(0)
    held = torch.stack([run[1] for run in runs]).mean(0) + torch.cat([run[2] for run in runs])
    torch.testing.assert_close(went_in.sum(0) / ranks, came_out + held, rtol=0, atol=1e-12)


def test_its_bytes_are_what_theory_says() -> None:
    """n/8 (N-1)/N bytes in each phase, and a float32 scale for each group."""
    for ranks in (2, 4):
        n = 4096 * ranks
        cuts = tuple(4096 * r for r in range(ranks + 1))
        for *_, sent in exchanged(OneBit(), cuts, torch.float32, rounds=1):
            scales = 4 * (4096 // 2048) * (ranks - 1)
            assert sent == [n // 8 * (ranks - 1) // ranks + scales] * 2


@pytest.mark.parametrize("ranks", [3, 17, 20])
def test_its_bytes_are_told_before_in_large_groups_too(ranks: int) -> None:
    cuts = cuts_of(3000, ranks, 1)
    for *_, rank, sent in exchanged(Int8(), cuts, torch.float32, rounds=1):
        assert sent == phase_bytes(Int8(), cuts, torch.float32, rank)
