"""What ``zf.foresee`` says of compositions (docs/composition.md) is what simulated ranks send."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import zfunc as zf
from tests.laws.covering import STAGES, Covering
from tests.laws.foreseen_steps import ADAMW, CLIPPED, COUNTED, batch
from tests.laws.pipeline_covering import pairwise_rows
from zfunc.language import gpt
from zfunc.language.gpt import GPTConfig

pytestmark = pytest.mark.usefixtures("thawed")

# Leaves of more elements than a dry run computes, and some of fewer.
SHAPE = GPTConfig(vocab=130, width=72, depth=2, heads=4)
NONE = ""
# Settings of each transform, the bare step first.
SETTINGS: dict[str, dict[str, dict[str, Any]]] = {
    "accumulate": {NONE: {}, "2": {"n": 2}},
    "compress_grads": {
        NONE: {},
        "onebit": {"freeze_step": 1},
        "zero_one": {"freeze_step": 1, "local_step_scaler": 1, "local_step_clipper": 2},
        "int8": {},
        "powersgd": {"rank": 1},
    },
    "donate": {NONE: {}, "yes": {}},
    "drop_layers": {NONE: {}, "yes": {"theta": 0.5, "gamma": 0.1}},
    "offload": {NONE: {}, "cpu": {}, "disk": {}},
    "precision": {
        NONE: {},
        "bf16": {"compute": torch.bfloat16},
        "fp16": {"compute": torch.float16, "loss_scale": "dynamic"},
    },
    "quantize": {
        NONE: {},
        "yes": {"start_bits": 6, "target_bits": 4, "period": 1, "group_size": 4},
    },
    "remat": {NONE: {}, "yes": {}},
}
NAMES = {"compress_grads": "method", "offload": "to"}  # what a setting's name stands for
LAYOUTS: dict[str, dict[str, int]] = {
    "data": {},
    "replica": {"replica": 2},
    "tensor": {"tensor": 2},
    "pipe": {"pipe": 2},
    "tensor x pipe": {"tensor": 2, "pipe": 2},
}
WORLDS = range(2, 9) if Covering.whole else (2, 3, 4)


class Composition(NamedTuple):
    """A layout of ranks, a stage (none is without ``shard``), and a setting of each transform."""

    layout: str
    ranks: int
    stage: int | None
    settings: tuple[str, ...]

    def __str__(self) -> str:
        told = zip(SETTINGS, self.settings, strict=True)
        wrapped = ", ".join(f"{name} {how}" for name, how in told if how)
        return f"{self.layout}, {self.ranks} ranks, stage {self.stage}: {wrapped}"

    @property
    def compressed(self) -> bool:
        """Whether gradients are, from the second step on."""
        return bool(self.settings[list(SETTINGS).index("compress_grads")])

    @property
    def steps(self) -> int:
        return 3 if self.compressed else 2

    @property
    def tx(self) -> Any:
        return ADAMW if self.compressed else CLIPPED

    def step(self, path: Path) -> zf.Step:
        """The step; its files are in ``path``."""
        sizes = LAYOUTS[self.layout]
        if self.ranks % prod(sizes.values()):
            raise ValueError(f"{self.ranks} ranks are no multiple of {sizes}")
        mesh: Any = zf.mesh(**sizes) if sizes else None
        step: Any = zf.train_step(loss, self.tx)
        if "tensor" in sizes:
            step = zf.split(step, rules=gpt.rules(SHAPE), mesh=mesh)
        if "pipe" in sizes:
            step = zf.pipeline(step, 2, mesh=mesh)
        if self.stage is not None:
            step = zf.shard(step, stage=self.stage, unit_bytes=1 << 17, mesh=mesh)
        for name, how in zip(SETTINGS, self.settings, strict=True):
            if how:
                given = {NAMES[name]: how} if name in NAMES else {}
                given |= {"path": str(path)} if how == "disk" else {}
                step = getattr(zf, name)(step, **given, **SETTINGS[name][how])
        return step  # type: ignore[no-any-return]

    def state(self) -> Any:
        return zf.TrainState.create(gpt.init(SHAPE, zf.random.key(0)), self.tx, key=7)


def loss(params: Any, ids: torch.Tensor) -> torch.Tensor:
    return gpt.loss(params, ids, SHAPE)


def allowed(row: Composition) -> bool:
    """Whether the table knows it."""
    try:
        row.step(Path("nowhere"))
    except (zf.CompositionError, ValueError):
        return False
    if row.stage is not None:
        return True
    ways = prod(LAYOUTS[row.layout].values())  # more ranks would drift apart, without shard
    return row.layout not in ("data", "replica") and row.ranks == ways and "disk" not in row[-1]


def pairs() -> Iterator[Composition]:
    """Every two settings of transforms on every layout in every world, stages in turn."""
    plain = (NONE,) * len(SETTINGS)
    rows = [plain]
    for (a, mine), (b, theirs) in combinations(enumerate(SETTINGS.values()), 2):
        for one in mine:
            for other in theirs:
                row = list(plain)
                row[a], row[b] = one, other
                rows.append(tuple(row))
    turn = 0
    for settings in dict.fromkeys(rows):
        for layout in LAYOUTS:
            for ranks in WORLDS:
                every = [
                    row
                    for stage in (*STAGES, None)
                    if allowed(row := Composition(layout, ranks, stage, settings))
                ]
                if every:
                    yield every[turn % len(every)]
                    turn += 1


def covering() -> list[Composition]:
    """Every two values of any two axes."""
    rows = pairwise_rows(
        [list(LAYOUTS), WORLDS, (*STAGES, None), *map(list, SETTINGS.values())],
        cost=lambda row: 1.0,
        tries=12,
        allowed=lambda row: allowed(Composition(*row[:3], row[3:])),
    )
    return [Composition(*row[:3], row[3:]) for row in rows]


def observed(case: Composition, path: Path) -> list[Any]:
    """Of each rank: the ledgers of its steps, the bytes of its state, and its rows."""

    def body() -> Any:
        step, ledgers = case.step(path), []
        state, rows = step.place(case.state()), step.local_batch(batch(case.ranks))
        size = zf.tree.size_bytes(state)
        for _ in range(case.steps):
            with zf.comm.ledger() as sent:
                state, _ = step(state, rows)
            ledgers.append(sent)
        step.close()
        return *ledgers, size, rows

    return zf.simulate(case.ranks)(body)()


@pytest.mark.parametrize("case", [*pairs()] if Covering.whole else covering(), ids=str)
def test_bytes_and_calls_are_those_of_simulated_ranks(case: Composition, tmp_path: Path) -> None:
    """By label, in the first and in a steady step; nothing is written where it is foreseen."""
    seen, absent = observed(case, tmp_path), tmp_path / "absent"
    for rank in (
        range(case.ranks) if Covering.whole else [sum(map(len, case.settings)) % case.ranks]
    ):
        first, *_, steady, size, rows = seen[rank]
        step, told = case.step(absent), (case.ranks, rank)
        seen_by = zf.foresee(step, case.state, rows, *told, device="cpu", steps=case.steps)
        for counted in COUNTED:
            assert getattr(seen_by.first, counted) == getattr(first, counted), (rank, counted)
            assert getattr(seen_by.sent, counted) == getattr(steady, counted), (rank, counted)
        assert seen_by.state_bytes == size
    assert not absent.exists()
