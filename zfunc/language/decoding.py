"""One step of decoding as a pure function ``(params, cache, tokens) -> (logits, cache)``.

A *decoder* says how a model starts a cache of static size and takes tokens into it:
Hugging Face models through transformers' own static cache, and any other causal module
by running the whole text again. :mod:`zfunc.language.gpt_decoding` has that of the built-in GPT.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from zfunc.errors import PlacementError
from zfunc.modules.functional import Functional
from zfunc.nodes import register

__all__ = ["Decoder", "HuggingFace", "Replay", "check_room", "decoder_of"]


@runtime_checkable
class Decoder(Protocol):
    """How a model decodes; shapes are ``b`` texts, ``t`` tokens."""

    limit: int | None  # positions that the model knows, if it is limited
    vocab: int | None

    def start(self, batch: int, length: int, mask: Tensor | None) -> Any:
        """An empty cache for ``length`` positions.

        Args:
            mask: ``[b, length]`` bool, False at padding (left of each text), or None.
        """

    def step(self, params: Any, cache: Any, tokens: Tensor) -> tuple[Tensor, Any]:
        """Take ``tokens`` ``[b, t]`` in behind what the cache has.

        Returns:
            Logits of the position behind the last token, ``[b, vocab]``, and the new
            cache. The old one's memory may have been reused.

        Raises:
            ValueError: the cache has no room for them.
        """


def check_room(used: int, taken: int, length: int) -> None:
    """Raise ``ValueError`` where a cache with ``used`` positions cannot take ``taken`` more."""
    if used + taken > length:
        raise ValueError(
            f"the cache is full: {used} of its {length} positions are taken and {taken} more were "
            "given. Start it for as many positions as prompt and new tokens have together."
        )


def decoder_of(functional: Any) -> Decoder:
    """The decoder of a model.

    Raises:
        PlacementError: there is none: an encoder-decoder, or no model at all.
    """
    if isinstance(functional, Decoder):
        return functional
    if not isinstance(functional, Functional):
        raise PlacementError(
            f"generate got a {type(functional).__name__}; expected zf.functionalize(model), or a "
            "decoder with `start` and `step` (zfunc.language.decoding.Decoder)."
        )
    config = functional.config
    if getattr(config, "is_encoder_decoder", False):
        raise PlacementError(
            f"{functional!r} is an encoder-decoder; zf.generate continues texts with causal "
            "language models."
        )
    if hasattr(config, "get_text_config") and "past_key_values" in functional.signature.parameters:
        return HuggingFace(functional)
    return Replay(functional)


@dataclass(frozen=True)
class Row:
    """One layer of a cache: its class, what it holds, and which of that are tensors."""

    kind: type
    names: tuple[str, ...]
    rest: tuple[tuple[str, Any], ...]


class Cache:
    """What a Hugging Face model has seen: a pytree of the static layers' tensors.

    Attributes:
        tensors: those of all layers, and last the mask, if there is one.
        rows: how they make up layers; empty before the first tokens.
        length: of the whole cache, in positions.
        used: positions that are taken.
    """

    def __init__(
        self, tensors: Sequence[Tensor], rows: tuple[Row, ...], length: int, used: int
    ) -> None:
        self.tensors, self.rows, self.length, self.used = tuple(tensors), rows, length, used

    def __repr__(self) -> str:
        return f"Cache({self.used} of {self.length} positions, {len(self.rows)} layers)"


register(
    Cache,
    lambda c: (c.tensors, (c.rows, c.length, c.used), tuple(range(len(c.tensors)))),
    lambda static, tensors: Cache(tensors, *static),
)


class HuggingFace:
    """Any causal model of transformers that takes a ``StaticCache``.

    Args:
        functional: the model, from ``zf.functionalize``.
    """

    def __init__(self, functional: Functional) -> None:
        text = functional.config.get_text_config(decoder=True)
        self._functional = functional
        self._takes = functional.signature.parameters
        self.limit = getattr(text, "max_position_embeddings", None)
        self.vocab = getattr(text, "vocab_size", None)
        # Containers of layers by length: to build one out of a config takes as long as a layer.
        self._shells: dict[int, Any] = {}

    def start(self, batch: int, length: int, mask: Tensor | None) -> Cache:
        return Cache(() if mask is None else (mask,), (), length, 0)

    def step(self, params: Any, cache: Cache, tokens: Tensor) -> tuple[Tensor, Cache]:
        mask = cache.tensors[-1] if len(cache.tensors) > _count(cache.rows) else None
        stop = cache.used + tokens.shape[1]
        check_room(cache.used, tokens.shape[1], cache.length)
        layers = self._layers(cache)
        given: dict[str, Any] = {"past_key_values": layers, "use_cache": True}
        taken = (torch.arange(cache.length, device=tokens.device) < stop).expand(len(tokens), -1)
        if mask is not None:
            taken = taken & mask
        # As long as the cache, since some models (ALiBi) take the number of keys from it.
        given["attention_mask"] = taken.long()
        if "position_ids" in self._takes:
            positions = (given["attention_mask"].cumsum(dim=1) - 1).clamp_min(0)
            given["position_ids"] = positions[:, cache.used : stop]
        if "logits_to_keep" in self._takes:
            given["logits_to_keep"] = 1
        out = self._functional.apply(params, tokens, train=False, **given)
        if not isinstance(getattr(out, "logits", None), Tensor):
            raise PlacementError(
                f"{self._functional!r} returned {type(out).__name__}, without logits: generate "
                "needs the model with its language head (AutoModelForCausalLM)."
            )
        tensors, rows = _taken_apart(layers)
        new = Cache([*tensors, *([] if mask is None else [mask])], rows, cache.length, stop)
        return out.logits[:, -1], new

    def _layers(self, cache: Cache) -> Any:
        from transformers import StaticCache

        config, length = self._functional.config, cache.length
        if not cache.rows:
            return StaticCache(config=config, max_cache_len=length)
        if length not in self._shells:
            self._shells[length] = StaticCache(config=config, max_cache_len=length)
        layers = copy.copy(self._shells[length])
        tensors = iter(cache.tensors)
        layers.layers = []
        for row in cache.rows:
            layer: Any = object.__new__(row.kind)
            layer.__dict__.update(row.rest)
            layer.__dict__.update((name, next(tensors)) for name in row.names)
            layers.layers.append(layer)
        return layers


def _count(rows: Sequence[Row]) -> int:
    return sum(len(row.names) for row in rows)


def _taken_apart(layers: Any) -> tuple[list[Tensor], tuple[Row, ...]]:
    tensors: list[Tensor] = []
    rows = []
    for layer in layers.layers:
        held = {k: v for k, v in layer.__dict__.items() if isinstance(v, Tensor)}
        rest = tuple((k, v) for k, v in layer.__dict__.items() if k not in held)
        tensors.extend(held.values())
        rows.append(Row(type(layer), tuple(held), rest))
    return tensors, tuple(rows)


class Replay:
    """Any causal module from ids ``[b, t]`` to logits ``[b, t, vocab]``: the text is the cache.

    Each step runs the whole text. Padding is not supported, since nothing says how the
    module would take a mask.
    """

    def __init__(self, functional: Functional) -> None:
        self._functional = functional
        self.limit: int | None = None
        self.vocab: int | None = None

    def start(self, batch: int, length: int, mask: Tensor | None) -> Tensor:
        if mask is not None:
            raise PlacementError(
                f"{self._functional!r} has no cache and no mask that zf.generate knows of: texts "
                "of different lengths are generated one by one (or give a decoder of your own)."
            )
        return torch.zeros(batch, 0, dtype=torch.int64)

    def step(self, params: Any, cache: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        ids = torch.cat([cache.to(tokens.device), tokens], dim=1)
        out = self._functional.apply(params, ids, train=False)
        logits = getattr(out, "logits", out)
        if not isinstance(logits, Tensor) or logits.ndim != 3:
            raise PlacementError(
                f"{self._functional!r} returned {type(out).__name__} for ids of shape "
                f"{tuple(ids.shape)}; expected logits [b, t, vocab]."
            )
        return logits[:, -1], ids
