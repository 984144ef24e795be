"""A functionalized module gives its own module's numbers, bitwise, and keeps nothing."""

from __future__ import annotations

import gc
import pickle
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zfunc import random, tree
from zfunc.errors import PlacementError
from zfunc.modules.functional import Functional, functionalize
from zfunc.modules.lazy import LazyTensor
from zfunc.primitives import Ref
from zfunc.tree import Layers


class FakeRef(Ref):
    """A layer's parameters that enter as fresh copies, for one call, perhaps recomputed."""

    def __init__(self, params: Any, remat: bool = False) -> None:
        self.params, self.remat, self.resolved = params, remat, 0

    def enter(self) -> Any:
        return tree.map(lambda x: x * 1, self.params)

    def resolve(self) -> Any:
        self.resolved += 1
        return self.enter()

    def call(self, fn: Callable[..., Any], xs: tuple[Any, ...], kw: dict[str, Any]) -> Any:
        def run(*xs: Any) -> Any:
            return fn(self.enter(), *xs, **kw)

        return checkpoint(run, *xs, use_reentrant=False) if self.remat else run(*xs)


def as_refs(params: Any, remat: bool = False) -> Any:
    """The tree as a step under ``shard`` would hand it over."""
    if isinstance(params, Layers):
        return Layers(FakeRef(layer, remat) for layer in params)
    if isinstance(params, dict):
        return {key: as_refs(value, remat) for key, value in params.items()}
    return params


def run(
    f: Functional,
    loss: Callable[[Any], Tensor],
    prepare: Callable[[Any], Any],
    *args: Any,
    **kw: Any,
) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Loss and all gradients by name."""
    params = tree.map(lambda x: x.clone().requires_grad_(), f.params)
    named = tree.flatten_names(params)
    value = loss(f.apply(prepare(params), *args, **kw))
    grads = torch.autograd.grad(value, list(named.values()), allow_unused=True)
    return value, dict(zip(named, grads, strict=True))


WAYS: dict[str, Callable[[Any], Any]] = {
    "plain": lambda params: params,
    "refs": as_refs,
    "remat": lambda params: as_refs(params, remat=True),
}


def assert_like_module(
    module: nn.Module, loss: Callable[[Any], Tensor], *args: Any, **kw: Any
) -> None:
    """Loss and gradients of ``apply``, in every way, against the module's own backward."""
    f = functionalize(module)
    assert set(tree.flatten_names(f.params)) == set(dict(module.named_parameters()))
    before = {name: b.clone() for name, b in module.named_buffers()}
    results = {}
    for way, prepare in WAYS.items():
        with random.scope(0):
            results[way] = run(f, loss, prepare, *args, **kw)
    for name, b in module.named_buffers():
        assert torch.equal(b, before[name]), f"buffer {name} was changed"
    with random.scope(0):
        expected = loss(module(*args, **kw))
    expected.backward()
    for way, (value, grads) in results.items():
        assert torch.equal(value, expected), way
        for name, p in module.named_parameters():
            if p.requires_grad:
                got = grads[name]
                assert (got is None) == (p.grad is None), f"{way}: {name}"
                assert got is None or torch.equal(got, p.grad), f"{way}: {name}"  # type: ignore[arg-type]


