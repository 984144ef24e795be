"""A step of decoding recorded once, and replayed for the tokens that follow.

At one token for each text a GPU waits for Python: a layer is a handful of kernels of microseconds.
A CUDA graph launches all that were recorded at once, on the addresses that they were recorded with.
So what is recorded is a function of tensors that stay where they are
(:attr:`zfunc.language.decoding.Held.single`): the token, its position, the cache. It attends to a
fixed extent of the cache, the smallest power of two that the text fits into, and is recorded again
when the text has outgrown it, so that a long cache that is nearly empty is not read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import optree
import torch
from torch import Tensor

from zfunc import context
from zfunc.errors import PlacementError
from zfunc.language.decoding import Held, Step, check_room
from zfunc.language.recording import OnDevice, Recorder, recorder
from zfunc.nodes import NAMESPACE, Lazy, Placed

__all__ = [
    "FEWEST",
    "SMALLEST",
    "Captured",
    "captured",
    "extent_of",
    "obstacle",
]

SMALLEST = 256  # the smallest extent: below it attention is no part of what a token costs
FEWEST = 16  # tokens that are worth it: a capture runs the step five times
APART = 0.05  # how far logits may be from those of the eager step: more than 16 bits explain


_log = logging.getLogger("zfunc")


def obstacle(step: Step, params: Any, device: torch.device) -> str | None:
    """Why steps on these parameters cannot be recorded on a device; None if they may be.

    Args:
        step: from ``zfunc.language.decoding.held``.
        params: what was given to it, before any of it has entered.
    """
    if not isinstance(step, Held) or step.single is None:
        return "the decoder has no step of tensors only (zfunc.language.decoding.Held.single)"
    running = context.current()
    if running is not None and running.transforms:
        return "it runs inside a step, whose transforms act on each layer"
    leaves = optree.tree_leaves(
        params,
        is_leaf=lambda x: isinstance(x, Placed | Lazy),
        none_is_leaf=True,
        namespace=NAMESPACE,
    )
    for x in leaves:
        if isinstance(x, Placed | Lazy):
            return f"parameters are placed ({type(x).__name__}), and gathered in each step anew"
        if isinstance(x, Tensor) and x.device != device:
            return f"a parameter lies on {x.device}, tokens on {device}"
    return None


def extent_of(count: int, length: int, smallest: int = SMALLEST) -> int:
    """The extent that ``count`` positions of a cache of ``length`` are read with.

    >>> [extent_of(n, 1000) for n in (1, 256, 257, 600)]
    [256, 256, 512, 1000]
    """
    return min(max(smallest, 1 << (count - 1).bit_length()), length)


class Captured:
    """``step(cache, tokens)`` for one token of each text, recorded at the first and replayed.

    All calls are on one cache, each on what the one before returned.

    Args:
        step: the eager one.
        record: what records.
        smallest: extent.

    Raises:
        PlacementError: at a first token, or the first of a new extent: the step cannot be recorded.
        ValueError: the cache is full.
    """

    def __init__(self, step: Held, record: Recorder, smallest: int = SMALLEST) -> None:
        self._step, self._record, self._smallest = step, record, smallest
        self._extent = 0
        self._inputs: tuple[Tensor, ...] = ()
        self._replay: Callable[[], Tensor] | None = None

    def __call__(self, cache: Any, tokens: Tensor) -> tuple[Tensor, Any]:
        check_room(cache.used, 1, cache.length)
        extent = extent_of(cache.used + 1, cache.length, self._smallest)
        if not self._inputs:
            position = torch.zeros(1, dtype=torch.int64, device=tokens.device)
            self._inputs = torch.empty_like(tokens), position
        self._inputs[0].copy_(tokens)
        self._inputs[1].fill_(cache.used)
        if self._replay is None or extent != self._extent:
            self._replay, self._extent = self._recorded(cache, tokens, extent), extent
        # The next replay writes over what this one returns.
        return self._replay().clone(), cache.advanced()

    def _recorded(self, cache: Any, tokens: Tensor, extent: int) -> Callable[[], Tensor]:
        """The step over an extent, when it has run once and given the logits of the eager one.

        Models may make of a cache what they like, of its length too. What is run here and while
        recording writes the same token to the same place.
        """
        assert self._step.single is not None
        # First: where there is none, a step may not be repeated (a window would slide twice).
        run = self._step.single(cache, extent)
        expected = self._step(cache, tokens)[0].float()
        try:
            with OnDevice(tokens.device):
                found = run(*self._inputs).float()
            distance = float((found - expected).norm() / expected.norm())
            if not distance <= APART:
                raise PlacementError(
                    f"over a fixed extent of {extent} positions the model gives other logits "
                    f"(relative distance {distance:.2g})"
                )
            return self._record(run, self._inputs)
        except (PlacementError, torch.OutOfMemoryError):
            raise
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            # Tensors in the place of numbers: what a model makes of them is its own.
            line = (str(error).splitlines() or [""])[0]
            raise PlacementError(f"{type(error).__name__}: {line}") from error


def captured(
    step: Step, params: Any, device: torch.device, count: int, capture: bool | None
) -> Step:
    """A step for single tokens, recorded where it may be.

    Args:
        step: from ``zfunc.language.decoding.held``.
        params: what was given to it, before any of it has entered.
        device: of the tokens.
        count: how many tokens it will be called with.
        capture: see :func:`zfunc.language.generation.generate`.

    Raises:
        PlacementError: ``capture`` is True, and ``step`` cannot be recorded. The step that is
            returned may raise it as well.
    """
    if capture is False or (capture is None and count < FEWEST):
        return step
    record = recorder(device)
    if record is None and capture is None:
        return step
    why = f"tokens are on {device}" if record is None else obstacle(step, params, device)
    if record is None or why is not None or not isinstance(step, Held):
        return _eager(step, f"{why}", capture)
    inner: Step = Captured(step, record)

    def single(cache: Any, tokens: Tensor) -> tuple[Tensor, Any]:
        nonlocal inner
        try:
            return inner(cache, tokens)
        except PlacementError as error:
            if inner is step:
                raise
            inner = _eager(step, str(error), capture)
            return inner(cache, tokens)

    return single


def _eager(step: Step, why: str, capture: bool | None) -> Step:
    if capture:
        raise PlacementError(
            f"capture=True: single tokens cannot be recorded as a CUDA graph, since {why}. "
            "capture=None takes graphs where they are possible."
        )
    _log.info("zf.generate runs its steps eagerly, without CUDA graphs: %s", why)
    return step
