"""``generate``: continue texts, one token at a time, with any causal model."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from zfunc.engine.differentiation import evaluate
from zfunc.language.decoding import CacheStep, Decoder, bound, decoder_of
from zfunc.language.decoding_graph import graphed
from zfunc.language.sampling import check_sampling, next_token
from zfunc.language.staged_generation import comes_apart, staged_columns
from zfunc.ranks import random
from zfunc.transforms.pipelining.repeated import stages_of

__all__ = ["generate"]

CHUNK = 512  # prompt tokens taken in at once: bounds what prefill holds


def generate(
    functional: Any,
    params: Any,
    ids: Tensor,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    key: Tensor | int | None = None,
    attention_mask: Tensor | None = None,
    stop: int | Iterable[int] = (),
    stream: Callable[[Tensor], Any] | None = None,
    capture: bool | None = None,
) -> Tensor:
    """Continue texts.

    Args:
        functional: ``zf.functionalize(model)`` of a causal language model, of Hugging Face
            or any that maps ids to logits; or a decoder (``GPTDecoder(config)``).
        params: its parameters, plain, quantised or placed; with placed ones it is a
            collective. Ranks along ``data`` may have other texts than each other.
        ids: ``[b, t]`` int64 prompts, or ``[t]`` for one.
        max_new_tokens: how many to add at most.
        temperature: 0 takes the likeliest token each time; 1 draws from the model.
        top_k, top_p: draw from the likeliest tokens only, see
            :func:`zfunc.language.sampling.next_token`.
        key: a random key, needed where ``temperature > 0``; or one for each text,
            ``zf.random.split(key, b)``. What is drawn for a text depends on the key, on its prompt,
            and on how many texts above it have the same prompt: not on the other texts of the
            batch, nor on padding.
        attention_mask: ``[b, t]``, 0 at padding (on either side) and 1 elsewhere.
        stop: token ids at which a text ends. It then goes on with that token; once all
            texts have ended generation stops.
        stream: called with each new column of tokens, ``[b]``.
        capture: replay single tokens as CUDA graphs (:mod:`zfunc.language.decoding_graph`). None:
            on a GPU, where the model's step can be recorded and texts are long enough to be worth
            it; what cannot runs eagerly, and the logger ``zfunc`` says why. True insists on it,
            False never does.

    Returns:
        ``[b, t + n]`` int64: the prompts as given, and what follows.

    Raises:
        ValueError: no room in the model's positions, ids that are no tensor or outside its
            vocabulary, empty prompts, or settings that mean nothing.
        PlacementError: ``functional`` is no causal language model; with ``capture=True``, its step
            cannot be captured.

    >>> import zfunc as zf
    >>> count = zf.functionalize(torch.nn.Embedding(4, 4))  # token i is followed by i + 1
    >>> params = {"weight": torch.eye(4).roll(1, dims=1)}
    >>> generate(count, params, torch.tensor([[0], [2]]), max_new_tokens=3)
    tensor([[0, 1, 2, 3],
            [2, 3, 0, 1]])
    """
    check_sampling(temperature, top_k, top_p, key)
    _check_tensors(ids, attention_mask)
    alone = ids.ndim == 1
    if alone:
        ids, attention_mask = ids[None], None if attention_mask is None else attention_mask[None]
    decoder = decoder_of(functional)
    _check(decoder, ids, attention_mask, max_new_tokens)
    if isinstance(key, Tensor) and key.ndim and key.shape != ids.shape[:1]:
        raise ValueError(
            f"key has shape {tuple(key.shape)} for {len(ids)} texts: pass one key, or one for each "
            "text, zf.random.split(key, len(ids))."
        )
    prompt, mask = _aligned(ids, attention_mask, max_new_tokens)
    keys = None if key is None else _keys(key, prompt, mask)
    every = slice(None)
    ends = torch.tensor([stop] if isinstance(stop, int) else list(stop), device=ids.device).long()

    def choose(logits: Tensor, n: int, rows: slice = every) -> Tensor:
        folded = keys and [random.fold_in(k, n) for k in keys[rows]]
        return next_token(logits, temperature, top_k, top_p, folded).to(ids.device)

    def collected(columns: Iterator[Tensor]) -> Tensor:
        out = [ids]
        for column in columns:
            out.append(column)
            if stream is not None:
                stream(column[:, 0])
        return torch.cat(out, dim=1)

    def run(entered: Any) -> Tensor:
        cache = decoder.start(len(ids), prompt.shape[1] + max_new_tokens, mask)
        with bound(decoder, entered) as step:
            single = graphed(step, params, ids.device, max_new_tokens - 1, capture)
            for part in parts:
                logits, cache = step(cache, part)
            return collected(_columns(single, logits, cache, choose, max_new_tokens, ends))

    parts = prompt.split(CHUNK, dim=1)
    if not max_new_tokens:
        out = ids.clone()
    elif capture is not True and stages_of(params) and comes_apart(decoder):
        drawn = temperature, top_k, top_p, None if keys is None else [int(k) for k in keys]
        how: Any = (choose, max_new_tokens, ends, drawn)
        out = collected(staged_columns(decoder, params, parts, mask, *how))
    else:
        out = evaluate(run)(params)
    return out[0] if alone else out


def _columns(
    step: CacheStep,
    logits: Tensor,
    cache: Any,
    choose: Callable[[Tensor, int], Tensor],
    count: int,
    ends: Tensor,
) -> Iterator[Tensor]:
    """What follows, ``[b, 1]`` at a time. A text that has ended repeats the token at which it did.

    Args:
        step: for single tokens.
        logits, cache: behind the prompt.
        choose: ``(logits, n)`` -> the n-th new token of each text.
        count: how many tokens at most.
        ends: tokens that end a text; once all texts have ended nothing follows.
    """
    column, done = None, None
    for n in range(count):
        chosen = choose(logits, n)[:, None]
        column = chosen if column is None or done is None else torch.where(done, column, chosen)
        yield column
        if n + 1 == count:
            return
        if len(ends):
            done = torch.isin(column, ends)
            if bool(done.all()):
                return
        logits, cache = step(cache, column)


def _keys(key: Tensor | int, prompt: Tensor, mask: Tensor | None) -> list[Tensor]:
    """A key for each text, the same in whatever batch it comes."""
    if isinstance(key, Tensor) and key.ndim:
        return list(key)
    keys, seen = [], Counter[int]()
    for i, row in enumerate(prompt.cpu()):
        text = row if mask is None else row[mask[i, : len(row)].cpu()]
        print_ = zlib.crc32(text.to(torch.int64).numpy().tobytes())
        keys.append(random.fold_in(random.fold_in(key, print_), seen[print_]))
        seen[print_] += 1
    return keys


def _aligned(ids: Tensor, mask: Tensor | None, count: int) -> tuple[Tensor, Tensor | None]:
    """Prompts whose padding, if they have any, is on the left; and the mask of the whole cache."""
    if mask is None or bool(mask.bool().all()):
        return ids, None
    real = mask.bool()
    width = int(real.sum(dim=1).max())
    # Stable: real tokens keep their order and go to the right end.
    order = real.to(torch.int8).argsort(dim=1, stable=True)[:, -width:]
    ones = real.new_ones(len(ids), count)
    return ids.gather(1, order), torch.cat([real.gather(1, order), ones], dim=1)


def _check_tensors(ids: Any, mask: Any) -> None:
    for name, x in (("ids", ids), ("attention_mask", mask)):
        if not isinstance(x, Tensor) and not (x is mask is None):
            raise ValueError(
                f"{name}: a {type(x).__name__}; expected a tensor [b, t]. A tokenizer gives both: "
                'texts = tokenizer(..., padding=True, return_tensors="pt"), texts.input_ids and '
                "texts.attention_mask."
            )


def _check(decoder: Decoder, ids: Tensor, mask: Tensor | None, count: int) -> None:
    if ids.ndim != 2 or ids.is_floating_point() or not ids.numel():
        raise ValueError(
            f"ids: a {ids.dtype} tensor of shape {tuple(ids.shape)}; expected integers [b, t] with "
            "at least one token each (start empty texts with the model's first token)."
        )
    if type(count) is not int or count < 0:
        raise ValueError(f"max_new_tokens={count!r}: expected a number of tokens, at least 0.")
    if decoder.limit is not None and ids.shape[1] + count > decoder.limit:
        raise ValueError(
            f"{ids.shape[1]} tokens of prompt and {count} new ones are more than the "
            f"{decoder.limit} positions that the model knows: shorten the prompt, or pass "
            f"max_new_tokens={max(0, decoder.limit - ids.shape[1])}."
        )
    if int(ids.min()) < 0 or (decoder.vocab is not None and int(ids.max()) >= decoder.vocab):
        raise ValueError(
            f"ids lie between {int(ids.min())} and {int(ids.max())}; the model's vocabulary has "
            f"{decoder.vocab} tokens. Is this the tokenizer of this model?"
        )
    if mask is None:
        return
    if mask.shape != ids.shape:
        raise ValueError(
            f"attention_mask has shape {tuple(mask.shape)}, ids have {tuple(ids.shape)}."
        )
    if not bool(mask.bool().any(dim=1).all()):
        row = int((~mask.bool().any(dim=1)).nonzero()[0])
        raise ValueError(f"attention_mask: text {row} is nothing but padding.")