def square(out: Any) -> Tensor:
    out = out[0] if isinstance(out, tuple) else out
    return (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum() + out.square().mean()


# --- plain modules -----------------------------------------------------------------------------


class ConvBlock(nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(n, n, 3, padding=1), nn.BatchNorm2d(n)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.relu(self.norm(self.conv(x)))


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3)
        self.stages = nn.ModuleList(nn.ModuleList(ConvBlock(4) for _ in range(2)) for _ in range(2))
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for stage in self.stages:
            for block in stage:  # type: ignore[attr-defined]
                x = block(x)
        return self.head(x.mean((2, 3)))


class Tied(nn.Module):
    """Embedding and head tied; the layers share one matrix among themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.layers[2].weight = self.layers[1].weight  # type: ignore[assignment]
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, i: Tensor) -> Tensor:
        x = self.embed(i)
        for layer in self.layers:
            x = layer(x).tanh()
        return self.head(x)


class Peeking(nn.Module):
    """Reads its layers' parameters outside their calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.out = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        first: Any = self.layers[0]
        assert first.weight.shape == (4, 4) and first.weight.device == x.device
        x = x.to(first.weight.dtype)
        for layer in self.layers:
            x = layer(x).sin()
        return self.out(x) @ first.weight.T + first.bias.square().sum()


class TwiceUsed(nn.Module):
    """One module as two layers (ALBERT), and one layer called again."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.Linear(4, 4)
        self.layers = nn.ModuleList([layer, nn.Linear(4, 4), layer])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).sin()
        return self.layers[1](x)


class Aliased(nn.Module):
    """A layer that also has a name outside its list."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.layers = nn.ModuleList([self.first, nn.Linear(4, 4)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).sin()
        return self.first(x)


def weight_norms() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        old = nn.utils.weight_norm(nn.Linear(4, 4))
    new = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)).eval()
    return nn.Sequential(old, nn.Tanh(), new, nn.Tanh(), spectral)


def transformer(**kw: Any) -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, **kw)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


X = torch.randn(5, 4)
MODULES: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "linear": (lambda: nn.Linear(4, 3), X),
    "mlp": (lambda: nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1)), X),
    "convnet": (ConvNet, torch.randn(2, 3, 8, 8)),
    "tied": (Tied, torch.randint(11, (2, 5))),
    "peeking": (Peeking, X),
    "twice": (TwiceUsed, X),
    "aliased": (Aliased, X),
    "lstm": (lambda: nn.LSTM(4, 3, num_layers=2, bidirectional=True), torch.randn(6, 2, 4)),
    "gru_stack": (lambda: nn.Sequential(nn.GRU(4, 4)), X),
    "weight_norms": (weight_norms, X),
    "attention": (lambda: transformer(dropout=0.0), torch.randn(2, 5, 8)),
    "attention_dropout": (lambda: transformer(dropout=0.3), torch.randn(2, 5, 8)),
    "attention_eval": (lambda: transformer().eval(), torch.randn(2, 5, 8)),
    "double": (lambda: ConvNet().double(), torch.randn(2, 3, 8, 8, dtype=torch.float64)),
}


@pytest.mark.parametrize("name", MODULES)
def test_loss_and_gradients_are_the_modules_own_bitwise(name: str) -> None:
    make, x = MODULES[name]
    if (
        name == "attention_dropout"
    ):  # plain only: a recomputed layer draws anew without a step's key
        f = functionalize(module := make())
        with random.scope(1):
            value, _ = run(f, square, WAYS["refs"], x)
        with random.scope(1):
            assert torch.equal(value, square(module(x)))
        return
    assert_like_module(make(), square, x)


def test_where_everything_lives() -> None:
    f = functionalize(ConvNet())
    stage = f.params["stages"]["1"]
    assert isinstance(stage, Layers) and len(stage) == 2
    assert set(stage[0]) == {"conv", "norm"} and set(f.params) == {"stem", "stages", "head"}
    assert "ConvNet" in repr(f) and "stages.1 x 2" in repr(f) and "12 buffers" in repr(f)

    tied = functionalize(Tied()).params
    assert set(tied) == {"embed", "layers", "layers.1.weight"}
    assert [set(p) for p in tied["layers"]] == [{"weight", "bias"}, {"bias"}, {"bias"}]

    twice = functionalize(TwiceUsed()).params
    assert [set(p) for p in twice["layers"]] == [{"weight", "bias"}, {"weight", "bias"}, set()]

    aliased = functionalize(Aliased()).params
    assert set(aliased["first"]) == {"weight", "bias"} and aliased["layers"][0] == {}

    assert isinstance(functionalize(nn.Sequential(nn.Linear(2, 2))).params, Layers)
    assert isinstance(functionalize(nn.Linear(2, 2)).params, dict)


