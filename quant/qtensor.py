"""``QTensor``: a weight stored in few bits that stands wherever its tensor stood.

It is a leaf of params trees like the tensor it replaces, of the same shape and dtype. Products
with it (``F.linear``, ``matmul``, ``addmm``, ``F.embedding``) take the routes of
:mod:`zfunc.quant.products`; any other function of torch sees the dequantised values. So models
need not know of it. Its values never change and have no gradient; gradients pass through to
what it is multiplied with.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.utils._pytree as torch_pytree
from torch import Tensor

from zfunc import kernels
from zfunc.errors import PlacementError
from zfunc.nodes import Encoded
from zfunc.quant import grids, packing
from zfunc.quant.encoding import Code, padded
from zfunc.quant.grids import Format, Grid

__all__ = ["QTensor", "attribute", "rows_of"]

R = TypeVar("R")  # codes as some kernel reads them


class QTensor(Encoded, Tensor):
    """A low-bit weight.

    Raises:
        PlacementError: codes, scales and zero points do not form such a tensor. (Products read
            them by address.)

    Attributes:
        scale: ``[n, groups]``: fp32, or bf16 beside 4-bit codes.
        zero: ``[n, groups]`` int8, or None if the grid is symmetric.
        format: bits, group size and the rest.
        transposed: whether the tensor is ``[k, n]``, ``k`` being summed over, instead of
            ``[..., k]`` (whose leading dimensions together are ``n``).

    >>> import torch.nn.functional as F
    >>> w = QTensor.quantize(torch.tensor([[1.0, -2.0, 127.0]]), Format(8, None))
    >>> F.linear(torch.ones(1, 3), w)
    tensor([[126.]])
    """

    _store: _Store
    scale: Tensor
    zero: Tensor | None
    format: Format
    transposed: bool
    rows: tuple[int, int]  # (n, k), the matrix that the codes form
    depth: int  # the number of its dimensions; like `rows` read without a detour through torch

    @staticmethod
    def __new__(
        cls,
        data: Tensor | _Store,
        scale: Tensor,
        zero: Tensor | None,
        format: Format,
        shape: torch.Size | tuple[int, ...],
        dtype: torch.dtype,
        transposed: bool = False,
    ) -> QTensor:
        if not isinstance(data, _Store):  # that of another view, which has been checked
            _check(data, scale, zero, format, shape, transposed)
            data = _Store(data)
        self: QTensor = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=scale.device)
        self._store = data
        self.scale, self.zero, self.format, self.transposed = scale, zero, format, transposed
        self.rows = (shape[1], shape[0]) if transposed else (scale.shape[0], shape[-1])
        self.depth = len(shape)
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
        data = packing.pack(codes) if form.packed else codes.contiguous()
        form = replace(form.fitted(codes.shape[1]), shared=1)  # a scale for each row from now on
        return QTensor(data, grid.scale, grid.zero, form, like.shape, like.dtype, transposed)

    # What it holds

    @property
    def grid(self) -> Grid:
        return Grid(self.scale, self.zero)

    @property
    def data_codes(self) -> Tensor:
        """What is stored: ``[n, k]`` int8, or ``[n, ceil(k / 2)]`` uint8 with two in a byte."""
        data = self._store.data  # once: another thread may put the codes in order meanwhile
        if data is None:
            codes: Tensor = self._store.ready.codes()
            return packing.pack(codes) if self.format.packed else codes
        return data

    @property
    def codes(self) -> Tensor:
        """The codes, ``[n, k]`` int8."""
        data = self._store.data
        if data is None:
            return self._store.ready.codes()
        return packing.unpack(data, self.rows[1]) if self.format.packed else data

    def looked_up(self, where: Tensor) -> Tensor:
        """The codes of some rows ``[rows, k]`` int8, for ``where`` ``[rows]``, from 0 on."""
        data = self._store.data
        if data is None:
            ready = self._store.ready
            some = getattr(ready, "looked_up", None)
            return ready.codes()[where] if some is None else some(where)
        return packing.unpack(data[where], self.rows[1]) if self.format.packed else data[where]

    def ready(self, kind: type[R], make: Callable[[], R]) -> R:
        """The codes in the order that a kernel reads them in, which replaces the one they had."""
        store = self._store
        found = store.ready
        if type(found) is not kind:
            store.ready = found = make()
            store.data = None
        return found  # and not what another thread has put there since

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
        return self.shaped(self.dequantized_rows(dtype or self.dtype))

    def dequantized_rows(self, dtype: torch.dtype) -> Tensor:
        """The matrix ``[n, k]`` that it stands for.

        A kernel writes it in one pass where it has these grids, with the same bits: symmetric
        ones whose groups are even, while the codes are in the order in which they were stored.
        """
        data, size = self._store.data, self.format.group_size
        if data is None or self.zero is not None or (size or 0) % 2 or dtype == torch.float64:
            return grids.dequantize(self.codes, self.grid, self.format, dtype)
        bits, (_, k) = 4 if self.format.packed else 8, self.rows
        return kernels.dequantize_groups(
            data, self.scale.float(), None, k, bits=bits, group=size, dtype=dtype
        )

    @property
    def code(self) -> Code:
        return Code(self.format, self.rows, self.shape, self.dtype, self.transposed)

    def to_bytes(self) -> Tensor:
        """Codes, scales and zero points in one buffer, 1-D uint8 (see :class:`Code`)."""
        held = [self.data_codes, self.scale, *([] if self.zero is None else [self.zero])]
        out = held[0].new_zeros(self.code.bytes, dtype=torch.uint8)
        at = 0
        for x in held:
            out[at : at + x.nbytes] = x.contiguous().reshape(-1).view(torch.uint8)
            at += padded(x.nbytes)
        return out

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
        if (route := _routes().get(func)) is not None:
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


def _check(
    data: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    form: Format,
    shape: torch.Size | tuple[int, ...],
    transposed: bool,
) -> None:
    """Refuse parts that do not form a tensor of this shape."""
    if not len(shape) or (transposed and len(shape) != 2) or form.bits > 8:
        raise PlacementError(
            f"a QTensor of shape {tuple(shape)} in {form}{', transposed' if transposed else ''}: "
            "expected one of at least one dimension (two, if transposed) and of at most 8 bits."
        )
    n, k = (shape[1], shape[0]) if transposed else (math.prod(shape[:-1]), shape[-1])
    grid = (n, form.groups(k))
    codes = ((n, -(-k // 2)), torch.uint8) if form.packed else ((n, k), torch.int8)
    wanted = {"codes": codes, "scale": (grid, form.scale_dtype)}
    found = {"codes": data, "scale": scale}
    if zero is not None or not form.symmetric:
        wanted["zero"] = (grid, torch.int8)
    if zero is not None:
        found["zero"] = zero
    fits = found.keys() == wanted.keys() and form.symmetric == (zero is None)
    if not fits or any(
        (tuple(x.shape), x.dtype) != wanted[name] or x.device != data.device
        for name, x in found.items()
    ):
        given = {name: f"{x.dtype}{list(x.shape)} on {x.device}" for name, x in found.items()}
        need = {name: f"{dtype}{list(size)}" for name, (size, dtype) in wanted.items()}
        raise PlacementError(
            f"a QTensor of shape {tuple(shape)} in {form} was given {given}; it consists of {need} "
            f"on one device{', and of no zero points' if form.symmetric else ''}. "
            "QTensor.quantize makes one from a plain tensor."
        )


class _Store:
    """Codes as they were given, or as a kernel reads them: in one place for all views of them."""

    __slots__ = ("data", "ready")

    def __init__(self, data: Tensor) -> None:
        self.data: Tensor | None = data
        self.ready: Any = None


@functools.cache
def _routes() -> dict[Any, Callable[..., Any]]:
    from zfunc.quant.overrides import ROUTES

    return ROUTES


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


def attribute(name: str) -> Any:
    """What ``__torch_function__`` is given for the reading of an attribute."""
    return getattr(Tensor, name).__get__


_METADATA = {
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
