"""The pages run: every Python block of the README and of docs/, in order, outputs compared.

A page is read from top to bottom in one namespace, as a reader would type it. What a block
prints is shown in a ``text`` block right behind it, and so is the error with which it ends, if
that is the point: ``...`` stands for anything, numbers are compared as they are written.
"""

from __future__ import annotations

import contextlib
import difflib
import doctest
import io
import itertools
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import zfunc as zf
from zfunc import optim, transforms

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@dataclass(frozen=True)
class Block:
    """A Python block of a page, where it begins, and the output shown behind it."""

    line: int
    code: str
    shown: str


def blocks(page: Path) -> Iterator[Block]:
    """The Python blocks of a page, in order."""
    text = page.read_text()
    found = [*FENCE.finditer(text), None]
    for this, following in itertools.pairwise(found):
        assert this is not None
        if this[1] != "python":
            continue
        near = following is not None and not text[this.end() : following.start()].strip()
        shown = following[2] if following and near and following[1] == "text" else ""
        yield Block(text.count("\n", 0, this.start()) + 2, this[2], shown)


def run(block: Block, page: Path, namespace: dict[str, Any]) -> str:
    """What a block prints, and the error with which it ends, as Python would show it."""
    # Empty lines in front: a traceback names the page and the right line of it.
    code = compile("\n" * (block.line - 1) + block.code, str(page), "exec")
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        try:
            exec(code, namespace)
        except Exception as error:
            name = type(error).__name__
            if f"{name}: " not in block.shown:
                raise
            print(f"{name}: {error}")
    return out.getvalue()


def check(block: Block, got: str, page: Path) -> None:
    if doctest.OutputChecker().check_output(block.shown, got, FLAGS):
        return
    lines = difflib.unified_diff(
        block.shown.splitlines(), got.splitlines(), "shown", "got", lineterm=""
    )
    pytest.fail(f"{page.name}, line {block.line}:\n" + "\n".join(lines), pytrace=False)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_code_of(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks(page):
        check(block, run(block, page, namespace), page)
