"""Every optimizer on split leaves, at every stage: the numbers of one process."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import zfunc as zf
from tests.laws.covering import each
from tests.laws.split_layers import RULES, loss_fn, trained
from tests.laws.test_optim_laws import EVERY
from zfunc import optim


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
