"""``QTensor``: a weight stored in few bits that stands wherever its tensor stood.

It is a leaf of params trees like the tensor it replaces, of the same shape and dtype. Products
with it (``F.linear``, ``matmul``, ``addmm``, ``F.embedding``) take the routes of
:mod:`zfunc.quant.products`; any other function of torch sees the dequantised values. So models
need not know of it. Its values never change and have no gradient; gradients pass through to
what it is multiplied with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils._pytree as torch_pytree
from torch import Tensor

from zfunc.errors import PlacementError
from zfunc.quant import grids, packing, products
from zfunc.quant.grids import Format, Grid

__all__ = ["QTensor"]


class QTensor(Tensor):
    """A low-bit weight.

    Attributes:
        scale: ``[n, groups]``: fp32, or bf16 beside 4-bit codes.
        zero: ``[n, groups]`` int8, or None if the grid is symmetric.
        format: bits, group size and the rest.
        transposed: whether the tensor is ``[k, n]``, ``k`` being summed over, instead of
            ``[..., k]`` (whose leading dimensions together are ``n``).

    >>> w = QTensor.quantize(torch.tensor([[1.0, -2.0, 127.0]]), Format(8, None))
    >>> F.linear(torch.ones(1, 3), w)
    tensor([[126.]])
    """

    _store: _Store
    scale: Tensor
    zero: Tensor | None
    format: Format
    transposed: bool

    @staticmethod
    def __new__(
        cls,
        data: Tensor,
        scale: Tensor,
        zero: Tensor | None,
        format: Format,
        shape: torch.Size | tuple[int, ...],
        dtype: torch.dtype,
        transposed: bool = False,
    ) -> QTensor:
        device = data.device
        self: QTensor = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        self._store = _Store(data)
        self.scale, self.zero, self.format, self.transposed = scale, zero, format, transposed
        return self

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
            PlacementError: ``x`` is no floating-point tensor, or has no dimension.
        """
        if isinstance(x, QTensor):
            raise PlacementError(f"{name} is quantised already ({x.format}).")
        if not x.is_floating_point() or not x.ndim or (transposed and x.ndim != 2):
            raise PlacementError(
                f"{name} is a {x.dtype} tensor of shape {tuple(x.shape)}; expected a "
                "floating-point one of at least one dimension (two, if transposed)."
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
        data = packing.pack(codes) if form.packed else codes.contiguous()
        form = replace(form.fitted(codes.shape[1]), shared=1)  # a scale for each row from now on
        return QTensor(data, grid.scale, grid.zero, form, like.shape, like.dtype, transposed)

    # What it holds

    @property
    def rows(self) -> tuple[int, int]:
        """``(n, k)``: the matrix that the codes form."""
        shape = tuple(self.shape)
        if self.transposed:
            return shape[1], shape[0]
        return self.scale.shape[0], shape[-1]

    @property
    def grid(self) -> Grid:
        return Grid(self.scale, self.zero)

    @property
    def data_codes(self) -> Tensor:
        """What is stored: ``[n, k]`` int8, or ``[n, ceil(k / 2)]`` uint8 with two in a byte."""
        store = self._store
        if store.data is None:
            codes: Tensor = store.ready.codes()
            return packing.pack(codes) if self.format.packed else codes
        return store.data

    @property
    def codes(self) -> Tensor:
        """The codes, ``[n, k]`` int8."""
        store = self._store
        if store.data is None:
            return store.ready.codes()
        return packing.unpack(store.data, self.rows[1]) if self.format.packed else store.data

    def ready(self, make: Callable[[], Any]) -> Any:
        """The codes in the order that a kernel reads them in, which replaces the stored one."""
        store = self._store
        if store.ready is None:
            store.ready = make()
            store.data = None
        return store.ready

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Bytes that it takes: codes, scales and zero points."""
        n, k = self.rows
        codes = n * (-(-k // 2) if self.format.packed else k)
        return codes + self.scale.nbytes + (0 if self.zero is None else self.zero.nbytes)

    def data_ptr(self) -> int:
        """That of its scales, which are its own whatever form the codes are in."""
        return self.scale.data_ptr()

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The plain tensor that it stands for, in its own dtype or the one given."""
        rows = grids.dequantize(self.codes, self.grid, self.format, dtype or self.dtype)
        return self.shaped(rows)

    def shaped(self, rows: Tensor) -> Tensor:
        """A matrix ``[n, k]`` in this tensor's shape."""
        return rows.t().contiguous() if self.transposed else rows.reshape(self.shape)

    def but(self, dtype: torch.dtype | None = None, device: Any = None) -> QTensor:
        """The same in another dtype (of what it stands for) or on another device."""
        move = (lambda x: x) if device is None else (lambda x: x.to(device))
        return QTensor(
            move(self.data_codes),
            move(self.scale),
            None if self.zero is None else move(self.zero),
            self.format,
            self.shape,
            dtype or self.dtype,
            self.transposed,
        )

    def __repr__(self, *, tensor_contents: Any = None) -> Any:  # type: ignore[override]
        dtype = str(self.dtype).removeprefix("torch.")
        return f"QTensor({tuple(self.shape)} {dtype} in {self.format}, {self.nbytes} bytes)"

    def __reduce_ex__(self, protocol: Any) -> Any:
        parts = self.data_codes, self.scale, self.zero, self.format, self.shape, self.dtype
        return QTensor, (*parts, self.transposed)

    def __deepcopy__(self, memo: Any) -> QTensor:
        return self.clone()  # type: ignore[return-value]

    # How torch meets it

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if (route := _ROUTES.get(func)) is not None:
            out = route(*args, **kwargs)
            if out is not NotImplemented:
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


class _Store:
    """Codes as they were given, or as a kernel reads them: in one place for all views of them."""

    __slots__ = ("data", "ready")

    def __init__(self, data: Tensor) -> None:
        self.data: Tensor | None = data
        self.ready: Any = None


def rows_of(x: Tensor, transposed: bool) -> Tensor:
    """A tensor as the matrix ``[n, k]`` whose second dimension is summed over."""
    return (
        x.detach().t()
        if transposed
        else x.detach().reshape(x.shape[:-1].numel(), -1 if x.numel() else x.shape[-1])
    )


_PROPERTIES = (
    *("shape", "dtype", "device", "ndim", "layout", "itemsize", "output_nr", "_version"),
    *("requires_grad", "grad", "grad_fn", "is_leaf"),
    *("is_meta", "is_cuda", "is_sparse", "is_nested", "is_quantized", "is_mkldnn"),
)


def _getter(name: str) -> Any:
    """What ``__torch_function__`` is given for the reading of an attribute."""
    return getattr(Tensor, name).__get__


_METADATA = {
    *map(_getter, _PROPERTIES),
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


# --- functions that it knows -------------------------------------------------------------------


def _linear(x: Any, weight: Any, bias: Any = None) -> Any:
    if not isinstance(weight, QTensor) or isinstance(x, QTensor) or weight.ndim != 2:
        return NotImplemented
    if weight.transposed:
        return NotImplemented
    bias = bias.dequantize() if isinstance(bias, QTensor) else bias
    return products.product(x, weight, bias)


def _matmul(x: Any, weight: Any) -> Any:
    if not isinstance(weight, QTensor) or not weight.transposed or isinstance(x, QTensor):
        return NotImplemented
    return products.product(x, weight, None)


def _rmatmul(weight: Any, x: Any) -> Any:
    return _matmul(x, weight)


def _addmm(bias: Any, x: Any, weight: Any, *, beta: float = 1, alpha: float = 1) -> Any:
    if beta != 1 or alpha != 1 or isinstance(bias, QTensor):
        return NotImplemented
    y = _matmul(x, weight)
    return y if y is NotImplemented else y + bias


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
    if not isinstance(weight, QTensor) or weight.transposed or max_norm is not None:
        return NotImplemented
    where, data = ids.reshape(-1), weight.data_codes
    some = data[where]
    grid = Grid(weight.scale[where], None if weight.zero is None else weight.zero[where])
    codes = packing.unpack(some, weight.rows[1]) if weight.format.packed else some
    rows = grids.dequantize(codes, grid, weight.format, weight.dtype)
    return rows.reshape(*ids.shape, weight.shape[-1])


def _turned(weight: Any, *dims: int) -> Any:
    if not isinstance(weight, QTensor) or weight.ndim != 2:
        return NotImplemented
    if dims and {d % 2 for d in dims} != {0, 1}:
        return NotImplemented
    n, k = weight.shape
    turned = QTensor(
        weight.scale,
        weight.scale,
        weight.zero,
        weight.format,
        (k, n),
        weight.dtype,
        not weight.transposed,
    )
    turned._store = weight._store
    return turned


def _same(weight: Any, *args: Any, **kwargs: Any) -> Any:
    return weight


def _clone(weight: Any, **kwargs: Any) -> Any:
    if not isinstance(weight, QTensor):
        return NotImplemented
    zero = None if weight.zero is None else weight.zero.clone()
    data, form = weight.data_codes.clone(), weight.format
    return QTensor(
        data, weight.scale.clone(), zero, form, weight.shape, weight.dtype, weight.transposed
    )


def _to(weight: Any, *args: Any, **kwargs: Any) -> Any:
    """Another dtype of what it stands for, another device; the codes stay as they are."""
    if not isinstance(weight, QTensor):
        return NotImplemented
    device, dtype, _, _ = torch._C._nn._parse_to(
        *args, **{k: v for k, v in kwargs.items() if k in ("device", "dtype", "non_blocking")}
    )
    if dtype is not None and not dtype.is_floating_point:
        return NotImplemented
    if dtype in (None, weight.dtype) and device in (None, weight.device):
        return weight
    return weight.but(dtype, device)


def _cast(dtype: torch.dtype) -> Callable[..., Any]:
    return lambda weight, **kwargs: _to(weight, dtype)


_ROUTES: dict[Any, Callable[..., Any]] = {
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
    _getter("T"): _turned,
    _getter("mT"): _turned,
    Tensor.transpose: _turned,
    torch.transpose: _turned,
    Tensor.detach: _same,
    Tensor.contiguous: _same,
    _getter("data"): _same,
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
