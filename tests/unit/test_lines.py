"""``benchmarks.lines``: every script ends where one process does, and the page has the counts."""

from __future__ import annotations

import os
import runpy
import sys
from collections import Counter
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from benchmarks.lines.__main__ import NAMES, statements, table
from tests import warm

ROOT = Path(__file__).parents[2]


# DDP's reducer is the last to hold the process group, and ends it with the GIL held. That joins
# gloo's thread, which may wait for the GIL to let go of the last tensors: some processes hang when
# they end (torch 2.13; pytorch/pytorch#56297). Here the reducer is kept until there is no process.
KEPT = """
import os, runpy, sys
kept = runpy.run_module({module!r}, run_name="__main__")
sys.stdout.flush()
os._exit(0)
"""


def command(name: str) -> list[str]:
    module = f"benchmarks.lines.with_{name}"
    if name in ("ddp", "accelerate"):
        return [sys.executable, "-c", KEPT.format(module=module)]
    return [sys.executable, "-m", module]


@pytest.mark.parametrize("name", NAMES)
def test_a_script_ends_where_one_process_does(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    runpy.run_module("benchmarks.lines.plain")
    wanted = float(capsys.readouterr().out)
    # As torchrun does, the store is there before the ranks, who need not find a free port.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    told = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    told |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    told |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    ranks = [
        warm.Popen(
            command(name),
            env={**os.environ, **told, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            cwd=ROOT,
            stdout=warm.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=60)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert float(said[0]) == pytest.approx(wanted, rel=1e-5) and not said[1]


def test_the_page_has_the_counts() -> None:
    assert table() in (ROOT / "docs" / "figures" / "lines.md").read_text()


def test_heads_count_and_what_is_inside_of_them_once(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        '"""Told."""\nfor x in y:  # so\n    if x:\n        f(\n            x)\nf(x)\n'
    )
    assert statements(script) == Counter({"for x in y:": 1, "if x:": 1, "f(x)": 2})
