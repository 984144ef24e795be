"""Whether a layer runs on a rank's positions of the stream: tried, as everything else is.

The layer is given positions. Its columns, or a submodule around them, must be given what belongs to
these positions; from there on all positions are there, and rows, whose summed outputs are cut,
must read this rank's share of all. What the layer gives must be the rank's positions again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from zfunc.layout.splits import Split
from zfunc.modules.split_inputs import take
from zfunc.modules.split_plans import LayerStream, Role
from zfunc.modules.split_streams import names_of
from zfunc.probing.calls import Probed
from zfunc.probing.copies import LayerInputs, LayerKind
from zfunc.probing.exactness import close
from zfunc.probing.flows import Pairing, pairings
from zfunc.probing.norms import told
from zfunc.probing.numbers import attributes_set
from zfunc.probing.pointwise import forward_of, pointwise_in, written
from zfunc.probing.stages import Stage, Trace
from zfunc.probing.together import Layered, local_product
from zfunc.probing.trials import local_parameters
from zfunc.ranks.comm import even_cuts

__all__ = ["Streams", "streams_of"]

TRIES = 200  # of places where positions are put together
PRODUCTS = "\n"  # put together at the columns themselves; no submodule has that name


class LayerParts(Layered, Protocol):
    """What is split in a layer, and what it takes and hands on in parts."""

    inputs: dict[str, Split]
    further: dict[int, Split]


@dataclass
class Streams:
    """What runs on positions: layers by name, other submodules; and of other layers why not."""

    layers: dict[str, LayerStream] = field(default_factory=dict)
    pointwise: tuple[str, ...] = ()
    uncut: dict[str, str] = field(default_factory=dict)


class Uncut(Exception):
    """A layer does not run on positions, and why."""


class _Failed(Exception):
    """A run on positions went another way than that on the whole.

    Attributes:
        after: how many products and submodules were given what they should be.
    """

    after: int = 0


@dataclass
class _Whole:
    """One call on the whole.

    Attributes:
        trace: what products and the layer got and gave.
        seen: what submodules were given, by the names of arguments.
        gave: what they gave.
    """

    call: LayerInputs
    trace: Trace
    seen: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    gave: dict[str, Any] = field(default_factory=dict)
    often: set[str] = field(default_factory=set)

    @property
    def result(self) -> Tensor:
        assert self.trace.result is not None
        return self.trace.result


@dataclass(frozen=True)
class _Choice:
    """Where positions are put together for a pairing: at its columns, a submodule, or nowhere.

    Attributes:
        only: of a submodule, the one argument that is put together; others stay as they are.
    """

    pairing: Pairing
    at: str | None
    only: str | None = None


def streams_of(
    found: Probed, parts: Sequence[LayerParts], roles: Mapping[str, Role], ways: int
) -> Streams:
    """What of a module runs on positions of the stream.

    Args:
        found: a module that was called.
        parts: what is split in each kind of its layers.
        roles: of submodules outside of layers.
        ways: the number of ranks.
    """
    streams, widths = Streams(), []
    for kind, made in zip(found.kinds, parts, strict=True):
        try:
            stream, width = stream_of(kind, made, ways)
        except Uncut as error:
            streams.uncut.update(dict.fromkeys(kind.names, str(error)))
            continue
        streams.layers.update(dict.fromkeys(kind.names, stream))
        widths.append(width)
    if widths:
        streams.pointwise = pointwise_in(found, roles, widths[0])
    return streams


def stream_of(kind: LayerKind, made: LayerParts, ways: int) -> tuple[LayerStream, int]:
    """How layers of a kind run on positions, and how wide their stream is.

    Args:
        kind: which was called.
        made: what is split in it.
        ways: the number of ranks.

    Raises:
        Uncut: they do not.
    """
    if not kind.calls or kind.replaced:
        raise Uncut("it was not called" if not kind.calls else "a call changes its submodules")
    if any(role in (Role.EMBED, Role.HEAD) for role in made.roles.values()):
        raise Uncut("a table is in it")
    stage = Stage(kind.module, kind.calls, kind.fixed)
    with stage.reducing(list(made.norms)):
        return _stream_of(stage, made, ways)


def _stream_of(stage: Stage, made: LayerParts, ways: int) -> tuple[LayerStream, int]:
    try:
        pairs, _ = pairings(stage)
    except Exception as error:  # the module's own code, on what its layers were given
        raise Uncut(f"it fails on the example ({_told(error)})") from error
    if stage.repeated:
        raise Uncut(f"{', '.join(sorted(stage.repeated))} is called several times")
    if any("." in name for name in made.given):
        raise Uncut("a part of an argument is for each head")
    wholes = [_whole(stage, call) for call in stage.calls]
    wholes = [x for x in wholes if _positions(x) != 1] or wholes  # there a rank has all, or none
    _check_shapes(wholes)
    try:
        names = written(stage.layer, stage.run)
    except Exception as error:  # the module's own code
        raise Uncut(f"in training its code raises {_told(error)}") from error
    if names:
        raise Uncut(f"in training it writes to {', '.join(names)}, of all positions")
    why: _Failed | None = None
    streams = list(_streams_in(stage, wholes))
    for given in streams:
        for choices in islice(_choices(stage, pairs, made, wholes), TRIES):
            try:
                stream = _tried(stage, made, wholes, given, choices, ways)
                return stream, wholes[0].result.shape[-1]
            except _Failed as error:
                why = error if why is None or error.after > why.after else why
    raise Uncut(
        f"on positions {why}" if why else "it is given no stream of the shape that it gives"
    )


def _positions(whole: _Whole) -> int | None:
    result = whole.trace.result
    return None if result is None or result.dim() < 2 else result.shape[-2]


def _check_shapes(wholes: Sequence[_Whole]) -> None:
    for whole in wholes:
        result = whole.trace.result
        if result is None or result.dim() < 2 or not result.is_floating_point():
            raise Uncut("it gives no stream [..., positions, width]")
        if result.shape[-2] < 2:
            raise Uncut("it was called with one position: give longer ones, example=")


def _streams_in(stage: Stage, wholes: Sequence[_Whole]) -> Iterator[tuple[str, ...]]:
    """Arguments that may be the stream: one of those, or all, that have its shape."""
    found: list[str] = []
    first = wholes[0]
    names = first.call.names(stage.layer)
    for i in sorted(first.call.streams):
        if first.trace.given[i].shape == first.result.shape and "." not in names[i]:
            found.append(names[i])
    yield from ((name,) for name in found)
    if len(found) > 1:
        yield tuple(found)


def _choices(
    stage: Stage, pairs: Sequence[Pairing], made: LayerParts, wholes: Sequence[_Whole]
) -> Iterator[tuple[_Choice, ...]]:
    """For each pairing where positions are put together, the narrowest place first."""
    options: list[list[_Choice]] = []
    for pairing in pairs:
        taken = [_is_split(made, name) for name in pairing.members]
        split = any(taken)
        if split and not all(taken):
            continue  # some of its products are split with others
        places: list[str | None] = [] if split else [None]
        options.append([_Choice(pairing, at) for at in (*places, PRODUCTS)])
        for at in _around(pairing.columns):
            if at in wholes[0].seen and at not in wholes[0].often:
                options[-1] += [_Choice(pairing, at, only) for only in _asked(wholes[0], at)]
    return itertools.product(*options)


def _is_split(made: LayerParts, product: str) -> bool:
    return product in made.roles or f"{product}.weight" in made.splits


def _asked(whole: _Whole, name: str) -> list[str | None]:
    """Which arguments of a submodule are put together: all, or one of several of that shape."""
    shape = whole.result.shape
    found: list[str | None] = [key for key, x in whole.seen[name].items() if x.shape == shape]
    return [None, *(found if len(found) > 1 else ())]


def _around(columns: Sequence[str]) -> list[str]:
    """The submodules in which all columns are, the innermost first."""
    first, *others = [name.split(".")[:-1] for name in columns]
    depth = 0
    while depth < len(first) and all(first[: depth + 1] == x[: depth + 1] for x in others):
        depth += 1
    return [".".join(first[:n]) for n in range(depth, 0, -1)]


# --- on the whole --------------------------------------------------------------------------------


def _whole(stage: Stage, call: LayerInputs) -> _Whole:
    """A run in which all submodules tell what they are given."""
    found = _Whole(call, Trace())
    with stage.called(call), ExitStack() as undo:
        for name, part in stage.layer.named_modules():
            if name and name not in stage.products:
                undo.enter_context(forward_of(part, _telling(found, name, part.forward)))
        found.trace = stage.run()
    return found


def _telling(found: _Whole, name: str, inner: Callable[..., Any]) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        if name in found.seen:
            found.often.add(name)
        names = names_of(inner, len(args))
        given = {**dict(zip(names, args, strict=True)), **kwargs}
        found.seen[name] = {
            key: x.detach().clone() for key, x in given.items() if isinstance(x, Tensor)
        }
        out = inner(*args, **kwargs)
        found.gave[name] = out.detach().clone() if isinstance(out, Tensor) else None
        return out

    return forward


def _told(error: Exception) -> str:
    first = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}"


# --- on positions --------------------------------------------------------------------------------


def _tried(
    stage: Stage,
    made: LayerParts,
    wholes: Sequence[_Whole],
    given: tuple[str, ...],
    choices: Sequence[_Choice],
    ways: int,
) -> LayerStream:
    """What a layer has to do, if it is right so on every rank."""
    found: list[tuple[dict[str, tuple[str, ...]], tuple[int, ...]]] = []
    for whole in wholes:
        for rank in range(ways):
            run = _OnPositions(stage, made, whole, given, choices, rank, ways)
            found.append((run.gathered, run.made))
    gathered: dict[str, tuple[str, ...]] = {}
    for some, _ in found:
        gathered.update(some)
    if any(
        some.get(name, gathered[name]) != gathered[name] for some, _ in found for name in gathered
    ):
        raise _Failed("its submodules are given something else from call to call")
    if any(results != found[0][1] for _, results in found[:ways]):
        raise _Failed("its results are something else from call to call")
    ended = [
        name
        for choice in choices
        if choice.at is not None
        for name in choice.pairing.rows
        if not _is_split(made, name)
    ]
    parts = tuple(name for name in made.given if name not in made.inputs)
    return LayerStream(given, gathered, tuple(ended), found[0][1], parts, tuple(made.further))


class _OnPositions:
    """A run of a layer on one rank's positions.

    Attributes:
        gathered: by the name of a submodule, those of its arguments that were put together.
        made: places of results that are cut, behind the first.
    """

    def __init__(
        self,
        stage: Stage,
        made: LayerParts,
        whole: _Whole,
        given: tuple[str, ...],
        choices: Sequence[_Choice],
        rank: int,
        ways: int,
    ) -> None:
        self.stage, self.parts, self.whole, self.rank = stage, made, whole, rank
        shape = whole.result.shape
        self.length, self.count = shape[-2], shape[:-2].numel()
        cuts = even_cuts(self.length, ways)
        self.start, self.stop = cuts[rank], cuts[rank + 1]
        self.gathered: dict[str, tuple[str, ...]] = {}
        self.ends: set[str] = set()
        self.starts: set[str] = set()
        for choice in choices:
            if choice.at is not None:
                self.ends |= set(choice.pairing.rows)
            if choice.at == PRODUCTS:
                self.starts |= set(choice.pairing.columns)
        self.right, self.told = 0, told(whole.trace, made.norms, rank)
        places = {c.at: c.only for c in choices if c.at is not None and c.at != PRODUCTS}
        try:
            self.made = self._run(given, places)
        except _Failed as error:
            error.after = self.right
            raise

    def own(self, x: Tensor) -> Tensor:
        """This rank's positions of something that has all."""
        if x.dim() > 2 and x.shape[-2] == self.length:
            return x[..., self.start : self.stop, :]
        if 0 < x.dim() < 3 and len(x) == self.count * self.length:
            rows = x.unflatten(0, (self.count, self.length))[:, self.start : self.stop]
            return rows.flatten(0, 1)
        raise _Failed(f"something of shape {list(x.shape)} has no dimension of positions")

    def are_own(self, x: Tensor, every: Tensor) -> bool:
        """Whether something is this rank's positions."""
        try:
            mine = self.own(every)
        except _Failed:
            return False
        return x.shape == mine.shape and close(x.to(torch.float64), mine.to(torch.float64))

    def expect(self, name: str, x: Tensor, want: Tensor) -> bool:
        """Whether all positions are in ``x``; else it has this rank's."""
        every = x.shape == want.shape
        right = close(x.to(torch.float64), want.to(torch.float64)) if every else None
        if not (self.are_own(x, want) if right is None else right):
            raise _Failed(f"{name} is given something else")
        self.right += 1
        return every

    def _run(self, given: tuple[str, ...], places: Mapping[str, str | None]) -> tuple[int, ...]:
        stage, made, whole = self.stage, self.parts, self.whole
        names = whole.call.names(stage.layer)

        def change(i: int, x: Tensor) -> Tensor:
            if names[i] in given:
                return self.own(x)
            split = made.given.get(names[i])
            return x if split is None else take(x, split, self.rank).contiguous()

        with stage.called(whole.call), ExitStack() as undo:
            for name in stage.products:
                part = stage.layer.get_submodule(name)
                undo.enter_context(forward_of(part, self._product(name)))
            networks = [name for name, role in made.roles.items() if role is Role.NETWORK]
            for name in (*places, *networks):
                if name in whole.often or name not in whole.seen:
                    raise _Failed(f"{name} is not called once")
                part = stage.layer.get_submodule(name)
                network = name in networks
                made_of = self._network if network else partial(self._place, only=places[name])
                undo.enter_context(forward_of(part, made_of(name, part.forward)))
            undo.enter_context(local_parameters(stage.layer, made.splits, self.rank))
            undo.enter_context(attributes_set(stage.layer, made.attributes, self.rank))
            try:
                trace = stage.run(change=change, told=self.told)
            except _Failed:
                raise
            except Exception as error:  # the module's own code on positions
                raise _Failed(f"its code raises {_told(error)}") from error
        return self._results(trace)

    def _product(self, name: str) -> Callable[[Tensor], Tensor]:
        base, splits = self.whole.trace, self.parts.splits

        def forward(x: Tensor) -> Tensor:
            if name not in base.inputs:
                raise _Failed(f"{name} is called on positions alone")
            want, y = local_product(self.stage, splits, base, name, self.rank)
            every = self.expect(name, x, want)
            if not every and name in self.starts:
                self.gathered[name] = (_first(self.stage.layer.get_submodule(name)),)
                every = True
            if not every and (_is_split(self.parts, name) or name in self.ends):
                raise _Failed(f"{name} is given positions")
            y = y if every and name not in self.ends else self.own(y)
            return y + 0

        return forward

    def _place(
        self, name: str, inner: Callable[..., Any], only: str | None = None
    ) -> Callable[..., Any]:
        """A submodule around columns, which is given all positions."""
        seen = self.whole.seen[name]

        def forward(*args: Any, **kwargs: Any) -> Any:
            cut: list[str] = []

            def every(key: str, x: Any) -> Any:
                if not isinstance(x, Tensor) or key not in seen or x.shape == seen[key].shape:
                    return x
                if only not in (None, key):
                    return x
                if not self.are_own(x, seen[key]):
                    return x  # a part for each head: what is made of it will say whether it fits
                cut.append(key)
                return seen[key]

            names = names_of(inner, len(args))
            some = [every(key, x) for key, x in zip(names, args, strict=True)]
            named = {key: every(key, x) for key, x in kwargs.items()}
            if not cut:
                raise _Failed(f"{name} is given no positions")
            self.gathered[name] = tuple(cut)
            return inner(*some, **named)

        return forward

    def _network(self, name: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        """Columns and rows in one: it is given all positions, and its sum is cut."""
        gave = self.whole.gave[name]
        place = self._place(name, lambda *args, **kwargs: None)

        def forward(*args: Any, **kwargs: Any) -> Tensor:
            if not isinstance(gave, Tensor):
                raise _Failed(f"{name} gives more than one tensor")
            names = names_of(inner, len(args))
            place(**dict(zip(names, args, strict=True)), **kwargs)
            return self.own(gave) + 0

        return forward

    def _results(self, trace: Trace) -> tuple[int, ...]:
        base = self.whole
        if trace.result is None or trace.result.shape != self.own(base.result).shape:
            raise _Failed("it gives another shape")
        self.expect("what comes behind it", trace.result, base.result)
        if base.call is not self.stage.calls[0]:
            return ()  # what else it is asked for in that way is not known
        if len(trace.further) != len(base.trace.further):
            raise _Failed("it gives other results")
        found = []
        for i, (x, want) in enumerate(zip(trace.further, base.trace.further, strict=True), 1):
            split = self.parts.further.get(i)
            if split is not None:
                continue  # a part for each head, say
            if not self.expect(f"its result {i}", x, want):
                found.append(i)
        return tuple(found)


def _first(part: nn.Module) -> str:
    """The name of a product's first argument, whatever stands in for it."""
    before = part.__dict__.pop("forward", None)
    try:
        return names_of(part.forward, 1)[0]
    finally:
        if before is not None:
            part.__dict__["forward"] = before
