"""Hybrid sharding: a state cut along ``data``, and whole along ``replica``: the plain numbers.

Replicas do what data ranks do, but for what goes between them: a sum of each rank's own part of the
gradients, and no parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import zfunc as zf
from tests.laws.cases import (
    ADAMW,
    Case,
    Run,
    alone,
    assert_like_alone,
    assert_near,
    assert_same,
    numbers,
    plain_run,
    regression,
    trained,
)
from tests.laws.covering import Covering, each
from tests.laws.handwritten import CASES as HAND_WRITTEN
from tests.laws.models import CASES as READY_MADE
from tests.laws.models import block, mean_square, stack, stack_loss
from zfunc import optim, tree
from zfunc.ranks.connected import ConnectedGroup

F64 = torch.float64
STAGES = (0, 1, 2, 3)
CASES = {**READY_MADE, **HAND_WRITTEN}
STACK = CASES["stack"]
SHAPES = ((2, 2), (2, 1), (3, 2), (2, 3))  # replicas, and ranks of each
Wrap = Callable[[Any], Any]


def replicated(
    case: Case,
    shape: tuple[int, int],
    stage: int,
    tx: Any = ADAMW,
    wrap: Wrap = lambda f: f,
    steps: int = 3,
    state: Any = None,
    dtype: torch.dtype = F64,
    **how: Any,
) -> list[Run]:
    """What every rank has after training, the state in full; replicas were the same bitwise."""
    mesh = zf.mesh(replica=shape[0], data=shape[1])
    how = {"unit_bytes": 600, "roles": case.roles, **how}
    full = case.state(tx, dtype) if state is None else state

    def body() -> Run:
        step = wrap(zf.shard(case.step(tx), stage=stage, mesh=mesh, **how))
        placed, metrics = step.place(full), []
        for i in range(steps):
            placed, out = step(placed, step.local_batch(case.batch(i, dtype)))
            metrics.append(out)
        return metrics, step.unplace(placed)

    return zf.simulate(shape[0] * shape[1])(body)()


NAMES = ["stack", "tiny leaves", "frozen", "unused", "uneven batch", "aux", "mixed dtypes"]
NAMES += ["gan", "the head", "mean teacher", "keys of all kinds"]


@pytest.mark.parametrize(("name", "stage"), each(NAMES, STAGES, times=2))
def test_replicas_end_where_one_process_does(name: str, stage: int) -> None:
    case, shape = CASES[name], SHAPES[(NAMES.index(name) + stage) % 4]
    assert_like_alone(replicated(case, shape, stage), plain_run(case), case.tolerance)


@pytest.mark.parametrize(("shape", "stage"), each(SHAPES, STAGES, times=2), ids=str)
def test_every_number_of_replicas(shape: tuple[int, int], stage: int) -> None:
    tx = optim.chain(optim.clip_by_global_norm(0.1), ADAMW)
    assert_like_alone(replicated(STACK, shape, stage, tx), plain_run(STACK, tx), 1e-9)


@pytest.mark.parametrize("stage", STAGES)
def test_lamb(stage: int) -> None:
    tx = optim.lamb(0.02, weight_decay=0.1)
    assert_like_alone(replicated(STACK, (2, 2), stage, tx), plain_run(STACK, tx), 1e-9)


def masked_loss(params: Any, batch: Any) -> zf.Mean:
    """A mean over other numbers of elements on every rank; none on some."""
    x = zf.scan(block, params["blocks"], batch["x"])
    error = (x @ params["head"]["w"] - batch["y"]).square() * batch["seen"]
    return zf.Mean(error.sum(), batch["seen"].sum())


def masked(i: int, dtype: torch.dtype) -> Any:
    seen = torch.zeros(11, 1, dtype=dtype)
    seen[5 + i % 2 :] = 1.0
    return {**regression(i, dtype, rows=11), "seen": seen}


MASKED = trained(stack, masked_loss, batch=masked)


@pytest.mark.parametrize("stage", STAGES)
def test_a_mean_over_elements_is_one_over_all_ranks(stage: int) -> None:
    for wrap in (lambda f: f, lambda f: zf.accumulate(f, 1)):
        runs = replicated(MASKED, (2, 2), stage, wrap=wrap)
        assert_like_alone(runs, plain_run(MASKED), 1e-9)


def masked_evenly(i: int, dtype: torch.dtype) -> Any:
    seen = torch.zeros(24, 1, dtype=dtype)
    seen[5 + i % 2 :] = 1.0
    return {**regression(i, dtype, rows=24), "seen": seen}


@pytest.mark.parametrize("stage", STAGES)
def test_microbatches_of_replicas(stage: int) -> None:
    """Rows of a microbatch are others than in one process, the elements of all are the same."""
    case = trained(stack, masked_loss, batch=masked_evenly)
    for n in (2, 3):
        runs = replicated(case, (2, 2), stage, wrap=lambda f, n=n: zf.accumulate(f, n))
        assert_like_alone(runs, plain_run(case), 1e-9)


PAIRS: dict[str, Wrap] = {
    "donate": zf.donate,
    "remat": zf.remat,
    "accumulate": lambda f: zf.accumulate(f, 3),
    "offload": lambda f: zf.offload(f, to="cpu"),
    "drop_layers": lambda f: zf.drop_layers(f, theta=0.5),
    "quantize": lambda f: zf.quantize(f, start_bits=16, target_bits=16),
    "curvature": lambda f: zf.quantize(
        f, start_bits=16, target_bits=12, offset=1, period=1, curvature="power_iteration"
    ),
    "both": lambda f: zf.remat(zf.donate(zf.accumulate(f, 3))),
}
TWELVE = trained(stack, stack_loss, batch=lambda i, dtype: regression(i, dtype, rows=12))


@pytest.mark.parametrize("name", PAIRS)
def test_beside_every_other_transform(name: str) -> None:
    """Bitwise what it makes of as many data ranks, but for the order of sums."""
    wrap, turn = PAIRS[name], [*PAIRS].index(name)
    for stage in STAGES if Covering.whole else STAGES[turn % 2 :: 2]:
        runs = replicated(TWELVE, (2, 2), stage, wrap=wrap)
        flat = replicated(TWELVE, (1, 4), stage, wrap=wrap)
        assert_like_alone(runs, flat[0], 1e-9)


def test_offload_to_disk(tmp_path: Path) -> None:
    for stage in (0, 1, 3):
        folder = tmp_path / str(stage)
        runs = replicated(
            STACK, (2, 2), stage, wrap=lambda f, to=folder: zf.offload(f, to="disk", path=to)
        )
        assert_like_alone(runs, plain_run(STACK), 1e-9)


def dropped(params: Any, batch: Any) -> Tensor:
    x = zf.scan(lambda p, x: F.dropout(block(p, x), 0.3), params["blocks"], batch["x"])
    return mean_square(x @ params["head"]["w"], batch["y"])


@pytest.mark.parametrize("stage", STAGES)
def test_replicas_draw_what_data_ranks_draw(stage: int) -> None:
    """Dropout, and the loss's own key: each rank has another one, whatever holds the state."""

    def keyed(params: Any, batch: Any, key: Tensor) -> Tensor:
        with zf.random.scope(key):
            return dropped(params, batch) * (1 + torch.rand((), dtype=F64))

    for loss in (dropped, keyed):
        case = trained(stack, loss, batch=regression)
        flat = replicated(case, (1, 4), stage)
        for run in replicated(case, (2, 2), stage):
            assert_near(run[0], flat[0][0], 1e-9)
            assert_near(run[1], flat[0][1], 1e-9)


