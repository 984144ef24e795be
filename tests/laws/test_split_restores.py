"""Split states in files, as steps place them: at any ranks, stage and tier, into any other.

What comes back is bitwise what was saved, moments included, and a step goes on with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count, product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import zfunc as zf
from tests.laws.cases import ADAMW, assert_same, numbers
from tests.laws.covering import Covering
from zfunc import tree
from zfunc.layout.splits import Cut, Part, mark
from zfunc.transforms.splitting import split

RULES = {"qkv": Cut(0, parts=3, by=4), "out": Cut(1), "up": Cut(0), "mid": Cut(1, by=4)}
SHAPES = {"qkv": (24, 5), "out": (5, 12), "up": (9, 5), "mid": (3, 4, 2), "b": (7,), "n": (5,)}


class Place(NamedTuple):
    """Where a state is: so many ranks along each axis; no stage is a split step alone."""

    data: int
    tensor: int
    stage: int | None
    disk: bool = False
    replica: int = 1

    @property
    def world(self) -> int:
        return self.replica * self.data * self.tensor


PLACES = [
    Place(1, 1, 0), Place(1, 2, None), Place(1, 2, 3), Place(2, 2, 0), Place(2, 2, 1),
    Place(2, 2, 2), Place(2, 2, 3), Place(1, 3, 2), Place(4, 1, 3), Place(1, 4, 1),
    Place(1, 4, None), Place(2, 2, 3, disk=True), Place(1, 3, 2, disk=True),
    Place(2, 2, 3, replica=2), Place(1, 2, 1, replica=2), Place(1, 3, 0, replica=2),
]  # fmt: skip


def state(fill: bool = True) -> Any:
    numbered = count(10)
    blank = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    one = lambda x: numbers(tuple(x.shape), next(numbered)) if x.ndim else x + 3  # noqa: E731
    made = zf.TrainState.create(blank, ADAMW)
    return tree.map(one, made) if fill else made


def loss(params: dict[str, Tensor], batch: Any) -> Any:
    return params["b"].square().sum()


@contextmanager
def step_at(place: Place, folder: Path) -> Iterator[Any]:
    mesh = zf.mesh(data=place.data, tensor=place.tensor, replica=place.replica)
    step = split(zf.train_step(loss, ADAMW), rules=RULES, mesh=mesh)
    if place.disk:
        step = zf.offload(step, to="disk", path=folder / "tier")
    if place.stage is not None:
        step = zf.shard(step, stage=place.stage, mesh=mesh)
    with step:
        yield step


def pairs() -> list[tuple[Place, Place]]:
    """Every pair with ``--whole``, else some of them: each saves, and each restores."""
    n = len(PLACES)
    steps = range(n) if Covering.whole else (1, 6)
    return [(PLACES[i], PLACES[(i + by) % n]) for i, by in product(range(n), steps)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[Place, Path]:
    folders = {place: tmp_path_factory.mktemp("saved") for place in PLACES}
    for place, folder in folders.items():

        def body(place: Place = place, folder: Path = folder) -> None:
            with step_at(place, folder) as step:
                zf.save(folder / "files", step.place(state()), step=3)

        zf.simulate(place.world)(body)()
    return folders


@pytest.mark.parametrize(("there", "here"), pairs())
def test_what_is_restored_is_what_was_saved(
    there: Place, here: Place, saved: dict[Place, Path], tmp_path: Path
) -> None:
    def body() -> None:
        with step_at(here, tmp_path) as step:
            like = step.place(state(fill=False))
            back = zf.restore(saved[there] / "files", like)
            assert type(back.params) is type(like.params)
            assert_same(step.unplace(back), state())

    zf.simulate(here.world)(body)()


@pytest.mark.parametrize("place", PLACES)
def test_each_element_is_written_once(place: Place, saved: dict[Place, Path]) -> None:
    """By one of the ranks that hold it: replicas, and the tensor ranks of whole leaves."""
    files = (saved[place] / "files").rglob("*.safetensors")
    elements = sum(x.numel() for file in files for x in load_file(file).values())
    tensors = [x for x in tree.leaves(state()) if isinstance(x, Tensor)]
    assert elements == sum(x.numel() for x in tensors)


@pytest.mark.parametrize("place", PLACES)
def test_a_split_state_goes_on_where_it_was(
    place: Place, saved: dict[Place, Path], tmp_path: Path
) -> None:
    batch = torch.zeros(4)

    def body() -> None:
        with step_at(place, tmp_path) as step:
            there = step.unplace(step(step.place(state()), batch)[0])
            back = zf.restore(saved[place] / "files", step.place(state(fill=False)))
            assert_same(step.unplace(step(back, batch)[0]), there)

    zf.simulate(place.world)(body)()


@pytest.mark.parametrize("place", PLACES)
def test_params_go_to_model_files_and_come_back(place: Place, tmp_path: Path) -> None:
    def body() -> None:
        with step_at(place, tmp_path) as step:
            zf.export_safetensors(tmp_path / "files", step.place(state()).params)
            like = step.place(state(fill=False))
            new = zf.import_safetensors(tmp_path / "files", like.params)
            assert_same(zf.full(new), state().params)

    zf.simulate(place.world)(body)()
    assert_same(load_file(tmp_path / "files" / "model.safetensors"), state().params)


def test_plain_leaves_that_are_marked_as_parts_are_parts_in_files(tmp_path: Path) -> None:
    full = numbers((5, 12), 1)

    def placed(ways: int, x: Tensor) -> dict[str, Any]:
        mesh = zf.mesh(data=-1, tensor=ways)
        part = Part(Cut(1).split((5, 12), ways), mesh, "tensor")
        own = part.split.local(x, part.group.rank)  # type: ignore[union-attr]
        return {"w": mark(own.clone(), part), "step": 1}

    zf.simulate(4)(lambda: zf.save(tmp_path, placed(2, full)).step)()

    def back() -> None:
        new = zf.restore(tmp_path, placed(3, torch.zeros_like(full)))
        assert_same(zf.full(new["w"]), full)

    zf.simulate(3)(back)()
    assert_same(zf.restore(tmp_path, {"w": torch.zeros_like(full), "step": 0})["w"], full)
