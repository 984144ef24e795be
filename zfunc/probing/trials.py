"""Whether each rank's numbers alone give its share of the whole: what decides that a pair is split.

Modules may keep numbers beside their leaves, how many heads they have say. Which ones are to be
divided is found by trying, the fewest first, of those that they read.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import accumulate, chain, combinations, islice, pairwise, product
from typing import Any

import torch
from torch import Tensor, nn

from zfunc.layout.splits import Split
from zfunc.modules.split_inputs import take
from zfunc.probing.copies import LayerInputs
from zfunc.probing.exactness import close
from zfunc.probing.flows import Pairing, connected
from zfunc.probing.homes import read_elsewhere
from zfunc.probing.norms import add_up, features_of, norms_between, told
from zfunc.probing.numbers import Number, Numbers, numbers_read
from zfunc.probing.pieces import assignments
from zfunc.probing.reaches import Masks, Reach, Reaches, Refused
from zfunc.probing.stages import Stage, Trace

__all__ = ["Parts", "divided", "local_features", "local_parameters", "numbers_set", "parts_of"]
__all__ += ["same_results"]

TRIES = 600  # of sets of numbers that are divided
MOST = 4  # numbers that are divided together
SCALES = 1.0, 100.0  # of random numbers: some code changes large ones alone


@dataclass
class Parts:
    """How a pairing is split.

    Attributes:
        columns, rows: outputs of columns and inputs of rows, by name.
        parameters: of other submodules, those of which each rank has a part.
        between: those that are whole, and whose gradients are in parts.
        given: names of the layer's arguments of which each rank takes a part.
        further: positions of the layer's results of which each rank gives a part.
        inner: columns that read what common ones gave.
        norms: submodules between that take means over features, and how these are split.
        numbers: what differs beside the leaves.
        pieces: how many there were.
    """

    pairing: Pairing
    columns: dict[str, Split]
    rows: dict[str, Split]
    parameters: dict[str, Split] = field(default_factory=dict)
    between: tuple[str, ...] = ()
    given: dict[str, Split] = field(default_factory=dict)
    further: dict[int, Split] = field(default_factory=dict)
    inner: tuple[str, ...] = ()
    norms: dict[str, Split] = field(default_factory=dict)
    numbers: Numbers = field(default_factory=dict)
    pieces: int = 0

    def leaves(self, stage: Stage) -> dict[str, Split]:
        """How all leaves are split, by name within the layer."""
        out = dict(self.parameters)
        for name, split in self.columns.items():
            part, turned = stage.layer.get_submodule(name), stage.products[name].turned
            out[f"{name}.weight"] = replace(split, dim=int(turned))
            if part._parameters.get("bias") is not None:
                out[f"{name}.bias"] = split
        for name, split in self.rows.items():
            out[f"{name}.weight"] = replace(split, dim=int(not stage.products[name].turned))
        return out


def parts_of(
    stage: Stage, pairing: Pairing, ways: int, grains: Mapping[str, int] | None = None
) -> Parts:
    """How a pairing is split over ranks.

    Args:
        grains: by the names of rows, at multiples of how many inputs they are best split.

    Raises:
        Refused: it is not, and why.
    """
    try:
        return _parts_of(stage, pairing, ways, grains or {})
    except Refused:
        if not (norms := norms_between(stage, pairing)):
            raise
        with stage.reducing(norms), suppress(Refused):
            return _parts_of(stage, pairing, ways, grains or {})
        raise


def _parts_of(stage: Stage, pairing: Pairing, ways: int, grains: Mapping[str, int]) -> Parts:
    reaches = Reaches(stage, pairing)
    pieces, proposals = assignments(reaches, ways, grains)
    few = _too_few(reaches, pieces, ways) if pieces < ways else None
    refused: Refused | None = None
    for ranks in proposals:
        try:
            return _tried(stage, reaches, ranks, pieces)
        except Refused as error:
            refused = refused or error
    raise few or refused or Refused("nothing was tried")


def _too_few(reaches: Reaches, pieces: int, ways: int) -> Refused:
    """The reason, with the submodules that may be what makes one of several pieces."""
    rows = reaches.none()
    rows[reaches.pairing.rows[0]][0] = True
    between = [name.rpartition(".")[0] for name in reaches.backward(rows).parameters]
    found = list(dict.fromkeys(name for name in between if name))
    also = f"; between lies {_named(found)}" if found else ""
    return Refused(
        f"{_named(reaches.pairing.rows)} reads {pieces} independent piece{'s' * (pieces != 1)}, "
        f"and there are {ways} ranks{also}"
    )


def _named(names: Iterable[str]) -> str:
    return ", ".join(names)


def _tried(stage: Stage, reaches: Reaches, ranks: list[Masks], pieces: int) -> Parts:
    found = [reaches.backward(rows) for rows in ranks]
    parts = Parts(
        reaches.pairing,
        {name: _split([x.columns[name] for x in found], name) for name in reaches.columns},
        {name: _split([rows[name] for rows in ranks], name) for name in reaches.widths},
        pieces=pieces,
        inner=tuple(reaches.inner_columns),
    )
    _between(parts, found, reaches.inner())
    _arguments(stage, parts, found)
    bases = []
    for call in stage.calls:
        with stage.called(call):
            bases.append(stage.run())
    calls = [*zip(stage.calls, bases, strict=True)]
    for name in bases[0].entered if bases[0].sums else ():
        _norm(stage, parts, bases[0], name)
    for numbers in islice(_sets(stage, parts), TRIES):
        parts.numbers = numbers
        if all(_holds_called(stage, parts, call, base) for call, base in calls):
            _check_homes(stage, parts)
            _check_more(stage, parts)
            _check_written(stage, parts)
            parts.further = _further(stage, parts, bases[0])
            return parts
    raise Refused(
        f"what lies before {_named(reaches.pairing.rows)} does not give a rank's share from a "
        f"rank's numbers, whatever of {_read(stage, parts)} is divided"
    )


def _check_homes(stage: Stage, parts: Parts) -> None:
    """Gradients of what lies between are summed where it is read."""
    shared = [name for name, split in parts.parameters.items() if split.shared]
    some = [name for name in (*parts.between, *shared) if name in stage.parameters]
    for call in stage.calls:
        with stage.called(call):
            if elsewhere := read_elsewhere(stage, parts.rows, some):
                raise Refused(f"{_named(elsewhere)} is read by other code than its own submodule")
            if outside := _read_outside(stage, parts, some):
                raise Refused(f"{_named(outside)} is read before or behind, too")
            if others := _read_beside(stage, parts):
                raise Refused(
                    f"{_named(parts.rows)} read what {_named(others)} gives, of which "
                    "all ranks have all"
                )


def _read_beside(stage: Stage, parts: Parts) -> list[str]:
    """Products that rows read beside columns, such as those that are called several times.

    Their gradients would be those of a rank's rows alone.
    """
    trace, members = stage.run(grad=True), set(parts.pairing.columns)
    others = [(name, y) for name, _, y in trace.calls if name not in members]
    rows = [trace.inputs[name] for name in parts.rows if name in trace.inputs]
    found = {others[i][0] for x in rows for i in connected(x, [y for _, y in others])}
    return sorted(found)


def _read_outside(stage: Stage, parts: Parts, parameters: Sequence[str]) -> list[str]:
    """Those on which something else depends than what rows read: of these all ranks have all."""
    if not parameters:
        return []
    trace = stage.run(grad=True)
    inside = {*parts.rows, *parts.inner}
    others = [x for name, x in trace.inputs.items() if name not in inside]
    others += [x for x in (trace.result, *trace.further) if x is not None]
    leaves = [stage.parameters[name] for name in parameters]
    return sorted({parameters[i] for x in others for i in connected(x, leaves)})


def _check_more(stage: Stage, parts: Parts) -> None:
    """Larger numbers, and gradients: what lies between may have a backward of its own.

    Raises:
        Refused: ranks' parts do not give what the whole gives.
    """
    for call in (stage.calls[0], *(call for call in stage.calls[1:] if call.training)):
        with stage.called(call):
            for scale in SCALES:
                base = stage.run(draw=1, scale=scale, grad=True)
                if any(name not in base.inputs for name in parts.rows):  # an expert: see the first
                    base = stage.run(scale=scale, grad=True)
                _check_gradients(stage, parts, base)


def _check_written(stage: Stage, parts: Parts) -> None:
    """Buffers, such as running statistics, that a layer writes to in training.

    Raises:
        Refused: a rank would write something of its own.
    """
    held = [(part._buffers, dict(part._buffers)) for part in stage.layer.modules() if part._buffers]
    before = {name: x.clone() for name, x in stage.layer.named_buffers()}
    if not before:
        return

    def after(run: Callable[[], Any]) -> dict[str, Tensor]:
        for buffers, own in held:
            buffers.clear()
            buffers.update({key: x if x is None else x.clone() for key, x in own.items()})
        torch.default_generator.manual_seed(0)  # no device's, which nobody puts back
        run()
        return {name: x.to(torch.float64) for name, x in stage.layer.named_buffers()}

    try:
        with stage.called(replace(stage.call, training=True)):
            whole: dict[str, Tensor] = {}
            with suppress(Exception):  # the module's own code, in a way that nobody asked for
                whole = after(stage.run)
            written = [n for n, x in whole.items() if n not in before or not _same(x, before[n])]
            if not written:
                return
            base = stage.run()
            for rank in range(next(iter(parts.rows.values())).ways):
                own = after(functools.partial(_ran, stage, parts, base, rank))
                if odd := [n for n in written if n not in own or not _same(own[n], whole[n])]:
                    raise Refused(f"in training ranks would write other numbers to {_named(odd)}")
    finally:
        for buffers, were in held:
            buffers.clear()
            buffers.update(were)


def _same(x: Tensor, y: Tensor) -> bool:
    return x.shape == y.shape and close(x.to(torch.float64), y.to(torch.float64))


def _check_gradients(stage: Stage, parts: Parts, base: Trace) -> None:
    if any(name not in base.inputs for name in parts.rows):
        return
    weights = {name: _weights(base.inputs[name]) for name in parts.rows}
    wanted = _gradients(stage, parts, base, weights)
    if not all(bool(x.isfinite().all()) for x in (*base.inputs.values(), *wanted.values())):
        return
    found = {name: torch.zeros_like(x) for name, x in wanted.items()}
    for rank in range(next(iter(parts.rows.values())).ways):
        with _local_run(stage, parts, base, rank, grad=True) as trace:
            if trace is None or not _holds(trace, parts, base, rank):
                raise Refused("with larger numbers a rank's do not give its share")
            mine = {n: local_features(x, parts.rows[n], rank) for n, x in weights.items()}
            for name, g in _gradients(stage, parts, trace, mine).items():
                split = parts.parameters.get(name) or parts.columns.get(name)
                if split is None:
                    found[name] += g
                    continue
                dim = split.dim if name in parts.parameters else -1
                found[name].index_add_(dim, _indices(split, rank), g)
    if not parts.norms and not all(close(found[name], x) for name, x in wanted.items()):
        raise Refused("gradients of ranks' parts do not add up to those of the whole")


def _weights(x: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(x.shape, generator=generator, dtype=torch.float64)


def _gradients(
    stage: Stage, parts: Parts, trace: Trace, weights: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Of a number that rows' inputs give, to columns' outputs and to what lies between."""
    names = [name for name in (*parts.parameters, *parts.between) if name in stage.parameters]
    leaves = {name: trace.outputs[name] for name in parts.columns if name in trace.outputs}
    leaves |= {name: stage.layer.get_parameter(name) for name in names}
    leaves = {n: x for n, x in leaves.items() if x.requires_grad and 0 not in x.stride()}
    with torch.enable_grad():
        rows = [(trace.inputs[name] * weight).sum() for name, weight in weights.items()]
        total = torch.stack(rows).sum()
        if not leaves or not total.requires_grad:
            return {}
        grads = torch.autograd.grad(total, [*leaves.values()], allow_unused=True)
    return {
        name: torch.zeros_like(x) if g is None else g
        for (name, x), g in zip(leaves.items(), grads, strict=True)
    }


