"""Whether what is split in a layer is right together, and leaves alone what is whole.

A pair is tried by itself. What it changes, numbers that submodules keep among it, may be read by
code elsewhere in the layer.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Protocol

import torch
from torch import Tensor

from zfunc.layout.splits import Split
from zfunc.modules.split_inputs import take
from zfunc.modules.split_plans import Role
from zfunc.probing.exactness import close
from zfunc.probing.norms import told
from zfunc.probing.numbers import attributes_set
from zfunc.probing.reaches import Refused
from zfunc.probing.stages import Stage, Trace
from zfunc.probing.trials import local_features, local_parameters, same_results

__all__ = ["Layered", "check_together", "local_product"]


class Layered(Protocol):
    """What is split in a layer; names are those within it."""

    splits: dict[str, Split]
    roles: dict[str, Role]
    attributes: dict[str, dict[str, tuple[int, ...]]]
    given: dict[str, Split]
    norms: dict[str, Split]


def check_together(stage: Stage, made: Layered, ways: int) -> None:
    """Let each rank run with all that is split, and look at what all products are given.

    Raises:
        Refused: it is not a rank's share of what they are given on the whole.
    """
    with stage.reducing(list(made.norms)):
        for call in stage.calls:
            with stage.called(call):
                base = stage.run()
                for rank in range(ways):
                    if (odd := _odd(stage, made, base, rank)) is not None:
                        raise Refused(f"beside what else is split in the layer, {odd}")


def _odd(stage: Stage, made: Layered, base: Trace, rank: int) -> str | None:
    """What is given something else on a rank."""
    values, wanted = {}, {}
    for name in base.outputs:
        wanted[name], own = local_product(stage, made.splits, base, name, rank)
        if name not in stage.repeated:
            values[name] = own
    names = stage.call.names(stage.layer)

    def change(i: int, x: Tensor) -> Tensor:
        split = made.given.get(names[i])
        return x if split is None else take(x, split, rank).contiguous()

    networks = tuple(f"{name}." for name, role in made.roles.items() if role is Role.NETWORK)
    splits = {k: v for k, v in made.splits.items() if not k.startswith(networks)}
    whole = {k: v for k, v in made.attributes.items() if not f"{k}.".startswith(networks)}
    with ExitStack() as undo:
        undo.enter_context(local_parameters(stage.layer, splits, rank))
        undo.enter_context(attributes_set(stage.layer, whole, rank))
        try:
            trace = stage.run(values, change=change, told=told(base, made.norms, rank))
        except Exception as error:  # the module's own code on a rank's numbers
            first = (str(error).splitlines() or [""])[0]
            return f"its code raises {type(error).__name__}: {first}"
    if trace.order != base.order:
        return "other products are called"
    for name in base.order:
        if name not in stage.repeated and not _same(trace.inputs[name], wanted[name]):
            return f"{name} is given something else"
    if trace.result is None or base.result is None:
        right = trace.result is base.result
    else:
        right = _same(trace.result, base.result) and same_results(trace, base)
    return None if right else "the layer gives something else"


def local_product(
    stage: Stage, splits: dict[str, Split], base: Trace, name: str, rank: int
) -> tuple[Tensor, Tensor]:
    """A rank's share of what a product was given, and of what it gave."""
    weight, turned = splits.get(f"{name}.weight"), stage.products[name].turned
    out = weight is not None and weight.dim == int(turned)
    x, y = base.inputs[name], base.outputs[name]
    return _local(x, None if out else weight, rank), _local(y, weight if out else None, rank)


def _local(x: Tensor, split: Split | None, rank: int) -> Tensor:
    return x if split is None else local_features(x, split, rank)


def _same(x: Tensor, y: Tensor) -> bool:
    return x.shape == y.shape and close(x.to(torch.float64), y.to(torch.float64))
