"""Machine code for CPUs against the twins: to the last bit, on every kind of CPU.

Twins are held against the formulas elsewhere. Here also what only such code can do wrong: read or
write beyond the end, and depend on how many threads there are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.cpus import be
from tests.kernels.fenced import fenced
from zfunc import kernels
from zfunc.kernels import frozen_llvm, groupwise_llvm, onebit_llvm
from zfunc.kernels.groupwise_torch import Quantizing
from zfunc.kernels.llvm import host
from zfunc.kernels.onebit_torch import Packing

CPUS = ("avx512", "avx", "avx2")
LENGTHS = (0, 1, 7, 16, 17, 129, 3001, 40000)
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
ROOMS = (frozen_llvm, groupwise_llvm, onebit_llvm)

pytestmark = pytest.mark.skipif(not host().isa, reason=f"no machine code here: {host().why}")


def numbers(n: int, dtype: torch.dtype = torch.float32, odd: bool = True) -> Tensor:
    """Random ones, and some that are special."""
    x = torch.randn(n)
    if n > 100 and odd:
        x[3], x[50], x[-1] = float("nan"), float("inf"), float("-inf")
        x[7:9], x[9] = 0.0, -0.0
    return x.to(dtype)


def same(found: Any, expected: Any) -> bool:
    """Bit for bit, and NaN where there is NaN."""
    if found is None or expected is None:
        return found is expected
    if not found.is_floating_point():
        return torch.equal(found, expected)
    return torch.equal(found.isnan(), expected.isnan()) and torch.equal(
        found.nan_to_num(), expected.nan_to_num()
    )


def both(call: Callable[..., Any], *args: Any, **how: Any) -> list[tuple[Any, Any]]:
    """What machine code gives, and what the twin does."""
    found = call(*args, **how)
    with kernels.use("torch"):
        expected = call(*args, **how)
    if isinstance(found, Tensor):
        return [(found, expected)]
    return list(zip(found, expected, strict=True))


@pytest.mark.parametrize("scaling", ["rms", "mean"])
@pytest.mark.parametrize("group", [None, 128, 8192])
@pytest.mark.parametrize("cpu", CPUS)
def test_signs(cpu: str, group: int | None, scaling: str, monkeypatch: pytest.MonkeyPatch):
    be(cpu, monkeypatch, *ROOMS)
    how: Any = {"group": group, "scaling": scaling}
    for n, dtype in [*((n, torch.float32) for n in LENGTHS), (140001, torch.bfloat16)]:
        x, odd = numbers(n, dtype, odd=False), numbers(n)
        clean = odd.nan_to_num(0.5, 1, -1)
        sent = [kernels.onebit_pack(numbers(n, odd=False), clean, **how) for _ in range(3)]
        bits, scale = (torch.stack([s[i] for s in sent]) for i in (0, 1))
        for error in (odd, clean):
            made = both(kernels.onebit_pack, x, error, **how)
            made += both(kernels.onebit_mean, bits, scale, error, **how)
            assert all(same(*pair) for pair in made), (n, how)
        for out in FLOATS:
            (pair,) = both(kernels.onebit_unpack, bits, scale, n, group=group, dtype=out)
            assert same(*pair)


def equal(found: Tensor, expected: Tensor) -> bool:
    """:func:`same`, and zeros of one sign."""
    there = ~expected.isnan()
    bits = [x[there].view(torch.int32) for x in (found, expected)]
    return same(found, expected) and torch.equal(*bits)


ODD = (0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-45, -3e-39, 1e-38, 3e38, 1.0, -1e-20)


def met(count: int) -> list[Tensor]:
    """Buffers in which every special number, and one that is none, meets every other."""
    some = torch.cat([torch.tensor(ODD), torch.randn(1)])
    return list(torch.cartesian_prod(*[some] * count).T)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("cpu", CPUS)
def test_shares_of_frozen_moments(cpu: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    be(cpu, monkeypatch, *ROOMS)
    rows = [(numbers(n), numbers(n), numbers(n).square() * 1e-6) for n in LENGTHS]
    for g, m, v in [*rows, (*met(3),)]:
        for decay, correction in ((0.9, 0.1), (0.1 + 0.2, 1 - 0.999**7), (0.0, 1.0)):
            hyper, made = kernels.shares_hyper(decay, correction), []
            for route in ("llvm", "torch"):
                with kernels.use(route):  # type: ignore[arg-type]
                    kernels.momentum_shares_(g.to(dtype), mean := m.clone(), v, hyper)
                made.append(mean)
            assert equal(*made), (len(g), decay, correction)


@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize("cpu", CPUS)
def test_steps_with_frozen_moments(cpu: str, shares: bool, monkeypatch: pytest.MonkeyPatch):
    be(cpu, monkeypatch, *ROOMS)
    rows = [(numbers(n), numbers(n), numbers(n).square() * 1e-6) for n in LENGTHS]
    given: list[dict[str, Any]] = [
        {"rate": 1e-3 / (1 - 0.9**7), "grown": 1.01, "correction": 0.3, "most": 0.005},
        {"rate": 0.1, "grown": 1.0, "correction": 1.0, "most": torch.inf, "kept": 1 - 1e-3},
        {"rate": 0.1, "grown": 1 / 3, "correction": 1e-3, "most": 1.0, "eps": 0.0},
        {"rate": 0.0, "grown": 1.0, "correction": 0.5, "most": 0.0},
    ]
    for row in [*rows, (*met(3),)]:
        for how in given:
            made = []
            for route in ("llvm", "torch"):
                mine = [x.clone() for x in row]
                with kernels.use(route):  # type: ignore[arg-type]
                    kernels.adamw_frozen_(*mine, kernels.frozen_hyper(**how), shares=shares)
                made.append(mine)
            for x, y in zip(*made, strict=True):
                assert equal(x, y), (len(x), how)


@pytest.mark.parametrize("group", [None, 128, 2048])
def test_sums_are_taken_in_one_order(group: int | None):
    """Half way between two float32, with two numbers that float64 drops unless they meet first."""
    n = 1 << 15
    scales = set()
    for i in range(40):
        x, apart = torch.zeros(n), (1, 16)[i % 2]  # anywhere, or in one lane
        for part in x.view(-1, group or n):
            places = apart * torch.randperm(len(part) // apart)[:4]
            part[places] = torch.tensor([1.0, 2.0**-24, 2.0**-53, 2.0**-53])
        pairs = both(kernels.onebit_pack, x, torch.zeros(n), group=group, scaling="mean")
        assert all(same(*pair) for pair in pairs)
        scales |= set(pairs[1][0].tolist())
    assert len(scales) == 2  # the order decides


def test_the_scale_of_the_greatest_numbers():
    top = torch.finfo(torch.float32).max
    for n in (3, 100, 1001):
        for group in (None, 128):
            scale = kernels.onebit_pack(torch.full((n,), top), torch.zeros(n), group=group)[1]
            assert (scale == top).all(), (n, group)


SHAPES = ((1,), (17,), (3, 5), (4, 257), (2, 3001), (1, 70001), (0, 8), (3, 0), (2, 3, 32))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("cpu", CPUS)
def test_levels(cpu: str, dtype: torch.dtype, symmetric: bool, monkeypatch: pytest.MonkeyPatch):
    be(cpu, monkeypatch, *ROOMS)
    for shape in SHAPES:
        n = torch.Size(shape).numel()
        x = numbers(n, dtype).view(shape)
        for group in (6, 32, 256, None) if n < 10000 else (256, None):
            seed = None if group == 32 else 2**40 + 12345
            how: Any = {"group": group, "symmetric": symmetric, "seed": seed}
            for bits in (8, 4):
                made = both(kernels.quantize_groups, x, bits=bits, **how)
                assert all(same(*pair) for pair in made), (shape, bits, how)
                parts, back = [found for found, _ in made], kernels.dequantize_groups
                for out in FLOATS if shape[-1] else ():
                    (pair,) = both(back, *parts, shape[-1], bits=bits, group=group, dtype=out)
                    assert same(*pair), (shape, bits, how)
            for bits in (2, 8, 16):
                (pair,) = both(kernels.fake_quant, x, bits=bits, **how)
                assert same(*pair), (shape, bits, how)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("cpu", CPUS)
def test_payloads(cpu: str, bits: int, symmetric: bool, monkeypatch: pytest.MonkeyPatch):
    be(cpu, monkeypatch, *ROOMS)
    for n in (1, 17, 1000, 70001):
        form = kernels.Payload(n, bits=bits, group=64, symmetric=symmetric)
        made = both(kernels.quantize_payload, numbers(n), form, numbers(n))
        assert all(same(*pair) for pair in made), form
        sent = [kernels.quantize_payload(numbers(n, odd=False), form)[0] for _ in range(3)]
        for error, seed in ((None, None), (numbers(n, odd=False), None), (None, 2**35 + 1)):
            made = both(kernels.mean_payloads, torch.stack(sent), form, error, seed=seed)
            assert all(same(*pair) for pair in made), (form, seed)


def test_groups_that_no_stack_holds_are_for_the_twin():
    form = kernels.Payload(70000, group=70000)
    sent = kernels.quantize_payload(torch.randn(70000), form)[0]
    mean, _ = kernels.mean_payloads(torch.stack([sent, sent]), form)
    assert torch.equal(mean, sent)
    with kernels.use("llvm"), pytest.raises(kernels.KernelError, match="up to 16384, not 70000"):
        kernels.mean_payloads(sent[None], form)


def test_dtypes_that_it_does_not_write_are_for_the_twin():
    x = torch.randn(3001) * 100
    bits, scale, _ = kernels.onebit_pack(x, torch.zeros_like(x))
    q, its, zero = kernels.quantize_groups(x, symmetric=False)
    assert zero is not None
    like = kernels.dequantize_groups
    for dtype in (torch.int8, torch.int32):
        pairs = both(kernels.onebit_unpack, bits, scale, 3001, dtype=dtype)
        pairs += both(like, q, its, zero, 3001, dtype=dtype)
        assert all(same(*pair) for pair in pairs), dtype
    for parts in (
        (q, its, zero.bfloat16()),
        (q.half(), its, zero),
        (q.view(torch.int8), its, zero),
    ):
        (pair,) = both(like, *parts, 3001)
        assert same(*pair)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_payloads_of_other_dtypes_are_for_the_twin(dtype: torch.dtype):
    form = kernels.Payload(1000, group=32, symmetric=False, dtype=dtype)
    x, error = numbers(1000, odd=False), numbers(1000, dtype, odd=False)
    made = both(kernels.quantize_payload, x, form, error)
    made += both(kernels.mean_payloads, made[0][1][None], form)
    made += both(kernels.dequantize_payload, made[0][1], form)
    assert all(same(*pair) for pair in made)


@pytest.mark.usefixtures("cpu_route")
def test_threads_change_no_bit():
    n = 70001
    x, error = numbers(n, odd=False), numbers(n, odd=False)
    sent = [kernels.onebit_pack(x, error, group=g)[:2] for g in (None, 128)]

    def all_of_it() -> list[Tensor]:
        out: list[Any] = []
        for group, (bits, scale) in zip((None, 128), sent, strict=True):
            out += kernels.onebit_pack(x, error, group=group)
            out += kernels.onebit_mean(bits[None], scale[None], error, group=group)
        out += kernels.quantize_groups(x[1:].view(7, -1), bits=4, group=1000, symmetric=False)
        mean, param, squares = x.clone(), x.clone(), error.square()
        kernels.momentum_shares_(error, mean, squares, kernels.shares_hyper(0.9, 0.5))
        hyper = kernels.frozen_hyper(0.1, 1.1, 0.5, most=1.0)
        for shares in (True, False):
            kernels.adamw_frozen_(param, mean, squares, hyper, shares=shares)
        out += [mean, param, squares]
        return [t for t in out if t is not None]

    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append(all_of_it())
    finally:
        torch.set_num_threads(before)
    for several in found[1:]:
        assert all(torch.equal(x, y) for x, y in zip(several, found[0], strict=True))


@pytest.mark.parametrize("cpu", CPUS)
@pytest.mark.parametrize("end", [True, False])
def test_nothing_outside_is_read_or_written(end: bool, cpu: str, monkeypatch: pytest.MonkeyPatch):
    be(cpu, monkeypatch, *ROOMS)
    for n in (1, 9, 17, 4099):
        for dtype in FLOATS:
            low, x = (fenced(numbers(n, dtype), end) for _ in range(2))
            error = fenced(numbers(n).abs(), end)
            for group in (None, 128):
                bits, scale = kernels.onebit_pack_(x, error, group=group)
                bits, scale = fenced(bits, end), fenced(scale, end)
                kernels.onebit_mean_(
                    fenced(torch.stack([bits] * 2), end),
                    torch.stack([scale] * 2),
                    error,
                    group=group,
                )
                kernels.onebit_unpack_(bits, scale, low, group=group)
                q, left = (
                    fenced(torch.empty(-(-n // 8), dtype=torch.uint8), end),
                    fenced(error, end),
                )
                packing = Packing(x, None, error, left, q, scale)
                onebit_llvm.onebit_pack(packing, group=group or 0, scaling="rms")
            mean, squares = (fenced(x, end) for x in (error, error))
            kernels.momentum_shares_(low, mean, squares, kernels.shares_hyper(0.9, 0.5))
            hyper = kernels.frozen_hyper(0.1, 1.1, 0.5, most=1.0)
            for shares in (True, False):
                kernels.adamw_frozen_(error, mean, squares, hyper, shares=shares)
            for bits_, symmetric in ((8, True), (4, True), (4, False)):
                q, scale, zero = kernels.quantize_groups(
                    x, bits=bits_, symmetric=symmetric, group=32
                )
                parts = [None if t is None else fenced(t, end)[None] for t in (q, scale, zero)]
                one = {"bits": bits_, "size": 32}
                given = Quantizing(x[None], (1, n), symmetric)
                into = dict(zip(("q", "scale", "zero"), parts, strict=True))
                groupwise_llvm.quantize_groups(given._replace(**into), **one)  # type: ignore[arg-type]
                groupwise_llvm.dequantize_groups(*parts, low[None], **one)  # type: ignore[arg-type]
                groupwise_llvm.fake_quant(given._replace(fake=low[None]), **one)


def test_verification_compares_it():
    for verdict in kernels.verify(
        ["onebit_mean", "mean_payloads", "quantize_groups", "adamw_frozen"], "cpu"
    ):
        assert verdict.ran and verdict.right and "through LLVM" in verdict.note, verdict
