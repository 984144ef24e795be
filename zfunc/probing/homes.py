"""Whether whole parameters between a column and its row are read where gradients are summed.

Each rank has a part of such a gradient, and they are summed around the submodule's own forward.
Code that takes the parameter of another submodule, and does not call that one, has a part alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

from torch import nn

from zfunc.probing.flows import connected
from zfunc.probing.stages import Stage

__all__ = ["read_elsewhere"]


def read_elsewhere(stage: Stage, rows: Iterable[str], parameters: Sequence[str]) -> list[str]:
    """Those of some parameters on which rows depend otherwise than by their submodule's forward.

    Args:
        rows: names of products.
        parameters: names within the layer, of no products.
    """
    if not parameters:
        return []
    homes: dict[str, list[str]] = {}
    for name in parameters:
        home, _, key = name.rpartition(".")
        homes.setdefault(home, []).append(key)
    with ExitStack() as stack:
        for home, keys in homes.items():
            _replace(stack, stage.layer.get_submodule(home), keys)
        trace = stage.run(grad=True)
    leaves = [stage.parameters[name] for name in parameters]
    inputs = [trace.inputs[row] for row in rows if row in trace.inputs]
    return sorted({parameters[i] for x in inputs for i in connected(x, leaves)})


def _replace(stack: ExitStack, part: nn.Module, keys: Sequence[str]) -> None:
    """Let a submodule's own forward have copies of some of its parameters."""
    before = part.__dict__.get("forward")
    part.__dict__["forward"] = _on_copies(part, part.forward, keys)

    def back() -> None:
        del part.__dict__["forward"]
        if before is not None:
            part.__dict__["forward"] = before

    stack.callback(back)


def _on_copies(
    part: nn.Module, inner: Callable[..., Any], keys: Sequence[str]
) -> Callable[..., Any]:
    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        held = {key: part._parameters[key] for key in keys}
        copies = {key: nn.Parameter(p.detach()) for key, p in held.items() if p is not None}
        part._parameters.update(copies)
        try:
            return inner(*args, **kwargs)
        finally:
            part._parameters.update(held)

    return forward
