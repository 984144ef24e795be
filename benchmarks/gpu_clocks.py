"""Clocks, temperature and what slows a GPU down, by ``nvidia-smi`` or ``rocm-smi`` if there."""

from __future__ import annotations

import json
import shutil
import subprocess
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

__all__ = ["Watch", "reasons", "summed_up"]

FIELDS = (
    "clocks.sm",
    "clocks.mem",
    "clocks.max.sm",
    "temperature.gpu",
    "power.draw",
    "utilization.gpu",
    "clocks_throttle_reasons.active",
)
# nvml.h: nvmlClocksThrottleReason...; of an idle GPU, or asked for by the user, is no news.
REASONS = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "software thermal",
    0x40: "hardware thermal",
    0x80: "power brake",
}


def reasons(mask: int) -> list[str]:
    """The names of what holds the clocks down.

    >>> reasons(0x24)
    ['power cap', 'software thermal']
    """
    return [name for bit, name in REASONS.items() if mask & bit]


def summed_up(lines: Iterable[str]) -> dict[str, Any]:
    """What ``nvidia-smi`` wrote, of the moments in which the GPU was busy.

    >>> busy = ["1980, 2619, 1980, 41, 610.5, 99, 0x0", "1410, 2619, 1980, 63, 699.1, 99, 0x4"]
    >>> found = summed_up([*busy, "345, 2619, 1980, 35, 80, 0, 0x1"])
    >>> found["sm_mhz"], found["celsius"], found["throttled"], found["samples"]
    ([1410, 1980], 63, ['power cap'], 2)
    """
    rows = []
    for line in lines:
        words = [word.strip() for word in line.split(",")]
        try:
            rows.append([*(float(word) for word in words[:-1]), float(int(words[-1], 16))])
        except (ValueError, IndexError):  # a value that this GPU does not tell, or half a line
            continue
    busy = [row for row in rows if row[5] > 50] or rows
    if not busy:
        return {}
    sm, memory, most, celsius, watts, _, masks = zip(*busy, strict=True)
    mask = 0
    for each in masks:
        mask |= int(each)
    return {
        "sm_mhz": [int(min(sm)), int(max(sm))],
        "memory_mhz": int(max(memory)),
        "max_sm_mhz": int(max(most)),
        "celsius": int(max(celsius)),
        "watts": int(max(watts)),
        "throttled": reasons(mask),
        "samples": len(busy),
    }


class Watch:
    """One process that notes the first GPU's clocks every half second, into ``clocks.csv``."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        self.path = folder / "clocks.csv"
        self.process: subprocess.Popen[bytes] | None = None
        if device.type == "cuda" and shutil.which("nvidia-smi"):
            which = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
            query = f"--query-gpu={','.join(FIELDS)}"
            command = ["nvidia-smi", f"--id={which}", query, "--format=csv,noheader,nounits"]
            with self.path.open("w") as file:
                self.process = subprocess.Popen(
                    [*command, "-lms", "500"], stdout=file, stderr=subprocess.DEVNULL
                )
            weakref.finalize(self, self.process.kill)  # whatever becomes of the run

    def stop(self) -> dict[str, Any]:
        """What was seen; of an AMD GPU what ``rocm-smi`` says now; nothing where neither is."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            return summed_up(self.path.read_text().splitlines())
        if torch.version.hip and shutil.which("rocm-smi"):
            command = ["rocm-smi", "--showclocks", "--showtemp", "--showpower", "--json"]
            said = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
            try:
                return {"rocm_smi": json.loads(said.stdout)}
            except ValueError:
                return {}
        return {}


def driver() -> str:
    """The driver's version; empty where no tool says it."""
    if not shutil.which("nvidia-smi"):
        return ""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    return said.stdout.partition("\n")[0].strip()
