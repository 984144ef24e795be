"""What ran is what was planned: every rank's actions, in order, and every byte that it sent.

What runs is seen from outside, by layers of the user's own: when they compute, and when gradients
of what they were given, and of their weights, have come.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor

import zfunc as zf
from tests.laws.cases import numbers
from tests.laws.covering import Covering, pairs
from tests.laws.models import block, dense, mean_square
from tests.laws.pipelines import F64, TX, model_of, rows
from zfunc.schedules import SCHEDULES, Schedule, schedule

NAMES = list(SCHEDULES)
# Of microbatches: fewer than ranks, as many, and no multiples of them.
COUNTS = (1, 2, 3, 5, 8) if Covering.whole else (1, 2, 3, 5)
RUNS = pairs(NAMES, (2, 3, 4), COUNTS)
OF_CHUNK = 2  # layers
WIDTH, ROWS, ITEM = 6, 2, 8
PADDING = 512  # at most, behind a unit

Event = tuple[str, int, int]  # what was computed, of which microbatch, in which chunk
SEEN: dict[int, list[Event]] = {}


def tell(kind: str, microbatch: int, layer: int) -> None:
    SEEN.setdefault(zf.rank(), []).append((kind, microbatch, layer // OF_CHUNK))


def seen_block(microbatch: int, layer: int, p: Any, x: Tensor) -> Tensor:
    if type(x) is Tensor:  # and no ghost
        tell("values", microbatch, layer)

        def on(kind: str) -> Any:
            return lambda _: tell(kind, microbatch, layer)

        x.register_hook(on("inputs"))
        p["w"].register_hook(on("weights"))
    return block(p, x)


def seen_loss(params: Any, batch: Any) -> Tensor:
    microbatch = int(batch["microbatch"][0])
    x = block(params["first"], batch["x"])
    for n, p in enumerate(params["blocks"]):
        x = zf.layer(partial(seen_block, microbatch, n), p, x)
    return mean_square(x @ params["head"]["w"], batch["y"])


def params_of(chunks: int) -> Any:
    blocks = zf.Layers([dense(10 * (i + 1), F64) for i in range(chunks * OF_CHUNK)])
    return {"first": dense(1, F64), "blocks": blocks, "head": {"w": numbers((WIDTH, 1), 2, F64)}}


def batch_of(m: int) -> dict[str, Tensor]:
    n = m * ROWS
    x, y = numbers((n, WIDTH), 5, F64), numbers((n, 1), 6, F64)
    return {"x": x, "y": y, "microbatch": torch.arange(m).repeat_interleave(ROWS)}


@cache
def observed(name: str, pipe: int, m: int) -> list[tuple[list[Event], zf.comm.Ledger]]:
    """By rank: what was computed, and what was sent."""

    def body() -> Any:
        chunks = schedule(name, pipe, m).chunks
        cuts = list(range(0, chunks * OF_CHUNK + 1, OF_CHUNK))
        step = zf.train_step(seen_loss, TX)
        step = zf.pipeline(step, m, schedule=name, partition=cuts, pipe=pipe)
        state = step.place(zf.TrainState.create(params_of(chunks), TX))
        SEEN[zf.rank()] = []
        with zf.comm.ledger() as led:
            step(state, batch_of(m))
        return SEEN.pop(zf.rank()), led

    return zf.simulate(pipe)(body)()


def computed_by(kind: str, i: int, k: int) -> Counter[Event]:
    """What an action computes."""
    inputs = Counter({("inputs", i, k): OF_CHUNK})
    weights = Counter({("weights", i, k): OF_CHUNK})
    both = {"F": Counter({("values", i, k): OF_CHUNK}), "B": inputs + weights}
    return {**both, "I": inputs, "W": weights}[kind]


@pytest.mark.parametrize(("name", "pipe", "m"), RUNS)
def test_each_rank_does_what_the_schedule_says_in_its_order(name: str, pipe: int, m: int) -> None:
    actions = schedule(name, pipe, m).actions
    for (events, _), row in zip(observed(name, pipe, m), actions, strict=True):
        at = 0
        for action in row:
            wanted = computed_by(*action)
            n = wanted.total()
            assert Counter(events[at : at + n]) == wanted, (action, events[at : at + n])
            at += n
        assert not events[at:]


def planned(made: Schedule, rank: int) -> Iterator[tuple[str, int]]:
    """Label and bytes of every message that a rank sends: values up, gradients down."""
    for kind, i, k in made.actions[rank]:
        to = k + 1 if kind == "F" else k - 1
        if kind != "W" and 0 <= to < made.chunks and made.rank_of[to] != rank:
            yield f"{'forward' if kind == 'F' else 'backward'} {i} {k}", ROWS * WIDTH * ITEM


@pytest.mark.parametrize(("name", "pipe", "m"), RUNS)
def test_each_rank_sends_what_the_schedule_says_to_the_byte(name: str, pipe: int, m: int) -> None:
    for rank, (_, led) in enumerate(observed(name, pipe, m)):
        wanted = dict(planned(schedule(name, pipe, m), rank))
        found = {x: n for x, n in led.by_label.items() if x.startswith(("forward", "backward"))}
        assert found == wanted
        assert led.by_kind["send"] == sum(wanted.values())
        assert all(led.calls_by_label[label] == 1 for label in wanted)


def of_parameters(name: str, stage: int, schedule: str | None) -> int:
    """Bytes of parameters and gradients that all ranks send each other along data in a step."""
    model, pipe = model_of(name), 2 if schedule else 1

    def body() -> int:
        step, mesh = zf.train_step(model.loss, TX), zf.mesh(pipe=pipe, data=2)
        if schedule:
            step = zf.pipeline(step, 4, schedule=schedule, mesh=mesh)
        else:
            step = zf.accumulate(step, 4)
        step = zf.shard(step, stage=stage, mesh=mesh)
        state = step.place(zf.TrainState.create(model.params, TX))
        with zf.comm.ledger() as led:
            step(state, step.local_batch(model.batch(0)))
        kinds = ("gather", "reduce", "join")
        return sum(n for label, n in led.by_label.items() if label.split()[0] in kinds)

    return sum(zf.simulate(2 * pipe)(body)())


@pytest.mark.parametrize("name", ["stack", "tied gpt"])
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("which", ["1f1b", "interleaved", "zbv"])
def test_stages_send_what_zero_sends_without_them(name: str, stage: int, which: str) -> None:
    """As ZeRO-1: parameters once, and gradients once, however many microbatches there are."""
    sent = of_parameters(name, stage, which)
    assert sent == of_parameters(name, 1, None)
    assert sent >= 2 * sum(x.nbytes for x in zf.tree.leaves(model_of(name).params))


def test_a_tied_table_goes_to_the_other_stage_once_and_its_gradient_back() -> None:
    """Between two chunks of one rank (``zbv``) nothing of it is sent."""
    model = model_of("tied gpt")

    def body(name: str) -> dict[str, int]:
        step = zf.pipeline(zf.train_step(model.loss, TX), 4, schedule=name, pipe=2)
        state = step.place(zf.TrainState.create(model.params, TX))
        with zf.comm.ledger() as led:
            step(state, model.batch(0))
        return {x: n for x, n in led.by_label.items() if x.split()[0] in ("lend", "return")}

    there, back = (sum(row.values()) for row in zf.simulate(2)(body)("1f1b"))
    assert there == back and 0 <= there - model.params["embed"].nbytes < PADDING
    assert zf.simulate(2)(body)("zbv") == [{}, {}]


def hooked_loss(params: Any, batch: Any) -> Tensor:
    """Each hook changes a gradient: whichever runs twice, or not at all, is seen."""
    x = block(params["first"], batch["x"])
    if x.requires_grad:
        x.register_hook(lambda g: g * 0.5)

    def layer(p: Any, x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(lambda g: g * 4)
            p["w"].register_hook(lambda g: g * 2)
        return block(p, x)

    for p in params["blocks"]:
        x = zf.layer(layer, p, x)
    return mean_square(x @ params["head"]["w"], batch["y"])


def trained(wrap: Any, loss: Any, batches: Any, n: int) -> dict[str, Tensor]:
    """Parameters behind a step for each batch, of ``n`` microbatches."""
    step = wrap(zf.train_step(loss, TX), n)
    state = step.place(zf.TrainState.create(params_of(4), TX))
    for batch in batches:
        state, _ = step(state, batch)
    return zf.tree.flatten_names(zf.tree.full(state.params))


def check_trained(name: str, loss: Any, batches: Any, n: int, same: Any) -> None:
    """Parameters on both stages are those that ``accumulate`` gives."""
    want = trained(zf.accumulate, loss, batches, n)
    wrap = partial(zf.pipeline, schedule=name, pipe=2)
    for found in zf.simulate(2)(trained)(wrap, loss, batches, n):
        assert all(same(found[path], x) for path, x in want.items())


def near(found: Tensor, want: Tensor) -> bool:
    return bool((found - want).abs().max() < 1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_hooks_of_gradients_run_once(name: str) -> None:
    # Sums are in another order there.
    same = torch.allclose if name == "zb_lean" else torch.equal
    check_trained(name, hooked_loss, [batch_of(4)], 4, same)


def sometimes_hooked_loss(params: Any, batch: Any) -> Tensor:
    """A hook in some microbatches, which those under way beside them must not see."""

    def layer(p: Any, x: Tensor) -> Tensor:
        if p["w"].requires_grad and float(x.detach().sum()) > 0:
            p["w"].register_hook(lambda g: g * 3)
        return block(p, x)

    x = zf.scan(layer, params["blocks"], block(params["first"], batch["x"]))
    return mean_square(x @ params["head"]["w"], batch["y"])


@pytest.mark.parametrize("name", NAMES)
def test_hooks_of_one_microbatch_see_no_other(name: str) -> None:
    check_trained(name, sometimes_hooked_loss, [rows(i) for i in range(3)], 8, near)


def hooked_outside_loss(params: Any, batch: Any) -> Tensor:
    """Hooks on parameters outside of layers, and on what is made of them, in the first stage; one
    is taken back."""
    head, scale = params["head"]["w"], params["first"]["b"] * 2
    head.register_hook(lambda g: g * 3)
    head.register_hook(lambda g: g * 5).remove()
    scale.register_hook(lambda g: g * 7)

    def layer(p: Any, x: Tensor, scale: Tensor) -> Tensor:
        return block(p, x) + scale

    x = block(params["first"], batch["x"])
    for p in params["blocks"]:
        x = zf.layer(layer, p, x, scale)
    return mean_square(x @ head, batch["y"])


@pytest.mark.parametrize("name", NAMES)
def test_hooks_outside_of_layers_run_where_a_value_is_made(name: str) -> None:
    check_trained(name, hooked_outside_loss, [batch_of(4)], 4, near)
