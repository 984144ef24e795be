"""Tensors without memory, and what an operation says that it does to them.

A :class:`Recorded` tensor is a view of a storage on meta that names the device on which
it will live. A :class:`Call` is one operation on such tensors, read through its schema:
what it looks at, what it writes, whether it draws.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from zfunc.errors import PlacementError
from zfunc.initialisation.replay import View, view

__all__ = [
    *("COMPATIBLE", "DEVICE", "INSTEAD", "Call", "Recorded"),
    *("covers", "is_meta", "recorded", "refused"),
]

DEVICE = torch.ops.prim.device.default
COMPATIBLE = torch.ops.aten._has_compatible_shallow_copy_type.default
_OVERWRITES = {  # in-place operations that do not look at what they replace
    *("zero_", "fill_", "copy_", "normal_", "uniform_", "random_", "bernoulli_"),
    *("exponential_", "cauchy_", "log_normal_", "geometric_"),
}

INSTEAD = "Build the state and call step.place(state) instead."
_OVER = (
    "step.init: {} got a tensor that make_state created but did not return, and its recording has "
    "ended. Return every tensor that is used later, as a leaf of the state."
)


def refused(operation: Any, why: str) -> PlacementError:
    return PlacementError(f"step.init cannot replay make_state: {operation} {why}. {INSTEAD}")


class Recorded(Tensor):
    """A tensor without memory that names its device; only a recorder computes with it."""

    home: torch.device

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is DEVICE:
            return args[0].home
        if func is COMPATIBLE:  # `p.data = x` asks
            return all(isinstance(t, Recorded) for t in args)
        raise PlacementError(_OVER.format(func))

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


def recorded(meta: Tensor, device: torch.device) -> Recorded:
    """The tensor on meta, under the name of another device; it shares the storage."""
    tensor: Any = Tensor._make_subclass(
        Recorded, meta, dispatch_device=True, device_for_backend_keys=device
    )
    tensor.home = device
    return cast(Recorded, tensor)


def is_meta(tensor: Tensor) -> bool:
    return not isinstance(tensor, Recorded) and tensor.is_meta


class Call:
    """An operation as it was called, with what its schema says about it."""

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        self.name: str = func.overloadpacket.__name__
        flat = pytree.tree_leaves((args, kwargs))
        self.tensors: list[Tensor] = [a for a in flat if isinstance(a, Tensor)]
        self.generator = next((a for a in flat if isinstance(a, torch.Generator)), None)
        self.only_shapes = self.name.endswith("_like") or self.name.startswith("new_")

    @cached_property
    def uses(self) -> list[tuple[Tensor, bool, bool]]:
        """Its tensors, each with whether it is read and whether it is written."""
        found = []
        for i, argument in enumerate(self.func._schema.arguments):
            value = self.args[i] if i < len(self.args) else self.kwargs.get(argument.name)
            blind = argument.is_out or (i == 0 and self.name in _OVERWRITES)
            reads = not blind and not self.only_shapes
            tensors = [t for t in pytree.tree_leaves(value) if isinstance(t, Tensor)]
            found += [(t, reads, argument.is_write) for t in tensors]
        return found

    @property
    def written(self) -> list[Tensor]:
        return [t for t, _, writes in self.uses if writes]

    @property
    def random(self) -> bool:
        seeded = torch.Tag.nondeterministic_seeded in self.func.tags
        return seeded or any(a.name == "generator" for a in self.func._schema.arguments)

    @property
    def looks(self) -> bool:
        """Whether the kind or the shape of its result depends on values."""
        returns = self.func._schema.returns
        tags = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
        python = returns and not any("Tensor" in str(result.type) for result in returns)
        return bool(python or tags.intersection(self.func.tags))

    @property
    def silent(self) -> bool:
        """Whether it only allocates, or only changes a tensor's view of its storage."""
        restrides = torch.Tag.inplace_view in self.func.tags and self.name != "resize_"
        return restrides or self.name.startswith(("empty", "new_empty"))

    @property
    def foreign(self) -> bool:
        """Whether it can simply run: all on meta, or a view of what existed before."""
        if any(isinstance(t, Recorded) for t in self.tensors):
            return False
        if all(t.is_meta for t in self.tensors):
            device = self.kwargs.get("device")
            return torch.device(device).type == "meta" if device else bool(self.tensors)
        returns = self.func._schema.returns
        return bool(returns) and all(r.alias_info and not r.alias_info.is_write for r in returns)

    def on_meta(self, metas: dict[Tensor, Tensor]) -> Any:
        """Shape, strides and aliases of what it gives; what it does in place shows in ``metas``."""

        def meta(value: Any) -> Any:
            if isinstance(value, Tensor):
                return metas.get(value, value)
            return None if isinstance(value, torch.Generator) else value

        args, kwargs = pytree.tree_map(meta, (self.args, self.kwargs))
        if kwargs.get("device") is not None:
            kwargs["device"] = "meta"
        return self.func(*args, **kwargs)

    def on_tape(self, seen: dict[Tensor, View], device: torch.device) -> tuple[Any, Any]:
        """Its arguments for the replay: views stand for tensors, or shapes if these suffice."""

        def noted(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if self.only_shapes:
                return view(seen[value].cell.shadow, seen[value]) if value in seen else value
            if value not in seen:
                raise refused(self.func, "reads a tensor on the meta device, which has no values")
            return seen[value]

        args, kwargs = pytree.tree_map(noted, (self.args, self.kwargs))
        return args, {**kwargs, "device": device} if self.only_shapes else kwargs


def covers(v: View | None) -> bool:
    """Whether a view reaches every byte of its storage, and each once."""
    if v is None:
        return False
    width = 1
    for stride, size in sorted(zip(v.stride, v.size, strict=True)):
        if size != 1 and stride != width:
            return False
        width *= size
    return width * v.dtype.itemsize == v.cell.shadow.nbytes()
