"""Every pair of options runs on the pretended device, and computes what the host computes.

``--whole`` tries every triple.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch

import zfunc as zf
from tests.gpu import cases, ranks
from tests.gpu.covering import covering, uncovered
from tests.gpu.cuda import Cuda
from tests.gpu.training import trained
from tests.laws.covering import Covering
from zfunc import kernels

Case = cases.Case
STEPS = cases.STEPS


@functools.cache
def combined(strength: int) -> list[Case]:
    return covering(cases.OPTIONS, strength, cases.runs)


def of_ranks(n: int) -> list[Case]:
    return [case for case in combined(3 if Covering.whole else 2) if case["ranks"] == n]


def check(case: Case, turn: int) -> None:
    """One case on this rank's device, and the same on the host, where twins compute as well."""
    model, tolerance = cases.model(case), cases.tolerance(case)
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
    for i, (a, b) in enumerate(zip(mine.metrics, host.metrics, strict=True)):
        if tolerance.spreads:
            a, b = {"loss": a["loss"]}, {"loss": b["loss"]}
        near({f"metrics of step {i}": a}, {f"metrics of step {i}": b}, tolerance)
    for part in ("params",) if tolerance.spreads else ("params", "opt_state"):
        near({part: getattr(mine.state, part)}, {part: getattr(host.state, part)}, tolerance)
    assert mine.reports[-1].launches() > 20


def near(mine: Any, host: Any, tolerance: cases.Tolerance) -> None:
    """All elements are near, but few that rounding has taken to the other side of an edge."""
    a, b = zf.tree.flatten_names(mine), zf.tree.flatten_names(host)
    assert a.keys() == b.keys()
    off, total, worst = 0, 0, ("", 0.0)
    for name, x in a.items():
        if not (isinstance(x, torch.Tensor) and x.is_floating_point()):
            assert bool((x == b[name]).all() if isinstance(x, torch.Tensor) else x == b[name]), name
            continue
        theirs = b[name].double()
        far = (x.double() - theirs).abs()
        beyond = far > tolerance.near * (1 + theirs.abs())
        assert bool((x.isnan() == b[name].isnan()).all()), name
        off, total = off + int(beyond.sum()), total + x.numel()
        if x.numel() and float(far.max()) > worst[1]:
            worst = (name, float(far.max()))
    told = f"{off} of {total} elements are off by more than {tolerance.near}, most in {worst}"
    assert off <= tolerance.share * total or (off <= 1 and tolerance.share), told
    assert not off or worst[1] <= tolerance.far, told


def on_rank(numbered: list[tuple[int, Case]]) -> list[str]:
    """The cases that come out otherwise; whatever else goes wrong ends the world."""
    failed = []
    for turn, case in numbered:
        try:
            check(case, turn)
        except AssertionError as error:
            failed.append(f"{cases.named(case)}: {str(error)[:400]}")
        except BaseException as error:
            error.add_note(f"CASE {turn}: {cases.named(case)}")
            raise
    return failed


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
    """In one launch; after a case that ends it, the rest in another."""
    left, failed = [*enumerate(of_ranks(2))][part::2], []
    while left:
        try:
            failed += [text for found in ranks.launch(on_rank, left) for text in found]
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
