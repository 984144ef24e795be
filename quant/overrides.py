"""The functions of torch that know low-bit tensors. Every other one sees dequantised values.

:data:`ROUTES` says what is called instead of each. What it names returns ``NotImplemented`` where
it does not apply.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zfunc.quant import grids, products
from zfunc.quant.grids import Grid
from zfunc.quant.low_bit import LowBit

__all__ = ["METADATA", "ROUTES", "routed"]


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


def _matmul(x: Any, weight: Any, out: Any = None) -> Any:
    if (
        out is not None
        or not isinstance(weight, LowBit)
        or not weight.transposed
        or isinstance(x, LowBit)
    ):
        return NotImplemented
    return products.product(x, weight, None)


def _rmatmul(weight: Any, x: Any) -> Any:
    return _matmul(x, weight)


def _addmm(
    bias: Any, x: Any, weight: Any, *, beta: float = 1, alpha: float = 1, out: Any = None
) -> Any:
    if beta != 1 or alpha != 1 or out is not None or isinstance(bias, LowBit):
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
    scale = weight.scale.index_select(0, where)  # refuses what indexing would count from the end
    grid = Grid(scale, None if weight.zero is None else weight.zero[where])
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

_NAMES: dict[Any, tuple[str, ...]] = {
    F.linear: ("input", "weight"),
    F.embedding: ("input", "weight"),
    torch.matmul: ("input", "other"),
    Tensor.matmul: ("self", "other"),
    torch.mm: ("input", "mat2"),
    Tensor.mm: ("self", "mat2"),
    torch.addmm: ("input", "mat1", "mat2"),
    Tensor.addmm: ("self", "mat1", "mat2"),
    torch.transpose: ("input", "dim0", "dim1"),
    Tensor.transpose: ("self", "dim0", "dim1"),
    torch.t: ("input",),
    torch.clone: ("input",),
}


def routed(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What :data:`ROUTES` has for a call; ``NotImplemented`` if nothing."""
    if (route := ROUTES.get(func)) is None:
        return NotImplemented
    if not kwargs:
        return route(*args)
    names, rest = _NAMES.get(func, ())[len(args) :], dict(kwargs)
    return route(*args, *[rest.pop(name) for name in names if name in rest], **rest)


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
