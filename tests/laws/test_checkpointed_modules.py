"""``torch.utils.checkpoint`` inside a module or a loss: the numbers of the one without it."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils import checkpoint as theirs
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import zfunc as zf
from tests.laws.cases import assert_near, assert_same
from zfunc import optim, tree

F64 = torch.float64
WIDTH = 6
Form = bool | None


class LoRA(nn.Module):
    """A frozen product, and a trained one of low rank beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.a = nn.Parameter(torch.randn(2, WIDTH) * 0.5)
        self.b = nn.Parameter(torch.randn(WIDTH, 2) * 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.a.T @ self.b.T


class Block(nn.Module):
    """Checkpoints its inner part, with keywords, a dict of outputs and a region inside it."""

    def __init__(self, form: Form, rate: float) -> None:
        super().__init__()
        self.lora, self.norm, self.out = LoRA(), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("calls", torch.ones((), dtype=F64))
        self.form, self.rate = form, rate

    def inner(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.lora(x)))

    def part(self, x: Tensor, scale: float) -> tuple[Any, str]:
        RUNS.append(1)
        self.calls += 1  # read below: the second run must find the value that the first one found
        y = self.inner(x) if self.form is None else checkpoint(self.inner, x, use_reentrant=False)
        y = F.dropout(y * scale / self.calls, self.rate, self.training)
        return {"y": self.out(y), "none": None}, "two"

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls * 1.5
        if self.form is None:
            out, _ = self.part(x, 2.0)
        elif self.form:
            out, word = checkpoint(self.part, x, 2.0, use_reentrant=True)
            assert word == "two"
        else:
            out, _ = checkpoint(self.part, x, scale=2.0, use_reentrant=False)
        return x + out["y"]


RUNS: list[int] = []


class Net(nn.Module):
    """Nothing before its blocks is trained; ``around`` checkpoints whole layers, too."""

    def __init__(self, form: Form, around: Form = None, rate: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, WIDTH).requires_grad_(False)
        self.blocks = nn.ModuleList(Block(form, rate) for _ in range(3))
        self.tail = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, 1)
        self.unused = nn.Parameter(torch.zeros(3))
        self.around, self.form = around, form

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x) if self.around is None else checkpoint(block, x, use_reentrant=self.around)
        if self.form is None:
            return self.head(self.tail(x))
        return self.head(checkpoint_sequential(self.tail, 2, x, use_reentrant=self.form))


def net(form: Form, around: Form = None, rate: float = 0.0) -> Net:
    torch.manual_seed(0)
    return Net(form, around, rate).double().train()


IDS = torch.arange(14).view(14) * 5 % 9
Y = torch.linspace(-1, 1, 14, dtype=F64)[:, None]


def judged() -> tuple[Tensor, dict[str, Tensor]]:
    """Plain torch, without a checkpoint: the loss and the gradients of those that are trained."""
    module = net(None)
    loss = (module(IDS) - Y).square().mean()
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in module.named_parameters() if p.grad is not None}


def losing(module: nn.Module) -> tuple[Any, Callable[..., Any]]:
    f = zf.functionalize(module)

    def loss_fn(params: Any, batch: Any) -> tuple[Tensor, Any]:
        out, buffers = f.apply(params, batch[0], mutable=True)
        return (out - batch[1]).square().mean(), buffers

    return f, loss_fn


def check_judged(loss: Tensor, grads: Any) -> None:
    expected_loss, expected = judged()
    assert_near(loss, expected_loss, 1e-12)
    found = {n: g for n, g in tree.flatten_names(grads).items() if g is not None}
    assert not found.pop("unused").any()
    assert_near(found, expected, 1e-12)
    assert all(g.any() for n, g in expected.items() if "lora" in n)


@pytest.mark.parametrize("around", [None, True, False])
@pytest.mark.parametrize("form", [True, False])
def test_gradients_are_those_without_it(form: bool, around: Form) -> None:
    f, loss_fn = losing(net(form, around))
    (loss, buffers), grads = zf.value_and_grad(loss_fn, has_aux=True)(f.params, (IDS, Y))
    check_judged(loss, grads)
    plain, plain_loss = losing(net(None))
    want, _ = zf.value_and_grad(plain_loss, has_aux=True)(plain.params, (IDS, Y))
    assert_same(buffers, want[1])  # statistics are updated once


