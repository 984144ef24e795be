"""A module's ``requires_grad_(False)`` is kept: no gradient, no moments, no update, no decay."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
import torch.utils._pytree as torch_pytree
from torch import Tensor, nn

import zfunc as zf
from zfunc import optim, tree
from zfunc.layout.freezing import freeze, is_frozen

LR, DECAY, STEPS, RANKS = 1e-2, 0.1, 3, 3
TX = optim.adamw(LR, weight_decay=DECAY)


class Low(nn.Module):
    """A frozen linear layer and its trained change of rank 2, as LoRA has it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(2, base.in_features))
        self.b = nn.Parameter(torch.randn(base.out_features, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.a.T @ self.b.T


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 5)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(4)])
        self.head = nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def backbone() -> nn.Module:
    net = Net()
    net.embed.requires_grad_(False)
    net.blocks[:2].requires_grad_(False)
    net.blocks[2][0].bias.requires_grad_(False)
    return net


def lora() -> nn.Module:
    net = Net().requires_grad_(False)
    for block in net.blocks:
        block[0] = Low(block[0])
    return net


def one_list() -> nn.Module:
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
    net[0].requires_grad_(False)
    return net


def flat() -> nn.Module:
    net = nn.Linear(3, 1)
    net.weight.requires_grad_(False)
    return net


MODULES = {"backbone": backbone, "lora": lora, "one list": one_list, "flat": flat}


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODULES[name]().double()


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(STEPS, 12, 3, generator=generator, dtype=torch.float64)
    return [(part, part.sum(1, keepdim=True)) for part in x]


def loss_of(f: zf.Functional) -> Callable[[Any, Any], Tensor]:
    return lambda p, b: (f.apply(p, b[0]) - b[1]).square().mean()


def by_torch(module: nn.Module, trained: Callable[[str], bool]) -> dict[str, Tensor]:
    """What torch's AdamW makes of the module."""
    for name, p in module.named_parameters():
        p.requires_grad_(trained(name))
    adam = torch.optim.AdamW(
        [p for p in module.parameters() if p.requires_grad], LR, eps=1e-8, weight_decay=DECAY
    )
    for x, y in batches():
        adam.zero_grad()
        (module(x) - y).square().mean().backward()
        adam.step()
    return {name: p.detach() for name, p in module.named_parameters()}


def of_a_state(f: zf.Functional) -> Any:
    return zf.TrainState.create(f.params, TX)


def of_a_dict(f: zf.Functional) -> Any:
    return {"params": f.params, "opt_state": TX.init(f.params)}


def step_on_a_dict(f: zf.Functional) -> Any:
    def step(state: Any, batch: Any) -> Any:
        loss, grads = zf.value_and_grad(loss_of(f))(state["params"], batch)
        updates, opt_state = TX.update(grads, state["opt_state"], state["params"])
        params = optim.apply_updates(state["params"], updates)
        return {"params": params, "opt_state": opt_state}, loss

    return zf.Step(step)


KINDS: dict[str, tuple[Any, Any]] = {
    "TrainState": (of_a_state, lambda f: zf.train_step(loss_of(f), TX)),
    "dict": (of_a_dict, step_on_a_dict),
}
WAYS: dict[str, Callable[[Any], Any]] = {
    "bare": lambda step: step,
    **{f"stage {n}": lambda step, n=n: zf.shard(step, stage=n, unit_bytes=1) for n in range(4)},
    "one unit": lambda step: zf.shard(step, stage=3),
    "donate": lambda step: zf.donate(zf.shard(step, stage=2)),
    "remat": lambda step: zf.remat(zf.shard(step, stage=3, unit_bytes=1)),
    "accumulate": lambda step: zf.accumulate(zf.shard(step, stage=1), 2),
    "bare remat": zf.remat,
}


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        *(("TrainState", way) for way in WAYS),
        *(("dict", f"stage {n}") for n in range(4)),
        ("dict", "bare"),
    ],
)
@pytest.mark.parametrize("name", MODULES)
def test_the_numbers_of_torch_and_frozen_leaves_bit_for_bit(name: str, kind: str, way: str) -> None:
    start, step_of = KINDS[kind]
    f = zf.functionalize(made(name))
    before = {path: x.clone() for path, x in tree.flatten_names(f.params).items()}
    assert set(f.frozen) == {n for n, p in made(name).named_parameters() if not p.requires_grad}

    def run() -> dict[str, Tensor]:
        step = WAYS[way](step_of(f))
        state = step.place(start(f))
        for batch in batches():
            state, _ = step(state, batch if "bare" in way else zf.local_batch(batch))
        state = step.unplace(state)
        return tree.flatten_names(state["params"] if kind == "dict" else state.params)

    found = run() if "bare" in way else zf.simulate(RANKS)(run)()[0]
    expected = by_torch(made(name), lambda path: path not in f.frozen)
    for path, x in expected.items():
        torch.testing.assert_close(found[path], x, rtol=1e-9, atol=1e-9)
        assert torch.equal(found[path], before[path]) == (path in f.frozen), path