def test_a_list_with_a_shared_tensor_is_its_own_root() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    module[1].weight = module[0].weight
    assert set(functionalize(module).params) == {"", "0.weight"}
    assert_like_module(module, square, X)


def test_params_share_the_modules_memory_and_outlive_it() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    pointer, expected = module[0].weight.data_ptr(), module(X)
    f = functionalize(module)
    assert f.params[0]["weight"].data_ptr() == pointer
    assert not any(leaf.requires_grad for leaf in tree.leaves(f.params))
    gone = weakref.ref(module)
    del module
    gc.collect()
    assert gone() is None
    assert torch.equal(f.apply(f.params, X), expected)


@pytest.mark.parametrize("way", WAYS)
def test_units_can_be_chosen(way: str) -> None:
    torch.manual_seed(0)
    module = ConvNet()
    x = torch.randn(2, 3, 8, 8)
    for units in (
        ["stem", "head", "stages.0.0"],
        lambda name, part: isinstance(part, ConvBlock | nn.Linear),
        "stages.*.conv",
        ["stages.*", "head"],
        lambda name, part: False,
    ):
        f = functionalize(module, units=units)  # type: ignore[arg-type]
        assert set(tree.flatten_names(f.params)) == set(dict(module.named_parameters()))
        value, _ = run(f, square, WAYS[way], x)
        assert torch.equal(value, run(functionalize(module), square, WAYS["plain"], x)[0])
    chosen = functionalize(module, units=["stem", "stages.0.0"]).params
    assert isinstance(chosen["stem"], Layers) and set(chosen["stem"][0]) == {"weight", "bias"}
    assert isinstance(chosen["stages"]["0"]["0"], Layers)
    assert isinstance(functionalize(module, units="stages.0.*").params["stages"]["0"], Layers)


@pytest.mark.parametrize("units", ["nothing", "stages", ["stem", "absent.*"]])
def test_units_that_mean_nothing(units: Any) -> None:
    with pytest.raises(PlacementError, match="units="):
        functionalize(ConvNet(), units=units)


# --- laziness ----------------------------------------------------------------------------------


def test_metadata_does_not_fetch_and_values_do() -> None:
    seen: dict[str, Any] = {}

    class Look(Peeking):
        def forward(self, x: Tensor) -> Tensor:
            weight: Any = self.layers[0].weight
            seen.update(shape=weight.shape, dtype=weight.dtype, n=weight.numel(), kind=weight)
            return self.layers[1](x)

    f = functionalize(Look())
    refs = as_refs(tree.map(lambda x: x.to(torch.bfloat16), f.params))
    f.apply(refs, X.to(torch.bfloat16))
    assert refs["layers"][0].resolved == 0
    assert (seen["shape"], seen["dtype"], seen["n"]) == ((4, 4), torch.bfloat16, 16)
    assert isinstance(seen["kind"], LazyTensor)
    with pytest.raises(PlacementError, match=r"layers\.0\.weight was read after"):
        seen["kind"] + 1
    f = functionalize(Peeking())
    refs = as_refs(f.params)
    f.apply(refs, X)
    assert refs["layers"][0].resolved > 0 and refs["layers"][1].resolved == 0


def test_a_gradient_lost_past_a_lazy_tensor_is_loud() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
            return g * 2

    class Sneaky(Peeking):
        def forward(self, x: Tensor) -> Tensor:
            return self.out(x) @ Double.apply(self.layers[0].weight)

    f = functionalize(Sneaky())
    with pytest.raises(PlacementError, match=r"layers\.0\.weight was given to a torch\.autograd"):
        run(f, square, as_refs, X)
    with torch.no_grad():
        assert torch.equal(f.apply(as_refs(f.params), X), f.apply(f.params, X))
    assert run(f, square, WAYS["plain"], X)[1]["layers.0.weight"] is not None


