"""Every kernel compiled for NVIDIA and AMD, and its machine code held against bounds.

No GPU is needed. Everywhere: no spill, no stack, shared memory and registers that fit. On sm_90 and
gfx942 also: loads of 16 bytes, and a hot loop that needs at most three quarters of the instructions
that an H200, or an MI300X, issues while the kernel's bytes move at copy speed (or what its entry
says, and the docs). These two take the first variant of each kernel, and each other target every
third kernel. ``--whole`` compiles all variants for all targets.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeVar

import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("there is no Triton for this platform", allow_module_level=True)

import triton

from benchmarks.gpu_targets import TARGETS
from tests.kernels.entries import ENTRIES
from tests.kernels.hot_loop import SLOTS_PER_BYTE
from tests.kernels.machine_code import LANES, REGISTERS, Code, Entry, built, compiled
from tests.kernels.product_entries import everything
from tests.kernels.table import HEAD, HELD, rows
from tests.laws.covering import Covering
from zfunc.kernels import dispatch

T = TypeVar("T")
BY_NAME = {entry.name: entry for entry in ENTRIES}
# Each kernel once: its first entry.
FIRST = list({name.split(",")[0]: name for name in reversed(BY_NAME)}.values())
NAMES = list(BY_NAME) if Covering.whole else FIRST
ELSEWHERE = [target for target in TARGETS if target not in HELD]
KINDS = list({id(entry.kernel): entry for entry in ENTRIES}.values())


@functools.cache
def code(name: str, target: str) -> Code:
    return compiled(BY_NAME[name], target)


def in_turn(among: Iterable[T], targets: Sequence[str]) -> list[tuple[T, str]]:
    """Each on one of the targets, or on all."""
    if Covering.whole:
        return list(itertools.product(among, targets))
    return [(one, targets[turn % len(targets)]) for turn, one in enumerate(among)]


ROOMY = in_turn(NAMES, ELSEWHERE)
# The table has the variants at the ends; ``--whole`` compiles those between them, too.
OTHERS = list(everything())[:: 1 if Covering.whole else 40]


def named(what: Entry | str) -> str:
    return what if isinstance(what, str) else what.name


def test_every_kernel_has_an_entry():
    assert {name.split(",")[0] for name in BY_NAME} == set(dispatch.KERNELS)


def check_room(found: Code, entry: Entry, target: str) -> None:
    assert found.spills == 0 and found.stack == 0, found
    assert found.shared <= TARGETS[target].shared, found
    assert found.dots > 0 or not entry.dots, found
    amd = TARGETS[target].amd
    threads = LANES[amd] * entry.options["num_warps"]
    assert found.registers * threads <= REGISTERS[amd], found


def check_fit(found: Code, entry: Entry, target: str) -> None:
    check_room(found, entry, target)
    most = entry.share * SLOTS_PER_BYTE[target] * entry.bytes
    assert entry.tiny or 0 < found.slots <= most, found


@pytest.mark.parametrize("target", HELD)
@pytest.mark.parametrize("name", NAMES)
def test_it_fits_and_keeps_up_with_memory(name: str, target: str):
    entry, found = BY_NAME[name].on(target), code(name, target)
    check_fit(found, entry, target)
    if not entry.tiny:
        assert 0 <= found.loads - found.wide_loads <= entry.narrow, found
        assert 0 <= found.stores - found.wide_stores <= entry.narrow_stores, found
        assert found.wide_loads + found.wide_stores > 0 or not entry.wide, found


@pytest.mark.parametrize(("name", "target"), ROOMY)
def test_it_fits_where_users_have_other_gpus(name: str, target: str):
    check_room(code(name, target), BY_NAME[name].on(target), target)


@pytest.mark.parametrize(("entry", "target"), in_turn(OTHERS, HELD), ids=named)
def test_every_product_that_the_dispatch_can_choose(entry: Entry, target: str):
    check_fit(compiled(entry, target), entry.on(target), target)


@pytest.mark.parametrize(
    ("entry", "target"),
    in_turn(OTHERS if Covering.whole else OTHERS[:1], ELSEWHERE),
    ids=named,
)
def test_every_product_elsewhere(entry: Entry, target: str):
    check_room(compiled(entry, target), entry.on(target), target)


@pytest.mark.parametrize("name", list(BY_NAME)[:: 1 if Covering.whole else 20])
def test_tensors_beyond_2_gib_on_amd(name: str):
    """Their loads are others: not of a buffer with offsets of 32 bits, but of addresses."""
    entry = BY_NAME[name]
    check_fit(compiled(entry, "gfx942", large=True), entry.on("gfx942"), "gfx942")


def test_sizes_beyond_32_bits_are_taken():
    """A size of 2^31 is an integer of another type: a loop that carries it could not be built."""
    for entry in KINDS:
        built(entry)


@pytest.mark.parametrize("entry", KINDS, ids=lambda entry: entry.name)
def test_sizes_of_one_are_constants(entry: Entry):
    """A launch passes an integer that is 1 as a constant, which has no ``.to``: one row, say."""
    integers = [k for k, kind in entry.signature.items() if kind == "i32"]
    for k in set(integers) & set(entry.kernel.arg_names) - set(entry.constants):
        built(entry, k)


def test_the_table_in_the_docs():
    """To the last digit for the version of Triton that it names; for others, the same rows."""
    results = Path(__file__).parents[2] / "benchmarks" / "results"
    page = (results / "kernel-code.md").read_text()
    shown = page[page.index(HEAD) :].partition("\n\n")[0].splitlines()

    tried = {*itertools.product(NAMES, HELD), *ROOMY}

    def read(entry: Entry, target: str) -> Code | None:
        return code(entry.name, target) if (entry.name, target) in tried else None

    found = list(rows(read))
    if f"Triton {triton.__version__}:" not in page:
        shown, found = ([line.split("|")[1] for line in lines] for lines in (shown, found))
    assert len(shown) == len(found)
    for ours, theirs in zip(found, shown, strict=True):
        cells = list(zip(ours.split("|"), theirs.split("|"), strict=True))
        assert all(mine.strip() in ("?", cell.strip()) for mine, cell in cells), (ours, theirs)