def _read(stage: Stage, parts: Parts) -> str:
    names = sorted({number.attribute for number in numbers_read(stage, parts.pairing.rows[0])})
    return ", ".join(names) or "nothing that it keeps"


def _split(masks: Sequence[Tensor], name: str) -> Split:
    if not bool(torch.stack(list(masks)).any(0).all()):
        raise Refused(f"some numbers of {name} reach no row, so that no rank would have them")
    return Split.of(0, [mask.nonzero().flatten().tolist() for mask in masks])


def _between(parts: Parts, found: Sequence[Reach], inner: Sequence[str]) -> None:
    whole = list(inner)
    for name in {name: None for reach in found for name in reach.parameters}:
        masks = [reach.parameters.get(name) for reach in found]
        split = _apart([m for m in masks if m is not None]) if None not in masks else None
        if split is None:
            whole.append(name)
        else:
            parts.parameters[name] = split
    parts.between = tuple(dict.fromkeys(whole))


def _norm(stage: Stage, parts: Parts, base: Trace, name: str) -> None:
    """How the features of a norm are split; what it has for each of them is split with these."""
    split = features_of(base, name, parts.columns, parts.rows)
    parts.norms[name] = split
    for parameter, p in stage.parameters.items():
        if parameter.rpartition(".")[0] == name and p.shape == (split.size,):
            parts.parameters[parameter] = split
            parts.between = tuple(x for x in parts.between if x != parameter)