def sharded(module: nn.Module, stage: int, ranks: int, key: int = 0, wrap: Any = None) -> list[Any]:
    """Per rank and step: the loss, the full gradients, and its buffers."""
    f, loss_fn = losing(module)
    tx = optim.sgd(0.1)

    def step(state: Any, batch: Any) -> Any:
        aux, grads = zf.value_and_grad(loss_fn, has_aux=True)(state.params, batch)
        update, inner = tx.update(grads, state.opt_state, state.params)
        moved = optim.apply_updates(state.params, update)
        return state.replace(params=moved, opt_state=inner, step=state.step + 1), (aux, grads)

    def body() -> list[Any]:
        wrapped = zf.shard(step, stage=stage) if wrap is None else wrap(zf.shard(step, stage=stage))
        state, out = wrapped.place(zf.TrainState.create(f.params, tx, key=key)), []
        for _ in range(3):  # two that ask or note what comes, and one that follows
            state, (aux, grads) = wrapped(state, zf.local_batch((IDS, Y)))
            out.append((aux, tree.full(grads)))
        return [*out, tree.full(state.params)]

    return zf.simulate(ranks)(body)()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("form", "around"), [(True, None), (False, None), (None, True)])
def test_no_bit_changes_at_any_stage(form: Form, around: Form, stage: int) -> None:
    """Uneven rows, frozen and unused parameters; dropout draws what it draws without it."""
    plain = sharded(net(None, None, 0.3), stage, 3, key=1)
    assert_same(sharded(net(form, around, 0.3), stage, 3, key=1), plain)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("form", [True, False])
def test_one_rank_has_the_gradients_of_plain_torch(form: bool, stage: int) -> None:
    (((loss, _), grads), *_) = sharded(net(form), stage, 1)[0]
    check_judged(loss, grads)


WAYS: dict[str, Callable[[Any, Any], Any]] = {
    "precision": lambda step, path: zf.precision(step),
    "accumulate": lambda step, path: zf.accumulate(step, 2),
    "remat": lambda step, path: zf.remat(step, policy=2),
    "drop_layers": lambda step, path: zf.drop_layers(step, theta=0.5),
    "offload": lambda step, path: zf.offload(step),
    "disk": lambda step, path: zf.offload(step, to="disk", path=path),
    "compress": lambda step, path: zf.compress_grads(step, freeze_step=1),
}


def trained(module: nn.Module, stage: int, wrap: Any) -> list[Any]:
    f = zf.functionalize(module)
    tx = optim.adam(0.01)

    def loss_fn(params: Any, batch: Any) -> Tensor:
        return (f.apply(params, batch[0]) - batch[1]).square().mean()

    def body() -> Any:
        step = wrap(zf.shard(zf.train_step(loss_fn, tx), stage=stage))
        state, losses = step.place(zf.TrainState.create(f.params, tx, key=0)), []
        for _ in range(3):
            state, metrics = step(state, zf.local_batch((IDS[:12], Y[:12])))
            losses.append(metrics["loss"])
        return losses, tree.full(step.unplace(state).params)

    return zf.simulate(2)(body)()


@pytest.mark.parametrize("name", WAYS)
def test_no_bit_changes_under_a_transform(name: str, tmp_path: Any) -> None:
    for stage in (1, 3):
        runs = [
            trained(
                net(form, around, 0.2).float(),
                stage,
                lambda step, i=i, stage=stage: WAYS[name](step, tmp_path / f"{i}.{stage}"),
            )
            for i, (form, around) in enumerate([(None, None), (True, None), (None, False)])
        ]
        for run in runs[1:]:
            assert_same(run, runs[0], f"stage {stage}")


def two_stages(module: nn.Module) -> Any:
    return [steps(module, stage) for stage in (1, 3)]


def steps(module: nn.Module, stage: int) -> Any:
    f = zf.functionalize(module)

    def loss_fn(params: Any, batch: Any) -> Tensor:
        return (f.apply(params, batch[0]) - batch[1]).square().mean()

    step = zf.shard(zf.train_step(loss_fn, optim.sgd(0.1)), stage=stage)
    state = step.place(zf.TrainState.create(f.params, optim.sgd(0.1), key=0))
    for _ in range(2):
        state, _ = step(state, zf.local_batch((IDS, Y)))
    return tree.full(state.params)


