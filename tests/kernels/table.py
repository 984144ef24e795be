"""The table of docs/kernels.md: what the machine code of every kernel says.

python -m tests.kernels.table
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import triton

from tests.kernels.entries import ENTRIES
from tests.kernels.hot_loop import SLOTS_PER_BYTE
from tests.kernels.machine_code import Code, Entry, compiled

COLUMNS = "slots | of budget | registers | 16-byte loads |"
HEAD = f"| kernel | bytes | {COLUMNS} gfx942: {COLUMNS}"


def rows(read: Callable[[Entry, str], Code] = compiled) -> Iterator[str]:
    """The lines of the table, head first."""
    yield HEAD
    yield "|---" * (HEAD.count("|") - 1) + "|"
    for entry in ENTRIES:
        cells = [entry.name, f"{entry.bytes:.4g}"]
        for target, budget in SLOTS_PER_BYTE.items():
            found = read(entry, target)
            cells += [f"{found.slots:.1f}", f"{found.slots / (budget * entry.bytes):.0%}"]
            cells += [f"{found.registers}", f"{found.wide_loads} of {found.loads}"]
        yield f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    print(f"Triton {triton.__version__}")
    print("\n".join(rows()))
