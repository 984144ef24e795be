"""Starting ranks: ``init`` joins the world that torchrun describes, ``launch`` starts a local one.

Nobody off this machine has anything to say to a launched world: whatever it opens listens on the
loopback interface.

``launch`` starts each rank as a fresh interpreter: forking after multithreaded torch work hangs.
The function and its arguments travel by cloudpickle, so lambdas and notebook cells work and the
main module is not imported again. A rank keeps its standard input open to the parent: when the
parent dies, however it dies, the rank sees the end of file and exits.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import cloudpickle  # type: ignore[import-untyped]
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from zfunc.errors import DesyncError
from zfunc.ranks import devices, listening, world
from zfunc.ranks.distributed import DistributedWorld
from zfunc.ranks.gloo import lazily_connected
from zfunc.ranks.transport import EXITED, exited

__all__ = ["init", "launch"]

T = TypeVar("T")
LARGE_PAGES = "THP_MEM_ALLOC_ENABLE"
PAUSE = 0.05  # seconds between two looks at the ranks, which each look costs time
GRACE = 3.0  # seconds that the other ranks get to report once one has failed


def init(timeout: float | None = None, device: str | None = None) -> world.World:
    """Join the world that torchrun's (or ``launch``'s) environment describes. Idempotent.

    Every rank computes on a GPU of its own, with NCCL between them, if all have one: the only one
    that it sees, or the one of its number on its host. If none has, all compute on the CPU. Without
    such an environment this process stays a world of one. Where the process group has been made
    already, with NCCL or gloo, the world is that group's, and it is left as it is.

    Args:
        timeout: seconds a collective waits for a silent peer; default ``ZFUNC_TIMEOUT`` or 600.
        device: ``"cpu"``, or ``"cuda"``, or one GPU as ``"cuda:1"``; default ``ZFUNC_DEVICE``, or
            what there is.

    Returns:
        The world, which is from now on ``zfunc.ranks.world.current()``.

    Raises:
        DeviceError: some ranks have no GPU of their own where others have; on all ranks alike.
        ValueError: another ``device``.
    """
    _tune_memory()
    devices.asked(device)
    joined = world.current()
    if timeout is not None:
        joined.timeout = float(timeout)
    if isinstance(joined, DistributedWorld) and device is not None:
        joined.ask(device)
    if joined.size > 1 or int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return joined
    seconds = world.default_timeout() if timeout is None else float(timeout)
    agreed = _join(seconds, devices.asked(device))
    joined = DistributedWorld(seconds, agreed=agreed)
    world.adopt(joined)
    return joined


def _join(seconds: float, wanted: str | None) -> torch.device:
    limit = timedelta(seconds=seconds)
    store, rank, size = next(rendezvous("env://", timeout=limit))
    # torchrun keeps its store when it restarts the ranks, with the addresses of those that died.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = PrefixStore(f"zfunc/attempt_{attempt}", store)
    device = devices.agree(PrefixStore("devices", store), rank, size, wanted)
    where = {"store": store, "rank": rank, "world_size": size, "timeout": limit}
    with lazily_connected():
        if device.type == "cuda":
            torch.cuda.set_device(device)
            dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device, **where)
        else:
            dist.init_process_group("gloo", **where)
    atexit.register(_leave)
    return device


def _leave() -> None:
    world.adopt(None)
    if dist.is_initialized():
        dist.destroy_process_group()


def _tune_memory() -> None:
    """Give freed memory back to the system, and take it in large pages.

    By default glibc raises its threshold for returning blocks as they are freed, up to 32 MiB, and
    keeps what is below: sharding would not show in a process's memory. From here on every block of
    1 MiB goes back, unless the environment sets ``MALLOC_MMAP_THRESHOLD_``. Fresh pages are then
    asked for more often, which costs a fault each; torch asks for 2 MiB pages under a variable
    that it reads when it makes its first tensor.
    """
    os.environ.setdefault(LARGE_PAGES, "1")
    if platform.libc_ver()[0] != "glibc" or "MALLOC_MMAP_THRESHOLD_" in os.environ:
        return
    trim_threshold, mmap_threshold = -1, -3  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD in malloc.h
    libc = ctypes.CDLL(None)
    for option in (mmap_threshold, trim_threshold):
        libc.mallopt(option, 2**20)


def launch(
    fn: Callable[..., T], *args: Any, nprocs: int = 2, timeout: float | None = None
) -> list[T]:
    """Run ``fn(*args)`` on ``nprocs`` local processes, each of them a rank of one world.

    Works from scripts and notebooks. SIGTERM is passed on to the ranks, which may end in their own
    time, and ends them where they do not catch it. On the CPU the cores are divided between the
    ranks, unless ``OMP_NUM_THREADS`` says otherwise.

    Args:
        fn: any function, a lambda or one defined in a notebook included.
        args: sent to every rank.
        nprocs: the number of ranks.
        timeout: seconds a collective waits for a silent peer; default ``ZFUNC_TIMEOUT`` or 600.

    Returns:
        The results, by rank.

    Raises:
        TypeError: ``fn`` cannot be called.
        ValueError: ``nprocs`` is not positive.
        DesyncError: a rank ended without a word, or a collective failed.
        Exception: what a rank raised, with its rank and traceback as a note; the other ranks
            have been ended.
    """
    if not callable(fn):
        raise TypeError(f"launch() got {fn!r} for a function. Write launch(fn, *args, nprocs=2).")
    if nprocs < 1:
        raise ValueError(f"launch(nprocs={nprocs}): expected at least one rank")
    seconds = world.default_timeout() if timeout is None else float(timeout)
    payload = cloudpickle.dumps((fn, args, seconds))
    store = _store()
    with tempfile.TemporaryDirectory(prefix="zfunc-") as folder:
        ranks = [_Rank(rank, nprocs, store.port, Path(folder)) for rank in range(nprocs)]
        try:
            with _passing_on_sigterm(ranks):
                for rank in ranks:
                    rank.send(payload)
                outcomes = _gather(ranks)
        finally:
            for rank in ranks:
                rank.dismiss()
            for rank in ranks:
                rank.end()
    return [outcomes[rank] for rank in range(nprocs)]


def _store() -> dist.TCPStore:  # type: ignore[name-defined]
    """The store through which the ranks find each other; by itself torch opens it to everybody."""
    with socket.create_server((listening.HERE, 0), backlog=listening.BACKLOG) as server:
        port = server.getsockname()[1]
        return dist.TCPStore(  # type: ignore[attr-defined]
            listening.HERE,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=server.detach(),
        )


class _Rank:
    """One local rank as its parent sees it."""

    def __init__(self, rank: int, nprocs: int, port: int, folder: Path) -> None:
        self.rank = rank
        self.result = folder / str(rank)
        environment = os.environ | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(nprocs),
            "LOCAL_WORLD_SIZE": str(nprocs),
            "MASTER_ADDR": listening.HERE,
            "MASTER_PORT": str(port),
            **listening.loopback(),
            LARGE_PAGES: os.environ.get(LARGE_PAGES, "1"),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # the parent serves the store, not rank 0
        }
        start = f"import sys; sys.path[:] = {sys.path!r}; "
        start += f"from zfunc.ranks.launching import _serve; _serve({str(self.result)!r})"
        self.process = subprocess.Popen(
            [sys.executable, "-c", start], stdin=subprocess.PIPE, env=environment
        )

    def send(self, payload: bytes) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it has died already, which its exit status will tell
            self.process.stdin.write(len(payload).to_bytes(8, "little") + payload)
            self.process.stdin.flush()

    def done(self) -> bool:
        """Whether it has left a result, or died without one."""
        return self.result.exists() or self.process.poll() is not None

    def dismiss(self) -> None:
        """Let the process go: it ends by itself if it has left its result, or at once."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()

    def end(self) -> None:
        """Return when the process is gone, whatever that takes."""
        try:
            self.process.wait(GRACE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@contextmanager
def _passing_on_sigterm(ranks: list[_Rank]) -> Iterator[None]:
    """What the system, or a scheduler, asks of this process, it asks of the ranks."""
    mine = threading.current_thread() is threading.main_thread()
    if not mine or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield  # signals belong to the main thread, and handlers to whoever has set them
        return

    def pass_on(number: int, frame: object) -> None:
        for rank in ranks:
            rank.process.terminate()

    signal.signal(signal.SIGTERM, pass_on)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _gather(ranks: list[_Rank]) -> dict[int, Any]:
    """Results by rank, or the error that explains the failure."""
    results: dict[int, Any] = {}
    errors: dict[int, BaseException] = {}
    deadline = float("inf")
    while len(results) + len(errors) < len(ranks) and time.monotonic() < deadline:
        time.sleep(PAUSE)  # first: nobody is done yet, and behind the last result nothing waits
        for rank in ranks:
            if rank.rank in results or rank.rank in errors or not rank.done():
                continue
            succeeded, value = _outcome(rank)
            (results if succeeded else errors)[rank.rank] = value
        if errors and deadline == float("inf"):
            deadline = time.monotonic() + GRACE
        if any(not isinstance(error, DesyncError) for error in errors.values()):
            break  # a cause, not a consequence: nothing better will come
    if errors:
        raise _culprit(errors)
    return results


def _outcome(rank: _Rank) -> tuple[bool, Any]:
    if not rank.result.exists():
        code = rank.process.returncode
        ending = f"was ended by signal {-code}" if code < 0 else f"exited with status {code}"
        return False, DesyncError(f"rank {rank.rank} {ending} and gave no result")
    succeeded, value, text = cloudpickle.loads(rank.result.read_bytes())
    if not succeeded:
        value.add_note(f"raised on rank {rank.rank} of a launched world:\n{text}")
    return succeeded, value


def _culprit(errors: dict[int, BaseException]) -> BaseException:
    """A cause rather than a consequence: no DesyncError, else a rank that died, else the lowest."""
    order = sorted(
        errors.items(),
        key=lambda item: (
            isinstance(item[1], DesyncError),
            not any(cause in str(item[1]) for cause in ("gave no result", EXITED)),
            item[0],
        ),
    )
    first = order[0][1]
    for rank, error in order[1:]:
        first.add_note(f"rank {rank} then raised {type(error).__name__}: {error}")
    return first


def _serve(result: str) -> None:
    """The life of a launched rank."""
    parent = os.dup(0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    payload = _read(parent, int.from_bytes(_read(parent, 8), "little"))
    finished = threading.Event()
    watch = threading.Thread(target=_watch, args=(parent, finished), daemon=True)
    watch.start()
    try:
        fn, args, seconds = cloudpickle.loads(payload)
        _share_cores()
        init(timeout=seconds)
        outcome: tuple[bool, Any, str] = (True, fn(*args), "")
        for finish in world.on_leave:
            finish()
        world.current().depart("has returned")
    except SystemExit as error:
        failure = exited(int(os.environ["RANK"]), error)
        outcome = (failure is None, failure, traceback.format_exc())
        if failure is None:
            world.current().depart(EXITED)
    except BaseException as error:
        outcome = (False, error, traceback.format_exc())
    finished.set()
    _write(Path(result), outcome)
    if not outcome[0]:
        # At once: peers that wait for this rank see its connections close.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
    watch.join()  # peers may still be reading what this rank sent: all leave together


def _read(source: int, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        part = os.read(source, length - len(data))
        if not part:
            os._exit(1)  # the parent has died
        data += part
    return bytes(data)


def _watch(parent: int, finished: threading.Event) -> None:
    # Not through sys.stdin: a buffered reader held by a daemon thread cannot be finalised.
    os.read(parent, 1)
    if not finished.is_set():
        os._exit(1)


def _share_cores() -> None:
    if "OMP_NUM_THREADS" not in os.environ:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        torch.set_num_threads(max(1, (cores or 1) // int(os.environ["LOCAL_WORLD_SIZE"])))


def _write(result: Path, outcome: tuple[bool, Any, str]) -> None:
    try:
        data = cloudpickle.dumps(outcome)
        if not outcome[0]:
            cloudpickle.loads(data)  # some exceptions pickle but cannot be built again
    except Exception as error:
        what = "result" if outcome[0] else "error"
        text = f"the {what} could not be sent to the parent: {error!r}\n{outcome[2]}"
        data = cloudpickle.dumps((False, RuntimeError(text), outcome[2]))
    partial = result.with_suffix(".partial")
    partial.write_bytes(data)
    partial.replace(result)
