"""``zf.captured``: the step that it is given, bit for bit, as one launch."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import zfunc as zf
from tests.gpu import ranks
from tests.gpu.cases import OPTIMIZERS
from tests.gpu.cuda import Cuda, active
from tests.gpu.record import Report
from tests.gpu.test_capture import CLIPPED, NOISY, SCHEDULED, noisy_loss, sharded
from zfunc import optim, tree
from zfunc.ranks import keys

Wrap = Callable[[Any], Any]
STEPS = 6  # two warm ones, and the third is the first replay


def up(x: Any) -> Any:
    return tree.map(lambda y: y.cuda() if isinstance(y, Tensor) else y, x)


def down(x: Any) -> Any:
    return tree.map(lambda y: y.detach().cpu() if isinstance(y, Tensor) else y, x)


def made(wrap: Wrap, tx: Any, loss: Any = noisy_loss) -> tuple[Any, Any]:
    """A step, and a state that it has placed."""
    step = wrap(zf.train_step(loss, tx))
    return step, step.place(zf.TrainState.create(up(NOISY.params()), tx, key=3))


def batch(i: int) -> Any:
    return up(zf.local_batch(NOISY.batch(i)))


def run(wrap: Wrap, tx: Any, steps: int = STEPS - 1) -> tuple[list[Any], Any, list[Report]]:
    """Metrics, the last state, and what was asked of the device in each step."""
    step, state = made(wrap, tx)
    metrics, reports = [], []
    for i in range(steps):
        given = batch(i)
        active().take()
        state, out = step(state, given)
        reports.append(active().take())
        metrics.append(down(out))
    return metrics, down(step.unplace(state)), reports


def same(a: Any, b: Any) -> None:
    """Two trees are the same, bit for bit."""
    a, b = tree.flatten_names(a), tree.flatten_names(b)
    assert a.keys() == b.keys()
    for name, x in a.items():
        if isinstance(x, Tensor):
            assert x.dtype == b[name].dtype, name
            assert torch.equal(x, b[name]), f"{name}: {x.flatten()[:3]} and {b[name].flatten()[:3]}"
        else:
            assert x == b[name], name


def compare(wrap: Wrap, tx: Any) -> None:
    """The captured step trains as the step does; a replay is one launch, and nobody waits."""
    eager, captured = run(wrap, tx), run(lambda f: zf.captured(wrap(f)), tx)
    for i, (a, b) in enumerate(zip(eager[0], captured[0], strict=True)):
        same({f"metrics of step {i}": a}, {f"metrics of step {i}": b})
    same(eager[1], captured[1])
    for report in captured[2]:
        assert not report.faults(), report.summary()
    during = captured[2][2].rows
    begins, ends = (i for i, row in enumerate(during) if row.what in ("begins", "ends"))
    assert not [str(row) for row in during[begins:ends] if row.kind in ("copy", "sync")]
    for report in captured[2][3:]:
        assert [row.what for row in report.of("capture")] == ["replay"], report.summary()
        assert report.host_waits() == [], report.summary()
        copies = len(tree.leaves(NOISY.batch(0))) + len(tree.leaves(captured[0][3]))
        moved = [row.what for row in report.of("launch", "kernel", "copy", "collective")]
        assert len(moved) <= copies, report.summary()  # the batch comes in, metrics come out
        assert set(moved) <= {"aten.copy_.default", "aten.clone.default"}


CASES: dict[str, tuple[Wrap, Any]] = {
    "donate alone": (zf.donate, SCHEDULED),
    **{f"stage {n}": (sharded(n), SCHEDULED) for n in range(4)},
    **{f"clipped at {n}": (sharded(n), CLIPPED) for n in range(4)},
    "bf16": (lambda f: zf.precision(sharded(3)(f)), CLIPPED),
    "bf16 at 1": (lambda f: zf.precision(sharded(1)(f)), CLIPPED),
    "accumulate": (lambda f: zf.accumulate(sharded(3)(f), 2), CLIPPED),
    "accumulate alone": (lambda f: zf.accumulate(zf.donate(f), 2), SCHEDULED),
    "remat": (lambda f: zf.remat(sharded(3)(f)), CLIPPED),
    "remat at 1": (lambda f: zf.remat(sharded(1)(f)), SCHEDULED),
    "all of it": (lambda f: zf.accumulate(zf.remat(zf.precision(sharded(2)(f))), 2), CLIPPED),
    **{f"{name} at 3": (sharded(3), make()) for name, make in OPTIMIZERS.items()},
    **{
        f"{name} at 0": (sharded(0), OPTIMIZERS[name]())
        for name in ("momentum", "lion", "lamb", "masked", "skip_nonfinite")
    },
}


@pytest.mark.parametrize("name", CASES)
def test_a_captured_step_is_the_step(name: str) -> None:
    with Cuda():
        compare(*CASES[name])


ON_TWO = ("stage 0", "clipped at 1", "stage 2", "clipped at 3", "all of it", "lamb at 3")


def _on_two_ranks() -> None:
    for name in ON_TWO:
        try:
            compare(*CASES[name])
        except BaseException as error:
            error.add_note(name)
            raise


def _exchanging(params: Any, given: Any) -> Tensor:
    """With a number of the host that the ranks agree on."""
    return noisy_loss(params, given) * float(zf.pmean(torch.ones(())))


def _exchanges() -> str:
    """The ranks' host takes part: two eager calls, the third is refused, and the state is whole."""
    step, state = after(2, _exchanging, sharded(2))
    with pytest.raises(zf.CompositionError) as refused:
        step(state, batch(2))
    state, _ = step.step(state, batch(2))
    assert int(state.step) == 3
    return str(refused.value)


