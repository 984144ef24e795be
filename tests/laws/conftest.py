"""Laws kill nothing: what they write need not have reached the device."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def _no_waits_for_disks() -> Iterator[None]:
    """``tests/faults`` and ``tests/unit`` wait; laws compare numbers, hundreds of saves of them."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("fsync", "fdatasync"):
            patch.setattr(os, name, lambda fd: None)
        yield
