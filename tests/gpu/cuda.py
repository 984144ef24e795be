"""A CUDA device that is not there: tensors compute on the CPU, say ``cuda:0``, and are watched.

Inside :class:`Cuda` the project's own code runs as it would beside a GPU: ``torch.cuda`` answers,
``torch.empty(3, device="cuda")`` is an ordinary CPU tensor that says ``cuda:0``, and operations
see whether their operands are on one device. What is asked of the device is written down
(:mod:`tests.gpu.record`), and vector clocks tell whether streams, communicators and the host use
memory in an order that the device would keep (:mod:`tests.gpu.clocks`).
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from tests.gpu.clocks import Actor
from tests.gpu.memory import Memory, Table, real_device, span
from tests.gpu.operations import Mode, leaves_of
from tests.gpu.record import Kind, Report, Row
from tests.gpu.streams import Stream
from zfunc.ranks.simulation import modes_put_back

__all__ = ["Cuda", "active", "pretended"]

TABLE = Table()
OURS = ("/zfunc/", "/transforms/", "/optim/", "/kernels/", "/quant/")
HERE = __file__.rpartition("/")[0]

_active: Cuda | None = None


def active() -> Cuda:
    """The pretended CUDA of this process.

    Raises:
        RuntimeError: there is none.
    """
    if _active is None:
        raise RuntimeError("no CUDA is pretended here: with Cuda(): ...")
    return _active


def pretended() -> Cuda | None:
    """The pretended CUDA of this process, if there is one."""
    return _active


class _Thread(threading.local):
    """What each thread has of its own."""

    def __init__(self) -> None:
        self.current: dict[int, Stream] = {}
        self.quiet = 0
        self.changed: set[int] | None = None  # storages that a twin writes


class Cuda:
    """One process with GPUs that are not there.

    Args:
        devices: how many GPUs this process sees.
        strict: whether operations that mix devices raise, as on CUDA; they are recorded anyway.
        patience: seconds for backward, beyond which its thread counts as hanging.
        arguments: whether rows keep their arguments, for :meth:`Report.difference`.

    >>> with Cuda() as cuda:
    ...     x = torch.ones(2, device="cuda") + 1
    ...     print(x.device, x.is_cuda, type(x).__name__, cuda.report.launches())
    cuda:0 True Tensor 2
    """

    def __init__(
        self,
        devices: int = 1,
        *,
        strict: bool = True,
        patience: float = 120.0,
        arguments: bool = False,
    ) -> None:
        self.devices, self.strict, self.patience = devices, strict, patience
        self.keeps_arguments = arguments
        self.report = Report()
        self.host = Actor("host")
        self.defaults = [Stream("compute", i) for i in range(max(1, devices))]
        self.actors: dict[str, Actor] = {"host": self.host}
        self.actors |= {stream.name: stream for stream in self.defaults}
        self.device = 0
        self.collectives: list[Any] = []
        self.capturing: Any = None
        self.thread = _Thread()
        self.mode = Mode(self)
        self._undo = contextlib.ExitStack()

    # Its life

    def __enter__(self) -> Cuda:
        from tests.gpu import patches, streams

        global _active
        if _active is not None:
            raise RuntimeError("CUDA is pretended here already")
        _active = self
        TABLE.begin(session=True)
        TABLE.freed = self._freed
        self.actors |= streams.begun()
        self._undo.enter_context(modes_put_back())  # threads of the program are in it, too
        self._undo.enter_context(patches.installed(self))
        self.mode.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        global _active
        self.mode.__exit__(None, None, None)
        self._undo.close()
        TABLE.freed = lambda memory: None
        _active = None

    def take(self) -> Report:
        """What happened since the last time; a new step begins."""
        taken, self.report = self.report, Report()
        TABLE.begin()
        return taken

    # The record

    def where(self) -> str:
        """The innermost line of the project that is running, and who called it."""
        frame: Any = sys._getframe(1)
        found: list[str] = []
        while frame is not None:
            code = frame.f_code
            short = _KNOWN.get(code.co_filename)
            if short is None:
                short = _short(code.co_filename)
            if short:
                found.append(f"{short}:{frame.f_lineno} {code.co_name}")
                if len(found) == 3:
                    break
            frame = frame.f_back
        return " < ".join(found) or "(outside)"

    def note(self, kind: Kind, what: str, where: str | None = None, **more: Any) -> None:
        """Write a row down, unless the harness itself is at work."""
        if not self.thread.quiet:
            stream = more.pop("stream", self.current.name)
            row = Row(kind, what, self.where() if where is None else where, stream, **more)
            self.report.rows.append(row)

    def sync(self, what: str, actor: Actor | None = None) -> None:
        """The host waits for everything that was issued on a stream."""
        if self.capturing is not None and not self.thread.quiet:
            raise RuntimeError(f"{what}: operation not permitted when stream is capturing")
        self.host.learn((actor or self.current).clock)
        self.note("sync", what)

    @contextlib.contextmanager
    def quietly(self) -> Iterator[None]:
        """What runs here is the harness's own: nothing is written down or watched."""
        self.thread.quiet += 1
        try:
            yield
        finally:
            self.thread.quiet -= 1

    @contextlib.contextmanager
    def away(self) -> Iterator[None]:
        """What runs here has no device: its operations are not looked at."""
        with self.quietly(), _disable_current_modes():
            yield

    @contextlib.contextmanager
    def seeing(self) -> Iterator[None]:
        """See what this thread does from here on, if it is not one that is seen."""
        modes = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
        if self.mode in modes:
            yield
        else:
            with self.mode:
                yield

    @property
    def recording(self) -> Any:
        """The graph that what is launched here goes into, if there is one."""
        return None if self.thread.quiet else self.capturing

    # Devices and memory

    @property
    def current(self) -> Stream:
        """The stream that this thread launches on."""
        return self.thread.current.get(self.device) or self.defaults[self.device]

    def find(self, x: Tensor) -> Memory | None:
        return TABLE.find(x)

    def device_of(self, x: Tensor) -> torch.device:
        """Where a tensor pretends to be."""
        found = TABLE.find(x)
        if found is None or found.device is None:
            return real_device(x)  # type: ignore[no-any-return]
        return torch.device("cuda", found.device)

    def on_gpu(self, x: object) -> bool:
        if not isinstance(x, Tensor):
            return False
        found = TABLE.find(x)
        return found is not None and found.device is not None

    def adopt(self, x: Tensor, device: int | None = None) -> Tensor:
        """A tensor's storage is the GPU's from now on."""
        home = self.current.name if self.capturing is None else "a graph's pool"
        TABLE.add(x, device=self.device if device is None else device, home=home)
        return x

    def lock(self, x: Tensor) -> Tensor:
        """A tensor's storage is page-locked from now on."""
        TABLE.add(x, device=None, home="host", pinned=True)
        self.note("pin", "pinned memory", nbytes=x.untyped_storage().nbytes())
        return x

    def pinned(self, x: Tensor) -> bool:
        found = TABLE.find(x)
        return found is not None and found.pinned

    def use(self, actor: Actor, x: Tensor, writes: bool, where: str, what: str) -> None:
        """An actor uses memory: it should know what was done there before."""
        if self.thread.quiet or self.capturing is not None or not x.numel():
            return
        memory = TABLE.find(x)
        if memory is None:
            return
        start, stop = span(x, TABLE.start_of(x, memory))
        step = actor.clock.get(actor.name, 0)
        for use in memory.uses.enter(actor, step, start, stop, writes, where):
            does = "overwrites" if writes else "reads"
            did = "wrote" if use.writes else "reads"
            text = f"{actor.name} {does} in {what} what {use.actor} {did} at {use.where}"
            self.note("race", text, where, nbytes=x.nbytes)

    def _freed(self, memory: Memory) -> None:
        """Memory goes back to its stream: nobody else may still be using it."""
        home = self.actors.get(memory.home)
        if memory.device is None or home is None or memory.session != TABLE.session:
            return
        for use in memory.uses.unseen(home):
            if use.actor not in (memory.home, "host") and use.actor not in memory.kept:
                text = f"memory of {memory.home} freed while {use.actor} may use it"
                self.note("race", text, use.where, nbytes=memory.nbytes)

    # Launches

    def issue(
        self,
        what: str,
        reads: Sequence[Tensor] = (),
        writes: Sequence[Tensor] = (),
        *,
        kind: Kind = "launch",
        on: Actor | None = None,
        **more: Any,
    ) -> None:
        """The host gives the device something to do on a stream."""
        if self.thread.quiet:
            return
        actor = on or self.current
        where = self.where()
        actor.learn(self.host.clock)
        actor.step()
        self.note(kind, what, where, stream=actor.name, **more)
        if self.recording is not None:  # nothing is done yet
            self.recording.touches(reads, writes)
            return
        for x in reads:
            self.use(actor, x, False, where, what)
        for x in writes:
            self.use(actor, x, True, where, what)

    def named(self, args: Any) -> tuple[Any, ...]:
        """Arguments as they are compared between steps; ``()`` if they are not kept."""
        if not self.keeps_arguments or self.thread.quiet:
            return ()
        return tuple(self._named(x) for x in leaves_of(args))

    def _named(self, x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x if isinstance(x, int | float | bool | str | None) else str(x)
        memory = TABLE.find(x)
        like = (tuple(x.shape), x.stride(), str(x.dtype))
        if memory is None:  # a number of the host travels with the launch
            return ("host", x.item() if x.ndim == 0 and not x.requires_grad else "pageable", *like)
        at = x.data_ptr() - TABLE.start_of(x, memory)
        side = "host" if memory.device is None else "gpu"
        fresh = memory.born[0] == TABLE.step
        name = f"{side} new {memory.born[1]}" if fresh else f"{side} {memory.number}"
        return (name, at, *like)

    def mixed(self, what: str, text: str) -> None:
        """Operands are on different devices."""
        self.note("mixed", f"{what}: {text}")
        if self.strict:
            raise RuntimeError(
                f"{what}: Expected all tensors to be on the same device, but found at least two "
                f"devices, cuda:0 and cpu! ({text}; at {self.where()})"
            )


def _short(filename: str) -> str:
    """A file of the project by its path in the repository, ``""`` for all others."""
    found = ""
    if not filename.startswith(HERE) and "site-packages" not in filename:
        parts = [part for part in OURS if part in filename]
        tails = [part[1:] + filename.rpartition(part)[2] for part in parts]
        found = min(tails, key=len, default="")
    _KNOWN[filename] = found
    return found


_KNOWN: dict[str, str] = {}
