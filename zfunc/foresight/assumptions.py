"""What a prediction rests on: the values that it had to guess, each with its place."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch

import zfunc.errors
from zfunc.engine.step import Step
from zfunc.errors import ZfuncError

__all__ = ["Assumption", "ForesightError", "Guesses", "allowance", "later", "outside"]

_TORCH = str(Path(torch.__file__).parent)
_OWN = Path(zfunc.errors.__file__).parent


class ForesightError(ZfuncError, RuntimeError):
    """What a step does depends on what nobody knows before it runs."""


@dataclass(frozen=True)
class Assumption:
    """Something that the figures depend on and that nobody can know before.

    Attributes:
        place: ``file:line`` where a value is read, or ``""``.
        what: in words.
        times: how often.
    """

    place: str
    what: str
    times: int = 1

    def __str__(self) -> str:
        often = f" ({self.times} times)" if self.times > 1 else ""
        return f"{self.place}: {self.what}{often}" if self.place else self.what


class Guesses:
    """The values that were read while a step was foreseen, and had to be guessed."""

    def __init__(self) -> None:
        self._found: Counter[tuple[str, str]] = Counter()

    def add(self, what: str) -> None:
        """A guess, at the place in the program that is running."""
        self._found[place(), what] += 1

    def clear(self) -> None:
        """Begin anew."""
        self._found.clear()

    def listed(self) -> list[Assumption]:
        """All of them, in the order in which they were met."""
        return [Assumption(where, what, n) for (where, what), n in self._found.items()]


CONTEXT, BUFFERS, FRAGMENTS = 1 << 30, 1 << 30, 0.05
"""Of a GPU's memory: for the CUDA context and libraries, for NCCL, and a share of the peak."""


def allowance(peak_bytes: int, device: str) -> int:
    """Bytes to leave free for what is no tensor: a guess, unmeasured."""
    return CONTEXT + BUFFERS + int(FRAGMENTS * peak_bytes) if device == "cuda" else 0


def outside(step: Step, device: str, ranks: int) -> list[Assumption]:
    """What is not in the figures of a step, with an allowance for it."""
    found = []
    if ranks > 1 and not any(t.averages or t.of_params or t.mesh for t in step.transforms):
        found.append(
            f"no transform of the step knows of other ranks: each of {ranks} trains by itself "
            "(zf.shard averages over them)"
        )
    if device != "cuda":
        found.append("outside of the count: libraries, threads and connections")
        return [Assumption("", what) for what in found]
    found += [
        "outside of the count: the CUDA context and what libraries hold there (allow "
        f"{CONTEXT >> 30} GiB), buffers of NCCL (allow {BUFFERS >> 30} GiB), fragmentation (allow "
        f"{100 * FRAGMENTS:.0f} % of the peak); a guess, unmeasured",
        "kernels of Triton are foreseen as their twins in torch, compiled layers as eager ones",
    ]
    if any(t.name == "offload" for t in step.transforms):
        found.append("the host has the memory for what offload keeps there, which is not counted")
    return [Assumption("", what) for what in found]


def later(step: Step, labels: Iterable[str], ranks: int) -> list[Assumption]:
    """What begins only behind the steps that are foreseen.

    Args:
        labels: of what the last of them sends.
    """
    compresses = ranks > 1 and any(t.name == "compress_grads" for t in step.transforms)
    if not compresses or any(label.startswith("compress") for label in labels):
        return []
    return [
        Assumption(
            "",
            "in these steps gradients are not compressed yet: foresee(steps=3) of a step with "
            "compress_grads(freeze_step=1) is one in which they are",
        )
    ]


def place() -> str:
    """``file:line`` of the innermost frame that is neither torch's nor of what watches calls."""
    frame: FrameType | None = sys._getframe(1)
    below = (_TORCH, str(_OWN / "foresight"), str(_OWN / "engine" / "products"))
    while frame is not None and frame.f_code.co_filename.startswith(below):
        frame = frame.f_back
    if frame is None:
        return "unknown"
    name = frame.f_code.co_filename
    ours = Path(name).is_relative_to(_OWN)
    return f"{Path(name).relative_to(_OWN.parent) if ours else name}:{frame.f_lineno}"
