"""Numbers made up for a layer that looks at its arguments: a router of experts, say.

While it runs, ghosts that it reads are tensors with numbers, and what it makes of them is marked
with its call: behind the call both are ghosts again, and what it has kept of them is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from zfunc.rehearsal.ghosts import Ghost, GhostMemory, become, form_of, ghost_like
from zfunc.rehearsal.results import flattened, replaced

__all__ = ["MadeUp", "calls_in", "memory_id", "unmark", "version_of"]

_MARK = "_zfunc_made_up"
"""The name under which a tensor has the call of the layer in which its numbers were made up."""


class MadeUp:
    """The numbers of one run of a loss: those of the layer that runs now, and what is marked."""

    def __init__(self) -> None:
        self.filled: list[tuple[Tensor, Tensor]] = []
        self.marked: list[Tensor] = []

    def fill(self, g: Ghost, call: int) -> None:
        """Let a ghost be a tensor with numbers, while a layer runs."""
        with temporarily_clear_interpreter_stack():  # under vmap nothing could be drawn
            new = _numbers_like(g)
        marks = {k: x for k, x in g.__dict__.items() if k.startswith("_zfunc")}
        new.__dict__.update(marks)
        new.__dict__[_MARK] = call
        become(g, new)
        self.filled.append((g, new))

    def traced(
        self,
        func: Callable[..., Any],
        args: Any,
        kwargs: dict[str, Any],
        given: Sequence[Tensor],
        call: int,
    ) -> Any:
        """Call a function of tensors of which some are marked, and mark what it gives or writes.

        Args:
            func, args, kwargs: the call.
            given: the tensors among its arguments.
            call: of the layer that runs.
        """
        before = [version_of(x) for x in given]
        out = func(*args, **kwargs)
        for x, version in zip(given, before, strict=True):
            if type(x) is not Ghost and version_of(x) != version:
                base = x if x._base is None else x._base
                base.__dict__[_MARK] = call
                self.marked.append(base)
        known = set(map(id, given))
        for x in flattened(out)[0]:
            if isinstance(x, Tensor) and type(x) is not Ghost and id(x) not in known:
                x.__dict__[_MARK] = call
        return out

    def emptied(self, out: Any, chunk: int) -> Any:
        """What a layer of a chunk has returned, with ghosts in the place of what it has made."""
        memories = {memory_id(x): was.memory for x, was in self.filled if type(was) is Ghost}
        made: dict[int, Ghost] = {}  # of a tensor that it returns twice one

        def ghost(x: Tensor) -> Tensor:
            if type(x) is Ghost or any(x is given for given, _ in self.filled):
                return x
            if id(x) not in made:
                memory = memories.setdefault(memory_id(x), GhostMemory())
                made[id(x)] = ghost_like(form_of(x), x.device, chunk, True, memory=memory)
            return made[id(x)]

        return replaced(out, ghost)

    def forget(self) -> list[Ghost]:
        """Let what was filled be ghosts again; returned are those that were written to."""
        written = []
        for x, was in reversed(self.filled):
            version = x._version
            become(x, was)
            if version > 0 and type(x) is Ghost:
                written.append(x)
        self.filled.clear()
        return written

    def forget_marks(self) -> None:
        """Take its mark from what was written to."""
        unmark(self.marked)
        self.marked.clear()


def calls_in(values: Iterable[Tensor]) -> set[int]:
    """The calls of layers in which the numbers of tensors were made up."""
    return {n for x in values if (n := x.__dict__.get(_MARK)) is not None}


def unmark(values: Iterable[Any]) -> None:
    """Let tensors belong to no call."""
    for x in values:
        if isinstance(x, Tensor):
            x.__dict__.pop(_MARK, None)


def version_of(x: Any) -> Any:
    """How often a tensor, or what a ghost stands for, was written to."""
    if type(x) is Ghost:
        return "elsewhere", x.memory.version  # a tensor that a ghost is added to becomes one, too
    return x._version if isinstance(x, Tensor) and not x.is_inference() else None


def memory_id(x: Tensor) -> int:
    """The same for tensors that share memory."""
    return int(x.untyped_storage()._cdata) if x.layout is torch.strided else id(x)


def _numbers_like(g: Ghost) -> Tensor:
    """A tensor like that, with numbers."""
    if not (g.dtype.is_floating_point or g.dtype.is_complex):
        return torch.zeros(g.shape, dtype=g.dtype, device=g.device)
    generator = torch.Generator(g.device).manual_seed(0)
    wide = torch.rand(g.shape, generator=generator, device=g.device)
    return (wide * 0.1).to(g.dtype)
