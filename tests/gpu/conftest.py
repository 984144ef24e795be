"""What the tests of one process share: two ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.gpu import ranks


@pytest.fixture(scope="session", autouse=True)
def _ranks() -> Iterator[None]:
    """They leave when the last test has run."""
    yield
    ranks.end()
