"""One step of decoding as a pure function ``(params, cache, tokens) -> (logits, cache)``.

A *decoder* says how a model starts a cache of static size and takes tokens into it. Models of
Hugging Face decode through transformers' cache interface, any other causal module by running the
whole text again. :mod:`zfunc.language.gpt_decoding` has the decoder of the built-in GPT.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zfunc.errors import PlacementError
from zfunc.modules.functional import Functional
from zfunc.trees.nodes import register

__all__ = [
    "BoundStep",
    "CacheStep",
    "Decoder",
    "HuggingFaceDecoder",
    "StagedDecoder",
    "TensorStep",
    "UncachedDecoder",
    "bound",
    "check_room",
    "decoder_of",
]


CacheStep = Callable[[Any, Tensor], tuple[Tensor, Any]]
"""``(cache, tokens [b, t]) -> (logits [b, vocab], cache)``."""
TensorStep = Callable[[Tensor, Tensor], Tensor]
"""``(tokens [b, 1], position [1]) -> logits [b, vocab]``: a token by nothing but tensors."""


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


@runtime_checkable
class StagedDecoder(Decoder, Protocol):
    """A decoder whose model stages of a pipeline can run, each of which has some layers.

    Layers keep what they have to keep in objects that they are given.
    """

    def write(self, params: Any, cache: Any, tokens: Tensor) -> Tensor:
        """The logits of ``step``; layers that run keep what is theirs in this very cache."""

    def behind(self, cache: Any, tokens: Tensor) -> Any:
        """The same memory behind these tokens, which somebody has written into it."""

    def unfilled(self, cache: Any) -> Any:
        """A cache that is as far as this one and has no memory, for a run on shapes alone.

        Raises:
            PlacementError: it is of a kind that does not come apart into stages.
        """


@dataclass(frozen=True)
class BoundStep:
    """A decoder's step on parameters that are bound.

    Attributes:
        step: ``(cache, tokens) -> (logits, cache)``.
        single: ``(cache, length)`` -> the same for one token of each text as a function of tensors
            only: it writes into this cache's memory at the position that it is given, and attends
            to the first ``length`` positions, as far as they are filled. It raises PlacementError
            for caches on which ``step`` cannot be repeated. None if there is none.
    """

    step: CacheStep
    single: Callable[[Any, int], TensorStep] | None = None

    def __call__(self, cache: Any, tokens: Tensor) -> tuple[Tensor, Any]:
        return self.step(cache, tokens)


def bound(decoder: Decoder, params: Any) -> AbstractContextManager[CacheStep]:
    """A block in which a decoder steps on the same parameters: ``step(cache, tokens)``.

    A decoder may have a ``held(params)`` of its own, that does once what all steps share. Where it
    yields a :class:`BoundStep` with ``single``, steps can be captured
    (:mod:`zfunc.language.decoding_graph`).
    """
    own = getattr(decoder, "held", None)
    return nullcontext(partial(decoder.step, params)) if own is None else own(params)


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
        return HuggingFaceDecoder(functional)
    return UncachedDecoder(functional)


@dataclass(frozen=True, eq=False)
class HuggingFaceCache:
    """What a Hugging Face model has seen: a pytree of its layers' tensors, and of the mask.

    Attributes:
        shell: transformers' cache of this length, as it was made.
        layers: what it holds now.
        mask: ``[b, length]`` bool, False at padding, or None.
        length: of the whole cache, in positions.
        used: positions that are taken.
    """

    shell: Any
    layers: tuple[Any, ...]
    mask: Tensor | None
    length: int
    used: int = 0

    def advanced(self) -> HuggingFaceCache:
        """The same memory, when somebody has written one more token into it."""
        layers = tuple(_copied(layer, used=layer.used + 1) for layer in self.layers)
        return replace(self, layers=layers, used=self.used + 1)

    def filled_with(self, layers: list[Any]) -> Any:
        """transformers' cache with these layers."""
        cache = copy.copy(self.shell)
        cache.layers = layers
        return cache

    @property
    def has_prefixes(self) -> bool:
        """Whether all layers are prefix layers (:mod:`zfunc.language.kv_cache`)."""
        return all(hasattr(layer, "used") for layer in self.layers)

    def __repr__(self) -> str:
        return (
            f"HuggingFaceCache({self.used} of {self.length} positions, {len(self.layers)} layers)"
        )


