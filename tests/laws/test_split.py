"""``split``: steps that compute with parts of leaves give what one process gives.

Functional models compute with ``zf.column``, ``zf.row``, ``zf.embed`` and ``zf.cross_entropy``;
modules are in ``test_split_training``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import zfunc as zf
from tests.laws.cases import assert_near, assert_same, numbers
from tests.laws.covering import each
from tests.laws.plans_by_hand import llama
from tests.laws.split_steps import (
    F64,
    HEADS,
    INNER,
    KV,
    RULES,
    SIZE,
    TX,
    WIDTH,
    WORDS,
    Batch,
    alone,
    batch,
    loss_of,
    on_mesh,
    params,
    ranks_of,
    run,
)
from zfunc import optim, tree

PLACES = [
    *((data, 2, stage) for data in (1, 2) for stage in (0, 1, 2, 3)),
    *((1, 2, None), (1, 3, 1), (2, 3, 3)),
]


@pytest.mark.parametrize(("data", "ways", "stage"), PLACES)
def test_a_functional_model_trains_as_in_one_process(
    data: int, ways: int, stage: int | None
) -> None:
    wrap = on_mesh(ways, data, stage, rules=RULES)
    if ways > KV:
        wrap = on_mesh(ways, data, stage, rules={"blocks.*.[qko]*": None, **RULES})
    step = zf.train_step(loss_of, TX)
    for mine in ranks_of(ways, data, lambda: run(step, wrap)):
        assert_near(mine, alone(), 1e-9)


def test_on_one_rank_split_changes_no_bit() -> None:
    step = zf.train_step(loss_of, TX)
    for stage in (None, 0, 3):
        assert_same(run(step, on_mesh(1, 1, stage, rules=RULES)), alone())


Wrap = Callable[[Any], Any]
BESIDE: dict[str, Wrap] = {
    "remat": zf.remat,
    "donate": zf.donate,
    "accumulate": lambda f: zf.accumulate(f, 3),
    "drop_layers": lambda f: zf.drop_layers(f, theta=0.5),
    "offload": lambda f: zf.offload(f, to="cpu"),
    "offload params": lambda f: zf.offload(f, to="cpu", what="params"),
    "quantize": lambda f: zf.quantize(f, start_bits=8, target_bits=8, group_size=2),
}
ROUNDING: dict[str, Wrap] = {
    "precision": zf.precision,
    "onebit": lambda f: zf.compress_grads(f, "onebit", freeze_step=2),
    "int8": lambda f: zf.compress_grads(f, "int8", freeze_step=1),
    "int4": lambda f: zf.compress_grads(f, "int4", freeze_step=1),
}


def beside(other: Wrap, stage: int, dtype: torch.dtype = F64) -> Any:
    """What rank 0 of two by two gives under another transform."""
    wrap, step = on_mesh(2, 2, stage, rules=RULES), zf.train_step(loss_of, TX)
    return ranks_of(2, 2, lambda: run(step, lambda f: other(wrap(f)), lambda: params(dtype)))[0]


@cache
def without(name: str, ranks: int, dtype: torch.dtype = F64) -> Any:
    """The same of so many data ranks without tensor."""
    other, step = {**BESIDE, **ROUNDING}[name], zf.train_step(loss_of, TX)
    on_data = lambda f: other(zf.shard(f, stage=0))  # noqa: E731
    return zf.simulate(ranks)(lambda: run(step, on_data, lambda: params(dtype)))()[0]


@pytest.mark.parametrize(("name", "stage"), each(BESIDE, [0, 1, 3], times=2))
def test_beside_another_transform(name: str, stage: int) -> None:
    assert_near(beside(BESIDE[name], stage), without(name, 1), 1e-9)


@pytest.mark.parametrize(("data", "stage"), each([1, 2], [0, 1, 3]))
def test_offload_to_disk(data: int, stage: int, tmp_path: Path) -> None:
    """What the fuzzer found: norms of what is streamed were those of one tensor rank."""

    def wrap(step: Any) -> Any:
        return zf.offload(on_mesh(2, data, stage, rules=RULES)(step), to="disk", path=tmp_path)

    def body() -> Any:
        with wrap(zf.train_step(loss_of, TX)) as step:
            placed = step.place(zf.TrainState.create(params(), TX)).params
            assert_near(tree.global_norm(placed), tree.global_norm(params()), 1e-12)
            assert_near(tree.leaf_norms(placed), tree.leaf_norms(params()), 1e-12)
            return run(step)

    for mine in ranks_of(2, data, body):
        assert_near(mine, alone(), 1e-9)


@pytest.mark.parametrize(("name", "stage"), each(ROUNDING, [0, 1, 3]))
def test_what_rounds_otherwise_leaves_no_leaf_to_drift(name: str, stage: int) -> None:
    dtype = torch.float32 if name == "precision" else F64
    found, bare = beside(ROUNDING[name], stage, dtype), without(name, 2, dtype)
    assert_near(found[1].params, bare[1].params, 0.2)


OPTIMIZERS = {
    "lamb": optim.lamb(0.02),
    "lion": optim.lion(1e-3),
    "sgd": optim.sgd(0.02, momentum=0.9),
}


@pytest.mark.parametrize(("name", "stage"), each(OPTIMIZERS, [None, 0, 1, 3], times=2))
def test_optimizers_see_full_leaves(name: str, stage: int | None) -> None:
    tx = OPTIMIZERS[name]
    step = zf.train_step(loss_of, tx)
    data = 1 if stage is None else 2
    found = ranks_of(2, data, lambda: run(step, on_mesh(2, data, stage, rules=RULES), tx=tx))
    assert_near(found[0], alone(tx), 1e-9)


@pytest.mark.parametrize("stage", [None, 0, 1, 3])
def test_functions_of_trees_know_the_full_leaves(stage: int | None) -> None:
    full, ways, data = params(), 2, 1 if stage is None else 2

    def body() -> None:
        step = on_mesh(ways, data, stage, rules=RULES)(zf.train_step(loss_of, TX))
        state = step.place(zf.TrainState.create(full, TX))
        assert_same(step.unplace(state).params, full)
        assert_same(zf.full(state.params), full)
        assert_near(tree.global_norm(state.params), tree.global_norm(full), 1e-12)
        assert_near(tree.leaf_norms(state.params), tree.leaf_norms(full), 1e-12)
        assert torch.equal(tree.get(state.params, "blocks.1.kv"), full["blocks"][1]["kv"])
        new = numbers((WIDTH, HEADS * SIZE), 5)
        changed = tree.set(state.params, "blocks.0.out", new)
        assert torch.equal(tree.get(changed, "blocks.0.out"), new)
        assert type(changed) is type(state.params)
        some = tree.select(state.params, lambda path: path.endswith(("kv", "norm")))
        want = tree.select(full, lambda path: path.endswith(("kv", "norm")))
        assert_near(tree.global_norm(some), tree.global_norm(want), 1e-12)
        doubled = tree.whole(lambda x: x * x.sum(), state.params)
        assert_near(zf.full(doubled), tree.map(lambda x: x * x.sum(), full), 1e-12)
        paths = {"params": tree.paths(state.params)}
        assert paths["params"] == tree.paths(full)

    zf.simulate(ways * data)(body)()


@pytest.mark.parametrize("stage", [None, 0, 2, 3])
def test_init_makes_this_ranks_part_alone(stage: int | None) -> None:
    data = 1 if stage is None else 2

    def make() -> Any:
        return zf.TrainState.create(params(), TX, key=3)

    def body() -> None:
        step = on_mesh(2, data, stage, rules=RULES)(zf.train_step(loss_of, TX))
        made, placed = step.init(make), step.place(make())
        assert_same(tree.leaves(made), tree.leaves(placed))
        assert_same(step.unplace(made), make())

    zf.simulate(2 * data)(body)()


def test_a_captured_step_cuts_batches_on_its_mesh() -> None:
    """Tensor ranks have the same rows, data ranks other ones."""
    rows = zf.simulate(4)(
        lambda: zf.captured(on_mesh(2, 2, 0, rules=RULES)(zf.train_step(loss_of, TX))).local_batch(
            batch(0)
        )["ids"]
    )()
    assert_same([rows[0], rows[2]], [rows[1], rows[3]])
    assert torch.equal(torch.cat([rows[0], rows[2]]), batch(0)["ids"])


def test_what_is_placed_says_what_it_is() -> None:
    def body() -> None:
        step = on_mesh(2, 1, 1, rules=RULES)(zf.train_step(loss_of, TX))
        state = step.place(zf.TrainState.create(params(), TX))
        part = state.params["blocks"][0]["up"]
        assert part.shape == (INNER // 2, WIDTH)
        assert torch.equal(zf.full({"w": part})["w"], params()["blocks"][0]["up"])
        assert float(tree.global_norm({"w": part})) == pytest.approx(
            float(params()["blocks"][0]["up"].norm()), abs=1e-12
        )
        text = str(step.describe())
        assert "over 2 ranks of axis 'tensor'" in text and "leaves whole" in text

    zf.simulate(2)(body)()


# Bad input


def placed(rules: Any, ways: int = 2, start: Callable[[], Any] = params) -> None:
    step = on_mesh(ways, 1, 0, rules=rules)(zf.train_step(loss_of, TX))
    step.place(zf.TrainState.create(start(), TX))


@pytest.mark.parametrize(
    ("rules", "ways", "text"),
    [
        ({"blocks.*.uq": zf.Cut(0)}, 2, r"blocks\.\*\.uq.*names no leaf"),
        ({"table": zf.Cut(2)}, 2, r"table has shape .* no dimension 2"),
        ({"table": zf.Cut(0, by=4)}, 2, r"table has shape .*does not fall into"),
        ({"blocks.*.kv": zf.Cut(0, parts=2, by=KV)}, 3, r"falls into 2 blocks .* 3 ranks"),
        ({"table": None}, 2, "nothing is split over 2 ranks"),
    ],
)
def test_rules_that_do_not_fit(rules: Any, ways: int, text: str) -> None:
    with pytest.raises(zf.PlacementError, match=text):
        zf.simulate(ways)(lambda: placed(rules, ways))()


def test_arguments_that_make_no_sense() -> None:
    step = zf.train_step(loss_of, TX)
    with pytest.raises(ValueError, match=r"a model .* or rules"):
        zf.split(step)
    with pytest.raises(ValueError, match=r"tensor=0"):
        zf.split(step, rules=RULES, tensor=0)
    with pytest.raises(ValueError, match=r"axis='replica'.* other rows"):
        zf.split(step, rules=RULES, mesh=zf.mesh(replica=2), axis="replica")
    with pytest.raises(TypeError, match="functionalize"):
        zf.split(step, torch.nn.Linear(2, 2))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"'table': 0.*expected a zf\.Cut"):
        zf.split(step, rules={"table": 0})  # type: ignore[dict-item]
    for row in ((0, 0), (0, 1, -1), (0, 1, 2, 0), ("a",), (0, 1.0)):
        with pytest.raises(ValueError, match="of at least 1"):
            zf.Cut(*row)  # type: ignore[arg-type]
    with pytest.raises(zf.CompositionError, match="split already"):
        zf.split(zf.split(step, rules=RULES), rules=RULES)
    with pytest.raises(zf.CompositionError, match="one mesh"):
        zf.shard(zf.split(step, rules=RULES, tensor=2), mesh=zf.mesh(data=2, tensor=4))


def gated(params: Any, x: torch.Tensor) -> torch.Tensor:
    hidden = zf.column(x, params["gate"]).relu() * zf.column(x, params["up"])
    return zf.row(hidden, params["down"]).square().mean()


@pytest.mark.parametrize("odd", ["gate", "down"])
def test_rules_of_columns_and_rows_that_are_unlike(odd: str) -> None:
    """Ranks have as many features, but others: sizes do not tell."""
    leaves = {name: torch.ones(8, 8) for name in ("gate", "up", "down")}
    alike = {"gate": zf.Cut(0, by=4), "up": zf.Cut(0), "down": zf.Cut(1)}
    unlike = alike | {odd: zf.Cut(int(odd == "down"), parts=2)}

    def train(rules: Any) -> None:
        step = zf.split(zf.train_step(gated, TX), rules=rules, tensor=2)
        step(step.place(zf.TrainState.create(leaves, TX)), torch.ones(2, 8))

    zf.simulate(2)(train)(alike)
    with pytest.raises(zf.PlacementError, match=r"the leaves .*alike|rules alike"):
        zf.simulate(2)(train)(unlike)


def test_offload_to_disk_needs_the_units_of_shard(tmp_path: Path) -> None:
    step = zf.split(zf.train_step(loss_of, TX), rules=RULES, tensor=2)
    step = zf.offload(step, to="disk", path=tmp_path)
    with pytest.raises(zf.CompositionError, match=r"there is no shard\. Add it"):
        zf.simulate(2)(lambda: step.place(zf.TrainState.create(params(), TX)))()


def test_powersgd_is_refused_early() -> None:
    """Its bases belong to parts, and could not be saved."""
    step = zf.compress_grads(zf.train_step(loss_of, TX), "powersgd")
    with pytest.raises(zf.CompositionError, match=r"a basis for each leaf"):
        zf.split(step, rules=RULES)


@pytest.mark.parametrize(
    ("how", "text"),
    [({"group_size": 4}, r"within groups of 4"), ({"groups": 1}, r"share scales over whole")],
)
def test_groups_of_weights_that_a_split_cuts(how: dict[str, int], text: str) -> None:
    def wrap(step: Any) -> Any:
        quantized = zf.quantize(step, start_bits=8, target_bits=8, **how)
        return on_mesh(2, 1, 0, rules=RULES)(quantized)

    with pytest.raises(zf.PlacementError, match=text):
        zf.simulate(2)(lambda: run(zf.train_step(loss_of, TX), wrap, steps=1))()


def test_a_plain_product_with_a_split_leaf_is_told_in_the_first_step() -> None:
    def loss(params: Any, batch: Batch) -> Tensor:
        x = F.embedding(batch["ids"], params["table"])
        p = params["blocks"][0]
        return (F.gelu(x @ p["up"].T) @ p["down"].T + x).square().mean()

    rules = {"blocks.*.up": zf.Cut(0), "blocks.*.down": zf.Cut(1)}

    def body() -> None:
        run(zf.train_step(loss, TX), on_mesh(2, 1, 1, rules=rules), steps=1)

    with pytest.raises(zf.PlacementError, match=r"whole on all ranks of axis 'tensor'.*zf\.column"):
        zf.simulate(2)(body)()


@pytest.mark.parametrize("names", [("up",), ("up", "down")])
def test_a_product_that_is_missing_is_told_in_the_first_step(names: tuple[str, ...]) -> None:
    """There is no whole leaf whose gradient would differ: the loss does."""

    def loss(params: Any, batch: Batch) -> Tensor:
        x = zf.column(F.embedding(batch["ids"], params["table"]), params["up"])
        return (x @ params["down"].T if "down" in params else x).square().mean()

    shapes = {"table": (WORDS, WIDTH), "up": (INNER, WIDTH), "down": (WIDTH, INNER)}
    start = {name: numbers(shapes[name], i) for i, name in enumerate(("table", *names))}
    rules = {name: zf.Cut(i) for i, name in enumerate(names)}

    def body() -> None:
        run(zf.train_step(loss, TX), on_mesh(2, 1, 1, rules=rules), lambda: start, steps=1)

    with pytest.raises(zf.PlacementError, match=r"a loss, which is whole on all ranks.*zf\.row"):
        zf.simulate(2)(body)()


@pytest.mark.parametrize("stage", [None, 0, 3])
def test_a_penalty_that_counts_later_is_told_in_the_call_behind_it(stage: int | None) -> None:
    """``split`` compares whole leaves in the first step, and losses with the rows of each."""

    def loss(params: Any, batch: Batch) -> Tensor:
        first = params["blocks"][0]["up"].norm()
        return loss_of(params, batch) + batch["weight"] * first

    def body() -> None:
        step = on_mesh(2, 1, stage, rules=RULES)(zf.train_step(loss, TX))
        state = step.place(zf.TrainState.create(params(), TX))
        for i, weight in enumerate((0.0, 0.0, 1.0)):
            state, _ = step(state, {**batch(i), "weight": torch.tensor(weight, dtype=F64)})
        with pytest.raises(zf.PlacementError, match=r"gave them other losses.*zf\.column"):
            step(state, {**batch(3), "weight": torch.tensor(1.0, dtype=F64)})

    zf.simulate(2)(body)()


def test_the_model_of_another_step_is_refused() -> None:
    model = zf.functionalize(llama())
    with pytest.raises(zf.CompositionError, match="not the model that the step trains"):
        zf.simulate(2)(
            lambda: zf.split(zf.train_step(loss_of, TX), model, tensor=2).place(
                zf.TrainState.create(params(), TX)
            )
        )()


def test_rules_beside_a_model_leave_parts_whole() -> None:
    module = llama()
    model, start = zf.functionalize(module), zf.functionalize(module).params
    rules = {"*.mlp.up_proj.weight": None, "lm_head*": None}

    def loss(params: Any, batch: Batch) -> Tensor:
        logits = model.apply(params, batch["ids"]).logits[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), batch["ids"][:, 1:].flatten())

    step, words = zf.train_step(loss, TX), module.config.vocab_size
    want = run(step, lambda f: zf.shard(f, stage=0), lambda: start, words=words)

    def body() -> Any:
        wrap = on_mesh(2, 1, 0, model=model, rules=rules)
        split = wrap(step).place(zf.TrainState.create(start, TX)).params.layout
        cut = {slot.path.rpartition("layers.0.")[2] for slot in split.present if slot.split}
        assert "self_attn.q_proj.weight" in cut
        assert not cut & {"mlp.up_proj.weight", "mlp.down_proj.weight", "lm_head.weight"}
        return run(step, wrap, lambda: start, words=words)

    assert_near(ranks_of(2, 1, body)[0], want, 1e-9)
    with pytest.raises(ValueError, match=r"leave leaves whole"):
        zf.split(step, model, rules={"lm_head*": zf.Cut(0)}, tensor=2)
    wrap = on_mesh(2, 1, 0, model=model, rules={"nothing.*": None})
    with pytest.raises(zf.PlacementError, match=r"names no leaf"):
        zf.simulate(2)(lambda: run(step, wrap, lambda: start, words=words))()


def test_a_state_of_another_size_is_refused() -> None:
    step = zf.split(zf.train_step(loss_of, TX), rules=RULES)
    (state,) = zf.simulate(1)(lambda: step.place(zf.TrainState.create(params(), TX)))()
    with pytest.raises(zf.PlacementError):
        zf.simulate(2)(
            lambda: on_mesh(2, 1, None, rules=RULES)(zf.train_step(loss_of, TX))(state, batch(0))
        )()


class _Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(WIDTH, 6), torch.nn.Linear(6, WIDTH)

    def forward(self, x: Tensor, scale: float | Tensor = 1.0) -> Tensor:
        return x + self.down(scale * self.up(x).relu())  # type: ignore[no-any-return]


def _network(outputs: int) -> torch.nn.Module:
    torch.manual_seed(outputs)
    return torch.nn.Sequential(_Block(), _Block(), torch.nn.Linear(WIDTH, outputs)).double()


def _noise(i: int) -> Tensor:
    return torch.randn(4, WIDTH, dtype=F64, generator=torch.Generator().manual_seed(i))


@pytest.mark.parametrize("splits", ["actor", "critic"])
@pytest.mark.parametrize("stage", [0, 3])
def test_two_models_with_leaves_of_the_same_names_of_which_one_is_split(
    splits: str, stage: int
) -> None:
    modules = {"actor": _network(WIDTH), "critic": _network(1)}
    models = {name: zf.functionalize(module) for name, module in modules.items()}
    actor, critic = models["actor"].apply, models["critic"].apply

    def step(state: Any, x: Tensor) -> Any:
        def acting(params: Any, other: Any) -> Tensor:
            return (critic(other, actor(params, x)) - 1).square().mean()

        def judging(params: Any, other: Any) -> Tensor:
            return critic(params, actor(other, x)).square().mean()

        new, losses = {}, {}
        for name, other, loss in (("actor", "critic", acting), ("critic", "actor", judging)):
            losses[name], grads = zf.value_and_grad(loss)(state[name], state[other])
            updates, moments = TX.update(grads, state[f"{name}_tx"], state[name])
            new |= {name: optim.apply_updates(state[name], updates), f"{name}_tx": moments}
        return new, losses

    roles = {"actor": "params", "critic": "params", "actor_tx": "opt_state"}
    roles["critic_tx"] = "opt_state"
    start = {name: model.params for name, model in models.items()}
    start |= {f"{name}_tx": TX.init(params) for name, params in start.items()}

    def body(split: bool) -> Any:
        inner: Any = step
        if split:
            mesh = zf.mesh(data=1, tensor=2)
            inner = zf.split(step, models[splits], mesh=mesh, example=(4, WIDTH))
        own = zf.shard(inner, stage=stage, roles=roles)
        state = own.place(start)
        for i in range(3):
            state, losses = own(state, _noise(i))
        return own.unplace(state), losses

    want = body(False)
    for mine in zf.simulate(2)(lambda: body(True))():
        assert_near(mine, want, 1e-9)


def test_a_plain_tensor_of_whose_gradient_each_rank_has_a_part_is_told() -> None:
    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = torch.nn.ModuleList([_Block(), _Block()]).double()

        def forward(self, x: Tensor, scale: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x, scale)
            return x

    module = Scaled()
    model = zf.functionalize(module)

    def step(state: Any, x: Tensor) -> Any:
        def loss(p: Any) -> Tensor:
            return model.apply(p["model"], x, x @ p["scale"]).square().mean()

        params = {"model": state["params"], "scale": state["scale"]}
        found, grads = zf.value_and_grad(loss)(params)
        updates, moments = TX.update(grads["model"], state["opt_state"], state["params"])
        new = {"params": optim.apply_updates(state["params"], updates), "opt_state": moments}
        return {**new, "scale": state["scale"] - 0.1 * grads["scale"]}, {"loss": found}

    split = zf.split(step, model, tensor=2, example=((4, WIDTH), (4, 1)))

    def body() -> None:
        start = {"params": model.params, "opt_state": TX.init(model.params)}
        split(split.place({**start, "scale": torch.ones(WIDTH, 1, dtype=F64)}), _noise(0))

    with pytest.raises(zf.PlacementError, match=r"a gradient of a plain tensor.*column and row"):
        zf.simulate(2)(body)()
