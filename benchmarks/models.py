"""The model and the data that every contestant gets: a plain GPT, seeded, of two sizes.

The model is an ordinary ``nn.Module`` that knows nothing of zfunc. Shapes: B batch, T tokens,
D width, H heads, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LEARNING_RATE = 3e-4
WEIGHT_DECAY = 0.01


@dataclass(frozen=True)
class Size:
    """What fixes a model's shape and one rank's batch."""

    layers: int
    width: int
    heads: int
    vocab: int
    tokens: int = 128
    batch: int = 4  # sequences per rank and step


SIZES = {
    "tiny": Size(layers=2, width=64, heads=2, vocab=256),  # to try the program itself
    "small": Size(layers=8, width=512, heads=8, vocab=8192),
    "medium": Size(layers=12, width=768, heads=12, vocab=16384),
}


class Block(nn.Module):
    """Pre-LN causal attention and a GELU MLP: ``[B, T, D] -> [B, T, D]``."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attn_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.attn_norm(x))
        q, k, v = qkv.unflatten(-1, (3, self.heads, -1)).permute(
            2, 0, 3, 1, 4
        )  # each [B, H, T, D/H]
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class GPT(nn.Module):
    """Token ids ``[B, T]`` to logits ``[B, T, V]``; embedding and head are not tied."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed = nn.Embedding(size.vocab, size.width)
        self.position = nn.Embedding(size.tokens, size.width)
        self.blocks = nn.ModuleList(Block(size.width, size.heads) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocab, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.position.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build(size: Size) -> GPT:
    """The model with the weights that every contestant starts from (seed 0)."""
    torch.manual_seed(0)
    return GPT(size)


def batches(size: Size, rank: int) -> Iterator[Tensor]:
    """An endless stream of ids ``[batch, tokens]``, int64: the same for a rank in every run."""
    draw = torch.Generator().manual_seed(1 + rank)
    while True:
        yield torch.randint(0, size.vocab, (size.batch, size.tokens), generator=draw)


def loss_of(logits: Tensor, ids: Tensor) -> Tensor:
    """Mean cross-entropy of ``logits`` ``[B, T, V]`` for ``ids`` ``[B, T]``, a 0-d tensor."""
    return F.cross_entropy(logits.flatten(0, 1), ids.flatten())
