"""What a model asks of the run that it is in: zfunc's, which is noted, or the plain one.

A model of the fuzzer passes its layers through ``through`` and takes its random numbers from
``noise``. Under zfunc both are noted: which layers ran and what was drawn. The plain run does
the same layers and has the same numbers, so randomness needs no second implementation; that
the numbers differ where they should is asserted on the notes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import zfunc as zf

__all__ = ["RUN", "Noted", "Noting", "Plain", "Quiet", "keep_probability", "theta_at"]


@dataclass
class Noted:
    """One call of a loss on one rank.

    Attributes:
        kept: by layer, whether it did anything.
        drawn: by site, all that was drawn there, in order.
    """

    kept: dict[int, bool] = field(default_factory=dict)
    drawn: dict[str, list[Tensor]] = field(default_factory=dict)


class Noting:
    """A call under zfunc."""

    def __init__(self, noted: Noted) -> None:
        self.noted = noted

    def layer(self, fn: Callable[..., Tensor], params: Any, x: Tensor) -> Tensor:
        return zf.layer(fn, params, x)

    def through(self, call: Callable[[Tensor], Tensor], i: int, of: int, x: Tensor) -> Tensor:
        y = call(x)
        if torch.is_grad_enabled():
            self.noted.kept[i] = not torch.equal(x.detach(), y.detach())
        return y

    def noise(self, site: str, x: Tensor) -> Tensor:
        mask = F.dropout(torch.ones_like(x), 0.3) + 0.1 * torch.randn_like(x)
        if torch.is_grad_enabled():  # not where a layer is looked at only
            self.noted.drawn.setdefault(site, []).append(mask.detach().clone())
        return x * mask

    def keyed(self, x: Tensor, key: Tensor | None) -> Tensor:
        if key is None:
            return x
        noise = zf.random.normal(key, tuple(x.shape), dtype=torch.float64)
        self.noted.drawn.setdefault("key", []).append(noise)
        return x + 0.1 * noise.to(x.dtype)


class Quiet(Noting):
    """An evaluation under zfunc: nothing is random, every layer runs."""

    def through(self, call: Callable[[Tensor], Tensor], i: int, of: int, x: Tensor) -> Tensor:
        return call(x)

    def noise(self, site: str, x: Tensor) -> Tensor:
        return x

    def keyed(self, x: Tensor, key: Tensor | None) -> Tensor:
        return x


class Plain:
    """The same call in plain torch.

    Args:
        noted: what zfunc's call noted, or None where nothing is random and every layer runs.
        theta: as ``drop_layers`` has it in this step; None where it is not there.
    """

    def __init__(self, noted: Noted | None = None, theta: float | None = None) -> None:
        self.noted, self.theta = noted, theta
        self.used = dict.fromkeys(noted.drawn, 0) if noted else {}

    def layer(self, fn: Callable[..., Tensor], params: Any, x: Tensor) -> Tensor:
        return fn(params, x)

    def through(self, call: Callable[[Tensor], Tensor], i: int, of: int, x: Tensor) -> Tensor:
        if self.theta is None or self.noted is None:
            return call(x)
        if not self.noted.kept[i]:
            return x
        return x + (call(x) - x) / keep_probability(i, of, self.theta)

    def noise(self, site: str, x: Tensor) -> Tensor:
        return x if self.noted is None else x * self._next(site)

    def keyed(self, x: Tensor, key: Tensor | None) -> Tensor:
        return x if self.noted is None or key is None else x + 0.1 * self._next("key").to(x.dtype)

    def _next(self, site: str) -> Tensor:
        assert self.noted is not None
        self.used[site] += 1
        return self.noted.drawn[site][self.used[site] - 1]

    def check(self) -> None:
        """What was drawn more often than it is used was drawn by a layer that ran twice: it must
        be what was drawn there the first time."""
        for site, drawn in self.noted.drawn.items() if self.noted else ():
            first = drawn[: self.used[site]]
            for again in drawn[self.used[site] :]:
                same = any(x.shape == again.shape and torch.equal(x, again) for x in first)
                assert same, f"{site}: a layer that ran again drew other numbers"


def keep_probability(i: int, of: int, theta: float) -> float:
    return 1 - (i + 1) / of * (1 - theta)


def theta_at(step: int, theta: float, gamma: float) -> float:
    return (1 - theta) * math.exp(-gamma * step) + theta


RUN: ContextVar[Noting | Plain] = ContextVar(
    "run"
)  # for modules, whose forward has no such argument
