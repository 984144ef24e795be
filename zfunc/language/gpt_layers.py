"""The layers of the GPT around its products: a kernel each where the dispatch has one.

That is on a GPU. On a CPU torch's own functions are as fast, so kernels' twins run only where
:func:`zfunc.kernels.use` asks for them; and for few numbers, those of a token, a kernel's call
takes longer than its work.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from zfunc import kernels
from zfunc.kernels import dispatch

__all__ = ["cross_entropy", "gelu", "norm", "rotate", "turned"]

FEW = 1 << 16  # elements


def norm(x: Tensor, weight: Tensor) -> Tensor:
    """LayerNorm without a bias; ``x`` is ``[..., w]``, ``weight`` ``[w]``."""
    if _taken("layer_norm", x):
        y: Tensor = kernels.layer_norm(x, weight)
        return y
    return F.layer_norm(x, x.shape[-1:], weight)


def gelu(x: Tensor) -> Tensor:
    """GELU by ``tanh``."""
    if _taken("bias_gelu", x):
        return kernels.bias_gelu(x, None, "tanh")
    return F.gelu(x, approximate="tanh")


def turned(q: Tensor, k: Tensor, turn: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Queries and keys ``[b, h, t, d]`` at their positions."""
    if _taken("rotary", q):
        return kernels.rotary(q, k, *turn)
    return rotate(q, turn), rotate(k, turn)


def rotate(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """Turn feature i and feature i + d/2 of ``[b, h, t, d]`` by their position's angle."""
    cos, sin = turn
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """The mean over rows, in fp32; ``logits`` are ``[n, vocab]``, ``target`` ``[n]``."""
    if _taken("cross_entropy", logits):
        return kernels.cross_entropy(logits, target).float()
    return F.cross_entropy(logits.float(), target)


def _taken(name: str, x: Tensor) -> bool:
    forced = dispatch.forced()
    if forced == "torch":
        return True
    if forced != "triton" and (x.device.type == "cpu" or x.numel() < FEW):
        return False
    return kernels.choose(name, x).route == "triton"