def test_layers_run_through_the_primitive(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def spy(fn: Any, params: Any, *xs: Any, **kw: Any) -> Any:
        calls.append((fn.zfunc_name, sorted(params), len(xs)))
        return fn(tree.map(lambda p: p * 0, params), *xs, **kw)

    monkeypatch.setattr("zfunc.modules.binding.layer", spy)
    monkeypatch.setattr("zfunc.modules.binding.current", object)  # as inside a step
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    f = functionalize(module)
    assert torch.equal(f.apply(f.params, X), torch.zeros(5, 2))
    assert calls == [("0", ["bias", "weight"], 1), ("1", [], 1), ("2", ["bias", "weight"], 1)]


# --- buffers and modes -------------------------------------------------------------------------


def test_buffers_come_back_only_when_asked_and_inputs_stay() -> None:
    module = ConvNet().train()
    x = torch.randn(2, 3, 8, 8)
    f = functionalize(module)
    old = {name: b.clone() for name, b in f.buffers.items()}
    for _ in range(2):  # the second call must not start from the first one's copies
        out, new = f.apply(f.params, x, mutable=True)
    assert all(torch.equal(old[name], b) for name, b in f.buffers.items())
    assert torch.equal(out, module(x))
    for name, b in module.named_buffers():
        assert torch.equal(new[name], b), name
        assert new[name].data_ptr() != b.data_ptr()
    kept = {name: b.clone() for name, b in new.items()}
    out, newer = f.apply(f.params, x, buffers=new, mutable=True)
    assert torch.equal(out, module(x))
    for name, b in module.named_buffers():
        assert torch.equal(newer[name], b) and torch.equal(new[name], kept[name])
    evaluated, same = f.apply(f.params, x, buffers=new, mutable=True, train=False)
    assert all(torch.equal(same[name], new[name]) for name in new)
    assert not torch.equal(evaluated, out)
    assert torch.equal(f.apply(f.params, x, buffers=newer, train=False), module.eval()(x))


def test_a_large_buffer_is_copied_only_when_it_must() -> None:
    class Masked(nn.Module):
        write = False

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.zeros(300, 300), persistent=False)

        def forward(self) -> tuple[float, int]:
            mask: Any = self.mask
            if Masked.write:
                mask += 1
            return mask.sum().item() / 90_000, mask.data_ptr()

    f = functionalize(Masked())
    assert f.apply(f.params) == f.apply(f.params)
    (_, at), new = f.apply(f.params, mutable=True)
    assert new["mask"] is f.buffers["mask"] and at != new["mask"].data_ptr()
    Masked.write = True
    for _ in range(2):
        (value, _), new = f.apply(f.params, mutable=True)
        assert value == 1 and new["mask"].mean() == 1 and f.buffers["mask"].mean() == 0
    assert f.apply(f.params)[0] == 1
    with torch.inference_mode():
        assert f.apply(f.params)[0] == 1 and f.apply(f.params)[0] == 1
    Masked.write = False
    assert f.apply(f.params)[0] == 0
    f.buffers["mask"].fill_(4)
    assert f.apply(f.params)[0] == 4


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_buffers_in_every_grad_mode(mode: Callable[[], Any]) -> None:
    f = functionalize(ConvNet().train())
    x = torch.randn(2, 3, 8, 8)
    out, expected = f.apply(f.params, x, mutable=True)
    for _ in range(2):
        with mode():
            got, new = f.apply(f.params, x, mutable=True)
        assert torch.equal(got, out)
        assert all(torch.equal(new[name], b) for name, b in expected.items())
    assert torch.equal(f.apply(f.params, x), out)


