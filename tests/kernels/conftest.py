"""Kernels in Triton's interpreter need a process of their own, in which it knows bfloat16.

``TRITON_INTERPRET=1`` counts when Triton is imported, and torch may have imported it already.
Therefore the files in ``interpreted/`` are collected only where the variable is set;
``test_interpreted.py`` starts such a process for each of them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from zfunc import kernels

collect_ignore: list[str] = []

if os.environ.get("TRITON_INTERPRET") == "1":
    from zfunc.kernels.interpreter_triton import teach

    teach()
else:
    collect_ignore.append("interpreted")


@pytest.fixture(params=["llvm", "torch"])
def cpu_route(request: pytest.FixtureRequest) -> Iterator[str]:
    """Both ways of a CPU: what the dispatch chooses, and the twins."""
    with kernels.use("torch" if request.param == "torch" else None):
        yield request.param