def _strays() -> str:
    """Rank 1 takes the step itself where rank 0 replays it."""
    step, state = made(lambda f: zf.captured(sharded(2)(f)), SCHEDULED)
    for i in range(4):
        state, _ = step(state, batch(i))
    try:
        for i in range(4, 7):
            state, _ = (step.step if zf.rank() else step)(state, batch(i))
    except zf.DesyncError as error:
        return str(error)
    return ""


def _two_ranks() -> tuple[str, str]:
    _on_two_ranks()
    return _exchanges(), _strays()


def test_and_on_two_ranks_which_check_on_each_other() -> None:
    for refused, strayed in ranks.launch(_two_ranks, alone=True):
        assert "exchanges values through the host, in Group('data'" in refused
        assert "mark('replay')" in strayed, strayed


# What cannot be captured


def reading(params: Any, given: Any) -> Tensor:
    value = noisy_loss(params, given)
    return value * (2.0 if value.item() > 1e9 else 1.0)


def returning(make: Any) -> Wrap:
    def wrap(step: Any) -> Any:
        def body(state: Any, given: Any) -> Any:
            state, metrics = step(state, given)
            return state, metrics | {"host": make(metrics)}

        return zf.captured(zf.donate(body))

    return wrap


REFUSED: dict[str, tuple[Wrap, str]] = {
    "no donate": (lambda f: zf.shard(f, stage=2), "does not donate its state"),
    "offload": (lambda f: zf.offload(sharded(3)(f)), "runs the optimizer on the host"),
    "compress": (lambda f: zf.compress_grads(sharded(0)(f), "int8"), "decides on the host when"),
    "drop_layers": (lambda f: zf.drop_layers(sharded(0)(f), 0.5, 1.0), "coins that the host"),
    "quantize": (
        lambda f: zf.quantize(sharded(0)(f), start_bits=10, target_bits=8, offset=0, period=1),
        "counts bits down",
    ),
    "fp16": (
        lambda f: zf.precision(sharded(0)(f), compute=torch.float16, loss_scale="dynamic"),
        "asks on the host whether",
    ),
}


def intact(state: Any) -> None:
    assert all(bool(x.isfinite().all()) for x in tree.leaves(state.params))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REFUSED)
def test_what_decides_on_the_host_is_refused(name: str) -> None:
    wrap, message = REFUSED[name]
    with Cuda():
        step, state = made(lambda f: zf.captured(wrap(f)), optim.sgd(0.1))
        with pytest.raises(zf.CompositionError, match=message):
            step(state, batch(0))
        state, _ = step.step(state, batch(0))  # the state is as it was
        assert int(state.step) == 1


def test_a_state_on_the_host_is_refused() -> None:
    step = zf.captured(zf.donate(zf.train_step(noisy_loss, SCHEDULED)))
    state = zf.TrainState.create(NOISY.params(), SCHEDULED, key=3)
    with pytest.raises(zf.CompositionError, match="the state is on the CPU"):
        step(state, NOISY.batch(0))
    with Cuda(), pytest.raises(zf.CompositionError, match="the state is on the CPU"):
        step(state, NOISY.batch(0))
    intact(state)


