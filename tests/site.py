"""Docstrings as the site shows them: examples are blocks of code, roles plain names.

In a docstring an example is a run of lines that begins with ``>>>``. Markdown would take these for
quotations, so a run of them is fenced before a page is made of it.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

ROLE = re.compile(r":\w+:(`)~?")
EXAMPLE = re.compile(r"(?:^|(?<=\n\n))(>>> .*?)(?=\n\n(?!>>>)|\Z)", re.DOTALL)


class Examples(griffe.Extension):
    """Rewrites every docstring before a page is made of it."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            plain = ROLE.sub(r"\1", obj.docstring.value)
            obj.docstring.value = EXAMPLE.sub(r"```pycon\n\1\n```", plain)
