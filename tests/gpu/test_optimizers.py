"""Optimizers on the pretended device: nobody waits for it, and few things are launched."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zfunc as zf
from tests.gpu.cuda import Cuda
from tests.gpu.training import gpt_model, trained
from tests.laws.covering import each
from zfunc import optim

RATE = optim.warmup_cosine(1e-2, warmup=2, steps=9, start=1e-3)


def no_bias(path: str) -> bool:
    return not path.endswith("b")


TXS: dict[str, Any] = {
    "sgd": optim.sgd(RATE),
    "momentum": optim.sgd(RATE, momentum=0.9, nesterov=True),
    "adam": optim.adam(RATE),
    "adamw": optim.adamw(RATE, mask=no_bias),
    "lion": optim.lion(RATE, weight_decay=0.1, mask=no_bias),
    "lamb": optim.lamb(RATE, weight_decay=0.1, mask=no_bias),
    "skipping": optim.skip_nonfinite(optim.adamw(RATE)),
    "smoothed": optim.chain(optim.sgd(RATE), optim.ema(0.9)),
}
CASES = {
    **TXS,
    **{
        f"clipped {name}": optim.chain(optim.clip_by_global_norm(0.5), tx)
        for name, tx in TXS.items()
    },
}
WRAPS: dict[str, Any] = {
    "bare": lambda step: step,
    "stage 0": lambda step: zf.shard(zf.donate(step), stage=0),
    "stage 2": lambda step: zf.shard(zf.donate(step), stage=2),
    "stage 3": lambda step: zf.shard(zf.donate(step), stage=3, unit_bytes=1 << 12),
}
MODEL = gpt_model(depth=2)


PAIRS = [(w, n) for i, n in enumerate(CASES) for j, w in enumerate(WRAPS) if (i // 2 + j) % 2 == 0]


@pytest.mark.parametrize(("wrap", "name"), PAIRS)
def test_nobody_waits(wrap: str, name: str):
    with Cuda():
        found = trained(WRAPS[wrap], CASES[name], MODEL)
    for report in found.reports:
        assert [str(row) for row in report.host_waits()] == []
        assert report.faults() == []
    plain = trained(WRAPS[wrap], CASES[name], MODEL, on_gpu=False)
    names = zf.tree.flatten_names(plain.state.params)
    for path, x in zf.tree.flatten_names(found.state.params).items():
        same = torch.isclose(x, names[path], rtol=2e-4, atol=2e-5)
        # The sign that Lion takes of a sum may hang on its last bit.
        assert same.sum() >= same.numel() - ("lion" in name), path


def test_plain_leaves_are_updated_together():
    params = {f"p{i}": torch.randn(5, 3) for i in range(40)}
    for name in ("adamw", "lion"):
        with Cuda() as cuda:
            mine = zf.tree.map(lambda x: x.cuda(), params)
            tx = CASES[f"clipped {name}"]
            state = tx.init(mine)
            cuda.take()
            updates, _ = tx.update(mine, state, mine)
            optim.apply_updates(mine, updates)
            report = cuda.take()
        assert report.count("kernel") <= 2
        assert not report.host_waits()


def poisoned(wrap: Any, tx: Any, bad: tuple[int, ...], on_gpu: bool) -> Any:
    """Training of which some batches make infinite gradients."""

    def loss_fn(params: Any, batch: torch.Tensor) -> torch.Tensor:
        return (params["w"] @ batch).square().sum() + params["b"].sum() * batch.sum()

    step = wrap(zf.train_step(loss_fn, tx))
    up = (lambda x: x.cuda()) if on_gpu else (lambda x: x)
    params = {"w": torch.linspace(-1, 1, 70).view(7, 10), "b": torch.ones(3)}
    state = step.place(zf.TrainState.create(zf.tree.map(up, params), tx))
    for i in range(6):
        batch = torch.full((10,), float("inf") if i in bad else 0.1 * (i + 1))
        state, _ = step(state, up(batch))
    return zf.tree.map(lambda x: x.cpu(), step.unplace(state))


@pytest.mark.parametrize(
    ("name", "wrap"),
    each(["adamw", "lion", "momentum", "smoothed", "clipped lamb"], WRAPS, times=2),
)
def test_a_step_that_is_not_finite_changes_nothing(wrap: str, name: str):
    tx, bad = optim.skip_nonfinite(CASES[name]), (0, 2, 3)
    expected = poisoned(WRAPS[wrap], tx, bad, on_gpu=False)
    with Cuda() as cuda:
        found = poisoned(WRAPS[wrap], tx, bad, on_gpu=True)
        assert cuda.take().faults() == []
    names = zf.tree.flatten_names(expected)
    for path, x in zf.tree.flatten_names(found).items():
        torch.testing.assert_close(x, names[path], rtol=1e-4, atol=1e-6, msg=path)
    assert found.opt_state.total_skipped == 3
    assert found.opt_state.consecutive == 0


def test_too_many_in_a_row_are_noticed_a_step_later():
    tx = optim.skip_nonfinite(optim.sgd(0.1), max_consecutive=2)
    with Cuda():
        poisoned(WRAPS["bare"], tx, (1, 2), on_gpu=True)
        with pytest.raises(zf.NonFiniteError, match="last 3 steps"):
            poisoned(WRAPS["bare"], tx, (1, 2, 3), on_gpu=True)
