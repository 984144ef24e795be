"""Low-bit weights: tensors of 4 or 8 bits, and trees of parameters that hold them.

``grids`` says which numbers codes stand for, and rounds to them (``scale_search`` finds scales for
4 bits). ``low_bit`` and ``qtensor`` are the tensor; ``packing`` puts two codes in a byte, and
``overrides`` lists the functions of torch that it knows. ``products`` has the table of the ways to
multiply with it; each way is a file (``*_products``). ``trees``, ``choice``, ``model_files`` and
``files`` quantise, choose, read and write the parameters of a model. ``calibration`` rounds by
sample inputs, ``fake``, ``schedules`` and ``curvature`` serve training, and ``reports`` tells the
errors.
"""

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