COPIES: dict[str, Callable[[Any], Any]] = {
    "itself": lambda params: params,
    "tree.map": lambda params: tree.map(torch.clone, params),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda params: pickle.loads(pickle.dumps(params)),
    "torch's pytree": lambda params: torch_pytree.tree_map(torch.clone, params),
    "optree": lambda params: optree.tree_map(torch.clone, params, namespace="zfunc"),
    "tree.full": tree.full,
}


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("name", MODULES)
def test_copies_cannot_lose_it(name: str, way: str) -> None:
    f = zf.functionalize(made(name))
    params = COPIES[way](f.params)
    _, grads = zf.value_and_grad(loss_of(f))(params, batches()[0])
    paths, leaves = (
        tree.paths(grads),
        optree.tree_leaves(grads, none_is_leaf=True, namespace="zfunc"),
    )
    assert {path for path, g in zip(paths, leaves, strict=True) if g is None} == set(f.frozen)
    moments = TX.init(params)
    assert tree.paths(tree.select(moments.mu, lambda path: True)) == paths
    assert set(tree.flatten_names(moments.mu)) == set(paths) - set(f.frozen)


def test_parts_of_a_tree_and_trees_of_parts() -> None:
    f, g = zf.functionalize(made("backbone")), zf.functionalize(made("flat"))
    both = {"a": tree.map(torch.clone, f.params), "b": tree.map(torch.clone, g.params)}

    def loss(p: Any, x: Tensor) -> Tensor:
        return (f.apply(p["a"], x) + g.apply(p["b"], x)).square().mean()

    _, grads = zf.value_and_grad(loss)(both, batches()[0][0])
    missing = set(tree.paths(grads)) - set(tree.flatten_names(grads))
    assert missing == {*(f"a.{n}" for n in f.frozen), *(f"b.{n}" for n in g.frozen)}

    part = tree.map(torch.clone, f.params)["blocks"][2]["0"]
    _, grads = zf.value_and_grad(lambda p: p["weight"].sum() + p["bias"].sum())(part)
    assert grads["bias"] is None and grads["weight"] is not None

    for changed in (part.copy(), part | {"bias": torch.ones(5, dtype=torch.float64)}):
        _, grads = zf.value_and_grad(lambda p: p["weight"].sum() + p["bias"].sum())(changed)
        assert grads["bias"] is None

    grads = {"weight": torch.ones(5, 5), "bias": None}  # trees without marks go along with it
    assert torch.equal(tree.map(torch.add, grads, part)["weight"], part["weight"] + 1)
    assert tree.map(torch.add, part, part)["bias"] is not None
    with pytest.raises(zf.PlacementError, match="bias"):
        tree.map(torch.add, part, {"weight": torch.ones(5, 5)})


def test_a_module_without_frozen_parameters_is_a_tree_of_dicts() -> None:
    f = zf.functionalize(Net())
    assert f.frozen == () and type(f.params) is dict and type(f.params["blocks"][0]["0"]) is dict


