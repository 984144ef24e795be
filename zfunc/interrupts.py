"""Ctrl-C while a step spends the state that it was given: not between two states.

The state that goes into a donated step is spent before the caller has the one that comes out. An
interrupt in between would leave him with neither. So the first Ctrl-C waits for the step's end;
there the old state, which is the one that the caller has a name for, is made to hold the new
values, and only then is the user's own handler called. A second Ctrl-C does not wait.

Python runs handlers in its main thread, so nothing is done in any other.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal.signal` makes enums of handlers: 10 us
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import optree
import torch
from torch import Tensor

from zfunc.nodes import NAMESPACE, Placed
from zfunc.placed.arriving import passing, settled

__all__ = ["succeeding"]

_NOTE = (
    "zfunc: the step was completed first; the state that it was given now holds the new values "
    "(its metrics are lost)"
)
Call = Callable[[Any, Any, Any], Any]


class Held:
    """A handler of Ctrl-C that waits, in the place of the user's.

    Attributes:
        user: the user's handler.
        noted: a Ctrl-C that has come and not been passed on, as the user's handler takes it.
        closing: whether the step is over, so that a second one waits for the hand-over, too.
    """

    def __init__(self, user: Callable[[int, Any], Any]) -> None:
        self.user = user
        self.noted: tuple[int, Any] | None = None
        self.closing = False

    def __call__(self, signum: int, frame: Any) -> None:
        if self.noted is None or self.closing:
            self.noted = signum, frame
            return
        self.noted = None
        self.user(signum, frame)

    def deliver(self) -> None:
        """Call the user's handler, if there is something to call it for."""
        if self.noted is not None:
            noted, self.noted = self.noted, None
            self.user(*noted)


_postponed: list[
    Held
] = []  # what a step could not deliver: its state could not be made the new one


def succeeding(call: Call, state: Any, args: Any, kwargs: Any) -> Any:
    """``call(state, args, kwargs)``, interrupted only where the caller has a live state.

    Raises:
        KeyboardInterrupt: (what the user's handler raises) Ctrl-C was pressed in a step before
            whose state could not be made to hold new values; this one is untouched.
    """
    if threading.get_ident() != threading.main_thread().ident:
        return call(state, args, kwargs)
    while _postponed:
        _postponed.pop().deliver()
    user = _signal.getsignal(signal.SIGINT)
    if not callable(user) or isinstance(user, Held):
        return call(state, args, kwargs)
    held = Held(user)
    _signal.signal(signal.SIGINT, held)
    try:
        out = call(state, args, kwargs)
        held.closing = True
    except BaseException:
        _given_back(held)
        held.deliver()
        raise
    try:
        held.deliver()
        _given_back(held)  # what comes from now on is the user's, and is raised here or in his code
        if held.noted is not None:
            held.deliver()
        return out
    except BaseException as error:
        return _handed_over(held, state, out, error)


def _given_back(held: Held) -> None:
    """The user's handler in its place, unless the step has put another one there."""
    if _signal.getsignal(signal.SIGINT) is held:
        _signal.signal(signal.SIGINT, held.user)


def _handed_over(held: Held, state: Any, out: Any, error: BaseException) -> Any:
    """Raise ``error`` with the new values under the old name; return ``out`` if that cannot be."""
    now = _signal.getsignal(signal.SIGINT)  # a handler may have put another in its place
    _signal.signal(signal.SIGINT, held)  # notes what comes while the old state is half the new one
    try:
        done = succeeded(state, out)
    finally:
        held.noted = None
        _signal.signal(signal.SIGINT, held.user if now is held else now)
    if not done:
        held.noted = signal.SIGINT, None
        _postponed.append(held)
        return out
    error.add_note(_NOTE)
    raise error


def succeeded(old: Any, out: Any) -> bool:
    """Make a spent state hold what its successor in ``out`` holds, if its form allows that."""
    first = (out[0],) if isinstance(out, tuple) and out else ()
    for new in (*first, out):
        if type(new) is type(old):
            with passing():
                pairs = _pairs(old, new)
                settled(x for _, new in pairs or () for x in _tensors(new))
            if pairs is not None:
                for a, b in pairs:
                    _become(a, b)
                return True
    return False


def _pairs(old: Any, new: Any) -> list[tuple[Any, Any]] | None:
    """What is to become what: leaf by leaf, or whole containers whose contents can be exchanged."""
    (a, spec), (b, its) = _flat(old), _flat(new)
    if spec == its and all(map(_fits, a, b)):
        return [(x, y) for x, y in zip(a, b, strict=True) if x is not y]
    if type(old) is dict or hasattr(old, "__dict__"):
        return [(old, new)]
    return None


def _flat(tree: Any) -> tuple[list[Any], Any]:
    leaves, spec = optree.tree_flatten(
        tree, is_leaf=lambda x: isinstance(x, Placed), none_is_leaf=True, namespace=NAMESPACE
    )
    return leaves, spec


def _fits(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and (a.dtype, a.device) == (b.dtype, b.device)
    if isinstance(a, Placed):
        return type(a) is type(b)
    return type(a) is type(b) and isinstance(a, bool | int | float | str | bytes) and a == b


def _tensors(x: Any) -> Iterator[Any]:
    yield from optree.tree_leaves(x, namespace=NAMESPACE)


def _become(old: Any, new: Any) -> None:
    if isinstance(old, Tensor):
        with torch.no_grad():
            old.data = new.data
        marks = dict(new.__dict__)
        old.__dict__.clear()
        old.__dict__.update(marks)
    elif type(old) is dict:
        old.clear()
        old.update(new)
    elif isinstance(old, Placed) or hasattr(old, "__dict__"):
        content = dict(vars(new))
        vars(old).clear()
        vars(old).update(content)
