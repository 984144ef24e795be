"""Streams and events of the pretended device: actors and what one tells the other."""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING, Any

import torch

from tests.gpu.clocks import Actor, Clock

if TYPE_CHECKING:
    from tests.gpu.cuda import Cuda

__all__ = ["Event", "Stream", "StreamContext", "begun", "opened"]

_numbers = itertools.count(1)
_opened: weakref.WeakSet[Stream] = weakref.WeakSet()


def _cuda() -> Cuda:
    from tests.gpu import cuda

    return cuda.active()


class Stream(Actor):
    """As :class:`torch.cuda.Stream`."""

    def __init__(self, name: str, index: int = 0, priority: int = 0) -> None:
        super().__init__(name if index == 0 else f"{name}:{index}")
        self.index, self.priority = index, priority
        self.stream_id = self.cuda_stream = next(_numbers)
        self.device = torch.device("cuda", index)
        self.device_index, self.device_type = index, 1

    def record_event(self, event: Event | None = None) -> Event:
        event = Event() if event is None else event
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def wait_stream(self, other: Stream) -> None:
        self.learn(other.clock)
        _cuda().note("event", f"waits for {other.name}", stream=self.name)

    def synchronize(self) -> None:
        _cuda().sync("stream.synchronize", self)

    def query(self) -> bool:
        return True

    def __enter__(self) -> Stream:
        self._context = StreamContext(self)
        self._context.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._context.__exit__(*error)


def opened(device: Any = None, priority: int = 0, **how: Any) -> Stream:
    """What ``torch.cuda.Stream(...)`` gives: a stream of the side."""
    cuda = _cuda()
    index = cuda.device if device is None else (torch.device(device).index or 0)
    made = Stream(f"side {next(_numbers)}", index, priority)
    cuda.actors[made.name] = made
    _opened.add(made)
    return made


def begun() -> dict[str, Actor]:
    """A session begins: the streams that somebody kept from an earlier one, who know nothing."""
    for stream in _opened:
        stream.clock = {}
    return {stream.name: stream for stream in _opened}


class Event:
    """As :class:`torch.cuda.Event`: what a stream knows at some point."""

    def __init__(self, *args: Any, **how: Any) -> None:
        self.clock: Clock = {}
        self.of = ""
        self.session: Any = None

    def record(self, stream: Stream | None = None) -> None:
        stream = _cuda().current if stream is None else stream
        self.clock, self.of, self.session = dict(stream.clock), stream.name, _cuda()

    def wait(self, stream: Stream | None = None) -> None:
        cuda = _cuda()
        stream = cuda.current if stream is None else stream
        stream.learn(self.clock)
        cuda.note("event", f"waits for an event of {self.of or 'nobody'}", stream=stream.name)

    def synchronize(self) -> None:
        cuda = _cuda()
        if self.of:
            cuda.sync(f"event.synchronize ({self.of})", self)  # type: ignore[arg-type]

    def query(self) -> bool:
        """Whether it has happened: no sooner than the host has waited for it, or for what is
        behind it. A device is never as slow, but may be."""
        from tests.gpu import cuda

        host = (
            None if cuda._active is not self.session or self.session is None else cuda._active.host
        )
        return host is None or all(host.knows(*step) for step in self.clock.items())

    def elapsed_time(self, other: Event) -> float:
        return 1.0


class StreamContext:
    """As :func:`torch.cuda.stream`: launches go to another stream inside."""

    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream
        self._before: list[tuple[int, Stream | None]] = []

    def __enter__(self) -> None:
        cuda = _cuda()
        if self.stream is None:
            return
        self._before.append((cuda.device, cuda.thread.current.get(self.stream.index)))
        cuda.device = self.stream.index
        cuda.thread.current[self.stream.index] = self.stream

    def __exit__(self, *error: object) -> None:
        if self.stream is None:
            return
        cuda = _cuda()
        cuda.device, before = self._before.pop()
        if before is None:
            cuda.thread.current.pop(self.stream.index, None)
        else:
            cuda.thread.current[self.stream.index] = before
