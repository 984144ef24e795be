"""The GPU that a tensor is on: its name, its architecture, its processors. It is asked once."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

__all__ = ["AMD", "Gpu", "gpu"]

AMD = torch.version.hip is not None


@dataclass(frozen=True)
class Gpu:
    """What a launch depends on.

    Attributes:
        name: as torch gives it; ``""`` for none.
        target: what is compiled for: ``"sm_90"``, ``"gfx942"``.
        processors: streaming multiprocessors, or compute units.
    """

    name: str
    target: str
    processors: int


# In the interpreter few programs, so that each walks over more than one tile.
NONE = Gpu("", "gfx" if AMD else "", 2)


def gpu(device: torch.device | None) -> Gpu:
    """The GPU that ``device`` is, or what stands for one where it is none.

    The answer is kept: a launch costs no call of the driver, and the same grid in every step.

    >>> gpu(torch.device("cpu")).processors
    2
    """
    if device is None or device.type != "cuda":
        return NONE
    return _asked(torch.cuda.current_device() if device.index is None else device.index)


@functools.cache
def _asked(index: int) -> Gpu:
    found = torch.cuda.get_device_properties(index)
    target = found.gcnArchName.partition(":")[0] if AMD else f"sm_{found.major}{found.minor}"
    return Gpu(torch.cuda.get_device_name(index), target, int(found.multi_processor_count))
