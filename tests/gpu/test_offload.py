"""``offload`` beside a GPU: the plain run's bits, no races, who waits, and what is page-locked."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import zfunc as zf
from tests.gpu.cuda import Cuda, active
from tests.gpu.ranks import launch
from tests.gpu.record import Report
from tests.gpu.training import Model, Trained, gpt_model, trained
from tests.laws.cases import ADAMW, assert_same, train
from tests.laws.covering import pairs
from tests.laws.handwritten import CASES as HAND_WRITTEN
from tests.laws.models import CASES
from zfunc import optim
from zfunc.buffers.pages import ACCOUNT, aligned
from zfunc.buffers.ring import HOST
from zfunc.transforms.offloading.present import Present
from zfunc.transforms.offloading.transitions import trees_on_host
from zfunc.trees.memory import reuse

F64 = torch.float64
MODEL = gpt_model(depth=2, width=64)
WIDE = gpt_model(depth=2, width=64, dtype=F64)
SMALL = gpt_model(depth=2, width=16, dtype=F64)
UNITS = 1 << 16
CLIP = optim.chain(
    optim.clip_by_global_norm(0.5),
    optim.adamw(optim.warmup_cosine(1e-2, warmup=2, steps=10)),
)
STAGES = (None, 0, 1, 2, 3)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Nothing is idle before a test, and nothing is locked after it."""
    gc.collect()
    HOST.clear()
    ACCOUNT.begin()
    yield
    gc.collect()
    HOST.clear()
    assert ACCOUNT.locked_bytes == 0


def up(tree: Any) -> Any:
    return zf.tree.map(lambda x: x.cuda() if isinstance(x, Tensor) and x.ndim else x, tree)


def down(tree: Any) -> Any:
    return zf.tree.map(lambda x: x.cpu() if isinstance(x, Tensor) else x, tree)


def cut(step: Any, stage: int | None, **how: Any) -> Any:
    return step if stage is None else zf.shard(step, stage=stage, unit_bytes=UNITS, **how)


def run(wrap: Callable[[Any], Any], tx: Any = ADAMW, **how: Any) -> Trained:
    with Cuda():
        found = trained(wrap, tx, MODEL, **how)
    for report in (found.placing, *found.reports):
        assert report.faults() == [], report.summary()
    return found


def same(found: Trained, tx: Any = ADAMW, wrap: Callable[[Any], Any] = lambda f: f) -> None:
    """The bits of the run on the host, norms aside: a device adds up in another order."""
    plain = trained(wrap, tx, MODEL, on_gpu=False)
    assert_same(found.state.params, plain.state.params)
    assert_same(found.state.opt_state, plain.state.opt_state)
    assert_same([m["loss"] for m in found.metrics], [m["loss"] for m in plain.metrics])


