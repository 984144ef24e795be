"""The functions of torch that know low-bit tensors. Every other one sees dequantised values.

:data:`ROUTES` says what is called instead of each. What it names returns ``NotImplemented`` where
it does not apply.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zfunc.quant import grids, products
from zfunc.quant.grids import Grid
from zfunc.quant.low_bit import LowBit

__all__ = ["METADATA", "ROUTES"]


_PROPERTIES = (
    *("shape", "dtype", "device", "ndim", "layout", "itemsize", "output_nr", "_version"),
    *("requires_grad", "grad", "grad_fn", "is_leaf"),
    *("is_meta", "is_cuda", "is_sparse", "is_nested", "is_quantized", "is_mkldnn"),
)


def attribute(name: str) -> Any:
    """What ``__torch_function__`` is given for the reading of an attribute."""
    return getattr(Tensor, name).__get__


def _linear(x: Any, weight: Any, bias: Any = None) -> Any:
    if not isinstance(weight, LowBit) or isinstance(x, LowBit):
        return NotImplemented
    if weight.depth != 2 or weight.transposed:
        return NotImplemented
    bias = bias.dequantize() if isinstance(bias, LowBit) else bias
    return products.product(x, weight, bias)


def _matmul(x: Any, weight: Any) -> Any:
    if not isinstance(weight, LowBit) or not weight.transposed or isinstance(x, LowBit):
        return NotImplemented
    return products.product(x, weight, None)


def _rmatmul(weight: Any, x: Any) -> Any:
    return _matmul(x, weight)


def _addmm(bias: Any, x: Any, weight: Any, *, beta: float = 1, alpha: float = 1) -> Any:
    if beta != 1 or alpha != 1 or isinstance(bias, LowBit):
        return NotImplemented
    if not isinstance(weight, LowBit) or not weight.transposed or isinstance(x, LowBit):
        return NotImplemented
    if bias.ndim == 1:
        return products.product(x, weight, bias)
    return products.product(x, weight, None) + bias


def _embedding(
    ids: Any,
    weight: Any,
    padding_idx: Any = None,
    max_norm: Any = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    """Only the rows that are looked up are dequantised; nothing is trained, so no more counts."""
    if not isinstance(weight, LowBit) or weight.transposed or max_norm is not None:
        return NotImplemented
    where = ids.reshape(-1)
    grid = Grid(weight.scale[where], None if weight.zero is None else weight.zero[where])
    rows = grids.dequantize(weight.looked_up(where), grid, weight.format, weight.dtype)
    return rows.reshape(*ids.shape, weight.shape[-1])


def _turned(weight: Any, *dims: int) -> Any:
    if not isinstance(weight, LowBit) or weight.ndim != 2:
        return NotImplemented
    if dims and {d % 2 for d in dims} != {0, 1}:
        return NotImplemented
    n, k = weight.shape
    grid = weight.scale, weight.zero
    way = not weight.transposed
    return type(weight)(weight._store, *grid, weight.format, (k, n), weight.dtype, way)


def _same(weight: Any, *args: Any, **kwargs: Any) -> Any:
    return weight


def _clone(weight: Any, **kwargs: Any) -> Any:
    if not isinstance(weight, LowBit):
        return NotImplemented
    return weight.each(Tensor.clone)


def _to(weight: Any, *args: Any, **kwargs: Any) -> Any:
    """Another dtype of what it stands for, another device; the codes stay as they are."""
    if not isinstance(weight, LowBit):
        return NotImplemented
    device, dtype, _, _ = torch._C._nn._parse_to(
        *args, **{k: v for k, v in kwargs.items() if k in ("device", "dtype", "non_blocking")}
    )
    if dtype is not None and not dtype.is_floating_point:
        return NotImplemented
    if dtype in (None, weight.dtype) and device in (None, weight.device):
        return weight
    return weight.each(lambda x: x if device is None else x.to(device), dtype)


def _cast(dtype: torch.dtype) -> Callable[..., Any]:
    return lambda weight, **kwargs: _to(weight, dtype)


ROUTES: dict[Any, Callable[..., Any]] = {
    F.linear: _linear,
    torch.matmul: _matmul,
    torch.mm: _matmul,
    Tensor.matmul: _matmul,
    Tensor.mm: _matmul,
    Tensor.__matmul__: _matmul,
    Tensor.__rmatmul__: _rmatmul,
    torch.addmm: _addmm,
    Tensor.addmm: _addmm,
    F.embedding: _embedding,
    Tensor.t: _turned,
    torch.t: _turned,
    attribute("T"): _turned,
    attribute("mT"): _turned,
    Tensor.transpose: _turned,
    torch.transpose: _turned,
    Tensor.detach: _same,
    Tensor.contiguous: _same,
    attribute("data"): _same,
    Tensor.clone: _clone,
    torch.clone: _clone,
    Tensor.to: _to,
    Tensor.cpu: lambda weight, **kwargs: _to(weight, "cpu"),
    Tensor.cuda: lambda weight, device="cuda", **kwargs: _to(weight, device),
    Tensor.float: _cast(torch.float32),
    Tensor.half: _cast(torch.float16),
    Tensor.bfloat16: _cast(torch.bfloat16),
    Tensor.double: _cast(torch.float64),
}

METADATA = {
    *map(attribute, _PROPERTIES),
    Tensor.dim,
    Tensor.size,
    Tensor.numel,
    Tensor.nelement,
    Tensor.element_size,
    Tensor.is_floating_point,
    Tensor.is_complex,
    Tensor.is_contiguous,
    Tensor.get_device,
    Tensor.__len__,
    Tensor.__hash__,
    torch.numel,
    torch.is_floating_point,
    torch.is_complex,
}
"""What tells of the tensor, and is not computed with its values."""