def _apart(masks: Sequence[Tensor]) -> Split | None:
    """The dimension along which ranks use different indices, each one rank's, if there is one."""
    for dim in range(masks[0].ndim):
        other = [d for d in range(masks[0].ndim) if d != dim]
        rows = torch.stack([m.any(dim=other) if other else m for m in masks])
        if rows.shape[1] > 1 and bool((rows.sum(0) == 1).all()) and len(masks) > 1:
            return Split.of(dim, [row.nonzero().flatten().tolist() for row in rows])
    return None


def _arguments(stage: Stage, parts: Parts, found: Sequence[Reach]) -> None:
    names = stage.call.names(stage.layer)
    for i in {i: None for reach in found for i in reach.given}:
        masks = [reach.given.get(i) for reach in found]
        split = _apart([m for m in masks if m is not None]) if None not in masks else None
        if split is not None:
            parts.given[names[i]] = _repeated(split)
        elif i in stage.call.streams:
            raise Refused(f"{_named(parts.pairing.rows)} read the layer's input beside columns")


def _repeated(split: Split) -> Split:
    """The shortest table that gives the same when it is repeated, as over the texts of a batch."""
    rows = [set(split.indices(rank)) for rank in range(split.ways)]
    for size in range(1, split.size):
        first = [{i for i in row if i < size} for row in rows]
        if split.size % size == 0 and all(
            row == {i for i in range(split.size) if i % size in one}
            for row, one in zip(rows, first, strict=True)
        ):
            return Split.of(split.dim, [sorted(one) for one in first])
    return split


