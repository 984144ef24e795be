"""What fails in a stage says where, on all ranks; and layers see numbers, each where it is."""

from __future__ import annotations

import builtins
import pdb
import re
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zfunc as zf
from tests.laws.cases import assert_near
from tests.laws.models import block, mean_square
from tests.laws.pipelines import TX, Model, rows, stack, stack_loss
from zfunc.rehearsal.failures import located

Layer = Callable[[Any, Tensor], Tensor]


class FailsBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise KeyError("no gradient")


class Odd(Exception):
    """An error that is not made of a text."""

    def __init__(self, x: Tensor, limit: float) -> None:
        super().__init__(f"{len(x)} rows above {limit}")
        self.limit = limit


def too_large(p: Any, x: Tensor) -> Tensor:
    if x.abs().max() > 0.5:
        raise ValueError("too large")
    return block(p, x)


def odd(p: Any, x: Tensor) -> Tensor:
    if x.abs().max() > 0.5:
        raise Odd(x, 0.5)
    return block(p, x)


def step_of(bad: Layer, at: int, schedule: str = "1f1b", data: int = 1, stage: int = 0) -> Any:
    """A step in which one of six layers is another one."""

    def loss(params: Any, batch: Any) -> Tensor:
        x = block(params["first"], batch["x"])
        for i, layer in enumerate(params["blocks"]):
            x = zf.layer(bad if i == at else block, layer, x)
        return mean_square(x @ params["head"]["w"] + params["head"]["b"], batch["y"])

    mesh = zf.mesh(data=data, pipe=2)
    return zf.shard(zf.pipeline(zf.train_step(loss, TX), 3, schedule, mesh=mesh), stage=stage)


def errors(step: Any, ranks: int) -> list[BaseException | None]:
    """What the call of a step raises on each rank."""

    def body() -> BaseException | None:
        state = step.place(zf.TrainState.create(stack(), TX))
        try:
            step(state, step.local_batch(rows(0)))
        except Exception as error:
            return error
        return None

    return zf.simulate(ranks, timeout=30)(body)()


CASES: list[tuple[Layer, type[Exception], str]] = [
    (too_large, ValueError, r"forward of microbatch 0, layer blocks\.4 \(call 4\): too large"),
    (
        lambda p, x: block(p, FailsBack.apply(x)),
        KeyError,
        r"backward.* of microbatch 0, layer blocks\.4 \(call 4\): 'no gradient'",
    ),
]


@pytest.mark.parametrize(("bad", "kind", "text"), CASES)
@pytest.mark.parametrize(
    ("schedule", "data", "stage"), [("1f1b", 1, 0), ("zb", 1, 1), ("zbv", 1, 0), ("1f1b", 2, 3)]
)
def test_an_error_in_a_layer_says_where_on_every_rank(
    bad: Layer, kind: type[Exception], text: str, schedule: str, data: int, stage: int
) -> None:
    found = errors(step_of(bad, 4, schedule, data, stage), 2 * data)
    where = r"stage 1 of the pipeline \(rank \d\).*"
    for rank, error in enumerate(found):
        assert error is not None
        if rank // data == 1:
            assert type(error) is kind and re.search(where + text, str(error)), error
            assert type(error.__cause__) is kind
        else:
            assert isinstance(error, zf.DesyncError)
            assert re.search(
                rf"rank \d has stopped: {where}layer blocks\.4 \(call 4\): ", str(error)
            )


def test_an_error_with_more_than_a_text_stays_what_it_is() -> None:
    first, second = errors(step_of(odd, 3), 2)
    assert type(second) is Odd and second.limit == 0.5
    assert "microbatch 0, layer blocks.3 (call 3)" in second.__notes__[0]
    assert "layer blocks.3 (call 3): Odd: 8 rows above 0.5" in str(first)


@pytest.mark.parametrize(
    "error", [Odd(torch.ones(2), 1.0), OSError(2, "gone"), StopIteration(), KeyError("k")]
)
def test_errors_keep_their_type(error: Exception) -> None:
    found = located(error, "layer 3")
    assert type(found) is type(error)
    assert "layer 3" in str(found) or found.__notes__ == ["in layer 3"]


