"""Attention as a GPU's fused kernels do it, on tensors of the CPU that stand for its own.

On a CPU torch would choose another kernel, or write all scores down, which a GPU does not.
"""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from zfunc.trees.kinds import FORESEEN

__all__ = ["FUSED", "as_on_a_gpu", "attention"]

aten = torch.ops.aten
WIDEST = 256  # numbers of a head that flash attention takes
HALVES = (torch.float16, torch.bfloat16)
FUSED = frozenset(
    f"_scaled_dot_product_{kind}_attention{way}"
    for kind in ("flash", "efficient")
    for way in ("", "_backward")
)


_lock = threading.Lock()  # several threads may foresee; torch takes one such library
_inside = 0
_open: list[Library] = []


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """A block in which attention where a GPU is foreseen is that of a GPU."""
    global _inside
    with _lock:
        if not _inside:
            _open.append(_registered())
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0:
                _open.pop()._destroy()


def _registered() -> Library:
    library = Library("aten", "IMPL")
    with warnings.catch_warnings():  # that torch has one of its own is known
        warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)
        library.impl("scaled_dot_product_attention", attention, "AutogradCPU")
    return library


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """``torch.nn.functional.scaled_dot_product_attention``."""
    whole = aten.scaled_dot_product_attention.default
    how: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
    if FORESEEN.get() != "cuda" or not _fits(q, k, v):  # or another thread's
        return whole.decompose(q, k, v, attn_mask, dropout_p, is_causal, **how)
    if attn_mask is None and q.dtype in HALVES and q.shape[-1] == v.shape[-1] <= WIDEST:
        flash = aten._scaled_dot_product_flash_attention.default
        return flash(q, k, v, dropout_p, is_causal, False, scale=scale)[0]
    if enable_gqa:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    bias = _bias(attn_mask, q, k)
    saved = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    efficient = aten._scaled_dot_product_efficient_attention.default
    return efficient(q, k, v, bias, saved, dropout_p, is_causal, scale=scale)[0]


def _fits(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether a fused kernel takes them; a mask may be learned, it gets its gradient there."""
    known = q.dtype in (*HALVES, torch.float32) and q.dtype == k.dtype == v.dtype
    return known and q.dim() == 4


def _bias(mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """A mask as what is added to the scores."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, -math.inf)
    return mask.expand(*q.shape[:-1], k.shape[-2])
