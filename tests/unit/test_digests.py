"""Digests see every bit and where it stands, on the host as in the way of a device."""

from __future__ import annotations

import itertools

import pytest
import torch

from zfunc.files.chunks import NAMES
from zfunc.ranks import digests
from zfunc.ranks.digests import digests as of

WAYS = pytest.mark.parametrize("weighed", [False, True], ids=["host", "device"])


def raw(n: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (n,), dtype=torch.uint8, generator=generator)


@WAYS
@pytest.mark.parametrize("dtype", [*NAMES, torch.complex128], ids=str)
def test_elements_that_change_places_change_it(dtype: torch.dtype, weighed: bool) -> None:
    bits = raw(24 * dtype.itemsize, 1)
    x = (bits % 2 if dtype == torch.bool else bits).view(dtype)
    assert (
        len(set(of([x, x.clone(), x.view(4, 6), x.view(6, 4).t().contiguous().t()], weighed))) == 1
    )
    rows = x.view(torch.uint8).view(24, -1)
    swapped, distinct = [x], {tuple(rows.flatten().tolist())}
    for i, j in itertools.combinations(range(24), 2):
        order = list(range(24))
        order[i], order[j] = j, i
        other = rows[order].flatten()
        distinct.add(tuple(other.tolist()))
        swapped.append(other.view(dtype))
    assert len(set(of(swapped, weighed))) == len(distinct) > 20


@WAYS
@pytest.mark.parametrize("n", [1, 7, 8, 31, 32, 33, 100])
def test_every_bit_counts_in_large_and_small_tensors(
    n: int, weighed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digests, "SMALL", 8)
    monkeypatch.setattr(digests, "BLOCK", 16)
    x = raw(4 * n, n)
    flipped = [x]
    for bit in range(32 * n):
        flipped.append(x.clone())
        flipped[-1][bit // 8] ^= 1 << bit % 8
    assert len(set(of([y.view(torch.float32) for y in flipped], weighed))) == 32 * n + 1


@WAYS
def test_structured_numbers_do_not_cancel(weighed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a sum of places times values stays the same: +1, -2, +1; and whole blocks swapped."""
    monkeypatch.setattr(digests, "SMALL", 0)
    monkeypatch.setattr(digests, "BLOCK", 4)
    x = torch.arange(16)
    y = x.clone()
    y[4:7] += torch.tensor([1, -2, 1])
    assert len(set(of([x, y, x.roll(4), x.roll(8), x.flip(0)], weighed))) == 5


@WAYS
def test_one_of_many_is_what_it_is_alone(weighed: bool) -> None:
    xs = [torch.randn(5000), torch.ones(3), torch.zeros(()), torch.randn(3, 3000), torch.zeros(0)]
    xs += [torch.ones(2, 2, dtype=torch.int8), torch.ones(6000).double(), torch.ones(3)]
    assert of(xs, weighed) == [of([x], weighed)[0] for x in xs]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("shape", [(0,), (0, 4), (3, 0), (), (2, 3)])
def test_memory_of_any_shape(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = torch.zeros(shape, dtype=dtype)
    found = digests.as_bytes(x)
    assert found.nbytes == len(found) == x.nbytes and found.format == "B" and not any(found)


@pytest.mark.parametrize("n", [3, 5000])
def test_one_digest_of_many_sees_each_bit_and_its_place(n: int) -> None:
    xs = [torch.randn(n), torch.randn(n).bfloat16(), torch.randn(n), torch.tensor(1)]
    same = digests.digest_of_all([x.clone() for x in xs])
    assert digests.digest_of_all(xs) == same
    seen = {same, digests.digest_of_all([xs[2], xs[1], xs[0], xs[3]])}
    for i in range(len(xs)):
        others = [x.clone() for x in xs]
        others[i].view(-1)[-1] += 1
        seen.add(digests.digest_of_all(others))
    assert len(seen) == 2 + len(xs)