class Text(nn.Module):
    """A language model whose last layer fails on numbers, behind some tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(13, 8), nn.Linear(8, 13)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.blocks[3].register_forward_pre_hook(self._fail)

    def _fail(self, _part: nn.Module, given: Any) -> None:
        if given[0].shape[1] > 7 and type(given[0]) is Tensor:
            raise RuntimeError("too long")

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for layer in self.blocks:
            x = x + layer(x).tanh()
        logits: Tensor = self.head(x)
        return logits


def test_an_error_in_a_layer_that_generates_says_where_on_every_rank() -> None:
    torch.manual_seed(0)
    model = zf.functionalize(Text(), train=False)
    params, ids = model.params, torch.arange(12).reshape(2, 6)

    def rank() -> Exception:
        placed = zf.pipeline(model.apply, 2, pipe=2).place(params)
        with pytest.raises((RuntimeError, zf.DesyncError)) as caught:
            zf.generate(model, placed, ids, max_new_tokens=8)
        return caught.value

    told, raised = zf.simulate(2)(rank)()
    place = "stage 1 of the pipeline (rank 1), forward of microbatch 0, layer blocks.3 (call 3)"
    assert isinstance(told, zf.DesyncError) and f"rank 1 has stopped: {place}" in str(told)
    assert type(raised) is RuntimeError and str(raised) == f"{place}: too long"


def test_what_shapes_alone_tell_says_where_on_every_rank() -> None:
    for error in errors(step_of(lambda p, x: block(p, x[:, :5]), 4), 2):
        assert type(error) is RuntimeError and type(error.__cause__) is RuntimeError
        assert "shapes of microbatch 0: stage 1 of the pipeline, layer blocks.4 (call 4)" in (
            str(error)
        )


def test_an_error_behind_the_layers_says_so() -> None:
    def head(params: Any, batch: Any) -> Tensor:
        out = stack_loss(params, batch)
        if type(out) is Tensor:
            raise ZeroDivisionError("in the head")
        return out

    step = zf.pipeline(zf.train_step(head, TX), 3, pipe=2)
    first, second = errors(step, 2)
    assert type(second) is ZeroDivisionError
    assert "microbatch 0, behind layer blocks.5 (call 5): in the head" in str(second)
    assert "behind layer blocks.5" in str(first)


@pytest.mark.filterwarnings("ignore:Anomaly Detection:UserWarning")
@pytest.mark.filterwarnings("ignore:Error detected:UserWarning")
@pytest.mark.parametrize("schedule", ["1f1b", "zb"])
def test_nan_is_found_where_it_begins(schedule: str) -> None:
    def forward(p: Any, x: Tensor) -> Tensor:
        return block(p, x / (x - x))

    def backward(p: Any, x: Tensor) -> Tensor:
        return block(p, x + 0 * (x - x).sqrt())

    for bad, kind, text in (
        (forward, zf.NonFiniteError, r"forward of .*\(call 4\): \d+ of 48 numbers of its result 0"),
        (backward, RuntimeError, r"backward.* of .*\(call 4\): .* returned nan values"),
    ):
        assert errors(step_of(bad, 4, schedule), 2) == [None, None]  # it is trained on
        with torch.autograd.set_detect_anomaly(True):
            first, second = errors(step_of(bad, 4, schedule), 2)
        assert type(second) is kind and re.search(text, str(second)), second
        assert isinstance(first, zf.DesyncError) and re.search(r"\(call 4\)", str(first))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb", "zbv"])
def test_no_stage_returns_where_another_fails_in_its_last_action(schedule: str) -> None:
    """Of a step of one's own, in which nothing behind the gradients asks the others."""

    def fail(grad: Tensor) -> Tensor:
        time.sleep(0.1)  # the others are through by then
        raise ValueError("too late")

    def first(p: Any, x: Tensor, marked: Tensor) -> Tensor:
        w = p["w"] * 1
        if marked.any():
            w.register_hook(fail)
        return x @ w

    def loss(params: Any, batch: Any) -> Tensor:
        x = block(params["first"], batch["x"])
        for i, layer in enumerate(params["blocks"]):
            x = zf.layer(block, layer, x) if i else zf.layer(first, layer, x, batch["marked"])
        return mean_square(x @ params["head"]["w"] + params["head"]["b"], batch["y"])

    def own(state: Any, batch: Any) -> Any:
        loss_of_all, grads = zf.value_and_grad(loss)(state.params, batch)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        params = zf.optim.apply_updates(state.params, updates)
        return state.replace(params=params, opt_state=opt_state), {"loss": loss_of_all}

    tx = zf.optim.sgd(0.1)
    batch = {**rows(0), "marked": torch.arange(24) >= 16}  # those of the last microbatch
    step = zf.pipeline(own, 3, schedule, pipe=2)

    def body() -> BaseException | None:
        state = step.place(zf.TrainState.create(stack(), tx))
        try:
            step(state, batch)
        except Exception as error:
            return error
        return None

    found = zf.simulate(2, timeout=30)(body)()
    assert type(found[0]) is ValueError and isinstance(found[1], zf.DesyncError), found


