"""What submodules do with split leaves: the forward of their role, around their own.

Each product calls its module's own forward where that has the right meaning on a part of the
leaves, since some do more than multiply: an embedding that scales what it looks up, a linear layer
with an adapter. The sums over ranks are the two of each pair of products, forward and backward
(Shoeybi et al. 2019, "Megatron-LM", section 3).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zfunc.engine.versions import versions
from zfunc.errors import CompositionError
from zfunc.layout.splits import Split
from zfunc.modules.conjugates import copied, gathered, summed
from zfunc.modules.split_modules import split_homes
from zfunc.modules.split_plans import Role, SplitPlan
from zfunc.modules.units import Anatomy
from zfunc.ranks.comm import Group

__all__ = ["Wiring", "wire"]

FORWARD, BACKWARD, EMBED = "tensor forward", "tensor backward", "tensor embed"
HEAD, SHARED, BETWEEN = "tensor head", "tensor shared", "tensor between"

Forward = Callable[..., Any]
Splits = Mapping[str, Split]
"""How a submodule's own parameters are split, by attribute; whole ones are not in it."""


class Wiring:
    """What the wired submodules of one copy of a module know of the call that is running."""

    def __init__(self) -> None:
        self.ranks: Group | None = None
        self._last: tuple[Tensor, list[int] | None, Tensor] | None = None

    @property
    def group(self) -> Group:
        """The ranks among which the leaves are split."""
        assert self.ranks is not None
        return self.ranks

    def once(self, x: Tensor, label: str = BACKWARD) -> Tensor:
        """``x``, whose gradient is summed over ranks: once for all columns that read it."""
        if not (x.requires_grad and torch.is_grad_enabled()):
            return x
        seen, last = versions([x]), self._last
        if last is None or last[0] is not x or last[1] != seen:
            self._last = last = x, seen, copied(x, self.group, label)
        return last[2]

    def forget(self) -> None:
        """What comes now reads other inputs."""
        self._last = None

    def close(self) -> None:
        """The call is over, and so may be the ranks' world."""
        self.ranks = self._last = None


def wire(wiring: Wiring, module: nn.Module, anatomy: Anatomy, plan: SplitPlan, rank: int) -> None:
    """Give submodules the forward of their role, in this very module."""
    homes, names = split_homes(anatomy, plan), {part: x for x, part in module.named_modules()}
    parts = {module.get_submodule(name): (name, role) for name, role in plan.roles.items()}
    for part, (name, role) in parts.items():
        own = {
            key: homes[home] for key in part._parameters if (home := (names[part], key)) in homes
        }
        forward = MAKERS[role](wiring, part, own, rank, name)
        part.__dict__["forward"] = functools.wraps(part.forward)(forward)


# --- roles -------------------------------------------------------------------------------------


def _column(wiring: Wiring, part: nn.Module, own: Splits, rank: int, name: str) -> Forward:
    multiply = _product(part, _weight(own, part, name, Role.COLUMN))
    partial = any(split.shared for split in own.values())

    def forward(input: Tensor) -> Any:
        x = wiring.once(input)
        if not partial:
            return multiply(x)
        with _entered(wiring, part, own):
            return multiply(x)

    return forward


def _row(wiring: Wiring, part: Any, own: Splits, rank: int, name: str) -> Forward:
    split = _weight(own, part, name, Role.ROW)
    if isinstance(part, nn.Linear) and type(part).forward is not nn.Linear.forward:
        return _own_row(wiring, part, name)
    turned = split.dim == 0

    def forward(input: Tensor) -> Tensor:
        y = F.linear(input, part.weight.mT if turned else part.weight)
        total = summed(y, wiring.group, FORWARD)
        return total if part.bias is None else total + part.bias

    return forward


def _own_row(wiring: Wiring, part: Any, name: str) -> Forward:
    """Of a linear layer that does more than multiply, which cannot be told to leave its bias."""
    inner = part.forward
    if part.bias is not None:
        raise CompositionError(
            f"the plan makes {name} a row, and what {type(part).__name__}.forward does with its "
            f"bias is not known. Leave it whole: rules={{'{name}.*': None}}."
        )
    return lambda input: summed(inner(input).clone(), wiring.group, FORWARD)


def _head(wiring: Wiring, part: nn.Module, own: Splits, rank: int, name: str) -> Forward:
    split = _weight(own, part, name, Role.HEAD)
    multiply = _product(part, split)

    def forward(input: Tensor) -> Tensor:
        return gathered(multiply(wiring.once(input, HEAD)), wiring.group, HEAD, split)

    return forward


