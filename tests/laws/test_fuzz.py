"""Random compositions on random models, against the plain loop in float64, and faults to find.

A case is drawn from its number: a model (a tree with functions, or a module), an optimizer, a
world of 1 to 12 ranks and transforms in any order, mostly with a checkpoint in the middle that
another composition takes up. ``tests/laws/fuzz`` has the parts: what is drawn (``cases``,
``models``), the optimizers written out (``rules``), the run (``trial``), the plain one and what
is asserted (``plain``). One case again, and made smaller::

    python -m tests.laws.fuzz 123 --shrink

``--whole`` runs hundreds of cases. Each fault of ``fuzz.faults`` is found by the cases that run
without ``--whole``.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import zfunc as zf
from tests.laws.covering import Covering
from tests.laws.fuzz.cases import SPLIT, Case, Place, drawn, refused
from tests.laws.fuzz.faults import FAULTS, injected, shows
from tests.laws.fuzz.plain import check
from tests.laws.fuzz.shrinking import failure, shrunk
from tests.laws.fuzz.trial import beginning, composed, loss_of, step_of

PARTED = range(SPLIT, SPLIT + 6)  # which have tensor ranks
USUAL = [*range(32), *PARTED]
CASES = [*range(600), *range(SPLIT, SPLIT + 200)] if Covering.whole else USUAL
REFUSED = range(200) if Covering.whole else range(24)


# Small trees may have no leaf for one of three optimizers, which says so, rightly.
@pytest.mark.filterwarnings("ignore:multi_transform. the label")
@pytest.mark.parametrize("number", CASES)
def test_a_case_is_the_plain_loop(number: int) -> None:
    case = drawn(number)
    try:
        check(case)
    except Exception as error:
        small, why = shrunk(case, f"{type(error).__name__}: {error}", tries=40)
        raise AssertionError(f"{case}\n{error}\nas small as it gets:\n{small}\n{why}") from error


@pytest.mark.parametrize("number", REFUSED)
def test_what_the_table_refuses_is_refused(number: int, tmp_path: Path) -> None:
    place, _ = refused(number)
    case = Case(number, kind="stack", seed=number, optimizer=("adamw", {"lr": 0.02}))
    with pytest.raises(zf.CompositionError):
        composed(case, place, step_of(case, loss_of(case, [])), tmp_path)


def uneven(number: int) -> None:
    """A case whose rows do not split into microbatches, under a loss that needs it."""
    case = Case(number, rows=7, here=Place(ranks=2, stage=number % 4, accumulate=2, order=ORDER))

    def body() -> None:
        step = composed(case, case.here, step_of(case, loss_of(case, [[], []])), Path("none"))
        step(step.place(beginning(case)), zf.local_batch(case.batch(0)))

    zf.simulate(2)(body)()


ORDER = ("accumulate", "shard")


@pytest.mark.parametrize("number", range(4))
def test_uneven_microbatches_of_a_plain_mean_are_refused(number: int) -> None:
    with pytest.raises(zf.CompositionError, match="equal microbatches"):
        uneven(number)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault: str) -> None:
    """By one of the cases that run anyway, those first that have what it concerns."""
    cases = sorted(map(drawn, USUAL), key=lambda case: (not shows(fault, case), cost(case)))
    with injected(fault):
        found = any((failure(case) or "").startswith("AssertionError") for case in cases)
    assert found, f"none of {len(cases)} cases finds {fault}"


def cost(case: Case) -> int:
    """Cheap cases first."""
    return sum(p.world * (4 if p.offload == "disk" else 1) for p in case.places)


def test_a_case_is_drawn_from_its_number_alone() -> None:
    for number in (3, 17, SPLIT + 3):
        before = str(drawn(number))
        torch.manual_seed(number)
        assert str(drawn(number)) == before
        here = eval(before, {"Case": Case, "Place": Place})
        assert here == drawn(number)


def test_shrinking_keeps_what_fails() -> None:
    """With a fault of accumulate nothing is left but a small world that accumulates."""
    name = "an accumulate that forgets its last microbatch"
    case = min((drawn(n) for n in USUAL if shows(name, drawn(n))), key=cost)
    with injected(name):
        error = failure(case)
        assert error is not None
        small, again = shrunk(case, error, tries=30)
    assert again.startswith("AssertionError") and len(str(small)) < len(str(case))
    assert any(place.accumulate > 1 for place in small.places)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_label_for_an_empty_leaf_in_a_unit_of_its_own(stage: int) -> None:
    """What the fuzzer found: the leaf's moments were missing where its gradient was empty."""
    tx = zf.optim.multi_transform(
        {"full": zf.optim.lion(0.1), "empty": zf.optim.adam(0.1)},
        lambda path: "empty" if path == "e" else "full",
    )
    params = {"a": torch.ones(2), "e": torch.ones(0)}
    step = zf.train_step(lambda p, b: (p["a"] * b.mean()).sum() + p["e"].sum(), tx)
    step = zf.shard(step, stage=stage, unit_bytes=1)
    state, _ = step(step.place(zf.TrainState.create(params, tx)), torch.ones(3))
    assert torch.equal(step.unplace(state).params["a"], torch.full((2,), 0.9))
