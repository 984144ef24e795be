"""Compiled functions: they run as they are written where each of their operations is to be seen."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["in_compiled", "uncompiled"]

_HERE = os.path.dirname(__file__)
_lock = threading.Lock()
_open = 0
_before: Any = None


@contextmanager
def uncompiled() -> Iterator[None]:
    """A block in which ``torch.compile`` compiles nothing, in no thread.

    Ghosts are no tensors that a compiler knows, and compiling for shapes that are asked for once
    would not pay. In a process that has compiled nothing it is free.
    """
    if "torch._dynamo" not in sys.modules:
        yield
        return
    _enter()
    try:
        yield
    finally:
        _leave()


def in_compiled() -> bool:
    """Whether a function that is under way in a loss is compiled, or would be."""
    frame = sys._getframe(1) if "torch._dynamo" in sys.modules else None
    while frame is not None:
        code = frame.f_code
        if code.co_name == "compile_wrapper":
            return True
        if code.co_name == "run" and code.co_filename.startswith(_HERE):  # it calls the loss
            return False
        frame = frame.f_back
    return False


def _enter() -> None:
    global _open, _before
    import torch

    with _lock:
        if _open == 0:
            _before = torch.compiler.set_stance("force_eager")
            _before.__enter__()
        _open += 1


def _leave() -> None:
    global _open, _before
    with _lock:
        _open -= 1
        if _open == 0:
            _before.__exit__(None, None, None)
            _before = None
