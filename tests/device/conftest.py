"""On the first GPU, where there is one: what is compared is exact, and alone on the device."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if "tests/device/" in item.path.as_posix():
            item.add_marker(pytest.mark.skip(reason="there is no GPU here"))


@pytest.fixture(autouse=True)
def _exact() -> Iterator[None]:
    """Products of float32 without TF32, so that a CPU's are near; memory is given back."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
