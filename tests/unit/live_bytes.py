"""What operations hold at their peak, counted exactly: the bytes of living storages."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Peak"]


class Peak(TorchDispatchMode):
    """The most bytes alive at once in storages that operations have touched."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.bytes = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # it would be imported, for seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.count((args, kwargs, result))
        return result

    def count(self, touched: Any) -> None:
        """Count the storages of a tree of tensors while they live."""
        for tensor in pytree.tree_leaves(touched):
            if isinstance(tensor, Tensor) and not tensor.is_meta:
                storage = tensor.untyped_storage()
                self.storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.storages = {k: v for k, v in self.storages.items() if not v[0].expired()}
        self.bytes = max(self.bytes, sum(n for _, n in self.storages.values()))