@pytest.mark.parametrize("stage", [None, 0, 3])
@pytest.mark.parametrize("name", MODULES)
def test_trainable_overrides_it(name: str, stage: int | None) -> None:
    module = made(name)  # held: its parameters are placed time and again
    f = zf.functionalize(module)
    first = tree.paths(f.params)[0]

    for trained in (lambda path: True, lambda path: path != first):

        def run(trained: Callable[[str], bool] = trained) -> dict[str, Tensor]:
            step = zf.train_step(loss_of(f), TX)
            step = step if stage is None else zf.shard(step, stage=stage)
            state = step.place(zf.TrainState.create(f.params, TX, trainable=trained))
            assert set(state.frozen) == {p for p in tree.paths(f.params) if not trained(p)}
            for batch in batches():
                state, _ = step(state, batch if stage is None else zf.local_batch(batch))
            return tree.flatten_names(step.unplace(state).params)

        found = run() if stage is None else zf.simulate(2)(run)()[0]
        for path, x in by_torch(made(name), trained).items():
            torch.testing.assert_close(found[path], x, rtol=1e-9, atol=1e-9)
    assert set(f.frozen)  # the functional itself is as it was
    _, grads = zf.value_and_grad(loss_of(f))(f.params, batches()[0])
    assert set(tree.paths(grads)) - set(tree.flatten_names(grads)) == set(f.frozen)


ALIKE: dict[str, Callable[[Any, Any], Any]] = {
    "disk": lambda step, path: zf.offload(zf.shard(step, unit_bytes=1), to="disk", path=path),
    "disk, whole": lambda step, path: zf.offload(zf.shard(step, stage=0), to="disk", path=path),
    "precision": lambda step, path: zf.precision(zf.shard(step, stage=2)),
    "onebit": lambda step, path: zf.compress_grads(zf.shard(step, stage=0), freeze_step=1),
    "int8": lambda step, path: zf.compress_grads(zf.shard(step, stage=3), method="int8"),
    "zero_one": lambda step, path: zf.compress_grads(
        zf.shard(step, stage=0), method="zero_one", freeze_step=1
    ),
    "drop_layers": lambda step, path: zf.drop_layers(zf.shard(step)),
    "quantize": lambda step, path: zf.quantize(zf.shard(step), period=1),
}


@pytest.mark.parametrize("way", ALIKE)
@pytest.mark.parametrize("name", ["backbone", "lora"])
def test_every_transform_sees_what_trainable_says(name: str, way: str, tmp_path: Any) -> None:
    by_module = zf.functionalize(made(name).float())
    by_word = zf.functionalize(made(name).float().requires_grad_(True))

    def run(f: zf.Functional, trained: Any, path: Any) -> dict[str, Tensor]:
        with ALIKE[way](zf.train_step(loss_of(f), TX), path) as step:
            state = step.place(zf.TrainState.create(f.params, TX, trainable=trained))
            for x, y in batches():
                state, _ = step(state, zf.local_batch((x.float(), y.float())))
            return tree.flatten_names(step.unplace(state).params)

    def trained(path: str) -> bool:
        return path not in by_module.frozen

    a = zf.simulate(2)(run)(by_module, None, tmp_path / "a")[0]
    b = zf.simulate(2)(run)(by_word, trained, tmp_path / "b")[0]
    for path, x in a.items():
        assert torch.equal(x, b[path]), path


@pytest.mark.parametrize("stage", [None, 0, 1, 3])
def test_a_teacher_is_applied_and_not_differentiated(stage: int | None) -> None:
    held = made("backbone").requires_grad_(False), made("backbone")  # they are placed twice
    teacher, student = map(zf.functionalize, held)
    (x, y), loss = batches()[0], loss_of(teacher)
    expected = made("backbone")(x)
    assert torch.equal(teacher.apply(teacher.params, x), expected)
    assert torch.equal(zf.evaluate(teacher.apply)(teacher.params, x), expected)
    with pytest.raises(zf.PlacementError, match="all parameters are frozen"):
        zf.TrainState.create(teacher.params, TX)
    with pytest.raises(zf.PlacementError, match="all parameters are frozen"):
        zf.value_and_grad(loss)(teacher.params, (x, y))

    def distilled(state: Any, batch: Any) -> Any:
        def loss(p: Any, teaching: Any) -> Tensor:
            return (student.apply(p, batch[0]) - teacher.apply(teaching, batch[0]) - 1).abs().mean()

        return state, zf.value_and_grad(loss)(state["params"], state["teacher"])

    def backwards(state: Any, batch: Any) -> Any:
        return state, zf.value_and_grad(loss)(state["teacher"], batch)

    def run(fn: Any) -> Any:
        step = zf.Step(fn)
        if stage is not None:
            step = zf.shard(step, stage=stage, roles={"teacher": "params"})
        state = step.place({"params": student.params, "teacher": teacher.params})
        return tree.full(step(state, (x, y))[1])

    def both(fn: Any) -> Any:
        return run(fn) if stage is None else zf.simulate(2)(lambda: run(fn))()[0]

    value, grads = both(distilled)
    assert float(value) == pytest.approx(1.0)
    assert set(tree.paths(grads)) - set(tree.flatten_names(grads)) == set(student.frozen)
    with pytest.raises(zf.PlacementError, match="all parameters are frozen"):
        both(backwards)


