"""Every optimizer on split leaves, at every stage: the numbers of one process."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import zfunc as zf
from tests.laws.covering import each
from tests.laws.split_layers import RULES, batch_of, full_params, loss_fn, trained
from tests.laws.test_optim_laws import EVERY
from zfunc import optim, tree


def in_layers(path: str) -> bool:
    return path.startswith("layers") and not path.endswith("bias")


# Of some leaves alone, so that flats have none, some and all of theirs.
OPTIMIZERS: dict[str, Any] = EVERY | {
    "layers alone": optim.masked(optim.adamw(0.1), in_layers),
    "layers otherwise": optim.multi_transform(
        {"a": optim.adamw(0.1), "b": optim.sgd(0.1, momentum=0.9)},
        lambda path: "b" if in_layers(path) else "a",
    ),
    "two alike": optim.multi_transform(
        {"a": optim.adamw(0.1), "b": optim.lion(0.02)}, lambda path: "ab"["up" in path]
    ),
    "muon": optim.muon(0.02, ns_dtype=None, mask=lambda path: "up" in path),
}
# What clipping gives is computed when the next in the chain looks: it is to see full leaves, too.
CLIPPED: dict[str, Any] = {
    "some": optim.masked(optim.adamw(0.1), in_layers),
    "decayed": optim.chain(optim.masked(optim.add_decayed_weights(0.1), in_layers), optim.sgd(0.1)),
    "adafactor": optim.adafactor(0.1, min_dim_size_to_factor=2),
    "muon": OPTIMIZERS["muon"],
    "by label": OPTIMIZERS["layers otherwise"],
}
# Tree of `test_optim_laws`, whose masks look for names that end with b, and so choose all here.
pytestmark = pytest.mark.filterwarnings("ignore:.*(chooses none|is that of none):UserWarning")


SHAPES = ((2, 2), (1, 3))  # data and tensor ranks
ROWS = each(OPTIMIZERS, range(4), SHAPES, (False, True), times=2)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_is_that_of_one_process(name: str) -> None:
    tx = OPTIMIZERS[name]
    plain = zf.train_step(loss_fn, tx)
    (want, moments), _ = trained(plain, tx, 3)
    for _, stage, shape, donated in (row for row in ROWS if row[0] == name):
        mesh = zf.mesh(data=shape[0], tensor=shape[1])
        step = zf.shard(zf.split(zf.train_step(loss_fn, tx), rules=RULES), stage=stage, mesh=mesh)
        step = zf.donate(step) if donated else step
        for (found, state), _ in zf.simulate(math.prod(shape))(trained)(step, tx, 3):
            assert found.keys() == want.keys()
            for path, x in want.items():
                where = f"{path}, stage {stage}, {shape}, donated: {donated}"
                torch.testing.assert_close(found[path], x, rtol=1e-9, atol=1e-9, msg=where)
            assert {path: x.shape for path, x in state.items()} == {
                path: x.shape for path, x in moments.items()
            }


@pytest.mark.parametrize("name", CLIPPED)
def test_behind_clipping_it_is_that_of_one_process(name: str) -> None:
    tx = optim.chain(optim.clip_by_global_norm(0.01), CLIPPED[name])
    (want, _), _ = trained(zf.train_step(loss_fn, tx), tx, 3)
    for stage, (data, ways) in ((None, (1, 3)), (0, (2, 2)), (1, (2, 2))):
        step = zf.split(
            zf.train_step(loss_fn, tx), rules=RULES, mesh=zf.mesh(data=data, tensor=ways)
        )
        step = step if stage is None else zf.shard(step, stage=stage)
        for (found, _), _ in zf.simulate(data * ways)(trained)(step, tx, 3):
            for path, x in want.items():
                where = f"{path}, stage {stage}"
                torch.testing.assert_close(found[path], x, rtol=1e-9, atol=1e-9, msg=where)


@pytest.mark.parametrize("name", ["clipped", "fused"])
def test_norms_of_updates_are_those_of_full_leaves(name: str) -> None:
    last = {"clipped": optim.identity(), "fused": optim.adamw(0.1)}[name]
    tx = optim.chain(optim.clip_by_global_norm(0.01), last)

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        _, grads = zf.value_and_grad(loss_fn)(state.params, batch)
        updates, _ = tx.update(grads, state.opt_state, state.params)
        return state, {
            "norms": tree.flatten_names(tree.leaf_norms(updates)),
            "full": tree.flatten_names(tree.full(updates)),
        }

    def run(step: Any) -> Any:
        state = step.place(zf.TrainState.create(full_params(), tx))
        return step(state, step.local_batch(batch_of(0)))[1]

    want = run(zf.Step(step))
    split = zf.split(zf.Step(step), rules=RULES, tensor=2)
    for found in zf.simulate(2)(run)(split):
        torch.testing.assert_close(found, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", CLIPPED)
def test_from_disk_it_is_that_of_one_process(name: str, tmp_path: Path) -> None:
    tx = optim.chain(optim.clip_by_global_norm(0.5), CLIPPED[name])
    (want, _), _ = trained(zf.train_step(loss_fn, tx), tx, 3)
    for stage in (1, 3):
        step = zf.split(zf.train_step(loss_fn, tx), rules=RULES, mesh=zf.mesh(data=2, tensor=2))
        step = zf.offload(zf.shard(step, stage=stage), to="disk", path=tmp_path / str(stage))
        for (found, _), _ in zf.simulate(4)(trained)(step, tx, 3):
            for path, x in want.items():
                torch.testing.assert_close(found[path], x, rtol=1e-9, atol=1e-9, msg=path)


@pytest.mark.parametrize("stage", [None, 0])
def test_moments_of_few_bits_have_flats_of_their_own(stage: int | None) -> None:
    """Leaves that are too small for groups have moments elsewhere: there are fewer flats."""
    params = {"small": torch.ones(4), "up": torch.randn(128, 64), "down": torch.randn(64, 128)}
    tx = optim.adamw(0.1, moments=8)

    def loss(p: Any, x: Tensor) -> Tensor:
        return (
            zf.row(torch.tanh(zf.column(x, p["up"])), p["down"]).square().mean() * p["small"].sum()
        )

    def run(wrap: Any) -> Any:
        step = wrap(zf.train_step(loss, tx))
        state = step.place(zf.TrainState.create(zf.tree.map(lambda x: x.double(), params), tx))
        for _ in range(2):
            state, _ = step(state, torch.ones(2, 64, dtype=torch.float64))
        return tree.flatten_names(step.unplace(state).params)

    def split(step: Any) -> Any:
        step = zf.split(step, rules={"up": zf.Cut(0), "down": zf.Cut(1)}, tensor=2)
        return step if stage is None else zf.shard(step, stage=stage)

    want = run(zf.Step)
    for found in zf.simulate(2)(run)(split):
        torch.testing.assert_close(found, want, rtol=1e-9, atol=1e-9)
