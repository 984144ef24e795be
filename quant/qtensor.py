"""``QTensor``: a weight stored in few bits that stands wherever its tensor stood.

It is a leaf of params trees, of the shape and dtype of the tensor that it replaces. Products with
it (``F.linear``, ``matmul``, ``addmm``, ``F.embedding``) take the routes of
:mod:`zfunc.quant.products`. Any other function of torch sees the dequantised values. So models need
not know of it. Its values never change and have no gradient. Gradients pass through to what it is
multiplied with.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch
import torch.utils._pytree as torch_pytree
from torch import Tensor

from zfunc.errors import PlacementError
from zfunc.quant import grids, packing, products
from zfunc.quant.grids import Format, Grid
from zfunc.quant.low_bit import Code, LowBit, matrix_shape
from zfunc.quant.overrides import METADATA, routed
from zfunc.ranks.comm import Group

__all__ = ["QTensor", "rows_of"]


class QTensor(LowBit):
    """A low-bit weight; see :class:`~zfunc.quant.low_bit.LowBit` for what it holds.

    >>> import torch.nn.functional as F
    >>> w = QTensor.quantize(torch.tensor([[1.0, -2.0, 127.0]]), Format(8, None))
    >>> F.linear(torch.ones(1, 3), w)
    tensor([[126.]])
    """

    @staticmethod
    def quantize(
        x: Tensor, form: Format, transposed: bool = False, name: str = "weight"
    ) -> QTensor:
        """Round a tensor to the nearest codes.

        Args:
            x: ``[..., k]`` floating-point, at least 1-D.
            form: the format.
            transposed: ``x`` is ``[k, n]`` and summed over its first dimension.
            name: of the leaf, for errors.

        Raises:
            NonFiniteError: a value is NaN or infinite.
            PlacementError: ``x`` is no floating-point tensor, has no dimension, or no values
                (on the meta device).
        """
        if isinstance(x, QTensor):
            raise PlacementError(f"{name} is quantised already ({x.format}).")
        if not x.is_floating_point() or not x.ndim or (transposed and x.ndim != 2):
            raise PlacementError(
                f"{name} is a {x.dtype} tensor of shape {tuple(x.shape)}; expected a "
                "floating-point one of at least one dimension (two, if transposed)."
            )
        if x.is_meta:
            raise PlacementError(
                f"{name} lies on the meta device, which holds no values to quantise: place the "
                "parameters from their files (quantize(model.apply, bits=8).place(folder))."
            )
        if form.bits > 8:
            raise PlacementError(f"{name}: {form.bits} bits cannot be stored, at most 8 can.")
        rows = rows_of(x, transposed)
        form = form.fitted(rows.shape[1])
        grid = grids.fit(rows, form, name)
        return QTensor.of(grids.quantize(rows, grid, form), grid, form, x, transposed)

    @staticmethod
    def of(codes: Tensor, grid: Grid, form: Format, like: Tensor, transposed: bool) -> QTensor:
        """From int8 codes ``[n, k]``, with the shape and dtype of ``like``."""
        data = (packing.pack(codes) if form.packed else codes).contiguous()
        form = replace(form.fitted(codes.shape[1]), shared=1)  # a scale for each row from now on
        return QTensor(data, grid.scale, grid.zero, form, like.shape, like.dtype, transposed)

    @staticmethod
    def absent(x: Tensor, form: Format, transposed: bool = False) -> QTensor:
        """What :meth:`quantize` makes of a tensor like ``x``, on ``meta``: shapes, no values."""
        rows = matrix_shape(x.shape, transposed)
        form = replace(form.fitted(rows[1]), shared=1)
        code = Code(QTensor, form, rows, x.shape, x.dtype, transposed)
        made: Any = code.read(torch.empty(code.bytes, dtype=torch.uint8, device="meta"))
        return cast(QTensor, made)

    def summand(self, x: Tensor, ranks: Group) -> Tensor:
        return products.summand(x, self, ranks)

    # How torch meets it

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if (out := routed(func, args, kwargs)) is not NotImplemented:
            return out
        name = getattr(func, "__name__", "")
        if name.endswith("_") and not name.endswith("__") and isinstance(args[0], QTensor):
            raise PlacementError(
                f"{name} would write into {args[0]!r}, whose values cannot change. Use "
                "quant.dequantize_tree(params) for tensors that can."
            )
        args, kwargs = torch_pytree.tree_map_only(QTensor, QTensor.dequantize, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """What comes past the functions above: autograd's own calls, compiled code."""
        if func is torch.ops.aten.detach.default:
            return args[0]
        args, kwargs = torch_pytree.tree_map_only(QTensor, QTensor.dequantize, (args, kwargs or {}))
        return func(*args, **kwargs)


def rows_of(x: Tensor, transposed: bool) -> Tensor:
    """A tensor as the matrix ``[n, k]`` whose second dimension is summed over."""
    return (
        x.detach().t()
        if transposed
        else x.detach().reshape(x.shape[:-1].numel(), -1 if x.numel() else x.shape[-1])
    )