class Counting(nn.Module):
    """Assigns one buffer anew, adds to another, registers a third while it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(()))
        self.register_buffer("assigned", torch.zeros(()))
        self.register_buffer("added", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.assigned = self.assigned + x.mean() * self.w
        self.added += 1
        assert not hasattr(self, "late")
        self.register_buffer("late", torch.zeros(()))
        return x * self.w + self.added


def test_assigned_and_non_persistent_buffers() -> None:
    f = functionalize(Counting())
    assert set(f.buffers) == {"assigned", "added"}
    buffers = f.buffers
    for i in range(3):
        out, buffers = f.apply(f.params, torch.ones(2), buffers=buffers, mutable=True)
        assert out.tolist() == [2.0 + i] * 2 and set(buffers) == {"assigned", "added"}
    assert (buffers["assigned"].item(), buffers["added"].item()) == (3.0, 3.0)
    assert not buffers["assigned"].requires_grad
    assert f.buffers["added"].item() == 0


def test_changing_a_buffer_between_calls_is_seen() -> None:
    f = functionalize(Counting())
    mine = {name: b.clone() for name, b in f.buffers.items()}
    assert f.apply(f.params, torch.zeros(1), buffers=mine).item() == 1
    mine["added"].fill_(5)
    assert f.apply(f.params, torch.zeros(1), buffers=mine).item() == 6


def test_modes() -> None:
    module = nn.Sequential(nn.Dropout(0.5), nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 4)))
    module[1].eval()
    x = torch.ones(64, 4)
    kept = functionalize(module)
    with random.scope(0):
        expected = module(x)
    for train, off in ((None, None), (True, False), (None, None), (False, True)):
        with random.scope(0):
            out = kept.apply(kept.params, x, train=train)
        assert torch.equal(out, expected) == (train is None)
        assert torch.equal(out, module.eval()(x)) == bool(off)
        module.train()[1].eval()
    evaluating = functionalize(module, train=False)
    assert torch.equal(evaluating.apply(kept.params, x), module.eval()(x))


# --- purity ------------------------------------------------------------------------------------


def at_rest(f: Functional) -> None:
    for template in f._pool.idle:
        for part in template.module.modules():
            for x in [*part._parameters.values(), *part._buffers.values()]:
                assert x is None or isinstance(x, LazyTensor) or x.device.type == "meta"
            if isinstance(part, nn.RNNBase):
                assert all(x.device.type == "meta" for x in part._flat_weights)


@pytest.mark.parametrize("name", ["convnet", "tied", "lstm", "twice"])
@pytest.mark.parametrize("way", WAYS)
def test_nothing_stays_in_the_template(name: str, way: str) -> None:
    make, x = MODULES[name]
    f = functionalize(make())
    run(f, square, WAYS[way], x)
    assert f._pool.idle
    at_rest(f)
    params = tree.map(torch.clone, f.params)
    held = [weakref.ref(leaf) for leaf in tree.leaves(params)]
    out = f.apply(WAYS[way](params), x)
    del params, out
    gc.collect()
    assert not any(ref() is not None for ref in held)


def test_nothing_stays_after_an_exception() -> None:
    f = functionalize(ConvNet())
    for prepare in WAYS.values():
        with pytest.raises(RuntimeError, match="channels"):
            f.apply(prepare(f.params), torch.randn(2, 5, 8, 8))
        at_rest(f)
    x = torch.randn(2, 3, 8, 8)
    assert torch.isfinite(f.apply(f.params, x)).all()


def test_apply_inside_apply() -> None:
    class Student(nn.Module):
        teach: Callable[[Tensor], Tensor] | None = None

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            teach, Student.teach = Student.teach, None
            for layer in self.layers:
                x = layer(x).sin()
                if teach:
                    x = x + teach(x)
            return x

    module = Student()
    f = functionalize(module)
    teacher = tree.map(lambda p: p + 1, f.params)
    plain = functionalize(Student())

    def expected() -> Tensor:
        x = X
        for p in f.params["layers"]:
            x = F.linear(x, p["weight"], p["bias"]).sin()
            x = x + plain.apply(teacher, x)
        return x

    want = expected()
    for prepare in WAYS.values():
        Student.teach = lambda x, prepare=prepare: f.apply(prepare(teacher), x)  # type: ignore[misc]
        assert torch.equal(f.apply(prepare(f.params), X), want)
    at_rest(f)


def test_threads_share_one_functional() -> None:
    f = functionalize(Tied())
    ids = torch.randint(11, (2, 5))
    trees = [tree.map(lambda p, k=k: p * (1 + k), f.params) for k in range(4)]
    expected = [f.apply(params, ids) for params in trees]
    wrong: list[int] = []
    barrier = threading.Barrier(4)

    def rank(k: int) -> None:
        barrier.wait()
        for i in range(30):
            prepare = list(WAYS.values())[i % 3]
            if not torch.equal(f.apply(prepare(trees[k]), ids), expected[k]):
                wrong.append(k)

    threads = [threading.Thread(target=rank, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_recomputation_after_the_call_sees_the_calls_own_values() -> None:
    """Mode, buffers and shared tensors of the call, though another call came in between."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(
                nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2)
            )
            self.layers[1][0].weight = self.layers[0][0].weight  # type: ignore[index]

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x).sin()
            return x

    module = Net().eval()
    f = functionalize(module)
    other = {name: b + 1 for name, b in f.buffers.items()}
    params = tree.map(lambda p: p.clone().requires_grad_(), f.params)
    for train in (False, True):
        named = list(tree.leaves(params))
        want = torch.autograd.grad(square(f.apply(params, X, buffers=other, train=train)), named)
        loss = square(f.apply(as_refs(params, remat=True), X, buffers=other, train=train))
        f.apply(tree.map(lambda p: p * 2, f.params), X, train=not train)
        got = torch.autograd.grad(loss, named)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    at_rest(f)