def test_what_is_averaged_by_hand_is_so_over_replicas() -> None:
    def step(state: Any, batch: Any) -> Any:
        loss, grads = zf.value_and_grad(stack_loss)(state["params"], batch)
        params = tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)
        rows = torch.tensor(float(len(batch["x"])))
        told = {"loss": loss, "rows": zf.pmean(rows), "all": zf.psum(rows), "own": zf.axis_index()}
        return {"params": params, "step": state["step"] + 1}, told

    mesh = zf.mesh(replica=2, data=2)
    on_mesh = zf.shard(step, stage=2, mesh=mesh)

    def body() -> Any:
        state = on_mesh.place({"params": stack(F64), "step": 0})
        return on_mesh(state, on_mesh.local_batch(regression(0, F64)))[1]

    found = zf.simulate(4)(body)()
    assert [x["own"] for x in found] == [0, 1, 2, 3]
    assert {(float(x["rows"]), float(x["all"])) for x in found} == {(3.0, 12.0)}


WIDE = trained(
    lambda dtype: {
        "layers": tree.Layers({"w": numbers((64, 64), i, dtype, 0.1)} for i in range(3))
    },
    lambda params, batch: (
        zf.scan(lambda p, x: (x @ p["w"]).tanh(), params["layers"], batch).square().mean()
    ),
    batch=lambda i, dtype: numbers((12, 64), 50 + i, dtype),
)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("shape", [(2, 2), (3, 2), (2, 3)], ids=str)
def test_what_goes_between_replicas(shape: tuple[int, int], stage: int) -> None:
    """2 (R-1)/R of this rank's part of the gradients; parameters are gathered along data alone."""
    mesh = zf.mesh(replica=shape[0], data=shape[1])

    def body() -> Any:
        step = zf.shard(WIDE.step(ADAMW), stage=stage, mesh=mesh)
        state = step.place(WIDE.state(ADAMW, F64))
        told = step.describe(step.local_batch(WIDE.batch(0, F64)))
        for i in range(3):
            with zf.comm.ledger() as led:
                state, _ = step(state, step.local_batch(WIDE.batch(i, F64)))
        assert step.describe().sent_bytes == led.total_bytes
        part = sum(flat.bounds(zf.rank() % shape[1])[1] - flat.bounds(zf.rank() % shape[1])[0]
                   for flat in state.params.layout.flats) * 8  # fmt: skip
        assert told.sent_bytes == led.total_bytes
        return dict(led.by_axis), led.by_label, part, str(told), str(step.describe())

    for by_axis, by_label, part, before, after in zf.simulate(shape[0] * shape[1])(body)():
        gradients = 2 * (shape[0] - 1) / shape[0] * part
        assert abs(by_axis["replica"] - gradients) <= 8 * 3 * shape[0]  # three uneven flats
        assert shape[0] > 2 or by_axis["replica"] == gradients
        gathered = by_axis["data"] - by_label["sums of leaves"]  # and reduced
        assert gathered == 2 * (shape[1] - 1) * part  # at stage 3 the one unit is kept for backward
        rest = by_axis["replica+data"]
        assert rest == sum(by_axis.values()) - by_axis["data"] - by_axis["replica"] <= 400  # losses
        assert f"replica {by_axis['replica']}" in before
        assert f"averaged over {shape[0]} replicas" in before and "replica+data" in after
        assert sum(by_label.values()) == sum(by_axis.values())