def kv_cache() -> Any:
    """Layers of caches; it takes transformers, which not everybody has."""
    from zfunc.language import kv_cache

    return kv_cache


def _copied(layer: Any, **changed: Any) -> Any:
    new = copy.copy(layer)
    new.__dict__.update(changed)
    return new


def _tensors(layer: Any) -> dict[str, Tensor]:
    return {name: x for name, x in layer.__dict__.items() if isinstance(x, Tensor)}


register(
    HuggingFaceCache,
    lambda c: (
        ([_tensors(layer) for layer in c.layers], c.mask),
        (c.shell, c.layers, c.length, c.used),
        ("layers", "mask"),
    ),
    lambda static, children: HuggingFaceCache(
        static[0],
        tuple(_copied(layer, **x) for layer, x in zip(static[1], children[0], strict=True)),
        children[1],
        *static[2:],
    ),
)


class HuggingFaceDecoder:
    """Any causal model of transformers that takes a cache.

    Its layers are :class:`zfunc.language.kv_cache.PrefixLayer` where the model keeps keys and
    values of all positions, else those of a ``StaticCache``.

    Args:
        functional: the model, from ``zf.functionalize``.
        fused: let layers of known types take single tokens in few operations
            (:mod:`zfunc.huggingface.decoder_layers`).
    """

    def __init__(self, functional: Functional, *, fused: bool = True) -> None:
        text = functional.config.get_text_config(decoder=True)
        self._functional = functional.fused(_fuse_decoder_layers) if fused else functional
        self._takes = functional.signature.parameters
        self.limit = getattr(text, "max_position_embeddings", None)
        self.vocab = getattr(text, "vocab_size", None)

    def start(self, batch: int, length: int, mask: Tensor | None) -> HuggingFaceCache:
        from transformers import StaticCache

        shell = StaticCache(config=self._functional.config, max_cache_len=length)
        layers = kv_cache().prefix_layers(shell.layers, length)
        return HuggingFaceCache(shell, tuple(layers), mask, length)

    def step(
        self, params: Any, cache: HuggingFaceCache, tokens: Tensor
    ) -> tuple[Tensor, HuggingFaceCache]:
        return self._step(partial(self._functional.apply, params, train=False), cache, tokens)

    def write(self, params: Any, cache: HuggingFaceCache, tokens: Tensor) -> Tensor:
        for layer in cache.layers:  # a stage that has two parts of the model comes twice
            kv_cache().count(layer, cache.used)
        past = cache.filled_with(list(cache.layers))
        apply = partial(self._functional.apply, params, train=False)
        return self._continued(apply, cache, past, tokens)

    def behind(self, cache: HuggingFaceCache, tokens: Tensor) -> HuggingFaceCache:
        used = cache.used + tokens.shape[1]
        for layer in cache.layers:
            kv_cache().pass_by(layer, used)
        return replace(cache, used=used)

    def unfilled(self, cache: HuggingFaceCache) -> HuggingFaceCache:
        known = kv_cache().COUNTED
        if other := sorted({type(x).__name__ for x in cache.layers if type(x) not in known}):
            raise PlacementError(f"its cache has layers of other kinds: {', '.join(other)}")
        layers = (kv_cache().without_memory(layer, cache.used) for layer in cache.layers)
        return replace(cache, layers=tuple(layers))

    @contextmanager
    def held(self, params: Any) -> Iterator[BoundStep]:
        with self._functional.held(params, train=False) as call:
            yield BoundStep(partial(self._step, call), partial(self._single, call))

    def _step(
        self, call: Callable[..., Any], cache: HuggingFaceCache, tokens: Tensor
    ) -> tuple[Tensor, HuggingFaceCache]:
        past = cache.filled_with([_copied(layer) for layer in cache.layers])
        logits = self._continued(call, cache, past, tokens)
        used = cache.used + tokens.shape[1]
        return logits, replace(cache, layers=tuple(past.layers), used=used)

    def _continued(
        self, call: Callable[..., Any], cache: HuggingFaceCache, past: Any, tokens: Tensor
    ) -> Tensor:
        """The last logits of tokens behind what ``past`` has, a cache of transformers."""
        check_room(cache.used, tokens.shape[1], cache.length)
        stop = cache.used + tokens.shape[1]
        positions = torch.arange(cache.used, stop, device=tokens.device).expand(len(tokens), -1)
        taken = None if cache.mask is None else cache.mask[:, :stop].long()
        if taken is not None:
            positions = (taken.cumsum(dim=1) - 1).clamp_min(0)[:, cache.used :]
        if not cache.has_prefixes:
            # As long as the cache, since some models (ALiBi) take the number of keys from it.
            taken = positions.new_ones(len(tokens), stop) if taken is None else taken
            taken = F.pad(taken, (0, cache.length - stop))
        return self._logits(call, tokens, past, taken, position_ids=positions)

    def _single(self, call: Callable[..., Any], cache: HuggingFaceCache, length: int) -> TensorStep:
        if not cache.has_prefixes:
            kinds = sorted({type(layer).__name__ for layer in cache.layers})
            raise PlacementError(f"its cache has layers of other kinds: {', '.join(kinds)}")

        def single(tokens: Tensor, position: Tensor) -> Tensor:
            rows = position.repeat(len(tokens))
            past = cache.filled_with(
                [
                    kv_cache().CapturableLayer(layer, position, rows, length)
                    for layer in cache.layers
                ]
            )
            taken = (torch.arange(length, device=tokens.device) <= position).expand(len(tokens), -1)
            positions = rows[:, None]
            if cache.mask is not None:
                taken = taken & cache.mask[:, :length]
                positions = (taken.sum(dim=1, keepdim=True) - 1).clamp_min(0)
            known = {"position_ids": positions, "cache_position": position}
            return self._logits(call, tokens, past, taken.long(), **known)

        return single

    def _logits(
        self,
        call: Callable[..., Any],
        tokens: Tensor,
        past: Any,
        mask: Tensor | None,
        **optional: Tensor,
    ) -> Tensor:
        """The model's last logits; of the optional arguments it gets those that it takes."""
        # What the routers of experts chose is for a loss, whatever the model's config asks for.
        given = {"logits_to_keep": 1, "output_router_logits": False, **optional}
        given = {name: value for name, value in given.items() if name in self._takes}
        out = call(tokens, past_key_values=past, use_cache=True, attention_mask=mask, **given)
        logits = getattr(out, "logits", None)
        if not isinstance(logits, Tensor):
            raise PlacementError(
                f"{self._functional!r} returned {type(out).__name__}, without logits: generate "
                "needs the model with its language head (AutoModelForCausalLM)."
            )
        return logits[:, -1]


