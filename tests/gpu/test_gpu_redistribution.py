"""Collectives in user code on tensors of a pretended GPU: the host's numbers, without races."""

from __future__ import annotations

from typing import Any

import zfunc as zf
from tests.gpu import ranks
from tests.gpu.cuda import active
from tests.unit.test_redistribution import everything


def on_gpus() -> tuple[list[Any], int]:
    active().take()
    told = everything(2, "cuda")
    return told, active().take().count("race")


def test_values_gradients_and_bytes_are_those_of_the_host() -> None:
    found = ranks.launch(on_gpus)
    assert [told for told, _ in found] == zf.simulate(2)(everything)(2)
    assert [races for _, races in found] == [0, 0]
