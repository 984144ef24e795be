"""Stages in files: whatever has saved, whatever restores, nothing but the numbers is there."""

from __future__ import annotations

from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from safetensors.torch import load_file
from torch import Tensor

import zfunc as zf
from tests.laws.cases import assert_near, assert_same
from tests.laws.pipelines import TX, model_of
from zfunc import tree

NAME, MICROBATCHES = "tied gpt", 4


class Place(NamedTuple):
    """Where a state is; no schedule is a step without a pipeline."""

    pipe: int
    data: int
    stage: int
    schedule: str = ""

    @property
    def world(self) -> int:
        return self.pipe * self.data


PLACES = [
    Place(1, 1, 0), Place(1, 3, 3), Place(1, 1, 1, "1f1b"), Place(2, 1, 0, "1f1b"),
    Place(2, 2, 1, "zb"), Place(2, 2, 3, "zbv"), Place(3, 1, 2, "interleaved"),
    Place(4, 1, 3, "gpipe"), Place(4, 1, 0, "1f1b"),
]  # fmt: skip


def begun(place: Place) -> tuple[Any, Any]:
    """A step, and the state that it begins with."""
    model = model_of(NAME)
    step = zf.train_step(model.loss, TX)
    if place.schedule:
        mesh = zf.mesh(data=place.data, pipe=place.pipe)
        step = zf.pipeline(step, MICROBATCHES, schedule=place.schedule, mesh=mesh)
    else:
        step = zf.accumulate(step, MICROBATCHES)
    step = zf.shard(step, stage=place.stage)
    return step, step.place(zf.TrainState.create(model.params, TX, key=7))


def advanced(step: Any, state: Any, i: int) -> Any:
    return step(state, step.local_batch(model_of(NAME).batch(i)))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[Place, tuple[Path, Any]]:
    """Of each place a folder, and the full state that is in it."""

    def body(place: Place, folder: Path) -> Any:
        step, state = begun(place)
        state, _ = advanced(step, state, 0)
        zf.save(folder, state)
        return step.unplace(state)

    folders = {place: tmp_path_factory.mktemp("saved") for place in PLACES}
    return {
        place: (folder, zf.simulate(place.world)(body)(place, folder)[0])
        for place, folder in folders.items()
    }


@pytest.mark.parametrize(("there", "here"), list(product(PLACES, PLACES)))
def test_what_is_restored_is_what_was_saved(
    there: Place, here: Place, saved: dict[Place, tuple[Path, Any]]
) -> None:
    folder, full = saved[there]

    def body() -> None:
        step, state = begun(here)
        assert_same(step.unplace(zf.restore(folder, state)), full)

    zf.simulate(here.world)(body)()


@pytest.mark.parametrize("place", PLACES)
def test_each_element_is_written_once(place: Place, saved: dict[Place, tuple[Path, Any]]) -> None:
    folder, full = saved[place]
    elements = sum(
        x.numel() for file in folder.rglob("*.safetensors") for x in load_file(file).values()
    )
    assert elements == sum(x.numel() for x in tree.leaves(full) if isinstance(x, Tensor))


@pytest.mark.parametrize("place", PLACES)
def test_a_step_goes_on_with_it(place: Place, saved: dict[Place, tuple[Path, Any]]) -> None:
    """From one process's files; its own next step is the law."""
    folder, _ = saved[PLACES[0]]

    def body(place: Place) -> Any:
        step, state = begun(place)
        state, metrics = advanced(step, zf.restore(folder, state), 1)
        return metrics, step.unplace(state)

    wanted = zf.simulate(1)(body)(PLACES[0])[0]
    for found in zf.simulate(place.world)(partial(body, place))():
        assert_near(found, wanted, 1e-9)
