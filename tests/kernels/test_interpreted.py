"""Every Triton kernel in the interpreter, against its twin: one process for each family."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FILES = sorted((HERE / "interpreted").glob("test_*.py"))

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="there is no Triton for this platform"
)


def test_there_are_files():
    assert FILES


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_in_the_interpreter(file: Path):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    ran = subprocess.run(
        [*command, str(file)],
        cwd=HERE.parents[1],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
