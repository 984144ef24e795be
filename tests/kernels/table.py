"""The table of benchmarks/results/kernel-code.md: what the machine code of every kernel says.

python -m tests.kernels.table --jobs 4
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor

import triton

from benchmarks.gpu_targets import TARGETS
from tests.kernels.entries import ENTRIES
from tests.kernels.hot_loop import SLOTS_PER_BYTE
from tests.kernels.machine_code import Code, Entry, compiled

HELD = ("sm_90", "gfx942")  # to bounds; of the others the table says what there is
OTHERS = tuple(name for name in TARGETS if name not in HELD)
COLUMNS = "slots | of budget | registers | 16-byte loads |"
REST = " ".join(f"{name}: of budget | registers |" for name in OTHERS)
HEAD = f"| kernel | bytes | {COLUMNS} gfx942: {COLUMNS} {REST}"


def rows(read: Callable[[Entry, str], Code | None] = compiled) -> Iterator[str]:
    """The lines of the table, head first; question marks where ``read`` gives nothing."""
    yield HEAD
    yield "|---" * (HEAD.count("|") - 1) + "|"
    for entry in ENTRIES:
        cells = [entry.name, f"{entry.bytes:.4g}"]
        for target in (*HELD, *OTHERS):
            found, held = read(entry, target), target in HELD
            if found is None:
                cells += ["?"] * (4 if held else 2)
                continue
            share = f"{found.slots / (SLOTS_PER_BYTE[target] * entry.bytes):.0%}"
            loads = f"{found.wide_loads} of {found.loads}"
            if held:
                cells += [f"{found.slots:.1f}", share, f"{found.registers}", loads]
            else:
                cells += [share, f"{found.registers}"]
        yield f"| {' | '.join(cells)} |"


def _one(task: tuple[int, str]) -> Code:
    return compiled(ENTRIES[task[0]], task[1])


def main() -> None:
    parser = argparse.ArgumentParser(description="Print the table of kernel-code.md.")
    parser.add_argument("--jobs", type=int, default=1, help="processes that compile")
    jobs = parser.parse_args().jobs
    tasks = [(i, target) for target in TARGETS for i in range(len(ENTRIES))]
    with ProcessPoolExecutor(jobs) as pool:
        codes = dict(zip(tasks, pool.map(_one, tasks, chunksize=4), strict=True))
    places = {entry.name: i for i, entry in enumerate(ENTRIES)}
    print(f"Triton {triton.__version__}:")
    print("\n".join(rows(lambda entry, target: codes[places[entry.name], target])))


if __name__ == "__main__":
    main()
