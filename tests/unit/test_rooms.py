"""Who may import whom: the table of rooms in CONTRIBUTING.md is what holds.

Every import counts: at the top of a file, in a function, for type checkers alone.
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

import pytest

import zfunc as zf
from tests import picture
from tests.imports import arrows, imports, is_facade, lazy_arrows, modules, room_of, table
from zfunc import transforms

ROOT = Path(__file__).resolve().parents[2]
APPLICATIONS = ("language", "commands", "__main__")  # they may import `zfunc` itself

# Lines that are read with a file: its own and those of all that it imports.
LINES = {
    "engine.step": 4_000,
    "optim.adaptive": 6_220,
    # A mesh and its groups, without the transports. Errors of schedules and of backward, and the
    # question that a collective asks tensors without memory, are 10 lines of it.
    "ranks.axes": 1_060,
}
LOADED = 60  # modules of ours that `import zfunc` loads
TWINS = 0  # class names that stand for more than one class


def test_the_table_has_every_room() -> None:
    assert set(table()) == {room_of(module) for module in modules()} - {"", "__main__"}


def test_imports_run_down_the_table() -> None:
    order = ["__main__", *table()]
    wrong = [
        f"{module} imports {target or 'zfunc'}"
        for module, target, _ in arrows()
        if room_of(module) not in APPLICATIONS
        and (not target or order.index(room_of(target)) < order.index(room_of(module)))
    ]
    assert wrong == []


def test_nothing_imports_its_own_facade() -> None:
    wrong = [
        f"{module} imports {target}"
        for module, target, _ in arrows()
        if target and is_facade(target) and module.startswith(f"{target}.")
    ]
    assert wrong == []


def test_no_file_is_in_a_circle() -> None:
    ways: dict[str, list[str]] = defaultdict(list)
    for module, target, _ in arrows():
        if target and not is_facade(target):
            ways[module].append(target)
    done: set[str] = set()

    def walk(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join((*path[path.index(module) :], module))
        if module not in done:
            for target in ways[module]:
                walk(target, (*path, module))
            done.add(module)

    for module in tuple(ways):
        walk(module, ())


def test_what_may_be_imported_upwards_is_and_in_a_function() -> None:
    assert len(lazy_arrows()) <= 5
    for module, target in lazy_arrows():
        assert imports()[module][target] is True, (module, target)


def lines_with(module: str) -> int:
    """The lines of a module and of all that it imports, what its facades show included."""
    seen: set[str] = set()
    todo = [module]
    while todo:
        name = todo.pop()
        if name not in seen and name:
            seen.add(name)
            todo += [x for x in imports()[name] if (name, x) not in lazy_arrows()]
    return sum(len(modules()[name].read_text().splitlines()) for name in seen)


@pytest.mark.parametrize("module", LINES)
def test_how_much_there_is_to_read(module: str) -> None:
    assert lines_with(module) <= LINES[module]


def test_a_small_transform_is_read_behind_the_step() -> None:
    assert lines_with("transforms.donation") <= lines_with("engine.step") + 100


def test_no_more_classes_share_a_name() -> None:
    names = Counter(
        node.name
        for path in modules().values()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    )
    twins = sorted(name for name, n in names.items() if n > 1)
    assert len(twins) <= TWINS, twins


def test_importing_zfunc_loads_little() -> None:
    script = (
        "import sys, zfunc; names = {x.__name__ for x in sys.modules.values() if x}; "
        "print([x for x in names if x.split('.')[0] == 'zfunc'])"
    )
    told = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, check=True, text=True
    )
    loaded = ast.literal_eval(told.stdout)
    assert len(loaded) <= LOADED
    rooms = {room_of(name.partition(".")[2]) for name in loaded}
    unused = {"transforms", "initialisation", "files", "language", "commands", "kernels"}
    assert not rooms & {*unused, "foresight"}


def test_the_picture_shows_what_the_table_and_the_imports_say() -> None:
    drawn = (ROOT / "docs" / "architecture.svg").read_text()
    assert drawn == picture.drawn(), "run `python -m tests.picture`"


def test_the_table_of_the_order_of_transforms_is_theirs() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \|", page, re.MULTILINE)
    found = {
        (str(kind.position), kind.__name__)
        for info in pkgutil.walk_packages(transforms.__path__, "zfunc.transforms.")
        for kind in vars(importlib.import_module(info.name)).values()
        if isinstance(kind, type)
        and issubclass(kind, zf.Transform)
        and kind.__module__.startswith("zfunc.transforms.")
    }
    assert len(rows) == len(found) and set(rows) == found
    assert [int(position) for position, _ in rows] == sorted(int(x) for x, _ in rows)


def test_files_that_are_named_on_how_it_is_built_exist() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    named = re.findall(r"`((?:zfunc|transforms|optim|kernels|tests)/[\w/.]+)`", page)
    assert len(named) > 10
    assert [name for name in named if not (ROOT / name).exists()] == []
