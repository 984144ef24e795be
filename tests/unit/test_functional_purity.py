"""What a call leaves behind: nothing; under threads, errors, recomputation and torch.func."""

from __future__ import annotations

import gc
import pickle
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.unit.functional_models import (
    MODULES,
    WAYS,
    ConvNet,
    Tied,
    X,
    as_refs,
    at_rest,
    run,
    square,
)
from zfunc import tree
from zfunc.modules.functional import functionalize


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


class Recomputing(nn.Module):
    """Recomputes by itself a layer of the root, or one of a stack."""

    def __init__(self, stacked: bool) -> None:
        super().__init__()
        part = nn.Linear(4, 4)
        self.parts = nn.ModuleList([part]) if stacked else nn.Sequential()
        self.part = nn.Identity() if stacked else part
        self.stacked = stacked

    def forward(self, x: Tensor) -> Tensor:
        part = self.parts[0] if self.stacked else self.part
        return checkpoint(part, x, use_reentrant=False).square().mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_a_module_that_recomputes_itself_finds_its_parameters(way: str, stacked: bool) -> None:
    f = functionalize(Recomputing(stacked))
    params = tree.map(lambda x: x.detach().requires_grad_(), f.params)
    loss = f.apply(WAYS[way](params), torch.ones(2, 4))
    grads = torch.autograd.grad(loss, tree.leaves(params))
    (part,) = f.params["parts"] if stacked else (f.params["part"],)
    own = {name: p.detach().clone().requires_grad_() for name, p in part.items()}
    expected = F.linear(torch.ones(2, 4), **own).square().mean()
    wanted = torch.autograd.grad(expected, [own["bias"], own["weight"]])
    assert all(map(torch.equal, grads, wanted))
    del loss
    at_rest(f)


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
