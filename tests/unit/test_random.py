"""Keys decide the numbers, and the global generator never tells that it was used."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from zfunc import random as zr
from zfunc.errors import PlacementError
from zfunc.ranks import keys

SAMPLERS: dict[str, Callable[[Tensor], Tensor]] = {
    "uniform": lambda k: zr.uniform(k, (64,), low=-1.0, high=3.0),
    "normal": lambda k: zr.normal(k, (8, 8), mean=1.0, std=2.0),
    "truncated_normal": lambda k: zr.truncated_normal(k, 64, lower=-1.0, upper=0.5),
    "bernoulli": lambda k: zr.bernoulli(k, 0.4, (64,)),
    "bernoulli_of_tensor": lambda k: zr.bernoulli(k, torch.full((64,), 0.4)),
    "randint": lambda k: zr.randint(k, -5, 50, (64,)),
    "permutation": lambda k: zr.permutation(k, 64),
    "permutation_of_rows": lambda k: zr.permutation(k, torch.arange(64.0)[:, None]),
    "split": lambda k: zr.split(k, 7),
    "fold_in": lambda k: zr.fold_in(k, 9),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_same_key_same_bits_other_key_other_bits(name: str) -> None:
    before = torch.get_rng_state()
    draw = SAMPLERS[name]
    first, again, other = draw(zr.key(1)), draw(zr.key(1)), draw(zr.key(2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), before)
    assert first.device.type == "cpu"


def test_splitmix64_matches_its_published_stream() -> None:
    # The first outputs of splitmix64 seeded with 1234567 (Vigna's reference program).
    state, got = 1234567, []
    for _ in range(3):
        state += keys._GOLDEN
        got.append(keys._mix(state))
    assert got == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@given(st.integers(-(2**70), 2**70), st.integers(-(2**63), 2**63 - 1))
def test_keys_are_0d_int64_and_derived_keys_differ(seed: int, data: int) -> None:
    key = zr.key(seed)
    assert key.dtype == torch.int64 and key.shape == () and key.device.type == "cpu"
    assert torch.equal(zr.as_key(key), key) and torch.equal(zr.as_key(seed), key)
    family = [key, zr.fold_in(key, data), zr.fold_in(key, data + 1), *zr.split(key, 3)]
    assert len({int(k) for k in family}) == len(family)
    assert torch.equal(zr.fold_in(seed, data), zr.fold_in(key, torch.tensor(data)))


def test_fold_in_has_no_collisions_and_balanced_bits() -> None:
    key = zr.key(0)
    words = [int(zr.fold_in(zr.fold_in(key, i), j)) for i in range(64) for j in range(64)]
    assert len(set(words)) == len(words)
    for bit in range(64):
        ones = sum(word >> bit & 1 for word in words)
        assert abs(ones - 2048) < 6 * 32  # six standard deviations of a fair coin


def test_split_is_a_prefix_of_a_longer_split() -> None:
    assert torch.equal(zr.split(5, 3), zr.split(5, 6)[:3])
    first, second = zr.split(zr.key(5))
    assert int(first) != int(second)
    assert zr.split(5, 0).shape == (0,)


def test_moments_and_ranges() -> None:
    n = 200_000
    u = zr.uniform(0, n, low=-1.0, high=3.0)
    assert u.min() >= -1 and u.max() < 3 and abs(u.mean() - 1) < 0.02
    g = zr.normal(1, n, mean=1.0, std=2.0)
    assert abs(g.mean() - 1) < 0.03 and abs(g.std() - 2) < 0.03
    t = zr.truncated_normal(2, n)
    assert t.min() >= -2 and t.max() <= 2 and abs(t.mean()) < 0.01
    assert abs(t.std() - 0.8796) < 0.01  # of a normal cut at two standard deviations
    assert abs(zr.bernoulli(3, 0.3, n).float().mean() - 0.3) < 0.01
    r = zr.randint(4, -2, 3, n)
    assert r.unique().tolist() == [-2, -1, 0, 1, 2]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_dtypes(dtype: torch.dtype) -> None:
    for draw in (zr.uniform, zr.normal, zr.truncated_normal):
        x = draw(zr.key(0), (16,), dtype)
        assert x.dtype == dtype and bool(x.isfinite().all())
    assert zr.truncated_normal(0, 4096, dtype, lower=-0.3, upper=0.3).abs().max() <= 0.3


@pytest.mark.parametrize(
    "bad", [torch.tensor(1.0), torch.tensor([1, 2]), torch.tensor(1, dtype=torch.int32), 1.5, True]
)
def test_bad_keys_say_what_a_key_is(bad: object) -> None:
    for use in (zr.key, zr.split, zr.uniform, zr.scope, lambda k: zr.fold_in(k, 1)):
        with pytest.raises(PlacementError, match="0-d int64 tensor"):
            use(bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [torch.tensor(1.0), torch.tensor([1, 2]), 0.5])
def test_fold_in_takes_integers(bad: object) -> None:
    with pytest.raises(PlacementError, match="integer"):
        zr.fold_in(zr.key(0), bad)  # type: ignore[arg-type]


def test_scope_is_a_function_of_its_key_and_leaves_no_trace() -> None:
    attention = torch.nn.MultiheadAttention(8, 2, dropout=0.5)
    q = torch.randn(3, 2, 8)

    def draws() -> list[Tensor]:
        fused = F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)
        return [F.dropout(torch.ones(50)), attention(q, q, q)[0], fused, torch.rand(3)]

    before = torch.get_rng_state()
    with zr.scope(zr.key(3)):
        first = draws()
    torch.rand(5)
    with zr.scope(3):
        again = draws()
    with zr.scope(zr.key(4)):
        other = draws()
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    after = torch.get_rng_state()
    torch.set_rng_state(before)
    torch.rand(5)
    assert torch.equal(torch.get_rng_state(), after)


def test_scopes_nest_and_survive_exceptions() -> None:
    before = torch.get_rng_state()
    with zr.scope(1):
        straight = torch.rand(4)
    with zr.scope(1):
        a = torch.rand(2)
        with pytest.raises(ZeroDivisionError), zr.scope(2):
            _ = torch.rand(7) + 1 // 0
        b = torch.rand(2)
    assert torch.equal(torch.cat([a, b]), straight)
    assert torch.equal(torch.get_rng_state(), before)
    assert not keys._GLOBAL.locked()


def test_threads_do_not_disturb_each_other() -> None:
    expected = []
    for rank in range(4):
        with zr.scope(zr.fold_in(0, rank)):
            expected.append(torch.rand(100))
    got: dict[int, list[Tensor]] = {}
    barrier = threading.Barrier(4)

    def rank_main(rank: int) -> None:
        got[rank] = []
        barrier.wait()
        for _ in range(50):
            with zr.scope(zr.fold_in(0, rank)):
                got[rank].append(torch.cat([torch.rand(1) for _ in range(100)]))

    before = torch.get_rng_state()
    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(x, expected[r]) for r in range(4) for x in got[r])
    assert torch.equal(torch.get_rng_state(), before)


def test_a_scope_steps_aside_while_its_rank_waits() -> None:
    def stream(rank: int) -> Tensor:
        with zr.scope(rank):
            return torch.rand(6)

    expected = [stream(rank) for rank in range(3)]
    got: dict[int, Tensor] = {}
    barrier = threading.Barrier(3, timeout=20)

    def rank_main(rank: int) -> None:
        with zr.scope(rank):
            parts = []
            for _ in range(3):
                parts.append(torch.rand(2))
                with zr.scope(99), zr.paused():  # all three must be inside at once
                    barrier.wait()
            got[rank] = torch.cat(parts)

    before = torch.get_rng_state()
    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [torch.equal(got[r], expected[r]) for r in range(3)] == [True] * 3
    assert torch.equal(torch.get_rng_state(), before)


def test_paused_outside_a_scope_does_nothing() -> None:
    before = torch.get_rng_state()
    with zr.paused():
        pass
    assert torch.equal(torch.get_rng_state(), before)


def test_a_pause_keeps_what_others_drew_outside_scopes() -> None:
    with zr.scope(1), zr.paused():
        torch.rand(3)
    moved = torch.get_rng_state()
    torch.manual_seed(0)
    torch.rand(3)
    assert torch.equal(torch.get_rng_state(), moved)
