"""What a module holds beside parameters and code is kept, or refused by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zfunc as zf
from zfunc import optim, tree

TX = optim.sgd(0.1)
STAGES = [None, 0, 1, 3]
IDS = torch.tensor([[1, 2], [3, 1], [0, 2], [4, 4]])


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.Linear(3, 3), nn.Tanh()))


def hooked(register: str) -> nn.Module:
    module = net()
    getattr(module[1][0].weight, register)(print)
    return module


def unhooked() -> nn.Module:
    module = net()
    module[0].weight.register_hook(print).remove()
    return module


def compiled() -> nn.Module:
    module = net()
    module[1].compile(backend="eager")
    return module


def inside_another() -> nn.Module:
    return nn.Sequential(torch.compile(net(), backend="eager"))


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(2, dtype=torch.complex64))


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "hook": (lambda: hooked("register_hook"), r"1\.0\.weight has a hook \(print, by register_hook"),
    "post": (
        lambda: hooked("register_post_accumulate_grad_hook"),
        r"1\.0\.weight has a hook \(print, by register_post_accumulate_grad_hook",
    ),
    "compile()": (compiled, r"layer 1 \(Sequential\) was compiled"),
    "compiled": (lambda: torch.compile(net(), backend="eager"), "the module is compiled"),
    "compiled inside": (inside_another, "layer 0 is compiled"),
    "max_norm": (lambda: nn.Sequential(nn.Embedding(6, 4, max_norm=0.5)), r"layer 0 has max_norm"),
    "bags": (
        lambda: nn.EmbeddingBag(6, 4, max_norm=2),
        r"the module has max_norm=2: .* its weight",
    ),
    "complex": (Complex, r"parameter w has dtype torch\.complex64.*view_as_real"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_by_name(name: str) -> None:
    make, message = REFUSED[name]
    with pytest.raises(zf.PlacementError, match=message):
        zf.functionalize(make())


def test_a_hook_that_was_removed_is_none() -> None:
    zf.functionalize(unhooked())


def test_complex_parameters_are_refused_alike_everywhere() -> None:
    params = {"a": {"w": torch.ones(2, dtype=torch.complex64)}}
    step = zf.shard(zf.train_step(lambda p, b: p["a"]["w"].abs().sum(), TX))
    for attempt in (
        lambda: zf.TrainState.create(params, TX),
        lambda: zf.value_and_grad(lambda p: p["a"]["w"].abs().sum())(params),
        lambda: step.place({"params": params}),
    ):
        with pytest.raises(zf.PlacementError, match=r"a\.w has dtype torch\.complex64.*view_as_r"):
            attempt()


class Turning(nn.Module):
    """A complex buffer, as rotary positions have it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("turn", torch.polar(torch.ones(2), torch.tensor([0.3, 0.7])))
        self.linear = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(torch.view_as_real(x * self.turn).sum(-1))


@pytest.mark.parametrize("stage", STAGES)
def test_complex_buffers_are_kept(stage: int | None, tmp_path: Any) -> None:
    torch.manual_seed(0)
    module = Turning()
    f = zf.functionalize(module)
    x = torch.randn(4, 2)

    def loss(params: Any, batch: Tensor) -> Tensor:
        return f.apply(params, batch).square().mean()

    def run() -> Any:
        step = zf.train_step(loss, TX)
        step = step if stage is None else zf.shard(step, stage=stage)
        state = step.place(zf.TrainState.create(f.params, TX, buffers=f.buffers))
        state, _ = step(state, x if stage is None else zf.local_batch(x))
        zf.save(tmp_path, state)
        back = step.unplace(zf.restore(tmp_path, like=state))
        return tree.flatten_names(back.params), back.buffers

    found, buffers = run() if stage is None else zf.simulate(2)(run)()[0]
    assert torch.equal(buffers["turn"], module.turn)
    module(x).square().mean().backward()
    for name, p in module.named_parameters():
        torch.testing.assert_close(found[name], p.detach() - 0.1 * p.grad)