def test_real_ranks_agree_with_simulated_ones_without_it() -> None:
    real = zf.launch(two_stages, net(True, None, 0.3), nprocs=2, timeout=120)
    assert_near(real, zf.simulate(2)(two_stages)(net(None, None, 0.3)), 1e-12)


@pytest.mark.parametrize("stage", [None, 0, 3])
@pytest.mark.parametrize("form", [True, False])
def test_a_region_runs_again_in_backward_and_holds_no_activations(
    form: bool, stage: int | None
) -> None:
    RUNS.clear()
    if stage is None:
        f, loss_fn = losing(net(form))
        zf.value_and_grad(loss_fn, has_aux=True)(f.params, (IDS, Y))
        assert len(RUNS) == 2 * 3
    else:
        sharded(net(form), stage, 1)
        assert len(RUNS) == 2 * 3 * 3


def test_dropout_of_the_second_run_is_that_of_the_first() -> None:
    """Without a key, by finite differences under one seed; ``preserve_rng_state`` or not."""
    w = torch.randn(WIDTH, WIDTH, dtype=F64, generator=torch.Generator().manual_seed(3))

    def loss_fn(params: Any, form: bool) -> Tensor:
        def part(x: Tensor) -> Tensor:
            return F.dropout(torch.tanh(x @ params["w"]), 0.5)

        x = torch.ones(4, WIDTH, dtype=F64)
        with_it = {"use_reentrant": form, "preserve_rng_state": False}
        return checkpoint(part, checkpoint(part, x, **with_it), **with_it).square().sum()

    def at(w: Tensor, form: bool) -> tuple[Tensor, Any]:
        torch.manual_seed(0)
        return zf.value_and_grad(loss_fn)({"w": w}, form)

    for form in (True, False):
        _, grads = at(w, form)
        step = torch.zeros_like(w)
        step[1, 2] = 1e-6
        slope = (at(w + step, form)[0] - at(w - step, form)[0]) / 2e-6
        assert_near(grads["w"][1, 2], slope, 1e-6)


@pytest.mark.parametrize("stage", [None, 0, 1, 2, 3])
def test_a_loss_written_by_hand_may_use_either_form(stage: int | None) -> None:
    blocks = zf.Layers([{"w": torch.full((4, 4), 0.1 * i, dtype=F64)} for i in (1, 2, 3)])
    params = {"blocks": blocks, "head": torch.ones(4, 1, dtype=F64)}
    x = torch.linspace(-1, 1, 24, dtype=F64).view(6, 4)

    def block(p: Any, x: Tensor) -> Tensor:
        return x + torch.tanh(x @ p["w"])

    def loss_of(form: Form) -> Callable[..., Tensor]:
        def loss_fn(params: Any, x: Tensor) -> Tensor:
            for p in params["blocks"]:

                def run(x: Tensor, p: Any = p) -> Tensor:
                    return zf.layer(block, p, x)

                x = run(x) if form is None else checkpoint(run, x, use_reentrant=form)
            return (x @ params["head"]).square().mean()

        return loss_fn

    def grads_of(form: Form) -> Any:
        def step(state: Any, batch: Tensor) -> Any:
            return state, zf.value_and_grad(loss_of(form))(state.params, batch)

        def body() -> Any:
            assert stage is not None
            wrapped = zf.shard(step, stage=stage)
            state = wrapped.place(zf.TrainState.create(params, optim.sgd(0.1)))
            out = [wrapped(state, zf.local_batch(x))[1] for _ in range(2)]
            return [(loss, tree.full(grads)) for loss, grads in out]

        if stage is None:
            return zf.value_and_grad(loss_of(form))(params, x)
        return zf.simulate(2)(body)()

    plain = grads_of(None)
    for form in (True, False):
        assert_same(grads_of(form), plain)


