"""Choosing the next token: greedy, temperature, top-k, top-p, from functional keys."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zfunc.ranks import random

__all__ = ["check_sampling", "next_token", "restrict_to_mass", "restrict_to_top"]


def check_sampling(
    temperature: float, top_k: int | None, top_p: float | None, key: Tensor | int | None
) -> None:
    """Raise ``ValueError`` for settings that mean nothing.

    >>> check_sampling(1.0, None, None, None)
    Traceback (most recent call last):
    ...
    ValueError: temperature=1.0 draws tokens at random: pass key=zf.random.key(0), or temperature=0.
    """
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature={temperature!r}: expected a number >= 0; 0 is greedy.")
    if top_k is not None and (type(top_k) is not int or top_k < 1):
        raise ValueError(f"top_k={top_k!r}: expected how many tokens to draw from, at least 1.")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p={top_p!r}: expected a probability, 0 < top_p <= 1.")
    if temperature > 0 and key is None:
        raise ValueError(
            f"temperature={temperature!r} draws tokens at random: pass key=zf.random.key(0), or "
            "temperature=0."
        )


def next_token(
    logits: Tensor,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    key: Tensor | int | Sequence[Tensor] | None = None,
) -> Tensor:
    """One token for each row.

    Args:
        logits: ``[b, vocab]``, of any floating dtype.
        temperature: 0 takes the likeliest token; else logits are divided by it.
        top_k: draw from the ``top_k`` likeliest ones only.
        top_p: draw from the fewest tokens whose probabilities add up to ``top_p``
            (Holtzman et al., The Curious Case of Neural Text Degeneration, 2020).
        key: a random key, the rows' draws are independent; or a list with a key for each row.

    Returns:
        ``[b]`` int64.

    >>> next_token(torch.tensor([[0.0, 3.0, 1.0]]))
    tensor([1])
    """
    logits = logits.float()
    if temperature == 0:
        return logits.argmax(dim=-1)
    assert key is not None
    logits = logits / temperature
    if top_k is not None:
        logits = restrict_to_top(logits, top_k)
    if top_p is not None:
        logits = restrict_to_mass(logits, top_p)
    # The largest of logits plus Gumbel noise is a draw from the softmax.
    noise = _uniform(key, logits)
    return (logits - (-noise.clamp_min(1e-300).log()).log()).argmax(dim=-1)


def _uniform(key: Tensor | int | Sequence[Tensor], like: Tensor) -> Tensor:
    if isinstance(key, Tensor | int):
        return random.uniform(key, like.shape, torch.float64, device=like.device)
    rows = [random.uniform(k, like.shape[1:], torch.float64, device=like.device) for k in key]
    return torch.stack(rows)


def restrict_to_top(logits: Tensor, k: int) -> Tensor:
    """``-inf`` outside the ``k`` largest of each row; ties with the k-th stay.

    >>> restrict_to_top(torch.tensor([[1.0, 3.0, 2.0]]), 2)
    tensor([[-inf, 3., 2.]])
    """
    least = logits.topk(min(k, logits.shape[-1]), dim=-1).values[..., -1:]
    return logits.masked_fill(logits < least, -torch.inf)


def restrict_to_mass(logits: Tensor, p: float) -> Tensor:
    """``-inf`` outside the fewest tokens of each row whose probabilities reach ``p``.

    >>> restrict_to_mass(torch.tensor([[0.5, 0.3, 0.2]]).log(), 0.6).exp()
    tensor([[0.5000, 0.3000, 0.0000]])
    """
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    probabilities = ordered.double().softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    outside = torch.zeros_like(before, dtype=torch.bool).scatter(-1, order, before >= p)
    return logits.masked_fill(outside, -torch.inf)
