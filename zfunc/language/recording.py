"""What a GPU does in one call of a function, recorded and repeated; and what cannot be recorded.

:class:`CudaGraphs` follows the notes on ``torch.cuda.CUDAGraph``, and Michael Carilli and others,
*Accelerating PyTorch with CUDA Graphs* (2021). :class:`OnDevice` finds out beforehand, on any
device.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zfunc.errors import PlacementError
from zfunc.quant.qtensor import QTensor

__all__ = ["ONE_AT_A_TIME", "CudaGraphs", "OnDevice", "Reads", "Recorder", "recorder"]


class Recorder(Protocol):
    """How a function's work on a device is recorded."""

    def __call__(
        self, run: Callable[..., Tensor], inputs: tuple[Tensor, ...]
    ) -> Callable[[], Tensor]:
        """What repeats ``run(*inputs)`` on what the inputs hold by then.

        The result of a repetition may lie in the same memory each time.
        """


ONE_AT_A_TIME = threading.Lock()  # torch allows one capture in a process


class CudaGraphs:
    """Records into CUDA graphs, all with one pool of memory.

    A pool may be shared since a graph is not replayed any more once there is a newer one; the older
    one has to live until then, for the pool goes with the last graph that uses it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._pool: Any = None

    def __call__(
        self, run: Callable[..., Tensor], inputs: tuple[Tensor, ...]
    ) -> Callable[[], Tensor]:
        with torch.cuda.device(self._device):
            now = torch.cuda.current_stream()
            self._stream.wait_stream(now)
            # What libraries set up for a stream (workspaces, handles) must not be recorded.
            with torch.cuda.stream(self._stream):
                for _ in range(2):
                    run(*inputs)
            now.wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            # Of this thread only: another one may allocate while this one records.
            how: Any = {"stream": self._stream, "capture_error_mode": "thread_local"}
            with ONE_AT_A_TIME, torch.cuda.graph(graph, pool=self._pool, **how):
                out = run(*inputs)
            self._pool = graph.pool()

        def replay() -> Tensor:
            with torch.cuda.device(self._device):
                graph.replay()
            return out

        return replay


def recorder(device: torch.device) -> Recorder | None:
    """That of a device; None where there is none."""
    return CudaGraphs(device) if device.type == "cuda" else None


class Reads(TorchDispatchMode):
    """Notes the operations that make a number of Python, or a shape, of a device's values.

    Attributes:
        found: their names.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self.found: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, QTensor) for kind in types):
            return NotImplemented  # it comes back as operations on what it is made of
        if _reads(func, args) and any(x.device == self._device for x in _tensors(args, kwargs)):
            self.met(func)
        return func(*args, **(kwargs or {}))

    def met(self, func: Any) -> None:
        """What becomes of such an operation."""
        self.found.append(str(func))


class OnDevice(Reads):
    """Refuses what cannot be recorded: values of a device's tensors that Python asks for.

    A capture that fails half-way leaves torch's allocator in a state of its own, so a step runs
    under this mode first.

    Raises:
        PlacementError: for the operation, by name.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if func in _COPIES and out is not NotImplemented:
            places = {str(x.device) for x in _tensors(args, kwargs, out)}
            if len(places) > 1:
                raise PlacementError(f"{func} copies between {' and '.join(sorted(places))}")
        return out

    def met(self, func: Any) -> None:
        raise PlacementError(f"{func} makes a number of Python, or a shape, of a tensor's value")


def _tensors(*values: Any) -> list[Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, Tensor)]


_COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
_INDEXED = (torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_)


def _reads(func: Any, args: Any) -> bool:
    """Whether an operation waits for values. Indices do, as masks only: they are counted."""
    if getattr(func, "overloadpacket", None) in _INDEXED:
        return any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])
    return bool(
        torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags
    )