def _further(stage: Stage, parts: Parts, base: Trace) -> dict[int, Split]:
    """Results of the layer beside the first one of which a rank gives a part."""
    ways = next(iter(parts.rows.values())).ways
    traces = [_ran(stage, parts, base, rank) for rank in range(ways)]
    tables = [*parts.parameters.values(), *parts.given.values()]
    found = {}
    for i, whole in enumerate(base.further):
        own = [trace.further[i] for trace in traces if trace is not None]
        dims = {d for x in own for d in range(whole.ndim) if x.shape[d] != whole.shape[d]}
        if dims:
            dim, size = min(dims), whole.shape[min(dims)]
            runs = [table.runs for table in tables if table.size == size]
            ends = [0, *accumulate(x.shape[dim] for x in own)]
            runs.append(tuple((pair,) for pair in pairwise(ends)))
            splits = [Split(dim, size, table) for table in runs]
            found[i + 1] = next((s for s in splits if _are_parts(s, own, whole)), splits[-1])
    return found


def _are_parts(split: Split, own: Sequence[Tensor], whole: Tensor) -> bool:
    parts = [split.local(whole, rank) for rank in range(len(own))]
    return all(_same(x, y) for x, y in zip(own, parts, strict=True))


# --- sets of numbers -----------------------------------------------------------------------------