@pytest.mark.parametrize("stage", [None, 1, 3])
@pytest.mark.parametrize("form", [True, False])
def test_parameters_lent_by_functional_call_are_those_of_the_step(
    form: bool, stage: int | None
) -> None:
    """The module's own are others: backward must not meet them."""
    params = {k: v.detach() + 0.1 for k, v in net(None).named_parameters() if v.requires_grad}

    def grads_of(form: Form) -> Any:
        module = net(form)

        def loss_fn(params: Any, batch: Any) -> Tensor:
            return (functional_call(module, params, (batch[0],)) - batch[1]).square().mean()

        def step(state: Any, batch: Any) -> Any:
            loss, grads = zf.value_and_grad(loss_fn)(state.params, batch)
            return state, (loss, tree.full(grads))

        if stage is None:
            return zf.value_and_grad(loss_fn)(params, (IDS, Y))
        wrapped = zf.shard(step, stage=stage)
        state = wrapped.place(zf.TrainState.create(params, optim.sgd(0.1)))
        return wrapped(state, (IDS, Y))[1]

    assert_same(grads_of(form), grads_of(None))


def test_context_fn_early_stop_and_determinism_check() -> None:
    log: list[str] = []

    class Note:
        def __init__(self, what: str) -> None:
            self.what = what

        def __enter__(self) -> None:
            log.append(self.what)

        def __exit__(self, *error: object) -> None:
            log.append(self.what + " over")

    class Noted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(3, 3, dtype=F64)])

        def forward(self, x: Tensor, **how: Any) -> Tensor:
            def part(x: Tensor) -> Tensor:
                y = torch.tanh(self.layers[0](x)).sin()
                log.append("all")
                return y

            return checkpoint(part, x, use_reentrant=False, **how).sum()

    f = zf.functionalize(Noted())
    x = torch.ones(2, 3, dtype=F64)
    how = {"context_fn": lambda: (Note("first"), Note("again")), "early_stop": False}
    zf.value_and_grad(lambda p: f.apply(p, x, **how))(f.params)
    assert log == ["first", "all", "first over", "again", "all", "again over"]
    log.clear()
    zf.value_and_grad(lambda p: f.apply(p, x, determinism_check="none"))(f.params)
    assert log == ["all"]  # sin, the last to save anything, ends the second run
    with pytest.raises(ValueError, match="determinism_check should be one of"):
        zf.value_and_grad(lambda p: f.apply(p, x, determinism_check="strict"))(f.params)


def test_what_is_not_the_same_the_second_time_is_found_out() -> None:
    shapes = iter([2, 3])

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(3, 3, dtype=F64)])

        def forward(self, x: Tensor) -> Tensor:
            def part(x: Tensor) -> Tensor:
                return torch.tanh(self.layers[0](x[: next(shapes)])).sum()

            return checkpoint(part, x, use_reentrant=True)

    f = zf.functionalize(Odd())
    with pytest.raises(theirs.CheckpointError, match="different metadata"):
        zf.value_and_grad(lambda p: f.apply(p, torch.ones(4, 3, dtype=F64)))(f.params)


def test_two_calls_of_one_module_and_an_own_backward() -> None:
    """Each region finds the parameters and the buffers of its own call, when both are over."""
    grads = {}
    for form in (None, True, False):
        f, _ = losing(net(form))
        one = tree.map(lambda p: p.clone().requires_grad_(), f.params)
        two = tree.map(lambda p: (p * 1.1).requires_grad_(), f.params)
        total = f.apply(one, IDS).sum() * f.apply(two, IDS).square().sum()
        leaves = [*tree.leaves(one), *tree.leaves(two)]
        f.apply(tree.map(torch.zeros_like, f.params), IDS)  # a third one in between
        first = torch.autograd.grad(total, leaves, retain_graph=True, allow_unused=True)
        grads[form] = [*first, *torch.autograd.grad(total, leaves, allow_unused=True)]
        del total
        assert len(f._pool.idle) == (1 if form is None else 3)  # all of them came back
    for form in (True, False):
        assert_same(grads[form], grads[None])


