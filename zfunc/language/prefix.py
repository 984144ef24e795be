"""A layer of a cache of static size whose attention reads the part that is filled, and no more.

Hugging Face's own static layer hands out the whole cache, so every step reads all of it and needs a
mask for what is empty; its dynamic one copies all that it holds for each token. Here a token is
written in place and attention gets a view up to it: with one query there is nothing to mask.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, StaticLayer, StaticSlidingWindowLayer

__all__ = ["PrefixLayer", "prefixed"]


class PrefixLayer(CacheLayerMixin):
    """Keys and values ``[b, heads, length, d]``, of which ``used`` positions are filled.

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
            torch.zeros(*x.shape[:2], self.length, x.shape[3], dtype=x.dtype, device=x.device)
            for x in (key_states, value_states)
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
        """Count a token that somebody else has written; all that is filled, as views."""
        self.used += 1
        return self.keys[:, :, : self.used], self.values[:, :, : self.used]

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        new = query_length if isinstance(query_length, int) else len(query_length)
        return self.used + new, 0

    def get_seq_length(self) -> int:
        return self.used

    def get_max_length(self) -> int:
        return self.length

    get_max_cache_shape = get_max_length  # its name before transformers 5


def prefixed(layers: list[Any], length: int) -> list[Any]:
    """Layers of a static cache of ``length`` positions as prefixes, where all of them can be.

    A window that is as long as the cache never slides. Beside one that does, or a layer that keeps
    something else than keys and values, all stay as they are: masks are made for a whole cache.
    """
    windows = {layer.max_cache_len for layer in layers if type(layer) is StaticSlidingWindowLayer}
    kinds = {type(layer) for layer in layers}
    if kinds <= {StaticLayer, StaticSlidingWindowLayer} and windows <= {length}:
        return [PrefixLayer(length) for _ in layers]
    return layers