def test_a_model_pickles_without_its_templates() -> None:
    f = functionalize(nn.Sequential(nn.Linear(4, 4), nn.LSTM(4, 2)))
    out = f.apply(f.params, X)[0]
    copy = pickle.loads(pickle.dumps(f))
    assert not copy._pool.idle
    assert torch.equal(copy.apply(copy.params, X)[0], out)


# --- torch.func --------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's, in jvp
def test_torch_func_and_vmap() -> None:
    module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    f = functionalize(module)
    y = torch.randn(5, 1)

    def loss(params: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(f.apply(params, x), y)

    per_sample = torch.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(f.params, X, y)
    for i in range(5):
        params = tree.map(lambda p: p.clone().requires_grad_(), f.params)
        grads = torch.autograd.grad(loss(params, X[i], y[i]), tree.leaves(params))
        for got, want in zip(tree.leaves(per_sample), grads, strict=True):
            torch.testing.assert_close(got[i], want)
    ensemble = tree.map(lambda p: torch.stack([p, p * 2]), f.params)
    outs = torch.vmap(f.apply, in_dims=(0, None))(ensemble, X)
    torch.testing.assert_close(outs[0], f.apply(f.params, X))
    tangents = tree.map(torch.ones_like, f.params)
    torch.func.jvp(lambda p: loss(p, X, y), (f.params,), (tangents,))
    at_rest(f)


def test_batch_norm_under_torch_func() -> None:
    f = functionalize(ConvNet().train())
    x = torch.randn(2, 3, 8, 8)

    def loss(params: Any) -> tuple[Tensor, Any]:
        out, new = f.apply(params, x, mutable=True)
        return square(out), new

    grads, new = torch.func.grad(loss, has_aux=True)(f.params)
    _, want = run(f, square, WAYS["plain"], x)
    _, expected = f.apply(f.params, x, mutable=True)
    for name, g in tree.flatten_names(grads).items():
        torch.testing.assert_close(g, want[name])
    assert all(torch.equal(new[name], b) for name, b in expected.items())


# --- back to a module --------------------------------------------------------------------------


def test_to_module_is_the_same_model_with_memory_of_its_own() -> None:
    for make, x in (MODULES["tied"], MODULES["convnet"], MODULES["lstm"]):
        module = make()
        next(module.parameters()).requires_grad_(False)
        f = functionalize(module)
        params = tree.map(lambda p: p * 2, f.params)
        back = f.to_module(params)
        assert type(back) is type(module) and back.training == module.training
        assert list(back.state_dict()) == list(module.state_dict())
        for name, p in back.named_parameters():
            assert torch.equal(p, tree.flatten_names(params)[name])
            assert isinstance(p, nn.Parameter)
            assert p.requires_grad == dict(module.named_parameters())[name].requires_grad
        out, want = back.eval()(x), f.apply(params, x, train=False)
        assert torch.equal(out[0], want[0]) and torch.equal(square(out), square(want))
        with torch.no_grad():
            for p in back.parameters():
                p.zero_()
        assert torch.equal(square(f.apply(params, x, train=False)), square(want))
    tied = functionalize(Tied())
    back = tied.to_module(tied.params)
    assert back.head.weight is back.embed.weight  # type: ignore[union-attr]
    assert back.layers[1].weight is back.layers[2].weight  # type: ignore[index,union-attr]


# --- bad input ---------------------------------------------------------------------------------


def broken(change: Callable[[Any], Any]) -> Any:
    params = tree.map(lambda x: x, functionalize(ConvNet()).params)
    return change(params) or params


MISFITS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "missing": (lambda p: p["head"].pop("bias") is None, r"missing: head\.bias"),
    "missing in a layer": (
        lambda p: p["stages"]["0"][1]["conv"].pop("weight") is None,
        r"missing: stages\.0\.1\.conv\.weight",
    ),
    "unexpected": (lambda p: p["head"].update(extra=X), r"unexpected: head\.extra"),
    "wrong shape": (
        lambda p: p["head"].update(weight=torch.ones(3, 4)),
        r"head\.weight \(3, 4\) instead of \(2, 4\)",
    ),
    "wrong shape in a layer": (
        lambda p: p["stages"]["1"][0]["norm"].update(bias=torch.ones(1)),
        r"stages\.1\.0\.norm\.bias \(1,\) instead of \(4,\)",
    ),
    "too few layers": (lambda p: p["stages"]["1"].pop() and None, r"missing: stages\.1\.1\.conv"),
    "no tensor": (lambda p: p["head"].update(bias=None), r"head\.bias"),
    "flat names": (lambda p: tree.flatten_names(p), "Pass a tree of the structure"),
    "a list": (lambda p: [1, 2, 3], "missing"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_params_that_do_not_fit(name: str) -> None:
    change, message = MISFITS[name]
    f = functionalize(ConvNet())
    for prepare in (WAYS["plain"], WAYS["refs"]):
        with pytest.raises(PlacementError, match=message):
            f.apply(prepare(broken(change)), torch.randn(2, 3, 8, 8))
        at_rest(f)
    if name != "flat names":  # it has the right names, which is all that to_module needs
        with pytest.raises(PlacementError, match=r"missing|unexpected|instead|head"):
            f.to_module(broken(change))


def test_buffers_that_do_not_fit() -> None:
    f = functionalize(Counting())
    with pytest.raises(PlacementError, match=r"missing.*added"):
        f.apply(f.params, X, buffers={"assigned": torch.zeros(())})


class PlainList(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4))
        self.all = [self.w]

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.all[0]


def test_modules_that_cannot_be_functionalized() -> None:
    ints = nn.Module()
    ints.register_parameter("table", nn.Parameter(torch.ones(2, dtype=torch.int8), False))
    with pytest.raises(PlacementError, match=r"table has dtype torch\.int8.*register_buffer"):
        functionalize(ints)
    with pytest.raises(PlacementError, match=r"weight has no shape yet"):
        functionalize(nn.LazyLinear(3))
    with pytest.raises(PlacementError, match=r"DataParallel.*module\.module"):
        functionalize(nn.DataParallel(nn.Linear(2, 2)))
    f = functionalize(PlainList())
    with pytest.raises(RuntimeError) as caught:
        f.apply(f.params, torch.ones(4))
    assert any("ParameterList" in note for note in caught.value.__notes__)
