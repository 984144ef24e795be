"""``profile``: where the time of a step goes, and its FLOPs and bytes, by module and operator.

The step is the real one on the real state. Its operations run as they are, and are noted by a
dispatch mode; layers say where they are by the hook that every transform has. All that is gone when
the step is over, whether it fails or not.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import optree
import torch
from torch import Tensor, nn

from zfunc.engine.batches import has_rows, leaves_of
from zfunc.engine.entries import copied, entry, first_placed
from zfunc.engine.signs import signs
from zfunc.engine.step import Step, as_step
from zfunc.errors import CompositionError
from zfunc.foresight.inputs import check_step, state_after
from zfunc.foresight.layer_names import named
from zfunc.foresight.module_names import modules_named
from zfunc.foresight.op_times import EventTimes, HostTimes, Times
from zfunc.foresight.peaks import peak_of
from zfunc.foresight.prediction import SentBytes
from zfunc.foresight.profiles import Profile
from zfunc.foresight.watch import TimedRow, Watch
from zfunc.ranks import world
from zfunc.rehearsal.eager import uncompiled
from zfunc.trees import tree
from zfunc.trees.marks import carry
from zfunc.trees.nodes import NAMESPACE, PLACED, Box, Placed, leaves_in

__all__ = ["profile", "watching"]


def profile(step: Any, state: Any, batch: Any, depth: int = 3, warmup: int = 2) -> Profile:
    """Run a step and say where its time goes, with its FLOPs and bytes by module and operator.

    On several ranks a collective: each gets a profile of its own.

    Args:
        step: a step, or a function ``(state, batch) -> (state, metrics)``.
        state: a full state, or one that this step has placed. It is as usable behind this as
            before, also where the step donates its state: then a copy of it is profiled. So is
            the global state of torch's random numbers.
        batch: what this rank would pass to the step.
        depth: how many levels of modules are printed.
        warmup: steps before the one that is watched; the last of them is timed, too.

    Raises:
        TypeError: ``step`` is no function of a state and a batch.
        ValueError: fewer than 1 warm-up steps, or a depth below 0.
        CompositionError: the step is replayed as a CUDA graph, in which there are no operations; or
            the state has been placed on disk, where a copy would need files of its own.

    >>> import zfunc as zf
    >>> model = zf.functionalize(nn.Linear(10, 10))
    >>> def step(state, batch):
    ...     return state, zf.evaluate(model.apply)(state["params"], batch)
    >>> seen = profile(step, {"params": model.params}, torch.ones(1, 10))
    >>> seen.parameters, seen.flops.total, seen.macs
    (110, 200, 100)
    """
    _check(step, depth, warmup)
    step, batch_leaves = as_step(step), [x for _, x in leaves_of(batch)]
    on_gpu = any(isinstance(x, Tensor) and x.is_cuda for x in [*_tensors(state), *batch_leaves])
    devices = [torch.cuda.current_device()] if on_gpu else []
    with torch.random.fork_rng(devices=devices), uncompiled():  # a graph shows no operations
        mine = _own(step, state)
        inference = any(t.of_params for t in step.transforms)
        times: Times = EventTimes() if on_gpu else HostTimes()
        watch = Watch(times, on_gpu)
        watched, plain = named(step, watch.layers), 0.0
        for _ in range(warmup):
            plain, out = _timed(times, watched, mine, batch)
            mine = state_after(step, mine, out)
            del out
        watch.homes, size = _homes(mine), tree.size_bytes(mine)
        with watching(watch) as sent:
            seconds, out = _timed(times, watched, mine, batch)
        del out
    rows = _updates(watch.rows())
    device = torch.device("cuda" if on_gpu else "cpu")
    return Profile(
        rank=world.current().rank,
        ranks=world.current().size,
        device=torch.cuda.get_device_name() if on_gpu else "cpu",
        seconds=seconds,
        unwatched_seconds=plain,
        samples=next((len(x) for x in batch_leaves if has_rows(x)), 0),
        state_bytes=size,
        sizes=_sizes(state if inference else entry(state, "params")),
        kept=watch.kept_bytes(),
        sent=sent,
        peak=peak_of(device, _dtype(rows)),
        rows=rows,
        depth=depth,
    )


def _check(step: Any, depth: int, warmup: int) -> None:
    if warmup < 1:
        raise ValueError(f"profile: warmup={warmup}, expected 1 or more: a first step also plans.")
    if depth < 0:
        raise ValueError(f"profile: depth={depth}, expected 0 (the whole step) or more.")
    check_step(step, "profile")


def _tensors(state: Any) -> list[Tensor]:
    held: list[Any] = []
    for x in leaves_in(state, PLACED):
        held += x.held() if isinstance(x, Placed | Box) else [x]
    return [x for x in held if isinstance(x, Tensor)]


# The state


def _own(step: Step, state: Any) -> Any:
    """A placed state that may be spent."""
    if not (first_placed(state) or signs(state)):
        # An alias that is no plain tensor, so that who holds full parameters goes on holding them.
        return step.place(
            optree.tree_map(
                lambda x: carry(nn.Parameter(x.detach(), False), x) if isinstance(x, Tensor) else x,
                state,
                namespace=NAMESPACE,
            )
        )
    if not any(t.spends for t in step.transforms):
        return state
    nodes = leaves_in(state, PLACED)
    if any(isinstance(x, Placed) and not x.resident for x in nodes):
        raise CompositionError(
            "profile: the state is offloaded, and the step may write over it. Give profile a full "
            "state, which it places by itself, with a step that has a folder of its own."
        )
    return copied(state)


def _homes(state: Any) -> dict[int, str]:
    """The addresses of plain parameters, and their paths."""
    params = entry(state, "params")
    if params is None:
        return {}
    leaves, spec = optree.tree_flatten(params, namespace=PLACED)
    pairs = zip(spec.paths(), leaves, strict=True)
    return {x.data_ptr(): tree.dotted(*path) for path, x in pairs if isinstance(x, Tensor)}


def _sizes(params: Any) -> dict[str, int]:
    """The elements of every full leaf, by path."""
    found: dict[str, int] = {}
    leaves, spec = optree.tree_flatten(params, namespace=PLACED)
    for path, x in zip(spec.paths(), leaves, strict=True):
        if isinstance(x, Placed):
            told = [(info.keys, info.shape) for info in x.leaf_infos() if info.shape is not None]
        elif isinstance(x, Box):
            told = [((slot.path,), slot.full) for slot in x.layout.present]
        else:
            told = [((), tuple(getattr(x, "shape", ())))]
        for keys, shape in told:
            found[tree.dotted(*path, *keys)] = torch.Size(shape).numel()
    return found


# The step


def _timed(times: Times, step: Step, state: Any, batch: Any) -> tuple[float, Any]:
    """The seconds of a step, and what it returns."""
    gc.collect()
    times.begin()
    out = step(state, batch)
    return times.end(), out


class _Sent(SentBytes):
    """A ledger that also notes when something was issued."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def record(self, kind: str, label: str, axis: str, payload: int, headers: int) -> None:
        super().record(kind, label, axis, payload, headers)
        self._watch.started(kind, label, axis, payload)


@contextmanager
def watching(watch: Watch) -> Iterator[SentBytes]:
    """A block in which all that this rank does is noted; the ledger of what it sends."""
    sent, ledgers = _Sent(watch), world.current().ledgers
    ledgers.append(sent)
    try:
        with modules_named(watch.layers), watch:
            yield sent
    finally:
        ledgers[:] = [other for other in ledgers if other is not sent]


def _updates(rows: tuple[TimedRow, ...]) -> tuple[TimedRow, ...]:
    """What follows the last backward is the update."""
    last = max((i for i, row in enumerate(rows) if row.phase == "backward"), default=len(rows))
    return (*rows[: last + 1], *(row.in_update() for row in rows[last + 1 :]))


def _dtype(rows: tuple[TimedRow, ...]) -> torch.dtype:
    """That in which most is computed."""
    flops: dict[torch.dtype, int] = {}
    for row in rows:
        if row.flops and row.dtype is not None and row.dtype.is_floating_point:
            flops[row.dtype] = flops.get(row.dtype, 0) + row.flops
    return max(flops, key=lambda dtype: flops[dtype], default=torch.float32)
