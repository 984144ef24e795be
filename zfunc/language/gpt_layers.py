"""The layers of the GPT around its products: a kernel each where the dispatch has one.

That is on a GPU. On a CPU torch's own functions are as fast, so kernels' twins run only where
:func:`zfunc.kernels.use` asks for them; and for few numbers, those of a token, a kernel's call
takes longer than its work. Logits that ranks have in parts go through the operators of split
leaves, which find such kernels themselves.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

import zfunc as zf
from zfunc import kernels
from zfunc.kernels import dispatch
from zfunc.kernels.losses import Reduction
from zfunc.layout.splits import Part
from zfunc.operators.conjugates import gathered
from zfunc.trees.kinds import kind
from zfunc.trees.marks import part_of

__all__ = ["cross_entropy", "gelu", "norm", "rotate", "split_of", "turned", "whole"]

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


def cross_entropy(logits: Tensor, target: Tensor, reduction: Reduction = "mean") -> Tensor:
    """The mean, or sum, over rows, in fp32; ``logits`` are ``[..., vocab]``, ``target`` ``[...]``.

    A target of -100 counts nothing. Of split logits each rank has its part, and all the loss.
    """
    if split_of(logits) is not None:
        return zf.cross_entropy(logits, target, reduction=reduction).float()
    logits, target = logits.flatten(0, -2), target.flatten()
    if _taken("cross_entropy", logits):
        return kernels.cross_entropy(logits, target, reduction=reduction).float()
    return F.cross_entropy(logits.float(), target, reduction=reduction)


def whole(logits: Tensor) -> Tensor:
    """Logits of which each rank may have some, ``[..., vocab]`` on every rank."""
    part = split_of(logits)
    if part is None or part.split is None:
        return logits
    return gathered(logits, part.group, part.split)


def split_of(x: Tensor) -> Part | None:
    """What a tensor is a part of, if several ranks have others."""
    part: Part | None = part_of(x)
    return None if part is None or part.split is None or part.group.size == 1 else part


def _taken(name: str, x: Tensor) -> bool:
    forced = dispatch.forced()
    if forced == "torch":
        return True
    if forced != "triton" and (kind(x.device) == "cpu" or x.numel() < FEW):
        return False
    return kernels.choose(name, x).route == "triton"
