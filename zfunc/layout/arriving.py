"""Gathers that a step leaves under way: its new parameters arrive while the next one begins.

At ZeRO stages 1 and 2 a step ends with the gathers of its new parameters, and returns them in a
:class:`zfunc.layout.replicated.Replicated` that waits when somebody looks. What is still under way
when the program ends, when a ledger is read or when the world is left is completed: peers may
wait for it, though nobody here does.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from weakref import WeakSet

from torch import Tensor

from zfunc.errors import DesyncError
from zfunc.ranks.accounting import on_close
from zfunc.ranks.comm import Group, Handle
from zfunc.ranks.world import current, on_leave

__all__ = ["Arrival", "begun", "completed"]


@dataclass(eq=False)
class Arrival:
    """A flat that is being gathered.

    Attributes:
        group: whose ranks hold the parts of it.
        handle: the gather that is under way.
        again: begins it anew, from the same memory.
        done: whether it has been waited for.
    """

    group: Group
    handle: Handle[Tensor]
    again: Callable[[], Handle[Tensor]]
    done: bool = False

    def finish(self) -> None:
        """Return when it is there.

        Raises:
            DesyncError: a peer took another path; the message names the unit.
        """
        self.handle.wait()
        self.done = True


def begun(group: Group, handle: Handle[Tensor], again: Callable[[], Handle[Tensor]]) -> Arrival:
    """A gather that nobody has to wait for at once, see ``Arrival``."""
    arrival = Arrival(group, handle, again)
    memo = current().memo
    if "arrivals" not in memo:
        memo["arrivals"] = WeakSet(), set()
        atexit.unregister(completed)
        atexit.register(completed)  # what was registered last runs first: the world is still there
    pending, groups = memo["arrivals"]
    pending.add(arrival)
    groups.add(group)
    return arrival


def completed() -> None:
    """End what this rank takes part in: its peers may wait for it, though nobody here does."""
    pending, groups = current().memo.get("arrivals", ((), ()))
    with suppress(DesyncError):
        for arrival in list(pending):
            arrival.finish()
        for group in groups:
            group._finish_dropped()


on_leave.append(completed)
on_close.append(completed)
