"""Decoding with the GPT of :mod:`zfunc.language.gpt`: its cache, and one step of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

import zfunc as zf
from zfunc.errors import PlacementError
from zfunc.huggingface import blocks
from zfunc.language.decoding import Held, Single, check_room
from zfunc.language.gpt import GPTConfig, Params, hidden, rotations
from zfunc.language.gpt_layers import rotate

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

    @property
    def length(self) -> int:
        """Of the whole cache, in positions."""
        return self.keys[0].shape[2]

    def advanced(self) -> Seen:
        """The same memory, when somebody has written one more token into it."""
        return replace(self, used=self.used + 1)


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
        logits = self._through(params, x, seen, (slice(start, stop), stop), turn, allowed)
        return logits, replace(seen, used=stop)

    @contextmanager
    def held(self, params: Params) -> Iterator[Held]:
        yield Held(partial(self.step, params), partial(self._single, params))

    def _single(self, params: Params, seen: Seen, extent: int) -> Single:
        if not seen.keys:
            raise PlacementError("a GPT without blocks has no cache")
        cos, sin = rotations(seen.length, seen.keys[0].shape[3], seen.keys[0])
        past = torch.arange(extent, device=cos.device)

        def single(tokens: Tensor, position: Tensor) -> Tensor:
            allowed = (past <= position)[None, None, None]
            if self.window is not None:
                allowed = allowed & (past > position - self.window)
            turn = cos[position], sin[position]
            if seen.mask is not None:
                real = seen.mask[:, :extent]
                at = ((real & (past <= position)).sum(1, keepdim=True) - 1).clamp_min(0)
                turn = cos[at][:, None], sin[at][:, None]
                allowed = allowed & real[:, None, None]
            x = F.embedding(tokens, params["embed"])
            return self._through(params, x, seen, (position, extent), turn, allowed)

        return single

    def _through(
        self,
        params: Params,
        x: Tensor,
        seen: Seen,
        where: tuple[slice | Tensor, int],
        turn: tuple[Tensor, Tensor],
        allowed: Tensor,
    ) -> Tensor:
        """``[b, t, w]`` through all blocks, with a cache written in place; the last logits."""
        how: dict[str, Any] = {
            "where": where,
            "turn": turn,
            "heads": self.config.heads,
            "allowed": allowed,
        }
        for p, keys, values in zip(params["blocks"], seen.keys, seen.values, strict=True):
            x = zf.layer(partial(_block_with, **how), p, x, keys, values)
        x = F.layer_norm(x[:, -1], (self.config.width,), params["norm"])
        return F.linear(x, params["embed"] if self.config.tied else params["head"])

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
    where: tuple[slice | Tensor, int],
    turn: tuple[Tensor, Tensor],
    heads: int,
    allowed: Tensor,
) -> Tensor:
    """A block on tokens that go to ``where[0]`` of a cache, attending to it up to ``where[1]``."""
    qkv = F.linear(F.layer_norm(x, x.shape[-1:], params["norm1"]), params["qkv"])
    q, k, v = rearrange(qkv, "b t (three h d) -> three b h t d", three=3, h=heads)
    past = _written(keys, rotate(k, turn), *where), _written(values, v, *where)
    y = F.scaled_dot_product_attention(rotate(q, turn), *past, attn_mask=allowed)
    rows = _added(x.flatten(0, 1), rearrange(y, "b h t d -> (b t) (h d)"), params["out"])
    rows = _added(rows, hidden(params, rows), params["down"])
    return rows.view(x.shape)


def _written(cache: Tensor, new: Tensor, at: slice | Tensor, stop: int) -> Tensor:
    """The cache up to ``stop``, with ``[b, h, t, d]`` at a slice, or where a tensor says."""
    if isinstance(at, slice):
        cache[:, :, at] = new
    else:
        cache.index_copy_(2, at, new)
    return cache[:, :, :stop]


def _added(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    return blocks.added(x, y, {"weight": weight, "bias": None})
