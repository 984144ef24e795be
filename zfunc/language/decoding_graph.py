"""A step of decoding as a CUDA graph: recorded once, and replayed for the tokens that follow.

At one token for each text a GPU waits for Python: a layer is a handful of kernels of microseconds.
A CUDA graph launches all that were recorded at once, on the addresses that they were recorded with.
So what is recorded is a function of tensors that stay where they are
(:attr:`zfunc.language.decoding.BoundStep.single`): the token, its position, the cache. It attends
to a fixed length of the cache, the smallest power of two that the text fits into, and is recorded
again when the text has outgrown it, so that a long cache that is nearly empty is not read.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import optree
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from zfunc.engine import context
from zfunc.errors import PlacementError
from zfunc.language.decoding import BoundStep, CacheStep, TensorStep, check_room
from zfunc.transforms.capture import ONE_AT_A_TIME, Reads
from zfunc.trees.marks import part_of
from zfunc.trees.nodes import NAMESPACE, Lazy, Placed

__all__ = ["FEWEST", "SMALLEST", "GraphedStep", "NoHostReads", "graphed", "length_for"]

SMALLEST = 256  # positions that are read at least: fewer are no part of what a token costs
FEWEST = 16  # tokens that are worth it: a capture runs the step five times
APART = 0.05  # how far logits may be from those of the eager step: more than 16 bits explain


_log = logging.getLogger("zfunc")


def length_for(count: int, length: int) -> int:
    """How many positions are read where ``count`` of a cache of ``length`` are filled.

    >>> [length_for(n, 1000) for n in (1, 256, 257, 600)]
    [256, 256, 512, 1000]
    """
    return min(max(SMALLEST, 1 << (count - 1).bit_length()), length)


class GraphedStep:
    """``step(cache, tokens)`` for one token of each text, recorded at the first and replayed.

    All calls are on one cache, each on what the one before returned. A step that cannot be
    recorded runs eagerly from then on.

    Args:
        step: the eager one.
        device: the GPU that tokens are on.
        insists: whether a step that cannot be recorded is an error.

    Raises:
        PlacementError: at a first token, or the first that reads more positions: the step cannot
            be recorded, and that is an error.
        ValueError: the cache is full.
    """

    def __init__(self, step: BoundStep, device: torch.device, insists: bool = True) -> None:
        self._step, self._device, self._stream = step, device, torch.cuda.Stream(device)
        self._insists, self._eager = insists, False
        self._length = 0
        self._inputs: tuple[Tensor, ...] = ()
        self._out: Tensor | None = None
        self._graph: Any = None

    def __call__(self, cache: Any, tokens: Tensor) -> tuple[Tensor, Any]:
        if not self._eager:
            try:
                return self._replayed(cache, tokens)
            except PlacementError as error:
                _refuse(str(error), self._insists)
                self._eager = True
        return self._step(cache, tokens)

    def _replayed(self, cache: Any, tokens: Tensor) -> tuple[Tensor, Any]:
        check_room(cache.used, 1, cache.length)
        length = length_for(cache.used + 1, cache.length)
        if not self._inputs:
            position = torch.zeros(1, dtype=torch.int64, device=tokens.device)
            self._inputs = torch.empty_like(tokens), position
        self._inputs[0].copy_(tokens)
        self._inputs[1].fill_(cache.used)
        if length != self._length:
            self._record(self._proven(cache, tokens, length))
            self._length = length
        assert self._out is not None
        with torch.cuda.device(self._device):
            self._graph.replay()
        # The next replay writes over what this one returns.
        return self._out.clone(), cache.advanced()

    def _proven(self, cache: Any, tokens: Tensor, length: int) -> TensorStep:
        """The step over a fixed length, once it has run and given the logits of the eager one.

        Models may make of a cache what they like, of its length too. What is run here and while
        recording writes the same token to the same place.
        """
        assert self._step.single is not None
        # First: where there is none, a step may not be repeated (a window would slide twice).
        run = self._step.single(cache, length)
        expected = self._step(cache, tokens)[0].float()
        with _refusing(), NoHostReads(tokens.device):
            found = run(*self._inputs).float()
        distance = float((found - expected).norm() / expected.norm())
        if not distance <= APART:
            raise PlacementError(
                f"over a fixed length of {length} positions the model gives other logits "
                f"(relative distance {distance:.2g})"
            )
        return run

    def _record(self, run: TensorStep) -> None:
        """A graph of ``run``; the memory of the one before is taken over, so that has to live."""
        with _refusing(), torch.cuda.device(self._device):
            now = torch.cuda.current_stream()
            self._stream.wait_stream(now)
            # What libraries set up for a stream (workspaces, handles) must not be recorded.
            with torch.cuda.stream(self._stream):
                for _ in range(2):
                    run(*self._inputs)
            now.wait_stream(self._stream)
            graph, pool = torch.cuda.CUDAGraph(), self._graph and self._graph.pool()
            # Of this thread only: another one may allocate while this one records.
            how: Any = {"stream": self._stream, "capture_error_mode": "thread_local"}
            with ONE_AT_A_TIME, torch.cuda.graph(graph, pool=pool, **how):
                self._out = run(*self._inputs)
            self._graph = graph


@contextmanager
def _refusing() -> Iterator[None]:
    """What a model makes of tensors in the place of numbers is its own, errors too."""
    try:
        yield
    except (PlacementError, torch.OutOfMemoryError):
        raise
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        line = (str(error).splitlines() or [""])[0]
        raise PlacementError(f"{type(error).__name__}: {line}") from error


class NoHostReads(Reads):
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
            tensors = [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, Tensor)]
            places = {str(x.device) for x in tensors}
            if len(places) > 1:
                raise PlacementError(f"{func} copies between {' and '.join(sorted(places))}")
        return out

    def met(self, func: Any) -> None:
        raise PlacementError(f"{func} makes a number of Python, or a shape, of a tensor's value")


_COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)


def graphed(
    step: CacheStep, params: Any, device: torch.device, count: int, capture: bool | None
) -> CacheStep:
    """A step for single tokens, recorded where it may be.

    Args:
        step: from ``zfunc.language.decoding.bound``.
        params: what was given to it, before any of it has entered.
        device: of the tokens.
        count: how many tokens it will be called with.
        capture: see :func:`zfunc.language.generation.generate`.

    Raises:
        PlacementError: ``capture`` is True, and ``step`` cannot be recorded. The step that is
            returned may raise it as well.
    """
    unasked = count < FEWEST or device.type != "cuda"
    if capture is False or (capture is None and unasked):
        return step
    why = _obstacle(step, params, device)
    if why is None and isinstance(step, BoundStep):
        return GraphedStep(step, device, insists=bool(capture))
    _refuse(f"{why}", bool(capture))
    return step


def _obstacle(step: CacheStep, params: Any, device: torch.device) -> str | None:
    """Why steps on these parameters cannot be recorded on a device; None if they may be."""
    if device.type != "cuda":
        return f"tokens are on {device}"
    if not isinstance(step, BoundStep) or step.single is None:
        return "the decoder has no step of tensors only (zfunc.language.decoding.BoundStep.single)"
    running = context.current()
    if running is not None and running.transforms:
        return "it runs inside a step, whose transforms act on each layer"
    leaves = optree.tree_leaves(
        params, is_leaf=lambda x: isinstance(x, Placed | Lazy), namespace=NAMESPACE
    )
    for x in leaves:
        if isinstance(x, Placed | Lazy):
            return f"parameters are placed ({type(x).__name__}), and gathered in each step anew"
        if (part := part_of(x)) is not None and part.group.size > 1:
            return f"ranks have parts of its leaves (axis {part.axis!r}), and send within each step"
        if isinstance(x, Tensor) and x.device != device:
            return f"a parameter lies on {x.device}, tokens on {device}"
    return None


def _refuse(why: str, insists: bool) -> None:
    if insists:
        raise PlacementError(
            f"capture=True: single tokens cannot be recorded as a CUDA graph, since {why}. "
            "capture=None takes graphs where they are possible."
        )
    _log.info("zf.generate runs its steps eagerly, without CUDA graphs: %s", why)
