"""A small GPT as plain functions on a pytree: the model that ``zfunc train`` trains.

Pre-LN blocks (Xiong et al., 2020, https://arxiv.org/abs/2002.04745), rotary positions
(Su et al., 2021, https://arxiv.org/abs/2104.09864), no biases. Parameters are a nested
dict, the stack of blocks a :class:`zfunc.Layers`, so every transform finds its units.
Products are written with :func:`zfunc.column` and :func:`zfunc.row`, which on whole weights
are plain products, and :func:`rules` says how ``zf.split`` cuts the weights: nothing else in
this file knows that transforms exist.

Shapes are written with ``b`` sequences, ``t`` positions, ``h`` heads, ``d`` features of
a head, ``w = h * d`` the model's width. In parts ``h`` are this rank's heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

import zfunc as zf
from zfunc.language import gpt_layers

__all__ = ["GPTConfig", "apply", "block", "count", "init", "loss", "rules", "score", "shapes"]

Params = dict[str, Any]


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a GPT.

    Raises:
        ValueError: the width does not split into heads of an even number of features.
    """

    vocab: int = 256
    width: int = 192
    depth: int = 4
    heads: int = 4
    tied: bool = False

    def __post_init__(self) -> None:
        if self.width % (2 * self.heads):
            raise ValueError(
                f"width {self.width} with {self.heads} heads: expected a width divisible by "
                f"{2 * self.heads} (rotary positions turn pairs of features in each head)"
            )


def init(config: GPTConfig, key: Tensor) -> Params:
    """Draw the parameters.

    Matrices that write to the residual stream begin at zero, so each block begins as
    the identity and no depth-dependent scale is needed; the others keep the variance.

    Args:
        config: the shape.
        key: a :func:`zfunc.random.key`.

    Returns:
        ``{"embed": [vocab, w], "blocks": Layers([...]), "norm": [w], "head": [vocab, w]}``,
        fp32; no ``"head"`` if it is tied to the embedding.
    """
    return _params(config, key)


def shapes(config: GPTConfig) -> Params:
    """The tree of :func:`init` with tensors on ``meta``: shapes, and no memory."""
    with torch.device("meta"):
        return _params(config, None)


def _params(config: GPTConfig, key: Tensor | None) -> Params:
    embed_key, head_key, *block_keys = _split(key, 2 + config.depth)
    params = {
        "embed": _normal(embed_key, config.vocab, config.width, 0.02),
        "blocks": zf.Layers([_block_params(config.width, k) for k in block_keys]),
        "norm": torch.ones(config.width),
    }
    if not config.tied:
        params["head"] = _normal(head_key, config.vocab, config.width, 0.02)
    return params


def _block_params(width: int, key: Tensor | None) -> Params:
    qkv_key, up_key = _split(key, 2)
    return {
        "norm1": torch.ones(width),
        "qkv": _normal(qkv_key, 3 * width, width, width**-0.5),
        "out": torch.zeros(width, width),
        "norm2": torch.ones(width),
        "up": _normal(up_key, 4 * width, width, width**-0.5),
        "down": torch.zeros(width, 4 * width),
    }


def _split(key: Tensor | None, count: int) -> Sequence[Tensor | None]:
    return [None] * count if key is None else list(zf.random.split(key, count))


def _normal(key: Tensor | None, rows: int, columns: int, scale: float) -> Tensor:
    """Drawn with a key; without one only a shape."""
    if key is None:
        return torch.empty(rows, columns)
    return zf.random.normal(key, (rows, columns)) * scale


