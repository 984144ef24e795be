"""Laws of ``compress_grads``: plain before it begins, the published algorithm behind it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import zfunc as zf
from tests.laws.cases import (
    ADAMW,
    Case,
    alone,
    assert_near,
    assert_same,
    cut_up,
    named,
    numbers,
    regression,
    train,
)
from tests.laws.compression import TwoPhases
from tests.laws.handwritten import CASES as HAND_WRITTEN
from tests.laws.models import CASES as READY_MADE
from tests.laws.models import stack, stack_loss
from zfunc import optim, tree
from zfunc.dense import dense_of
from zfunc.sharded import Sharded

F64 = torch.float64
STAGES = (0, 1, 2, 3)
STACK = READY_MADE["stack"]
CLIPPED = optim.chain(optim.clip_by_global_norm(0.5), optim.adamw(0.02))
OPTIMIZERS = {
    "adamw": ADAMW,
    "momentum": optim.sgd(0.02, momentum=0.9),
    "sgd": optim.sgd(0.02),
    "lion": optim.lion(0.002),
    "lamb": optim.lamb(0.02),
    "clipped": CLIPPED,
}
SOME = {
    name: {**READY_MADE, **HAND_WRITTEN}[name]
    for name in ("tiny leaves", "frozen", "mixed dtypes", "uneven batch", "gan", "the head")
}


def wrapped(case: Case, tx: Any, stage: int, freeze: int | str, **how: Any) -> Any:
    step = zf.shard(case.step(tx), stage=stage, unit_bytes=600, roles=case.roles)
    return zf.compress_grads(step, freeze_step=freeze, **how)


def runs_of(
    case: Case,
    ranks: int,
    stage: int,
    freeze: int | str,
    tx: Any = ADAMW,
    steps: int = 6,
    donated: bool = False,
) -> list[Any]:
    """Metrics and the full state of each rank."""
    full = case.state(tx, F64)

    def body() -> Any:
        step = wrapped(case, tx, stage, freeze)
        step = zf.donate(step) if donated else step
        metrics, state = train(step, step.place(full), case, steps)
        return metrics, step.unplace(state)

    return zf.simulate(ranks)(body)()


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_before_it_begins_nothing_changes(name: str, stage: int) -> None:
    tx = OPTIMIZERS[name]
    plain = cut_up(STACK, 3, tx, steps=4, stage=stage, unit_bytes=600)
    for freeze in (4, "auto") if name == "adamw" else (4,):
        runs = runs_of(STACK, 3, stage, freeze, tx, steps=3)
        for run, expected in zip(runs, plain, strict=True):
            assert_same(run[0], expected[0][:3])
            assert not any("compress" in path for path in named(run[1]))


def test_on_one_rank_nothing_ever_changes() -> None:
    reference = alone(STACK, steps=6)
    for stage in STAGES:
        assert_same(runs_of(STACK, 1, stage, 2)[0], reference)
    metrics, state = train(
        zf.compress_grads(STACK.step(ADAMW), freeze_step=2), STACK.state(ADAMW, F64), STACK, 6
    )
    assert_same((metrics, state), reference)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", SOME)
def test_ranks_agree_and_donating_changes_nothing(name: str, stage: int) -> None:
    for ranks in (2, 3):
        runs = runs_of(SOME[name], ranks, stage, 2)
        for run in runs:
            assert_same(run, runs[0])
        assert_same(runs_of(SOME[name], ranks, stage, 2, donated=True), runs)


# The algorithm, literally


def simulated(ranks: int, stage: int, tx: str, steps: int, freeze: int) -> list[Tensor]:
    """Flat parameters after each step: 1-bit Adam, momentum SGD or SGD by the book.

    One unit, so that one buffer holds the model; second moments are frozen after their bias
    is corrected.
    """
    params = stack(F64)
    layout, cuts = layout_of(ranks)
    phases = TwoPhases(cuts, whole=stage == 0)
    p = flat(layout, params)
    m, v, seen = torch.zeros_like(p), torch.zeros_like(p), []
    for t in range(1, steps + 1):
        own = [flat(layout, gradient(layout, p, t - 1, ranks, rank)) for rank in range(ranks)]
        begun = t > freeze
        momentum = tx != "sgd" and stage == 0
        if begun and not momentum:
            g = phases.mean(own)
            own = [g] * ranks
        decay, gain = (0.9, 0.1) if tx == "adam" else (0.9, 1.0) if tx == "momentum" else (0, 1)
        local = [decay * m + gain * g for g in own]
        m = phases.mean(local) if begun and momentum else torch.stack(local).mean(0)
        if tx == "adam":
            if not begun:
                v = 0.999 * v + 0.001 * torch.stack(own).mean(0) ** 2
                v_hat = v / (1 - 0.999**t)
            p = p - 0.02 * torch.where(v_hat > 0, m / (1 - 0.9**t) / (v_hat.sqrt() + 1e-8), 0.0)
        else:
            p = p - 0.02 * m
        seen.append(p)
    return seen


def layout_of(ranks: int) -> tuple[Any, tuple[int, ...]]:
    layout = zf.simulate(ranks)(lambda: zf.shard(lambda s, b: (s, {})).transforms[0].layout(one()))
    made = layout()[0]
    return made, dense_of(made, 0).cuts


def one() -> Any:
    """The stack without its ``Layers``, so that it is one unit."""
    params = stack(F64)
    return {**params, "blocks": list(params["blocks"])}


def one_loss(params: Any, batch: Any) -> Tensor:
    return stack_loss({**params, "blocks": zf.Layers(params["blocks"])}, batch)


def flat(layout: Any, params: Any) -> Tensor:
    leaves = tree.flatten_names(params)
    return torch.cat([leaves[slot.path].reshape(-1) for slot in dense_of(layout, 0).slots])


def gradient(layout: Any, p: Tensor, i: int, ranks: int, rank: int) -> Any:
    dense = dense_of(layout, 0)
    views = {slot.index: view for slot, view in zip(dense.slots, dense.views(p), strict=True)}
    params = layout.spec.unflatten([views[k] for k in range(len(views))])
    batch = regression(i, F64)
    rows = 12 // ranks
    mine = {name: x[rank * rows : (rank + 1) * rows] for name, x in batch.items()}
    return zf.value_and_grad(one_loss)(params, mine)[1]


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", ["adam", "momentum", "sgd"])
def test_it_is_the_published_algorithm(name: str, stage: int, ranks: int) -> None:
    tx = {"adam": optim.adam(0.02), "momentum": optim.sgd(0.02, 0.9), "sgd": optim.sgd(0.02)}[name]
    layout, _ = layout_of(ranks)

    def body() -> list[Tensor]:
        step = zf.compress_grads(zf.shard(zf.train_step(one_loss, tx), stage=stage), freeze_step=3)
        state, seen = step.place(zf.TrainState.create(one(), tx)), []
        for i in range(9):
            state, _ = step(state, zf.local_batch(regression(i, F64)))
            seen.append(flat(layout, zf.full(state.params)))
        return seen

    expected = simulated(ranks, stage, name, 9, 3)
    for seen in zf.simulate(ranks)(body)():
        for got, want in zip(seen, expected, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("stage", STAGES)
def test_second_moments_stay_what_they_were_after_correction(stage: int) -> None:
    def body() -> list[Any]:
        step = wrapped(STACK, ADAMW, stage, 3)
        state, seen = step.place(STACK.state(ADAMW, F64)), []
        for i in range(7):
            state, _ = step(state, zf.local_batch(STACK.batch(i, F64)))
            corrected = tree.map(lambda v, i=i: v / (1 - 0.999 ** (i + 1)), state.opt_state.nu)
            seen.append(zf.full(corrected))
        return seen

    seen = zf.simulate(2)(body)()[0]
    for later in seen[3:]:
        assert_near(later, seen[2], 1e-12)
    assert not torch.equal(seen[1]["head"]["w"], seen[2]["head"]["w"])


def test_a_parameter_that_never_had_a_gradient_stays() -> None:
    """Its second moment is zero, and one bit would push it about without end."""
    rows = torch.tensor([0, 2, 3])  # of the table's five

    def loss(params: Any, batch: Any) -> Tensor:
        return ((params["table"][rows] - batch["x"][:3, :4]) ** 2).sum() * params["gain"]

    params = {"table": numbers((5, 4), 1), "gain": torch.ones((), dtype=F64)}
    tx = optim.adam(0.01)
    for stage in STAGES:

        def body(stage: int = stage) -> Any:
            step = zf.shard(zf.train_step(loss, tx), stage=stage)
            step = zf.compress_grads(step, freeze_step=2)
            state = step.place(zf.TrainState.create(params, tx))
            for i in range(8):
                state, _ = step(state, regression(10 * i + zf.rank(), F64))
            return zf.full(state.params)["table"]

        table = zf.simulate(2)(body)()[0]
        assert torch.equal(table[[1, 4]], params["table"][[1, 4]])
        assert not bool((table[rows] == params["table"][rows]).any())


# What is sent


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("stage", STAGES)
def test_what_is_sent_is_what_it_says(stage: int, ranks: int) -> None:
    def body() -> Any:
        step = wrapped(STACK, ADAMW, stage, 2)
        state = step.place(STACK.state(ADAMW, F64))
        for i in range(4):
            with zf.comm.ledger() as led:
                state, _ = step(state, zf.local_batch(STACK.batch(i, F64)))
            assert step.describe().sent_bytes == led.total_bytes
        step.place(step.unplace(state))  # now the memo knows a state that compresses from here
        payload = sum(n for label, n in led.by_label.items() if label.startswith("compress"))
        traffic = {
            k: v for t in step.transforms for k, v in t.traffic(step._memo()).payload.items()
        }
        return payload, traffic.get("compressed gradients", 0), str(step.describe()), led.by_label

    for sent, predicted, text, labels in zf.simulate(ranks)(body)():
        assert sent == predicted
        assert f"compressed gradients: {sent} bytes" in text or ranks == 1
        assert not any(label.startswith("reduce") for label in labels) or ranks == 1


def wide(dtype: torch.dtype) -> Any:
    layers = [{"w": numbers((64, 64), i, dtype, 0.1)} for i in range(4)]
    return {"blocks": zf.Layers(layers), "head": numbers((64, 32), 9, dtype)}


def wide_loss(params: Any, x: Tensor) -> Tensor:
    x = zf.scan(lambda p, x: torch.tanh(x @ p["w"]), params["blocks"], x)
    return (x @ params["head"]).square().mean()


@pytest.mark.parametrize("stage", [0, 2])
def test_it_is_thirty_times_less(stage: int) -> None:
    """Of float32, per phase: n/8 (N-1)/N bytes, and a scale for each 2,048."""
    count = 4 * 64 * 64 + 64 * 32

    def body() -> list[int]:
        step = zf.compress_grads(
            zf.shard(zf.train_step(wide_loss, ADAMW), stage=stage), freeze_step=1
        )
        state, sent = step.place(zf.TrainState.create(wide(torch.float32), ADAMW)), []
        for i in range(2):
            with zf.comm.ledger() as led:
                state, _ = step(state, numbers((4, 64), 10 * i + zf.rank(), torch.float32))
            labels = led.by_label.items()
            sent.append(sum(n for k, n in labels if k.split()[0] in ("reduce", "compress")))
        return sent

    for dense, compressed in zf.simulate(2)(body)():
        phases = 2 if stage == 0 else 1
        scales = 4 * -(-count // 2 // 2048) * 1.4  # parts of units end in shorter groups
        assert phases * count / 16 <= compressed <= phases * (count / 16 + scales)
        assert dense >= 29 * compressed


# Faults


@pytest.mark.parametrize("donated", [False, True])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("stage", STAGES)
def test_a_gradient_that_is_not_finite_is_skipped_everywhere(
    stage: int, bad: float, donated: bool
) -> None:
    def body() -> None:
        step = wrapped(STACK, CLIPPED, stage, 2)
        step = zf.donate(step) if donated else step
        state = step.place(STACK.state(CLIPPED, F64))
        for i in range(4):
            state, _ = step(state, zf.local_batch(STACK.batch(i, F64)))
        before = step.unplace(state)
        batch = zf.local_batch(STACK.batch(4, F64))
        if zf.rank() == 1:
            batch["x"][0, 0] = bad
        state, _ = step(state, batch)
        after = step.unplace(state)
        assert int(after.step) == 5 and int(after.aux["compress_grads"]["skipped"]) == 1
        assert_same(after.params, before.params)
        assert_same(after.opt_state, before.opt_state)
        for errors in ("worker", "server"):
            assert_same(after.aux["compress_grads"][errors], before.aux["compress_grads"][errors])
        state, metrics = step(state, zf.local_batch(STACK.batch(5, F64)))
        assert bool(metrics["loss"].isfinite())

    zf.simulate(3)(body)()


@pytest.mark.parametrize("stage", STAGES)
def test_a_step_is_pure(stage: int) -> None:
    def body() -> None:
        step = wrapped(STACK, ADAMW, stage, 1)
        state = step.place(STACK.state(ADAMW, F64))
        for i in range(3):
            state, _ = step(state, zf.local_batch(STACK.batch(i, F64)))
        kept = [x.clone() for x in tree.leaves(state)]
        batch = zf.local_batch(STACK.batch(3, F64))
        first, second = step(state, batch), step(state, batch)
        assert_same(step.unplace(first[0]), step.unplace(second[0]))
        for x, y in zip(tree.leaves(state), kept, strict=True):
            assert torch.equal(x, y)

    zf.simulate(2)(body)()


def test_transforms_commute() -> None:
    step = STACK.step(ADAMW)
    wraps: list[Callable[[Any], Any]] = [
        lambda f: zf.shard(f, stage=1),
        zf.donate,
        lambda f: zf.compress_grads(f, freeze_step=3),
    ]
    a, b, c = wraps
    assert a(b(c(step))) == c(a(b(step))) == b(c(a(step)))
    with pytest.raises(zf.CompositionError, match="already"):
        c(a(c(step)))


# States that go elsewhere


@pytest.mark.parametrize("stage", STAGES)
def test_full_states_go_on_bitwise(stage: int) -> None:
    """Unplaced and placed again in the compression phase, errors and all."""

    def body(again: bool) -> Any:
        step = wrapped(STACK, ADAMW, stage, 2)
        state = step.place(STACK.state(ADAMW, F64))
        for i in range(8):
            if again and i == 5:
                state = step.place(step.unplace(state))
            state, _ = step(state, zf.local_batch(STACK.batch(i, F64)))
        return step.unplace(state)

    assert_same(zf.simulate(3)(body)(True), zf.simulate(3)(body)(False))


@pytest.mark.parametrize("stages", [(0, 0), (0, 3), (2, 2), (3, 0), (1, 0)])
def test_errors_keep_their_mean_on_other_ranks(stages: tuple[int, int]) -> None:
    def begin() -> Any:
        step = wrapped(STACK, ADAMW, stages[0], 2)
        state = step.place(STACK.state(ADAMW, F64))
        for i in range(5):
            state, _ = step(state, zf.local_batch(STACK.batch(i, F64)))
        return step.unplace(state)

    full = zf.simulate(4)(begin)()[0]

    def go_on() -> Any:
        step = zf.compress_grads(
            zf.shard(STACK.step(ADAMW), stage=stages[1], unit_bytes=1 << 20), freeze_step=2
        )
        state = step.place(full)
        step(state, zf.local_batch(STACK.batch(5, F64)))
        return step.unplace(state)

    for after in zf.simulate(3)(go_on)():
        assert_near(owed(after), owed(full), 1e-12)
        assert_same(after.opt_state, full.opt_state)


def owed(state: Any) -> Any:
    """What errors will add to the mean."""
    errors = state.aux["compress_grads"]
    worker = tree.map(lambda e: e.mean(0), errors["worker"]["params"])
    server = errors["server"].get("params")
    return worker if server is None else tree.map(torch.add, worker, server)


# When it begins


@pytest.mark.parametrize("stage", [0, 2])
def test_auto_waits_until_second_moments_have_settled(stage: int) -> None:
    """Gradients that keep their size settle at once; those that shrink do not."""
    tx = optim.adamw(1e-9, b2=0.9)

    def first_step(decay: float) -> int:
        def loss(params: Any, batch: Any) -> Tensor:
            return (params["w"] * batch).sum()

        def body() -> int:
            step = zf.compress_grads(zf.shard(zf.train_step(loss, tx), stage=stage))
            state = step.place(zf.TrainState.create({"w": torch.ones(64, dtype=F64)}, tx))
            for i in range(60):
                if state.aux["compress_grads"]["frozen"]:
                    return i
                state, _ = step(state, numbers((64,), 0) * decay**i)
            return 60

        (steps,) = set(zf.simulate(2)(body)())
        return steps

    assert first_step(1.0) == 20  # two windows of 1 / (1 - 0.9) steps
    assert first_step(0.9) == 60


def test_auto_does_not_wait_for_moments_that_there_are_none_of() -> None:
    tx = optim.sgd(0.01)

    def body() -> bool:
        step = wrapped(STACK, tx, 2, "auto")
        state, _ = step(step.place(STACK.state(tx, F64)), zf.local_batch(STACK.batch(0, F64)))
        return bool(state.aux["compress_grads"]["frozen"])

    assert zf.simulate(2)(body)() == [True, True]


# Steps that look at gradients themselves


def handwritten(change: Callable[[Any], Any]) -> Callable[..., Any]:
    def step(state: Any, batch: Any) -> Any:
        loss, grads = zf.value_and_grad(stack_loss)(state.params, batch)
        updates, opt_state = ADAMW.update(change(grads), state.opt_state, state.params)
        params = optim.apply_updates(state.params, updates)
        new = state.replace(params=params, opt_state=opt_state, step=state.step + 1)
        return new, {"loss": loss}

    return step


def test_what_is_not_linear_is_refused_in_the_first_step() -> None:
    def clamped(g: Tensor) -> Tensor:
        return g.clamp(-1, 1)

    def body(change: Callable[[Any], Any], steps: int) -> None:
        step = zf.compress_grads(zf.shard(handwritten(change), stage=0), freeze_step=2)
        state = step.place(STACK.state(ADAMW, F64))
        for i in range(steps):
            state, _ = step(state, zf.local_batch(STACK.batch(i, F64)))

    refused: list[Callable[[Any], Any]] = [
        lambda grads: tree.map(clamped, grads),
        lambda grads: {**grads, "head": {**grads["head"], "w": grads["head"]["w"].clamp(0)}},
        lambda grads: {**grads, "head": {**grads["head"], "w": torch.abs(grads["head"]["w"])}},
        lambda grads: tree.map_leaves(lambda path, g: clamped(g), grads),
        zf.full,
    ]
    for change in refused:
        with pytest.raises(zf.CompositionError, match=r"zf\.reduced\(grads\)"):
            zf.simulate(2)(body)(change, 1)
    fine: list[Callable[[Any], Any]] = [
        lambda grads: tree.map(clamped, zf.reduced(grads)),
        lambda grads: tree.map(zf.linear_map(lambda g: g * 2), grads),
        lambda grads: tree.map(torch.add, grads, grads),
    ]
    for change in fine:
        zf.simulate(2)(body)(change, 4)


def test_an_optimizer_of_ones_own_is_given_the_mean() -> None:
    """Like that of sgd with the same direction, which knows to ask for it."""

    def update(grads: Any, state: Any, params: Any) -> Any:
        return tree.map(lambda g: g * -0.02 + 0 * g.abs(), grads), state

    mine = optim.GradientTransformation(lambda params: (), update)
    runs = runs_of(STACK, 2, 0, 2, mine)
    reference = runs_of(STACK, 2, 0, 2, optim.sgd(0.02))
    for run, expected in zip(runs, reference, strict=True):
        assert_near(run[1].params, expected[1].params, 1e-12)


def test_norms_are_one_number_that_bounds_that_of_the_mean() -> None:
    def body() -> tuple[float, float]:
        seen = []

        def step(state: Any, batch: Any) -> Any:
            _, grads = zf.value_and_grad(stack_loss)(state.params, batch)
            seen.append(float(tree.global_norm(grads)))
            return state.replace(step=state.step + 1), {}

        wrap = zf.compress_grads(zf.shard(step, stage=0), freeze_step=1)
        state = wrap.place(STACK.state(ADAMW, F64))
        for _ in range(2):
            state, _ = wrap(state, zf.local_batch(STACK.batch(0, F64)))
        return seen[0], seen[1]

    results = zf.simulate(3)(body)()
    assert len(set(results)) == 1
    mean, root_mean_square = results[0]
    assert mean < root_mean_square < 3 * mean


# Bad input


def test_bad_arguments_say_what_there_is() -> None:
    step = STACK.step(ADAMW)
    for arguments, message in (
        ({"method": "twobit"}, "there is 'onebit'"),
        ({"freeze_step": -1}, "freeze_step=-1: expected"),
        ({"freeze_step": 0.2}, "freeze_step=0.2: expected"),
        ({"freeze_step": True}, "freeze_step=True: expected"),
        ({"groups": 3}, "has no option groups; it has group, scaling"),
        ({"group": 100}, "group=100"),
        ({"scaling": "max"}, "scaling='max'"),
    ):
        with pytest.raises(ValueError, match=message):
            zf.compress_grads(step, **arguments)  # type: ignore[arg-type]


def test_second_moments_that_nothing_went_into_are_refused() -> None:
    with pytest.raises(zf.CompositionError, match="freeze_step of 1 at least"):
        runs_of(STACK, 2, 1, 0)
    runs_of(STACK, 2, 1, 0, optim.sgd(0.01))


def test_a_state_of_another_step_is_refused() -> None:
    def body() -> None:
        plain = zf.shard(STACK.step(ADAMW), stage=2)
        with pytest.raises(zf.PlacementError, match="carries no errors of compression"):
            zf.compress_grads(plain)(
                plain.place(STACK.state(ADAMW, F64)), zf.local_batch(STACK.batch(0, F64))
            )

    zf.simulate(2)(body)()


def test_several_optimizers_that_donate_cannot_be_skipped_together() -> None:
    """The first has spent its memory when the second meets a NaN: that is said."""
    case = HAND_WRITTEN["gan"]

    def body() -> None:
        step = zf.donate(wrapped(case, ADAMW, 2, 1))
        state = step.place(case.state(ADAMW, F64))
        for i in range(3):
            state, _ = step(state, zf.local_batch(case.batch(i, F64)))
        batch = zf.local_batch(case.batch(3, F64))
        tree.leaves(batch)[-1].fill_(float("nan"))
        with pytest.raises(zf.NonFiniteError, match="Leave out donate"):
            for i in range(2):
                state, _ = step(state, batch if i == 0 else batch)

    zf.simulate(2)(body)()


def test_shards_of_errors_are_what_describe_says() -> None:
    def body(stage: int) -> int:
        step = wrapped(STACK, ADAMW, stage, 2)
        state = step.place(STACK.state(ADAMW, torch.float32))
        assert isinstance(state.params, Sharded) == (stage == 3)
        carried = state.aux["compress_grads"]
        return tree.size_bytes((carried["worker"], carried["server"]))

    count = sum(x.numel() for x in tree.leaves(stack(F64)))
    assert zf.simulate(2)(body)(1) == [4 * count] * 2
    for size in zf.simulate(2)(body)(0):
        assert size == pytest.approx(4 * count + 4 * count / 2, rel=0.6)  # tiny units are padded
