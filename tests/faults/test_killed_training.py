"""SIGKILL at random instants of a run that is offloaded to disk and saves checkpoints."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests import warm
from tests.laws.covering import Covering

ROOT = Path(__file__).resolve().parents[2]


def test_every_restart_goes_on_and_ends_where_the_uninterrupted_run_does(tmp_path: Path) -> None:
    """Restarted by ``zf.recover`` or ``zf.restore``, on one rank or two; 200 with ``--whole``."""
    kills = 200 if Covering.whole else 8
    ran = warm.run(
        [sys.executable, "-m", "tests.faults.killed_training", str(tmp_path), str(kills), "3"],
        capture_output=True, text=True, cwd=ROOT, timeout=1800,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-3000:]
    found = json.loads(ran.stdout)
    assert found["kills"] >= kills and found["runs"] >= 4
    assert found["resumed"] >= kills // 4  # or most were killed before they had begun
