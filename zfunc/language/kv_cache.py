"""Layers of a key-value cache that is allocated once, for Hugging Face's models.

Hugging Face's own static layer gives attention the whole cache, so every step reads all of it and
needs a mask for what is empty; its dynamic layer copies all that it holds for each token. Here a
token is written in place. While steps run eagerly, attention gets a view of what is filled: with
one query there is nothing to mask. A CUDA graph allows neither another shape for each token nor a
position that is a number of Python. There the position is a tensor, and attention gets a fixed
number of positions, of which a mask says which are filled.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, StaticLayer, StaticSlidingWindowLayer

__all__ = [
    "COUNTED",
    "CapturableLayer",
    "PrefixLayer",
    "count",
    "pass_by",
    "prefix_layers",
    "without_memory",
]


class PrefixLayer(CacheLayerMixin):
    """Keys and values ``[b, heads, length, d]``, of which attention gets the filled prefix.

    Args:
        length: positions that it has room for.
    """

    is_compileable = False  # shapes grow with the text
    is_sliding = False
    keys: Tensor
    values: Tensor

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length, self.used = length, 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        value_states = key_states if value_states is None else value_states
        self.keys, self.values = (
            x.new_zeros(*x.shape[:2], self.length, x.shape[3]) for x in (key_states, value_states)
        )
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write ``[b, heads, t, d]`` behind what is there; all that is filled, as views."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        stop = self.used + key_states.shape[2]
        self.keys[:, :, self.used : stop] = key_states
        self.values[:, :, self.used : stop] = value_states
        self.used = stop
        return self.keys[:, :, :stop], self.values[:, :, :stop]

    def slots(self, rows: Tensor) -> Tensor:
        """``[b]`` like ``rows``: where the next token of each text goes."""
        return torch.full_like(rows, self.used)

    def written(self) -> tuple[Tensor, Tensor]:
        """Count a token that a kernel has written; what attention gets, as views."""
        self.used += 1
        return self.keys[:, :, : self.used], self.values[:, :, : self.used]

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        new = query_length if isinstance(query_length, int) else len(query_length)
        return self.used + new, 0

    def get_seq_length(self) -> Any:
        return self.used

    def get_max_length(self) -> int:
        return self.length

    get_max_cache_shape = get_max_length  # its name before transformers 5


class CapturableLayer(PrefixLayer):
    """The memory of a prefix layer, for one token of each text in a CUDA graph.

    Args:
        prefix: its keys and values are written in place.
        position: ``[1]`` int64, where the token goes.
        rows: ``[b]`` int64, the same for each text.
        length: positions that attention reads; a position is below it.
    """

    is_compileable = True  # masks are always made, and no shape depends on the position

    def __init__(self, prefix: PrefixLayer, position: Tensor, rows: Tensor, length: int) -> None:
        super().__init__(length)
        self.keys, self.values, self.is_initialized = prefix.keys, prefix.values, True
        self.position, self.rows = position, rows

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write ``[b, heads, 1, d]`` at the position; what attention reads, as views."""
        self.keys.index_copy_(2, self.position, key_states)
        self.values.index_copy_(2, self.position, value_states)
        return self.written()

    def slots(self, rows: Tensor) -> Tensor:
        return self.rows

    def written(self) -> tuple[Tensor, Tensor]:
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        return self.length, 0

    def get_seq_length(self) -> Any:
        """0-d, on the device: whoever makes a number of Python of it cannot be captured."""
        return self.position[0]


def count(layer: Any, used: int) -> None:
    """Let a layer whose kind is in :data:`COUNTED` have so many positions taken."""
    if isinstance(layer, PrefixLayer):
        layer.used = used
        return
    layer.cumulative_length.fill_(used)
    if isinstance(layer, StaticSlidingWindowLayer):
        layer.cumulative_length_int = used


def pass_by(layer: Any, used: int) -> None:
    """The same; a layer that has no memory yet is another stage's, and needs none."""
    if not layer.is_initialized:
        layer.is_initialized = True
    count(layer, used)


def without_memory(layer: Any, used: int) -> Any:
    """A layer that makes room anew, with so many positions taken."""
    new = copy.copy(layer)
    new.keys = new.values = None
    new.is_initialized = False
    if not isinstance(new, PrefixLayer):
        new.cumulative_length = torch.tensor(used)
        new.lazy_initialization = partial(_make_room, new)
    count(new, used)
    return new


def _make_room(layer: Any, key_states: Tensor, value_states: Tensor) -> None:
    """What a static layer does at its first tokens, with room of their kind: shapes alone if they
    are no more."""
    layer.dtype, layer.device = key_states.dtype, key_states.device
    layer.keys, layer.values = (
        x.new_zeros(*x.shape[:2], layer.max_cache_len, x.shape[3])
        for x in (key_states, value_states)
    )
    layer.is_initialized = True


COUNTED = frozenset({PrefixLayer, StaticLayer, StaticSlidingWindowLayer})
"""Kinds of layers of which is known how far they are."""


def prefix_layers(layers: list[Any], length: int) -> list[Any]:
    """Layers of a static cache of ``length`` positions as prefix layers, where all of them can be.

    A window that is as long as the cache never slides. Beside one that does, or a layer that keeps
    something else than keys and values, all stay as they are: masks are made for a whole cache.
    """
    windows = {layer.max_cache_len for layer in layers if type(layer) is StaticSlidingWindowLayer}
    kinds = {type(layer) for layer in layers}
    if kinds <= {StaticLayer, StaticSlidingWindowLayer} and windows <= {length}:
        return [PrefixLayer(length) for _ in layers]
    return layers
