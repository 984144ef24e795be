"""One step of decoding as a pure function ``(params, cache, tokens) -> (logits, cache)``.

A *decoder* says how a model starts a cache of static size and takes tokens into it:
Hugging Face models through transformers' cache interface, and any other causal module
by running the whole text again. :mod:`zfunc.language.gpt_decoding` has that of the built-in GPT.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
    "Decoder",
    "Held",
    "HuggingFace",
    "Replay",
    "Single",
    "Step",
    "check_room",
    "decoder_of",
    "held",
]


Step = Callable[[Any, Tensor], tuple[Tensor, Any]]
Single = Callable[[Tensor, Tensor], Tensor]
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


@dataclass(frozen=True)
class Held:
    """A decoder's step on parameters that are bound.

    Attributes:
        step: ``(cache, tokens) -> (logits, cache)``.
        single: ``(cache, extent)`` -> the same for one token of each text as a function of tensors
            only: it writes into this cache's memory at the position that it is given, and attends
            to the first ``extent`` positions, as far as they are filled. It raises PlacementError
            for caches on which ``step`` cannot be repeated. None if there is none.
    """

    step: Step
    single: Callable[[Any, int], Single] | None = None

    def __call__(self, cache: Any, tokens: Tensor) -> tuple[Tensor, Any]:
        return self.step(cache, tokens)


@contextmanager
def held(decoder: Decoder, params: Any) -> Iterator[Step]:
    """A block in which a decoder steps on the same parameters: ``step(cache, tokens)``.

    A decoder may have a ``held(params)`` of its own, that does once what all steps share; where it
    yields a :class:`Held` with ``single``, steps can be captured (:mod:`zfunc.language.capture`).
    """
    own = getattr(decoder, "held", None)
    if own is None:
        yield partial(decoder.step, params)
        return
    with own(params) as step:
        yield step


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

    def advanced(self) -> Cache:
        """The same memory, when somebody has written one more token into it."""
        rows = tuple(
            replace(row, rest=tuple((k, v + 1 if k == "used" else v) for k, v in row.rest))
            for row in self.rows
        )
        return Cache(self.tensors, rows, self.length, self.used + 1)

    def __repr__(self) -> str:
        return f"Cache({self.used} of {self.length} positions, {len(self.rows)} layers)"


register(
    Cache,
    lambda c: (c.tensors, (c.rows, c.length, c.used), tuple(range(len(c.tensors)))),
    lambda static, tensors: Cache(tensors, *static),
)


class HuggingFace:
    """Any causal model of transformers that takes a cache.

    Its layers are :class:`zfunc.language.prefix.PrefixLayer` where the model keeps keys and values
    of all positions, else those of a ``StaticCache``.

    Args:
        functional: the model, from ``zf.functionalize``.
        fused: let layers of known types take single tokens in few operations
            (:mod:`zfunc.huggingface.decoder_layers`).
    """

    def __init__(self, functional: Functional, *, fused: bool = True) -> None:
        text = functional.config.get_text_config(decoder=True)
        self._functional = functional.fused(_single_tokens) if fused else functional
        self._takes = functional.signature.parameters
        self.limit = getattr(text, "max_position_embeddings", None)
        self.vocab = getattr(text, "vocab_size", None)
        # Containers of layers by length: to build one out of a config takes as long as a layer.
        self._shells: dict[int, Any] = {}

    def start(self, batch: int, length: int, mask: Tensor | None) -> Cache:
        return Cache(() if mask is None else (mask,), (), length, 0)

    def step(self, params: Any, cache: Cache, tokens: Tensor) -> tuple[Tensor, Cache]:
        return self._step(partial(self._functional.apply, params, train=False), cache, tokens)

    @contextmanager
    def held(self, params: Any) -> Iterator[Step]:
        with self._functional.held(params, train=False) as call:
            yield Held(partial(self._step, call), partial(self._single, call))

    def _step(self, call: Callable[..., Any], cache: Cache, tokens: Tensor) -> tuple[Tensor, Cache]:
        mask = _mask(cache)
        stop = cache.used + tokens.shape[1]
        check_room(cache.used, tokens.shape[1], cache.length)
        layers = self._layers(cache)
        given: dict[str, Any] = {"past_key_values": layers, "use_cache": True}
        positions = torch.arange(cache.used, stop, device=tokens.device).expand(len(tokens), -1)
        taken = None if mask is None else mask[:, :stop].long()
        if taken is not None:
            positions = (taken.cumsum(dim=1) - 1).clamp_min(0)[:, cache.used :]
        if not all(hasattr(layer, "used") for layer in layers.layers):
            # As long as the cache, since some models (ALiBi) take the number of keys from it.
            taken = positions.new_ones(len(tokens), stop) if taken is None else taken
            taken = F.pad(taken, (0, cache.length - stop))
        given["attention_mask"] = taken
        out = call(tokens, **given, **self._known(position_ids=positions, logits_to_keep=1))
        if not isinstance(getattr(out, "logits", None), Tensor):
            raise PlacementError(
                f"{self._functional!r} returned {type(out).__name__}, without logits: generate "
                "needs the model with its language head (AutoModelForCausalLM)."
            )
        tensors, rows = _taken_apart(layers)
        new = Cache([*tensors, *([] if mask is None else [mask])], rows, cache.length, stop)
        return out.logits[:, -1], new

    def _single(self, call: Callable[..., Any], cache: Cache, extent: int) -> Single:
        shell, mask = self._layers(cache), _mask(cache)
        if not all(hasattr(layer, "used") for layer in shell.layers):
            kinds = sorted({type(layer).__name__ for layer in shell.layers})
            raise PlacementError(f"its cache has layers of other kinds: {', '.join(kinds)}")
        from zfunc.language.extent import ExtentLayer

        def single(tokens: Tensor, position: Tensor) -> Tensor:
            rows = position.repeat(len(tokens))
            layers = copy.copy(shell)
            layers.layers = [
                ExtentLayer(old.keys, old.values, position, rows, extent) for old in shell.layers
            ]
            taken = (torch.arange(extent, device=tokens.device) <= position).expand(len(tokens), -1)
            positions = rows[:, None]
            if mask is not None:
                taken = taken & mask[:, :extent]
                positions = (taken.sum(dim=1, keepdim=True) - 1).clamp_min(0)
            known = self._known(position_ids=positions, logits_to_keep=1, cache_position=position)
            given = {"past_key_values": layers, "use_cache": True, "attention_mask": taken.long()}
            logits: Tensor = call(tokens, **given, **known).logits[:, -1]
            return logits

        return single

    def _known(self, **given: Any) -> dict[str, Any]:
        """Those arguments that the model takes."""
        return {name: value for name, value in given.items() if name in self._takes}

    def _layers(self, cache: Cache) -> Any:
        length = cache.length
        if not cache.rows:
            return self._empty(length)
        if length not in self._shells:
            self._shells[length] = self._empty(length)
        layers = copy.copy(self._shells[length])
        tensors = iter(cache.tensors)
        layers.layers = []
        for row in cache.rows:
            layer: Any = object.__new__(row.kind)
            layer.__dict__.update(row.rest)
            layer.__dict__.update((name, next(tensors)) for name in row.names)
            layers.layers.append(layer)
        return layers

    def _empty(self, length: int) -> Any:
        from transformers import StaticCache

        from zfunc.language.prefix import prefixed

        cache = StaticCache(config=self._functional.config, max_cache_len=length)
        cache.layers = prefixed(cache.layers, length)
        return cache


def _single_tokens(module: nn.Module) -> None:
    from zfunc.huggingface import decoder_layers  # kernels are imported where they are asked for

    decoder_layers.fuse(module)


def _mask(cache: Cache) -> Tensor | None:
    count = sum(len(row.names) for row in cache.rows)
    return cache.tensors[-1] if len(cache.tensors) > count else None


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
        return logits[:, -1], ids
