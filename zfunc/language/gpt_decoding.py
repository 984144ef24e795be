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

__all__ = ["BlockMemory", "GPTCache", "GPTDecoder"]


class BlockMemory:
    """Keys and values ``[b, h, length, d]`` of one block, of this rank's heads: from its first
    tokens on."""

    __slots__ = ("keys", "values")

    def __init__(self, keys: Tensor | None = None, values: Tensor | None = None) -> None:
        self.keys, self.values = keys, values

    def put(self, k: Tensor, v: Tensor, positions: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Write ``[b, h, t, d]`` at ``[t]`` positions of ``length``; all keys and values."""
        if self.keys is None or self.values is None:
            shape = (*k.shape[:2], length, k.shape[3])
            self.keys, self.values = k.new_zeros(shape), v.new_zeros(shape)
        return self.keys.index_copy_(2, positions, k), self.values.index_copy_(2, positions, v)


@dataclass(frozen=True)
class GPTCache:
    """What a GPT has seen of ``b`` texts: a cache of static size.

    Attributes:
        blocks: what each block keeps.
        length: of the whole cache, in positions.
        mask: ``[b, length]`` bool, False at padding (left of each text), or None.
        used: positions that are taken.
        rotations: cosines and sines of all positions, ``[length, d / 2]``, once they are known.
    """

    blocks: tuple[BlockMemory, ...]
    length: int
    mask: Tensor | None
    used: int = 0
    rotations: tuple[Tensor, Tensor] | None = None

    @property
    def keys(self) -> tuple[Tensor | None, ...]:
        """Those of each block."""
        return tuple(block.keys for block in self.blocks)

    @property
    def values(self) -> tuple[Tensor | None, ...]:
        """Those of each block."""
        return tuple(block.values for block in self.blocks)

    def advanced(self) -> GPTCache:
        """The same memory, when somebody has written one more token into it."""
        return replace(self, used=self.used + 1)


zf.tree.register(
    GPTCache,
    lambda cache: (
        (cache.keys, cache.values, cache.rotations, cache.mask),
        (cache.length, cache.used),
        ("keys", "values", "rotations", "mask"),
    ),
    lambda static, children: GPTCache(
        tuple(map(BlockMemory, *children[:2])), static[0], children[3], static[1], children[2]
    ),
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

    def start(self, batch: int, length: int, mask: Tensor | None) -> GPTCache:
        """A cache whose blocks make room when they first have something to keep."""
        return GPTCache(tuple(BlockMemory() for _ in range(self.config.depth)), length, mask)

    def step(self, params: Params, cache: GPTCache, tokens: Tensor) -> tuple[Tensor, GPTCache]:
        """Take ``[b, t]`` tokens in; logits ``[b, vocab]`` behind the last, and the cache."""
        if cache.rotations is None:
            turns = rotations(cache.length, self._features, params["embed"])
            cache = replace(cache, rotations=turns)
        return self.write(params, cache, tokens), self.behind(cache, tokens)

    def behind(self, cache: GPTCache, tokens: Tensor) -> GPTCache:
        return replace(cache, used=cache.used + tokens.shape[1])

    def unfilled(self, cache: GPTCache) -> GPTCache:
        return replace(cache, blocks=tuple(BlockMemory() for _ in cache.blocks))

    def write(self, params: Params, cache: GPTCache, tokens: Tensor) -> Tensor:
        check_room(cache.used, tokens.shape[1], cache.length)
        stop = cache.used + tokens.shape[1]
        positions = torch.arange(cache.used, stop, device=tokens.device)
        return self._logits(params, cache, stop, tokens, positions)

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
        turns = cache.rotations or rotations(cache.length, self._features, params["embed"])
        cos, sin = turns
        if cache.mask is None:
            turn = cos[positions], sin[positions]
        else:
            real = cache.mask[:, :length]
            allowed = allowed & real[:, None, None]
            at = (real.long().cumsum(1) - 1).clamp_min(0)[:, positions]
            turn = cos[at][:, None], sin[at][:, None]
        how: dict[str, Any] = {"positions": positions, "turn": turn, "features": self._features}
        block: Any = partial(_block, allowed=allowed, room=cache.length, **how)
        for p, memory in zip(params["blocks"], cache.blocks, strict=True):
            x = zf.layer(block, p, x, memory)
        x = F.layer_norm(x[:, -1], (self.config.width,), params["norm"])
        return whole(zf.column(x, params["embed"] if self.config.tied else params["head"]))

    @property
    def _features(self) -> int:
        return self.config.width // self.config.heads


def _block(
    params: Params,
    x: Tensor,
    memory: BlockMemory,
    positions: Tensor,
    turn: tuple[Tensor, Tensor],
    features: int,
    allowed: Tensor,
    room: int,
) -> Tensor:
    """A block on tokens ``[b, t, w]`` at these positions, with keys and values written in place."""
    qkv = zf.column(F.layer_norm(x, x.shape[-1:], params["norm1"]), params["qkv"])
    q, k, v = rearrange(qkv, "b t (three h d) -> three b h t d", three=3, d=features)
    length = allowed.shape[-1]
    keys, values = (x[:, :, :length] for x in memory.put(rotate(k, turn), v, positions, room))
    y = F.scaled_dot_product_attention(rotate(q, turn), keys, values, attn_mask=allowed)
    rows = _added(x.flatten(0, 1), rearrange(y, "b h t d -> (b t) (h d)"), params["out"])
    rows = _added(rows, hidden(params, rows), params["down"])
    return rows.view(x.shape)


def _added(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    if split_of(weight) is not None:  # what is added to is added once, behind the sum over ranks
        return x + zf.row(y, weight)
    return blocks.added(x, y, {"weight": weight, "bias": None})
