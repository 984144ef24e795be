"""Every pair of options on a real GPU computes what the host computes.

The options are those of the pretended device (``tests/gpu/cases.py``), on one rank.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest

import zfunc as zf
from tests.gpu import cases
from tests.gpu.covering import covering
from tests.gpu.test_matrix import alike, beside, near, whole
from tests.gpu.training import Model, Trained, trained

CASES = covering(cases.OPTIONS | {"ranks": (1,)}, 2, cases.runs)
CLOSE = 1e-7  # in float64: a device has its own order of sums, and a loss in float32 is near
APART = 0.02  # of what training made of a part, in float32: Adam divides small by small


def run(case: cases.Case, turn: int, model: Model, on_gpu: bool) -> Trained:
    wrap, tx = cases.wrapped(case, turn)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # compression begins too early here
        return trained(wrap, tx, model, steps=cases.STEPS, on_gpu=on_gpu, key=5)


def pairs(mine: Trained, host: Trained) -> list[Any]:
    return [*alike(whole(mine), whole(host))]


@pytest.mark.parametrize("turn", range(len(CASES)), ids=lambda i: cases.named(CASES[i]))
def test_a_gpu_computes_what_the_host_computes(turn: int) -> None:
    case = CASES[turn]
    model = cases.model(case)
    mine, host = run(case, turn, model, True), run(case, turn, model, False)
    found = pairs(mine, host)
    leaps = cases.tolerance(case)[1]
    if not leaps and case["dtype"] == "float64":
        return near(found, CLOSE)
    start = zf.tree.flatten_names(model.params())
    apart = beside(found, start)
    far = {part for part, much in apart.items() if much > max(leaps, APART)}
    if not far:
        return None
    # What rounding makes of the host's own run, begun from rounded parameters.
    own = dict.fromkeys(far, 0.0)
    for seed in range(3):
        again = pairs(run(case, turn, cases.rounded(case, seed), False), host)
        moved = beside(again, start)
        own = {part: max(much, moved[part]) for part, much in own.items()}
    for part, much in own.items():
        assert apart[part] <= 2 * much, f"{part}: {apart[part]} apart, the host's own {much}"
