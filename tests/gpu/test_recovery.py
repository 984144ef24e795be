"""After an error the communicators are gone: ``recover_world`` makes new ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zfunc as zf
from tests.gpu import ranks
from tests.laws.cases import regression
from tests.laws.models import stack, stack_loss
from zfunc import optim
from zfunc.ranks.axes import group


def _trained(stage: int) -> Any:
    """Whether a run that failed is as one that has not, and whether all communicators are new."""
    same = []
    for fails in (False, True):
        step = zf.shard(zf.train_step(stack_loss, optim.sgd(0.1)), stage=stage, unit_bytes=1)
        start = zf.TrainState.create(stack(torch.float32), optim.sgd(0.1))
        state = step.place(zf.tree.map(lambda x: x.cuda(), start))
        for i in range(3):
            batch = zf.local_batch(regression(i, torch.float32))
            batch = {name: x.cuda() for name, x in batch.items()}
            if fails and i == 1:
                everyone: Any = group(None, "data")
                old = everyone._transport
                with pytest.raises(zf.DesyncError):
                    everyone.exchange(1, label=f"by {zf.rank()}")
                assert old._aborted
                zf.recover_world(state)
                new = everyone._transport
                assert new is not old and new._pg is not old._pg and not new._aborted
            state, _ = step(state, batch)
        same.append([x.cpu().tolist() for x in zf.tree.leaves(zf.full(state).params)])
    return same[0] == same[1]


@pytest.mark.parametrize("stage", [2])
def test_training_goes_on_over_new_communicators(stage: int) -> None:
    assert ranks.launch(_trained, stage, alone=True) == [True, True]
