"""Every Triton kernel in the interpreter, against its twin.

The interpreter must be chosen before Triton is imported, so these tests run in processes of their
own, each with a share of the files: a process spends seconds on imports before its first test, and
on a slow CPU one for all would need longer than a test may.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PARTS = 4
FILES = sorted((HERE / "interpreted").glob("test_*.py"))

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="there is no Triton for this platform"
)


def test_there_are_files():
    assert FILES


@pytest.mark.parametrize("part", range(PARTS))
def test_in_the_interpreter(part: int):
    files = map(str, FILES[part::PARTS])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    ran = subprocess.run(
        [*command, *files],
        cwd=HERE.parents[1],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONFAULTHANDLER": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
