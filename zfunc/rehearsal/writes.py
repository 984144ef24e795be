"""Tensors that functions write to, and that are not made in the loss.

In a rehearsal they get back what was in them. What a layer has written to only its stage knows.
What is made in the loss is marked, with the layer that has made it: the loss may keep it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zfunc.rehearsal.ghosts import METADATA, Ghost, has_own_memory
from zfunc.rehearsal.made_up import memory_id
from zfunc.rehearsal.results import tensors_in

__all__ = ["UsersTensors", "Write"]


class Write(NamedTuple):
    """Where a call of a layer has written to memory: from one element to another.

    The memory is held, so that no other tensor has it.
    """

    call: int
    chunk: int
    at: str
    start: int
    stop: int
    memory: int
    storage: torch.UntypedStorage


class UsersTensors:
    """Tensors of the user's that functions write to, which get back what was in them.

    Attributes:
        written: by memory, which calls of layers have written to which part of it.
        outside: what was written to outside of layers.
        arguments: the ids of those of the layer that runs.
    """

    def __init__(self) -> None:
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}
        self.written: dict[int, list[Write]] = {}
        self.outside: list[Write] = []
        self._writing: list[Write] = []  # of the layer that runs
        self._token = object()
        self.arguments: set[int] = set()
        self._used: dict[tuple[int, int, int, int], torch.UntypedStorage] = {}

    def called(self, func: Any, given: Any, out: Any, call: int, chunk: int) -> set[int]:
        """A function was called. What it gives is the loss's own, if it is no part of the user's
        memory.

        Args:
            func: the function.
            given: its arguments.
            out: what it gave.
            call: of the layer that runs, or -1.
            chunk: whose layers run.

        Returns:
            The layers that have made, of their arguments, what it uses, or have written to it.
        """
        of = [x for x in tensors_in(given) if _has_numbers(x)]
        new = [x for x in tensors_in(out) if _has_numbers(x)]
        if new:
            self._made(of, new, call)
        if not of or func in METADATA or func is Tensor.untyped_storage or _is_property(func):
            return set()
        for x in of:
            if not self._own(x):
                self._used[memory_id(x), chunk, *_span(x)] = x.untyped_storage()
        return self._calls_in(of, new)

    def _made(self, of: Sequence[Tensor], new: Sequence[Tensor], call: int) -> None:
        theirs = {memory_id(x) for x in of if not self._own(x)}
        known = call >= 0 and any(id(x) in self.arguments or self._mark(x)[2] for x in of)
        for x in new:
            if not self._own(x) and memory_id(x) not in theirs:
                self.own(x, call, known)

    def _calls_in(self, used: Sequence[Tensor], new: Sequence[Tensor]) -> set[int]:
        made = {mark[1] for x in used if (mark := self._mark(x))[2]}
        if not self.written:
            return made
        own = set(map(id, used))
        views = {memory_id(x) for x in new if id(x) not in own}  # to make one is no use of numbers
        return made | {
            write.call
            for x in used
            if (key := memory_id(x)) not in views
            for write in self.written.get(key, ())
            if write.start < _span(x)[1] and _span(x)[0] < write.stop
        }

    def own(self, x: Tensor, call: int = -1, of_arguments: bool = False) -> None:
        """A tensor is the loss's own, made by a call of a layer, perhaps of its arguments."""
        x.__dict__[_MADE] = self._token, call, of_arguments

    def _mark(self, x: Tensor) -> tuple[object, int, bool]:
        mark: tuple[object, int, bool] = x.__dict__.get(_MADE, _NOBODYS)
        return mark if mark[0] is self._token else _NOBODYS

    def _own(self, x: Tensor) -> bool:
        return self._mark(x)[0] is self._token

    def keep(self, func: Any, args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
        """Before a function of tensors is called, what it may write to is copied; what it writes to
        is returned."""
        found = [x for x in _targets(func, args, kwargs) if _has_numbers(x)]
        for x in found:
            if self._own(x):
                continue
            whole = x if x._base is None else x._base
            if id(whole) not in self._kept:
                self._kept[id(whole)] = whole, whole.detach().clone()
        return [] if func is Tensor.numpy else found

    def write(self, x: Tensor, call: int, chunk: int, at: str) -> None:
        """A function writes to a tensor.

        Args:
            call: of the layer that runs, or -1.
            chunk: whose layers run.
            at: where, for messages.
        """
        if self._own(x) and (call < 0 or self._mark(x)[1] == call):
            return
        write = Write(call, chunk, at, *_span(x), memory_id(x), x.untyped_storage())
        (self.outside if call < 0 else self._writing).append(write)

    @property
    def written_outside(self) -> str:
        """Where the loss writes to a tensor of the user's outside layers. An array's memory is the
        batch's own."""
        return next((write.at for write in self.outside if write.storage.resizable()), "")

    def stale(self) -> tuple[Write, int] | None:
        """What is written to in one chunk and read by another one that cannot know, in the next
        microbatch: the write, and the reader."""
        inside = [write for row in self.written.values() for write in row]
        for write in (*inside, *self.outside):
            for memory, chunk, start, stop in self._used:
                before = chunk < write.chunk if write.call < 0 else chunk != write.chunk
                if memory == write.memory and before and start < write.stop and write.start < stop:
                    return write, chunk
        return None

    def forget(self, given: Sequence[Any]) -> None:
        """The layer that runs may have written to these, its arguments."""
        if self._writing:
            here = {memory_id(x) for x in given if _has_numbers(x)}
            self._writing = [x for x in self._writing if x.memory not in here]

    def behind_layer(self) -> None:
        """A layer has returned."""
        for x in self._writing:
            self.written.setdefault(x.memory, []).append(x)
        self._writing = []

    def restore(self) -> None:
        """What was written to is as before."""
        for x, was in self._kept.values():
            if type(x) is not Ghost:  # numbers that were made up are gone
                x.data.copy_(was)
        self._kept.clear()


def _span(x: Tensor) -> tuple[int, int]:
    """From which to which element of its memory a tensor goes."""
    if x.layout is not torch.strided or x.numel() == 0:
        return 0, 0
    last = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    return int(x.storage_offset()), int(x.storage_offset() + last + 1)


def _is_property(func: Any) -> bool:
    return getattr(func, "__name__", "") == "__get__"


def _has_numbers(x: Any) -> bool:
    if not isinstance(x, Tensor) or not has_own_memory(x):
        return False
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor(x)
    return x.layout == torch.strided and not (x.is_meta or wrapped)


def _targets(func: Any, args: Any, kwargs: dict[str, Any]) -> list[Any]:
    """What a function may write to."""
    name, out = getattr(func, "__name__", ""), kwargs.get("out")
    if out is not None:
        return [*out] if isinstance(out, tuple | list) else [out]
    if name in ("batch_norm", "instance_norm"):
        first = 3 if func is torch.batch_norm or func is torch.instance_norm else 1
        named = [kwargs.get("running_mean"), kwargs.get("running_var")]
        direct = args[5] if first == 3 and len(args) > 5 else True
        writes = kwargs.get("training", kwargs.get("use_input_stats", direct))
        return [*args[first : first + 2], *named] if writes else []
    if name == "embedding":
        return [*args[1:2]] if kwargs.get("max_norm") is not None else []
    if args and (kwargs.get("inplace") or _is_in_place(func, name)):
        return [*args[0]] if isinstance(args[0], tuple | list) else [args[0]]
    return []


def _is_in_place(func: Any, name: str) -> bool:
    """``add_``, ``+=``, ``x[i] = ...``, ``x.data = ...``, and perhaps through ``x.numpy()``."""
    if name.startswith("__"):
        return name in _WRITING or func == _SET_DATA
    return (name.endswith("_") and name not in _ABOUT) or name == "numpy"


_MADE = "_zfunc_made_in"
"""The name under which a tensor has who marked it, and the call of a layer that made it."""
_NOBODYS = (None, -1, False)
_ABOUT = {"requires_grad_", "detach_", "rename_", "share_memory_"}  # these leave the numbers


_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_NAMES = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
_WRITING = {"__setitem__", *(f"__i{name}__" for name in (*_NAMES, "lshift", "rshift"))}
