"""The kernels of a transformer's layers as they are launched on a GPU."""

from __future__ import annotations

from typing import Any

from tests.kernels.machine_code import Entry
from zfunc.kernels import dispatch, normalization_triton


def entry(
    name: str, kernel: Any, signature: str, how: dict[str, int], *, bytes: float, **rest: Any
) -> Entry:
    """An entry whose tile is ``how``: its constants, and its ``num_warps``.

    Args:
        name: of the kernel in the dispatch, and after a comma what is special.
        signature: ``"g:*bf16 n:i32"``; integers with a ``!`` are multiples of 16.
        rest: fields of the entry in lower case, constants of the kernel in upper case.
    """
    types = dict(word.split(":") for word in signature.split())
    fields = {k: rest.pop(k) for k in list(rest) if k.islower()}
    known = how | rest
    size = known.get("ROWS", 1) * known["BLOCK"]
    return Entry(
        name,
        kernel,
        {k: kind.rstrip("!") for k, kind in types.items()},
        {k: v for k, v in known.items() if k in kernel.arg_names},
        size / (32 * how["num_warps"]),
        bytes,
        tuple(k for k, kind in types.items() if kind.endswith("!")),
        options={"num_warps": how["num_warps"]},
        **fields,
    )


def norm(name: str, length: int, *, bytes: float, **rest: Any) -> Entry:
    """Rows of ``length``, forward or backward as the name says."""
    kernel = name.split(",")[0]
    how, center = dict(dispatch.config(kernel)), kernel.startswith("layer")
    flags = {"CENTER": center, "RESIDUAL": False, "WEIGHT": True}
    rest |= {"narrow": 4, "narrow_stores": 2}  # means, scales and weights; sums of programs
    if kernel.endswith("backward"):
        flags |= {"DW": True, "DB": center}
        ends = "mean:*fp32 rstd:*fp32 dx:*bf16"
        if length <= normalization_triton.LONGEST_BACKWARD:
            how = normalization_triton.tile(length, how["BLOCK"], 512)
            triton = normalization_triton.norm_backward_kernel
            more = "sums_w:*fp32 sums_b:*fp32 M:i32 "
        else:
            triton, more = normalization_triton.wide_norm_backward_kernel, ""
        signature = f"grad:*bf16 grad_s:*bf16 s:*bf16 weight:*bf16 {ends} {more}N:i32! offset:fp32"
    else:
        flags["BIAS"] = center
        signature = (
            "x:*bf16 residual:*bf16 weight:*bf16 bias:*bf16 y:*bf16 s:*bf16 mean:*fp32 rstd:*fp32 "
            "M:i32 N:i32! eps:fp32 offset:fp32"
        )
        if length <= normalization_triton.LONGEST:
            how = normalization_triton.tile(length, how["BLOCK"], 1024)
            triton = normalization_triton.norm_kernel
        else:
            how["ROWS"], triton = 1, normalization_triton.wide_norm_kernel
    return entry(name, triton, signature, how, bytes=bytes, **(flags | rest))


LAYERS = [
    norm("rms_norm", 4096, bytes=4),
    norm("rms_norm, 128", 128, bytes=4),
    norm("rms_norm, 16384 with a residual", 16384, bytes=8, RESIDUAL=True),
    norm("rms_norm, 65536", 65536, bytes=4),
    norm("layer_norm", 4096, bytes=4),
    norm("layer_norm, 65536 with a residual", 65536, bytes=8, RESIDUAL=True),
    norm("rms_norm_backward", 4096, bytes=6),
    norm("rms_norm_backward, 128", 128, bytes=6),
    norm("rms_norm_backward, 16384", 16384, bytes=6),
    norm("layer_norm_backward, 8192 with a residual", 8192, bytes=8, RESIDUAL=True),
    entry(
        "layer_norm_backward, sums of 16384",
        normalization_triton.wide_sums_kernel,
        "grad:*bf16 s:*bf16 mean:*fp32 rstd:*fp32 sums_w:*fp32 sums_b:*fp32 M:i32 N:i32!",
        normalization_triton.SUMS,
        bytes=4,
        narrow=4,
        narrow_stores=2,
        CENTER=True,
        DW=True,
        DB=True,
    ),
]