def after(calls: int, loss: Any = noisy_loss, wrap: Wrap = zf.donate) -> tuple[Any, Any]:
    """A captured step that was called so often, and its state."""
    step, state = made(lambda f: zf.captured(wrap(f)), SCHEDULED, loss)
    for i in range(calls):
        state, _ = step(state, batch(i))
    return step, state


@pytest.mark.parametrize("calls", [0, 2, 4])
def test_a_batch_elsewhere_or_of_another_shape_is_refused(calls: int) -> None:
    with Cuda():
        step, state = after(calls)
        with pytest.raises(zf.CompositionError, match=r"batch.*x.* on cpu"):
            step(state, NOISY.batch(0))
        if calls == 4:
            for part, message in (
                (tree.map(lambda x: x[:-1], batch(0)), r"batch's .*fixed shapes"),
                (tree.map(lambda x: x.double(), batch(0)), r"batch's .*float64"),
                (batch(0) | {"more": batch(0)["x"]}, "another structure"),
            ):
                with pytest.raises(zf.CompositionError, match=message):
                    step(state, part)
        state, _ = step(state, batch(calls))
        assert int(state.step) == calls + 1
        intact(state)


def test_a_loss_that_reads_is_refused_by_the_third_call() -> None:
    with Cuda():
        step, state = after(2, reading)
        with pytest.raises(zf.CompositionError, match=r"waits for the GPU, in aten\._local_scalar"):
            step(state, batch(2))
        state, _ = step.step(state, batch(2))
        assert int(state.step) == 3


def test_what_comes_back_on_the_host_is_refused() -> None:
    with Cuda():
        step, state = made(returning(lambda metrics: torch.zeros(2)), SCHEDULED)
        for i in range(2):
            state, _ = step(state, batch(i))
        with pytest.raises(zf.CompositionError, match=r"returns .*host.* on the host"):
            step(state, batch(2))
        state, _ = step.step(state, batch(2))
        assert int(state.step) == 3
        intact(state)


def test_another_state_can_be_given_to_a_captured_step() -> None:
    """A restored one, say; it continues as it would in the step itself."""
    wrap = sharded(2)
    with Cuda():
        step, state = after(4, wrap=wrap)
        kept = down(step.unplace(state))
        for i in (4, 5):
            state, _ = step(state, batch(i))
        other = step.place(up(kept))
        for i in (4, 5):
            other, _ = step(other, batch(i))
        same(down(step.unplace(state)), down(step.unplace(other)))
        plain, eager = wrap(zf.train_step(noisy_loss, SCHEDULED)), None
        eager = plain.place(up(kept))
        for i in (4, 5):
            eager, _ = plain(eager, batch(i))
        same(down(plain.unplace(eager)), down(step.unplace(other)))


@pytest.mark.parametrize("stage", [None, 3])
def test_leaves_may_change_places_between_calls(stage: int | None) -> None:
    """Two that are read where they lie, each in the other's memory."""

    def averaging(state: Any, given: Any) -> Any:
        loss, grads = zf.value_and_grad(noisy_loss)(state["params"], given)
        params = tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)
        mean = tree.map(torch.add, state["mean"], params)
        return state | {"params": params, "mean": mean, "step": state["step"] + 1}, loss

    def trained(wrap: Wrap) -> Any:
        step = zf.donate(averaging)
        step = wrap(step if stage is None else zf.shard(step, stage=stage, unit_bytes=600))
        start = up(NOISY.params())
        count = {"step": torch.tensor(0), "key": zf.random.key(3)}
        mean = tree.map(torch.zeros_like, start)
        state = step.place({"params": start, "mean": mean, **count})
        for i in range(STEPS):
            state, _ = step(state, batch(i))
            if i == 3:
                state |= {"params": state["mean"], "mean": state["params"]}
        return down(step.unplace(state))

    with Cuda():
        same(trained(lambda f: f), trained(zf.captured))


def test_captured_steps_for_two_shapes_take_turns_on_one_state() -> None:
    """And before it is captured a step takes any shape."""

    def trained(captured: bool) -> Any:
        step, state = made(sharded(2), SCHEDULED)
        steps = [zf.captured(step), zf.captured(step)] if captured else [step, step]
        losses = []
        for i in range(14):
            few = i == 1 or i % 3 == 2
            given = tree.map(lambda x: x[:4].clone(), batch(i)) if few else batch(i)
            state, out = steps[i % 3 == 2](state, given)
            losses.append(float(out["loss"]))
        return losses, down(step.unplace(state))

    with Cuda():
        (losses, state), (found, last) = trained(False), trained(True)
    assert found == losses
    same(state, last)


