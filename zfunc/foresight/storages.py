"""What is known of the storages of a dry run: which live, how many bytes, what values they have.

Values are *known* (computed as they are), *assumed* (computed from a guess), or *absent*: a large
storage that nobody has filled. A storage that was there before belongs to the caller: it is read,
and never written.
"""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import Tensor

__all__ = ["SMALL", "Storages"]

SMALL = 1 << 12  # elements; up to here values are computed
SMALL_BYTES = 8 * SMALL


def whole(x: Tensor) -> Tensor:
    """All of a tensor's storage, which it may have in parts or several times."""
    return x.detach().as_strided((x.untyped_storage().nbytes() // x.itemsize,), (1,), 0)


class Storages:
    """The storages that operations of a dry run have touched.

    Attributes:
        live: bytes of those that the run has made and that somebody holds.
        peak: the most of them since :meth:`begin`.
        timeline: since then, ``(number of the row, bytes)`` at each change.
        kind: says what a storage is that is made now, in a word; :meth:`mark` may know better.
        row: the number of the operation under way.
        hidden: whether what is made now takes no memory.
    """

    def __init__(self) -> None:
        self.live = self.peak = self.row = self.hidden = 0
        self.timeline: list[tuple[int, int]] = []
        self.kind: Callable[[], str] = lambda: "other"
        self._changes: list[tuple[int, int, list[str]]] = []
        self._kinds: dict[int, list[str]] = {}  # one word each, which may still change
        self._nbytes: dict[int, int] = {}  # of those that the run has made
        self._callers: set[int] = set()
        self._hosted: set[int] = set()
        self._absent: set[int] = set()
        self._assumed: set[int] = set()
        # Ours, and no finalizers: these would keep the run as long as the caller has his tensors.
        self._watched: dict[int, weakref.ref[Any]] = {}

    def begin(self) -> None:
        """Count the peak anew."""
        self.peak, self.row, self.timeline = self.live, 0, [(0, self.live)]
        self._changes = [(0, n, self._kinds[key]) for key, n in self._nbytes.items() if n]

    def made(self, x: Tensor, on_host: bool = False) -> None:
        """The run has made this tensor, or a view of what it has made.

        Args:
            on_host: whether it is in the host's memory, which is not counted.
        """
        storage = x.untyped_storage()
        key = storage._cdata
        if key in self._nbytes or key in self._callers:
            return
        self._nbytes[key] = 0 if self.hidden or on_host else storage.nbytes()
        if on_host:
            self._hosted.add(key)
        self._kinds[key] = [self.kind()]
        self._changed(key, self._nbytes[key])
        self._watched[key] = weakref.ref(storage, partial(self._freed, key))

    def seen(self, x: Tensor) -> None:
        """An operation reads this tensor: what the run has not made is the caller's."""
        storage = x.untyped_storage()
        key = storage._cdata
        if key not in self._nbytes and key not in self._callers:
            self._callers.add(key)
            self._watched[key] = weakref.ref(storage, partial(self._forgotten, key))

    def hosts(self, x: Tensor) -> None:
        """It is in memory of the host that is kept for a device."""
        self.seen(x)
        self._hosted.add(x.untyped_storage()._cdata)

    def on_host(self, x: Tensor) -> bool:
        """Whether it is in the host's memory, and not where ranks compute."""
        return x.untyped_storage()._cdata in self._hosted

    def has_made(self, x: Tensor) -> bool:
        """Whether the run has made it."""
        return x.untyped_storage()._cdata in self._nbytes

    def is_callers(self, x: Tensor) -> bool:
        """Whether it was there before."""
        return x.untyped_storage()._cdata in self._callers

    def wrote(self, x: Tensor) -> None:
        """It has been overwritten by what nobody knows: small storages are assumed to be ones."""
        storage = x.untyped_storage()
        if storage.nbytes() <= SMALL_BYTES and storage._cdata not in self._callers:
            whole(x).fill_(1)
            self._assumed.add(storage._cdata)
        else:
            self._absent.add(storage._cdata)

    def assume(self, xs: Iterable[Tensor]) -> None:
        """Their values follow from a guess."""
        for x in xs:
            self._assumed.add(x.untyped_storage()._cdata)

    def is_absent(self, x: Tensor) -> bool:
        """Whether it has no values."""
        return x.untyped_storage()._cdata in self._absent

    def is_assumed(self, x: Tensor) -> bool:
        """Whether its values follow from a guess."""
        return x.untyped_storage()._cdata in self._assumed

    def mark(self, xs: Iterable[Tensor], kind: str) -> None:
        """Say what these are, for all of their time."""
        for x in xs:
            if (known := self._kinds.get(x.untyped_storage()._cdata)) is not None:
                known[0] = kind

    def by_kind(self) -> tuple[dict[str, tuple[tuple[int, int], ...]], dict[str, int]]:
        """The timeline of each kind since :meth:`begin`, and the bytes of each at the peak."""
        live: Counter[str] = Counter()
        lines: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
        total, most, at_peak = 0, -1, {}
        for row, nbytes, (kind,) in self._changes:
            live[kind] += nbytes
            total += nbytes
            lines[kind].append((row, live[kind]))
            if total > most:
                most, at_peak = total, dict(live)
        return {kind: tuple(line) for kind, line in lines.items()}, at_peak

    def _changed(self, key: int, nbytes: int) -> None:
        self.live += nbytes
        self.peak = max(self.peak, self.live)
        if nbytes:
            self.timeline.append((self.row, self.live))
            self._changes.append((self.row, nbytes, self._kinds[key]))

    def _freed(self, key: int, _: object) -> None:
        self._changed(key, -self._nbytes.pop(key))
        del self._kinds[key], self._watched[key]
        for kept in (self._hosted, self._absent, self._assumed):
            kept.discard(key)

    def _forgotten(self, key: int, _: object) -> None:
        del self._watched[key]
        for kept in (self._callers, self._hosted, self._absent, self._assumed):
            kept.discard(key)
