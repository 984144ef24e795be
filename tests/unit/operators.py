"""The operators of torch that run, backward's included, counted by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Operators"]


class Operators(TorchDispatchMode):
    """Counts every operator, or those that have one of the names."""

    def __init__(self, names: Collection[str] = ()) -> None:
        super().__init__()
        self.names = names
        self.counts: Counter[str] = Counter()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # it would be imported, for seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not self.names or name in self.names:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))
