"""Decoding with the GPT of :mod:`zfunc.language.gpt`: its key-value cache, and one step with it."""

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
from zfunc.huggingface import blocks
from zfunc.language.decoding import BoundStep, TensorStep, check_room
from zfunc.language.gpt import GPTConfig, Params, hidden, rotations
from zfunc.language.gpt_layers import rotate, split_of, whole
from zfunc.trees.nodes import part_of

__all__ = ["GPTCache", "GPTDecoder"]


@dataclass(frozen=True)
class GPTCache:
    """What a GPT has seen of ``b`` texts: a cache of static size.

    Attributes:
        keys, values: one ``[b, h, length, d]`` tensor for each block, of this rank's heads.
        rotations: cosines and sines of all positions, ``[length, d / 2]``.
        mask: ``[b, length]`` bool, False at padding (left of each text), or None.
        used: positions that are taken.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    rotations: tuple[Tensor, Tensor]
    mask: Tensor | None
    used: int = 0

    @property
    def length(self) -> int:
        """Of the whole cache, in positions."""
        return len(self.rotations[0])

    def advanced(self) -> GPTCache:
        """The same memory, when somebody has written one more token into it."""
        return replace(self, used=self.used + 1)


zf.tree.register(
    GPTCache,
    lambda cache: (
        (cache.keys, cache.values, cache.rotations, cache.mask),
        cache.used,
        ("keys", "values", "rotations", "mask"),
    ),
    lambda used, children: replace(GPTCache(*children), used=used),
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

    def step(self, params: Params, cache: Any, tokens: Tensor) -> tuple[Tensor, GPTCache]:
        """Take ``[b, t]`` tokens in; logits ``[b, vocab]`` behind the last, and the cache."""
        if not isinstance(cache, GPTCache):
            cache = self._empty(params, zf.embed(tokens[:, :1], params["embed"]), *cache)
        check_room(cache.used, tokens.shape[1], cache.length)
        stop = cache.used + tokens.shape[1]
        positions = torch.arange(cache.used, stop, device=tokens.device)
        logits = self._logits(params, cache, stop, tokens, positions)
        return logits, replace(cache, used=stop)

    @contextmanager
    def held(self, params: Params) -> Iterator[BoundStep]:
        yield BoundStep(partial(self.step, params), partial(self._single, params))

    def _single(self, params: Params, cache: GPTCache, length: int) -> TensorStep:
        return partial(self._logits, params, cache, length)

    def _logits(
        self, params: Params, cache: GPTCache, length: int, tokens: Tensor, positions: Tensor
    ) -> Tensor:
        """The last logits of ``[b, t]`` tokens, written into the cache at ``[t]`` positions.

        They attend to the first ``length`` positions of the cache, as far as they are filled.
        """
        x, past = zf.embed(tokens, params["embed"]), torch.arange(length, device=tokens.device)
        allowed = (past <= positions[:, None])[None, None]
        if self.window is not None:
            allowed = allowed & (past > positions[:, None] - self.window)
        cos, sin = cache.rotations
        if cache.mask is None:
            turn = cos[positions], sin[positions]
        else:
            real = cache.mask[:, :length]
            allowed = allowed & real[:, None, None]
            at = (real.long().cumsum(1) - 1).clamp_min(0)[:, positions]
            turn = cos[at][:, None], sin[at][:, None]
        block = partial(
            _block, positions=positions, turn=turn, features=self._features, allowed=allowed
        )
        for p, keys, values in zip(params["blocks"], cache.keys, cache.values, strict=True):
            x = zf.layer(block, p, x, keys, values)
        x = F.layer_norm(x[:, -1], (self.config.width,), params["norm"])
        return whole(zf.column(x, params["embed"] if self.config.tied else params["head"]))

    @property
    def _features(self) -> int:
        return self.config.width // self.config.heads

    def _heads(self, params: Params) -> int:
        """How many heads this rank has: what its part of a block makes, not the configuration."""
        if part_of(params["embed"]) is None or not self.config.depth:
            return self.config.heads
        rows: int = zf.layer(lambda p: len(p["qkv"]), params["blocks"][0])
        return rows // (3 * self._features)

    def _empty(self, params: Params, like: Tensor, batch: int, length: int, mask: Any) -> GPTCache:
        c = self.config
        shape = (batch, self._heads(params), length, self._features)
        keys, values = (tuple(like.new_zeros(shape) for _ in range(c.depth)) for _ in range(2))
        return GPTCache(keys, values, rotations(length, shape[3], like), mask)


def _block(
    params: Params,
    x: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    turn: tuple[Tensor, Tensor],
    features: int,
    allowed: Tensor,
) -> Tensor:
    """A block on tokens ``[b, t, w]`` at these positions, with keys and values written in place."""
    qkv = zf.column(F.layer_norm(x, x.shape[-1:], params["norm1"]), params["qkv"])
    q, k, v = rearrange(qkv, "b t (three h d) -> three b h t d", three=3, d=features)
    length = allowed.shape[-1]
    keys = keys.index_copy_(2, positions, rotate(k, turn))[:, :, :length]
    values = values.index_copy_(2, positions, v)[:, :, :length]
    y = F.scaled_dot_product_attention(rotate(q, turn), keys, values, attn_mask=allowed)
    rows = _added(x.flatten(0, 1), rearrange(y, "b h t d -> (b t) (h d)"), params["out"])
    rows = _added(rows, hidden(params, rows), params["down"])
    return rows.view(x.shape)


def _added(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    if split_of(weight) is not None:  # what is added to is added once, behind the sum over ranks
        return x + zf.row(y, weight)
    return blocks.added(x, y, {"weight": weight, "bias": None})
