"""Losses and modules that change Python's state as they run: counters, attributes, hooks, lists.

A rehearsal leaves no trace of it, and each stage has what one process has.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import zfunc as zf
from tests.laws.cases import assert_near
from tests.laws.pipelines import Model, rows
from zfunc.errors import CompositionError

SCHEDULES = ("1f1b", "zb_lean", "zbv")
ALONE = threading.Lock()  # to make a module by the global generator


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


SEEN = {"n": 0}


class CountsItself(Block):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        SEEN["n"] += 1
        return super().forward(x) * (1 + 0.1 * self.calls)


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        for each in self.blocks:
            x = each(x)
        return self.head(x)


def larger(module: nn.Module, args: Any, out: Tensor) -> Tensor:
    return out * 1.1


class HooksAtFirst(Stack):
    """Its layers get their hooks when it is first called, as transformers does it for what its
    models return beside the last hidden state."""

    hooked = False

    def parts(self) -> list[nn.Module]:
        return [*self.blocks]

    def forward(self, x: Tensor) -> Tensor:
        if not self.hooked:
            for each in self.parts():
                each.register_forward_hook(larger)
            self.hooked = True
        return super().forward(x)


class HooksBesideOthers(HooksAtFirst):
    def __init__(self) -> None:
        super().__init__()
        for each in self.blocks:
            each.register_forward_hook(lambda module, args, out: out * 0.95)


class HooksWithin(HooksAtFirst):
    def parts(self) -> list[nn.Module]:
        return [x for each in self.blocks for x in each.children()]


class HooksForACall(Stack):
    """It takes them away behind its layers."""

    def forward(self, x: Tensor) -> Tensor:
        handles = [each.register_forward_hook(larger) for each in self.blocks]
        out = super().forward(x)
        for handle in handles:
            handle.remove()
        return out


class HooksTakenAway(Stack):
    """One that was there before is gone behind the first call."""

    def __init__(self) -> None:
        super().__init__()
        self.handles = [self.blocks[0].register_forward_hook(larger)]

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        while self.handles:
            self.handles.pop().remove()
        return out


class CountsBetween(Stack):
    """It counts between its layers, and starts anew behind them."""

    depth = 0.0

    def forward(self, x: Tensor) -> Tensor:
        for each in self.blocks:
            x = each(x) * (1 + 0.1 * self.depth)
            self.depth += 1
        self.depth = 0.0
        return self.head(x)


class CountsCalls(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.calls = {"n": 0}

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x * (1 + 0.1 * self.calls["n"]))
        self.calls["n"] += 1
        return x


class StartsAnew(Stack):
    """Its first call is another one than those that follow."""

    started = False

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x if self.started else 2 * x)
        self.started = True
        return x


class StartsAtOnce(Stack):
    """So that nothing is another one at its layers."""

    first = True

    def forward(self, x: Tensor) -> Tensor:
        first, self.first = self.first, False
        return super().forward(x * 2 if first else x)


class CountsInATensor(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.calls = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return super().forward(x * self.calls)


class Remembers(Stack):
    """It keeps what it has seen last, and something new each time."""

    def forward(self, x: Tensor) -> Tensor:
        self.seen, self.notes = [x], {"of": object()}
        for each in self.blocks:
            x = each(x)
            self.seen.append(x)
        return self.head(x)


class CountsWithin(Stack):
    """Layers run once, so what they count is theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(CountsItself() for _ in range(4))


class CastsItsRouter(nn.Module):
    """As Switch Transformers casts its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.router, self.down = (nn.Linear(6, 6, bias=i != 1) for i in range(3))

    def forward(self, x: Tensor) -> Tensor:
        self.router = self.router.to(torch.float32)
        gates = self.router(x.float()).softmax(-1).to(x.dtype)
        return x + self.down(torch.tanh(self.up(x)) * gates)


class Routers(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(CastsItsRouter() for _ in range(4))


MODULES = [
    HooksAtFirst,
    HooksBesideOthers,
    HooksWithin,
    HooksForACall,
    HooksTakenAway,
    CountsBetween,
    CountsCalls,
    StartsAnew,
    StartsAtOnce,
    CountsInATensor,
    Remembers,
    CountsWithin,
    Routers,
]

# Where a stage runs the loss once for each of its chunks, and would count these.
UNLIKE = {
    HooksTakenAway: "it changes HooksTakenAway.handles|it changes the hooks of blocks.0",
    CountsCalls: "it changes CountsCalls.calls",
    StartsAnew: "it changes StartsAnew.started",
    StartsAtOnce: "it does something else when it is called again",
    CountsInATensor: "it changes CountsInATensor.calls",
}


def made(kind: type[nn.Module]) -> Model:
    with ALONE:
        torch.manual_seed(0)
        model = zf.functionalize(kind().double())

    def loss(p: Any, batch: Any) -> Tensor:
        return (model.apply(p, batch["x"]) - batch["y"]).square().mean()

    return Model(model.params, loss, rows)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of torch's Module.to, in a pass
def test_modules(kind: type[nn.Module], schedule: str) -> None:
    """Each rank has a module of its own, which nobody has called before. Gradients in float32, of
    the router, may be added in another order."""

    def run() -> Any:
        return made(kind).trained(lambda f: zf.pipeline(f, 4, pipe=2, schedule=schedule))

    if kind in UNLIKE and schedule == "zbv":
        with pytest.raises(CompositionError, match=UNLIKE[kind]):
            zf.simulate(2)(run)()
        return
    wanted = made(kind).trained(lambda f: zf.accumulate(f, 4))

    for found in zf.simulate(2)(run)():
        assert_near(found, wanted, 1e-6 if kind is Routers else 1e-9)


class Remembering(nn.Module):
    """It makes what it needs when it is first called, and keeps it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.mask, self.calls = nn.Linear(6, 6), None, 0
        self.scales: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.mask is None:
            self.mask = x.new_ones(len(x), len(x)).tril() / len(x)
        if len(x) not in self.scales:
            self.scales[len(x)] = x.new_full((6,), 0.5)
        return x + torch.tanh(self.linear(self.mask @ x) * self.scales[len(x)])


