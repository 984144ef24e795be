"""What the environment decides is on one page; there is one logger."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.imports import modules

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guide" / "environment.md"
ROWS = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
LISTED = {name for row in ROWS for name in re.findall(r"`([A-Z_]{4,})`", row.split("|")[1])}
READS = {"get", "setdefault", "pop"}


def is_environment(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "environ"


def asked(module: ast.AST) -> Iterator[ast.AST]:
    """What stands for a name in reads of, and writes to, ``os.environ``."""
    for node in ast.walk(module):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr == "getenv" or (
                node.func.attr in READS and is_environment(node.func.value)
            ):
                yield node.args[0]
        elif isinstance(node, ast.Subscript) and is_environment(node.value):
            yield node.slice
        elif isinstance(node, ast.Compare) and any(map(is_environment, node.comparators)):
            yield node.left


def constants(module: ast.Module) -> dict[str, str]:
    return {
        target.id: node.value.value
        for node in module.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name) and isinstance(node.value.value, str)
    }


def test_every_variable_is_on_the_page() -> None:
    used: set[str] = set()
    for path in modules().values():
        module = ast.parse(path.read_text())
        known = constants(module)
        for node in asked(module):
            assert isinstance(node, ast.Constant | ast.Name), f"{path}: {ast.unparse(node)}"
            used.add(str(node.value) if isinstance(node, ast.Constant) else known[node.id])
    assert used and used <= LISTED, used - LISTED


def test_nothing_is_on_the_page_that_nobody_reads() -> None:
    texts = "".join(path.read_text() for path in modules().values())
    torch_reads = {"MASTER_PORT"}
    assert [name for name in LISTED - torch_reads if f'"{name}"' not in texts] == []


def test_there_is_one_logger() -> None:
    calls = [
        found
        for path in modules().values()
        for found in re.findall(r"getLogger\((.*?)\)", path.read_text())
    ]
    assert calls and set(calls) == {'"zfunc"'}