class Looked(nn.Module):
    """Sparse gradients of a table that is read twice, of its own and by the function."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 4, sparse=sparse)
        self.bags = nn.EmbeddingBag(6, 4, mode="sum", sparse=sparse)
        self.sparse, self.head = sparse, nn.ModuleList([nn.Linear(4, 4)])

    def forward(self, ids: Tensor) -> Tensor:
        again = F.embedding(ids.flip(0), self.table.weight, sparse=self.sparse)
        return self.head[0](self.table(ids) * again.cos()).sum(1) + self.bags(ids)


@pytest.mark.parametrize("accumulated", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_sparse_gradients_are_the_dense_ones(stage: int | None, accumulated: bool) -> None:
    def functional(sparse: bool) -> zf.Functional:
        torch.manual_seed(0)
        return zf.functionalize(Looked(sparse).double())

    tx, models = optim.adamw(1e-2), {sparse: functional(sparse) for sparse in (False, True)}

    def run(sparse: bool) -> dict[str, Tensor]:
        f = models[sparse]
        step = zf.train_step(lambda p, b: f.apply(p, b).square().mean(), tx)
        step = zf.accumulate(step, 2) if accumulated else step
        step = step if stage is None else zf.shard(step, stage=stage)
        state = step.place(zf.TrainState.create(f.params, tx))
        for _ in range(2):
            state, _ = step(state, IDS if stage is None else zf.local_batch(IDS))
        return tree.flatten_names(step.unplace(state).params)

    def both() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        return run(True), run(False)

    found, expected = both() if stage is None else zf.simulate(1 if accumulated else 2)(both)()[0]
    for name, x in expected.items():
        torch.testing.assert_close(found[name], x, rtol=1e-12, atol=1e-12)


def loss_of(params: Any, x: Tensor) -> Tensor:
    return (x @ params["w"]).square().mean()


@pytest.mark.parametrize("made", ["place", "init"])
@pytest.mark.parametrize("stage", [None, 0, 1, 2, 3])
def test_a_state_placed_in_inference_mode_can_be_trained(stage: int | None, made: str) -> None:
    x = torch.randn(4, 3)

    def create() -> zf.TrainState:
        return zf.TrainState.create({"w": torch.ones(3, 2)}, TX)

    def run() -> Tensor:
        step = zf.train_step(loss_of, TX)
        step = step if stage is None else zf.shard(step, stage=stage)
        with torch.inference_mode():
            state = step.place(create()) if made == "place" else step.init(create)
        for _ in range(2):
            state, _ = step(state, x)
        return step.unplace(state).params["w"]

    found = run() if stage is None else zf.simulate(2)(run)()[0]
    step, state = zf.train_step(loss_of, TX), create()
    for _ in range(2):
        state, _ = step(state, x)
    torch.testing.assert_close(found, state.params["w"])


def test_a_leaf_of_inference_mode_is_named() -> None:
    with torch.inference_mode():
        state = zf.TrainState.create({"a": {"w": torch.ones(3, 2)}}, TX)
    step = zf.train_step(lambda p, x: loss_of(p["a"], x), TX)
    with pytest.raises(zf.PlacementError, match=r"a\.w was made under torch\.inference_mode"):
        step(state, torch.ones(4, 3))
    step(step.place(state), torch.ones(4, 3))


@dataclasses.dataclass
class Unhashable:
    """A callable with fields: Python gives it ``__eq__`` and takes ``__hash__`` away."""

    factor: list[float]

    def __call__(self, state: Any, batch: Tensor) -> Any:
        loss, grads = zf.value_and_grad(
            lambda p, x: loss_of(p, x) * self.factor[0],
        )(state["params"], batch)
        return state, (loss, tree.full(grads))


@pytest.mark.parametrize("stage", STAGES)
def test_a_callable_without_a_hash_is_a_step(stage: int | None) -> None:
    x, full = torch.randn(4, 3), {"params": {"w": torch.ones(3, 2)}}

    def run(fn: Any) -> Any:
        step = zf.Step(fn) if stage is None else zf.shard(fn, stage=stage)
        state = step.place(full)
        for _ in range(2):
            state, (loss, grads) = step(state, x)
        assert step.describe() and repr(step)
        return loss, grads["w"]

    def both(fn: Any) -> Any:
        return run(fn) if stage is None else zf.simulate(2)(lambda: run(fn))()[0]

    one, two = both(Unhashable([1.0])), both(Unhashable([2.0]))
    torch.testing.assert_close(two[0], 2 * one[0])
    torch.testing.assert_close(two[1], 2 * one[1])


class Renormed(nn.Module):
    """A table that its lookup renormalises where it lies; in a layer, or outside of all."""

    def __init__(self, how: str, layered: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        look = Look(how)
        self.parts = nn.ModuleList([look, nn.Linear(4, 4)] if layered else [nn.Linear(4, 4)])
        self.look = None if layered else look

    def forward(self, ids: Tensor) -> Tensor:
        x = self.parts[0](ids) if self.look is None else self.look(ids)
        return self.parts[-1](x)


class Look(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.table = how, nn.Parameter(torch.randn(6, 4))

    def forward(self, ids: Tensor) -> Tensor:
        if self.how == "bag":
            return F.embedding_bag(ids, self.table, max_norm=0.5)
        if self.how == "clamp":
            with torch.no_grad():
                self.table[:2].clamp_(-1, 1)
        return F.embedding(ids, self.table, max_norm=None if self.how == "clamp" else 0.5).sum(1)


HOW = ["embedding", "bag", "clamp"]
WRITTEN = r"parameters? .*look\.table.* written to in place.*max_norm"


@pytest.mark.parametrize("layered", [False, True])
@pytest.mark.parametrize("how", HOW)
def test_a_forward_that_writes_to_a_parameter_is_refused(how: str, layered: bool) -> None:
    f = zf.functionalize(Renormed(how, layered))
    message = WRITTEN.replace("look", "parts.0") if layered else WRITTEN

    def held() -> None:
        with f.held(f.params) as call:
            call(IDS)

    for attempt in (
        lambda: f.apply(f.params, IDS),
        held,
        lambda: zf.evaluate(f.apply)(f.params, IDS),
        lambda: zf.value_and_grad(lambda p: f.apply(p, IDS).square().mean())(f.params),
        lambda: zf.value_and_grad(lambda p: f.apply(p, IDS).square().mean())(f.params),
    ):
        with pytest.raises(zf.PlacementError, match=message):
            attempt()


@pytest.mark.parametrize("layered", [False, True])
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize(
    "wrap", [lambda s: s, zf.remat, zf.precision], ids=["alone", "remat", "precision"]
)
def test_so_it_is_at_every_stage(stage: int, how: str, layered: bool, wrap: Any) -> None:
    f = zf.functionalize(Renormed(how, layered))

    def run() -> None:
        step = zf.train_step(lambda p, b: f.apply(p, b).square().mean(), TX)
        step = zf.shard(wrap(step), stage=stage, unit_bytes=1)
        state = step.place(zf.TrainState.create(f.params, TX))
        with pytest.raises(zf.PlacementError, match="written to in place"):
            step(state, zf.local_batch(IDS))

    zf.simulate(2)(run)()


@pytest.mark.parametrize("stage", STAGES)
def test_so_it_is_in_a_function_of_ones_own(stage: int | None) -> None:
    def loss(params: Any, ids: Tensor) -> Tensor:
        return F.embedding(ids, params["table"], max_norm=0.5).square().mean()

    def run() -> None:
        step = zf.train_step(loss, TX)
        step = step if stage is None else zf.shard(step, stage=stage)
        state = step.place(zf.TrainState.create({"table": torch.arange(24.0).view(6, 4)}, TX))
        for _ in range(2):
            with pytest.raises(zf.PlacementError, match="parameter table was written to in place"):
                step(state, IDS if stage is None else zf.local_batch(IDS))

    run() if stage is None else zf.simulate(2)(run)()


@pytest.mark.parametrize("stage", STAGES)
def test_what_writes_to_copies_is_none_of_it(stage: int | None) -> None:
    """Neither in the module nor by whoever goes on between two steps."""
    f = zf.functionalize(Renormed("plain", True))

    def loss(params: Any, ids: Tensor) -> Tensor:
        table = params["parts"][0]["table"]
        rows = F.embedding(ids, table.clone(), max_norm=0.5)
        return rows.square().mean() + table.detach().clone().clamp_(0).mean()

    def run() -> None:
        step = zf.train_step(loss, TX)
        step = step if stage is None else zf.shard(step, stage=stage)
        state = step.place(zf.TrainState.create(f.params, TX))
        for _ in range(3):
            state, _ = step(state, IDS if stage is None else zf.local_batch(IDS))
            if stage is None:
                for x in tree.leaves(state.params):
                    x.mul_(0.5)

    run() if stage is None else zf.simulate(2)(run)()
