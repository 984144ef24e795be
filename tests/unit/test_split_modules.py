"""Modules on split leaves: tables, what shares a sum, what is refused, and what stays behind."""

from __future__ import annotations

import gc
import pickle
import weakref
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import optree
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zfunc as zf
from zfunc.errors import CompositionError, PlacementError
from zfunc.layout.splits import Cut, Part, Split, mark
from zfunc.modules.functional import Functional
from zfunc.modules.split_plans import Role, SplitPlan
from zfunc.trees import tree
from zfunc.trees.nodes import NAMESPACE

F64 = torch.float64


class Block(nn.Module):
    """Two columns that read one input, what lies between, a row; a number of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(4, 6, dtype=F64), nn.Linear(4, 6, dtype=F64)
        self.scale = nn.RMSNorm(1, eps=1e-6, dtype=F64)
        self.down = nn.Linear(6, 4, dtype=F64)
        self.units = 6

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.gate(x)) * self.up(x)
        y = self.scale(y.view(*x.shape[:-1], self.units, 1)).flatten(-2)
        return x + self.down(y)


class Model(nn.Module):
    def __init__(self, vocab: int = 7, padding: int | None = 2) -> None:
        super().__init__()
        self.table = nn.Embedding(vocab, 4, padding_idx=padding, dtype=F64)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, vocab, dtype=F64)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


def plan_of(ways: int, table: Split | None = None) -> SplitPlan:
    splits, roles, attributes = {}, {}, {}
    for i in range(2):
        up, down = Cut(0).split((6,), ways), Cut(1).split((4, 6), ways)
        name = f"blocks.{i}"
        for column in ("gate", "up"):
            splits |= {f"{name}.{column}.weight": up, f"{name}.{column}.bias": up}
        splits[f"{name}.down.weight"] = down
        roles |= {f"{name}.gate": Role.COLUMN, f"{name}.up": Role.COLUMN}
        roles |= {f"{name}.scale": Role.BETWEEN, f"{name}.down": Role.ROW}
        attributes[name] = {"units": tuple(map(up.width, range(ways)))}
    table = table or Cut(0).split((7, 4), ways)
    splits |= {"table.weight": table, "head.weight": table, "head.bias": table}
    return SplitPlan(ways, splits, roles | {"table": Role.EMBED, "head": Role.HEAD}, attributes)


def built(module: Callable[[], nn.Module] = Model) -> Functional:
    torch.manual_seed(0)
    return zf.functionalize(module(), train=False)


def local(model: Functional, plan: SplitPlan) -> Any:
    """This rank's part of the params, differentiable."""
    mesh = zf.mesh(data=1, tensor=plan.ways)

    def own(name: str, x: Tensor) -> Tensor:
        split = plan.splits.get(name)
        mine = x if split is None else split.local(x, zf.rank())
        part = Part(split, mesh, "tensor", plan)
        return mark(mine.detach().clone().requires_grad_(), part)

    full = tree.flatten_names(model.params)
    return model._pool.anatomy.tree({name: own(name, x) for name, x in full.items()})


IDS = torch.tensor([[0, 1, 2, 3], [6, 5, 2, 0]])


def graded(model: Functional, params: Any, ids: Tensor = IDS) -> tuple[Tensor, dict[str, Tensor]]:
    leaves = tree.flatten_names(params)
    out = model.apply(params, ids)
    grads = torch.autograd.grad(out.square().mean(), [*leaves.values()])
    return out.detach(), dict(zip(leaves, grads, strict=True))


def assert_like_whole(model: Functional, plan: SplitPlan, x: Tensor = IDS) -> None:
    whole = tree.map(lambda x: x.detach().clone().requires_grad_(), model.params)
    want, grads = graded(model, whole, x)

    for rank, (got, own) in enumerate(
        zf.simulate(plan.ways)(lambda: graded(model, local(model, plan), x))()
    ):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)
        for name, g in own.items():
            split = plan.splits.get(name)
            part = grads[name] if split is None else split.local(grads[name], rank)
            torch.testing.assert_close(g, part, rtol=1e-9, atol=1e-12)


