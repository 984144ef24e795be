"""The kernels of a transformer's layers as they are launched on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from benchmarks.gpu_targets import TARGETS
from tests.kernels.machine_code import LANES, Entry, for_each
from zfunc.kernels import (
    activations_triton,
    dispatch,
    losses_triton,
    normalization_triton,
    rotation_triton,
)


def entry(
    name: str,
    kernel: Any,
    signature: str,
    how: Callable[[str], dict[str, int]] | dict[str, int],
    *,
    bytes: float,
    **rest: Any,
) -> Entry:
    """An entry whose tile is ``how``: its constants, and its ``num_warps``.

    Args:
        name: of the kernel in the dispatch, and after a comma what is special.
        signature: ``"g:*bf16 n:i32"``; integers with a ``!`` are multiples of 16.
        how: a tile, or a function of the target.
        rest: fields of the entry in lower case, constants of the kernel in upper case.
    """
    types = dict(word.split(":") for word in signature.split())
    fields = {k: rest.pop(k) for k in list(rest) if k.islower()}

    def launched(target: str) -> Entry:
        tile = how if isinstance(how, dict) else how(target)
        known = tile | rest
        size = known.get("ROWS", 1) * known["BLOCK"]
        return Entry(
            name,
            kernel,
            {k: kind.rstrip("!") for k, kind in types.items()},
            {k: v for k, v in known.items() if k in kernel.arg_names},
            size / (LANES[TARGETS[target].amd] * tile["num_warps"]),
            bytes,
            tuple(k for k, kind in types.items() if kind.endswith("!")),
            options={"num_warps": tile["num_warps"]},
            **fields,
        )

    return for_each(launched)


def configured(name: str) -> Callable[[str], dict[str, int]]:
    """A tile that is as the table of configurations says."""
    return lambda target: dispatch.config(name.split(",")[0], target=target)


def norm(name: str, length: int, *, bytes: float, **rest: Any) -> Entry:
    """Rows of ``length``, forward or backward as the name says."""
    kernel = name.split(",")[0]
    how: Any = configured(kernel)
    block, center = dispatch.config(kernel)["BLOCK"], kernel.startswith("layer")
    flags = {"CENTER": center, "RESIDUAL": False, "WEIGHT": True}
    # Means, what they lost in rounding, scales and weights; sums of programs.
    rest |= {"narrow": 4, "narrow_stores": 3 if center else 2}
    if kernel.endswith("backward"):
        flags |= {"DW": True, "DB": center}
        ends = "mean:*fp32 rstd:*fp32 dx:*bf16"
        if length <= normalization_triton.LONGEST_BACKWARD:
            how = normalization_triton.tile(length, block, 512)
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
            how = normalization_triton.tile(length, block, 1024)
            triton = normalization_triton.norm_kernel
        else:
            rest, triton = rest | {"ROWS": 1}, normalization_triton.wide_norm_kernel
    return entry(name, triton, signature, how, bytes=bytes, **(flags | rest))


def gated(name: str, act: str, **rest: Any) -> Entry:
    """A gated activation over one row of any length."""
    kernel = name.split(",")[0]
    backward = kernel.endswith("backward")
    return entry(
        name,
        activations_triton.glu_backward_kernel if backward else activations_triton.glu_kernel,
        (
            "grad:*bf16 gate:*bf16 up:*bf16 d_gate:*bf16 d_up:*bf16 grad_stride:i32! "
            if backward
            else "gate:*bf16 up:*bf16 out:*bf16 "
        )
        + "F:i32! blocks:i32 gate_stride:i32! up_stride:i32!",
        configured(kernel),
        bytes=10 if backward else 6,
        ACT=act,
        FLAT=True,
        **rest,
    )


def biased(name: str, act: str, **rest: Any) -> Entry:
    """GELU, forward or backward, of rows."""
    return entry(
        name,
        activations_triton.bias_gelu_kernel,
        "grad:*bf16 x:*bf16 bias:*bf16 out:*bf16 F:i32! blocks:i32",
        configured(name),
        bytes=6 if rest["GRAD"] else 4,
        ACT=act,
        **rest,
    )


def turn(name: str, interleaved: bool) -> Entry:
    """32 heads of 128 features, beside 8 of keys."""
    strides = " ".join(
        f"{x}_{along}:i32!"
        for x in ("q", "k", "q_out", "k_out")
        for along in ("batch", "head", "place")
    )
    tile = rotation_triton.tile(64, 32, dispatch.config("rotary")["BLOCK"])
    made = entry(
        name,
        rotation_triton.rotary_kernel,
        "q:*bf16 k:*bf16 cos:*fp32 sin:*fp32 q_out:*bf16 k_out:*bf16 q_heads:i32! k_heads:i32 "
        f"length:i32! half:i32! width:i32! table_stride:i32! {strides}",
        lambda target: tile | {"num_warps": dispatch.config("rotary", target=target)["num_warps"]},
        bytes=4,
        INTERLEAVED=interleaved,
        BACK=True,
        REST=False,
    )
    # Pairs; and the code has a way for queries and a way for keys, of which a program takes one.
    more = 4 * tile["HEADS"]
    others = {k: replace(v, each=more * v.each) for k, v in made.others.items()}
    return replace(made, each=more * made.each, others=others)


def entropy(name: str, *, bytes: float, **flags: Any) -> Entry:
    """Rows of any number of classes."""
    return entry(
        name,
        losses_triton.cross_entropy_kernel,
        "logits:*bf16 target:*i64 losses:*fp32 total:*fp32 grad:*fp32 new:*bf16 V:i32! stride:i32! "
        "ignore:i32 smoothing:fp32 z:fp32",
        configured(name),
        bytes=bytes,
        narrow=4,
        narrow_stores=3,
        **({"LOSS": False, "GRAD": False, "SCALE": False, "SMOOTH": False} | flags),
    )


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
        narrow=6,
        narrow_stores=2,
        CENTER=True,
        DW=True,
        DB=True,
    ),
    gated("glu", "silu"),
    gated("glu, erf", "gelu"),
    gated("glu_backward", "silu"),
    gated("glu_backward, tanh", "gelu_tanh"),
    gated("glu_backward, erf", "gelu"),
    biased("bias_gelu", "gelu_tanh", GRAD=False, BIAS=True),
    biased("bias_gelu_backward, erf without bias", "gelu", GRAD=True, BIAS=False),
    entry(
        "bias_gelu_backward",
        activations_triton.bias_gelu_backward_kernel,
        "grad:*bf16 x:*bf16 bias:*bf16 dx:*bf16 sums:*fp32 M:i32 F:i32!",
        activations_triton.SUMS,
        bytes=6,
        narrow=1,
        narrow_stores=1,
        ACT="gelu_tanh",
    ),
    turn("rotary", False),
    turn("rotary, interleaved", True),
    entropy("cross_entropy", bytes=2, LOSS=True),
    entropy("cross_entropy, smooth", bytes=2, LOSS=True, SMOOTH=True),
    entropy("cross_entropy_backward", bytes=4, GRAD=True),
    entropy("cross_entropy_grad", bytes=4, LOSS=True, GRAD=True, SCALE=True),
]
