"""Fused operators: a reference in plain torch, a Triton kernel, and machine code where it pays.

Read :mod:`~zfunc.kernels.operators` first (an operator is an annotated Python function), then
:mod:`~zfunc.kernels.dispatch` (which code runs), then one kernel. ``onebit.py`` has the public
functions and their operators, ``onebit_torch.py`` the reference, which is called a twin,
``onebit_triton.py`` the kernel and ``onebit_llvm.py`` the machine code.

Importing this room imports no Triton. A kernel imports it when it is first launched.
"""

from __future__ import annotations

from zfunc.kernels.activations import bias_gelu, geglu, swiglu
from zfunc.kernels.adamw import adamw_flat, adamw_flat_, adamw_hyper
from zfunc.kernels.adamw8 import (
    Moments8,
    adamw8_flat,
    adamw8_flat_,
    moments8,
    split24,
    whole24,
)
from zfunc.kernels.decode import norm_gate_up, norm_qkv_rope
from zfunc.kernels.dispatch import Choice, choose, use
from zfunc.kernels.frozen import adamw_frozen_, frozen_hyper, momentum_shares_, shares_hyper
from zfunc.kernels.gradient_norm import Clip, norm_clip, sum_squares
from zfunc.kernels.groupwise import dequantize_groups, fake_quant, quantize_groups
from zfunc.kernels.lamb import lamb_apply_, lamb_hyper, lamb_moments_, lamb_ratios
from zfunc.kernels.linear_losses import linear_cross_entropy
from zfunc.kernels.lion import lion_flat, lion_flat_, lion_hyper
from zfunc.kernels.losses import cross_entropy
from zfunc.kernels.normalization import layer_norm, rms_norm
from zfunc.kernels.onebit import (
    onebit_bytes,
    onebit_mean,
    onebit_mean_,
    onebit_pack,
    onebit_pack_,
    onebit_unpack,
    onebit_unpack_,
)
from zfunc.kernels.operators import KernelError
from zfunc.kernels.packed import Packed, pack_words, unpack_words
from zfunc.kernels.payloads import (
    Payload,
    dequantize_payload,
    mean_payloads,
    mean_payloads_,
    quantize_payload,
    quantize_payload_,
)
from zfunc.kernels.rotation import rotary
from zfunc.kernels.skinny import packed_mm, skinny_mm, w4_mm, w8_mm, w8a8_mm
from zfunc.kernels.verification import Verdict, verify

__all__ = [
    "Choice",
    "Clip",
    "KernelError",
    "Moments8",
    "Packed",
    "Payload",
    "Verdict",
    "adamw8_flat",
    "adamw8_flat_",
    "adamw_flat",
    "adamw_flat_",
    "adamw_frozen_",
    "adamw_hyper",
    "bias_gelu",
    "choose",
    "cross_entropy",
    "dequantize_groups",
    "dequantize_payload",
    "fake_quant",
    "frozen_hyper",
    "geglu",
    "lamb_apply_",
    "lamb_hyper",
    "lamb_moments_",
    "lamb_ratios",
    "layer_norm",
    "linear_cross_entropy",
    "lion_flat",
    "lion_flat_",
    "lion_hyper",
    "mean_payloads",
    "mean_payloads_",
    "moments8",
    "momentum_shares_",
    "norm_clip",
    "norm_gate_up",
    "norm_qkv_rope",
    "onebit_bytes",
    "onebit_mean",
    "onebit_mean_",
    "onebit_pack",
    "onebit_pack_",
    "onebit_unpack",
    "onebit_unpack_",
    "pack_words",
    "packed_mm",
    "quantize_groups",
    "quantize_payload",
    "quantize_payload_",
    "rms_norm",
    "rotary",
    "shares_hyper",
    "skinny_mm",
    "split24",
    "sum_squares",
    "swiglu",
    "unpack_words",
    "use",
    "verify",
    "w4_mm",
    "w8_mm",
    "w8a8_mm",
    "whole24",
]