TABLES = {
    "even": None,
    "several runs": Split.of(0, [[0, 3, 6], [1, 2, 4, 5]]),
    "a rank without rows": Split(0, 7, (((0, 7),), ())),
}


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("padding", [None, 2, 6])
def test_tables(table: str, padding: int | None) -> None:
    assert_like_whole(built(lambda: Model(padding=padding)), plan_of(2, TABLES[table]))


@pytest.mark.parametrize("ways", [1, 2, 3, 4])
def test_uneven_parts(ways: int) -> None:
    assert_like_whole(built(), plan_of(ways))


@pytest.mark.parametrize("wrong", [-1, 7])
def test_an_id_that_no_rank_has_is_an_error_as_on_one_process(wrong: int) -> None:
    model, plan = built(), plan_of(2)
    ids = torch.tensor([[0, wrong]])
    with pytest.raises(IndexError):
        model.apply(model.params, ids)
    with pytest.raises(IndexError):
        zf.simulate(2)(lambda: model.apply(local(model, plan), ids))()


class Scaled(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 3 + 1


def test_a_table_does_what_its_own_forward_does() -> None:
    def made() -> nn.Module:
        model = Model()
        model.table = Scaled(7, 4, dtype=F64)
        return model

    assert_like_whole(built(made), plan_of(3))


# --- sums that are shared ----------------------------------------------------------------------


def sums(module: Callable[[], nn.Module] = Model, *wrap: Any) -> dict[str, int]:
    model, plan = built(module), plan_of(2)

    def rank() -> dict[str, int]:
        params = local(model, plan)
        with zf.comm.ledger() as led:
            graded(model, params)
        return led.calls_by_label

    return zf.simulate(2)(rank)()[0]


def test_columns_that_read_one_input_share_a_sum() -> None:
    calls = sums()
    assert calls["tensor forward"] == calls["tensor backward"] == 2


class TwoInputs(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.gate(x)) * self.up(x * 2)
        y = self.scale(y.view(*x.shape[:-1], self.units, 1)).flatten(-2)
        return x + self.down(y)


class Checkpointed(Block):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return out


def of(block: type[Block]) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        model = Model()
        model.blocks = nn.ModuleList([block(), block()])
        return model

    return made


@pytest.mark.parametrize("block", [TwoInputs, Checkpointed])
def test_other_blocks(block: type[Block]) -> None:
    assert_like_whole(built(of(block)), plan_of(2))


def test_inputs_that_differ_have_sums_of_their_own() -> None:
    assert sums(of(TwoInputs))["tensor backward"] == 4


class Latent(nn.Module):
    """A whole product of which a split one reads some outputs, and every part the others."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.latent = nn.Linear(4, 6, dtype=F64), nn.Linear(4, 4, dtype=F64)
        self.norm, self.keys = nn.LayerNorm(3, dtype=F64), nn.Linear(3, 6, dtype=F64)
        self.out = nn.Linear(6, 4, dtype=F64)

    def forward(self, x: Tensor) -> Tensor:
        low, direct = self.latent(x).split([3, 1], dim=-1)
        y = torch.tanh(self.queries(x)) * self.keys(input=self.norm(low)) + direct
        return x + self.out(torch.tanh(y))


@pytest.mark.parametrize("ways", [2, 3, 4])
def test_whole_products_that_parts_read(ways: int) -> None:
    model = built(lambda: nn.Sequential(Latent(), Latent()))
    splits, roles = {}, {}
    for i in range(2):
        for name in ("queries", "keys"):
            splits[f"{i}.{name}.weight"] = Cut(0).split((6, 4), ways)
            splits[f"{i}.{name}.bias"] = Cut(0).split((6,), ways)
        splits[f"{i}.out.weight"] = Cut(1).split((4, 6), ways)
        roles |= {f"{i}.queries": Role.COLUMN, f"{i}.latent": Role.FEED}
        roles |= {f"{i}.norm": Role.BETWEEN, f"{i}.out": Role.ROW}
    x = torch.randn(3, 4, dtype=F64, generator=torch.Generator().manual_seed(1))
    assert_like_whole(model, SplitPlan(ways, splits, roles), x)


def test_gradients_by_torch_func() -> None:
    model, plan = built(), plan_of(2)

    def rank() -> tuple[Tensor, Tensor]:
        params = local(model, plan)
        by_func = torch.func.grad(lambda p: model.apply(p, IDS).square().mean())(params)
        plain = graded(model, params)[1]
        return tree.flatten_names(by_func)["table.weight"], plain["table.weight"]

    for got, want in zf.simulate(2)(rank)():
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)


# --- what is refused ---------------------------------------------------------------------------


def call(model: Functional, plan: SplitPlan, *args: Any, **kwargs: Any) -> Any:
    return zf.simulate(plan.ways)(lambda: model.apply(local(model, plan), *args, **kwargs))()


def test_a_model_that_is_not_the_one_of_the_plan() -> None:
    model, other, plan = built(), built(lambda: nn.Linear(4, 4)), plan_of(2)

    def rank() -> None:
        other.apply(local(model, plan), torch.ones(4))

    with pytest.raises(CompositionError, match=r"this Linear.*no leaf blocks.0.gate.weight.*split"):
        zf.simulate(2)(rank)()


def test_a_plan_of_other_sizes() -> None:
    model, plan = built(), plan_of(2)
    wrong = {**plan.splits, "head.bias": Cut(0).split((9,), 2)}
    with pytest.raises(CompositionError, match=r"head.bias has shape \(7,\), not size 9"):
        model._pool.split(replace(plan, splits=wrong), 0)
    with pytest.raises(CompositionError, match="no submodule tail"):
        model._pool.split(replace(plan, roles={"tail": Role.ROW}), 0)
    numbers = {"head.in_features": 5, "blocks.0.down.in_features": 6}
    with pytest.raises(CompositionError, match=r"its head.in_features is 4, and 5 in the model"):
        model._pool.split(replace(plan, numbers=numbers), 0)


WRONG: dict[str, tuple[dict[str, Split], dict[str, Role], str]] = {
    "a role without a split": (
        {"head.bias": Cut(0).split((7,), 2)},
        {"blocks.0.gate": Role.COLUMN},
        "does not split blocks.0.gate",
    ),
    "a row cut as a column": (
        {"blocks.0.down.weight": Cut(0).split((4, 6), 2)},
        {"blocks.0.down": Role.ROW},
        "along dimension 0. Split it along 1",
    ),
    "rows of a table twice": (
        {"table.weight": Split.of(0, [[0, 1, 2, 3], [3, 4, 5, 6]])},
        {"table": Role.EMBED},
        "several ranks",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_roles_that_leaves_do_not_fit(wrong: str) -> None:
    splits, roles, said = WRONG[wrong]
    with pytest.raises(CompositionError, match=said):
        call(built(), SplitPlan(2, splits, roles), IDS)


class Biased(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


def test_a_row_that_does_more_than_multiply() -> None:
    def made(bias: bool) -> nn.Module:
        model = Model()
        for block in model.blocks:
            block.down = Biased(6, 4, bias=bias, dtype=F64)
        return model

    assert_like_whole(built(lambda: made(bias=False)), plan_of(2))
    with pytest.raises(CompositionError, match=r"blocks.0.down a row.*Biased.*bias is not known"):
        call(built(lambda: made(bias=True)), plan_of(2), IDS)


def test_gradients_scaled_by_frequency() -> None:
    def made() -> nn.Module:
        model = Model()
        model.table = nn.Embedding(7, 4, scale_grad_by_freq=True, dtype=F64)
        return model

    with pytest.raises(CompositionError, match="table scales gradients by how often"):
        call(built(made), plan_of(2), IDS)


class Talkative(Model):
    def forward(self, ids: Tensor, output_attentions: bool = False) -> Tensor:
        return super().forward(ids)


def test_scores_of_all_heads() -> None:
    with pytest.raises(CompositionError, match="output_attentions=True asks for"):
        call(built(Talkative), plan_of(2), IDS, output_attentions=True)
    call(built(Talkative), plan_of(2), IDS, output_attentions=False)


def test_scores_of_all_heads_by_configuration() -> None:
    def made() -> nn.Module:
        model = Model()
        model.config = SimpleNamespace(output_attentions=True)  # type: ignore[assignment]
        return model

    with pytest.raises(CompositionError, match="output_attentions=True in its config asks for"):
        call(built(made), plan_of(2), IDS)


def test_params_of_another_number_of_ranks() -> None:
    model, plan = built(), plan_of(2)

    def rank() -> None:
        part = Part(Cut(0).split((7, 4), 3), zf.mesh(data=1, tensor=3), "tensor", plan)
        model.apply(tree.map(lambda x: mark(x.clone(), part), model.params), IDS)

    with pytest.raises(CompositionError, match="for 2 ranks, and axis 'tensor' has 3"):
        zf.simulate(3)(rank)()


def test_copies_of_leaves_do_not_say_that_they_are_parts() -> None:
    model, plan = built(), plan_of(2)

    def rank() -> None:
        params = local(model, plan)
        model.apply(optree.tree_map(lambda x: x * 1, params, namespace=NAMESPACE), IDS)

    with pytest.raises(PlacementError, match=r"of another shape: .*\(4, 4\) instead of \(7, 4\)"):
        zf.simulate(2)(rank)()


def test_leaves_that_rules_alone_have_split() -> None:
    model = built()

    def rank() -> None:
        part = Part(Cut(0).split((7, 4), 2), zf.mesh(data=1, tensor=2), "tensor")
        model.apply(tree.map(lambda x: mark(x.clone(), part), model.params), IDS)

    with pytest.raises(PlacementError, match=r"along 'tensor' by rules alone.*zf.split"):
        zf.simulate(2)(rank)()


# --- copies of the module ----------------------------------------------------------------------


def test_a_plan_has_one_pool_for_each_rank() -> None:
    pool, plan = built()._pool, plan_of(2)
    assert pool.split(plan, 0) is pool.split(plan, 0) is pool.split(replace(plan), 0)
    assert pool.split(plan, 0) is not pool.split(plan, 1)
    assert [tuple(x.shape) for x in pool.split(plan, 1).anatomy.root][1:] == [(3, 4), (3,)]


def test_a_plan_changes_neither_the_module_nor_its_numbers() -> None:
    model, plan = built(), plan_of(3)
    before = model.apply(model.params, IDS)
    call(model, plan, IDS)
    assert torch.equal(model.apply(model.params, IDS), before)
    assert model._pool.skeleton.blocks[0].units == 6  # type: ignore[union-attr,index]
    pickle.loads(pickle.dumps(model))


class Configured(nn.Module):
    """Its parts have one configuration."""

    def __init__(self) -> None:
        super().__init__()
        self.config = type("Config", (), {})()
        self.config.heads, self.part = 4, nn.Linear(2, 2)
        self.part.config = self.config


def test_a_dotted_number_belongs_to_a_copy() -> None:
    model = zf.functionalize(Configured())
    plan = SplitPlan(2, {}, {}, {"part": {"config.heads": (3, 1)}})
    module: Any = model._pool.split(plan, 1).skeleton
    assert (module.part.config.heads, module.config.heads) == (1, 4)


def test_nothing_of_a_call_stays_behind() -> None:
    model, plan = built(), plan_of(2)

    def rank() -> list[Any]:
        params = local(model, plan)
        out = model.apply(params, IDS)
        with model.held(params) as held:
            held(IDS).sum().backward()
        leaves = [weakref.ref(x) for x in tree.leaves(params)]
        return [weakref.ref(out.grad_fn), *leaves]

    refs = [ref for found in zf.simulate(2)(rank)() for ref in found]
    gc.collect()
    assert [ref for ref in refs if ref() is not None] == []
    idle = [template for r in range(2) for template in model._pool.split(plan, r).idle]
    assert idle and all(template.wiring.ranks is None for template in idle)


def test_dropout_that_is_off_is_told_once_of_split_models_too() -> None:
    module = nn.Sequential(nn.Linear(4, 6, dtype=F64), nn.Dropout(0.5), nn.Linear(6, 4, dtype=F64))
    model = zf.functionalize(module.eval())
    splits = {"0.weight": Cut(0).split((6, 4), 2), "0.bias": Cut(0).split((6,), 2)}
    splits["2.weight"] = Cut(1).split((4, 6), 2)
    plan = SplitPlan(2, splits, {"0": Role.COLUMN, "2": Role.ROW})

    def rank() -> Tensor:
        params, x = local(model, plan), torch.ones(3, 4, dtype=F64)
        return torch.stack([model.apply(params, x).detach() for _ in range(2)])

    with pytest.warns(UserWarning, match="differentiated in eval mode") as told:
        first, second = zf.simulate(2)(rank)()
    assert len(told) == 1
    assert torch.equal(first, second)
