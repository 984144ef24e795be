"""One thread per process, reproducible examples, the world as it was: for every test."""

from __future__ import annotations

import gc
import os
import subprocess
from collections.abc import Iterator

# Before torch is imported, and inherited by every rank that a test starts: the suite runs one
# process per core, and BLAS threads on top of that only fight each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("MPLBACKEND", "Agg")

import hypothesis
import pytest
import torch

from tests import warm
from tests.laws.covering import Covering
from zfunc.ranks import launching

torch.set_num_threads(1)

# A deadline measures the neighbours' load, not the code. CI draws the same examples every time,
# so that a red build can be repeated; at a desk hypothesis may look for new ones.
hypothesis.settings.register_profile("desk", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "desk")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Start every test from one generator state, so that their order cannot matter."""
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def _warm_ranks() -> Iterator[None]:
    """Ranks of ``zf.launch`` have torch and zfunc from the beginning (``tests/warm.py``)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launching, "subprocess", warm)
        yield


@pytest.fixture
def cold(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are interpreters that start, as users have them."""
    monkeypatch.setattr(launching, "subprocess", subprocess)


@pytest.fixture(scope="module")
def thawed() -> Iterator[None]:
    """``zf.foresee`` looks for garbage in each step. What is there before it freezes by itself,
    where nothing is frozen."""
    gc.unfreeze()
    yield
    gc.collect()
    gc.freeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--whole",
        action="store_true",
        help="every combination of what the laws hold for, every kill: hours instead of minutes",
    )


def pytest_collection_finish() -> None:
    """Garbage is looked for in what tests make, not in a million objects of imported modules."""
    gc.collect()
    gc.freeze()


def pytest_configure(config: pytest.Config) -> None:
    Covering.whole = config.getoption("whole")
