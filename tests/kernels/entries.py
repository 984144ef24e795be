"""Every Triton kernel as it is launched on a GPU: what the machine-code checks compile."""

from __future__ import annotations

from typing import Any

from benchmarks.gpu_targets import TARGETS
from tests.kernels.layer_entries import LAYERS
from tests.kernels.machine_code import LANES, Entry, for_each
from tests.kernels.product_entries import PRODUCTS
from zfunc.kernels import (
    adamw8_triton,
    adamw_triton,
    dispatch,
    frozen_triton,
    gradient_norm_triton,
    groupwise_triton,
    lamb_triton,
    lion_triton,
    onebit_triton,
)

OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")


def entry(
    name: str,
    kernel: Any,
    signature: str,
    *,
    bytes: float,
    narrow: int = 0,
    narrow_stores: int = 0,
    share: float = 0.75,
    **constants: Any,
) -> Entry:
    """An entry, launched as the table of configurations says.

    Args:
        name: of the kernel in the dispatch, and after a comma what is special.
        signature: ``"g:*bf16 n:i32"``; integers with a ``!`` are multiples of 16.
    """
    types = dict(word.split(":") for word in signature.split())
    divisible = tuple(k for k, kind in types.items() if kind.endswith("!"))
    types = {k: kind.rstrip("!") for k, kind in types.items()}

    def launched(target: str) -> Entry:
        amd = TARGETS[target].amd
        how = dict(dispatch.config(name.split(",")[0], target=target))
        options = {k: how.pop(k) for k in OPTIONS if k in how}
        size = how["BLOCK"] // (2 if constants.get("ERROR") and not constants.get("MEAN") else 1)
        if "GROUP" in kernel.arg_names:
            how["GROUP"] = constants.get("GROUP", size)
            how["ROWS"] = max(1, size // how["GROUP"])
            how["SIZE"] = how["GROUP"]
            options["num_warps"] = min(16, max(options["num_warps"], how["GROUP"] // 1024))
            size = how["ROWS"] * how["GROUP"]
        each = size / (LANES[amd] * options["num_warps"])
        if "CUTS" in kernel.arg_names:
            cut = 0 if constants["MEAN"] else groupwise_triton.cuts(how | options, amd=amd)
            how |= {"CUTS": cut, "ASM": not amd}
        known = {k: v for k, v in (how | constants).items() if k in kernel.arg_names}
        rest = (each, bytes, divisible, narrow, narrow_stores, options)
        return Entry(name, kernel, types, known, *rest, share=share)

    return for_each(launched)


ADAM = "p:*fp32 m:*fp32 v:*fp32 p_new:*fp32 m_new:*fp32 v_new:*fp32 low:*bf16 hyper:*fp64 n:i32!"
ADAM8 = "m:*i8 v:*u8 scales:*fp32 m_new:*i8 v_new:*u8 scales_new:*fp32 hyper:*fp64 n:i32!"
ONEBIT = (
    "x:*fp32 e:*fp32 bits:*u8 shares:*fp32 workers:i32 width:i32! groups:i32 n:i32! sums:*fp32 "
    "e_new:*fp32 bits_new:*u8 scale:*fp32"
)
PLACES = "K:i32! width:i32! size:i32! groups:i32 total:i32!"


def grid(
    name: str, *, x: str = "*bf16", BITS: int = 8, SYMMETRIC: bool = True, **how: Any
) -> Entry:
    """An entry of :func:`groupwise_triton.quantize_kernel`, groups of 256."""
    kind = "*i8" if SYMMETRIC and BITS == 8 else "*u8"
    flags = dict.fromkeys(("STOCHASTIC", "MEAN", "ERROR", "FAKE", "ODD"), False)
    words = BITS == 4 and not how.get("ERROR") and not how.get("FAKE")
    whole = words if how.get("MEAN") else SYMMETRIC or not how.get("ERROR")
    how = {"WORDS": words, "WHOLE": whole} | how
    signature = (
        f"x:{x} error:*fp32 q_in:{kind} scale_in:*fp32 zero_in:*fp32 senders:i32 q_stride:i32! "
        f"scale_stride:i32! q:{kind} scale:*fp32 zero:*fp32 new_error:*fp32 fake:*bf16 seed:*i64 "
        + PLACES
    )
    constants = {**flags, "BITS": BITS, "SYMMETRIC": SYMMETRIC, "GROUP": 256, **how}
    return entry(name, groupwise_triton.quantize_kernel, signature, **constants)


ENTRIES = [
    entry(
        "adamw_flat",
        adamw_triton.adamw_kernel,
        f"g:*bf16 {ADAM}",
        LOW=True,
        bytes=28,
        narrow=8,
    ),
    entry(
        "adamw_flat, float32 gradient",
        adamw_triton.adamw_kernel,
        f"g:*fp32 {ADAM}",
        LOW=False,
        bytes=28,
        narrow=8,
    ),
    entry(
        "adamw8_flat",
        adamw8_triton.adamw8_kernel,
        f"g:*bf16 p:*i16 tail:*i8 p_new:*i16 tail_new:*i8 low:*bf16 {ADAM8}",
        TAIL=True,
        LOW=False,
        GROUP=128,
        bytes=12.1,
        narrow=12,
        narrow_stores=2,
    ),
    entry(
        "adamw8_flat, float32 master",
        adamw8_triton.adamw8_kernel,
        f"g:*bf16 p:*fp32 tail:*i8 p_new:*fp32 tail_new:*i8 low:*bf16 {ADAM8}",
        TAIL=False,
        LOW=True,
        GROUP=128,
        bytes=16.1,
        narrow=12,
        narrow_stores=2,
    ),
    entry(
        "lion_flat",
        lion_triton.lion_kernel,
        "g:*bf16 p:*fp32 m:*fp32 p_new:*fp32 m_new:*fp32 low:*bf16 hyper:*fp64 n:i32!",
        LOW=True,
        bytes=20,
        narrow=5,
    ),
    entry(
        "momentum_shares",
        frozen_triton.momentum_shares_kernel,
        "g:*fp32 m:*fp32 v:*fp32 hyper:*fp64 n:i32!",
        bytes=16,
        narrow=3,
    ),
    entry(
        "adamw_frozen",
        frozen_triton.adamw_frozen_kernel,
        "p:*fp32 m:*fp32 v:*fp32 hyper:*fp64 n:i32!",
        SHARES=True,
        bytes=24,
        narrow=6,
    ),
    entry(
        "adamw_frozen, momentum not in units",
        frozen_triton.adamw_frozen_kernel,
        "p:*fp32 m:*fp32 v:*fp32 hyper:*fp64 n:i32!",
        SHARES=False,
        bytes=20,
        narrow=6,
    ),
    # Both ways through a tile, the whole one and the short one, are counted.
    entry(
        "lamb_moments",
        lamb_triton.lamb_moments_kernel,
        "g:*bf16 p:*fp32 m:*fp32 v:*fp32 tiles:*i64 parts:*fp32 hyper:*fp64",
        ALIGNED=True,
        bytes=22,
        narrow=50,
        narrow_stores=20,
    ),
    entry(
        "lamb_apply",
        lamb_triton.lamb_apply_kernel,
        "p:*fp32 m:*fp32 v:*fp32 low:*bf16 tiles:*i64 ratios:*fp32 hyper:*fp64",
        LOW=True,
        ALIGNED=True,
        bytes=18,
        narrow=40,
        narrow_stores=20,
    ),
    entry(
        "sum_squares",
        gradient_norm_triton.squares_kernel,
        "x:*bf16 parts:*fp32 most:*i32 n:i32! stride:i32!",
        bytes=2,
        narrow_stores=2,
    ),
    entry(
        "onebit_pack",
        onebit_triton.onebit_pack_kernel,
        ONEBIT,
        SERVER=False,
        MEAN=False,
        GROUPED=False,
        bytes=12.1,
        narrow=1,
        narrow_stores=1,
    ),
    entry(
        "onebit_pack, sums",
        onebit_triton.onebit_sum_kernel,
        ONEBIT,
        SERVER=False,
        MEAN=True,
        bytes=8,
        narrow_stores=1,
    ),
    entry(
        "onebit_pack, in groups of 128",
        onebit_triton.onebit_pack_kernel,
        ONEBIT,
        SERVER=False,
        MEAN=False,
        GROUPED=True,
        GROUP=128,
        bytes=12.1,
        narrow_stores=3,
    ),
    entry(
        "onebit_pack, in groups of 8192",
        onebit_triton.onebit_pack_kernel,
        ONEBIT,
        SERVER=False,
        MEAN=False,
        GROUPED=True,
        GROUP=8192,
        bytes=12.1,
        narrow_stores=5,
    ),
    # The loop is over workers: each of 8 has its eighth of the 9.1 bytes.
    entry(
        "onebit_mean",
        onebit_triton.onebit_pack_kernel,
        ONEBIT,
        SERVER=True,
        MEAN=False,
        GROUPED=True,
        bytes=9.1 / 8,
        narrow=3,
        narrow_stores=3,
    ),
    entry(
        "onebit_unpack",
        onebit_triton.onebit_unpack_kernel,
        "bits:*u8 scale:*fp32 out:*fp32 width:i32! groups:i32 n:i32!",
        GROUPED=False,
        bytes=4.1,
        narrow=3,
    ),
    # Pairs of 4 bits are stored where their elements are: four bytes of a thread, whole sectors of
    # a warp. Without symmetry a thread reads a group's first element, for those beyond the end.
    grid("quantize_groups", bytes=3.02, narrow_stores=1),
    grid("quantize_groups, 4 bits", bytes=2.53, BITS=4, narrow_stores=9),
    grid("quantize_groups, asymmetric", bytes=3.03, SYMMETRIC=False, narrow=1, narrow_stores=2),
    grid(
        "quantize_groups, stochastic",
        bytes=3.02,
        STOCHASTIC=True,
        narrow=1,
        narrow_stores=1,
    ),
    grid(
        "quantize_groups, asymmetric and stochastic",
        bytes=3.03,
        SYMMETRIC=False,
        STOCHASTIC=True,
        narrow=2,
        narrow_stores=2,
    ),
    grid(
        "quantize_groups, 4 bits, asymmetric",
        bytes=2.53,
        BITS=4,
        SYMMETRIC=False,
        narrow_stores=10,
    ),
    grid(
        "quantize_groups, 4 bits, stochastic",
        bytes=2.52,
        BITS=4,
        STOCHASTIC=True,
        narrow=1,
        narrow_stores=9,
    ),
    grid(
        "quantize_groups, 4 bits, asymmetric and stochastic",
        bytes=2.53,
        BITS=4,
        SYMMETRIC=False,
        STOCHASTIC=True,
        narrow=1,
        narrow_stores=10,
    ),
    grid(
        "quantize_groups, 4 bits, asymmetric and stochastic, groups of 32",
        bytes=2.75,
        BITS=4,
        SYMMETRIC=False,
        STOCHASTIC=True,
        GROUP=32,
        narrow=1,
        narrow_stores=2,
    ),
    grid(
        "quantize_groups, 4 bits, asymmetric and stochastic, groups of 2048",
        bytes=2.5,
        BITS=4,
        SYMMETRIC=False,
        STOCHASTIC=True,
        GROUP=2048,
        narrow=1,
        narrow_stores=10,
    ),
    grid("quantize_groups, with an error", bytes=13, x="*fp32", ERROR=True, narrow_stores=1),
    grid("fake_quant", bytes=4, FAKE=True),
    grid(
        "fake_quant, asymmetric and stochastic",
        bytes=4,
        FAKE=True,
        SYMMETRIC=False,
        STOCHASTIC=True,
        narrow=3,
    ),
    # The loop is over senders: each of 8 has its eighth of the 12.5 bytes.
    grid("mean_payloads", bytes=12.5 / 8, BITS=4, MEAN=True, ERROR=True, narrow=1, narrow_stores=1),
    grid(
        "mean_payloads, without an error",
        bytes=4.5 / 8,
        BITS=4,
        MEAN=True,
        narrow=2,
        narrow_stores=1,
    ),
    grid(
        "mean_payloads, asymmetric without an error",
        bytes=4.78 / 8,
        BITS=4,
        SYMMETRIC=False,
        MEAN=True,
        narrow=3,
        narrow_stores=2,
    ),
    grid(
        "mean_payloads, 8 bits without an error", bytes=9 / 8, MEAN=True, narrow=2, narrow_stores=1
    ),
    entry(
        "dequantize_groups",
        groupwise_triton.dequantize_kernel,
        f"q:*i8 scale:*fp32 zero:*fp32 out:*bf16 {PLACES}",
        BITS=8,
        SYMMETRIC=True,
        GROUP=256,
        bytes=3.02,
        narrow=2,
    ),
    entry(
        "dequantize_groups, 4 bits",
        groupwise_triton.dequantize_kernel,
        f"q:*u8 scale:*fp32 zero:*fp32 out:*bf16 {PLACES}",
        BITS=4,
        SYMMETRIC=False,
        GROUP=256,
        bytes=2.53,
        narrow=8,
    ),
    *LAYERS,
    *PRODUCTS,
]
