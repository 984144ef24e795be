"""Every Triton kernel as it is launched on a GPU: what the machine-code checks compile."""

from __future__ import annotations

from typing import Any

from tests.kernels.machine_code import Entry
from zfunc.kernels import adamw_triton, dispatch, lion_triton, onebit_triton

OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")


def entry(
    name: str,
    kernel: Any,
    signature: str,
    *,
    bytes: float,
    narrow: int = 0,
    narrow_stores: int = 0,
    each: float | None = None,
    **constants: Any,
) -> Entry:
    """An entry, launched as the table of configurations says.

    Args:
        name: of the kernel in the dispatch, and after a comma what is special.
        signature: ``"g:*bf16 n:i32"``; integers with a ``!`` are multiples of 16.
        each: elements a thread; by default ``BLOCK`` over the threads of a program.
    """
    how = dict(dispatch.config(name.split(",")[0]))
    options = {k: how.pop(k) for k in OPTIONS if k in how}
    types = dict(word.split(":") for word in signature.split())
    divisible = tuple(k for k, kind in types.items() if kind.endswith("!"))
    types = {k: kind.rstrip("!") for k, kind in types.items()}
    size = how["BLOCK"]
    each = each or size / (32 * options["num_warps"])
    if "GROUP" in kernel.arg_names:
        how["GROUP"] = constants.get("GROUP", size)
        how["ROWS"] = max(1, size // how["GROUP"])
    known = {k: v for k, v in (how | constants).items() if k in kernel.arg_names}
    return Entry(name, kernel, types, known, each, bytes, divisible, narrow, narrow_stores, options)


ADAM = "p:*fp32 m:*fp32 v:*fp32 p_new:*fp32 m_new:*fp32 v_new:*fp32 low:*bf16 hyper:*fp64 n:i32!"
ONEBIT = (
    "x:*fp32 e:*fp32 bits:*u8 shares:*fp32 workers:i32 width:i32! groups:i32 n:i32! sums:*fp32 "
    "e_new:*fp32 bits_new:*u8 scale:*fp32"
)

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
        "lion_flat",
        lion_triton.lion_kernel,
        "g:*bf16 p:*fp32 m:*fp32 p_new:*fp32 m_new:*fp32 low:*bf16 hyper:*fp64 n:i32!",
        LOW=True,
        bytes=20,
        narrow=5,
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
        each=64,
        bytes=12.1,
        narrow_stores=9,
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
]
