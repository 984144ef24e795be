"""CUDA graphs: what is launched during a capture is remembered, and done again at a replay.

As on a GPU a capture itself computes nothing that lasts: memory that is older than it is put back
when it ends. A synchronisation inside one raises. Replays repeat the same operations on the same
memory, whatever it holds by then; the host's Python does not run again.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from tests.gpu.streams import StreamContext, opened

if TYPE_CHECKING:
    from tests.gpu.cuda import Cuda

__all__ = ["Graph", "module"]

_pools = itertools.count(1)


class Graph:
    """As :class:`torch.cuda.CUDAGraph`."""

    def __init__(self, keep_graph: bool = False) -> None:
        from tests.gpu.cuda import active

        self.cuda = active()
        self._pool: Any = (0, next(_pools))
        self._done: list[Callable[[], None]] = []
        self._saved: dict[int, tuple[Tensor, Tensor]] = {}
        self._born: set[int] = set()
        self._touched: dict[tuple[int, bool], Tensor] = {}
        self.ready = False

    def pool(self) -> Any:
        return self._pool

    def register_generator_state(self, generator: torch.Generator) -> None:
        """What is drawn at a replay goes on from where the generator was left."""

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        if self.cuda.capturing is not None:
            raise RuntimeError("a capture is under way already")
        self._pool = self._pool if pool is None else pool
        self.cuda.capturing = self
        self.cuda.note("capture", "begins")

    def capture_end(self) -> None:
        self.cuda.capturing = None
        self.cuda.note("capture", "ends")
        with _disable_current_modes():
            for whole, saved in self._saved.values():
                whole.copy_(saved)
        self._saved.clear()
        self.ready = True

    def replay(self) -> None:
        if not self.ready:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")
        self.cuda.issue("replay", kind="capture")
        where = self.cuda.where()
        for (_, writes), x in self._touched.items():
            self.cuda.use(self.cuda.current, x, writes, where, "replay")
        with self.cuda.quietly(), _disable_current_modes():
            for again in self._done:
                again()

    def reset(self) -> None:
        self._done.clear()
        self._touched.clear()
        self.ready = False

    # What the harness tells it during the capture

    def about_to_write(self, tensors: list[Tensor]) -> None:
        """Memory that is older than the capture is put back at its end."""
        with _disable_current_modes():
            for x in tensors:
                storage = x.untyped_storage()
                if storage._cdata in self._born or storage._cdata in self._saved:
                    continue
                whole = torch.empty(0, dtype=torch.uint8).set_(storage)
                self._saved[storage._cdata] = (whole, whole.clone())

    def touches(self, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        """What a replay will read and write."""
        self._touched |= {(x.untyped_storage()._cdata, False): x for x in reads}
        self._touched |= {(x.untyped_storage()._cdata, True): x for x in writes}

    def operation(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """An operation; its results come into the same memory again."""
        results = [x.detach() for x in tree_leaves(out) if isinstance(x, Tensor)]
        given = {
            x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)
        }
        # Of their own: the project may give a tensor that it is done with other memory.
        args, kwargs = tree_map_only(Tensor, Tensor.detach, (args, dict(kwargs)))
        seeded = torch.Tag.nondeterministic_seeded in func.tags
        drawn = torch.cuda.default_generators[self.cuda.device]._current if seeded else None
        fresh = [x.untyped_storage()._cdata not in given for x in results]
        self._born |= {
            x.untyped_storage()._cdata for x, new in zip(results, fresh, strict=True) if new
        }

        def again() -> None:
            with _drawing_from(drawn):
                found = [x for x in tree_leaves(func(*args, **kwargs)) if isinstance(x, Tensor)]
            for into, x, new in zip(results, found, fresh, strict=True):
                if new:
                    into.copy_(x)

        self._done.append(again)

    def other(self, again: Callable[[], None], born: tuple[Tensor, ...] = ()) -> None:
        """A kernel, a copy between host and device, or a collective."""
        self._born |= {x.untyped_storage()._cdata for x in born}
        self._done.append(again)


class Capture:
    """As :class:`torch.cuda.graph`."""

    def __init__(
        self,
        graph: Graph,
        pool: Any = None,
        stream: Any = None,
        capture_error_mode: str = "global",
        **how: Any,
    ) -> None:
        self.graph, self.pool, self.mode = graph, pool, capture_error_mode
        self.context = StreamContext(opened() if stream is None else stream)

    def __enter__(self) -> None:
        cuda = self.graph.cuda
        for actor in list(cuda.actors.values()):  # it begins with a synchronisation
            cuda.host.learn(actor.clock)
        self.context.__enter__()
        self.graph.capture_begin(self.pool, self.mode)

    def __exit__(self, *error: object) -> None:
        self.graph.capture_end()
        self.context.__exit__(*error)


@contextlib.contextmanager
def _drawing_from(generator: Any) -> Iterator[None]:
    """Operations draw from the host's generator here, which goes on as this one for a while."""
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
        "CUDAGraph": Graph,
        "graph": Capture,
        "graph_pool_handle": lambda: (0, next(_pools)),
        "is_current_stream_capturing": lambda: cuda.capturing is not None,
    }
