"""Every pair of options runs on the pretended device, and computes what the host computes.

``--whole`` tries every triple.
"""

from __future__ import annotations

import functools
import warnings

import pytest

import zfunc as zf
from tests.gpu import cases, ranks
from tests.gpu.covering import covering, uncovered
from tests.gpu.cuda import Cuda
from tests.gpu.training import trained
from tests.laws.cases import assert_near
from tests.laws.covering import Covering
from zfunc import kernels

Case = cases.Case
STEPS = 3


@functools.cache
def combined(strength: int) -> list[Case]:
    return covering(cases.OPTIONS, strength, cases.runs)


def of_ranks(n: int) -> list[Case]:
    return [case for case in combined(3 if Covering.whole else 2) if case["ranks"] == n]


def check(case: Case, turn: int) -> None:
    """One case on this rank's device, and the same on the host, where twins compute as well."""
    model, (tolerance, parts) = cases.model(case), cases.tolerance(case)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # compression begins too early here
        runs = []
        for on_gpu in (True, False):
            wrap, tx = cases.wrapped(case, turn)
            twins = not on_gpu and not case["offload"]  # whose optimizer is the host's on both
            with kernels.use("torch" if twins else None):
                runs.append(trained(wrap, tx, model, steps=STEPS, on_gpu=on_gpu, key=5))
    mine, host = runs
    faults = [str(row) for report in (mine.placing, *mine.reports) for row in report.faults()]
    assert not faults, faults[:3]
    for a, b in zip(mine.metrics, host.metrics, strict=True):
        for name in a:
            loose = 1 if name == "loss" or tolerance < 1e-4 else 20
            assert_near({name: a[name]}, {name: b[name]}, loose * tolerance, "metrics")
    for part in parts:
        assert_near(getattr(mine.state, part), getattr(host.state, part), tolerance, part)
    assert mine.reports[-1].launches() > 20


def on_rank(numbered: list[tuple[int, Case]]) -> None:
    for turn, case in numbered:
        try:
            check(case, turn)
        except BaseException as error:
            error.add_note(f"CASE {turn}: {cases.named(case)}")
            raise


@pytest.mark.parametrize("part", range(4))
def test_pairs_on_one_rank(part: int) -> None:
    failed = []
    for turn, case in [*enumerate(of_ranks(1))][part::4]:
        try:
            with Cuda():
                check(case, turn)
        except Exception as error:
            failed.append(f"{cases.named(case)}: {type(error).__name__}: {str(error)[:400]}")
    assert not failed, "\n".join([f"{len(failed)} cases", *failed])


@pytest.mark.parametrize("part", range(2))
def test_pairs_on_two_ranks(part: int) -> None:
    """In one launch; after a case that fails, the rest in another."""
    left, failed = [*enumerate(of_ranks(2))][part::2], []
    while left:
        try:
            ranks.launch(on_rank, left)
            break
        except Exception as error:
            text = "\n".join([str(error), *getattr(error, "__notes__", [])])
            if "CASE " not in text:
                raise
            turn = int(text.rpartition("CASE ")[2].partition(":")[0])
            at = next(i for i, (other, _) in enumerate(left) if other == turn)
            failed.append(f"{cases.named(left[at][1])}: {type(error).__name__}: {text[:400]}")
            left = left[at + 1 :]
    assert not failed, "\n".join([f"{len(failed)} cases", *failed])


def test_every_pair_is_there() -> None:
    assert not uncovered(combined(2), cases.OPTIONS, 2, cases.runs)
    seen = {(case["ranks"], case["stage"]) for case in combined(2)}
    assert seen == {(n, stage) for n in (1, 2) for stage in (None, 0, 1, 2, 3)}


REFUSED = [
    {"compress": "onebit", "offload": "disk"},
    {"compress": "int8", "offload": "disk"},
    {"compress": "powersgd", "offload": "cpu"},
    {"compress": "int4", "offload": "cpu"},
    *({"compress": "zero_one", "stage": stage} for stage in (1, 2, 3)),
    {"compress": "zero_one", "stage": 0, "precision": "bf16"},
    {"compress": "zero_one", "stage": 0, "quantize": True},
    {"compress": "zero_one", "stage": 0, "optimizer": "lion"},
]


def _refuses(rows: list[Case]) -> list[str]:
    """Which of the cases are not refused."""
    ran = []
    for row in rows:
        case = cases.USUAL | {"ranks": 2} | row
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                wrap, tx = cases.wrapped(case)
                trained(wrap, tx, cases.model(case), key=5)
        except zf.CompositionError:
            continue
        ran.append(cases.named(case))
    return ran


def test_what_means_nothing_is_refused() -> None:
    assert all(cases.refusal(cases.USUAL | row) for row in REFUSED)
    assert ranks.launch(_refuses, REFUSED) == [[], []]
