"""What a user writes beyond model and loop, counted: ``python -m benchmarks.lines``.

Counted are statements, as Python prints them: the head of a loop or of a function is one, its
comments and its docstring are none. ``--write docs/figures/lines.md`` puts the table into a page.
"""

from __future__ import annotations

import argparse
import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

__all__ = ["NAMES", "counted", "statements", "table"]

FOLDER = Path(__file__).parent
NAMES = {
    "zfunc": "zfunc, ZeRO stage 3",
    "ddp": "DDP",
    "fsdp2": "FSDP2",
    "accelerate": "accelerate (DDP)",
}
HEAD = "| | statements that the plain script lacks | those of the plain script that go | in all |"
BODIES = ("body", "orelse", "finalbody", "handlers", "cases")


def statements(path: Path) -> Counter[str]:
    """Each statement of a script, imports among them, without what is inside of it."""
    module = ast.parse(path.read_text())
    return Counter(_heads(module.body[1:]))  # the first is the docstring


def _heads(body: list[ast.stmt]) -> Iterator[str]:
    for found in body:
        inner = [x for name in BODIES for x in getattr(found, name, [])]
        for name in BODIES:
            if hasattr(found, name):
                setattr(found, name, [])
        yield ast.unparse(found)
        yield from _heads(inner)


def counted(name: str) -> tuple[int, int, int]:
    """Statements that are new beside the plain script, those of it that are gone, and all."""
    plain, mine = statements(FOLDER / "plain.py"), statements(FOLDER / f"with_{name}.py")
    return (mine - plain).total(), (plain - mine).total(), mine.total()


def table() -> str:
    """The counts, as rows of a page."""
    plain = statements(FOLDER / "plain.py").total()
    rows = [f"| one process | | | {plain} |"]
    rows += [f"| {told} | {' | '.join(map(str, counted(name)))} |" for name, told in NAMES.items()]
    return "\n".join([HEAD, "|---|---|---|---|", *rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", type=Path, help="a page whose table is to be this one")
    page = parser.parse_args().write
    if page is None:
        print(table())
        return
    text = page.read_text()
    before, _, after = text.partition(HEAD)
    page.write_text(before + table() + "\n\n" + after.partition("\n\n")[2])


if __name__ == "__main__":
    main()
