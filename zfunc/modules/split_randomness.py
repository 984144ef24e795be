"""Dropout of a split module: alike on the residual stream, and other masks between products.

From where a column ends to where its row begins each rank has heads or hidden units of its own, and
so it draws numbers of its own. Before and behind it ranks draw alike, as they compute alike.

Source: Shoeybi et al., Megatron-LM, 2019, section 3 (the random number generators of dropout).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from itertools import takewhile
from typing import Any

from torch import nn

from zfunc.modules.dropout_check import probability
from zfunc.modules.split_plans import Role
from zfunc.operators.randomness import apart
from zfunc.ranks.comm import Group
from zfunc.ranks.keys import scope
from zfunc.trees.memory import current

__all__ = ["draw_apart"]


class Apart:
    """The numbers of one module in which a column and its row are."""

    def __init__(self, module: nn.Module, ranks: Callable[[], Group | None]) -> None:
        self.module, self.ranks = module, ranks
        self.open: scope | None = None

    def begin(self) -> None:
        """Draw numbers of this rank's own, if the state has a key that decides them."""
        running, ranks = current(), self.ranks()
        if self.open is not None or running is None or running.key is None:  # type: ignore[attr-defined]
            return
        if self.module.training and ranks is not None and ranks.size > 1:
            opened = apart(ranks)
            opened.__enter__()
            self.open = opened

    def end(self) -> None:
        """Draw as the other ranks do again."""
        opened, self.open = self.open, None
        if opened is not None:
            opened.__exit__(None, None, None)


def draw_apart(
    module: nn.Module, roles: Mapping[str, Role], ranks: Callable[[], Group | None]
) -> None:
    """Let wired columns and rows of a module begin and end the draws of each rank's own.

    Args:
        module: whose products have the forward of their role.
        roles: by the name of a submodule.
        ranks: gives those of the call that is running.
    """
    columns = [name for name, role in roles.items() if role is Role.COLUMN]
    rows = {name: _around(name, columns) for name, role in roles.items() if role is Role.ROW}
    homes = {home: module.get_submodule(home) for home in rows.values() if home is not None}
    places = {name: Apart(part, ranks) for name, part in homes.items() if _drops(part)}
    for name in columns:
        home = max((x for x in homes if name.startswith(f"{x}.")), key=len, default=None)
        if home in places:
            _then(module.get_submodule(name), places[home].begin)
    for name, home in rows.items():
        if home in places:
            _first(module.get_submodule(name), places[home].end)
    for name, place in places.items():
        _finally(homes[name], place.end)


def _around(row: str, columns: list[str]) -> str | None:
    """The innermost module that has a row and a column."""
    common = max((_common(row, column) for column in columns), key=len, default=[])
    return ".".join(common) or None


def _common(a: str, b: str) -> list[str]:
    pairs = zip(a.split("."), b.split("."), strict=False)
    return [x for x, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]


def _drops(part: nn.Module) -> bool:
    kept = [*part.modules(), *filter(None, [getattr(part, "config", None)])]
    return any(probability(x) is not None for x in kept)


def _then(part: nn.Module, act: Callable[[], None]) -> None:
    was = part.forward

    @functools.wraps(was)
    def forward(*args: Any, **kwargs: Any) -> Any:
        out = was(*args, **kwargs)
        act()
        return out

    part.__dict__["forward"] = forward


def _first(part: nn.Module, act: Callable[[], None]) -> None:
    was = part.forward

    @functools.wraps(was)
    def forward(*args: Any, **kwargs: Any) -> Any:
        act()
        return was(*args, **kwargs)

    part.__dict__["forward"] = forward


def _finally(part: nn.Module, act: Callable[[], None]) -> None:
    """Whatever happens inside, also where a recomputation ends early."""
    was = part.forward

    @functools.wraps(was)
    def forward(*args: Any, **kwargs: Any) -> Any:
        try:
            return was(*args, **kwargs)
        finally:
            act()

    part.__dict__["forward"] = forward