def test_a_number_of_the_host_is_recorded_as_it_was() -> None:
    def scaled(params: Any, given: Any) -> Tensor:
        return noisy_loss(params, given[0]) * given[1]

    with Cuda():
        step, state = made(lambda f: zf.captured(zf.donate(f)), SCHEDULED, scaled)
        for i in range(4):
            state, _ = step(state, (batch(i), 0.5))
        for other in (0.25, 1, torch.tensor(0.5), torch.tensor(0.5).cuda(), np.full(2, 0.5)):
            with pytest.raises(zf.CompositionError, match=r"was 0\.5 .*a number as a tensor"):
                step(state, (batch(4), other))
        state, _ = step(state, (batch(4), 0.5))
        assert int(state.step) == 5


def test_a_recording_that_was_broken_off_is_made_again() -> None:
    broken: list[int] = []

    def breaking(params: Any, given: Any) -> Tensor:
        value = noisy_loss(params, given)
        if torch.cuda.is_current_stream_capturing() and not broken:
            broken.append(1)
            raise KeyboardInterrupt
        return value

    with Cuda():
        (eager, whole), (step, state) = after(0), after(2, breaking)
        with pytest.raises(KeyboardInterrupt):
            step(state, batch(2))
        for i in range(2, STEPS):
            state, _ = step(state, batch(i))
        for i in range(STEPS):
            whole, _ = eager.step(whole, batch(i))
        same(down(whole), down(state))


def test_the_scope_of_a_folded_key_knows_what_was_folded_in() -> None:
    key, step = zf.random.key(3), torch.tensor(0)
    with keys.watched(_Idle(), key, step):
        for mine in (key, zf.random.fold_in(key, step), zf.random.key(4)):
            expected = zf.random.scope(zf.random.fold_in(mine, 7))
            found = zf.random.scope.folded(mine)(7)
            assert (found.seed, found.path) == (expected.seed, expected.path)
            expected = zf.random.scope(zf.random.fold_in(zf.random.fold_in(mine, 7), -2))
            found = found.inner()(-2)
            assert (found.seed, found.path) == (expected.seed, expected.path)


class _Idle:
    recording = False

    def enter(self, path: Any) -> None: ...

    def leave(self) -> None: ...


@pytest.mark.parametrize("calls", [1, 4])
def test_a_state_is_spent_by_the_call_that_it_is_given_to(calls: int) -> None:
    with Cuda():
        step, state = after(calls)
        new, _ = step(state, batch(calls))
        with pytest.raises(zf.DonatedStateError):
            step(state, batch(calls + 1))
        new, _ = step(new, batch(calls + 1))
        assert int(new.step) == calls + 2


def test_it_is_the_outermost() -> None:
    with Cuda():
        inner = zf.captured(zf.donate(zf.train_step(noisy_loss, SCHEDULED)))
        outer = zf.donate(inner)
        state = zf.TrainState.create(up(NOISY.params()), SCHEDULED, key=3)
        with pytest.raises(zf.CompositionError, match="outermost"):
            outer(state, batch(0))


def test_closed_it_begins_anew() -> None:
    with Cuda():
        step, state = after(4)
        step.close()
        for i in range(4, 8):
            state, _ = step(state, batch(i))
        assert int(state.step) == 8


def test_what_a_step_returns_may_be_used_and_dropped_at_once() -> None:
    """By the stream of the caller, who knows nothing of the one that the step runs on."""
    with Cuda() as cuda:
        step, state = made(lambda f: zf.captured(sharded(2)(f)), SCHEDULED)
        for i in range(5):
            state, out = step(state, batch(i))
            twice = [2 * x for x in tree.leaves(out) if x.is_cuda]
            del out
        tree.map(lambda x: x + 1 if x.is_cuda else x, state.params)
        step.close()
        del state, step
        gc.collect()
        assert cuda.report.faults() == [] and twice


def test_all_of_its_metrics_are_its_own() -> None:
    """The next replay leaves those of this one as they are."""
    with Cuda():
        step, state = after(3)
        state, first = step(state, batch(3))
        value = float(first["loss"])
        state, second = step(state, batch(4))
        assert float(first["loss"]) == value != float(second["loss"])
