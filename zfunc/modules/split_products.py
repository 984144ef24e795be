"""What submodules do with split leaves: the forward of their role, around their own.

Each product calls its module's own forward where that has the right meaning on a part of the
leaves, since some do more than multiply: an embedding that scales what it looks up, a linear layer
with an adapter. The sums over ranks are the two of each pair of products, forward and backward
(Shoeybi et al. 2019, "Megatron-LM", section 3).
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zfunc.errors import CompositionError, PlacementError
from zfunc.layout.splits import Split
from zfunc.modules.cut_streams import POSITIONS, CutStream, summand_stream
from zfunc.modules.split_inputs import taking
from zfunc.modules.split_modules import split_homes
from zfunc.modules.split_plans import Role, SplitPlan
from zfunc.modules.split_randomness import draw_apart
from zfunc.modules.split_reductions import reducing, shares
from zfunc.modules.units import Anatomy
from zfunc.operators.conjugates import (
    BACKWARD,
    FORWARD,
    added,
    copied,
    gathered,
    gathered_positions,
    joined_positions,
    made_once,
    scattered_positions,
    shared,
    summed,
)
from zfunc.operators.products import summand
from zfunc.operators.vocabulary import local_indices
from zfunc.ranks.comm import Group, even_cuts

__all__ = ["CutLayer", "Wiring", "wire"]

# Else those of operators.
EMBED, HEAD, BETWEEN, NORM = "tensor embed", "tensor head", "tensor between", "tensor norms"

Forward = Callable[..., Any]
Splits = Mapping[str, Split]
"""How a submodule's own parameters are split, by attribute; whole ones are not in it."""


@dataclass(frozen=True)
class CutLayer:
    """The stream of a layer that runs on this rank's positions.

    Attributes:
        length: how many positions all ranks have.
        count: how many times, over the texts of a batch say.
        width: of one position.
    """

    length: int
    count: int
    width: int


_AS_IT_IS: AbstractContextManager[None] = nullcontext()


