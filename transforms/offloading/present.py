"""What a state holds on the device, and the host needs: known as soon as the step begins.

The optimizer runs on the host. What stays on the device (parameters, at stages 0 to 2) comes down
for it, unit by unit. Where the host must know a number before it can begin, all of it comes down
beside backward, and the host waits once, for the number.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zfunc.buffers.copies import Leaving, descend
from zfunc.buffers.ring import HOST
from zfunc.engine import context
from zfunc.layout.replicated import Replicated
from zfunc.layout.sharded import Sharded
from zfunc.trees.marks import spent
from zfunc.trees.nodes import OPAQUE, leaves_in

__all__ = ["Present", "present"]

Key = tuple[int, ...]  # the identities of the tensors of which a unit is made


class _Copied(NamedTuple):
    """Flats of a unit on the host, by number, and of what in which version; that stays, so no
    other is taken for it."""

    sources: list[Tensor]
    versions: list[int | None]
    copies: dict[int, Tensor]

    @property
    def valid(self) -> bool:
        return None not in self.versions and self.versions == _versions(self.sources)


class Present:
    """What a state holds on a device.

    Args:
        state: of the running step.
        device: where it computes.
    """

    def __init__(self, state: Any, device: torch.device) -> None:
        found = leaves_in(state, OPAQUE)
        self.trees = [x for x in found if isinstance(x, Replicated) or _away(x, device)]
        self._event: Any = None
        self._versions: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self._copied: dict[Key, _Copied] = {}

    def mark(self, device: torch.device) -> None:
        """From here on the trees are there, those aside that are still being gathered."""
        if self._event is not None:
            return
        self._event = torch.cuda.current_stream(device).record_event()
        for tree in self.trees:
            flats = tree.buffers if isinstance(tree, Replicated) else tree.flats
            under_way = tree.under_way if isinstance(tree, Replicated) else {}
            for i, x in enumerate(flats or ()):
                if x is not None and i not in under_way and not x.is_inference():
                    self._versions[_home(x)] = (weakref.ref(x), x._version)

    def since(self, tensors: Iterable[Tensor]) -> list[Any] | None:
        """Behind what these tensors are there; None if that is all that was launched."""
        return [self._event] if all(map(self._unchanged, tensors)) else None

    def _unchanged(self, x: Tensor) -> bool:
        ref, version = self._versions.get(_home(x), (None, 0))
        was = None if ref is None else ref()
        return was is not None and not spent(was) and not spent(x) and was._version == version

    def bring(self, nodes: Sequence[Any], like: Sharded, device: torch.device) -> None:
        """Copy trees to the host; what is launched from now on comes behind the copies.

        What lies in the state's own memory is copied beside backward. What has to be packed
        first is packed behind it, a few units at a time.

        Args:
            nodes: the trees.
            like: what has no value in it (gradients of what is frozen) is not copied.
            device: where they are.
        """
        home = torch.cuda.current_stream(device)
        events: list[Any] = []
        for node in nodes:
            sizes = [node.layout.unit_nbytes(k) for k in range(len(node.layout.units))]
            leaving = Leaving(2 * max(sizes, default=0))
            for unit in range(len(sizes)):
                held = enumerate(node.part(unit).flats)
                flats = {i: x for i, x in held if like.flats[i] is not None and _filled(x)}
                sources = _sources(node, unit)
                if not flats or _key(sources) in self._copied:
                    continue
                copies = HOST.tensors([(x.numel(), x.dtype) for x in flats.values()])
                after = self.since(flats.values())
                behind = [home.record_event()] if after is None else after
                event = descend(list(flats.values()), copies, "aside", behind, HOST.locked)
                if after is None:
                    leaving.add(event, list(flats.values()))
                elif event is not None:
                    events.append(event)
                found = dict(zip(flats, copies, strict=True))
                self._copied[_key(sources)] = _Copied(sources, _versions(sources), found)
            leaving.end()
        for event in events:
            home.wait_event(event)

    def taken(
        self, parts: Mapping[tuple[Any, int], Sharded]
    ) -> dict[Any, dict[int, Tensor]] | None:
        """Copies of what units of trees hold, if all came down and were not written to since.

        They are forgotten here.

        Args:
            parts: by tree and unit, what is needed of it.
        """
        sources = {key: _sources(*key) for key in parts}
        rows = {key: self._copied.get(_key(one)) for key, one in sources.items()}
        found = {key: row.copies for key, row in rows.items() if row is not None and row.valid}
        for key, part in parts.items():
            needed = {i for i, x in enumerate(part.flats) if _filled(x)}
            if not needed <= found.get(key, {}).keys():
                return None
        for one in sources.values():
            self._copied.pop(_key(one), None)
        return {key: found.get(key, {}) for key in parts}


def present() -> Present | None:
    """What the running step's state holds on a device; None if the step hosts nothing."""
    running = context.current()
    return None if running is None else running.notes.get(Present)


def _away(x: Any, device: torch.device) -> bool:
    return isinstance(x, Sharded) and any(
        y is not None and y.device.type == device.type for y in x.flats
    )


def _home(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _filled(x: Tensor | None) -> bool:
    return x is not None and x.numel() > 0


def _sources(node: Any, unit: int) -> list[Tensor]:
    return [x for x in node.sources(unit) if x is not None]


def _key(sources: Sequence[Tensor]) -> Key:
    return tuple(map(id, sources))


def _versions(sources: Sequence[Tensor]) -> list[int | None]:
    return [None if x.is_inference() else x._version for x in sources]
