"""Figures as text."""

from __future__ import annotations

from io import StringIO
from typing import Any

from rich.console import Console

__all__ = ["bytes_text", "printed", "seconds_text"]


def bytes_text(nbytes: int) -> str:
    """Bytes as text.

    >>> bytes_text(2_500_000), bytes_text(-300)
    ('2.5 MB', '-300 B')
    """
    size, unit = float(nbytes), "B"
    for larger in ("KB", "MB", "GB", "TB", "PB"):
        if abs(size) < 1000:
            break
        size, unit = size / 1000, larger
    return f"{size:.4g} {unit}"


def seconds_text(seconds: float) -> str:
    """Seconds as text.

    >>> seconds_text(0.0123)
    '12.3 ms'
    """
    for size, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def printed(shown: Any, width: int = 120) -> Console:
    """A console that has printed something, to export it as text or HTML.

    >>> printed("some [bold]text[/]").export_text()
    'some text\\n'
    """
    console = Console(width=width, record=True, file=StringIO())
    console.print(shown)
    return console
