"""State per rank is what theory says, and what is sent is what ``describe`` says."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zfunc as zf
from tests.laws.covering import each
from zfunc import optim

WIDTH, DEPTH = 128, 8
TX = optim.adamw(1e-3)


def params() -> dict[str, Any]:
    """About half a million float32 parameters in eight layers and a root."""
    gen = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=gen) * 0.05

    return {
        "first": normal(64, WIDTH),
        "blocks": zf.Layers(
            [
                {"up": normal(WIDTH, 2 * WIDTH), "down": normal(2 * WIDTH, WIDTH)}
                for _ in range(DEPTH)
            ]
        ),
        "last": normal(WIDTH, 10),
    }


def block(p: Any, x: torch.Tensor) -> torch.Tensor:
    return x + torch.tanh(x @ p["up"]) @ p["down"]


def loss_fn(p: Any, batch: Any) -> torch.Tensor:
    x = zf.scan(block, p["blocks"], batch["x"] @ p["first"])
    return torch.nn.functional.cross_entropy(x @ p["last"], batch["y"])


def batch() -> dict[str, torch.Tensor]:
    gen = torch.Generator().manual_seed(1)
    return {"x": torch.randn(12, 64, generator=gen), "y": torch.arange(12) % 10}


COUNT = sum(x.numel() for x in zf.tree.leaves(params()))


def observed(stage: int, ranks: int) -> list[dict[str, int]]:
    """What each rank holds and sends, by ``size_bytes``, the ledger and ``describe``."""

    def body() -> dict[str, int]:
        step = zf.donate(zf.shard(zf.train_step(loss_fn, TX), stage=stage, unit_bytes=1 << 20))
        state = step.place(zf.TrainState.create(params(), TX))
        seen: dict[str, int] = {}
        for _ in range(3):
            with zf.comm.ledger() as led:
                state, _ = step(state, zf.local_batch(batch()))
            text = step.describe()
            seen = {
                "params": zf.tree.size_bytes(state.params),
                "opt_state": zf.tree.size_bytes(state.opt_state),
                "all": zf.tree.size_bytes(state),
                "said": text.state_bytes or 0,
                "sent": led.total_bytes,
                "predicted": text.sent_bytes or 0,
            }
        return seen

    return zf.simulate(ranks)(body)()


@pytest.mark.parametrize(("stage", "ranks"), each([0, 1, 2, 3], [1, 2, 3, 4], times=2))
def test_state_and_traffic(stage: int, ranks: int) -> None:
    for seen in observed(stage, ranks):
        params_share = ranks if stage == 3 else 1
        moments_share = ranks if stage >= 1 else 1
        assert seen["params"] == pytest.approx(4 * COUNT / params_share, rel=0.02)
        assert seen["opt_state"] == pytest.approx(8 * COUNT / moments_share, rel=0.02)
        assert seen["said"] == seen["all"]
        assert seen["sent"] == seen["predicted"]
        whole_trips = 4 * COUNT * (ranks - 1) / ranks
        if stage < 3:
            assert seen["sent"] == pytest.approx(2 * whole_trips, rel=0.02)
        else:
            assert 2 * whole_trips <= seen["sent"] <= 3 * whole_trips * 1.02


def test_gradients_at_stage_three_are_cut_as_well() -> None:
    def body() -> int:
        sizes = []

        def step(state: Any, batch: Any) -> Any:
            loss, grads = zf.value_and_grad(loss_fn)(state.params, batch)
            sizes.append(zf.tree.size_bytes(grads))
            return state, {"loss": loss}

        wrapped = zf.shard(step, stage=3)
        wrapped(wrapped.place(zf.TrainState.create(params(), TX)), zf.local_batch(batch()))
        return sizes[0]

    for size in zf.simulate(4)(body)():
        assert size == pytest.approx(4 * COUNT / 4, rel=0.02)


def test_persisted_leaves_are_what_theory_leaves_out() -> None:
    def body() -> int:
        step = zf.shard(zf.train_step(loss_fn, TX), stage=3, persist_below=WIDTH * 10 + 1)
        return zf.tree.size_bytes(step.place(zf.TrainState.create(params(), TX)).params)

    small = WIDTH * 10
    for size in zf.simulate(2)(body)():
        assert size == pytest.approx(4 * ((COUNT - small) / 2 + small), rel=0.02)


@pytest.mark.parametrize("ranks", [17, 20])
def test_all_reduces_in_two_rounds_are_foreseen_in_large_groups_too(ranks: int) -> None:
    def loss(p: Any, batch: torch.Tensor) -> torch.Tensor:
        return ((batch @ p["w"]) ** 2).mean()

    def body() -> tuple[int, int | None]:
        step = zf.shard(zf.train_step(loss, TX), stage=0)
        state = step.place(zf.TrainState.create({"w": torch.ones(130, 150)}, TX))
        batch = torch.ones(2, 130)
        predicted = step.describe(batch).sent_bytes if not zf.rank() else None
        step(state, batch)
        with zf.comm.ledger() as led:
            step(state, batch)
        return led.total_bytes, predicted

    sent, predicted = zf.simulate(ranks)(body)()[0]
    assert sent == predicted
