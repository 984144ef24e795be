"""A layer of a cache whose attention reads a fixed extent, and whose position is a tensor.

:class:`zfunc.language.prefix.PrefixLayer` hands out what is filled: another shape for each token,
and a position that is a number of Python. What a CUDA graph records may depend on neither. Here a
token is written where a tensor says, attention gets the first ``extent`` positions, and the mask
says which of them are filled. The memory is the prefix layer's own.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

__all__ = ["ExtentLayer"]


class ExtentLayer(CacheLayerMixin):
    """Keys and values ``[b, heads, length, d]``, read up to ``extent``, for one token of each text.

    Args:
        keys, values: written in place.
        position: ``[1]`` int64, where the token goes.
        rows: ``[b]`` int64, the same for each text.
        extent: positions that attention reads; a position is below it.
    """

    is_compileable = True  # masks are always made, and no shape depends on the position
    is_sliding = False
    keys: Tensor
    values: Tensor

    def __init__(
        self, keys: Tensor, values: Tensor, position: Tensor, rows: Tensor, extent: int
    ) -> None:
        super().__init__()
        self.keys, self.values = keys, values
        self.position, self.rows, self.extent = position, rows, extent
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        """Nothing: the memory is there."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write ``[b, heads, 1, d]`` at the position; the extent, as views."""
        self.keys.index_copy_(2, self.position, key_states)
        self.values.index_copy_(2, self.position, value_states)
        return self.written()

    def slots(self, rows: Tensor) -> Tensor:
        """``[b]``: where the token of each text goes."""
        return self.rows

    def written(self) -> tuple[Tensor, Tensor]:
        """The extent, as views, when somebody else has written the token."""
        return self.keys[:, :, : self.extent], self.values[:, :, : self.extent]

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        return self.extent, 0

    def get_seq_length(self) -> Any:
        """0-d, on the device: whoever makes a number of Python of it cannot be captured."""
        return self.position[0]

    def get_max_length(self) -> int:
        return self.extent

    get_max_cache_shape = get_max_length  # its name before transformers 5
