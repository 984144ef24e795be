"""CUDA graphs: what is launched during a capture is remembered, and done again at a replay."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.gpu.cuda import Cuda

__all__ = ["module"]


def module(cuda: Cuda) -> dict[str, Any]:
    """The names of ``torch.cuda`` that concern graphs."""
    return {"is_current_stream_capturing": lambda: cuda.capturing is not None}