def near(
    found: Trained, tx: Any, wrap: Callable[[Any], Any] = lambda f: f, model: Model = MODEL
) -> None:
    plain = trained(wrap, tx, model, on_gpu=False)
    for a, b in zip(
        zf.tree.leaves(found.state.params), zf.tree.leaves(plain.state.params), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


# The same numbers


@pytest.mark.parametrize("to", ["cpu", "disk"])
@pytest.mark.parametrize("stage", STAGES)
def test_every_stage(stage: int | None, to: str, tmp_path: Path) -> None:
    donated = (STAGES.index(stage) + (to == "disk")) % 2 == 0

    def wrap(step: Any) -> Any:
        step = zf.donate(step) if donated else step
        return cut(zf.offload(step, to=to, path=tmp_path if to == "disk" else None), stage)

    same(run(wrap))


BOTH = ("opt_state", "params")
HOW: list[tuple[int | None, bool, Any]] = [
    (None, False, BOTH),
    (0, False, BOTH),
    (1, True, BOTH),
    (2, False, BOTH),
    (3, True, BOTH),
    (3, False, ("opt_state",)),
    (3, False, ("params",)),
]
KINDS = ["stack", "gan", "the head", "mean teacher", "frozen", "joint"]
PAIRS = [(name, *HOW[(i + k) % len(HOW)]) for i, name in enumerate(KINDS) for k in (0, 2, 4)]


@pytest.mark.parametrize(("name", "stage", "donated", "what"), PAIRS)
def test_every_kind_of_step(name: str, stage: int | None, donated: bool, what: Any) -> None:
    """Several models, frozen and tied parameters, averages beside them; any part on the host."""
    case = {**CASES, **HAND_WRITTEN}[name]

    def body(on_gpu: bool) -> Any:
        bare = case.step(ADAMW)
        step = bare if isinstance(bare, zf.Step) else zf.Step(bare)
        if on_gpu:
            step = zf.offload(step, roles=case.roles, what=what)
            step = cut(step, stage, roles=case.roles)
            step = zf.donate(step) if donated else step
        state = case.state(ADAMW, F64)
        state = step.place(up(state) if on_gpu else state)
        assert not on_gpu or trees_on_host(state) or what == ("params",)
        metrics, state = train(step, state, on_device(case) if on_gpu else case, 3)
        full = step.unplace(state)
        return down(metrics), down(full)

    with Cuda() as cuda:
        found = body(True)
        assert cuda.report.faults() == [], cuda.report.summary()
    metrics, state = body(False)
    # A device adds up norms and means in another order.
    close = {"rtol": 1e-12, "atol": 1e-12}
    for a, b in zip(
        zf.tree.leaves((found[0], found[1])), zf.tree.leaves((metrics, state)), strict=True
    ):
        torch.testing.assert_close(a, b, **close)


def on_device(case: Any) -> Any:
    from dataclasses import replace

    return replace(case, batch=lambda i, dtype: up(case.batch(i, dtype)))


OPTIONS: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "remat": (zf.remat, ADAMW),
    "accumulate": (lambda f: zf.accumulate(f, 2), ADAMW),
    "bf16": (zf.precision, ADAMW),
    "fp16": (
        lambda f: zf.precision(f, compute=torch.float16, loss_scale="dynamic"),
        ADAMW,
    ),
    "sgd": (lambda f: f, optim.sgd(1e-2)),
    "lion": (lambda f: f, optim.lion(1e-3)),
    "skip_nonfinite": (lambda f: f, optim.skip_nonfinite(ADAMW)),
}


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("option", OPTIONS)
def test_options(option: str, stage: int) -> None:
    outer, tx = OPTIONS[option]
    same(run(lambda f: outer(cut(zf.offload(f), stage)), tx), tx, outer)


@pytest.mark.parametrize("tx", [CLIP, optim.lamb(1e-3)], ids=["clip", "lamb"])
@pytest.mark.parametrize("stage", [0, 3])
def test_norms_of_the_device_meet_units_of_the_host(stage: int, tx: Any) -> None:
    near(run(lambda f: cut(zf.offload(f), stage), tx), tx)


def by_hand(step: Any) -> Any:
    """Clipping as everybody writes it: a number of the device times a tree."""

    def clipped(state: Any, batch: Any) -> Any:
        loss, grads = zf.value_and_grad(WIDE.loss)(state.params, batch)
        factor = torch.clamp(0.5 / (zf.tree.global_norm(grads) + 1e-6), max=1.0)
        grads = zf.tree.map(lambda g: g * factor, grads)
        updates, opt_state = ADAMW.update(grads, state.opt_state, state.params)
        params = optim.apply_updates(state.params, updates)
        state = state.replace(params=params, opt_state=opt_state, step=state.step + 1)
        return state, {"loss": loss}

    return zf.Step(clipped)


def test_clipping_by_hand() -> None:
    with Cuda():
        found = trained(lambda f: cut(zf.offload(by_hand(f)), 3), ADAMW, WIDE)
    near(found, ADAMW, by_hand, WIDE)
    assert len(waits(found.reports[-1])) == 1 + 1  # the norm, and the unit that came before it


def test_a_rate_that_is_on_the_device() -> None:
    with Cuda():
        tx = optim.adamw(torch.tensor(1e-2, device="cuda"))
        found = trained(lambda f: cut(zf.offload(f), 3), tx, MODEL)
    near(found, optim.adamw(1e-2))
    assert len(waits(found.reports[-1])) == 1


# Who waits


def waits(report: Report) -> list[str]:
    """Where the host waited for the device."""
    return [row.site for row in report.host_waits()]