def rules(config: GPTConfig, group_size: int | None = None) -> dict[str, zf.Cut]:
    """How ``zf.split`` cuts the parameters: heads, hidden features, and the vocabulary.

    Args:
        config: the shape.
        group_size: of low-bit weights, how many of a row share a scale: rows are cut between them.

    >>> rules(GPTConfig(heads=4))["blocks.*.qkv"]
    Cut(dim=0, parts=3, by=4, grain=1)
    """
    # A row of one group has one scale, wherever it is cut.
    heads, hidden = (
        1 if group_size is None or group_size >= k else group_size
        for k in (config.width, 4 * config.width)
    )
    return {
        "embed": zf.Cut(0),
        "blocks.*.qkv": zf.Cut(0, parts=3, by=config.heads, grain=heads),
        "blocks.*.out": zf.Cut(1, by=config.heads, grain=heads),
        "blocks.*.up": zf.Cut(0, grain=hidden),
        "blocks.*.down": zf.Cut(1, grain=hidden),
    } | ({} if config.tied else {"head": zf.Cut(0)})


def apply(params: Params, ids: Tensor, config: GPTConfig) -> Tensor:
    """Predict each next token.

    Args:
        params: as :func:`init` makes them, plain or inside a step.
        ids: ``[b, t]`` int64.
        config: the shape.

    Returns:
        Logits ``[b, t, vocab]``, on every rank all of them.
    """
    return gpt_layers.whole(_logits(params, ids, config))


def _logits(params: Params, ids: Tensor, config: GPTConfig) -> Tensor:
    """``[b, t, vocab]``; where the head is split those of this rank's classes."""
    x = zf.embed(ids, params["embed"])
    features = config.width // config.heads
    turn = rotations(ids.shape[1], features, x)
    x = zf.scan(partial(block, turn=turn, features=features), params["blocks"], x)
    x = gpt_layers.norm(x, params["norm"])
    return zf.column(x, params["embed"] if config.tied else params["head"])


def block(params: Params, x: Tensor, turn: tuple[Tensor, Tensor], features: int) -> Tensor:
    """Attention, then the MLP, each on a normalised copy and added to ``x`` ``[b, t, w]``."""
    x = x + _attention(params, gpt_layers.norm(x, params["norm1"]), turn, features)
    return x + zf.row(hidden(params, x), params["down"])


def hidden(params: Params, x: Tensor) -> Tensor:
    """The MLP's hidden features ``[..., 4 w]``, from ``x`` ``[..., w]``."""
    return gpt_layers.gelu(zf.column(gpt_layers.norm(x, params["norm2"]), params["up"]))


def _attention(params: Params, x: Tensor, turn: tuple[Tensor, Tensor], features: int) -> Tensor:
    qkv = zf.column(x, params["qkv"])
    q, k, v = rearrange(qkv, "b t (three h d) -> three b h t d", three=3, d=features)
    q, k = gpt_layers.turned(q, k, turn)
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return zf.row(rearrange(y, "b h t d -> b t (h d)"), params["out"])


def rotations(length: int, features: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary angles, each ``[t, d / 2]`` in the dtype of ``like``.

    The angles are fp32 whatever the model computes in: at position 1000 a 16-bit angle
    is wrong by whole turns.
    """
    pairs = torch.arange(0, features, 2, device=like.device, dtype=torch.float32)
    positions = torch.arange(length, device=like.device, dtype=torch.float32)
    angles = positions[:, None] * 10000.0 ** (-pairs / features)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def loss(params: Params, batch: Tensor, config: GPTConfig) -> Tensor:
    """Mean cross-entropy of the next token, in nats; ``batch`` is ``[b, t + 1]`` int64."""
    return gpt_layers.cross_entropy(_logits(params, batch[:, :-1], config), batch[:, 1:])


def score(params: Params, ids: Tensor, targets: Tensor, config: GPTConfig) -> Tensor:
    """The sum of cross-entropies, in nats, of ``targets`` ``[b, t]`` behind ``ids`` ``[b, t]``.

    A target of -100 counts nothing.
    """
    return gpt_layers.cross_entropy(_logits(params, ids, config), targets, "sum")


def count(config: GPTConfig) -> int:
    """Number of parameters.

    >>> count(GPTConfig(vocab=256, width=192, depth=4, heads=4))
    1869504
    """
    return sum(x.numel() for x in zf.tree.leaves(shapes(config)))
