"""What is computed a second time in backward: by ``remat``, and by ``torch.utils.checkpoint``.

torch's own checkpoint knows nothing of parameters that are in a module for the time of a call
only, nor that layers are numbered and let their parameters enter. Its reentrant form, besides,
sees no parameter at all, and gives zeros where nothing before it is trained. So while a loss or
a functionalized module runs (:class:`taken`), calls of ``torch.utils.checkpoint`` come here. Both
forms become the non-reentrant one, whose second run finds everything as the first one did:

- the context, the numbering of layers and the random numbers of the first run;
- the module's parameters and buffers of that call (:class:`Bound`); what the second run makes of
  buffers is dropped;
- layers inside enter once more, and their gradients go the way of the first run.

Where that cannot be promised nothing is left out, and so nothing runs twice: inside a region
that is recomputed already, inside ``torch.func``, and in a module that ``functional_call`` has
lent parameters to, which are gone in backward.
"""

from __future__ import annotations

import contextvars
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from contextvars import ContextVar, Token
from types import FrameType
from typing import Any, Protocol

import torch
import torch.utils.checkpoint as theirs
from torch import Tensor
from torch.nn.utils import stateless

from zfunc.engine import context
from zfunc.engine.context import RECOMPUTED
from zfunc.engine.products import active, products

__all__ = ["Bound", "Kept", "Twice", "cannot", "taken"]


class Kept(Protocol):
    """What a module was when a region began.

    Attributes:
        leaves: parameters that it had for the moment only. They are saved as autograd saves what
            an operation needs, so that gathered memory is not held.
    """

    leaves: Sequence[Tensor]

    def again(self, leaves: Sequence[Tensor]) -> AbstractContextManager[None]:
        """A block in which the module is as it was, with these in the place of ``leaves``."""


class Bound(Protocol):
    """A module whose parameters are there for the time of a call."""

    def keep(self) -> Kept: ...


class Twice:
    """One call of ``call``, to be run in forward and again in backward.

    The second run may be on one of autograd's own threads (on a GPU) and after other
    layers: it gets the context of the first, and its numbering of the layers inside.
    """

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call, self.running = call, context.current()
        self.first = True
        self.layer_calls = 0 if self.running is None else self.running.layer_calls
        self.snapshot = contextvars.copy_context()
        self.short = active()

    @property
    def keyless(self) -> bool:
        """Whether layers have no randomness of their own."""
        return self.running is None or self.running.layer_scope is None

    def __call__(self, kw: dict[str, Any], *xs: Any) -> Any:
        if self.first:
            self.first = False
            return self._marked("first", xs, kw)
        return self.again(*xs, **kw)

    def again(self, *xs: Any, **kw: Any) -> Any:
        """The second run."""
        return self.snapshot.copy().run(self._again, xs, kw)

    def _again(self, xs: tuple[Any, ...], kw: dict[str, Any]) -> Any:
        with taken(), products(self.short):  # as it was in the first run
            running = self.running
            if running is None:
                return self._marked("again", xs, kw)
            after, running.layer_calls = running.layer_calls, self.layer_calls
            try:
                return self._marked("again", xs, kw)
            finally:
                running.layer_calls = after

    def _marked(self, which: str, xs: tuple[Any, ...], kw: dict[str, Any]) -> Any:
        token = RECOMPUTED.set(which)
        try:
            return self.call(*xs, **kw)
        finally:
            RECOMPUTED.reset(token)


def cannot() -> bool:
    """Whether nothing can be left out here: inside ``torch.func``, or inside of what is
    recomputed, where all is left out already."""
    return bool(RECOMPUTED.get()) or torch._C._functorch.maybe_current_level() is not None


# --- torch.utils.checkpoint ---------------------------------------------------------------------

_BOUND: ContextVar[tuple[Bound, ...] | None] = ContextVar("zfunc_bound", default=None)

_lock = threading.Lock()
_running = 0


def _looked_up() -> str:
    """The name of the generator that ``checkpoint`` runs around its function.

    Raises:
        ImportError: this torch does it in another way. Nothing would come here, without a word.
    """
    callers = theirs.checkpoint, getattr(theirs, "_checkpoint_impl", None)  # that from 2.15 on
    called = {name for f in callers if f for name in inspect.unwrap(f).__code__.co_names}
    for name in _FLAT, f"{_FLAT}_impl":
        if name in called:
            return name
    raise ImportError(
        f"zfunc does not know how torch.utils.checkpoint of torch {torch.__version__} works: take "
        "an older torch, or a newer zfunc."
    )


