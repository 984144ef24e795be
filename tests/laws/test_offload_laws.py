"""``offload`` changes where a state lives, and no bit of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import zfunc as zf
from tests.laws.cases import (
    ADAMW,
    STEPS,
    Case,
    assert_same,
    cut_up,
    plain_run,
    regression,
    sharded_runs,
    train,
    usual,
)
from tests.laws.covering import STAGES, WORLDS, each, half, turns
from tests.laws.handwritten import CASES as HAND_WRITTEN
from tests.laws.models import CASES as READY_MADE
from zfunc import optim

F64 = torch.float64
CASES: dict[str, Case] = {**READY_MADE, **HAND_WRITTEN}
STACK = CASES["stack"]
OPTIMIZERS: dict[str, Any] = {
    "adam": optim.adam(optim.warmup_cosine(0.02, 2, 6)),
    "adamw clipped": optim.chain(optim.clip_by_global_norm(0.5), ADAMW),
    "adamw masked decay": optim.adamw(0.02, weight_decay=0.1, mask=lambda path: path.endswith("w")),
    "lamb": optim.lamb(0.02, weight_decay=0.1),
    "lion": optim.lion(0.01, weight_decay=0.1),
    "momentum": optim.sgd(0.02, momentum=0.9, nesterov=True),
    "sgd": optim.sgd(0.02),
    "skipping": optim.skip_nonfinite(ADAMW),
    "average of updates": optim.chain(ADAMW, optim.ema(0.5)),
    "by label": optim.multi_transform(
        {"w": ADAMW, "b": optim.sgd(0.1)}, lambda path: path.rpartition(".")[2]
    ),
    "masked": optim.masked(ADAMW, lambda path: path.endswith("w")),
}


def disk(step: Any, path: Path, **how: Any) -> Any:
    return zf.offload(step, to="disk", path=path, **how)


def on_disk(
    path: Path, case: Case, ranks: int, tx: Any = ADAMW, steps: int = STEPS, **how: Any
) -> list[Any]:
    """What every simulated rank has after training with state on disk; see ``cut_up``."""
    full = case.state(tx, F64)
    donated, what = how.pop("donated", False), how.pop("what", ("opt_state", "params"))

    def body() -> Any:
        step = disk(case.step(tx), path, what=what)
        step = zf.shard(step, roles=case.roles, **how)
        step = zf.donate(step) if donated else step
        with step:
            metrics, state = train(step, step.place(full), case, steps)
            return metrics, step.unplace(state)

    return zf.simulate(ranks)(body)()


@pytest.mark.parametrize(("name", "turn"), turns(CASES))
def test_every_step_and_every_stage(name: str, turn: int, tmp_path: Path) -> None:
    case = CASES[name]
    for stage, ranks in half(turn):
        mine = on_disk(tmp_path, case, **usual(stage, ranks))
        assert_same(mine, sharded_runs(case, stage, ranks), f"stage {stage} on {ranks} ranks")


@pytest.mark.parametrize(("stage", "ranks"), each(STAGES, WORLDS, times=2))
def test_every_leaf_a_unit(stage: int, ranks: int, tmp_path: Path) -> None:
    how: dict[str, Any] = {"stage": stage, "unit_bytes": 1, "donated": (stage + ranks) % 2 == 1}
    mine = on_disk(tmp_path, STACK, ranks, **how)
    assert_same(mine, cut_up(STACK, ranks, steps=STEPS, **how))


@pytest.mark.parametrize(("name", "turn"), turns(OPTIMIZERS))
def test_optimizers(name: str, turn: int, tmp_path: Path) -> None:
    tx = OPTIMIZERS[name]
    for stage in (turn % 3, 3):
        mine = on_disk(tmp_path, STACK, 2, tx, stage=stage, unit_bytes=600)
        reference = cut_up(STACK, 2, tx, STEPS, stage=stage, unit_bytes=600)
        assert_same(mine, reference, f"stage {stage}")


@pytest.mark.parametrize("what", [("opt_state",), ("params",)])
@pytest.mark.parametrize(("name", "turn"), turns(["stack", "the head", "mean teacher", "gan"]))
def test_one_half_on_disk(what: tuple[str, ...], name: str, turn: int, tmp_path: Path) -> None:
    for stage, ranks in half(turn):
        if ranks in (2, 3):
            mine = on_disk(tmp_path, CASES[name], what=what, **usual(stage, ranks))
            assert_same(mine, sharded_runs(CASES[name], stage, ranks), f"stage {stage}")


@pytest.mark.parametrize(
    ("name", "turn"), [(name, turn) for name, turn in turns(CASES) if name != "strided"]
)
def test_alone(name: str, turn: int, tmp_path: Path) -> None:
    """Without ``shard``, the bits of the bare step (strided leaves are laid out anew)."""
    case = CASES[name]
    for what in (("opt_state", "params"), (("opt_state",), ("params",))[turn % 2]):
        step = disk(case.step(ADAMW), tmp_path, what=what, roles=case.roles)
        with step:
            metrics, state = train(step, step.place(case.state(ADAMW, F64)), case, STEPS)
            assert_same((metrics, step.unplace(state)), plain_run(case), str(what))


EVEN = Case(STACK.state, STACK.step, lambda i, dtype: regression(i, dtype, rows=24))
BESIDE: dict[str, Callable[[Any], Any]] = {
    "precision": zf.precision,
    "a loss scale": lambda f: zf.precision(f, compute=torch.float16, loss_scale="dynamic"),
    "accumulate": lambda f: zf.accumulate(f, 2),
    "remat": zf.remat,
    "donate": zf.donate,
    "drop_layers": lambda f: zf.drop_layers(f, theta=0.5, gamma=1.0),
    "all": lambda f: zf.donate(zf.precision(zf.accumulate(zf.remat(f), 2))),
}


@pytest.mark.parametrize(("name", "turn"), turns(BESIDE))
def test_beside_other_transforms(name: str, turn: int, tmp_path: Path) -> None:
    """On disk and in memory alike, whatever else the step is wrapped in, before or behind."""
    dtype = torch.float32 if name in ("precision", "a loss scale", "all") else F64

    def body(stage: int, on_disk: bool, first: bool) -> Any:
        step = STACK.step(ADAMW)
        step = disk(step, tmp_path) if on_disk and first else step
        step = zf.shard(BESIDE[name](step), stage=stage, unit_bytes=600)
        step = disk(step, tmp_path) if on_disk and not first else step
        with step:
            state = step.place(STACK.state(ADAMW, dtype))
            metrics, state = train(step, state, EVEN, 2, dtype)
            return metrics, step.unplace(state)

    for stage, ranks in half(turn):
        ranked = zf.simulate(ranks)(body)
        mine = ranked(stage, True, (stage + turn) % 2 == 0)
        assert_same(mine, ranked(stage, False, False), f"stage {stage} on {ranks} ranks")


@pytest.mark.parametrize("stage", STAGES)
def test_an_overflow_leaves_the_state_on_disk_as_it_is(stage: int, tmp_path: Path) -> None:
    """Gradients are on disk before anybody looks at them; their norms are not."""

    def body(on_disk: bool) -> Any:
        step = zf.precision(STACK.step(ADAMW), compute=torch.float16, loss_scale="dynamic")
        step = disk(step, tmp_path) if on_disk else step
        with zf.shard(step, stage=stage, unit_bytes=600) as step:
            state, seen = step.place(STACK.state(ADAMW, torch.float32)), []
            for i, size in enumerate((1.0, float("inf"), 1e4, 1.0)):
                batch = zf.local_batch(STACK.batch(i, torch.float32))
                state, metrics = step(state, {**batch, "x": batch["x"] * size})
                seen.append(metrics)
            return seen, step.unplace(state)

    mine, theirs = zf.simulate(2)(body)(True), zf.simulate(2)(body)(False)
    assert any(bool(row["overflow"]) for row in mine[0][0])
    assert_same(mine, theirs)


def test_compressed_gradients_stay_in_memory(tmp_path: Path) -> None:
    for wrap in (
        lambda f: disk(zf.compress_grads(f, method="int8"), tmp_path),
        lambda f: zf.compress_grads(disk(f, tmp_path), method="int8"),
    ):
        with pytest.raises(zf.CompositionError, match=r"offload\(to='cpu'\)"):
            wrap(zf.shard(STACK.step(ADAMW)))
    zf.offload(zf.compress_grads(zf.shard(STACK.step(ADAMW)), method="int8"))