@pytest.mark.parametrize("donated", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_one_wait_for_each_unit_at_most(stage: int, donated: bool) -> None:
    def wrap(step: Any) -> Any:
        step = zf.donate(step) if donated else step
        return cut(zf.offload(step), stage)

    with Cuda():
        found = trained(wrap, ADAMW, MODEL, steps=2)
        ACCOUNT.begin()
        step = wrap(zf.train_step(MODEL.loss, ADAMW))
        state = step.place(zf.TrainState.create(up(MODEL.params()), ADAMW))
        ACCOUNT.begin()
        batch = MODEL.batch(0).cuda()
        state, _ = step(state, batch)
        units = [unit.name for node in trees_on_host(state) for unit in node.layout.units]
        assert set(ACCOUNT.waits) == set(units)  # each on its own event
        assert set(ACCOUNT.waits.values()) == {1}
        assert not any("pageable" in kind for kind in ACCOUNT.copies)
        del state, step
    assert all(len(waits(report)) <= len(set(units)) for report in found.reports)


@pytest.mark.parametrize("donated", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_one_wait_in_all_where_the_norm_is_needed_first(stage: int | None, donated: bool) -> None:
    found = run(lambda f: cut(zf.offload(zf.donate(f) if donated else f), stage), CLIP)
    assert [len(waits(report)) for report in found.reports] == [1, 1, 1]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("inner", [ADAMW, CLIP])
def test_one_wait_in_all_where_a_flag_is_needed_first(inner: Any, stage: int | None) -> None:
    found = run(lambda f: cut(zf.offload(f), stage), optim.skip_nonfinite(inner))
    assert [len(waits(report)) for report in found.reports] == [1, 1, 1]


def test_what_came_down_before_it_was_written_to_comes_down_again() -> None:
    """A step that changes parameters on the device between the norm and the update."""

    def changing(state: Any, batch: Tensor) -> Any:
        loss, grads = zf.value_and_grad(MODEL.loss)(state.params, batch)
        grads, _ = optim.clip_by_global_norm(0.5).update(grads, optim.EmptyState(), state.params)
        for x in zf.tree.leaves(state.params):
            x.mul_(0.5)
        updates, opt_state = ADAMW.update(grads, state.opt_state, state.params)
        params = optim.apply_updates(state.params, updates)
        return replace(state, params=params, opt_state=opt_state), {"loss": loss}

    def last(wrap: Callable[[Any], Any]) -> Any:
        step = zf.shard(wrap(changing), stage=1, unit_bytes=UNITS)
        state = step.place(zf.TrainState.create(up(MODEL.params()), ADAMW))
        for _ in range(2):
            state, _ = step(state, MODEL.batch(0).cuda())
        return down(zf.full(state.params))

    with Cuda():
        assert_same(last(zf.offload), last(lambda f: f))


def test_the_optimizer_begins_with_the_gradient_that_came_first() -> None:
    """Each wait is for an event that was recorded before the rest of backward."""
    with Cuda() as cuda:
        step = cut(zf.offload(zf.train_step(MODEL.loss, ADAMW)), 3)
        state = step.place(zf.TrainState.create(up(MODEL.params()), ADAMW))
        batch = MODEL.batch(0).cuda()
        state, _ = step(state, batch)
        cuda.take()
        ACCOUNT.begin()
        state, _ = step(state, batch)
        rows = cuda.take().rows
        names = list(ACCOUNT.waits)
        del state
    downs = [i for i, row in enumerate(rows) if row.kind == "copy" and row.what == "down"]
    waits = [i for i, row in enumerate(rows) if row.kind == "sync"]
    assert downs[-1] < waits[0]  # the host had issued all of backward, and waited for nothing
    assert names[0].startswith("blocks.1") and names[-1].startswith("root")


# Memory


def page_locked(state: Any) -> int:
    """Bytes of the trees on the host, each rounded to pages."""
    return sum(aligned(node.nbytes) for node in trees_on_host(state))


@pytest.mark.parametrize("stage", [None, 2, 3])
def test_pinned_bytes_are_the_states_rounded_to_pages(stage: int | None) -> None:
    with Cuda() as cuda:
        step = cut(zf.offload(zf.donate(zf.train_step(MODEL.loss, ADAMW))), stage)
        state = step.place(zf.TrainState.create(up(MODEL.params()), ADAMW))
        assert ACCOUNT.locked_bytes == page_locked(state)
        assert len(ACCOUNT.locked) == len(trees_on_host(state))
        batch = MODEL.batch(0).cuda()
        locked = []
        for _ in range(4):
            state, _ = step(state, batch)
            assert page_locked(state) == sum(aligned(x.nbytes) for x in trees_on_host(state))
            torch.cuda.synchronize()
            locked.append(ACCOUNT.locked_bytes)
        assert locked[1:] == [locked[1]] * 3  # buffers come back, nothing grows
        assert cuda.take().faults() == []
        del state


def test_without_donation_a_new_state_is_written_once() -> None:
    """The optimizer writes into the memory in which the new state stays."""
    with Cuda():
        step = cut(zf.offload(zf.train_step(MODEL.loss, ADAMW)), 3)
        state = step.place(zf.TrainState.create(up(MODEL.params()), ADAMW))
        before = ACCOUNT.locked_bytes
        batch = MODEL.batch(0).cuda()
        old = trees_on_host(state)
        kept = [x.clone() for node in old for x in node.held() if x is not None]
        new, _ = step(state, batch)
        assert len(trees_on_host(new)) == len(old) == 3
        assert all(len({x.untyped_storage().data_ptr() // 4096 for x in n.held()}) for n in old)
        gradients = sum(
            aligned(sum(old[0].held()[i].nbytes for i in unit.flats))
            for unit in old[0].layout.units
        )
        assert ACCOUNT.locked_bytes == 2 * before + gradients
        assert_same([x for node in old for x in node.held() if x is not None], kept)
        del state, new, old


@pytest.mark.parametrize("donated", [False, True])
def test_trees_that_change_places(donated: bool) -> None:
    """What one tree is written into was offered for another."""

    def swapping(state: Any, batch: Any) -> Any:
        _, grads = zf.value_and_grad(lambda p, x: (p["w"] * x).sum())(state["params"], batch)
        a = zf.tree.map(lambda g, x: reuse(x).add_(g), grads, state["b"])
        b = zf.tree.map(lambda g, x: reuse(x).sub_(g), grads, state["a"])
        return {"params": state["params"], "a": a, "b": b}, {}

    def body(wrap: Callable[[Any], Any], move: Callable[[Any], Any]) -> Any:
        w = torch.arange(130.0)
        state = move({"params": {"w": w}, "a": {"w": w + 1000}, "b": {"w": w + 2000}})
        step = wrap(zf.Step(swapping))
        state = step.place(state)
        for i in range(3):
            state, _ = step(state, move(torch.full((130,), float(i + 1))))
        return down(step.unplace(state))

    with Cuda() as cuda:
        found = body(lambda f: zf.offload(zf.donate(f) if donated else f), up)
        assert cuda.report.faults() == [], cuda.report.summary()
    assert_same(found, body(lambda f: f, lambda x: x))


def test_gradients_that_a_user_keeps_stay() -> None:
    kept = []

    def keeping(step: Any) -> Any:
        def run(state: Any, batch: Any) -> Any:
            loss, grads = zf.value_and_grad(MODEL.loss)(state.params, batch)
            kept.append(grads)
            updates, opt_state = ADAMW.update(grads, state.opt_state, state.params)
            params = optim.apply_updates(state.params, updates)
            return state.replace(params=params, opt_state=opt_state), {"loss": loss}

        return zf.Step(run)

    with Cuda():
        trained(lambda f: cut(zf.offload(keeping(f)), 3), ADAMW, MODEL)
        found = [down(zf.full(grads)) for grads in kept]
        kept.clear()
    plain = []
    params = MODEL.params()
    state = zf.TrainState.create(params, ADAMW)
    for i in range(3):
        _, grads = zf.value_and_grad(MODEL.loss)(state.params, MODEL.batch(i))
        plain.append(grads)
        updates, opt_state = ADAMW.update(grads, state.opt_state, state.params)
        params = optim.apply_updates(state.params, updates)
        state = state.replace(params=params, opt_state=opt_state)
    assert_same(found, plain)


def test_parameters_ahead_are_bounded() -> None:
    with Cuda():
        step = cut(zf.offload(zf.train_step(MODEL.loss, ADAMW)), 3)
        state = step.place(zf.TrainState.create(up(MODEL.params()), ADAMW))
        ACCOUNT.begin()
        for i in range(3):
            state, _ = step(state, MODEL.batch(i).cuda())
        layout = trees_on_host(state)[0].layout
        largest = max(layout.unit_nbytes(k) for k in range(len(layout.units)))
        assert 0 < ACCOUNT.most_ahead <= 3 * largest and ACCOUNT.ahead == 0
        del state


def test_gradients_on_the_device_are_bounded() -> None:
    """The stream that computes waits for the copies, not the host, and memory comes back."""
    from zfunc.buffers.copies import Leaving, descend

    with Cuda() as cuda:
        leaving = Leaving(limit=2 * 4096)
        for _ in range(6):
            x = torch.ones(1024, device="cuda")
            into = HOST.tensors([(1024, torch.float32)], locked=True)
            leaving.add(descend([x], into), [x])
            del x
            assert leaving._held <= 2 * 4096
        leaving.end()
        assert cuda.report.count("sync") == 0 and cuda.report.faults() == []
        torch.cuda.synchronize()


# Errors


@pytest.mark.parametrize("to", ["cpu", "disk"])
def test_too_little_pinned_memory(to: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Cuda():
        monkeypatch.setattr(torch.cuda.cudart(), "cudaHostRegister", lambda *args: 2)
        step = cut(
            zf.offload(
                zf.train_step(MODEL.loss, ADAMW), to=to, path=tmp_path if to == "disk" else None
            ),
            3,
        )
        state = zf.TrainState.create(up(MODEL.params()), ADAMW)
        with pytest.raises(zf.PlacementError, match=r"page-locked.*ulimit -l.*pin=False"):
            step.place(state)
        unpinned = cut(zf.offload(zf.train_step(MODEL.loss, ADAMW), pin=False), 3)
        placed, _ = unpinned(unpinned.place(state), MODEL.batch(0).cuda())
        assert ACCOUNT.locked_bytes == 0
        del placed


# Two ranks


def _too_little() -> Any:
    runtime = torch.cuda.cudart()
    locks = runtime.cudaHostRegister
    if zf.rank() == 1:
        runtime.cudaHostRegister = lambda *args: 2
    try:
        cut(zf.offload(zf.train_step(MODEL.loss, ADAMW)), 3).place(
            zf.TrainState.create(up(MODEL.params()), ADAMW)
        )
    except zf.PlacementError as error:
        return str(error)
    finally:
        runtime.cudaHostRegister = locks
    return None


ON_TWO: list[Callable[[Any], Any]] = [
    lambda f: cut(zf.offload(f), 0),
    lambda f: cut(zf.offload(zf.donate(f)), 2),
    lambda f: cut(zf.offload(f), 3),
    lambda f: cut(zf.offload(zf.donate(f)), 3),
]


def _on_two() -> list[Any]:
    found = []
    for wrap in ON_TWO:
        run = trained(wrap, ADAMW, SMALL, steps=2)
        reports = (run.placing, *run.reports)
        found.append(
            ([str(row) for report in reports for row in report.faults()], run.state.params)
        )
    return found


def test_two_ranks() -> None:
    plain = trained(lambda f: f, ADAMW, SMALL, on_gpu=False, steps=2).state.params
    for found in launch(_on_two):
        for faults, params in found:
            assert faults == []
            for a, b in zip(zf.tree.leaves(params), zf.tree.leaves(plain), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_all_ranks_learn_of_too_little_pinned_memory() -> None:
    mine, other = launch(_too_little)[::-1]
    assert "cannot be page-locked" in mine
    assert "rank 1" in other and "cannot be page-locked" in other


# How much comes down


def moved(step: Any, tx: Any, trainable: Any) -> tuple[Report, int]:
    """The third step of a training, and the bytes of what it trains."""
    params = up(MODEL.params())
    names = zf.tree.flatten_names(params)
    trained_bytes = sum(x.nbytes for path, x in names.items() if trainable(path))
    state = step.place(zf.TrainState.create(params, tx, trainable=trainable))
    for i in range(3):
        batch = MODEL.batch(i).cuda()
        active().take()
        state, _ = step(state, batch)
    return active().take(), trained_bytes


@pytest.mark.parametrize(
    ("stage", "what", "tx"), pairs(STAGES, (BOTH, ("opt_state",)), (ADAMW, CLIP))
)
def test_what_is_trained_comes_down_once_and_goes_up_once(
    stage: int | None, what: Any, tx: Any
) -> None:
    """Gradients, and parameters where they stay on the device; nothing of what is frozen."""
    for trainable in (lambda path: True, lambda path: "blocks" not in path):
        with Cuda():
            step = cut(zf.offload(zf.train_step(MODEL.loss, tx), what=what), stage)
            report, nbytes = moved(step, tx, trainable)
        assert report.faults() == [], report.summary()
        copies = [row for row in report.of("copy") if row.nbytes > 8]  # numbers aside
        down = sum(row.nbytes for row in copies if row.what == "down")
        away = "params" in what and stage in (None, 3)
        assert down == (1 if away else 2) * nbytes
        if not away:
            assert sum(row.nbytes for row in copies if row.what == "up") == nbytes
        if tx is CLIP:
            assert len(report.host_waits()) <= 1


@pytest.mark.parametrize("stage", [0, 3])
def test_parameters_come_down_beside_backward(stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What they wait for has been recorded when forward was done: all of backward comes later."""
    marks: list[int] = []
    mark = Present.mark

    def noted(self: Present, device: torch.device) -> None:
        marks.append(len(active().report.rows))
        mark(self, device)

    monkeypatch.setattr(Present, "mark", noted)
    with Cuda():
        step = cut(zf.offload(zf.train_step(MODEL.loss, CLIP), what=("opt_state",)), stage)
        report, _ = moved(step, CLIP, lambda path: True)
    first = next(i for i, row in enumerate(report.rows) if row.kind == "copy" and row.nbytes > 8)
    launches = [row for row in report.rows[marks[-1] : first] if row.kind == "launch"]
    assert len(launches) > sum(row.kind == "launch" for row in report.rows[: marks[-1]])
