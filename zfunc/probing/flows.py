"""Which products of a layer feed which: the pairs of columns and rows.

A row's input comes from columns alone, and columns feed nothing else. What columns read is whole on
every rank, what a row reads may be in parts (Shoeybi et al. 2019, "Megatron-LM").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zfunc.probing.reads import ReadParameters
from zfunc.probing.stages import Stage, Trace

__all__ = ["Pairing", "connected", "pairings"]

GRADLESS = (
    "it is called where gradients are off: under torch.no_grad, or in a checkpoint with "
    "use_reentrant=True, in whose place zf.remat or use_reentrant=False can be"
)


@dataclass(frozen=True)
class Pairing:
    """Products that may be split together, by name.

    Attributes:
        columns: whose outputs are split.
        rows: whose inputs are.
        common: columns that feed others of the columns, as those of compressed keys and values do.
            They stay whole; what each rank makes of their outputs is its own.
    """

    columns: tuple[str, ...]
    rows: tuple[str, ...]
    common: tuple[str, ...] = ()

    @property
    def members(self) -> tuple[str, ...]:
        """All of its products."""
        return (*self.columns, *self.rows)


class _Flow:
    """What each product's input, and the layer's result, come from directly."""

    def __init__(self, stage: Stage, trace: Trace) -> None:
        self.order = [name for name in trace.order if name not in stage.repeated]
        self.sources = {
            name: self._sources(trace, trace.inputs[name], self.order) for name in self.order
        }
        result = trace.result
        self.outward = set() if result is None else self._sources(trace, result, self.order)

    def _sources(self, trace: Trace, x: Tensor, order: Sequence[str]) -> set[str]:
        found = connected(x, [trace.outputs[name] for name in order])
        return {order[i] for i in found}

    def consumers(self, name: str) -> set[str]:
        return {other for other in self.order if name in self.sources[other]}


def connected(x: Tensor, leaves: Sequence[Tensor]) -> list[int]:
    """Which leaves a tensor is computed from."""
    wanted = [i for i, leaf in enumerate(leaves) if leaf.requires_grad]
    if not x.requires_grad or not wanted:
        return []
    with torch.enable_grad():
        total = x.sum()
    grads = torch.autograd.grad(
        total, [leaves[i] for i in wanted], allow_unused=True, retain_graph=True
    )
    return [i for i, g in zip(wanted, grads, strict=True) if g is not None]


def pairings(stage: Stage) -> tuple[list[Pairing], dict[str, str]]:
    """The pairs of a layer, those with most elements first; and of other products why not."""
    trace = stage.run(grad=True)
    flow, read = _Flow(stage, trace), _read(stage)
    found: dict[frozenset[str], Pairing] = {}
    why: dict[str, str] = dict.fromkeys(stage.repeated, "it is called several times")
    why |= {name: "it was not called" for name in stage.products if name not in stage.trace.inputs}
    why |= {name: GRADLESS for name in flow.order if not trace.outputs[name].requires_grad}
    for name in flow.order:
        pairing = _paired(flow, name)
        if isinstance(pairing, str):
            why.setdefault(name, pairing)
        else:
            found.setdefault(frozenset(pairing.members), pairing)
    why |= dict.fromkeys(read, "its weight is read by other code than its product")
    found = {members: pairing for members, pairing in found.items() if not members & read}
    order = sorted(found.values(), key=lambda p: -_numel(stage, p))
    return order, {k: v for k, v in why.items() if not any(k in p.members for p in order)}


def _read(stage: Stage) -> set[str]:
    """Products whose parameters are asked for their values, though their stand-ins do not."""
    homes: dict[int, list[tuple[str, str]]] = {}
    for name in stage.products:
        for key, p in stage.layer.get_submodule(name)._parameters.items():
            if p is not None:
                homes.setdefault(id(p), []).append((name, key))
    found = ReadParameters(homes)
    for call in stage.calls:
        with stage.called(call), found:
            stage.run(grad=True)
    return {name for name, _ in found.found}


def _numel(stage: Stage, pairing: Pairing) -> int:
    return sum(stage.products[name].numel for name in pairing.members)


def _paired(flow: _Flow, row: str) -> Pairing | str:
    """The pair that a product is a row of, or why it is none."""
    columns: set[str] = set(flow.sources[row])
    rows, before = {row}, -1
    if not columns:
        return "what it reads is whole, and the layer's result takes what it gives"
    while len(columns) > before:
        before = len(columns)
        rows = {x for name in columns for x in flow.consumers(name)} - columns
        columns |= {x for name in rows for x in flow.sources[name]}
    rows -= columns
    if not rows:
        return "its columns feed each other alone"
    if outward := sorted(columns & flow.outward):
        return f"the layer's result takes outputs of {', '.join(outward)} as they are"
    common = {name for name in columns if flow.consumers(name) & columns}
    return Pairing(
        tuple(x for x in flow.order if x in columns),
        tuple(x for x in flow.order if x in rows),
        tuple(x for x in flow.order if x in common),
    )
