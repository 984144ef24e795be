"""Every Triton kernel as it is launched on a GPU: what the machine-code checks compile."""

from __future__ import annotations

from typing import Any

from tests.kernels.machine_code import Entry
from zfunc.kernels import adamw_triton, dispatch, lion_triton

OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")


def entry(
    name: str,
    kernel: Any,
    signature: str,
    *,
    bytes: float,
    narrow: int = 0,
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
    each = each or how["BLOCK"] / (32 * options["num_warps"])
    known = {k: v for k, v in (how | constants).items() if k in kernel.arg_names}
    return Entry(name, kernel, types, known, each, bytes, divisible, narrow, options)


ADAM = "p:*fp32 m:*fp32 v:*fp32 p_new:*fp32 m_new:*fp32 v_new:*fp32 low:*bf16 hyper:*fp64 n:i32!"

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
]
