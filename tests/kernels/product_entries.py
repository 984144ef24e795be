"""Products of a few rows as they are launched on a GPU, for the machine-code checks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.kernels.machine_code import Entry
from zfunc.kernels import decode_triton, dispatch, skinny_triton
from zfunc.kernels.packed import BITS
from zfunc.kernels.skinny_launch import tile

__all__ = ["PRODUCTS", "product"]

SIZES = "M:i32 N:i32 K:i32 scale_n:i32 scale_g:i32 blocks:i32 share:i32"
PRODUCT = (
    "zero:*i8 norm:*bf16 eps:fp32 bias:*bf16 residual:*bf16 y:*bf16 parts:*fp32 squares:*fp32 "
    f"width:i32 stride:i32 {SIZES}"
)
INT8 = f"x:*i8 x_scale:*fp32 w:*i8 scale:*fp32 zero:*i8 bias:*bf16 residual:*bf16 y:*bf16 {SIZES}"
FLAGS = dict.fromkeys(("ZERO", "NORM", "SPLIT", "BIAS", "RESIDUAL"), False)


def product(
    name: str,
    *,
    narrow: int,
    kind: str | None = None,
    narrow_stores: int = 0,
    G: int = 0,
    rows: int = 8,
    **how: Any,
) -> Entry:
    """An entry of a kind of product (the first word of ``name``); codes and scales are counted."""
    kind = kind or name.split(",")[0]
    bits, dynamic = BITS[kind], kind == "w8a8_mm"
    scales = 0.0 if not G else (2 if bits == 4 else 4) / G + (1 / G if how.get("ZERO") else 0)
    constants = {**FLAGS, "G": G, "EVEN": True, **how}
    text = f"{INT8} parts:*fp32"
    if not dynamic:
        weights = {16: "*bf16", 8: "*i8", 4: "*i32"}[bits]
        text = f"x:*bf16 w:{weights} scale:{'*bf16' if bits == 4 else '*fp32'} {PRODUCT}"
        constants |= {"BITS": bits}
    else:
        constants.pop("NORM")

    def launched(amd: bool) -> Entry:
        table = tile(kind, G, rows, norm=how.get("NORM", False), amd=amd)
        warps, stages = table.pop("num_warps"), table.pop("num_stages")
        del table["PROGRAMS"]
        return Entry(
            name,
            skinny_triton.int8_product_kernel if dynamic else skinny_triton.product_kernel,
            dict(word.split(":") for word in text.split()),
            constants | table | ({} if dynamic else {"ASM": not amd}),
            table["BN"] * table["BK"] / (32 * warps),
            bits / 8 + scales,
            ("N", "K", "width", "stride"),
            narrow,
            narrow_stores,
            options={"num_warps": warps, "num_stages": stages},
            dots=True,
        )

    return replace(launched(amd=False), amd=launched(amd=True))


def tiny(name: str, kernel: Any, text: str, **constants: Any) -> Entry:
    """A second step over a few rows, which come from the cache: whether it fits is all."""
    types = dict(word.split(":") for word in text.split())
    divisible = tuple(k for k, v in types.items() if v.endswith("!"))
    types = {k: v.rstrip("!") for k, v in types.items()}
    warps = dispatch.config(name.split(",")[0])["num_warps"]
    each = constants.get("BLOCK", 2 * constants.get("HALF", 0)) / (32 * warps)
    options = {"num_warps": warps}
    return Entry(name, kernel, types, constants, each, 4, divisible, options=options, tiny=True)


# Scales are a few bytes each, and inputs come from the cache: their loads may be narrow.
PRODUCTS = [
    product("skinny_mm", SPLIT=True, narrow=0),
    product("skinny_mm, one share, bias and residual", BIAS=True, RESIDUAL=True, narrow=4),
    product("w8_mm", SPLIT=True, narrow=4),
    product("w8_mm, groups of 128", G=128, SPLIT=True, narrow=4),
    product("w8_mm, groups of 128 with zeros", G=128, SPLIT=True, ZERO=True, narrow=8),
    product("w4_mm", SPLIT=True, narrow=6),
    product("w4_mm, groups of 128", G=128, SPLIT=True, narrow=6),
    product("w4_mm, groups of 128 with zeros", G=128, SPLIT=True, ZERO=True, narrow=8),
    product("w4_mm, groups of 32", G=32, SPLIT=True, narrow=12),
    product("w4_mm, groups of 32 with zeros", G=32, SPLIT=True, ZERO=True, narrow=20),
    product("w4_mm, 16 rows", SPLIT=True, rows=16, narrow=2),
    product("w4_mm, 16 rows, groups of 128", G=128, SPLIT=True, rows=16, narrow=2),
    product("w4_mm, 16 rows, groups of 32", G=32, SPLIT=True, rows=16, narrow=8),
    product("w8a8_mm", SPLIT=True, narrow=6),
    product("w8a8_mm, groups of 128", G=128, SPLIT=True, narrow=6),
    tiny(
        "skinny_mm, sum of shares",
        skinny_triton.finish_kernel,
        "parts:*fp32 squares:*fp32 bias:*bf16 residual:*bf16 y:*bf16 M:i32 N:i32! K:i32 eps:fp32 "
        "splits:i32",
        NORM=False,
        BIAS=True,
        RESIDUAL=True,
        BLOCK=1024,
    ),
    *(
        product(
            f"norm_qkv_rope, {kind}",
            kind=kind.split(",")[0],
            NORM=True,
            SPLIT=True,
            G=G,
            rows=rows,
            narrow=narrow,
            narrow_stores=1,
        )
        for kind, G, rows, narrow in (
            ("skinny_mm", 0, 8, 1),
            ("w8_mm", 128, 8, 5),
            ("w4_mm", 128, 8, 22),
            ("w4_mm, 16 rows", 128, 16, 2),
        )
    ),
    tiny(
        "norm_qkv_rope, heads",
        decode_triton.rope_kernel,
        "parts:*fp32 squares:*fp32 bias:*bf16 cos:*fp32 sin:*fp32 positions:*i64 slots:*i64 "
        "q:*bf16 keys:*bf16 values:*bf16 M:i32 N:i32! K:i32 eps:fp32 splits:i32 heads:i32 "
        "groups:i32 angles:i32 length:i32! row_stride:i32! head_stride:i32! token_stride:i32!",
        BIAS=True,
        HALF=64,
    ),
    tiny(
        "norm_gate_up, columns",
        decode_triton.gate_up_kernel,
        "parts:*fp32 squares:*fp32 y:*bf16 M:i32 F:i32! K:i32 eps:fp32 splits:i32",
        ACTIVATION="silu",
        BLOCK=512,
    ),
]
