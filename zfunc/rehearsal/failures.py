"""Errors that say where in a pipeline they were raised."""

from __future__ import annotations

__all__ = ["located"]


def located(error: Exception, place: str) -> Exception:
    """The error with a place in its message, to be raised from it; or itself, with a note.

    It is another one of its type where that is made of a text alone, and says no more than it.

    >>> located(ValueError("too few"), "layer blocks.3")
    ValueError('layer blocks.3: too few')
    >>> located(UnicodeDecodeError("ascii", b"x", 0, 1, "why"), "layer blocks.3").__notes__
    ['in layer blocks.3']
    """
    made = _with_text(error, f"{place}: {error}")
    if made is None:
        error.add_note(f"in {place}")
    return made or error


def _with_text(error: Exception, text: str) -> Exception | None:
    more = vars(error).keys() - {"__notes__"}
    if more or len(error.args) > 1 or not all(isinstance(x, str) for x in error.args):
        return None
    try:
        made = type(error)(text)
    except Exception:  # its own __init__ wants something else
        return None
    return made if text.splitlines()[0] in str(made) else None
