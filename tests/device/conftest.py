"""On the first GPU, where there is one: what is compared is exact, and alone on the device."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Elsewhere they are skipped. Torch warns of much beside a GPU that no CPU lets us see."""
    here = torch.cuda.is_available()
    mark = (
        pytest.mark.filterwarnings("default") if here else pytest.mark.skip("there is no GPU here")
    )
    for item in items:
        if "tests/device/" in item.path.as_posix():
            item.add_marker(mark)


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
