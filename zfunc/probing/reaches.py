"""Which numbers of a layer depend on which: backward by gradients, forward by other numbers.

NaN would be simpler than other numbers, but torch's attention on CPUs swallows those in queries and
keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

import torch
from torch import Tensor

from zfunc.probing.flows import Pairing
from zfunc.probing.stages import Stage, Trace, differs

__all__ = ["Masks", "Reach", "Reaches", "Refused"]

DRAWS = 3  # a number behind a ReLU is seen in none of them with a chance of 2^-30
MOST = 16  # draws are looked at for those: an expert is called in some alone

Masks = dict[str, Tensor]
"""By a product's name, which of its outputs (of a row: inputs) are meant."""


class Refused(Exception):
    """A pair of products stays whole, and why."""


@dataclass
class Reach:
    """What some inputs of rows depend on.

    Attributes:
        columns: outputs of columns.
        parameters: elements of parameters of other submodules, by their name.
        given: elements of the layer's arguments, by position.
    """

    columns: Masks
    parameters: Masks = field(default_factory=dict)
    given: dict[int, Tensor] = field(default_factory=dict)


class Reaches:
    """Asks about one pairing. Common columns count as what lies between: they are no columns."""

    def __init__(self, stage: Stage, pairing: Pairing) -> None:
        self.stage, self.pairing = stage, pairing
        self.columns = [name for name in pairing.columns if name not in pairing.common]
        runs = (stage.run(draw=draw, grad=True, apart=True) for draw in range(MOST))
        called = (x for x in runs if all(name in x.inputs for name in pairing.members))
        self.traces = [*islice(called, DRAWS)]  # the first draw is among them: it gave the pairing
        self.bases = [stage.run(draw=trace.draw, apart=True) for trace in self.traces]
        self.widths = {name: stage.products[name].inputs for name in pairing.rows}

    def none(self) -> Masks:
        """No input of any row."""
        return {name: torch.zeros(width, dtype=torch.bool) for name, width in self.widths.items()}

    def backward(self, rows: Mapping[str, Tensor]) -> Reach:
        """What these inputs of rows depend on."""
        stage = self.stage
        out = Reach({n: torch.zeros(stage.products[n].outputs) > 0 for n in self.columns})
        for trace in self.traces:
            with torch.enable_grad():
                total = _mixed(trace, rows)
            given = {i: x for i, x in enumerate(trace.given) if x.requires_grad}
            common = [trace.outputs[name] for name in self.pairing.common]
            leaves = [trace.outputs[name] for name in self.columns]
            parameters = stage.parameters
            every = [*leaves, *parameters.values(), *given.values(), *common]
            grads = iter(torch.autograd.grad(total, every, allow_unused=True, retain_graph=True))
            for name in self.columns:
                if (g := next(grads)) is not None:
                    out.columns[name] |= (g != 0).flatten(0, -2).any(0)
            for name in parameters:
                if (g := next(grads)) is not None and (g != 0).any():
                    out.parameters[name] = out.parameters.get(name, False) | (g != 0)
            for i in given:
                if (g := next(grads)) is not None and (g != 0).any():
                    out.given[i] = out.given.get(i, False) | (g != 0)
        return out

    def forward(self, columns: Mapping[str, Tensor]) -> Masks:
        """Which inputs of rows depend on these outputs of columns."""
        out = self.none()
        for base in self.bases[:2]:
            generator = torch.Generator().manual_seed(77 + base.draw)
            values = {}
            for name, mask in columns.items():
                y = base.outputs[name]
                other = torch.randn(y.shape, generator=generator, dtype=y.dtype)
                values[name] = torch.where(mask, other, y)
            moved = self.stage.run(values, draw=base.draw, apart=True)
            for name in out:
                x, was = moved.inputs.get(name), base.inputs[name]
                if x is None or x.shape != was.shape:  # they say what it is given at all
                    out[name][:] = True
                else:
                    out[name] |= differs(x, was).flatten(0, -2).any(0)
        return out

    @property
    def inner_columns(self) -> list[str]:
        """Columns that read what common ones gave."""
        trace = self.traces[0]
        common = [trace.outputs[name] for name in self.pairing.common]
        return [
            name
            for name in self.columns
            if common and any(g is not None for g in _gradients(trace.inputs[name], common))
        ]

    def inner(self) -> list[str]:
        """Parameters of other submodules between common columns and those that they feed.

        Raises:
            Refused: such a column reads the layer's input, too.
        """
        found: list[str] = []
        for name in self.inner_columns:
            trace = self.traces[0]
            x, streams = trace.inputs[name], [trace.given[i] for i in self.stage.call.streams]
            if any(g is not None for g in _gradients(x, streams)):
                raise Refused(f"{name} reads the layer's input beside {self.pairing.common}")
            grads = _gradients(x, list(self.stage.parameters.values()))
            rows = zip(self.stage.parameters, grads, strict=True)
            found += [parameter for parameter, g in rows if g is not None]
        return found

    def closed(self, rows: Masks) -> Masks:
        """All inputs of rows that share outputs of columns with these, also through others."""
        while True:
            columns = self.backward(rows).columns
            found = self.forward(columns)
            found = {name: found[name] | rows[name] for name in rows}
            if all(torch.equal(found[name], rows[name]) for name in rows):
                return found
            rows = found


def _gradients(x: Tensor, leaves: Sequence[Tensor]) -> Sequence[Tensor | None]:
    if not x.requires_grad or not leaves:
        return [None] * len(leaves)
    with torch.enable_grad():
        total = x.sum()
    return torch.autograd.grad(total, leaves, allow_unused=True, retain_graph=True)


def _mixed(trace: Trace, rows: Mapping[str, Tensor]) -> Tensor:
    """A number that depends on exactly these inputs."""
    generator = torch.Generator().manual_seed(55 + trace.draw)
    total = torch.zeros((), dtype=torch.float64)
    for name, mask in rows.items():
        x = trace.inputs[name]
        weight = torch.rand(x.shape, generator=generator, dtype=torch.float64) + 0.5
        total = total + (x * (weight * mask)).sum()
    return total
