"""CUDA graphs: what is launched during a capture is remembered, and done again at a replay.

A capture runs nothing on a GPU. Here it does, for results need shapes and numbers to go on with,
and when it ends all memory that was there before is what it was. A replay does the same operations
on the same tensors, in order: whatever Python decided during the capture stays decided. The host
must not wait meanwhile (:meth:`tests.gpu.cuda.Cuda.sync` raises).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

if TYPE_CHECKING:
    from tests.gpu.cuda import Cuda

__all__ = ["CUDAGraph", "module"]


class CUDAGraph:
    """As :class:`torch.cuda.CUDAGraph`."""

    def __init__(self, keep_graph: bool = False) -> None:
        self.recorded: list[tuple[Any, Any, Any, Any, Any]] = []
        self.generators: list[Any] = []

    def register_generator_state(self, generator: Any) -> None:
        self.generators.append(generator)

    def pool(self) -> tuple[int, int]:
        return (0, id(self))

    def reset(self) -> None:
        self.recorded.clear()

    def replay(self) -> None:
        from tests.gpu.cuda import active

        cuda = active()
        cuda.issue("graph", kind="launch")
        with cuda.quietly(), torch.no_grad():
            for func, args, kwargs, out, generator in self.recorded:
                with _drawing_from(generator):
                    new = func(*args, **kwargs)
                for work in list(cuda.collectives):
                    work.finish()
                for old, fresh in zip(_tensors(out), _tensors(new), strict=True):
                    if old.data_ptr() != fresh.data_ptr():
                        old.copy_(fresh)


class _Capture(TorchDispatchMode):
    """Remembers the operations on the device's tensors; ``saved`` is what memory held before."""

    def __init__(self, cuda: Cuda, graph: CUDAGraph) -> None:
        super().__init__()
        self.cuda, self.graph = cuda, graph
        self.made: set[int] = set()
        self.saved: dict[int, tuple[Tensor, Tensor]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if func.namespace == "c10d" or func._schema.is_mutable:
            for x in given:
                self._save(x)
        # Of their own: the project may give a tensor that it is done with other memory.
        given_then = tree_map_only(Tensor, torch.Tensor.detach, (args, dict(kwargs)))
        out = func(*args, **kwargs)
        results = _tensors(out)
        if not any(self.cuda.on_gpu(x) for x in (*given, *results)):
            return out
        held = {x.untyped_storage()._cdata for x in given}
        self.made |= {x.untyped_storage()._cdata for x in results} - held
        seeded = torch.Tag.nondeterministic_seeded in func.tags
        generator = torch.cuda.default_generators[0]._current if seeded else None
        kept = tree_map_only(Tensor, torch.Tensor.detach, out)
        self.graph.recorded.append((func, *given_then, kept, generator))
        return out

    def _save(self, x: Tensor) -> None:
        key = x.untyped_storage()._cdata
        if key in self.made or key in self.saved or not self.cuda.on_gpu(x):
            return
        whole = x.detach().new_empty(0, dtype=torch.uint8).set_(x.untyped_storage())
        self.saved[key] = (whole, whole.clone())

    def restore(self) -> None:
        for whole, before in self.saved.values():
            whole.copy_(before)

    def about_to_write(self, changed: Any) -> None:
        """It is seen above."""


class _Graph:
    """As :class:`torch.cuda.graph`."""

    def __init__(
        self,
        cuda_graph: CUDAGraph,
        pool: Any = None,
        stream: Any = None,
        capture_error_mode: str = "global",
        **how: Any,
    ) -> None:
        self.graph, self.stream = cuda_graph, stream
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> None:
        from tests.gpu.cuda import active

        cuda = active()
        torch.cuda.synchronize()
        self._stack.enter_context(torch.cuda.stream(self.stream or torch.cuda.Stream()))
        capture = _Capture(cuda, self.graph)
        self._stack.callback(_end, cuda, capture)
        cuda.capturing = capture
        self._stack.enter_context(capture)

    def __exit__(self, *error: Any) -> None:
        self._stack.close()


def _end(cuda: Cuda, capture: _Capture) -> None:
    cuda.capturing = None
    with cuda.quietly():
        for work in list(cuda.collectives):
            work.finish()
        capture.restore()


def _tensors(out: Any) -> list[Tensor]:
    return [x for x in tree_leaves(out) if isinstance(x, Tensor)]


@contextlib.contextmanager
def _drawing_from(generator: Any) -> Iterator[None]:
    """Operations draw from the host's generator here, which goes on as this one."""
    if generator is None:
        yield
        return
    before = torch.default_generator.get_state()
    torch.default_generator.set_state(generator.get_state())
    try:
        yield
    finally:
        generator.set_state(torch.default_generator.get_state())
        torch.default_generator.set_state(before)


def module(cuda: Cuda) -> dict[str, Any]:
    """The names of ``torch.cuda`` that concern graphs."""
    return {
        "CUDAGraph": CUDAGraph,
        "graph": _Graph,
        "is_current_stream_capturing": lambda: cuda.capturing is not None,
    }
