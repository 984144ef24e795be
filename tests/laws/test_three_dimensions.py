"""data x tensor x pipe: where one process ends, and in its files, bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import zfunc as zf
from tests.laws import split_steps, three_dimensions
from tests.laws.cases import assert_near, assert_same
from tests.laws.covering import Covering, each
from tests.laws.three_dimensions import ALONE, Place, advanced, alone, begun, parts, run
from zfunc import optim, tree
from zfunc.optim import DynamicScale

NAMES = ("gpt", "tied llama")
EVERY = [Place(2, 2, 2, *how) for how in product((0, 1, 3), ("1f1b", "zbv"))]
FEW = {
    "gpt": [EVERY[i] for i in (0, 3)],
    "tied llama": [EVERY[i] for i in (2, 5)],
}
RUNS = [(name, place) for name in NAMES for place in (EVERY if Covering.whole else FEW[name])]
LAMB = optim.chain(optim.clip_by_global_norm(0.5), optim.lamb(0.02, weight_decay=0.1))


@pytest.mark.parametrize(("name", "place"), RUNS, ids=str)
def test_a_mesh_ends_where_one_process_does(name: str, place: Place) -> None:
    """With clipping: norms of tied, split and replicated leaves count once."""
    runs = run(name, place)
    for mine in runs:
        assert_near(mine, alone(name), 1e-9)
        assert_same(mine, runs[0])


@pytest.mark.parametrize(
    ("name", "place"),
    [("gpt", Place(2, 2, 2, 3, "zbv")), ("tied llama", Place(2, 2, 2, 1, "zb"))],
    ids=str,
)
def test_lamb_has_the_norms_of_whole_leaves(name: str, place: Place) -> None:
    runs = run(name, place, LAMB)
    for mine in runs:
        assert_near(mine, alone(name, LAMB), 1e-9)
        assert_same(mine, runs[0])


# An overflow


def spoilt(rank: int, leaf: str) -> Callable[..., Any]:
    """A loss in which one rank's gradient of a leaf of the third layer overflows at times."""

    def third(p: Any, x: Tensor, bad: bool) -> Tensor:
        if bad and zf.rank() == rank and type(x) is Tensor:  # and no ghost
            p[leaf].register_hook(lambda grad: torch.full_like(grad, float("inf")))
        return split_steps.block(p, x)

    def loss(params: Any, batch: Any) -> Tensor:
        x = zf.embed(batch["ids"], params["table"])
        for i, p in enumerate(params["blocks"]):
            x = zf.layer(third, p, x, batch["bad"] and i == 2)
        return zf.cross_entropy(zf.column(x[:, :-1], params["table"]), batch["ids"][:, 1:])

    return loss


@pytest.mark.parametrize(
    ("schedule", "stage", "leaf"), [("1f1b", 1, "q"), ("zb", 3, "up"), ("gpipe", 0, "down")]
)
def test_an_overflow_on_one_rank_leaves_the_step_out_on_all(
    schedule: str, stage: int, leaf: str
) -> None:
    place, tx = Place(2, 2, 2, stage, schedule), three_dimensions.TX
    params = tree.map(lambda x: x.float(), parts("gpt")[0].params)
    rank = place.world - 1  # the last along each axis

    def body() -> Any:
        step = zf.train_step(spoilt(rank, leaf), tx)
        step = zf.precision(step, compute=torch.float16, loss_scale=DynamicScale(power=4))
        step = three_dimensions.wrapped("gpt", place)(step)
        state = step.place(zf.TrainState.create(params, tx, key=7))
        told, states = [], []
        for i, bad in enumerate([False, True, True, False]):
            batch = {**step.local_batch(parts("gpt")[0].batch(i)), "bad": bad}
            state, metrics = step(state, batch)
            told.append(metrics)
            states.append(step.unplace(state))
        return told, states

    found = zf.simulate(place.world)(body)()
    for told, states in found:
        assert [bool(row["overflow"]) for row in told] == [False, True, True, False]
        assert told[1]["overflow_leaf"] == f"blocks.2.{leaf}"
        assert [float(row["loss_scale"]) for row in told] == [16, 16, 16, 8]
        assert_same(states[2].params, states[0].params)
        assert_same(states[2].opt_state, states[0].opt_state)
        assert not torch.equal(states[3].params["table"], states[0].params["table"])
        assert_same([told, states], [*found[0]])


# Files

SAVED = {"gpt": Place(2, 2, 2, 3, "zbv"), "tied llama": Place(2, 2, 2, 1, "1f1b")}
ELSEWHERE = [
    ALONE, Place(2, 1, 2, 3), Place(1, 2, 2, 0, "zbv"), Place(1, 4, 1, 1), Place(1, 3, 1, 3),
]  # fmt: skip


@cache
def saved(name: str, folder: Path) -> Any:
    """The full state behind two steps, which is in a folder as checkpoint and as model files."""
    parts(name)

    def body() -> Any:
        step, state = begun(name, SAVED[name])
        _, state = advanced(name, step, state, range(2))
        zf.save(folder / name, state)
        zf.export_safetensors(folder / f"{name} model", state.params, shard_bytes=3000)
        return step.unplace(state)

    return zf.simulate(SAVED[name].world)(body)()[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saved")


@pytest.mark.parametrize(("place", "name"), each(ELSEWHERE, NAMES), ids=str)
def test_what_a_mesh_saves_any_other_restores(name: str, place: Place, folder: Path) -> None:
    full = saved(name, folder)

    def body() -> Any:
        step, state = begun(name, place)
        state = zf.restore(folder / name, state)
        assert_same(step.unplace(state), full)
        return advanced(name, step, state, range(2, 3))[0]

    found = zf.simulate(place.world)(body)() if place.world > 1 else [body()]
    for metrics in found:
        assert_near(metrics, alone(name)[0][2:], 1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_model_files_are_those_of_one_process(name: str, folder: Path, tmp_path: Path) -> None:
    full = saved(name, folder)
    zf.export_safetensors(tmp_path, full.params, shard_bytes=3000)
    mine, theirs = (
        {file.name: file.read_bytes() for file in place.iterdir()}
        for place in (folder / f"{name} model", tmp_path)
    )
    assert mine == theirs and len(mine) > 1

    def body() -> None:
        _, state = begun(name, SAVED[name])
        new = zf.import_safetensors(folder / f"{name} model", state.params)
        assert_same(zf.full(new), full.params)

    zf.simulate(SAVED[name].world)(body)()