def test_modules_that_keep_what_they_need() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(*(Remembering() for _ in range(4))).double()

    def trained(wrap: Callable[..., Any]) -> Any:
        model = zf.functionalize(module)

        def loss(p: Any, batch: Any) -> Tensor:
            return (model.apply(p, batch["x"]).sum(1, keepdim=True) - batch["y"]).square().mean()

        return Model(model.params, loss, rows).trained(wrap, steps=2)

    wanted = trained(lambda f: zf.accumulate(f, 3))
    for run in zf.simulate(2)(lambda: trained(lambda f: zf.pipeline(f, 3, pipe=2)))():
        assert_near(run, wanted, 1e-9)


def counting() -> Callable[[Any, Any], Tensor]:
    """A loss that anneals by a number that it counts itself, behind its layers."""
    inner, calls = made(Stack).loss, 0

    def loss(p: Any, batch: Any) -> Tensor:
        nonlocal calls
        out = inner(p, batch | {"x": batch["x"] / (1 + calls)})
        calls += 1
        return out

    return loss


def collecting() -> Callable[[Any, Any], Tensor]:
    """A loss that is weighted by how much is in a list, which it empties at its end."""
    inner, seen = made(Stack).loss, list[int]()

    def loss(p: Any, batch: Any) -> Tensor:
        seen.append(len(seen))
        out = inner(p, batch | {"x": batch["x"] * len(seen)})
        seen.clear()
        return out

    return loss


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("make", [counting, collecting])
def test_losses(make: Callable[[], Any], schedule: str) -> None:
    params = made(Stack).params
    wanted = Model(params, make(), rows).trained(lambda f: zf.accumulate(f, 4))

    def run() -> Any:
        wrap = partial(zf.pipeline, microbatches=4, pipe=2, schedule=schedule)
        return Model(params, make(), rows).trained(wrap)

    if make is counting and schedule == "zbv":
        with pytest.raises(CompositionError, match="it changes calls"):
            zf.simulate(2)(run)()
        return
    for found in zf.simulate(2)(run)():
        assert_near(found, wanted, 1e-9)


def masked() -> Model:
    model = made(Stack)

    def loss(p: Any, batch: Any) -> Tensor:
        seen = torch.from_numpy(np.random.rand(*batch["x"].shape) > 0.5)
        return model.loss(p, batch | {"x": torch.where(seen, batch["x"], 0.0)})

    return Model(model.params, loss, rows)


def refused() -> bool:
    """Whether NumPy's generator is what it was behind a refusal."""
    before = np.random.get_state()
    with pytest.raises(CompositionError, match="by Python's or NumPy's own generator"):
        masked().trained(lambda f: zf.pipeline(f, 4, pipe=2, schedule="zbv"), steps=1)
    return all(map(np.array_equal, np.random.get_state(), before))


def test_other_generators_draw_for_each_chunk() -> None:
    """Of what all stages draw alike, a stage with several chunks would draw other numbers. Each
    process has a generator."""
    assert zf.launch(refused, nprocs=2) == [True, True]


def drawn(pipe: int) -> Any:
    np.random.seed(0)
    wrap = (lambda f: zf.pipeline(f, 4, pipe=pipe)) if pipe > 1 else lambda f: zf.accumulate(f, 4)
    return masked().trained(wrap)


def test_processes_that_start_alike_draw_what_one_draws() -> None:
    wanted = drawn(1)
    for found in zf.launch(drawn, 2, nprocs=2):
        assert_near(found, wanted, 1e-9)
