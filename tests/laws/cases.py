"""What a case is, and how it is run: in one process, and cut over simulated ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import optree
import torch
from torch import Tensor

import zfunc as zf
from zfunc import optim, tree

Tree = Any
ADAMW = optim.adamw(0.02, weight_decay=0.1)
STEPS = 3  # the second step runs on moments and on a recorded order, the third on reused memory


@dataclass(frozen=True, eq=False)
class Case:
    """A state, a plain step, and data; equal to itself alone, so that its runs are found again.

    Attributes:
        state: ``state(tx, dtype)``, the same numbers whenever it is called.
        step: ``step(tx)``, a function ``(state, batch) -> (state, metrics)``.
        batch: ``batch(i, dtype)``, the global batch of step i.
        roles: for ``shard``.
        tolerance: how far float64 runs may drift apart.
    """

    state: Callable[[Any, torch.dtype], Any]
    step: Callable[[Any], Any]
    batch: Callable[[int, torch.dtype], Any]
    roles: dict[str, str] | None = None
    tolerance: float = 1e-9


def numbers(
    shape: Any, seed: int, dtype: torch.dtype = torch.float64, scale: float = 0.5
) -> Tensor:
    """Normal numbers that depend on the seed alone; float32 ones are rounded float64 ones."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype)


def regression(i: int, dtype: torch.dtype, rows: int = 12, width: int = 6) -> dict[str, Tensor]:
    """Inputs ``x`` of shape (rows, width) and targets ``y`` of shape (rows, 1)."""
    return {
        "x": numbers((rows, width), 1000 + i, dtype, 1.0),
        "y": numbers((rows, 1), 2000 + i, dtype, 1.0),
    }


def trained(
    params: Callable[[torch.dtype], Tree],
    loss: Callable[..., Any],
    *,
    batch: Callable[[int, torch.dtype], Any] = regression,
    has_aux: bool = False,
    trainable: Callable[[str], bool] | None = None,
    tolerance: float = 1e-9,
) -> Case:
    """The case of ``zf.train_step``."""
    return Case(
        lambda tx, dtype: zf.TrainState.create(params(dtype), tx, key=7, trainable=trainable),
        lambda tx: zf.train_step(loss, tx, has_aux=has_aux),
        batch,
        tolerance=tolerance,
    )


Run = tuple[list[Tree], Tree]


def alone(case: Case, tx: Any = ADAMW, steps: int = 4, dtype: torch.dtype = torch.float64) -> Run:
    """Metrics of each step and the last state, of the bare step in one process."""
    step, state, metrics = case.step(tx), case.state(tx, dtype), []
    for i in range(steps):
        state, out = step(state, case.batch(i, dtype))
        metrics.append(out)
    return metrics, state


def train(
    step: Any, state: Any, case: Case, steps: int, dtype: torch.dtype = torch.float64
) -> tuple[list[Tree], Any]:
    """The same of a wrapped step, on the calling rank; the state stays placed."""
    metrics = []
    for i in range(steps):
        state, out = step(state, zf.local_batch(case.batch(i, dtype)))
        metrics.append(out)
    return metrics, state


_PLAIN: dict[Any, Run] = {}
_CUT: dict[Any, list[Run]] = {}


def plain_run(
    case: Case, tx: Any = ADAMW, steps: int = STEPS, dtype: torch.dtype = torch.float64
) -> Run:
    """``alone``, run once for all tests of the process: what comes out is only read."""
    key = (case, tx, steps, dtype)
    if key not in _PLAIN:
        _PLAIN[key] = alone(case, tx, steps, dtype)
    return _PLAIN[key]


def usual(stage: int, ranks: int) -> dict[str, Any]:
    """How ``shard`` is asked for in each place: on two ranks all layers share a unit, elsewhere
    those of ``stack`` are split and merged; on one and three ranks the state is donated."""
    unit_bytes = 1 << 26 if ranks == 2 else 600
    return {"ranks": ranks, "stage": stage, "unit_bytes": unit_bytes, "donated": ranks % 2 == 1}


def sharded_runs(case: Case, stage: int, ranks: int) -> list[Run]:
    """``cut_up`` as usual, run once for all tests of the process.

    The law of ``shard`` compares it with ``plain_run``; those of transforms that change no
    bit compare themselves with it.
    """
    key = (case, stage, ranks)
    if key not in _CUT:
        _CUT[key] = cut_up(case, steps=STEPS, **usual(stage, ranks))
    return _CUT[key]


def cut_up(
    case: Case,
    ranks: int,
    tx: Any = ADAMW,
    steps: int = 4,
    dtype: torch.dtype = torch.float64,
    donated: bool = False,
    **how: Any,
) -> list[Run]:
    """What every simulated rank has after training under ``shard(**how)``; the state in full."""
    full = case.state(tx, dtype)

    def body() -> Run:
        step = zf.shard(case.step(tx), roles=case.roles, **how)
        step = zf.donate(step) if donated else step
        metrics, state = train(step, step.place(full), case, steps, dtype)
        return metrics, step.unplace(state)

    return zf.simulate(ranks)(body)()


def named(state: Tree) -> dict[str, Any]:
    """Path -> leaf of any plain tree."""
    keys, leaves, _ = optree.tree_flatten_with_path(
        state, none_is_leaf=True, namespace=tree.NAMESPACE
    )
    return {tree.dotted(*key): leaf for key, leaf in zip(keys, leaves, strict=True)}


def assert_near(a: Tree, b: Tree, tolerance: float, where: str = "") -> None:
    """Two plain trees agree in structure, dtypes and, within ``tolerance``, in numbers."""
    mine, theirs = named(a), named(b)
    assert mine.keys() == theirs.keys(), where
    for name, y in theirs.items():
        x = mine[name]
        if not isinstance(y, Tensor):
            assert x == y, f"{where}: {name}"
            continue
        assert x.dtype == y.dtype and x.shape == y.shape, f"{where}: {name}"
        if x.numel() and x.is_floating_point():
            gap = float((x.double() - y.double()).abs().max())
            assert gap <= tolerance * max(1.0, float(y.abs().max())), f"{where}: {name} {gap:.2e}"
        else:
            assert torch.equal(x, y), f"{where}: {name}"


def assert_same(a: Tree, b: Tree, where: str = "") -> None:
    """Two plain trees agree in every bit, those of NaNs and signed zeros included."""
    mine, theirs = named(a), named(b)
    assert mine.keys() == theirs.keys(), where
    for name, y in theirs.items():
        x = mine[name]
        if isinstance(y, Tensor):
            assert x.dtype == y.dtype and x.shape == y.shape, f"{where}: {name}"
            assert bits(x) == bits(y), f"{where}: {name}"
        else:
            assert x == y, f"{where}: {name}"


def bits(x: Tensor) -> bytes:
    """The memory of a tensor's elements, in order."""
    flat = torch.empty(x.numel(), dtype=x.dtype).copy_(x.detach().reshape(-1))
    return bytes(flat.view(torch.uint8).numpy())


def assert_like_alone(runs: list[Run], reference: Run, tolerance: float) -> None:
    """Every rank ends where one process does, and all ranks end in the same bits."""
    for rank, run in enumerate(runs):
        assert_near(run[0], reference[0], tolerance, f"metrics on rank {rank}")
        assert_near(run[1], reference[1], tolerance, f"state on rank {rank}")
        assert_same(run[1], runs[0][1], f"rank {rank} and rank 0")
