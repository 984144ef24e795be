"""The norm of a step's gradients is taken once, and never when they have changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zfunc as zf
from zfunc import optim, tree
from zfunc.engine import context
from zfunc.layout.cutting import make_layout
from zfunc.layout.sharded import cut

TX = optim.chain(optim.clip_by_global_norm(0.1), optim.adamw(0.1))


def loss_fn(params: Any, batch: torch.Tensor) -> torch.Tensor:
    x = zf.scan(lambda p, h: torch.tanh(h @ p["w"]), params["layers"], batch)
    return (x**2).mean()


def params() -> Any:
    return {"layers": zf.Layers([{"w": torch.randn(6, 6)} for _ in range(3)])}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_clip_and_the_metric_share_one_collective(stage: int):
    step = zf.shard(zf.train_step(loss_fn, TX), stage=stage)
    full = zf.TrainState.create(params(), TX)

    def rank() -> tuple[int, float]:
        state, batch = step.place(full), torch.randn(2, 6)
        state, _ = step(state, batch)
        with zf.comm.ledger() as sent:
            _, metrics = step(state, batch)
        return sent.calls_by_label["sums of leaves"], metrics["grad_norm"].item()

    (first, norm), (second, other) = zf.simulate(2)(rank)()
    assert (first, second) == (1, 1)
    assert norm == other


@pytest.fixture
def running():
    token = context.push(context.Context())
    yield
    context.pop(token)


@pytest.mark.usefixtures("running")
@pytest.mark.parametrize("placed", [False, True])
def test_what_was_written_to_has_another_norm(placed: bool, monkeypatch: pytest.MonkeyPatch):
    grads: Any = {"a": torch.tensor([3.0]), "b": torch.tensor([4.0]), "none": None}
    if placed:
        grads = cut(make_layout(grads), grads, 0)
    asked: list[Any] = []
    taken = tree._norm
    monkeypatch.setattr(tree, "_norm", lambda nodes: asked.append(nodes) or taken(nodes))
    norm = tree.global_norm(grads)
    norm.add_(1)  # whoever has it may write into it
    assert tree.global_norm(grads).item() == 5
    assert tree.global_norm(tree.map(lambda x: x * 2, grads)).item() == 10
    assert len(asked) == 2
    tree.leaves(grads)[0].mul_(2)
    assert tree.global_norm(grads).item() == pytest.approx(10 if placed else 52**0.5)
    assert len(asked) == 3


@pytest.mark.usefixtures("running")
def test_a_tensor_given_other_memory_has_another_norm():
    grads = [torch.ones(4), torch.ones(5)]
    assert tree.global_norm(grads).item() == 3
    grads[0].data = torch.full((4,), 3.0)
    assert tree.global_norm(grads).item() == pytest.approx(41**0.5)


@pytest.mark.usefixtures("running")
def test_nothing_is_kept_alive_and_ids_do_not_matter():
    import weakref

    norms = []
    for size in (1.0, 2.0, 3.0, 4.0, 5.0, 6.0):
        grads = [torch.full((1,), size)]
        norms.append(tree.global_norm(grads).item())
        gone = weakref.ref(grads[0])
        del grads
        assert gone() is None
    assert norms == [1, 2, 3, 4, 5, 6]


@pytest.mark.usefixtures("running")
def test_where_nobody_counts_writing_it_is_taken_anew():
    with torch.inference_mode():
        grads = [torch.ones(4)]
        assert tree.global_norm(grads).item() == 2
        grads[0].mul_(2)
        assert tree.global_norm(grads).item() == 4
