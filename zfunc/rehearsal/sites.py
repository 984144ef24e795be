"""Where in somebody's code an operation stands."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import torch

import zfunc.engine

__all__ = ["caller", "site"]

_TORCH = str(Path(torch.__file__).parent)
_OWN = Path(zfunc.engine.__file__).parents[1]
_PYTHON = sysconfig.get_path("stdlib")
_ROOMS = ("rehearsal", "engine", "modules", "operators", "layout", "ranks", "trees", "transforms")
_BELOW = (_TORCH, *(str(_OWN / room) for room in _ROOMS))


def caller() -> FrameType | None:
    """The innermost frame that is not zfunc's: it may be torch's."""
    return _innermost(lambda name: name.startswith(str(_OWN)))


def site() -> str:
    """``file:line`` of the innermost frame that is neither torch's nor of the rooms that run it."""
    frame = _innermost(_is_below)
    return "unknown" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _innermost(passed: Callable[[str], bool]) -> FrameType | None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and passed(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def _is_below(name: str) -> bool:
    ours = name.startswith(_BELOW)
    return ours or (name.startswith(_PYTHON) and "site-packages" not in name)
