"""Who may import whom: the table of rooms in CONTRIBUTING.md is what holds.

Every import counts: at the top of a file, in a function, for type checkers alone.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
APART = ("transforms", "optim", "quant", "kernels")  # rooms whose folders stand at the top
APPLICATIONS = ("language", "commands", "__main__")  # they may import `zfunc` itself

# Lines that are read with a file: its own and those of all that it imports.
LINES = {
    "engine.step": 10_300,
    "transforms.donation": 10_400,
    "optim.adaptive": 17_000,
}
LOADED = 72  # modules of ours that `import zfunc` loads
TWINS = 31  # class names that stand for more than one class


@cache
def modules() -> dict[str, Path]:
    """Each product module by its name without ``zfunc.``, facades included."""
    found = {}
    for top in (ROOT / "zfunc", *(ROOT / room for room in APART)):
        for path in top.rglob("*.py"):
            if path.relative_to(ROOT).parts[:2] in {("zfunc", room) for room in APART}:
                continue  # by its own name
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts[1:] if parts[0] == "zfunc" else parts)
            found[re.sub(r"\.?__init__$", "", name)] = path
    return found


def room_of(module: str) -> str:
    return module.split(".")[0]


def is_facade(module: str) -> bool:
    return modules()[module].name == "__init__.py"


@cache
def imports() -> dict[str, dict[str, bool]]:
    """For each module what it imports, and whether inside of a function only."""
    found: dict[str, dict[str, bool]] = {}
    for module, path in modules().items():
        rows = found[module] = {}
        for target, lazy in _imported(ast.parse(path.read_text())):
            while target not in modules():
                target = target.rpartition(".")[0]
            if target != module:
                rows[target] = rows.get(target, True) and lazy
    return found


def _imported(node: ast.AST, lazy: bool = False) -> Iterator[tuple[str, bool]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            names = [alias.name for alias in child.names]
        elif isinstance(child, ast.ImportFrom):
            assert not child.level, "imports are absolute"
            names = [f"{child.module}.{alias.name}" for alias in child.names]
        else:
            names = []
        for name in names:
            if name.split(".")[0] == "zfunc":
                yield name.partition(".")[2], lazy
        inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        yield from _imported(child, lazy or inside)


@cache
def table() -> list[str]:
    """The rooms, from top to bottom."""
    return _rows("| room |")


@cache
def lazy_arrows() -> set[tuple[str, str]]:
    """Imports that may run up the table, inside of a function."""
    return {(a, b) for a, b, *_ in (row.split(" -> ") for row in _rows("| import |"))}


def _rows(head: str) -> list[str]:
    lines = (ROOT / "CONTRIBUTING.md").read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(head)) + 2
    rows = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        rows.append(line.split("|")[1].strip().replace("`", ""))
    return rows


def arrows() -> Iterator[tuple[str, str, bool]]:
    """Who imports whom; facades show what they like."""
    for module, rows in imports().items():
        if not is_facade(module):
            for target, lazy in rows.items():
                if (module, target) not in lazy_arrows():
                    yield module, target, lazy


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
    assert not rooms & {"transforms", "initialisation", "files", "language", "commands", "kernels"}
