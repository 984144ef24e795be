"""Processes that begin where an interpreter has imported torch and zfunc.

Most of what a short process takes is its imports: seconds of a core, for each rank of each world
that a test starts. Two interpreters do that once and run no thread; each new process is a fork of
one of them. It is the child of whoever asked for it, has the arguments, environment, folder and
streams that it was given, runs its code as ``__main__`` and ends as interpreters end. There are two
since an interpreter orders its sets by a seed of its own: ranks must not rely on one order.

What is read when a process starts (``MALLOC_...``, ``PYTHON...``) is not read again. Tests of that,
of what is imported and of how much memory it takes use ``subprocess``, or the fixture ``cold``.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import itertools
import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT, CompletedProcess, TimeoutExpired
from typing import Any

__all__ = ["DEVNULL", "PIPE", "STDOUT", "CompletedProcess", "Popen", "TimeoutExpired", "run"]

ROOT = Path(__file__).resolve().parents[1]
LONGEST = 1 << 18  # bytes of a request: a command and an environment
PR_SET_CHILD_SUBREAPER = 36  # of linux/prctl.h: orphans of our children become our children


class Popen(subprocess.Popen[Any]):
    """``subprocess.Popen`` of ``[sys.executable, "-c" or "-m", what, *arguments]``."""

    if sys.platform == "linux":

        def _execute_child(self, args: Any, *given: Any) -> None:
            cwd, env, session = given[4], given[5], given[20]
            pipes = given[9:15]  # for each stream the end that is read from and the one written to
            streams = [pipes[0], pipes[3], pipes[5]]
            try:
                self.pid = _forked(
                    {
                        "command": args,
                        "cwd": str(cwd or os.getcwd()),
                        "env": dict(os.environ if env is None else env),
                        "session": session,
                    },
                    [mine if stream == -1 else stream for mine, stream in enumerate(streams)],
                )
                self._child_created = True
            finally:
                self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def run(
    command: list[str],
    *,
    input: str | None = None,
    timeout: float | None = None,
    check: bool = False,
    capture_output: bool = False,
    **how: Any,
) -> CompletedProcess[Any]:
    """``subprocess.run`` of such a process."""
    if input is not None:
        how["stdin"] = PIPE
    if capture_output:
        how["stdout"] = how["stderr"] = PIPE
    with Popen(command, **how) as process:
        try:
            out, err = process.communicate(input, timeout)
        except BaseException:
            process.kill()
            raise
    ran = CompletedProcess(command, process.returncode, out, err)
    if check:
        ran.check_returncode()
    return ran


class _Source:
    """An interpreter that has imported what tests need, and forks."""

    def __init__(self) -> None:
        self.line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.line.settimeout(60)
        start = f"from tests import warm; exec(warm._serve({theirs.fileno()}))"
        self.process = subprocess.Popen(
            [sys.executable, "-c", start],
            cwd=ROOT,
            env=os.environ | {"THP_MEM_ALLOC_ENABLE": "1"},  # as `launch` gives it to its ranks
            stdin=DEVNULL,
            stdout=DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # a Ctrl-C is for who started it
        )
        theirs.close()

    def fork(self, request: dict[str, Any], streams: list[int]) -> int:
        socket.send_fds(self.line, [json.dumps(request).encode()], streams)
        pid = self.line.recv(32)
        assert pid, "what forks has ended: its error stands above"
        return int(pid)

    def end(self) -> None:
        self.line.close()
        self.process.wait()


_lock = threading.Lock()
_sources: list[_Source] = []
_turns = itertools.count()


def _forked(request: dict[str, Any], streams: list[int]) -> int:
    with _lock:
        if not _sources:
            ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            for _ in range(2):
                _sources.append(_Source())
                atexit.register(_sources[-1].end)
        return _sources[next(_turns) % 2].fork(request, streams)


def _serve(line: int) -> str:
    """Fork for each request; in the new process, return its code."""
    import pytest  # noqa: F401
    import torch.fx.experimental.symbolic_shapes  # noqa: F401  (by the first backward)

    import tests.laws.models  # noqa: F401
    import zfunc as zf

    zf.shard, zf.train_step, zf.optim.adamw  # noqa: B018
    importlib.import_module("torch._dynamo")  # by the first checkpointed layer, for a second
    # A process takes over its parent's locks by its environment, when it imports this.
    assert "zfunc.files.locking" not in sys.modules
    gc.collect()
    gc.freeze()  # what all children share is not written to when they collect garbage
    requests = socket.socket(fileno=line)
    while True:
        assert threading.active_count() == len(os.listdir("/proc/self/task")) == 1
        request, streams, *_ = socket.recv_fds(requests, LONGEST, 3)
        if not request:
            os._exit(0)
        if between := os.fork():
            os.waitpid(between, 0)
            for stream in streams:
                os.close(stream)
            continue
        between = os.getpid()
        if os.fork():
            os._exit(0)
        while os.getppid() == between:  # then it is the child of who asks
            time.sleep(0.0005)
        requests.send(str(os.getpid()).encode())
        requests.close()
        return _begun(streams, **json.loads(request))


def _begun(
    streams: list[int], command: list[str], cwd: str, env: dict[str, str], session: bool
) -> str:
    if session:
        os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    _, how, what, *arguments = command
    sys.argv[:] = [how, *arguments]
    sys.path[:0] = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
    if how == "-m":
        return f"import runpy; runpy.run_module({what!r}, run_name='__main__', alter_sys=True)"
    assert how == "-c", f"a warm process runs -c or -m, got {how}"
    return what
