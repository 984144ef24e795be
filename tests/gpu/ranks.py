"""Ranks of ``zf.launch`` with a pretended GPU each, from before they join their world.

A rank reads its function from its parent before it joins. Reading a :class:`OnGPUs` pretends CUDA
there, so that ``zf.init`` chooses devices and backends as it does beside GPUs.

Two ranks stay for the tests that come after (:class:`Pair`): to start them takes seconds. An error
ends them, and the next test gets others.
"""

from __future__ import annotations

import atexit
import gc
import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import cloudpickle
import torch

import zfunc as zf
from tests.gpu.cuda import Cuda, active
from zfunc.buffers.ring import HOST

__all__ = ["OnGPUs", "end", "launch"]

T = TypeVar("T")


class OnGPUs:
    """A function for ``zf.launch`` that finds a GPU for each local rank."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn

    def __reduce__(self) -> Any:
        return _arrived, (self.fn,)

    def __call__(self, *args: Any) -> Any:
        return self.fn(*args)


def _arrived(fn: Callable[..., Any]) -> Callable[..., Any]:
    if "LOCAL_WORLD_SIZE" not in os.environ:
        return OnGPUs(fn)
    cuda = Cuda(int(os.environ["LOCAL_WORLD_SIZE"]))
    cuda.__enter__()
    atexit.register(cuda.__exit__)
    return fn


def launch(fn: Callable[..., T], *args: Any, nprocs: int = 2, alone: bool = False) -> list[T]:
    """``zf.launch`` with a GPU for each rank; the results, by rank.

    Args:
        alone: in a world of its own, which it may leave broken.
    """
    global _pair
    if alone or nprocs != 2:
        return zf.launch(OnGPUs(fn), *args, nprocs=nprocs, timeout=300)
    if _pair is None:
        _pair = Pair()
    try:
        return _pair.call(fn, *args)
    except BaseException:
        end()
        raise


def end() -> None:
    """The ranks that stay, if there are any, leave."""
    global _pair
    if _pair is not None:
        _pair.end()
        _pair = None


class Pair:
    """Two launched ranks that call one function after the other."""

    def __init__(self) -> None:
        self.lines: list[Connection[Any, Any]] = []
        self.error: BaseException | None = None
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            self.life = threading.Thread(target=self._live, args=(port,), daemon=True)
            self.life.start()
            server.settimeout(0.1)
            while len(self.lines) < 2:
                if not self.life.is_alive():
                    self._fail()
                with suppress(TimeoutError):
                    self.lines.append(Connection(server.accept()[0].detach()))
        self.lines.sort(key=lambda line: line.recv())  # each tells its rank

    def _live(self, port: int) -> None:
        try:
            zf.launch(OnGPUs(_serve), port, nprocs=2, timeout=300)
        except BaseException as error:
            self.error = error

    def _fail(self) -> None:
        self.life.join()
        raise self.error or RuntimeError("the ranks have left")

    def call(self, fn: Callable[..., T], *args: Any) -> list[T]:
        """The results, by rank; what a rank raises, as ``zf.launch`` raises it."""
        try:
            for line in self.lines:
                line.send_bytes(cloudpickle.dumps((fn, args)))
            return [cloudpickle.loads(line.recv_bytes()) for line in self.lines]
        except (EOFError, OSError):
            self._fail()
            raise

    def end(self) -> None:
        for line in self.lines:
            line.close()
        self.life.join()


_pair: Pair | None = None


def _serve(port: int) -> None:
    """The life of a rank that stays: until its line is closed, or something goes wrong."""
    with Connection(socket.create_connection(("127.0.0.1", port)).detach()) as line:
        line.send(zf.rank())
        while True:
            try:
                given = line.recv_bytes()
            except EOFError:
                return
            line.send_bytes(_called(given))


def _called(given: bytes) -> bytes:
    """What a function returns that comes as bytes; nothing of it stays behind."""
    fn, args = cloudpickle.loads(given)
    torch.manual_seed(0)
    active().take()
    found = cloudpickle.dumps(fn(*args))
    del fn, args
    gc.collect()
    HOST.clear()
    return found
