"""Optimizers take kernels where the dispatch has them, and step as without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import zfunc as zf
from tests.kernels.closeness import assert_near
from zfunc import kernels, optim
from zfunc.kernels import adamw_triton, lamb_triton, lion_triton
from zfunc.optim import fused
from zfunc.optim.updates import Moved


def no_bias(path: str) -> bool:
    return path != "b"


MAKERS: dict[str, Callable[[], Any]] = {
    "adamw": lambda: optim.adamw(0.1, mask=no_bias),
    "lion": lambda: optim.lion(0.01, weight_decay=0.1, mask=no_bias),
    "lamb": lambda: optim.lamb(0.1, weight_decay=0.1, mask=no_bias),
}
LAUNCHERS = {"adamw": adamw_triton, "lion": lion_triton, "lamb": lamb_triton}


def trained(name: str, grads: list[dict[str, Tensor]]) -> tuple[Any, Any]:
    tx = optim.chain(optim.clip_by_global_norm(1.0), MAKERS[name]())
    params = {"b": torch.ones(7), "w": torch.linspace(-1, 1, 300).view(3, 100)}
    state = tx.init(params)
    for grad in grads:
        updates, state = tx.update(grad, state, params)
        params = optim.apply_updates(params, updates)
    return params, state


@pytest.mark.parametrize("name", MAKERS)
def test_a_training_is_the_same(name: str, monkeypatch: pytest.MonkeyPatch):
    grads = [{"b": torch.randn(7), "w": torch.randn(3, 100)} for _ in range(3)]
    expected, state = trained(name, grads)
    launched = []
    step = "lamb_moments" if name == "lamb" else f"{name}_flat"
    launch = getattr(LAUNCHERS[name], step)

    def noted(*args: Any, **how: Any) -> None:
        launched.append(args[0].numel())
        launch(*args, **how)

    monkeypatch.setattr(LAUNCHERS[name], step, noted)
    with kernels.use("triton"):
        found, same = trained(name, grads)
    assert sum(launched) >= 3 * 307
    pairs = zip(zf.tree.leaves((found, same)), zf.tree.leaves((expected, state)), strict=True)
    for x, y in pairs:
        if x.is_floating_point():
            assert_near(x, y.double())
        else:
            assert torch.equal(x, y)


@pytest.mark.parametrize("name", ["lion", "lamb"])
def test_updates_can_be_told_afterwards(name: str):
    """They are made only where somebody looks, and then are what has been added."""
    tx, grads = MAKERS[name](), {"b": torch.randn(7), "w": torch.randn(3, 100)}
    params = {"b": torch.ones(7), "w": torch.linspace(-1, 1, 300).view(3, 100)}
    state = tx.init(params)
    for _ in range(2):
        expected, _ = tx.update(grads, state, params)
        with kernels.use("triton"):
            updates, state = tx.update(grads, state, params)
        assert isinstance(updates, Moved)
        for k, x in params.items():
            torch.testing.assert_close(updates[k], expected[k], rtol=1e-4, atol=1e-6)
            assert_near(updates.new[k], (x + expected[k]).double())
        params = optim.apply_updates(params, updates)


@pytest.mark.parametrize("factor", [None, 0.0, 0.5, torch.tensor(0.25)])
def test_the_factor_may_be_a_tensor(factor: float | Tensor | None):
    rows = [torch.randn(130), torch.randn(130), torch.randn(130), torch.rand(130)]
    found = []
    for route in ("torch", "triton"):
        mine = [x.clone() for x in rows]
        how = {"count": torch.tensor(3), "lr": 0.1, "b1": 0.9, "b2": 0.999, "eps": 1e-8}
        with kernels.use(route):  # type: ignore[arg-type]
            fused.adamw_([tuple(mine)], [[(0, 130, 0.1)]], factor=factor, **how)  # type: ignore[arg-type]
        found.append(mine)
    for x, y in zip(*found, strict=True):
        assert_near(y, x.double())
