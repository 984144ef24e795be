"""Low-bit products of the CPU's own instructions, against integer sums in float64."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.kernels.cpus import CPUS, able, be
from tests.laws.covering import pairs
from zfunc.kernels import llvm, panels
from zfunc.quant import int8_products, products
from zfunc.quant.grids import Format
from zfunc.quant.qtensor import QTensor

BITS = {8: (-128, 127), 4: (-8, 7)}


def codes_of(n: int, k: int, bits: int, seed: int = 0) -> Tensor:
    low, high = BITS[bits]
    g = torch.Generator().manual_seed(seed)
    return torch.randint(low, high + 1, (n, k), dtype=torch.int8, generator=g)


def weight_of(
    n: int, k: int, bits: int, width: int, zeros: bool, dtype: torch.dtype = torch.float32
) -> tuple[panels.Panels, Tensor]:
    """Panels, and the matrix in float64 that they stand for."""
    codes, groups = codes_of(n, k, bits), -(-k // width)
    g = torch.Generator().manual_seed(1)
    scale = (torch.rand(n, groups, generator=g) + 0.1).to(dtype)
    zero = codes_of(n, groups, bits, 2) if zeros else None
    each = torch.arange(k) // width
    taken = codes.double() - (0 if zero is None else zero.double()[:, each])
    return panels.panels(codes, scale, zero, bits, width), taken * scale.double()[:, each]


def rows_of(m: int, k: int) -> Tensor:
    return torch.randn(m, k, generator=torch.Generator().manual_seed(3))


def read(x: Tensor, bits: int) -> Tensor:
    """``x`` rounded row by row: codes as they are counted in fp32, the rest in float64."""
    top, zero = (127.0, 128) if bits == 8 else (127.0 * 256, 128 * 257)
    scale = (x.abs().amax(dim=1, keepdim=True) / top).clamp_min(1e-30)
    return ((x / scale + (zero + 0.5)).floor().double() - zero) * scale.double()


SHAPES = [  # n, k, columns of a group
    (64, 256, 256),
    (1, 5, 5),
    (17, 333, 333),
    (33, 400, 128),
    (48, 96, 32),
    (31, 176, 16),
    (80, 480, 96),
]


@pytest.mark.parametrize(("shape", "cpu", "bits"), pairs(SHAPES, CPUS, BITS), ids=str)
def test_products_are_those_of_the_codes(
    shape: tuple[int, int, int], cpu: str, bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    n, k, width = shape
    be(cpu, monkeypatch)
    zeros = (n + k) % 2 == 0  # both, and not every one with both
    dtype = torch.bfloat16 if bits == 4 else torch.float32
    w, whole = weight_of(n, k, bits, width, zeros, dtype)
    assert torch.equal(w.codes(), codes_of(n, k, bits))
    for m, inputs in [(1, 8), (1, 16), (3, 16), (5, 8), (18, 8), (33, 16), (0, 8)]:
        x = rows_of(m, k)
        got = panels.matmul(panels.rounded(x, w, inputs), w).double()
        assert torch.equal(panels.linear(x, w, inputs).double(), got)
        assert got.shape == (m, n)
        assert got.isfinite().all()
        seen = read(x, inputs) if m else x.double()
        size = seen.abs() @ whole.abs().t()
        assert ((got - seen @ whole.t()).abs() <= 2e-6 * size + 1e-12).all()


@pytest.mark.parametrize("cpu", CPUS)
@pytest.mark.parametrize("bits", BITS)
def test_sums_are_exact_at_the_ends_of_the_range(
    cpu: str, bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where sums of 16 bits, or of three bytes, would overflow."""
    be(cpu, monkeypatch)
    n, k = 32, 8192
    low, high = BITS[bits]
    codes = torch.where(codes_of(n, k, bits) > low * 0.8, high, low).to(torch.int8)
    w = panels.panels(codes, torch.ones(n, 1), None, bits, k)
    x = torch.where(rows_of(20, k) > -1.5, 127.0, -127.0)
    sums = x.long() @ codes.long().t()
    assert sums.abs().max() > (2**26 if bits == 8 else 2**22)
    got = panels.matmul(panels.rounded(x, w, 8), w)
    assert torch.equal(got, sums.float())


