"""Products of a few rows as they are launched on a GPU, for the machine-code checks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from benchmarks.gpu_targets import TARGETS
from tests.kernels.machine_code import LANES, Entry, for_each
from zfunc.kernels import decode_triton, dispatch, skinny_triton
from zfunc.kernels.packed import BITS
from zfunc.kernels.skinny_launch import exact, norm_first, tile

__all__ = ["PRODUCTS", "everything", "product"]

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
    narrow: tuple[int, int],
    kind: str | None = None,
    narrow_stores: tuple[int, int] = (0, 0),
    G: int = 0,
    rows: int = 8,
    length: int = 4096,
    dtype: str = "bf16",
    **how: Any,
) -> Entry:
    """An entry of a kind of product (the first word of ``name``); codes and scales are counted.

    Args:
        name, narrow, narrow_stores: see :class:`Entry`, for NVIDIA and for AMD.
        kind: if it is not the first word.
        G: the group, 0 for whole rows.
        rows, length: of the inputs.
        dtype: of the inputs, the scales of 4-bit codes, and what is added.
        how: constants that are not false.
    """
    kind = kind or name.split(",")[0]
    bits, dynamic = BITS[kind], kind == "w8a8_mm"
    scales = 0.0 if not G else (2 if bits == 4 else 4) / G + (1 / G if how.get("ZERO") else 0)
    constants = {**FLAGS, "G": G, **how}
    text = f"{INT8} parts:*fp32"
    if not dynamic:
        weights = {16: "*bf16", 8: "*i8", 4: "*i32"}[bits]
        text = f"x:*bf16 w:{weights} scale:{'*bf16' if bits == 4 else '*fp32'} {PRODUCT}"
        constants |= {"BITS": bits}
    else:
        constants.pop("NORM")
    text = text.replace("bf16", dtype)
    aligned = () if length % 16 and bits != 4 else ("K", "width")  # beside words x is padded

    def launched(target: str) -> Entry:
        amd = TARGETS[target].amd
        table = tile(kind, G, rows, length, norm=how.get("NORM", False), target=target)
        options = {k: table.pop(k) for k in ("num_warps", "num_stages", "kpack") if k in table}
        del table["PROGRAMS"]
        flags = {"ASM": not amd, "EXACT": exact(kind, G, zero=constants["ZERO"], amd=amd)}
        return Entry(
            name,
            skinny_triton.int8_product_kernel if dynamic else skinny_triton.product_kernel,
            dict(word.split(":") for word in text.split()),
            constants | table | {"EVEN": not length % table["BK"]} | ({} if dynamic else flags),
            table["BN"] * table["BK"] / (LANES[amd] * options["num_warps"]),
            bits / 8 + scales,
            ("N", *aligned, "stride"),
            narrow[amd],
            narrow_stores[amd],
            options=options,
            dots=True,
        )

    return for_each(launched)


def tiny(name: str, kernel: Any, text: str, **constants: Any) -> Entry:
    """A second step over a few rows, which come from the cache: whether it fits is all."""
    types = dict(word.split(":") for word in text.split())
    divisible = tuple(k for k, v in types.items() if v.endswith("!"))
    types = {k: v.rstrip("!") for k, v in types.items()}
    block = constants.get("BLOCK", 2 * constants.get("HALF", 0))

    def launched(target: str) -> Entry:
        options = {"num_warps": dispatch.config(name.split(",")[0], target=target)["num_warps"]}
        each = block / (LANES[TARGETS[target].amd] * options["num_warps"])
        return Entry(name, kernel, types, constants, each, 4, divisible, options=options, tiny=True)

    return for_each(launched)


def shares(name: str, *narrow: int, **how: Any) -> Entry:
    """An entry whose second launch sums shares; ``narrow`` for NVIDIA, and for AMD if another."""
    return product(name, SPLIT=True, narrow=(narrow[0], narrow[-1]), **how)


# Scales are a few bytes each, and inputs come from the cache: their loads may be narrow. On AMD
# each wave reads the scales and zero points of its columns where the products leave sums of them.
PRODUCTS = [
    shares("skinny_mm", 0),
    product(
        "skinny_mm, one share, bias and residual",
        BIAS=True,
        RESIDUAL=True,
        narrow=(4, 5),
        narrow_stores=(0, 1),
    ),
    shares("w8_mm", 1, 8),
    shares("w8_mm, groups of 128", 1, 16, G=128),
    shares("w8_mm, groups of 128 with zeros", 2, 32, G=128, ZERO=True),
    shares("w8_mm, groups of 64 with zeros", 2, 34, G=64, ZERO=True),
    shares("w8_mm, groups of 32", 6, 4, G=32),
    shares("w8_mm, groups of 32 with zeros", 8, 6, G=32, ZERO=True),
    shares("w4_mm", 18, 9),
    shares("w4_mm, groups of 128", 18, 10, G=128),
    shares("w4_mm, groups of 128 with zeros", 20, 12, G=128, ZERO=True),
    shares("w4_mm, groups of 64 with zeros", 24, 16, G=64, ZERO=True),
    shares("w4_mm, groups of 32", 24, 16, G=32),
    shares("w4_mm, groups of 32 with zeros", 32, 24, G=32, ZERO=True),
    shares("w4_mm, 16 rows", 2, 9, rows=16),
    shares("w4_mm, 16 rows, groups of 128", 2, 10, G=128, rows=16),
    shares("w4_mm, 16 rows, groups of 64 with zeros", 8, 16, G=64, ZERO=True, rows=16),
    shares("w4_mm, 16 rows, groups of 32", 8, 16, G=32, rows=16),
    shares("w4_mm, 16 rows, groups of 32 with zeros", 16, 24, G=32, ZERO=True, rows=16),
    shares(
        "w4_mm, 16 rows of float16, groups of 32 with zeros",
        16,
        24,
        G=32,
        ZERO=True,
        rows=16,
        dtype="fp16",
    ),
    shares("w8a8_mm", 6, 7),
    shares("w8a8_mm, groups of 128", 6, 11, G=128),
    shares("w8a8_mm, groups of 32 with zeros", 8, 35, G=32, ZERO=True),
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
        shares(
            f"norm_qkv_rope, {text}",
            *narrow,
            kind=text.split(",")[0],
            NORM=True,
            G=G,
            rows=rows,
            ZERO="zeros" in text,
            narrow_stores=(1, 1),
        )
        for text, G, rows, narrow in (
            ("skinny_mm", 0, 8, (1, 0)),
            ("w8_mm, groups of 128", 128, 8, (2, 16)),
            ("w8_mm, groups of 32 with zeros", 32, 8, (12, 8)),
            ("w4_mm, groups of 128", 128, 8, (34, 18)),
            ("w4_mm, groups of 32 with zeros", 32, 8, (48, 32)),
            ("w4_mm, 16 rows, groups of 128", 128, 16, (2, 18)),
            ("w4_mm, 16 rows, groups of 64", 64, 16, (4, 20)),
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


def everything() -> Iterator[Entry]:
    """All that the dispatch can choose: kinds, groups, zeros, rows, norms, dtypes, lengths.

    Rows of an odd length are read byte by byte, and held to nothing but to fit.
    """
    axes = (BITS, (0, 32, 64, 128, 256), (False, True), (False, True), (8, 16))
    for kind, G, zeros, norm, rows in itertools.product(*axes):
        if (
            (kind == "skinny_mm" and (G or zeros))
            or (norm and (kind == "w8a8_mm" or norm_first(kind, G, rows, zero=zeros)))
            or (kind != "w4_mm" and rows == 16)  # the tile of 8
        ):
            continue
        for dtype, length, split in itertools.product(
            ("bf16", "fp16"), (4096, 2864, 131), (True, False)
        ):
            if (norm and (dtype == "fp16" or not split)) or (kind == "w4_mm" and length % 16):
                continue
            words = [kind, f"G={G}", *(w for w, on in (("zeros", zeros), ("norm", norm)) if on)]
            words += [f"rows={rows}", dtype, f"K={length}", "shares" if split else "one share"]
            flags = {"ZERO": zeros, "SPLIT": split, "BIAS": not split, "RESIDUAL": not split}
            flags |= {} if kind == "w8a8_mm" else {"NORM": norm}
            more = {"kind": kind, "G": G, "rows": rows, "dtype": dtype, "length": length}
            made = product(
                " ".join(words), narrow=(999, 999), narrow_stores=(99, 99), **more, **flags
            )
            tiny = length == 131
            others = {k: replace(v, tiny=tiny) for k, v in made.others.items()}
            yield replace(made, tiny=tiny, others=others)
