"""Levels in groups, and payloads of them: the Triton kernels are their twins, bit for bit."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from tests.kernels.closeness import LENGTHS, poisoned
from zfunc import kernels

# One row of any length; rows that end with a group, within one, and with half a byte.
SHAPES = ((1,), (7,), (3001,), (3, 257), (4, 512), (2, 3, 33), (0, 8), (5, 0))
GRIDS = list(itertools.product((8, 4), (True, False), (None, 5)))


def equal(found: tuple[Any, ...], expected: tuple[Any, ...]) -> bool:
    pairs = zip(found, expected, strict=True)
    return all(x is y is None or torch.equal(x, y) for x, y in pairs)


@pytest.mark.parametrize("group", [256, 32, 6, None])
@pytest.mark.parametrize(("bits", "symmetric", "seed"), GRIDS)
def test_levels_and_back(bits: int, symmetric: bool, seed: int | None, group: int | None):
    for shape in SHAPES:
        x = torch.randn(shape)
        how: dict[str, Any] = {"bits": bits, "symmetric": symmetric, "group": group, "seed": seed}
        expected = kernels.quantize_groups(x, **how)
        back = kernels.dequantize_groups(*expected, shape[-1], bits=bits, group=group)
        with kernels.use("triton"), poisoned():
            assert equal(kernels.quantize_groups(x, **how), expected), shape
            found = kernels.dequantize_groups(*expected, shape[-1], bits=bits, group=group)
            assert torch.equal(found, back), shape
            assert torch.equal(kernels.fake_quant(x, **how), back), shape


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("bits", "symmetric", "seed"), GRIDS)
def test_16_bits(bits: int, symmetric: bool, seed: int | None, dtype: torch.dtype):
    x = torch.randn(3, 100).to(dtype).t()  # not contiguous
    how: dict[str, Any] = {"bits": bits, "symmetric": symmetric, "seed": seed}
    expected = kernels.quantize_groups(x, **how)
    back = kernels.dequantize_groups(*expected, 3, bits=bits, dtype=dtype)
    fake = kernels.fake_quant(x, **how)
    with kernels.use("triton"):
        assert equal(kernels.quantize_groups(x, **how), expected)
        found = kernels.dequantize_groups(*expected, 3, bits=bits, dtype=dtype)
        assert torch.equal(found, back)
        assert torch.equal(kernels.fake_quant(x, **how), fake)


@pytest.mark.parametrize(("symmetric", "seed"), list(itertools.product((True, False), (None, 5))))
def test_words_of_two_and_of_eight(symmetric: bool, seed: int | None):
    """What is read as words of 32 bits, and again from where words do not begin."""
    for n, group in ((8, 32), (1000, 256), (1032, 64), (4096, 512)):
        form = kernels.Payload(n, bits=4, group=group, symmetric=symmetric)
        x = torch.randn(5, n).bfloat16()
        sent = torch.stack([kernels.quantize_payload(row, form, seed=seed)[0] for row in x])
        mean = kernels.mean_payloads(sent, form, seed=seed)[0]
        shifted = torch.cat([x.new_zeros(1), x[0]])[1:]
        moved = torch.cat([sent.new_zeros(4), sent.view(-1)])[4:].view_as(sent)
        with kernels.use("triton"), poisoned():
            for y in (x[0], shifted):
                assert torch.equal(kernels.quantize_payload(y, form, seed=seed)[0], sent[0])
            for came in (sent, moved):
                assert torch.equal(kernels.mean_payloads(came, form, seed=seed)[0], mean)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [2, 6, 96])
def test_means_of_any_even_groups(group: int, symmetric: bool):
    form = kernels.Payload(1031, bits=4, group=group, symmetric=symmetric)
    sent = torch.stack([kernels.quantize_payload(x, form)[0] for x in torch.randn(3, 1031)])
    mean = kernels.mean_payloads(sent, form, seed=1)[0]
    with kernels.use("triton"), poisoned():
        assert torch.equal(kernels.mean_payloads(sent, form, seed=1)[0], mean)


@pytest.mark.parametrize("bits", [2, 3, 11, 16])
def test_fake_of_other_bits(bits: int):
    x = torch.randn(1031)
    for symmetric in (True, False):
        expected = kernels.fake_quant(x, bits=bits, symmetric=symmetric)
        with kernels.use("triton"):
            assert torch.equal(kernels.fake_quant(x, bits=bits, symmetric=symmetric), expected)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_group_with_a_bad_value_is_lost_and_no_other(bad: float, symmetric: bool):
    x = torch.randn(96)
    x[40] = bad
    how: dict[str, Any] = {"group": 32, "symmetric": symmetric}
    q, scale, _ = kernels.quantize_groups(x, **how)
    with kernels.use("triton"):
        found = kernels.quantize_groups(x, **how)
        back = kernels.dequantize_groups(*found, 96, group=32)
    assert torch.equal(found[0], q)
    torch.testing.assert_close(found[1], scale, equal_nan=True, rtol=0, atol=0)
    assert back.isnan().tolist() == [32 <= i < 64 for i in range(96)]


@pytest.mark.parametrize("feedback", [True, False])
@pytest.mark.parametrize(("bits", "symmetric", "seed"), GRIDS)
def test_payloads(bits: int, symmetric: bool, seed: int | None, feedback: bool):
    for n in LENGTHS:
        form = kernels.Payload(n, bits=bits, group=64, symmetric=symmetric)
        x, e = torch.randn(2, n), torch.randn(n) if feedback else None
        expected = kernels.quantize_payload(x[0], form, e, seed=seed)
        received = torch.stack([kernels.quantize_payload(row, form)[0] for row in x])
        mean = kernels.mean_payloads(received, form, e, seed=seed)
        back = kernels.dequantize_payload(received, form)
        with kernels.use("triton"), poisoned():
            assert equal(kernels.quantize_payload(x[0], form, e, seed=seed), expected)
            assert equal(kernels.mean_payloads(received, form, e, seed=seed), mean)
            assert torch.equal(kernels.dequantize_payload(received, form), back)
            if e is not None:
                mine = e.clone()
                sent = kernels.quantize_payload_(x[0], form, mine, seed=seed)
                assert equal((sent, mine), expected)
                mine = e.clone()
                sent = kernels.mean_payloads_(received, form, mine, seed=seed)
                assert equal((sent, mine), mean)


def test_groups_too_long_for_a_program_go_to_the_twin():
    with kernels.use("triton"), pytest.raises(kernels.KernelError, match="groups up to 16384"):
        kernels.fake_quant(torch.ones(20000), group=None)
    assert torch.equal(kernels.fake_quant(torch.ones(20000), group=None), torch.ones(20000))
