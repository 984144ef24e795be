"""Examples in docstrings become blocks of code on the site.

In a docstring an example is a run of lines that begins with ``>>>``. Markdown would take these for
quotations, so a run of them is fenced before a page is made of it.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"(?:^|(?<=\n\n))(>>> .*?)(?=\n\n(?!>>>)|\Z)", re.DOTALL)


class Examples(griffe.Extension):
    """Fences the examples of every docstring."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = EXAMPLE.sub(r"```pycon\n\1\n```", obj.docstring.value)
