"""Few combinations in which every pair (or triple) of options appears at least once."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = ["covering", "uncovered"]

Case = dict[str, Any]
Options = Mapping[str, Sequence[Any]]
Part = tuple[tuple[str, Any], ...]


def covering(
    options: Options,
    strength: int = 2,
    allowed: Callable[[Case], bool] = lambda case: True,
    tries: int = 12,
) -> list[Case]:
    """Cases in which every allowed combination of ``strength`` options appears.

    Greedy: of some cases that begin with a combination that is still missing, and take for each
    option in turn the value that brings most others, the best is taken. (Cohen, Dalal, Fredman
    and Patton, The AETG System, 1997.) The same cases whenever it is called.

    Args:
        options: the values of each, the usual one first.
        strength: 2 for pairs.
        allowed: whether a case means something; asked of partial cases, too, which lack keys.
        tries: how many cases are compared.

    >>> cases = covering({"a": (0, 1), "b": (0, 1), "c": (0, 1)})
    >>> len(cases) <= 6, uncovered(cases, {"a": (0, 1), "b": (0, 1), "c": (0, 1)})
    (True, set())
    """
    draw = random.Random(0)
    missing = _parts(options, strength, allowed)
    order = sorted(missing, key=repr)
    found: list[Case] = []
    while missing:
        order = [part for part in order if part in missing]
        best: Case | None = None
        gain: set[Part] = set()
        for _ in range(tries):
            case = _grown(dict(draw.choice(order)), options, missing, allowed, draw)
            if case is None:
                continue
            brings = _in(case, strength) & missing
            if len(brings) > len(gain):
                best, gain = case, brings
        if best is None:  # no whole case has it
            missing.discard(order[0])
            continue
        found.append(best)
        missing -= gain
    return found


def _grown(
    case: Case,
    options: Options,
    missing: set[Part],
    allowed: Callable[[Case], bool],
    draw: random.Random,
) -> Case | None:
    names = [name for name in options if name not in case]
    draw.shuffle(names)
    for name in names:
        values = [value for value in options[name] if allowed(case | {name: value})]
        if not values:
            return None
        draw.shuffle(values)
        case[name] = max(values, key=lambda v, n=name: _news(case, n, v, missing))  # type: ignore[misc]
    return {name: case[name] for name in options}


def _news(case: Case, name: str, value: Any, missing: set[Part]) -> int:
    return sum(_part(((other, x), (name, value))) in missing for other, x in case.items())


def _part(items: Any) -> Part:
    return tuple(sorted(items, key=lambda item: item[0]))


def _in(case: Case, strength: int) -> set[Part]:
    return {_part(items) for items in itertools.combinations(case.items(), strength)}


def _parts(options: Options, strength: int, allowed: Callable[[Case], bool]) -> set[Part]:
    return {
        _part(zip(names, values, strict=True))
        for names in itertools.combinations(options, strength)
        for values in itertools.product(*(options[name] for name in names))
        if allowed(dict(zip(names, values, strict=True)))
    }


def uncovered(
    cases: Sequence[Case],
    options: Options,
    strength: int = 2,
    allowed: Callable[[Case], bool] = lambda case: True,
) -> set[Part]:
    """The allowed combinations that are in no case."""
    missing = _parts(options, strength, allowed)
    for case in cases:
        missing -= _in(case, strength)
    return missing