def _embed(wiring: Wiring, part: nn.Module, own: Splits, rank: int, name: str) -> Forward:
    split = _weight(own, part, name, Role.EMBED)
    lookup, rows = part.forward, split.indices(rank)
    if getattr(part, "scale_grad_by_freq", False):
        raise CompositionError(
            f"{name} scales gradients by how often a row is looked up, and no rank of a split "
            f"table knows that. Leave it whole: rules={{'{name}.weight': None}}."
        )
    padding = getattr(part, "padding_idx", None)
    if padding is not None:  # its row gets no gradient, on the rank that has it
        part.__dict__["padding_idx"] = rows.index(padding) if padding in rows else None

    def forward(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        at, mine = _places(input, split, rank)
        with nullcontext() if rows else _a_row(part):
            y: Tensor = lookup(at, *args, **kwargs)
        return summed(y.masked_fill(~mine[..., None], 0), wiring.group, EMBED)

    return forward


@contextmanager
def _a_row(part: nn.Module) -> Iterator[None]:
    """A block in which a table without rows has one."""
    weight = part._parameters["weight"]
    assert weight is not None
    part._parameters["weight"] = F.pad(weight, (0, 0, 0, 1))  # type: ignore[assignment]
    try:
        yield
    finally:
        part._parameters["weight"] = weight


def _between(wiring: Wiring, part: nn.Module, own: Splits, rank: int, name: str) -> Forward:
    inner = part.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with _entered(wiring, part, own):
            return inner(*args, **kwargs)

    return forward


def _network(wiring: Wiring, part: nn.Module, own: Splits, rank: int, name: str) -> Forward:
    inner = part.forward

    def whole(x: Any) -> Any:
        return wiring.once(x) if isinstance(x, Tensor) else x

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        args, kwargs = tuple(map(whole, args)), {key: whole(x) for key, x in kwargs.items()}
        with _entered(wiring, part, own):
            y: Tensor = inner(*args, **kwargs)
        return summed(y.clone(), wiring.group, FORWARD)  # somebody may have saved it

    return forward


MAKERS: Mapping[Role, Callable[[Wiring, nn.Module, Splits, int, str], Forward]] = {
    Role.COLUMN: _column,
    Role.ROW: _row,
    Role.HEAD: _head,
    Role.EMBED: _embed,
    Role.BETWEEN: _between,
    Role.NETWORK: _network,
}


# --- what they are made of ---------------------------------------------------------------------


def _product(part: Any, split: Split) -> Forward:
    """A product's forward on a part of its outputs.

    One that is no ``nn.Linear`` keeps how many outputs it has, and its weight may be ``[in, out]``.
    """
    if isinstance(part, nn.Linear):
        return part.forward
    turned = split.dim == 1

    def forward(x: Tensor) -> Tensor:
        return F.linear(x, part.weight.mT if turned else part.weight, part.bias)

    return forward


@contextmanager
def _entered(wiring: Wiring, part: nn.Module, own: Splits) -> Iterator[None]:
    """A block in which gradients of what several ranks have are summed over these.

    These are a submodule's own leaves that are whole, and indices that stand on several ranks.
    """
    held = dict(part._parameters)
    for key, p in held.items():
        split = own.get(key)
        if p is not None and (split is None or split.shared):
            label = BETWEEN if split is None else SHARED
            part._parameters[key] = copied(p, wiring.group, label, split)  # type: ignore[assignment]
    try:
        yield
    finally:
        part._parameters.update(held)


def _places(ids: Tensor, split: Split, rank: int) -> tuple[Tensor, Tensor]:
    """Where in a rank's rows the ids are, and which are; those that no rank has are in no row."""
    known = (ids >= 0) & (ids < split.size)
    at = torch.where(known, 0, max(1, split.width(rank)))
    mine, first = torch.zeros_like(known), 0
    for start, stop in split.runs[rank]:
        here = (ids >= start) & (ids < stop)
        at = torch.where(here, ids - start + first, at)
        mine, first = mine | here, first + stop - start
    return at, mine


def _weight(own: Splits, part: nn.Module, name: str, role: Role) -> Split:
    """How the weight of a product or table is split.

    Raises:
        CompositionError: it is not, or not as its role needs.
    """
    split = own.get("weight")
    if split is None:
        raise CompositionError(
            f"the plan makes {name} a {role}, and does not split {name}.weight. Name both."
        )
    if split.shared and role is not Role.COLUMN:
        raise CompositionError(
            f"the plan makes {name} a {role}, and gives some indices of {name}.weight to several "
            "ranks, which would count more than once. Give each to one rank."
        )
    wanted = 1 if role is Role.ROW else 0
    if isinstance(part, nn.Linear | nn.Embedding) and split.dim != wanted:
        raise CompositionError(
            f"the plan makes {name} a {role}, and splits {name}.weight along dimension "
            f"{split.dim}. Split it along {wanted}."
        )
    return split
