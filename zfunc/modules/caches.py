"""Caches of keys and values that Hugging Face models hand from layer to layer.

Training needs none. A layer writes to its cache, and finds its part of it by its own number: so a
layer that has one is unlike the others, and cannot run twice.
"""

from __future__ import annotations

from typing import Any

__all__ = ["caches_in", "without_caches"]


def caches_in(xs: tuple[Any, ...], kw: dict[str, Any]) -> list[Any]:
    """The caches among a layer's arguments."""
    return [x for x in (*xs, *kw.values()) if _is_cache(x)]


def without_caches(
    xs: tuple[Any, ...], kw: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A layer's arguments with none in the place of caches, and ``use_cache`` off."""
    kw = {name: None if _is_cache(x) else x for name, x in kw.items()}
    kw |= {name: False for name in ("use_cache",) if kw.get(name)}
    return tuple(None if _is_cache(x) else x for x in xs), kw


def _is_cache(x: Any) -> bool:
    return any(kind.__module__ == "transformers.cache_utils" for kind in type(x).__mro__)
