"""Every optimizer on split leaves, at every stage: the numbers of one process."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import zfunc as zf
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


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("shape", [(2, 2), (1, 3)], ids=["2x2", "1x3"])
def test_it_is_that_of_one_process(name: str, shape: tuple[int, int]) -> None:
    tx, mesh = OPTIMIZERS[name], zf.mesh(data=shape[0], tensor=shape[1])
    plain = zf.train_step(loss_fn, tx)
    (want, moments), _ = trained(plain, tx, 3)
    for stage in range(4):
        step = zf.shard(zf.split(zf.train_step(loss_fn, tx), rules=RULES), stage=stage, mesh=mesh)
        for one in (step, zf.donate(step)):
            for (found, state), _ in zf.simulate(math.prod(shape))(trained)(one, tx, 3):
                assert found.keys() == want.keys()
                for path, x in want.items():
                    torch.testing.assert_close(found[path], x, rtol=1e-9, atol=1e-9, msg=path)
                assert {path: x.shape for path, x in state.items()} == {
                    path: x.shape for path, x in moments.items()
                }
