"""Parameters that are fetched when somebody looks at them.

While a functionalized module runs on placed parameters, a layer's tensors exist
only inside that layer's own call. Outside it, each is bound to a :class:`LazyTensor`:
it knows its shape, dtype and device, and the first operation on it lets the layer's
parameters enter the computation, differentiable like any others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils._pytree as torch_pytree
from torch import Tensor

from zfunc.engine.primitives import Ref
from zfunc.errors import PlacementError
from zfunc.modules.units import TensorInfo
from zfunc.trees.inside import inside_function

__all__ = ["METADATA", "LazySource", "LazyTensor", "lazy_tensor"]

# What can be answered without the values.
_PROPERTIES = "shape dtype device ndim layout is_cuda is_meta is_sparse is_quantized is_nested"
METADATA = {
    *(getattr(Tensor, name).__get__ for name in (*_PROPERTIES.split(), "itemsize", "nbytes")),
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.ndimension),
    *(Tensor.element_size, Tensor.get_device, Tensor.is_floating_point, Tensor.is_complex),
    *(Tensor.__len__, Tensor.__hash__, torch.numel, torch.is_floating_point, torch.is_complex),
}


class LazySource:
    """Where lazy tensors of units find their parameters during a call."""

    __slots__ = ("differentiable", "values")

    def __init__(self) -> None:
        self.values: Sequence[Any] = ()
        self.differentiable = False

    def hold(self, values: Sequence[Any]) -> None:
        """From now on a unit's parameters come from what ``values`` has for it, if that is a
        ``Ref``. Without values the call is over."""
        self.values, self.differentiable = values, torch.is_grad_enabled()

    def fetch(self, unit: int, name: str, path: Sequence[str | int]) -> Any:
        ref = self.values[unit] if self.values else None
        if not isinstance(ref, Ref):
            ref = None
        if ref is not None and self.differentiable and inside_function():
            raise PlacementError(
                f"parameter {name} was given to a torch.autograd.Function outside its layer's own "
                "call, so its gradient would be lost. Pass it `weight + 0`, or choose other units: "
                "functionalize(module, units=...)."
            )
        if ref is None:
            raise PlacementError(
                f"parameter {name} was read after its apply() had returned. Read it inside the "
                "model's forward, or take it from the params tree: zf.tree.get(params, path). A "
                "module that recomputes itself in a way of its own reads it in backward: use "
                "torch.utils.checkpoint there, or wrap the step instead, zf.remat(step)."
            )
        node = ref.force()
        for key in path:
            node = node[key]
        return node


class LazyTensor(Tensor):
    """A tensor whose metadata are known and whose values come from a :class:`LazySource`.

    Attributes:
        trains: whether the module has it as a parameter with a gradient.
    """

    trains: bool
    _fetch: Callable[[], Tensor]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        args, kwargs = torch_pytree.tree_map_only(LazyTensor, _resolve, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise PlacementError(
            f"{func} met a layer's parameter before it had entered the computation. Call the layer "
            "itself, or choose other units: functionalize(module, units=...)."
        )


def _resolve(x: LazyTensor) -> Tensor:
    return x._fetch()


def lazy_tensor(
    source: LazySource,
    unit: int,
    leaf: TensorInfo,
    dtype: torch.dtype,
    device: torch.device | None,
) -> LazyTensor:
    """A parameter of a unit, found in what ``source`` has for it; None means its own device."""
    lazy: LazyTensor = Tensor._make_wrapper_subclass(
        LazyTensor, leaf.shape, dtype=dtype, device=device or leaf.device
    )
    lazy._fetch, lazy.trains = lambda: source.fetch(unit, leaf.name, leaf.path), leaf.requires_grad
    return lazy
