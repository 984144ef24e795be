"""``optim.adamw`` takes the kernel where the dispatch has it, and steps as without."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.closeness import assert_near
from zfunc import kernels, optim
from zfunc.kernels import adamw_triton
from zfunc.optim import fused


def trained(grads: list[dict[str, Tensor]]) -> tuple[Any, Any]:
    tx = optim.chain(
        optim.clip_by_global_norm(1.0), optim.adamw(0.1, mask=lambda path: path != "b")
    )
    params = {"b": torch.ones(7), "w": torch.linspace(-1, 1, 300).view(3, 100)}
    state = tx.init(params)
    for grad in grads:
        updates, state = tx.update(grad, state, params)
        params = optim.apply_updates(params, updates)
    return params, state


def test_a_training_is_the_same(monkeypatch: pytest.MonkeyPatch):
    grads = [{"b": torch.randn(7), "w": torch.randn(3, 100)} for _ in range(3)]
    expected, _ = trained(grads)
    launched = []
    launch = adamw_triton.launch

    def noted(*args: Any, **how: Any) -> None:
        launched.append(args[1].numel())
        launch(*args, **how)

    monkeypatch.setattr(adamw_triton, "launch", noted)
    with kernels.use("triton"):
        found, _ = trained(grads)
    assert sum(launched) >= 3 * 307
    for name, x in found.items():
        assert_near(x, expected[name].double())


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
