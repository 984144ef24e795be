"""Figures as text."""

from __future__ import annotations

__all__ = ["bytes_text"]


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