def _sets(stage: Stage, parts: Parts) -> Iterator[Numbers]:
    yield {}
    options = [
        (number, values)
        for number in numbers_read(stage, parts.pairing.rows[0])
        if (values := divided(number.value, _shares(parts)))
    ]
    for some in chain.from_iterable(
        combinations(options, n) for n in range(1, min(MOST, len(options)) + 1)
    ):
        for chosen in product(*(values for _, values in some)):
            yield {number: each for (number, _), each in zip(some, chosen, strict=True)}


def _shares(parts: Parts) -> list[list[Fraction]]:
    """Of which part of the whole each rank has a share: of rows, of columns, and their ratios."""
    rows = _share(next(iter(parts.rows.values())))
    out = [rows]
    for split in parts.columns.values():
        for kind in _kinds(split):
            out += [kind, [a / b for a, b in zip(rows, kind, strict=True)]]
    return out


def _share(split: Split) -> list[Fraction]:
    return [Fraction(split.width(rank), split.size) for rank in range(split.ways)]


def _kinds(split: Split) -> list[list[Fraction]]:
    """The shares of all outputs, and of those alone that stand on several ranks, or on one."""
    found = [_share(split)]
    if split.shared:
        for shared in (False, True):
            mine = {i for i, ranks in enumerate(split.holders) if (len(ranks) > 1) == shared}
            if mine:
                each = [len(mine.intersection(split.indices(r))) for r in range(split.ways)]
                found.append([Fraction(n, len(mine)) for n in each])
    return [share for share in found if all(share)]


def divided(value: int, shares: Sequence[Sequence[Fraction]]) -> list[tuple[int, ...]]:
    """What a number may become on each rank."""
    found = []
    for share in shares:
        new = [value * x for x in share]
        if all(x.denominator == 1 and x > 0 for x in new) and any(x != value for x in new):
            found.append(tuple(int(x) for x in new))
    return list(dict.fromkeys(found))


# --- one rank's run ------------------------------------------------------------------------------


def _holds_called(stage: Stage, parts: Parts, call: LayerInputs, base: Trace) -> bool:
    """Whether each rank's numbers give its share where the layer is called so."""
    if not any(name in base.inputs for name in parts.pairing.members):
        return True  # nothing of it is called
    traces = []
    with stage.called(call):
        for rank in range(next(iter(parts.rows.values())).ways):
            trace = _ran(stage, parts, base, rank)
            if trace is None or not _holds(trace, parts, base, rank):
                return False
            traces.append(trace)
    return add_up(base, traces, parts.norms)


def _ran(stage: Stage, parts: Parts, base: Trace, rank: int) -> Trace | None:
    """A run of the layer on a rank's numbers; None if its code fails on them."""
    with _local_run(stage, parts, base, rank) as trace:
        return trace


