"""Where in somebody's code an operation stands."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path
from types import FrameType

import torch

import zfunc.engine

__all__ = ["site"]

_TORCH = str(Path(torch.__file__).parent)
_OWN = Path(zfunc.engine.__file__).parents[1]
_PYTHON = sysconfig.get_path("stdlib")
_ROOMS = ("rehearsal", "engine", "modules", "operators", "layout", "ranks", "trees", "transforms")
_BELOW = (_TORCH, *(str(_OWN / room) for room in _ROOMS))


def site() -> str:
    """``file:line`` of the innermost frame that is neither torch's nor of the rooms that run it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_below(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return "unknown"
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _is_below(name: str) -> bool:
    ours = name.startswith(_BELOW)
    return ours or (name.startswith(_PYTHON) and "site-packages" not in name)
