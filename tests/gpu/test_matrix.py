"""Every pair of options runs on the pretended device, and computes what the host computes.

``--whole`` tries every triple.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import zfunc as zf
from tests.gpu import cases, ranks
from tests.gpu.covering import covering, uncovered
from tests.gpu.cuda import Cuda, active
from tests.gpu.training import Model, Trained, trained
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
    model = cases.model(case)
    mine, host = run(case, turn, model, True), run(case, turn, model, False)
    faults = [str(row) for report in (mine.placing, *mine.reports) for row in report.faults()]
    assert not faults, faults[:3]
    close, apart = cases.tolerance(case)
    pairs = [*alike(whole(mine), whole(host))]
    if apart:
        within(case, turn, beside(pairs, zf.tree.flatten_names(model.params())), host, apart)
    else:
        near(pairs, close)
    assert mine.reports[-1].launches() > 20


def run(case: Case, turn: int, model: Model, on_gpu: bool) -> Trained:
    wrap, tx = cases.wrapped(case, turn)
    twins = not on_gpu and not case["offload"]  # whose optimizer is the host's on both
    watched = contextlib.nullcontext() if on_gpu else active().away()
    with warnings.catch_warnings(), kernels.use("torch" if twins else None), watched:
        warnings.simplefilter("ignore", UserWarning)  # compression begins too early here
        return trained(wrap, tx, model, steps=STEPS, on_gpu=on_gpu, key=5)


def within(case: Case, turn: int, found: dict[str, float], host: Trained, apart: float) -> None:
    """No part is further away than ``apart``, or than twice what rounding makes of the host's own.

    Where several roundings follow each other, to 16 bits, to one bit, to bits of a schedule, a
    part may be mostly that. How much the host's own run shows, begun from rounded parameters.
    """
    far = {part for part, much in found.items() if much > apart}
    if zf.psum(torch.tensor(float(len(far)))) == 0:  # what follows takes all ranks
        return
    beyond = dict.fromkeys(far, 0.0)
    for seed in range(3):
        model = cases.rounded(case, seed)
        again = run(case, turn, model, False)
        pairs = [*alike(whole(again), whole(host))]
        own = beside(pairs, zf.tree.flatten_names(model.params()))
        beyond = {part: max(much, own[part]) for part, much in beyond.items()}
    for part, much in beyond.items():
        assert found[part] <= 2 * much, f"{part}: {found[part]} apart, the host's own {much}"


Numbers = tuple[str, torch.Tensor, torch.Tensor]


def whole(run: Trained) -> dict[str, Any]:
    """All that a run computed: parameters, the optimizer's state, metrics by name and step."""
    metrics = {name: [row[name] for row in run.metrics] for name in run.metrics[0]}
    return {"params": run.state.params, "opt_state": run.state.opt_state, "metrics": metrics}


def alike(mine: Any, host: Any) -> Iterator[Numbers]:
    """The numbers of both, in float64; whatever is no number, and NaNs, must be equal."""
    a, b = zf.tree.flatten_names(mine), zf.tree.flatten_names(host)
    assert a.keys() == b.keys()
    for name, x in a.items():
        y = b[name]
        if not (isinstance(x, torch.Tensor) and x.is_floating_point()):
            assert bool((x == y).all() if isinstance(x, torch.Tensor) else x == y), name
            continue
        assert bool((x.isnan() == y.isnan()).all()), name
        yield name, x.double().nan_to_num(), y.double().nan_to_num()


def near(pairs: list[Numbers], close: float) -> None:
    """All numbers are within a relative and absolute distance."""
    for name, x, y in pairs:
        off = (x - y).abs() > close * (1 + y.abs())
        worst = float((x - y).abs().max()) if x.numel() else 0.0
        assert not off.any(), f"{name}: {int(off.sum())} of {x.numel()} are off, most {worst}"


def beside(pairs: list[Numbers], start: dict[str, Any]) -> dict[str, float]:
    """Of each part, the norm of all differences beside what training made of it.

    Parts are the parameters, each kind of moment, and each metric over the steps.
    """
    between, made = Counter[str](), Counter[str]()
    for name, x, y in pairs:
        leaf = max((key for key in start if name.endswith(f".{key}")), key=len, default=None)
        part = name.removesuffix(f".{leaf}") if leaf else name.rpartition(".")[0]
        before = start[leaf].double() if leaf and part == "params" else 0.0
        between[part] += float((x - y).square().sum())
        made[part] += float((y - before).square().sum())
    return {
        part: (between[part] / made[part]) ** 0.5 if made[part] else float(between[part] > 0)
        for part in made
    }


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
def test_pairs_on_two_ranks(part: int) -> None:
    """On the same ranks; after a case that ends them, the rest on others."""
    left, failed = [*enumerate(of_ranks(2))][part::4], []
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
