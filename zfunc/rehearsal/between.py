"""What is made between layers, by its place among functions of tensors that are called there."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from zfunc.rehearsal.eager import in_compiled
from zfunc.rehearsal.ghosts import METADATA, in_function, named
from zfunc.rehearsal.plans import MADE, Label
from zfunc.rehearsal.results import flattened

__all__ = ["Between", "BetweenLayers"]


class Between:
    """Counts what functions of tensors give outside of layers, behind each call of one.

    A loss calls the same functions on every stage, so a value has the same label on all of them.
    """

    def __init__(self) -> None:
        self.call, self.counts = -1, defaultdict[str, int](int)

    def behind(self, call: int) -> None:
        """A layer has returned."""
        self.call = call
        self.counts.clear()

    def labels(self, func: Any, out: Any) -> list[tuple[Label, Tensor]]:
        """The tensors among what ``func`` has given. Within a Function of the user's, or
        torch.func, they are not what is known outside; in a compiled function nobody sees them."""
        within = in_function() or torch._C._functorch.maybe_current_level() is not None
        if func in METADATA or within or in_compiled():
            return []
        found = [x for x in flattened(out)[0] if isinstance(x, Tensor)]
        side = f"{MADE}{named(func)}"
        first = self.counts[side]
        self.counts[side] += len(found)
        return [((self.call, side, first + i), x) for i, x in enumerate(found)]


class BetweenLayers(TorchFunctionMode):
    """Tells a run what functions of tensors give."""

    def __init__(self, run: Any) -> None:
        super().__init__()
        self.run = run

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self.run.made(func, out)
        return out
