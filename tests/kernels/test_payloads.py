"""Quantized payloads: one buffer of bytes there and back, means, error feedback."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.closeness import LENGTHS, distance, poisoned
from zfunc import kernels
from zfunc.kernels import Payload

FORMS = [(bits, symmetric) for bits in (8, 4) for symmetric in (True, False)]


@pytest.mark.parametrize(("bits", "symmetric"), FORMS)
@pytest.mark.parametrize("n", [*LENGTHS, 300000])
def test_a_payload_holds_levels_and_scales(n: int, bits: int, symmetric: bool):
    form, x = Payload(n, bits=bits, group=64, symmetric=symmetric), torch.randn(n)
    with poisoned():
        payload, none = kernels.quantize_payload(x, form)
    assert none is None and payload.shape == (form.bytes,) and form.bytes % 16 == 0
    expected = kernels.quantize_groups(x, bits=bits, group=64, symmetric=symmetric)
    for part, y in zip(form.parts(payload), expected, strict=True):
        assert part is y is None or torch.equal(part, y)
    back = kernels.dequantize_groups(*expected, n, bits=bits, group=64)
    assert torch.equal(kernels.dequantize_payload(payload, form), back)
    rows = kernels.dequantize_payload(torch.stack([payload] * 2), form, torch.bfloat16)
    assert torch.equal(rows, back.bfloat16().expand(2, n))


@pytest.mark.parametrize(("bits", "symmetric"), FORMS)
def test_a_payload_may_lie_anywhere(bits: int, symmetric: bool):
    """Behind an odd number of bytes, every other byte, or in rows that are apart."""
    form = Payload(100, bits=bits, group=32, symmetric=symmetric)
    payload, _ = kernels.quantize_payload(torch.randn(100), form)
    expected = kernels.dequantize_payload(payload, form)
    mean = kernels.mean_payloads(payload[None], form)[0]
    room = torch.zeros(2, 2 * form.bytes + 9, dtype=torch.uint8)
    for where in (room[:, 1 : form.bytes + 1], room[:, 3 : form.bytes + 3], room[:, 1:-8:2]):
        where.copy_(payload)
        assert torch.equal(kernels.dequantize_payload(where[0], form), expected)
        assert torch.equal(kernels.dequantize_payload(where, form), expected.expand(2, 100))
        assert torch.equal(kernels.mean_payloads(where[:1], form)[0], mean)


@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize(("bits", "symmetric"), FORMS)
@pytest.mark.parametrize("n", [1, 1031, 300000])
def test_nothing_is_lost(n: int, bits: int, symmetric: bool, seed: int | None):
    form = Payload(n, bits=bits, symmetric=symmetric)
    x, error = torch.randn(n).bfloat16(), torch.randn(n)
    payload, left = kernels.quantize_payload(x, form, error, seed=seed)
    assert left is not None
    sent = kernels.dequantize_payload(payload, form)
    assert torch.equal(left, (x.float() + error) - sent)
    mine = error.clone()
    assert torch.equal(kernels.quantize_payload_(x, form, mine, seed=seed), payload)
    assert torch.equal(mine, left)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("bits", "symmetric"), FORMS)
@pytest.mark.parametrize("workers", [1, 4])
def test_the_mean_is_of_what_was_sent(workers: int, bits: int, symmetric: bool, dtype: torch.dtype):
    n = 1031
    form = Payload(n, bits=bits, group=64, symmetric=symmetric, dtype=dtype)
    rows = torch.randn(workers, n, dtype=dtype)
    received = torch.stack([kernels.quantize_payload(x, form)[0] for x in rows])
    error = torch.randn(n, dtype=dtype)
    mean = kernels.dequantize_payload(received, form, dtype).mean(0)
    payload, left = kernels.mean_payloads(received, form, error)
    assert left is not None
    sent = kernels.dequantize_payload(payload, form, dtype)
    assert distance(sent + left, mean + error) < (1e-6 if dtype == torch.float32 else 1e-12)
    step = form.parts(payload)[1].max() * 0.501
    assert (left.abs() <= step).all()
    mine = error.clone()
    assert torch.equal(kernels.mean_payloads_(received, form, mine), payload)
    assert torch.equal(mine, left)
    plain, none = kernels.mean_payloads(received, form)
    assert none is None
    assert (kernels.dequantize_payload(plain, form, dtype) - mean).abs().max() <= step


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("workers", [1, 3, 16])
def test_the_mean_of_4_bits_is_the_nearest_level(workers: int, symmetric: bool):
    """Shares of 16 bits: 15 levels of one are off by at most 15 * 2**-16 of a step."""
    n, group = 100_000, 64
    form = Payload(n, bits=4, group=group, symmetric=symmetric)
    rows = torch.randn(workers, n) * torch.logspace(-1, 1, workers)[:, None]
    received = torch.stack([kernels.quantize_payload(x, form)[0] for x in rows])
    exact = torch.stack([values(row, form) for row in received]).mean(0)
    payload, _ = kernels.mean_payloads(received, form)
    step = form.parts(payload)[1].double().repeat_interleave(group)[:n]
    off = ((values(payload, form) - exact) / step).abs()
    assert off.max() < 0.5 + 2**-11 and (off > 0.5).double().mean() < 1e-3


def values(payload: Tensor, form: Payload) -> Tensor:
    """What a payload of 4 bits stands for, in float64."""
    q, scale, zero = form.parts(payload)
    levels = torch.stack([q & 15, q >> 4], -1).view(-1)[: form.n].double()
    wide = [None if x is None else x.double().repeat_interleave(form.group) for x in (scale, zero)]
    assert wide[0] is not None
    if wide[1] is None:
        return (levels - 8) * wide[0][: form.n]
    return levels * wide[0][: form.n] + wide[1][: form.n]


def test_a_bad_value_of_one_sender_is_in_the_mean_of_its_group_alone():
    form, x = Payload(96, bits=4, group=32), torch.randn(96)
    sent = [
        kernels.quantize_payload(y, form)[0]
        for y in (x, x.clone().index_fill_(0, torch.tensor(40), torch.nan))
    ]
    mean = kernels.dequantize_payload(kernels.mean_payloads(torch.stack(sent), form)[0], form)
    assert mean.isnan().tolist() == [32 <= i < 64 for i in range(96)]


def test_with_error_feedback_the_mean_of_what_is_sent_is_what_came():
    form, x, error = Payload(1000, bits=4), torch.randn(1000), torch.zeros(1000)
    sent = torch.zeros(1000)
    for _ in range(100):
        sent += kernels.dequantize_payload(kernels.quantize_payload_(x, form, error), form)
    assert distance(sent / 100, x) < 0.003


def test_opcheck():
    check, ops = torch.library.opcheck, torch.ops.zfunc
    form = (300, 4, 64, False, torch.float32)
    x, error, seed = torch.randn(300), torch.randn(300), torch.tensor(5)
    received = torch.stack([kernels.quantize_payload(x, Payload(*form))[0]] * 2)
    for e, s in ((error, None), (None, seed)):
        check(ops.quantize_payload.default, (x, e, *form, s))
        check(ops.mean_payloads.default, (received, e, *form, s))
    check(ops.quantize_payload_.default, (x, error, *form, None))
    check(ops.mean_payloads_.default, (received, error, *form, None))
    check(ops.dequantize_payload.default, (received, *form, torch.float32))


def test_vmap_sends_each():
    form, x, errors = Payload(300), torch.randn(3, 300), torch.randn(3, 300)
    found = torch.vmap(lambda x, e: kernels.quantize_payload(x, form, e))(x, errors)
    for i in range(3):
        for a, b in zip(found, kernels.quantize_payload(x[i], form, errors[i]), strict=True):
            assert torch.equal(a[i], b)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_whole(backend: str):
    form = Payload(300, bits=4)

    def there_and_back(x: Tensor, error: Tensor) -> Any:
        payload = kernels.quantize_payload_(x * 2, form, error)
        mean, left = kernels.mean_payloads(payload[None], form, error)
        return kernels.dequantize_payload(mean, form) + 1, left

    x, error = torch.randn(300), torch.randn(300)
    compiled: Callable[..., Any] = torch.compile(there_and_back, backend=backend, fullgraph=True)
    mine = error.clone()
    expected = there_and_back(x, error)
    for a, b in zip((*compiled(x, mine), mine), (*expected, error), strict=True):
        assert torch.equal(a, b)


def test_what_it_cannot_take():
    form, x = Payload(300), torch.ones(300)
    payload = kernels.quantize_payload(x, form)[0]
    with pytest.raises(kernels.KernelError, match=r"bits=2; expected one of"):
        Payload(300, bits=2)
    with pytest.raises(
        kernels.KernelError, match=r"x is torch\.float32\[299\]; expected .*\[300\]"
    ):
        kernels.quantize_payload(x[1:], form)
    with pytest.raises(kernels.KernelError, match=r"error is torch\.bfloat16; expected"):
        kernels.quantize_payload(x, form, x.bfloat16())
    with pytest.raises(kernels.KernelError, match=r"expected uint8\[320\] for Payload\(n=300"):
        kernels.dequantize_payload(payload[1:], form)
    with pytest.raises(kernels.KernelError, match=r"expected uint8\[senders, 320\]"):
        kernels.mean_payloads(payload, form)
    with pytest.raises(kernels.KernelError, match="no payloads; expected a row for each sender"):
        kernels.mean_payloads(payload[None][:0], form)
    with pytest.raises(kernels.KernelError, match=r"x shares memory with error|error shares"):
        kernels.quantize_payload_(x, form, x)
    with pytest.raises(kernels.KernelError, match="quantize_payload has no gradient"):
        kernels.quantize_payload(x.requires_grad_(), form)
