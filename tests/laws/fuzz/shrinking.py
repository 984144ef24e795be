"""A failing case made smaller as long as it fails in the same way."""

from __future__ import annotations

from tests.laws.fuzz.cases import Case, runs, smaller
from tests.laws.fuzz.plain import check

__all__ = ["failure", "shrunk"]


def failure(case: Case) -> str | None:
    """What goes wrong in a case, in a line."""
    try:
        check(case)
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return None


def shrunk(case: Case, error: str, tries: int = 200) -> tuple[Case, str]:
    """The smallest case found that fails with an error of the same type, and its error."""
    kind = error.split(":")[0]
    again = True
    while again and tries:
        again = False
        for less in smaller(case):
            if not runs(less):
                continue
            tries -= 1
            now = failure(less)
            if now is not None and now.split(":")[0] == kind:
                case, error, again = less, now, True
                break
            if not tries:
                break
    return case, error