_FLAT = "_checkpoint_without_reentrant_generator"
_NAME = _looked_up()
_original: Callable[..., Iterator[None]] = getattr(theirs, _NAME)
_HOW = [  # what the flat one is told before the arguments of its function
    name
    for name, p in inspect.signature(_original).parameters.items()
    if p.kind is p.POSITIONAL_OR_KEYWORD
][1:]


def _generator(
    function: Any, xs: tuple[Any, ...], kw: dict[str, Any], **how: Any
) -> Iterator[None]:
    """torch's own, in the form that it has from 2.15 on."""
    if _NAME == _FLAT:
        return _original(function, *how.values(), *xs, **kw)
    return _original(function, xs, kw, **how)


def _flat(function: Any, /, *given: Any, **kw: Any) -> Iterator[None]:
    """What an older torch finds in its place."""
    how = dict(zip(_HOW, given, strict=False))
    return _dispatched(function, given[len(_HOW) :], kw, **how)


_SWAPPED = inspect.unwrap(stateless._functional_call).__code__


class taken:
    """A block in which calls of ``torch.utils.checkpoint`` come here, in this context alone.

    ``checkpoint`` looks two things up when it is called. While blocks are open both ask first
    whose call it is: to other threads nothing has changed, and afterwards nothing is left.
    """

    __slots__ = ("bound", "token")

    def __init__(self, *bound: Bound) -> None:
        self.bound = bound

    def __enter__(self) -> None:
        global _running
        self.token: Token[Any] = _BOUND.set((*(_BOUND.get() or ()), *self.bound))
        with _lock:
            _running += 1
            if _running == 1:
                setattr(theirs, _NAME, _flat if _NAME == _FLAT else _dispatched)
                theirs.CheckpointFunction.apply = classmethod(_reentrant)  # type: ignore[method-assign, assignment]

    def __exit__(self, *error: object) -> None:
        global _running
        with _lock:
            _running -= 1
            if _running == 0:
                setattr(theirs, _NAME, _original)
                del theirs.CheckpointFunction.apply
        _BOUND.reset(self.token)


def _reentrant(cls: Any, function: Any, preserve: Any, *xs: Any) -> Any:
    if _BOUND.get() is None or cls is not theirs.CheckpointFunction:
        return super(theirs.CheckpointFunction, cls).apply(function, preserve, *xs)
    how = {"use_reentrant": False, "preserve_rng_state": preserve}
    return theirs.checkpoint(function, *xs, **how)


def _dispatched(
    function: Any, xs: tuple[Any, ...], kw: dict[str, Any], **how: Any
) -> Iterator[None]:
    bound = _BOUND.get()
    if bound is None or isinstance(function, Twice) or not torch.is_grad_enabled():
        return _generator(function, xs, kw, **how)
    return _taken(bound, function, xs, kw, how)


def _taken(
    bound: tuple[Bound, ...],
    function: Any,
    xs: tuple[Any, ...],
    kw: dict[str, Any],
    how: dict[str, Any],
) -> Iterator[None]:
    """What ``checkpoint`` runs around its function: until ``yield``, and behind it."""
    if cannot() or _swapped():
        with how["context_fn"]()[0]:
            yield
        return
    kept = [one.keep() for one in bound]
    leaves = [x for one in kept for x in one.leaves]
    twice = Twice(_restored(function, kept))
    token = RECOMPUTED.set("first")
    try:
        # Random numbers are the same in any case: where there are none it costs next to nothing.
        how = {**how, "preserve_rng_state": True}
        yield from _generator(twice.again, (*leaves, *xs), kw, **how)
    finally:
        RECOMPUTED.reset(token)


def _restored(function: Callable[..., Any], kept: Sequence[Kept]) -> Callable[..., Any]:
    """``function`` behind the leaves of ``kept``, in modules that are what they were."""
    counts = [len(one.leaves) for one in kept]

    def call(*xs: Any, **kw: Any) -> Any:
        with ExitStack() as stack:
            for one, count in zip(kept, counts, strict=True):
                stack.enter_context(one.again(xs[:count]))
                xs = xs[count:]
            return function(*xs, **kw)

    return call


def _swapped() -> bool:
    """Whether a module runs on parameters that ``functional_call`` has put into it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _SWAPPED:
            return True
        frame = frame.f_back
    return False
