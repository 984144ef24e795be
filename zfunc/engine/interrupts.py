"""Ctrl-C while a step spends the state that it was given: not between two states.

The state that goes into a donated step is spent before the caller has the one that comes out. An
interrupt in between would leave him with neither. So the first Ctrl-C waits for the step's end;
there the old state, which is the one that the caller has a name for, is made to hold the new
values, and only then is the user's own handler called. A second Ctrl-C does not wait.

One moment is left, of some 100 ns: when the step has returned and the caller's own line has not
yet stored the result, the handler must be his own again, and what it raises there nobody can catch
for him.

Python runs handlers in its main thread, so nothing is done in any other.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal.signal` makes enums of handlers: 10 us
import signal
import threading
from collections.abc import Callable
from typing import Any

import optree
import torch
from torch import Tensor

from zfunc.trees.nodes import NAMESPACE, Box, Placed

__all__ = ["Succession"]

_NOTE = (
    "zfunc: the step was completed first; the state that it was given now holds the new values "
    "(its metrics are lost)"
)
Call = Callable[[Any, Any, Any], Any]


# A Ctrl-C that a step could not deliver: its state could not be made the new one.
_postponed: set[int] = set()


class Succession:
    """A call of a step that spends its state, interrupted only where the caller has a live one.

    Python looks for signals in every frame through which the result passes, so the outermost frame
    of the step has to catch what they raise::

        succession = Succession(call, state, args, kwargs)
        while True:
            try:
                return operator.call(succession.result)
            except BaseException as error:
                if succession.may_raise(error):
                    raise

    Behind a call through C (``operator.call``) it looks once more, behind one of a method need not:
    so what comes while the handler is put back is raised there, and not in the caller's line.

    Meanwhile it is itself the handler of Ctrl-C, in the place of the user's.

    Attributes:
        given: the call and its arguments, without the state; None when it is over.
        out: what it has returned.
        over: whether it has, so that a second Ctrl-C waits for the hand-over, too.
        user: the user's handler.
        noted: a Ctrl-C that has come and not been passed on, as the user's handler takes it.
    """

    __slots__ = ("given", "noted", "out", "over", "state", "user")

    def __init__(self, call: Call, state: Any, args: Any, kwargs: Any) -> None:
        self.given: Any = (call, args, kwargs)
        self.state = state
        self.out: Any = None
        self.over = False
        self.user: Any = None
        self.noted: tuple[int, Any] | None = None

    def __call__(self, signum: int, frame: Any) -> None:
        if self.noted is None or self.over:
            self.noted = signum, frame
            return
        self.noted = None
        self.user(signum, frame)

    def result(self) -> Any:
        """What the call returns; asked again, the same.

        Raises:
            KeyboardInterrupt: (what the user's handler raises) Ctrl-C was pressed in this step, or
                in one before whose state could not be made to hold new values.
        """
        if not self.over:
            call, args, kwargs = self.given
            if not self._installed():
                return call(self.state, args, kwargs)
            self.out, self.over = call(self.state, args, kwargs), True
            self.given = None  # freed here and not in the moment that is left
            self._deliver()
        self._give_back()  # what comes from now on is the user's
        if self.noted is not None:
            self.noted = None
            signal.raise_signal(signal.SIGINT)
        return self.out

    def may_raise(self, error: BaseException) -> bool:
        """Whether the caller has a live state without the result; if not, ``error`` comes later."""
        if not self.over:  # the call itself has failed
            self._give_back()
            self._deliver()
            return True
        now = _signal.getsignal(signal.SIGINT)
        if now is not self:  # it notes what comes while the old state is half the new one
            self.user = now
            _signal.signal(signal.SIGINT, self)
        done = True
        try:
            done = succeeded(self.state, self.out)
        finally:
            self.noted = None
            if done:  # otherwise it stays until the result is on its way to the caller again
                self._give_back()
        if done:
            error.add_note(_NOTE)
        else:
            _postponed.add(signal.SIGINT)
        return done

    def _installed(self) -> bool:
        """Take the place of the user's handler, if it is a function and this its thread."""
        if threading.get_ident() != threading.main_thread().ident:
            return False
        while _postponed:
            signal.raise_signal(_postponed.pop())  # for the handler that is there now
        user = _signal.getsignal(signal.SIGINT)
        if not callable(user) or isinstance(user, Succession):
            return False
        self.user = user
        _signal.signal(signal.SIGINT, self)
        return True

    def _give_back(self) -> None:
        """The user's handler in its place, unless the step has put another one there."""
        if _signal.getsignal(signal.SIGINT) is self:
            _signal.signal(signal.SIGINT, self.user)

    def _deliver(self) -> None:
        """Call the user's handler, if there is something to call it for."""
        if self.noted is not None:
            noted, self.noted = self.noted, None
            self.user(*noted)


def succeeded(old: Any, out: Any) -> bool:
    """Make a spent state hold what its successor in ``out`` holds, if its form allows that."""
    first = (out[0],) if isinstance(out, tuple) and out else ()
    for new in (*first, out):
        if type(new) is type(old):
            pairs = _pairs(old, new)
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
        tree, is_leaf=lambda x: isinstance(x, Placed | Box), none_is_leaf=True, namespace=NAMESPACE
    )
    return leaves, spec


def _fits(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and (a.dtype, a.device) == (b.dtype, b.device)
    if isinstance(a, Placed | Box):
        return type(a) is type(b)
    return type(a) is type(b) and isinstance(a, bool | int | float | str | bytes) and a == b


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
    elif isinstance(old, Placed | Box) or hasattr(old, "__dict__"):
        content = dict(vars(new))
        vars(old).clear()
        vars(old).update(content)