def test_nothing_stays() -> None:
    f, loss_fn = losing(net(True))
    params = tree.map(torch.clone, f.params)
    held = [weakref.ref(leaf) for leaf in tree.leaves(params)]
    for _ in range(3):
        out = zf.value_and_grad(loss_fn, has_aux=True)(params, (IDS, Y))
        assert len(f._pool.idle) == 1  # the same one comes back for the next call
    lost = f.apply(tree.map(lambda p: p.detach().requires_grad_(), params), IDS)
    del lost, params, out  # a graph that nobody goes back along
    gc.collect()
    assert len(f._pool.idle) == 1
    assert not any(ref() is not None for ref in held)
    assert "apply" not in vars(theirs.CheckpointFunction)
    assert theirs._checkpoint_without_reentrant_generator.__module__ == theirs.__name__


def test_other_threads_keep_torchs_own() -> None:
    inside, done = threading.Event(), threading.Event()
    x = torch.ones(3, requires_grad=True)
    found: list[Any] = []

    def other() -> None:
        assert inside.wait(60)
        y = checkpoint(torch.sin, x, use_reentrant=True)
        found.append(y.grad_fn.name())
        y.sum().backward()
        done.set()

    def loss_fn(params: Any) -> Tensor:
        inside.set()
        assert done.wait(60)
        return checkpoint(torch.sin, params["w"], use_reentrant=True).sum()

    thread = threading.Thread(target=other)
    thread.start()
    zf.value_and_grad(loss_fn)({"w": torch.ones(3)})
    thread.join()
    assert found == ["CheckpointFunctionBackward"]
    assert torch.equal(x.grad, torch.ones(3).cos())


def test_inside_torch_func_nothing_is_left_out() -> None:
    w = torch.linspace(-1, 1, 3, dtype=F64)
    for form in (True, False):

        def loss_fn(params: Any, form: bool = form) -> Tensor:
            def one(x: Tensor) -> Tensor:
                return checkpoint(lambda x: (x * params["w"]).sin(), x, use_reentrant=form).sum()

            return torch.func.vmap(one)(torch.ones(2, 3, dtype=F64)).sum()

        _, grads = zf.value_and_grad(loss_fn)({"w": w})
        assert_near(grads["w"], 2 * w.cos(), 1e-12)


# Hugging Face


HUGGING: dict[str, tuple[str, dict[str, Any]]] = {
    "LlamaForCausalLM": (
        "LlamaConfig",
        {"num_key_value_heads": 2, "intermediate_size": 16, "hidden_size": 8},
    ),
    "GPT2LMHeadModel": ("GPT2Config", {"n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 16}),
    "BertForMaskedLM": (
        "BertConfig",
        {"hidden_size": 8, "intermediate_size": 16, "max_position_embeddings": 16},
    ),
}


@pytest.mark.parametrize("form", [True, False])
@pytest.mark.parametrize("name", HUGGING)
def test_hugging_face_models_that_checkpoint_themselves(name: str, form: bool) -> None:
    """Frozen embeddings, dropout where the model has it; whole, by parts, and functionalized."""
    transformers = pytest.importorskip("transformers")
    config, how = HUGGING[name]
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2} if "n_layer" not in how else {}
    torch.manual_seed(0)
    made = getattr(transformers, config)(vocab_size=11, **sizes, **how)
    model = getattr(transformers, name)(made).double().train()
    model.get_input_embeddings().requires_grad_(False)
    model.config.use_cache = False
    ids = torch.arange(12).view(2, 6) % 11
    params = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}

    def lent(params: Any, key: int) -> Tensor:
        with zf.random.scope(key):
            return functional_call(model, params, (), {"input_ids": ids, "labels": ids}).loss

    expected = zf.value_and_grad(lent)(params, 1)
    plain = zf.functionalize(model)

    def applied(f: Any) -> Any:
        def loss_fn(params: Any) -> Tensor:
            with zf.random.scope(1):
                return f.apply(params, input_ids=ids, labels=ids).loss

        return zf.value_and_grad(loss_fn)(f.params)

    want = applied(plain)
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": form})
    assert_same(zf.value_and_grad(lent)(params, 1), expected)
    with pytest.warns(UserWarning, match="switched off"):
        switched = zf.functionalize(model)
    assert_same(applied(switched), want)
    for part in (parts := switched._pool.skeleton).modules():  # as models with flags of their own
        if hasattr(part, "gradient_checkpointing"):
            part.gradient_checkpointing = True
    assert any(getattr(part, "gradient_checkpointing", False) for part in parts.modules())
    switched._pool.idle.clear()
    assert_same(applied(switched), want)
