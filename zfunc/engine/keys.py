"""The key of the randomness of one call of a step."""

from __future__ import annotations

from torch import Tensor

from zfunc.engine.context import Context
from zfunc.ranks.keys import as_key, fold_in

__all__ = ["key_of"]


def key_of(running: Context) -> Tensor | None:
    """The state's key and its number of steps as one key; None where the state has no key."""
    if running.key is None:
        return None
    made: Tensor | None = running.notes.get("key")
    if made is None:
        key, step = running.key
        made = fold_in(key, step) if step is not None else as_key(key)
        running.notes["key"] = made
    return made