@pytest.mark.parametrize("stage", STAGES)
def test_sums_over_replicas_start_while_backward_runs(
    stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one order on all ranks, and soon after the sum within a replica."""
    issued: dict[int, list[tuple[str, str, str]]] = {rank: [] for rank in range(4)}
    real = ConnectedGroup._issue

    def issue(self: Any, kind: str, label: str, *args: Any) -> Any:
        issued[zf.rank()].append((self.axis, kind, label))
        return real(self, kind, label, *args)

    monkeypatch.setattr(ConnectedGroup, "_issue", issue)
    case = trained(lambda dtype: stack(dtype, layers=8), stack_loss)
    replicated(case, (2, 2), stage, steps=2)
    assert issued[0] == issued[1] == issued[2] == issued[3]
    rows = [row for row in issued[0] if row[2].startswith("reduce")]
    rows = rows[len(rows) // 2 :]
    first = next(i for i, row in enumerate(rows) if row[0] == "replica")
    last = max(i for i, row in enumerate(rows) if row[1] == "reduce_scatter")
    assert first < last - 4


@pytest.mark.parametrize("stage", STAGES)
def test_an_overflow_on_one_rank_leaves_the_step_out_on_all(stage: int) -> None:
    def loss(params: Any, batch: Any) -> Tensor:
        return stack_loss(params, {"x": batch["x"], "y": batch["y"]}) * batch["by"].mean()

    mesh = zf.mesh(replica=2, data=2)

    def body() -> Any:
        step = zf.precision(
            zf.shard(zf.train_step(loss, ADAMW), stage=stage, mesh=mesh), torch.float16
        )
        state = step.place(zf.TrainState.create(stack(torch.float32), ADAMW, key=7))
        scales, states = [], []
        for i in range(3):
            by = torch.ones(12, 1)
            by[-1] = float("inf") if i == 1 else 1.0
            batch = {**regression(i, torch.float32), "by": by}
            state, metrics = step(state, step.local_batch(batch))
            states.append(step.unplace(state).params)
            scales.append(metrics["loss"])
        return states, step.unplace(state)

    runs = zf.simulate(4)(body)()
    for states, last in runs:
        assert_same(states[1], states[0])
        assert all(bool(x.isfinite().all()) for x in tree.leaves(last.params))
        assert_same(last, runs[0][1])
        assert not torch.equal(states[2]["head"]["w"], states[1]["head"]["w"])


def test_skipped_where_a_gradient_is_not_finite() -> None:
    tx = optim.skip_nonfinite(ADAMW)

    def loss(params: Any, batch: Any) -> Tensor:
        return stack_loss(params, batch)

    def batch(i: int, dtype: torch.dtype) -> Any:
        out = regression(i, dtype)
        if i == 1:
            out["x"][-1, 0] = float("nan")
        return out

    case = trained(stack, loss, batch=batch)
    for stage in STAGES:
        assert_like_alone(
            [([], run[1]) for run in replicated(case, (2, 2), stage, tx)],
            ([], alone(case, tx, 3)[1]),
            1e-9,
        )


def routed(params: Any, batch: Any) -> Tensor:
    """Which layers run depends on the rank: of four, each uses others."""
    x, here = batch["x"], int(batch["x"][0, 0].mul(1000).abs()) % 3
    for i, p in enumerate(params["blocks"]):
        if i != here:
            x = zf.layer(block, p, x)
    return mean_square(x @ params["head"]["w"], batch["y"])


@pytest.mark.parametrize("stage", STAGES)
def test_ranks_that_use_other_layers(stage: int) -> None:
    """They agree over replicas on what comes next, as data ranks do."""
    case = trained(stack, routed, batch=regression)
    for skip in (False, True):
        case = Case(
            case.state, lambda tx, s=skip: zf.train_step(routed, tx, skip_unused=s), regression
        )
        flat = replicated(case, (1, 4), stage)
        assert_like_alone(replicated(case, (2, 2), stage), flat[0], 1e-9)
        assert_like_alone(replicated(case, (4, 1), stage), flat[0], 1e-9)


@pytest.mark.parametrize("stage", STAGES)
def test_a_state_saved_by_replicas_comes_back_anywhere(stage: int, tmp_path: Path) -> None:
    """Each part is written once; any other number of replicas and ranks reads it bitwise."""

    def made(replica: int, data: int) -> tuple[Any, Any]:
        mesh = zf.mesh(replica=replica, data=data)
        step = zf.shard(STACK.step(ADAMW), stage=stage, mesh=mesh, unit_bytes=600)
        return step, step.place(STACK.state(ADAMW, F64))

    def write() -> Any:
        step, state = made(2, 2)
        for i in range(2):
            state, _ = step(state, step.local_batch(STACK.batch(i, F64)))
        zf.save(tmp_path, state)
        return step.unplace(state)

    def read(replica: int, data: int) -> Any:
        step, state = made(replica, data)
        return step.unplace(zf.restore(tmp_path, like=state))

    saved = zf.simulate(4)(write)()
    files = [file.stat().st_size for file in tmp_path.rglob("*.safetensors")]
    plain = sum(x.nbytes for x in tree.leaves(saved[0]) if isinstance(x, Tensor))
    assert plain <= sum(files) < 1.5 * plain + 40_000
    for shape in ((1, 1), (2, 2), (1, 4), (4, 1), (3, 1), (2, 3)):
        for back in zf.simulate(shape[0] * shape[1])(read)(*shape):
            assert_same(back, saved[0], str(shape))


def test_init_makes_replicas_alike() -> None:
    mesh = zf.mesh(replica=2, data=-1)
    step = zf.shard(STACK.step(ADAMW), mesh=mesh)

    def make() -> Any:
        w = torch.nn.init.normal_(torch.empty(8, 8, dtype=F64))
        return zf.TrainState.create({"w": w}, ADAMW, key=1)

    def body() -> Any:
        torch.manual_seed(3)
        return step.unplace(step.init(make))

    torch.manual_seed(3)
    reference = make()
    for state in zf.simulate(4)(body)():
        assert_same(state, reference)


def test_ranks_that_start_from_other_states_are_told_across_replicas() -> None:
    step = zf.shard(STACK.step(ADAMW), mesh=zf.mesh(replica=2, data=2))

    def body() -> None:
        state = STACK.state(ADAMW, F64)
        if zf.rank() >= 2:
            state.params["head"]["w"] += 1
        step.place(state)

    with pytest.raises(zf.PlacementError, match="start from different params"):
        zf.simulate(4)(body)()


def test_what_means_nothing_with_replicas() -> None:
    step, mesh = STACK.step(ADAMW), zf.mesh(replica=2, data=2)
    for stage in STAGES:
        for wrong in (
            lambda s=stage: zf.compress_grads(zf.shard(step, stage=s, mesh=mesh)),
            lambda s=stage: zf.shard(zf.compress_grads(step), stage=s, mesh=mesh),
        ):
            with pytest.raises(zf.CompositionError, match=r"replica=2, data=2\) has replicas"):
                wrong()
        for how in ({"replica": ()}, {"axis": "replica"}, {"axis": "tensor", "replica": "data"}):
            with pytest.raises(zf.CompositionError, match="they would drift apart"):
                zf.shard(step, stage=stage, mesh=mesh, **how)
    with pytest.raises(ValueError, match="'data' is both"):
        zf.shard(step, mesh=mesh, replica="data")
    zf.compress_grads(zf.shard(step, mesh=mesh, axis=("replica", "data")))
    zf.compress_grads(zf.shard(step, mesh=zf.mesh(data=4)))
    unknown = zf.shard(step, mesh=zf.mesh(tensor=2), axis="tensor")  # data may be of one rank
    for ranks in (2, 4):
        place = zf.simulate(ranks)(lambda: unknown.place(STACK.state(ADAMW, F64)))
        if ranks == 2:
            place()
            continue
        with pytest.raises(zf.CompositionError, match=r"mesh\(data=2, tensor=2\) have other rows"):
            place()
    lost = zf.shard(step, mesh=mesh, replica=("replica", "copies"))
    with pytest.raises(ValueError, match=r"'copies'.*: expected one or more of"):
        zf.simulate(4)(lambda: lost.place(STACK.state(ADAMW, F64)))()


def test_other_names_of_axes() -> None:
    """What ``replica`` names is averaged over, whatever it is called."""
    mesh = zf.Mesh((("nodes", 2), ("gpus", 2)))

    def body() -> Run:
        step = zf.shard(STACK.step(ADAMW), stage=3, mesh=mesh, axis="gpus", replica="nodes")
        placed, metrics = step.place(STACK.state(ADAMW, F64)), []
        for i in range(3):
            mine = zf.local_batch(STACK.batch(i, F64), mesh, ("nodes", "gpus"))
            placed, out = step(placed, mine)
            metrics.append(out)
        return metrics, step.unplace(placed)

    assert_like_alone(zf.simulate(4)(body)(), plain_run(STACK), 1e-9)


@pytest.mark.parametrize("stage", STAGES)
def test_a_rank_that_leaves_is_missed_by_all(stage: int) -> None:
    """Its replica and its data ranks raise; nobody waits for ever."""
    mesh = zf.mesh(replica=2, data=2)
    told: list[int] = []

    def body() -> None:
        step = zf.shard(STACK.step(ADAMW), stage=stage, mesh=mesh)
        state = step.place(STACK.state(ADAMW, F64))
        for i in range(1 if zf.rank() == 3 else 2):
            try:
                state, _ = step(state, step.local_batch(STACK.batch(i, F64)))
            except zf.DesyncError:
                told.append(zf.rank())
                raise

    with pytest.raises(zf.DesyncError):
        zf.simulate(4, timeout=20)(body)()
    assert sorted(told) == [0, 1, 2]


def test_evaluation_and_curvature_outside_a_step() -> None:
    """``evaluate`` gathers among data ranks; eigenvalues are those of the mean over all rows."""
    from zfunc.quant.curvature import top_eigenvalues

    mesh, batch, key = zf.mesh(replica=2, data=2), regression(0, F64), zf.random.key(3)
    alone_ = top_eigenvalues(lambda p: stack_loss(p, batch), stack(F64), key=key, max_iter=200)

    def body() -> Any:
        step = zf.shard(STACK.step(ADAMW), stage=3, mesh=mesh)
        params = step.place(STACK.state(ADAMW, F64)).params
        mine = step.local_batch(batch)
        loss = zf.evaluate(stack_loss)(params, mine)
        found = top_eigenvalues(lambda p: stack_loss(p, mine), params, key=key, max_iter=200)
        return zf.psum(loss) / 4, found

    for loss, found in zf.simulate(4)(body)():
        assert_near(loss, stack_loss(stack(F64), batch), 1e-9)
        assert found.keys() == alone_.keys()
        for name, value in alone_.items():
            assert float(found[name]) == pytest.approx(float(value), rel=1e-2), name
