"""The table of docs/kernels.md: what the machine code of every kernel says.

python -m tests.kernels.table
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import triton

from tests.kernels.entries import ENTRIES
from tests.kernels.machine_code import SLOTS_PER_BYTE, Code, Entry, compiled

HEAD = "| kernel | bytes | slots | of budget | registers | 16-byte loads | VGPRs, gfx942 |"


def rows(read: Callable[[Entry, str], Code] = compiled) -> Iterator[str]:
    """The lines of the table, head first."""
    yield HEAD
    yield "|---" * (HEAD.count("|") - 1) + "|"
    for entry in ENTRIES:
        nvidia, amd = read(entry, "sm_90"), read(entry, "gfx942")
        share = nvidia.slots / (SLOTS_PER_BYTE * entry.bytes)
        yield (
            f"| {entry.name} | {entry.bytes:.4g} | {nvidia.slots:.1f} | {share:.0%} "
            f"| {nvidia.registers} | {nvidia.wide_loads} of {nvidia.loads} | {amd.registers} |"
        )


if __name__ == "__main__":
    print(f"Triton {triton.__version__}")
    print("\n".join(rows()))