@contextmanager
def _local_run(
    stage: Stage, parts: Parts, base: Trace, rank: int, grad: bool = False
) -> Iterator[Trace | None]:
    """A block in which the layer has a rank's numbers, and ran on them."""
    values = {
        name: y if name not in parts.columns else local_features(y, parts.columns[name], rank)
        for name, y in base.outputs.items()
        if name not in stage.repeated
    }

    names = stage.call.names(stage.layer)

    def change(i: int, x: Tensor) -> Tensor:
        split = parts.given.get(names[i])
        return x if split is None else take(x, split, rank).contiguous()

    local = local_parameters(stage.layer, parts.leaves(stage), rank)
    how: Any = {"change": change, "told": told(base, parts.norms, rank), "grad": grad}
    trace: Trace | None = None
    with local, numbers_set(parts.numbers, rank):
        with suppress(Exception):  # the module's own code on numbers that are not right
            trace = stage.run(values, draw=base.draw, scale=base.scale, **how)
        yield trace


def _holds(trace: Trace, parts: Parts, base: Trace, rank: int) -> bool:
    """Whether rows read this rank's share of what they read, from this rank's numbers."""
    if any(name not in base.inputs for name in parts.rows):
        return False  # not called this time
    for name, split in parts.rows.items():
        mine, want = trace.inputs.get(name), local_features(base.inputs[name], split, rank)
        if mine is None or mine.shape != want.shape or not close(mine, want):
            return False
    if trace.result is None or base.result is None:
        return trace.result is base.result
    return _same(trace.result, base.result) and same_results(trace, base) and _decided(trace, base)


def _decided(trace: Trace, base: Trace) -> bool:
    """Whether what is no rank's part, and decides something, is what it is in the whole."""
    pairs = [*zip(trace.decided, base.decided, strict=False)]
    alike = len(trace.decided) == len(base.decided) and all(a == b for (a, _), (b, _) in pairs)
    return not alike or all(x.shape != y.shape or _same(x, y) for (_, x), (_, y) in pairs)


def same_results(trace: Trace, base: Trace) -> bool:
    """Whether further results are those of the whole; parts of them have other shapes."""
    if len(trace.further) != len(base.further):
        return False
    pairs = zip(trace.further, base.further, strict=True)
    return all(x.shape != y.shape or _same(x, y) for x, y in pairs)


def local_features(x: Tensor, split: Split, rank: int) -> Tensor:
    """A rank's part of features, which lie along the last dimension."""
    return x[..., _indices(split, rank)]


def _indices(split: Split, rank: int) -> Tensor:
    return torch.tensor(split.indices(rank), dtype=torch.int64)


@contextmanager
def local_parameters(root: nn.Module, splits: Mapping[str, Split], rank: int) -> Iterator[None]:
    """A block in which a module has a rank's parts of some parameters."""
    before = []
    for name, split in splits.items():
        home, _, attribute = name.rpartition(".")
        part = root.get_submodule(home)
        p = part._parameters[attribute]
        assert p is not None
        before.append((part, attribute, p))
        if 0 in p.stride():  # one number for all, of which there is no memory
            part._parameters[attribute] = _nothing(split.shape(p.shape, rank))
            continue
        part._parameters[attribute] = nn.Parameter(split.local(p.detach(), rank).clone())
    try:
        yield
    finally:
        for part, attribute, p in before:
            part._parameters[attribute] = p


def _nothing(shape: Sequence[int]) -> nn.Parameter:
    return nn.Parameter(torch.zeros((1,) * len(shape), dtype=torch.float64).expand(*shape))


@contextmanager
def numbers_set(numbers: Numbers, rank: int) -> Iterator[None]:
    """A block in which submodules keep a rank's numbers."""
    undo: list[Number] = []
    try:
        for number, values in numbers.items():
            number.write(values[rank])
            undo.append(number)
        yield
    finally:
        for number in reversed(undo):
            number.restore()