def test_stages_go_on_once_the_world_has_recovered() -> None:
    def body() -> Any:
        limit = [0.5]

        def layer(p: Any, x: Tensor) -> Tensor:
            if x.abs().max() > limit[0]:
                raise ValueError("too large")
            return block(p, x)

        step = step_of(layer, 4)
        state = step.place(zf.TrainState.create(stack(), TX))
        with pytest.raises((ValueError, zf.DesyncError), match="too large"):
            step(state, rows(0))
        with pytest.raises(zf.DesyncError, match="failed before"):
            step(state, rows(0))
        zf.recover_world()
        limit[0] = 99.0
        return step(state, rows(0))[1]["loss"]

    plain = zf.accumulate(zf.train_step(stack_loss, TX), 3)
    wanted = plain(plain.place(zf.TrainState.create(stack(), TX)), rows(0))[1]["loss"]
    assert zf.simulate(2, timeout=30)(body)() == [wanted, wanted]


# What layers see


class Block(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.linear = name, nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        print("block", self.name, type(x).__name__)
        SEEN.append((zf.rank(), self.name, type(x)))
        return x + torch.tanh(self.linear(x))


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(Block(str(i)) for i in range(4))
        self.head = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for each in self.blocks:
            x = each(x)
        return self.head(x)


SEEN: list[tuple[int, str, type]] = []
COUNT = 0


def trained(loss: Callable[..., Tensor], params: Any, pipe: int = 2, schedule: str = "1f1b") -> Any:
    """Two steps of four microbatches, the second with another number of rows."""

    def body() -> Any:
        step = zf.pipeline(zf.train_step(loss, TX), 4, schedule, pipe=pipe)
        state = step.place(zf.TrainState.create(params, TX))
        for n in (24, 8):
            state, metrics = step(state, rows(0, n))
        return metrics

    return zf.simulate(pipe)(body)()


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_hooks_and_prints_run_once_for_each_microbatch_on_numbers(
    schedule: str, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    module, hooked, largest = Blocks().double(), [], {}
    for i, each in enumerate(module.blocks):
        each.register_forward_hook(
            lambda m, args, out, i=i: hooked.append((zf.rank(), str(i), type(out)))
        )
        each.linear.register_forward_pre_hook(
            lambda m, args, i=i: largest.update({(i, len(largest)): args[0].abs().max().item()})
        )
    model = zf.functionalize(module)
    SEEN.clear()
    trained(lambda p, b: F.mse_loss(model.apply(p, b["x"]), b["y"]), model.params, 2, schedule)
    owner = {"1f1b": [0, 0, 1, 1], "zbv": [0, 1, 1, 0]}[schedule]
    wanted = sorted((owner[i], str(i), Tensor) for i in range(4) for _ in range(8))
    assert sorted(hooked, key=str) == sorted(SEEN, key=str) == sorted(wanted, key=str)
    assert len(largest) == 32 and all(x > 0 for x in largest.values())
    lines = capsys.readouterr().out.splitlines()
    assert sorted(lines) == sorted(f"block {i} Tensor" for i in range(4) for _ in range(8))


def test_layers_that_remember_do_not_remember_the_rehearsal() -> None:
    kept: list[Tensor] = []
    calls = {"number": 0}
    number = 0

    def remembering(p: Any, x: Tensor, told: list[Any] = []) -> Tensor:  # noqa: B006
        nonlocal number
        global COUNT
        number, COUNT, calls["number"] = number + 1, COUNT + 1, calls["number"] + 1
        kept.append(x.detach())
        told.append(x)
        return block(p, x)

    def loss(params: Any, batch: Any) -> Tensor:
        x = zf.scan(remembering, params["blocks"], block(params["first"], batch["x"]))
        return mean_square(x @ params["head"]["w"] + params["head"]["b"], batch["y"])

    global COUNT
    COUNT = 0
    trained(loss, stack())
    assert number == COUNT == calls["number"] == len(kept) == 6 * 4 * 2
    assert all(type(x) is Tensor for x in (*kept, *remembering.__defaults__[0]))


class Masked(nn.Module):
    """A layer with a buffer that it fills when it needs one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("mask", None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.mask is None or len(self.mask) < len(x):
            self.mask = x.new_ones(len(x), len(x)).tril()
        return x + torch.tanh(self.linear(self.mask[: len(x), : len(x)] @ x))


def test_buffers_that_layers_fill_are_not_those_of_the_rehearsal() -> None:
    torch.manual_seed(0)
    model = zf.functionalize(nn.Sequential(*(Masked() for _ in range(4))).double())

    def loss(params: Any, batch: Any) -> Tensor:
        return model.apply(params, batch["x"]).square().mean()

    run = Model(model.params, loss, rows).trained
    staged = zf.simulate(2)(lambda: run(lambda f: zf.pipeline(f, 3, pipe=2), steps=2))()
    wanted = run(lambda f: zf.accumulate(f, 3), steps=2)
    for found in staged:
        assert_near(found, wanted, 1e-9)


KEPT: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "what it was given": lambda x, y: x,
    "what it returns": lambda x, y: y,
    "something else": lambda x, y: x.square(),
    "something, and it looks at numbers": lambda x, y: x * float(x.sum().item() < 1e9),
}


@pytest.mark.parametrize("kind", KEPT)
@pytest.mark.parametrize("given", [False, True])
def test_what_layers_leave_behind_is_refused_where_it_is_used(kind: str, given: bool) -> None:
    """A list that layers fill, and that the loss reads: of other stages' layers it has nothing."""

    def loss(params: Any, batch: Any) -> Tensor:
        kept: list[Tensor] = []

        def keeping(p: Any, x: Tensor, more: Tensor | None = None) -> Tensor:
            y = block(p, x)
            kept.append(KEPT[kind](x, y))
            return y if more is None else y + more

        x = block(params["first"], batch["x"])
        for layer in params["blocks"]:
            x = zf.layer(keeping, layer, x, *(kept[-1:] if given else ()))
        return mean_square(x, batch["y"]) + (0 if given else sum(k.square().mean() for k in kept))

    with pytest.raises(
        zf.CompositionError, match=r"that layer blocks\.\d has kept .* Let the layer"
    ):
        trained(loss, stack())


def test_what_a_hook_has_kept_is_refused_where_it_is_used() -> None:
    module, kept = Blocks().double(), []
    for each in module.blocks:
        each.register_forward_hook(lambda m, args, out: kept.append(out))
    model = zf.functionalize(module)

    def loss(params: Any, batch: Any) -> Tensor:
        kept.clear()
        out = model.apply(params, batch["x"])
        return F.mse_loss(out, batch["y"]) + sum(x.square().mean() for x in kept)

    with pytest.raises(
        zf.CompositionError, match=r"has kept \(in a list, as an attribute, by a hook"
    ):
        trained(loss, model.params)


def test_the_last_stage_may_use_what_its_layers_have_kept() -> None:
    def loss(params: Any, batch: Any) -> Tensor:
        kept: list[Tensor] = []

        def keeping(p: Any, x: Tensor) -> Tensor:
            kept.append(x)
            return block(p, x)

        x = zf.scan(keeping, params["blocks"], block(params["first"], batch["x"]))
        return mean_square(x, batch["y"]) + kept[-1].square().mean()

    def body(wrap: Any) -> Any:
        step = wrap(zf.train_step(loss, TX))
        return step(step.place(zf.TrainState.create(stack(), TX)), rows(0))[1]["loss"]

    wanted = body(lambda f: zf.accumulate(f, 4))
    assert zf.simulate(2)(body)(lambda f: zf.pipeline(f, 4, pipe=2)) == [wanted, wanted]


def test_a_debugger_stops_on_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    stops: list[tuple[int, type]] = []

    def stop(*args: Any, **kwargs: Any) -> None:
        frame = sys._getframe(1)
        while frame.f_code is not stopping.__code__ and frame.f_back is not None:
            frame = frame.f_back
        stops.append((zf.rank(), type(frame.f_locals["x"])))

    def stopping(p: Any, x: Tensor) -> Tensor:
        breakpoint()
        pdb.set_trace()
        return block(p, x)

    def loss(params: Any, batch: Any) -> Tensor:
        x = zf.scan(stopping, params["blocks"], block(params["first"], batch["x"]))
        return mean_square(x, batch["y"])

    monkeypatch.setattr(sys, "breakpointhook", stop)
    monkeypatch.setattr(pdb, "set_trace", stop)
    before = builtins.print
    trained(loss, stack())
    assert len(stops) == 2 * 6 * 4 * 2 and {kind for _, kind in stops} == {Tensor}
    assert builtins.print is before and sys.breakpointhook is stop and pdb.set_trace is stop


@pytest.mark.parametrize("at", [1, 4])
def test_a_stop_iteration_says_where_it_was_raised(at: int) -> None:
    def empty(p: Any, x: Tensor) -> Tensor:
        return x * next(iter([])) if x.abs().max() > 0.5 else block(p, x)

    found = errors(step_of(empty, at), 2)
    its = found.pop(at // 3)
    assert isinstance(its, StopIteration)
    assert isinstance(found[0], zf.errors.DesyncError)
    found.append(its)
    assert all(f"layer blocks.{at}" in str(error) for error in found)
    assert all(f"stage {at // 3} of the pipeline" in str(error) for error in found)