@pytest.mark.parametrize("cpu", CPUS)
@pytest.mark.parametrize("inputs", [8, 16])
@pytest.mark.parametrize("bits", BITS)
def test_a_row_does_not_know_the_others(
    cpu: str, inputs: int, bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit by bit: neither how many they are nor what they hold, on no kind of CPU."""
    be(cpu, monkeypatch)
    w, _ = weight_of(48, 192, bits, 64, True)
    x = rows_of(40, 192)
    x[3], x[5, 7], x[9, 1] = 0, float("nan"), float("inf")
    whole = panels.matmul(panels.rounded(x, w, inputs), w)
    bad = ~whole.isfinite().all(dim=1)
    assert bad.nonzero().flatten().tolist() == [5, 9]
    assert not whole[bad].isfinite().any() and torch.equal(whole[3], torch.zeros(48))
    for m in (1, 2, 4, 7, 12, 16, 31):
        part = panels.matmul(panels.rounded(x[:m], w, inputs), w)
        assert torch.equal(part, whole[:m]) or m > 5
        assert torch.equal(part.nan_to_num(0, 0, 0), whole[:m].nan_to_num(0, 0, 0))
    for other in able():
        be(other, monkeypatch)
        got = panels.matmul(panels.rounded(x, w, inputs), w)
        assert torch.equal(got.nan_to_num(0, 0, 0), whole.nan_to_num(0, 0, 0)), other


@pytest.mark.parametrize("k", [1, 16, 100, 384])
def test_inputs_are_rounded_as_everywhere(k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The codes of W8A8 inputs, read with the unit matrix, are those of torch's route."""
    be("avx512", monkeypatch)
    eye = panels.panels(torch.eye(k).to(torch.int8), torch.ones(k, 1), None, 8, k)
    x = rows_of(9, k)
    x[0] *= 1e-33
    x[1] *= 1e30
    x[2] = torch.arange(k) - 63.5  # halves, and the end of the range
    assert torch.equal(panels.matmul(panels.rounded(x, eye, 8), eye), int8_products.rounded(x))


@pytest.mark.parametrize("cpu", ["tiles", "avx512"])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_share_the_work(cpu: str, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    be(cpu, monkeypatch)
    w, _ = weight_of(50, 4096, 4, 128, True)
    x, before = rows_of(20, 4096), torch.get_num_threads()
    whole = panels.matmul(panels.rounded(x, w, 16), w)
    try:
        torch.set_num_threads(threads)
        assert torch.equal(panels.matmul(panels.rounded(x, w, 16), w), whole)
        assert torch.equal(panels.linear(x[:2], w, 16), whole[:2])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("bits", BITS)
def test_rows_that_are_looked_up(bits: int) -> None:
    for n, k, width in ((17, 333, 333), (33, 400, 128)):
        w, _ = weight_of(n, k, bits, width, False)
        where = torch.tensor([n - 1, 0, 16, 16, 5])
        assert torch.equal(w.looked_up(where), codes_of(n, k, bits)[where])
        assert w.looked_up(where[:0]).shape == (0, k)


def test_groups_that_int32_cannot_sum_go_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    be("avx512", monkeypatch)
    for k, taken in ((2**17 - 1, True), (2**17, False)):
        w, x = torch.full((1, k), -128, dtype=torch.int8), torch.full((1, k), -127.0)
        q = QTensor(w, torch.ones(1, 1), None, Format(8, None, dynamic=True), (1, k), x.dtype)
        assert (products.route(x, q) == "panels") == taken
        assert F.linear(x, q).item() == pytest.approx(127 * 128 * k, rel=1e-5)


def test_threads_make_a_kernel_once() -> None:
    made, together = [], threading.Barrier(4)

    def make(number: int) -> list[int]:
        time.sleep(0.01)
        made.append(number)
        return [number]

    once = llvm.once(make)

    def ask(_: int) -> list[int]:
        together.wait()
        return once(3)

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(ask, range(4)))
    assert made == [3] and all(x is found[0] for x in found)


def test_many_rows_are_not_for_plain_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    be("avx2", monkeypatch)
    q = QTensor.quantize(torch.randn(32, 64), Format(8, 32))
    x = rows_of(65, 64)
    few = F.linear(x[:64], q)
    assert products.route(x[:64], q) == "panels" and products.route(x, q) == "dequantised"
    torch.testing.assert_close(F.linear(x, q)[:64], few, rtol=1e-3, atol=1e-3)


def test_a_machine_without_them_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llvm.platform, "machine", lambda: "arm64")
    found = llvm.host.__wrapped__()
    assert not found.isa and "x86-64" in found.why
    monkeypatch.undo()
    monkeypatch.setitem(llvm.sys.modules, "llvmlite", None)
    found = llvm.host.__wrapped__()
    assert not found.isa and ("zfunc-torch[cpu]" in found.why or "x86-64" in found.why)
    monkeypatch.setattr(panels, "host", lambda: found)
    assert not panels.takes(64, 1)


def test_an_llvmlite_that_does_not_load_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a shared library, and raises what the system says of it."""

    class Broken:
        def __getattr__(self, name: str) -> None:
            raise OSError("Could not find/load shared object file")

    monkeypatch.setattr(llvm.sys, "platform", "linux")
    monkeypatch.setattr(llvm.platform, "machine", lambda: "x86_64")
    monkeypatch.setitem(llvm.sys.modules, "llvmlite", Broken())
    found = llvm.host.__wrapped__()
    assert not found.isa and "shared object" in found.why
