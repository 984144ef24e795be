"""Operators called by name, past the functions around them: what does not fit is refused.

Kernels read and write memory by address. Whoever calls ``torch.ops.zfunc`` comes past the Python
around it, and would otherwise end the process or get garbage.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import zfunc
from zfunc.kernels import KernelError, Payload, adamw_hyper, quantize_payload
from zfunc.kernels.operators import RUNS

N = 4096
FORM = (N, 8, 256, True, torch.float32)


def x(n: int = N) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(n))


def moments() -> tuple[Tensor, Tensor, Tensor]:
    codes = torch.zeros(N, dtype=torch.int8), torch.zeros(N, dtype=torch.uint8)
    return *codes, torch.zeros(N // 128, 2)


def sent(senders: int = 3) -> Tensor:
    return quantize_payload(x(), Payload(N))[0].expand(senders, -1).contiguous()


def signs(senders: int | None = None) -> tuple[Tensor, Tensor]:
    bits, scale = torch.zeros(N // 8, dtype=torch.uint8), torch.ones(N // 128)
    if senders is None:
        return bits, scale
    return bits.expand(senders, -1).contiguous(), scale.expand(senders, -1).contiguous()


SHARES = zfunc.kernels.shares_hyper(0.9, 0.5)
FROZEN = zfunc.kernels.frozen_hyper(0.1, 1.0, 0.5, most=1.0)
HYPER = adamw_hyper(0.1, 1, weight_decay=0.0)
CALLS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "adamw_flat": lambda: (x(), x(), x(), x().abs(), HYPER, torch.bfloat16),
    "adamw_flat_": lambda: (x(), x(), x(), x().abs(), x().bfloat16(), HYPER),
    "adamw8_flat": lambda: (x(), x(), None, *moments(), HYPER, torch.bfloat16),
    "adamw8_flat_": lambda: (x(), x(), None, *moments(), x().bfloat16(), HYPER),
    "lion_flat": lambda: (x(), x(), x(), zfunc.kernels.lion_hyper(0.1), None),
    "lion_flat_": lambda: (x(), x(), x(), x().bfloat16(), zfunc.kernels.lion_hyper(0.1)),
    "momentum_shares_": lambda: (x(), x(), x().abs(), SHARES),
    "adamw_frozen_": lambda: (x(), x(), x().abs(), FROZEN, True),
    "lamb_moments_": lambda: (x(), x(), x(), x().abs(), [0], [N], HYPER),
    "lamb_apply_": lambda: (x(), x(), x().abs(), x(), torch.ones(1), [0], [N], HYPER),
    "onebit_pack": lambda: (x(), x(), 128, "mean"),
    "onebit_pack_": lambda: (x(), x(), 128, "mean"),
    "onebit_mean": lambda: (*signs(3), x(), 128, "mean"),
    "onebit_mean_": lambda: (*signs(3), x(), 128, "mean"),
    "onebit_unpack": lambda: (*signs(), N, 128, torch.float32),
    "onebit_unpack_": lambda: (*signs(), x(), 128),
    "quantize_payload": lambda: (x(), x(), *FORM, None),
    "quantize_payload_": lambda: (x(), x(), *FORM, None),
    "mean_payloads": lambda: (sent(), x(), *FORM, None),
    "mean_payloads_": lambda: (sent(), x(), *FORM, None),
    "dequantize_payload": lambda: (sent(), *FORM, torch.float32),
    "dequantize_groups": lambda: (
        torch.zeros(4, 64, dtype=torch.int8),
        torch.ones(4, 2),
        None,
        *(64, 8, 32, torch.float32),
    ),
}


def operator(name: str) -> Any:
    return getattr(torch.ops.zfunc, name)


def shorter(t: Tensor) -> Tensor:
    return t[..., : t.shape[-1] // 2].clone()


@pytest.mark.parametrize("name", CALLS)
def test_no_argument_may_be_shorter_than_it_should(name: str) -> None:
    operator(name)(*CALLS[name]())
    args = CALLS[name]()
    for i, arg in enumerate(args):
        if isinstance(arg, Tensor):
            wrong = [*args[:i], shorter(arg), *args[i + 1 :]]
            with pytest.raises(KernelError, match=f"kernels.{name.rstrip('_')}"):
                operator(name)(*wrong)


@pytest.mark.parametrize("name", CALLS)
def test_no_argument_may_have_a_dtype_that_none_of_its_kind_has(name: str) -> None:
    args = CALLS[name]()
    for i, arg in enumerate(args):
        if isinstance(arg, Tensor):
            wrong = [*args[:i], arg.to(torch.complex64), *args[i + 1 :]]
            with pytest.raises(KernelError):
                operator(name)(*wrong)


@pytest.mark.parametrize("name", [name for name in CALLS if name.endswith("_")])
def test_what_is_written_must_have_its_memory_without_gaps(name: str) -> None:
    schema, args = operator(name).default._schema, CALLS[name]()
    for i, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and isinstance(args[i], Tensor):
            apart = torch.stack([args[i], args[i]], -1)[..., 0]
            with pytest.raises(KernelError, match="contiguous"):
                operator(name)(*args[:i], apart, *args[i + 1 :])


@pytest.mark.parametrize("name", [name for name in CALLS if name.endswith("_")])
def test_what_is_written_may_share_memory_with_nothing_else(name: str) -> None:
    """Each pair of arguments of one dtype of which one is written, one element apart."""
    schema, args = operator(name).default._schema, CALLS[name]()
    written = [a.alias_info is not None and a.alias_info.is_write for a in schema.arguments]
    tried = 0
    for i, mine in enumerate(args):
        for j, other in enumerate(args):
            if i == j or not written[i] or not isinstance(other, Tensor) or other is HYPER:
                continue
            if not isinstance(mine, Tensor) or "hyper" in schema.arguments[j].name:
                continue
            room = torch.zeros(mine.nbytes + other.nbytes + 64, dtype=torch.uint8)
            step = max(mine.itemsize, other.itemsize)
            a = room[: mine.nbytes].view(mine.dtype).view(mine.shape)
            b = room[step : step + other.nbytes].view(other.dtype).view(other.shape)
            wrong = list(args)
            wrong[i], wrong[j] = a.copy_(mine), b.copy_(other)
            with pytest.raises(KernelError, match="shares memory"):
                operator(name)(*wrong)
            tried += 1
    assert tried


@pytest.mark.parametrize("scale", ["bits", "scale"])
def test_one_bit_is_not_unpacked_over_itself(scale: str) -> None:
    """In a buffer that a codec cuts into parts a slip of a few bytes is soon made."""
    room = torch.zeros(64 * 1024, dtype=torch.uint8)
    bits, scales = signs()
    out = room[: 4 * N].view(torch.float32)
    mine = room[2 * N : 2 * N + N // 8] if scale == "bits" else bits
    its = room[8:136].view(torch.float32) if scale == "scale" else scales
    with pytest.raises(KernelError, match="shares memory"):
        zfunc.kernels.onebit_unpack_(mine, its, out, group=128)


def test_every_operator_has_its_arguments_checked() -> None:
    """A new one must be put into the table above, or be one whose twin torch itself checks."""
    named = {name.partition("::")[2] for name in RUNS}
    in_place = {name for name in named if name.endswith("_")}
    assert in_place <= set(CALLS)


SMALL = """
import threading
import torch
import torch.nn.functional as F
from zfunc import kernels, quant
from zfunc.quant import Format, QTensor

x, w = torch.randn(1, 8192), torch.randn(64, 8192)
weights = [QTensor.quantize(w, Format(bits, 128)) for bits in (4, 8)]
form = kernels.Payload(1 << 15, 8, 16384)
sent = kernels.quantize_payload(torch.randn(1 << 15), form)[0].expand(2, -1).contiguous()


def all_of_it():
    return [F.linear(x, weight) for weight in weights] + [kernels.mean_payloads(sent, form)[0]]


expected = all_of_it() if {warm} else None
threading.stack_size({size})
found = []
thread = threading.Thread(target=lambda: found.extend(all_of_it()))
thread.start()
thread.join()
expected = expected or all_of_it()
assert all(map(torch.equal, found, expected)) and found
"""


@pytest.mark.parametrize("warm", [True, False])
def test_kernels_need_little_of_a_stack(warm: bool) -> None:
    """Servers give their threads small ones; beyond their end the process ends."""
    code = SMALL.format(size=64 * 1024, warm=warm)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])
