"""Decoding with the GPT of :mod:`zfunc.language.gpt`: its cache, and one step of it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

import zfunc as zf
from zfunc.language.decoding import check_room
from zfunc.language.gpt import GPTConfig, Params, hidden, rotate, rotations
from zfunc.modules import blocks

__all__ = ["GPTDecoder", "Seen"]


@dataclass(frozen=True)
class Seen:
    """What a GPT has seen of ``b`` texts: a cache of static size.

    Attributes:
        keys, values: one ``[b, h, length, d]`` tensor for each block.
        mask: ``[b, length]`` bool, False at padding (left of each text), or None.
        used: positions that are taken.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    mask: Tensor | None
    used: int = 0


zf.tree.register(
    Seen,
    lambda seen: (
        (seen.keys, seen.values, seen.mask),
        (len(seen.keys), seen.used),
        ("keys", "values", "mask"),
    ),
    lambda static, children: Seen(children[0], children[1], children[2], static[1]),
)


@dataclass(frozen=True)
class GPTDecoder:
    """How ``zf.generate`` continues texts with this GPT: a ``zfunc.language.decoding.Decoder``.

    Attributes:
        config: its shape.
        limit: positions that it knows, if it is limited.
        window: how many positions, its own included, a token attends to. With the context that
            the model was trained on texts may become longer than that.
    """

    config: GPTConfig
    limit: int | None = None
    window: int | None = None

    @property
    def vocab(self) -> int:
        return self.config.vocab

    def start(self, batch: int, length: int, mask: Tensor | None) -> tuple[int, int, Any]:
        """The promise of a cache: its dtype and device are those of the first parameters."""
        return batch, length, mask

    def step(self, params: Params, cache: Any, tokens: Tensor) -> tuple[Tensor, Seen]:
        """Take ``[b, t]`` tokens in; logits ``[b, vocab]`` behind the last, and the cache."""
        x = F.embedding(tokens, params["embed"])
        seen = cache if isinstance(cache, Seen) else self._empty(x, *cache)
        start, stop = seen.used, seen.used + tokens.shape[1]
        length, d = seen.keys[0].shape[2:] if seen.keys else (stop, 1)
        check_room(start, tokens.shape[1], length)
        cos, sin = rotations(length, d, x) if seen.keys else (x, x)
        positions = torch.arange(start, stop, device=x.device)
        past = torch.arange(stop, device=x.device)
        allowed = (past <= positions[:, None])[None, None]
        if self.window is not None:
            allowed = allowed & (past > positions[:, None] - self.window)
        if seen.mask is None:
            turn = cos[start:stop], sin[start:stop]
        else:
            allowed = allowed & seen.mask[:, None, None, :stop]
            at = (seen.mask[:, :stop].long().cumsum(1) - 1).clamp_min(0)[:, start:]
            turn = cos[at][:, None], sin[at][:, None]
        keys, values = [], []
        for i, p in enumerate(params["blocks"]):
            x, k, v = zf.layer(
                partial(_block_with, turn=turn, heads=self.config.heads, allowed=allowed),
                p,
                x,
                seen.keys[i],
                seen.values[i],
                start,
            )
            keys.append(k)
            values.append(v)
        x = F.layer_norm(x[:, -1], (self.config.width,), params["norm"])
        logits = F.linear(x, params["embed"] if self.config.tied else params["head"])
        return logits, Seen(tuple(keys), tuple(values), seen.mask, stop)

    def _empty(self, like: Tensor, batch: int, length: int, mask: Any) -> Seen:
        c = self.config
        shape = (batch, c.heads, length, c.width // c.heads)
        keys, values = (tuple(like.new_zeros(shape) for _ in range(c.depth)) for _ in range(2))
        return Seen(keys, values, mask)


def _block_with(
    params: Params,
    x: Tensor,
    keys: Tensor,
    values: Tensor,
    start: int,
    turn: tuple[Tensor, Tensor],
    heads: int,
    allowed: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """A block on the tokens behind position ``start``, with a cache written in place."""
    stop = start + x.shape[1]
    qkv = F.linear(F.layer_norm(x, x.shape[-1:], params["norm1"]), params["qkv"])
    q, k, v = rearrange(qkv, "b t (three h d) -> three b h t d", three=3, h=heads)
    keys[:, :, start:stop], values[:, :, start:stop] = rotate(k, turn), v
    y = F.scaled_dot_product_attention(
        rotate(q, turn), keys[:, :, :stop], values[:, :, :stop], attn_mask=allowed
    )
    rows = _added(x.flatten(0, 1), rearrange(y, "b h t d -> (b t) (h d)"), params["out"])
    rows = _added(rows, hidden(params, rows), params["down"])
    return rows.view(x.shape), keys, values


def _added(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    return blocks.added(x, y, {"weight": weight, "bias": None})
