"""Who imports whom among the product's files, and the table of rooms in CONTRIBUTING.md."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

__all__ = ["arrows", "imports", "is_facade", "lazy_arrows", "modules", "room_of", "table"]

ROOT = Path(__file__).resolve().parents[1]
APART = ("transforms", "optim", "quant", "kernels")  # rooms whose folders stand at the top


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
def table() -> dict[str, str]:
    """The rooms, from top to bottom, and what each has."""
    return dict(_rows("| room |"))


@cache
def lazy_arrows() -> set[tuple[str, str]]:
    """Imports that may run up the table, inside of a function."""
    return {(a, b) for a, _, b in (row.partition(" -> ") for row, _ in _rows("| import |"))}


def _rows(head: str) -> Iterator[tuple[str, str]]:
    lines = (ROOT / "CONTRIBUTING.md").read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(head)) + 2
    for line in lines[start:]:
        if not line.startswith("|"):
            return
        first, second = line.replace("`", "").strip("|").split("|")
        yield first.strip(), second.strip()


def arrows() -> Iterator[tuple[str, str, bool]]:
    """Who imports whom; facades show what they like."""
    for module, rows in imports().items():
        if not is_facade(module):
            for target, lazy in rows.items():
                if (module, target) not in lazy_arrows():
                    yield module, target, lazy