class Wiring:
    """What the wired submodules of one copy of a module know of the call that is running.

    Where a layer runs on positions each rank computes something of its own, and so gradients of all
    that is whole are parts: they add up where it has come in.

    Attributes:
        ranks: those among which the leaves are split; None between calls, or where none are.
        streaming: whether layers may run on positions in this call.
        layer: the stream of the layer that is running, if it runs on positions.
    """

    def __init__(self) -> None:
        self.ranks: Group | None = None
        self.streaming = False
        self.layer: CutLayer | None = None

    @property
    def group(self) -> Group:
        """The ranks of the call."""
        assert self.ranks is not None
        return self.ranks

    def along(self, layer: CutLayer | None) -> AbstractContextManager[None]:
        """A block in which a layer runs on these positions, or on whole streams."""
        return _AS_IT_IS if layer is self.layer else self._along(layer)

    @contextmanager
    def _along(self, layer: CutLayer | None) -> Iterator[None]:
        before, self.layer = self.layer, layer
        try:
            yield
        finally:
            self.layer = before

    def entered(self, x: Tensor, label: str = BACKWARD) -> Tensor:
        """What is whole, for work in parts."""
        return copied(x, self.group, label) if self.layer is None else x

    def ended(self, y: Tensor, own: bool = False) -> Tensor:
        """The sum of what ranks made in parts, or this rank's positions of it.

        Args:
            y: all positions.
            own: whether nobody else has its memory.
        """
        if self.layer is None:
            return summed(y, self.group, own=own)
        return self._by_position(y, lambda x: scattered_positions(x, self.group, -2))

    def narrowed(self, y: Tensor) -> Tensor:
        """This rank's positions of what each rank has made of all."""
        if self.layer is None:
            return y
        length, ranks = self.layer.length, self.group
        cuts = even_cuts(length, ranks.size)
        start, stop = cuts[ranks.rank], cuts[ranks.rank + 1]
        return self._by_position(y, lambda x: x.narrow(-2, start, stop - start))

    def gathered(self, x: Tensor) -> Tensor:
        """All positions, of this rank's; whoever asks again for the same gets the same."""
        assert self.layer is not None
        length, ranks = self.layer.length, self.group
        label = FORWARD if x.shape[-1] == self.layer.width else POSITIONS

        def along(x: Tensor) -> Tensor:
            return gathered_positions(x, ranks, length, -2, label)

        return made_once(x, ("positions", ranks, length), lambda: self._by_position(x, along))

    def joined(self, x: Tensor) -> Tensor:
        """All positions, for the code around the layer, in which ranks do alike."""
        assert self.layer is not None
        length, ranks = self.layer.length, self.group
        return self._by_position(x, lambda x: joined_positions(x, ranks, length, -2))

    def _by_position(self, x: Tensor, way: Callable[[Tensor], Tensor]) -> Tensor:
        """``way``, along dimension -2, also of what has texts and positions in one dimension."""
        assert self.layer is not None
        if x.dim() > 2:
            return way(x)
        count, rest = self.layer.count, x.shape[1:]
        rows = x.reshape(count, len(x) // max(1, count), math.prod(rest))
        made = way(rows)
        return made.reshape(count * made.shape[1], *rest)


def wire(wiring: Wiring, module: nn.Module, anatomy: Anatomy, plan: SplitPlan, rank: int) -> None:
    """Give submodules the forward of their role, in this very module."""
    homes, names = split_homes(anatomy, plan), {part: x for x, part in module.named_modules()}
    parts = {module.get_submodule(name): (name, role) for name, role in plan.roles.items()}
    for part, (name, role) in parts.items():
        own = {
            key: homes[home] for key in part._parameters if (home := (names[part], key)) in homes
        }
        if role is Role.ROW and name in plan.once:
            forward = _tried_row(wiring, part)
        elif role is Role.BETWEEN:
            forward = _between(wiring, part, own, plan.between.get(name))
        else:
            if rank and name in plan.once:
                part.__dict__["forward"] = _without(part, plan.once[name])
            forward = MAKERS[role](wiring, part, own, rank, name)
        part.__dict__["forward"] = _called_alike(part.forward, forward)
        if role is Role.ROW:
            part.register_forward_pre_hook(_more_than_a_product)
    for name, inputs in plan.inputs.items():
        part = module.get_submodule(name)
        part.__dict__["forward"] = taking(part, inputs, rank, wiring.entered)
    for name, split in plan.norms.items():
        part = module.get_submodule(name)
        share = shares(split, rank)
        part.__dict__["forward"] = reducing(
            part.forward, split.size, lambda x: added(x, wiring.group, NORM), share
        )
    draw_apart(module, plan.roles, lambda: wiring.ranks)


def _more_than_a_product(part: nn.Module, args: Any) -> None:
    """A hook that leaves all as it is. Code that multiplies by weights itself where no module has
    hooks, as that of nn.TransformerEncoderLayer does without gradients, sees it, and calls it."""
    if any(isinstance(x, Tensor) and x.is_nested for x in args):
        raise PlacementError(
            f"a {type(part).__name__} whose products are summed over ranks was given a nested "
            "tensor, whose sum is not defined. Leave them out: nn.TransformerEncoder(..., "
            "enable_nested_tensor=False)."
        )


def _called_alike(was: Forward, forward: Forward) -> Forward:
    """``forward``, whose first argument may have the name that it has in ``was``."""
    first = next(iter(inspect.signature(was).parameters), "")

    @functools.wraps(was)
    def called(*args: Any, **kwargs: Any) -> Any:
        if not args and first in kwargs:
            args = (kwargs.pop(first),)
        return forward(*args, **kwargs)

    return called


# --- roles -------------------------------------------------------------------------------------


def _column(wiring: Wiring, part: nn.Module, own: Splits, rank: int, name: str) -> Forward:
    multiply = _product(part, _weight(own, part, name, Role.COLUMN))
    partial = any(split.shared for split in own.values())

    def forward(input: Tensor, *args: Any, **kwargs: Any) -> Any:
        x = wiring.entered(input)
        with _entered(wiring, part, own) if partial else nullcontext():
            return multiply(x, *args, **kwargs)

    return forward


def _row(wiring: Wiring, part: Any, own: Splits, rank: int, name: str) -> Forward:
    split = _weight(own, part, name, Role.ROW)
    if isinstance(part, nn.Linear) and type(part).forward is not nn.Linear.forward:
        return _own_row(wiring, part, name)
    turned = split.dim == 0

    def forward(input: Tensor) -> Tensor:
        y = summand(input, part.weight, wiring.group, turned)
        total, bias = wiring.ended(y, own=True), part._parameters.get("bias")
        return total if bias is None else total + bias

    return forward


def _own_row(wiring: Wiring, part: Any, name: str) -> Forward:
    """Of a linear layer that does more than multiply, which cannot be told to leave its bias."""
    inner = part.forward
    if part.bias is not None:
        raise CompositionError(
            f"the plan makes {name} a row, and what {type(part).__name__}.forward does with its "
            f"bias is not known. Leave it whole: rules={{'{name}.*': None}}."
        )
    return lambda input: wiring.ended(inner(input))


def _tried_row(wiring: Wiring, part: nn.Module) -> Forward:
    """Of a linear layer whose own forward adds its bias, as was tried: it adds zeros instead."""
    inner = part.forward

    def forward(input: Tensor) -> Tensor:
        bias = part._parameters["bias"]
        assert bias is not None
        part._parameters["bias"] = torch.zeros_like(bias)  # type: ignore[assignment]
        try:
            y: Tensor = inner(input)
        finally:
            part._parameters["bias"] = bias
        return wiring.ended(y) + bias

    return forward


def _head(wiring: Wiring, part: nn.Module, own: Splits, rank: int, name: str) -> Forward:
    split = _weight(own, part, name, Role.HEAD)
    multiply = _product(part, split)

    def forward(input: Tensor) -> Tensor:
        if isinstance(input, CutStream):
            x = input.gathered(HEAD)
        else:
            x = copied(input, wiring.group, HEAD)
        return gathered(multiply(x), wiring.group, split, HEAD)

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
        y = y.masked_fill(~mine[..., None], 0)
        if wiring.streaming:
            return summand_stream(y, wiring.group, EMBED)
        return summed(y, wiring.group, EMBED, own=True)

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


def _between(wiring: Wiring, part: nn.Module, own: Splits, keys: Sequence[str] | None) -> Forward:
    inner = part.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with _entered(wiring, part, own, keys):
            return inner(*args, **kwargs)

    return forward


def _feed(wiring: Wiring, part: nn.Module, own: Splits, rank: int, name: str) -> Forward:
    inner = part.forward

    def whole(x: Any) -> Any:
        return wiring.entered(x) if isinstance(x, Tensor) else x

    def forward(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = tuple(map(whole, args)), {key: whole(x) for key, x in kwargs.items()}
        with _entered(wiring, part, own):
            return inner(*args, **kwargs)

    return forward


def _network(wiring: Wiring, part: nn.Module, own: Splits, rank: int, name: str) -> Forward:
    inner = _feed(wiring, part, own, rank, name)
    return lambda *args, **kwargs: wiring.ended(inner(*args, **kwargs))


def _without(part: nn.Module, leaves: Sequence[str]) -> Forward:
    """A forward on zeros in the place of leaves that another rank counts; they get gradients."""
    inner = part.forward

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        held = {key: part._parameters[key] for key in leaves}
        for key, p in held.items():
            if p is not None:
                part._parameters[key] = p.masked_fill(p.new_ones((), dtype=torch.bool), 0)  # type: ignore[assignment]
        try:
            return inner(*args, **kwargs)
        finally:
            part._parameters.update(held)

    return forward


MAKERS: Mapping[Role, Callable[[Wiring, nn.Module, Splits, int, str], Forward]] = {
    Role.COLUMN: _column,
    Role.ROW: _row,
    Role.HEAD: _head,
    Role.EMBED: _embed,
    Role.FEED: _feed,
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

    def forward(input: Tensor) -> Tensor:
        weight = part.weight.mT if turned else part.weight
        return F.linear(input, weight, part._parameters.get("bias"))

    return forward


@contextmanager
def _entered(
    wiring: Wiring, part: nn.Module, own: Splits, keys: Sequence[str] | None = None
) -> Iterator[None]:
    """A block in which gradients of what several ranks have are summed over these.

    These are a submodule's own leaves that are whole, and indices that stand on several ranks.

    Args:
        keys: of the whole ones those that parts read; each rank has all of the others' gradients.
    """
    held = dict(part._parameters)
    for key, p in held.items():
        split, ranks = own.get(key), wiring.group
        if p is not None and (split is not None or keys is None or key in keys):
            x = wiring.entered(p, BETWEEN) if split is None else shared(p, ranks, split)
            part._parameters[key] = x  # type: ignore[assignment]
    try:
        yield
    finally:
        part._parameters.update(held)


def _places(ids: Tensor, split: Split, rank: int) -> tuple[Tensor, Tensor]:
    """Where in a rank's rows the ids are, and which are; those that no rank has are in no row."""
    at, mine = local_indices(ids, split.runs[rank])
    known = (ids >= 0) & (ids < split.size)
    return torch.where(known, at, max(1, split.width(rank))), mine


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
