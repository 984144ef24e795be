"""A functionalized module gives its own module's numbers, bitwise, and keeps nothing."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tests.unit.functional_models import (
    MODULES,
    WAYS,
    Aliased,
    ConvBlock,
    ConvNet,
    Peeking,
    Tied,
    TwiceUsed,
    X,
    as_refs,
    assert_like_module,
    run,
    square,
)
from zfunc import random, tree
from zfunc.engine import context
from zfunc.errors import PlacementError
from zfunc.modules.functional import functionalize
from zfunc.modules.lazy import LazyTensor
from zfunc.transforms.rematerialisation import remat
from zfunc.trees.tree import Layers


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
    around = context.Context(transforms=remat(lambda state: state).transforms)
    monkeypatch.setattr("zfunc.modules.binding.current", lambda: around)
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    f = functionalize(module)
    assert torch.equal(f.apply(f.params, X), torch.zeros(5, 2))
    assert calls == [("0", ["bias", "weight"], 1), ("1", [], 1), ("2", ["bias", "weight"], 1)]


def test_params_come_in_the_order_in_which_a_module_defines_them() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.late = nn.Embedding(5, 4), nn.Linear(4, 4)
            self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
            self.alone, self.head = nn.Linear(4, 4), nn.Linear(4, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.blocks[1](self.blocks[0](self.late(self.table(x)))))

    assert list(functionalize(Model()).params) == ["table", "late", "blocks", "alone", "head"]


def test_no_mode_sees_a_module_being_copied() -> None:
    """A mode of Python's is called for each tensor, and a rehearsal has one."""
    seen: set[Any] = set()

    class Watching(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.add(func)
            return func(*args, **(kwargs or {}))

    model = functionalize(nn.Sequential(*(nn.Linear(2, 2) for _ in range(4))))
    x = torch.ones(2)
    with Watching():
        model.apply(model.params, x)
        assert torch._C._nn.linear in seen and Tensor.clone not in seen
        torch.ones(1)
        assert torch.ones in seen  # it sees what comes behind
