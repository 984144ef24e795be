"""Streams that are cut along positions, as the code between layers sees them; which layers are."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zfunc as zf
from tests.laws.plans_by_hand import local_params
from zfunc.errors import PlacementError
from zfunc.modules.cut_streams import CutStream, cut_stream, summand_stream, without_cuts
from zfunc.operators.conjugates import copied, cut_positions
from zfunc.probing.plans import plan_of
from zfunc.ranks.axes import group
from zfunc.trees import tree

F64 = torch.float64
SHAPE = (2, 5, 4)


def numbers(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(len(shape))
    return torch.randn(*shape, generator=generator, dtype=F64)


def ranks_of(ways: int) -> Any:
    return group(zf.mesh(data=1, tensor=ways), "tensor")


# What is done with a stream x, beside y of its shape, w of its width and rows of its positions.
ON_POSITIONS: dict[str, Callable[..., Any]] = {
    "a sum": lambda x, y, w, rows: x + y,
    "with rows": lambda x, y, w, rows: rows + x,
    "a number": lambda x, y, w, rows: 2.0 - x * 3,
    "a vector": lambda x, y, w, rows: torch.mul(x, w),
    "two of them": lambda x, y, w, rows: (x + y) / (x * x + 1),
    "into it": lambda x, y, w, rows: _into(x, y),
    "casts": lambda x, y, w, rows: x.to(torch.float32).double().contiguous(),
    "a slice of all": lambda x, y, w, rows: x[:, slice(0, None), :],
    "its own shape": lambda x, y, w, rows: x.view(-1, 5, 4).reshape(2, 5, 4),
    "no dropout": lambda x, y, w, rows: F.dropout(x, 0.0),
}
ON_THE_WHOLE: dict[str, Callable[..., Any]] = {
    "a copy": lambda x, y, w, rows: x.clone(),
    "a slice": lambda x, y, w, rows: x[:, 1:],
    "a sum over positions": lambda x, y, w, rows: x.sum(1),
    "a larger one": lambda x, y, w, rows: x + y[None].repeat(3, 1, 1, 1),
    "another shape": lambda x, y, w, rows: x.view(10, 4),
    "a product": lambda x, y, w, rows: x @ y.mT,
    "a list of them": lambda x, y, w, rows: torch.cat([x, x * 2], 1),
    "a scaled sum": lambda x, y, w, rows: torch.addcmul(x, y, y),
    "into another": lambda x, y, w, rows: (y * 1).add_(x),
}
WRITTEN: dict[str, Callable[[Tensor], Any]] = {
    "an item": lambda x: x.__setitem__((slice(None), 0), 7.0),
    "a view": lambda x: x[:, 1:].mul_(3),
    "all": lambda x: x.relu_(),
}


def _into(x: Tensor, y: Tensor) -> Tensor:
    before = x * 2
    same = x
    same += y
    same.mul_(before)
    return x + before


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("made", ["positions", "summands"])
def test_what_is_written_into_it_is_there_for_layers(made: str, name: str) -> None:
    def written() -> tuple[Tensor, Tensor, Tensor]:
        leaf, ranks = numbers(*SHAPE).requires_grad_(), ranks_of(2)
        x = leaf * 1
        if made == "positions":
            x = cut_stream(cut_positions(x, ranks, -2), ranks, 5)
        else:
            x = summand_stream(copied(x, ranks) / 2, ranks, "sum")
        WRITTEN[name](x)
        own = x.local()  # what a layer is given, and may write into
        own *= 2
        every = x.whole()
        (grad,) = torch.autograd.grad(every.square().sum(), leaf)
        return own, every, grad

    leaf = numbers(*SHAPE).requires_grad_()
    expected = leaf * 1
    WRITTEN[name](expected)
    expected = expected * 2
    (grad,) = torch.autograd.grad(expected.square().sum(), leaf)
    found = zf.simulate(2)(written)()
    torch.testing.assert_close(torch.cat([own for own, _, _ in found], 1), expected)
    for _, every, its in found:
        torch.testing.assert_close(every, expected)
        torch.testing.assert_close(its, grad)


@pytest.mark.parametrize("ways", [2, 3])
@pytest.mark.parametrize("made", ["positions", "summands"])
@pytest.mark.parametrize("name", [*ON_POSITIONS, *ON_THE_WHOLE])
def test_what_is_done_with_a_stream(name: str, made: str, ways: int) -> None:
    act = {**ON_POSITIONS, **ON_THE_WHOLE}[name]
    given = [numbers(*SHAPE), numbers(*SHAPE) + 3, numbers(4), numbers(5, 4)]

    def graded(stream: Callable[[Tensor], Tensor]) -> tuple[list[Tensor], bool]:
        leaves = [x.clone().requires_grad_() for x in given]
        out = act(stream(leaves[0] * 1), *leaves[1:])
        cut = isinstance(out, CutStream)
        out = without_cuts(out)
        weights = torch.arange(out.numel(), dtype=F64).view(out.shape)
        grads = torch.autograd.grad((out * weights).sum(), leaves, allow_unused=True)
        return [out.detach(), *(g for g in grads if g is not None)], cut

    def on_rank() -> Any:
        ranks = ranks_of(ways)
        if made == "summands":  # each rank's share of it: gradients of them all are the whole one
            return graded(lambda x: summand_stream(x / ways, ranks, "a sum"))
        return graded(lambda x: cut_stream(cut_positions(x, ranks), ranks, 5))

    want, _ = graded(lambda x: x)
    for got, cut in zf.simulate(ways)(on_rank)():
        assert cut == (name in ON_POSITIONS)
        scaled = [got[0], got[1] * (ways if made == "summands" else 1), *got[2:]]
        for a, b in zip(scaled, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_its_shape_is_known_and_nothing_is_sent_for_it() -> None:
    def on_rank() -> None:
        x = summand_stream(numbers(*SHAPE), ranks_of(2), "a sum")
        with zf.comm.ledger() as led:
            assert (x.shape, x.dtype, x.device.type, x.dim()) == (SHAPE, F64, "cpu", 3)
            assert len(x) == 2 and x.size(-1) == 4 and not x.requires_grad
            assert x[:, :] is x and x.view(-1, 5, 4) is x and x.to(F64) is x
        assert not led.calls_by_label or "a sum" in led.calls_by_label  # a cast looks at positions
        with zf.comm.ledger() as led:
            x.local(), x.local()
        assert not led.calls_by_label

    zf.simulate(2)(on_rank)()


class Doubling(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach() * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


def test_a_function_of_autograd_is_told() -> None:
    def on_rank() -> None:
        x = cut_stream(numbers(2, 2, 4).requires_grad_(), ranks_of(2), 4)
        torch.testing.assert_close(Doubling.apply(x.clone()), x.whole() * 2)
        Doubling.apply(x)

    with pytest.raises(PlacementError, match=r"torch.autograd.Function outside of a layer"):
        zf.simulate(2)(on_rank)()


# --- which layers run on positions ---------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, how: str = "") -> None:
        super().__init__()
        self.how = how
        self.norm, self.up, self.down = nn.LayerNorm(4), nn.Linear(4, 6), nn.Linear(6, 4)
        self.each = nn.BatchNorm1d(4)
        self.places = nn.Parameter(numbers(16, 4).float())

    def forward(self, x: Tensor, *more: Any, scale: float = 1.0) -> Any:
        if self.how == "mixing":
            x = x + x.roll(1, 1)
        if self.how == "counting":
            x = x + self.places[: x.shape[1]]
        if self.how == "counted":  # with numbers of all positions, which evaluation only uses
            x = self.each(x.mT).mT
        y: Tensor = x + scale * self.down(F.gelu(self.up(self.norm(x))))
        if self.how == "telling":
            return y, (self.places[:2] * scale).sum(1)
        return (y, y.mean(1)) if self.how == "summing" else (y, y) if self.how == "twice" else y


class Net(nn.Module):
    def __init__(self, *how: str) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.blocks = nn.ModuleList(Block(x) for x in how)
        self.last, self.head = nn.LayerNorm(4), nn.Linear(4, 7)

    def forward(self, ids: Tensor) -> Tensor:
        x, also = self.table(ids), 0.0
        for block in self.blocks:
            out = block(x, scale=0.5)
            x, also = (out[0], also + out[1].sum()) if isinstance(out, tuple) else (out, also)
        return self.head(self.last(x)) + also  # type: ignore[no-any-return]


def built(*how: str) -> Any:
    torch.manual_seed(0)
    return zf.functionalize(Net(*how).double(), train=False)


IDS = torch.tensor([[0, 1, 2, 3, 6], [6, 5, 2, 0, 4]])


def graded(model: Any, params: Any, ids: Tensor = IDS) -> tuple[Tensor, dict[str, Tensor]]:
    leaves = tree.flatten_names(params)
    out = model.apply(params, ids)
    assert type(out) is Tensor
    weights = torch.arange(out.numel(), dtype=F64).view(out.shape)
    grads = torch.autograd.grad((out * weights).sum(), [*leaves.values()], allow_unused=True)
    return out.detach(), {k: g for k, g in zip(leaves, grads, strict=True) if g is not None}


@pytest.mark.parametrize("ways", [2, 3])
@pytest.mark.parametrize(
    ("how", "cut"),
    [
        (("", ""), (0, 1)),
        (("", "mixing", "", "mixing", ""), (0, 2, 4)),
        (("counting",), ()),
        (("summing", ""), (1,)),
        (("twice", ""), (0, 1)),
        (("telling", "", "telling"), (0, 1, 2)),
    ],
)
@pytest.mark.parametrize("length", [5, 1])
def test_layers_that_mix_positions_stay_on_the_whole_stream(
    how: tuple[str, ...], cut: tuple[int, ...], ways: int, length: int
) -> None:
    model = built(*how)
    for block in model._pool.skeleton.blocks:  # layers that are alike are tried once
        if block.how:
            block.__class__ = type(f"Block{block.how}", (Block,), {})
    plan = plan_of(model, ways, sequence=True)
    assert list(plan.streams) == [f"blocks.{i}" for i in cut]
    assert set(plan.uncut) == {f"blocks.{i}" for i in range(len(how)) if i not in cut}
    full, ids = tree.flatten_names(model.params), IDS[:, :length]
    want, grads = graded(
        model, tree.map(lambda x: x.detach().clone().requires_grad_(), model.params), ids
    )

    def on_rank() -> Any:
        return graded(model, local_params(model, full, plan, zf.rank()), ids)

    for rank, (got, own) in enumerate(zf.simulate(ways)(on_rank)()):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
        assert own.keys() == grads.keys()
        for name, g in own.items():
            split = plan.splits.get(name)
            part = grads[name] if split is None else split.local(grads[name], rank)
            torch.testing.assert_close(g, part, rtol=1e-9, atol=1e-9)


def test_the_plan_says_so() -> None:
    text = str(plan_of(built("", ""), 2, sequence=True))
    assert "on positions of the stream:\n  blocks.{0-1}: x, put together at up\n  last" in text
    text = str(plan_of(built("mixing"), 2, sequence=True))
    assert "on the whole stream:\n  blocks.0: on positions up is given something else" in text
    assert "stream" not in str(plan_of(built(""), 2))


def test_statistics_over_all_positions_stay_so() -> None:
    """A trial as in evaluation would not see them."""
    model = built("", "counted")
    model._pool.skeleton.blocks[1].__class__ = type("Counted", (Block,), {})
    model._pool.skeleton.last = nn.BatchNorm1d(5).to("meta")
    plan = plan_of(model, 2, sequence=True)
    assert list(plan.streams) == ["blocks.0"]
    assert plan.uncut["blocks.1"].startswith("in training it writes to each.running_mean")


def test_nothing_that_runs_on_positions() -> None:
    model = built("mixing")

    def on_mesh() -> Any:
        tx = zf.optim.sgd(0.1)
        step = zf.train_step(lambda p, ids: model.apply(p, ids).sum(), tx)
        step = zf.split(step, model, tensor=2, sequence=True)
        return step.place(zf.TrainState.create(model.params, tx))

    with pytest.raises(PlacementError, match=r"no layer runs on positions.*blocks.0: on positions"):
        zf.simulate(2)(on_mesh)()


def test_a_step_says_how_many_layers_run_so() -> None:
    model = built("", "")

    def on_rank() -> str:
        tx = zf.optim.sgd(0.1)
        step = zf.train_step(lambda p, ids: model.apply(p, ids).sum(), tx)
        step = zf.split(step, model, tensor=2, sequence=True)
        step(step.place(zf.TrainState.create(model.params, tx)), IDS)
        return str(step.describe())

    assert "2 layers on positions of the stream" in zf.simulate(2)(on_rank)()[0]


def test_a_call_keeps_nothing_alive() -> None:
    model = built("")
    plan = plan_of(model, 2, sequence=True)
    full = tree.flatten_names(model.params)

    def on_rank() -> int:
        graded(model, local_params(model, full, plan, zf.rank()))
        gc.collect()
        return sum(issubclass(type(x), CutStream) for x in gc.get_objects())

    assert zf.simulate(2)(on_rank)()[1] == 0
