"""Python's cyclic collector, which waits while objects are made that all live on.

A state of 10,000 leaves is some 100,000 objects. Every few hundred of them the collector looks at
the young ones, and at all that the process holds whenever it has grown by a quarter: half of the
time that placing such a state takes, for nothing, since what is placed stays.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

_lock = Lock()
_waiting = 0  # how many threads (simulated ranks) want the collector to wait
_was_on = False


@contextmanager
def collector_waits() -> Iterator[None]:
    """Collect no cycles meanwhile; what was off stays off. Threads may overlap."""
    global _waiting, _was_on
    with _lock:
        if not _waiting:
            _was_on = gc.isenabled()
            gc.disable()
        _waiting += 1
    try:
        yield
    finally:
        with _lock:
            _waiting -= 1
            if not _waiting and _was_on:
                gc.enable()