def _fuse_decoder_layers(module: nn.Module) -> None:
    from zfunc.huggingface import decoder_layers  # kernels are imported where they are asked for

    decoder_layers.fuse(module)


class UncachedDecoder:
    """Any causal module from ids ``[b, t]`` to logits ``[b, t, vocab]``: the text is the cache.

    Each step runs the whole text. Padding is not supported, since nothing says how the
    module would take a mask.
    """

    limit: int | None = None
    vocab: int | None = None

    def __init__(self, functional: Functional) -> None:
        self._functional = functional

    def start(self, batch: int, length: int, mask: Tensor | None) -> Tensor:
        if mask is not None:
            raise PlacementError(
                f"{self._functional!r} has no cache and no mask that zf.generate knows of: texts "
                "of different lengths are generated one by one (or give a decoder of your own)."
            )
        return torch.zeros(batch, 0, dtype=torch.int64)

    def step(self, params: Any, cache: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return self.write(params, cache, tokens), self.behind(cache, tokens)

    def behind(self, cache: Tensor, tokens: Tensor) -> Tensor:
        return torch.cat([cache.to(tokens.device), tokens], dim=1)

    def unfilled(self, cache: Tensor) -> Tensor:
        return cache

    def write(self, params: Any, cache: Tensor, tokens: Tensor) -> Tensor:
        ids = self.behind(cache, tokens)
        try:
            out = self._functional.apply(params, ids, train=False)
        except (RuntimeError, TypeError, ValueError, AttributeError) as error:
            if cache.numel() or isinstance(error, torch.OutOfMemoryError):
                raise
            raise PlacementError(
                f"{self._functional!r} does not run on token ids {ids.dtype} {tuple(ids.shape)}, "
                "so it is no language model that generate could continue texts with. It said: "
                f"{str(error).splitlines()[0] if str(error) else type(error).__name__}"
            ) from error
        logits = getattr(out, "logits", out)
        if not isinstance(logits, Tensor) or logits.ndim != 3:
            raise PlacementError(
                f"{self._functional!r} returned {type(out).__name__} for ids of shape "
                f"{tuple(ids.shape)}; expected logits [b, t, vocab]."
            )
        return logits[:, -1]
