"""Low-bit weights: ``QTensor`` leaves, trees of them, their files, calibration, and schedules."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zfunc.quant.calibration import calibrate
    from zfunc.quant.curvature import top_eigenvalues
    from zfunc.quant.fake import fake_quantize
    from zfunc.quant.files import load, save
    from zfunc.quant.grids import Format
    from zfunc.quant.qtensor import QTensor
    from zfunc.quant.reports import Report, report
    from zfunc.quant.trees import dequantize_tree, quantize_tree
    from zfunc.transforms.quantization.exporting import exported

_HOMES = {
    "Format": "quant.grids",
    "QTensor": "quant.qtensor",
    "Report": "quant.reports",
    "calibrate": "quant.calibration",
    "dequantize_tree": "quant.trees",
    "exported": "transforms.quantization.exporting",
    "fake_quantize": "quant.fake",
    "load": "quant.files",
    "quantize_tree": "quant.trees",
    "report": "quant.reports",
    "save": "quant.files",
    "top_eigenvalues": "quant.curvature",
}

__all__ = [
    "Format",
    "QTensor",
    "Report",
    "calibrate",
    "dequantize_tree",
    "exported",
    "fake_quantize",
    "load",
    "quantize_tree",
    "report",
    "save",
    "top_eigenvalues",
]


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Everything on first use, so that ``import zfunc`` stays light."""
        if name in _HOMES:
            return getattr(importlib.import_module(f"zfunc.{_HOMES[name]}"), name)
        raise AttributeError(f"module 'zfunc.quant' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