def test_saved_and_restored(tmp_path: Any) -> None:
    f = zf.functionalize(made("lora"))
    step = zf.train_step(loss_of(f), TX)
    state, _ = step(zf.TrainState.create(f.params, TX), batches()[0])
    zf.save(tmp_path, state)
    back = zf.restore(tmp_path, like=zf.TrainState.create(f.params, TX))
    a, b = step(state, batches()[1])[0], step(back, batches()[1])[0]
    for path, x in tree.flatten_names(a.params).items():
        assert torch.equal(tree.get(b.params, path), x)
    assert back.frozen == f.frozen == a.frozen

    zf.export_safetensors(tmp_path / "model.safetensors", a.params)
    read = zf.import_safetensors(tmp_path / "model.safetensors", like=f.params)
    _, grads = zf.value_and_grad(loss_of(f))(read, batches()[0])
    assert set(tree.paths(grads)) - set(tree.flatten_names(grads)) == set(f.frozen)


def test_a_state_that_is_made_in_parts() -> None:
    f = zf.functionalize(made("lora"))

    def make() -> Any:
        torch.manual_seed(0)
        return zf.TrainState.create(zf.functionalize(lora().double()).params, TX)

    def run() -> Any:
        step = zf.shard(zf.train_step(loss_of(f), TX), stage=3)
        state, _ = step(step.init(make), zf.local_batch(batches()[0]))
        return state.frozen, tree.flatten_names(tree.full(state.params))

    still, found = zf.simulate(2)(run)()[0]
    before = tree.flatten_names(make().params)
    assert still == f.frozen
    for path, x in before.items():
        assert torch.equal(found[path], x) == (path in still)


def test_what_is_frozen_costs_no_moments_and_no_traffic() -> None:
    f = zf.functionalize(Low(nn.Linear(256, 256)))
    trained, everything = 2 * 2 * 256, 256 * 257 + 2 * 2 * 256
    batch = torch.randn(4, 256), torch.randn(4, 256)

    def run() -> Any:
        step = zf.shard(zf.train_step(loss_of(f), TX), stage=0)
        state, _ = step(step.place(zf.TrainState.create(f.params, TX)), batch)
        with zf.comm.ledger() as sent:
            step(state, batch)
        return tree.size_bytes(state.opt_state), tree.size_bytes(state.params), sent.total_bytes

    moments, held, total = zf.simulate(2)(run)()[0]
    assert 8 * trained <= moments < 8 * trained + 64
    assert held >= 4 * everything
    assert 4 * trained <= total < 4 * trained + 256


def test_what_takes_the_place_of_a_frozen_leaf_is_frozen_there_alone() -> None:
    params = {"a": freeze(torch.ones(2)), "b": torch.ones(2)}
    theirs = {"a": torch.zeros(2, requires_grad=True), "b": torch.zeros(2)}
    new = tree.map(lambda p, q: q, params, theirs)
    assert is_frozen(new["a"]) and not is_frozen(theirs["a"])
    assert new["a"].data_ptr() == theirs["a"].data_ptr() and new["b"] is theirs["b"]
    new["a"].sum().backward()
    assert theirs["a"].grad is not None
