"""Cases of the fuzzer: drawn from a number, described in a line, made smaller."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from tests.laws.cases import named, numbers
from tests.laws.fuzz.models import KINDS, Model, model_of
from tests.laws.fuzz.rules import Spec, chosen

__all__ = [
    "LOSSY",
    "NEVER",
    "SPLIT",
    "Case",
    "Place",
    "carried_by",
    "drawn",
    "names_in",
    "refused",
    "runs",
    "smaller",
]

LOSSY = ("onebit", "int8", "int4", "powersgd")
WRAPS = (
    "shard",
    "accumulate",
    "precision",
    "offload",
    "remat",
    "drop_layers",
    "compress_grads",
    "quantize",
    "donate",
)
NEVER = 1000  # steps: more than any case has
SPLIT = 1_000_000  # cases from this number on have tensor ranks


@dataclass(frozen=True)
class Place:
    """A world and what the step is wrapped in there.

    Attributes:
        stage: None is no ``shard``.
        ranks: those that have rows of their own.
        replicas: how many times these together hold the state.
        tensor: ranks that share the layers of each of them.
        order: the transforms, as they are written from the inside to the outside.
    """

    ranks: int = 1
    stage: int | None = None
    layout: dict[str, int] = field(default_factory=dict)
    replicas: int = 1
    tensor: int = 1
    accumulate: int = 1
    precision: dict[str, Any] | None = None
    offload: str | None = None
    remat: Any = None
    drop: tuple[float, float] | None = None
    compress: dict[str, Any] | None = None
    quantize: dict[str, Any] | None = None
    donate: bool = False
    order: tuple[str, ...] = ()

    @property
    def world(self) -> int:
        return self.ranks * self.tensor

    @property
    def lossy(self) -> bool:
        """Whether gradients are compressed within a case."""
        return (
            self.compress is not None
            and self.compress["freeze_step"] < NEVER
            and self.ranks > 1
            and self.stage is not None
        )

    def wrapped(self) -> tuple[str, ...]:
        """The names of its transforms, in order."""
        there = {
            "shard": self.stage is not None,
            "accumulate": self.accumulate > 1,
            "precision": self.precision is not None,
            "offload": self.offload is not None,
            "remat": self.remat is not None,
            "drop_layers": self.drop is not None,
            "compress_grads": self.compress is not None,
            "quantize": self.quantize is not None,
            "donate": self.donate,
            "split": self.tensor > 1,
        }
        return tuple(name for name in self.order if there[name])


@dataclass(frozen=True)
class Case:
    """One run: a model, an optimizer, a world and transforms, and perhaps others after a while.

    Attributes:
        number: what it was drawn from.
        kind, seed, noisy, keyed: of the model, and whether its input is noisy by the loss's key.
        loss: ``"mean"`` (a plain scalar) or ``"exact"`` (``zf.Mean`` over rows that count).
        rows: of a global batch.
        frozen: of eight leaves so many stay as they are.
        by_hand: whether the state is a dict and the step written by hand.
        moves: ``"save"`` or ``"unplace"``, how the state gets from ``here`` to ``there``.
        poison: the step whose batch has a number that is not finite.
    """

    number: int
    kind: str = "stack"
    seed: int = 0
    noisy: bool = False
    keyed: bool = False
    loss: str = "mean"
    aux: bool = False
    rows: int = 8
    optimizer: Spec = ("sgd", {"lr": 0.1})
    frozen: int = 0
    by_hand: bool = False
    here: Place = Place()
    steps: int = 2
    moves: str = "save"
    there: Place | None = None
    later: int = 2
    poison: int | None = None

    @cached_property
    def model(self) -> Model:
        return model_of(self.kind, self.seed, self.noisy)

    @property
    def places(self) -> list[Place]:
        return [self.here] if self.there is None else [self.here, self.there]

    @cached_property
    def matrices(self) -> frozenset[str]:
        """The paths of what ``quantize`` rounds."""
        leaves = named(self.model.params()).items()
        return frozenset(path for path, x in leaves if x is not None and x.ndim == 2 and x.numel())

    def stays(self, path: str) -> bool:
        """Whether a leaf is frozen; at least one is not."""
        return chosen(path, self.seed, 8) < self.frozen and path not in self._first

    @cached_property
    def _first(self) -> frozenset[str]:
        leaves = named(self.model.params()).items()
        return frozenset(sorted(path for path, x in leaves if x is not None and x.numel())[:1])

    def at(self, i: int) -> Place:
        """Where step i is taken."""
        return self.here if i < self.steps or self.there is None else self.there

    @property
    def all_steps(self) -> int:
        return self.steps + (self.later if self.there else 0)

    def batch(self, i: int) -> dict[str, Tensor]:
        """The global batch of step i, with the rows that count where the loss is exact."""
        batch = self.model.batch(i, self.rows)
        batch["counts"] = (numbers((self.rows,), 5000 + i, torch.float64, 1.0) > -0.6).double()
        batch["counts"][0] = 1.0
        if self.poison == i:
            batch["x"][self.seed % self.rows] = torch.nan
            batch["counts"][self.seed % self.rows] = 1.0
        return batch

    def __str__(self) -> str:
        """What is not as in the plainest case, in a form that Python reads."""
        return f"Case({self.number}{_unlike(self, Case(self.number))})"


def _unlike(x: Any, usual: Any) -> str:
    def text(value: Any) -> str:
        if isinstance(value, Place):
            return f"Place({_unlike(value, Place()).removeprefix(', ')})"
        return repr(value)

    rows = [(f.name, getattr(x, f.name), getattr(usual, f.name)) for f in fields(x)]
    return "".join(f", {name}={text(a)}" for name, a, b in rows if a != b)


# Drawing


def drawn(number: int) -> Case:
    """The case of a number."""
    draw = random.Random(number)
    whole = [kind for kind in KINDS if kind != "parted"]
    kind = "parted" if number >= SPLIT else draw.choice(["stack", "stack", "stack", *whole])
    noisy = kind != "tree" and draw.random() < 0.3
    model = model_of(kind, draw.randrange(10_000), noisy)
    case = Case(
        number,
        kind=kind,
        seed=model.seed,
        noisy=noisy,
        keyed=kind != "attention" and draw.random() < 0.2,
        loss=draw.choice(["mean", "exact"]),
        aux=draw.random() < 0.3,
        frozen=draw.choice([0, 0, 0, 1, 3, 5]),
        by_hand=not model.buffered and draw.random() < 0.15,
        steps=draw.choice([2, 3, 3, 4]),
        moves=draw.choice(["save", "save", "unplace"]),
        later=draw.choice([1, 2, 2, 3]),
    )
    if case.by_hand:
        case = replace(case, frozen=0, keyed=False, aux=False)
    case = replace(case, optimizer=optimizer_for(draw, case))
    here = split_over(draw, case, place_for(draw, case))
    there = None
    if draw.random() < 0.55:
        there = split_over(draw, case, place_for(draw, case, here))
    if there is not None and case.moves == "save" and not here.lossy:
        compress = there.compress if here.compress is not None else None
        there = replace(there, precision=here.precision, quantize=here.quantize, compress=compress)
    if there is not None and (refuses(there) or carried_by(here) != carried_by(there)):
        case = replace(case, moves="unplace")  # else `restore` says what the checkpoint lacks
        there = replace(there, compress=None) if refuses(there) else there
    here = replace(here, replicas=replicas_for(number, here))
    there = None if there is None else replace(there, replicas=replicas_for(~number, there))
    case = replace(case, here=here, there=there)
    case = replace(case, rows=rows_for(draw, case))
    return replace(case, poison=poison_for(draw, case))


def optimizer_for(draw: random.Random, case: Case) -> Spec:
    def rate(peak: float) -> Any:
        return draw.choice(
            [
                peak,
                peak,
                ("cosine", peak, 7),
                ("linear", peak, peak / 5, 4),
                ("warmup_cosine", peak, 2, 9),
            ]
        )

    def decay() -> dict[str, Any]:
        how = {"weight_decay": draw.choice([0.0, 0.1])}
        return {**how, "mask": draw.randrange(9)} if draw.random() < 0.4 else how

    def one() -> Spec:
        name = draw.choice(["sgd", "momentum", "adam", "adamw", "adamw", "lamb", "lion"])
        if name == "lion" and not case.model.smooth:
            name = "adamw"
        if name == "sgd":
            return "sgd", {"lr": rate(0.1)}
        if name == "momentum":
            return "sgd", {"lr": rate(0.05), "momentum": 0.9, "nesterov": draw.random() < 0.4}
        if name == "adam":
            return "adam", {"lr": rate(0.02), "b2": draw.choice([0.999, 0.9])}
        return name, {"lr": rate(0.01 if name == "lion" else 0.02), **decay()}

    spec = one()
    if draw.random() < 0.15:
        spec = "parts", {"of": tuple(one() for _ in range(draw.choice([2, 3]))), "salt": 5}
    if draw.random() < 0.35:
        before: list[Spec] = [("clip", {"norm": draw.choice([0.05, 0.5, 100.0])})]
        if draw.random() < 0.3:
            before.append(("decay", {"rate": 0.05, "salt": draw.randrange(9)}))
        spec = "chain", {"of": (*before, spec)}
    return ("skip", {"of": spec}) if draw.random() < 0.15 else spec


def names_in(spec: Spec) -> set[str]:
    """The names of all rules in a spec."""
    name, how = spec
    inner = how.get("of", ())
    inner = (inner,) if inner and isinstance(inner[0], str) else inner
    return {name}.union(*map(names_in, inner))


def place_for(draw: random.Random, case: Case, before: Place | None = None) -> Place:
    ranks = draw.choice([1, 2, 2, 3, 3, 4, 5, 7])
    stage = draw.choice([None, 0, 1, 2, 3, 3, 3])
    if ranks > 1 and stage is None:
        stage = draw.choice([0, 1, 2, 3])
    layout: dict[str, int] = {}
    if stage is not None:
        layout = {"unit_bytes": draw.choice([1, 100, 300, 600, 2000, 1 << 26])}
        layout["prefetch"] = draw.choice([0, 1, 1, 2, 3])
        if stage == 3:
            layout["persist_below"] = draw.choice([0, 0, 5, 30])
    names, model = names_in(case.optimizer), case.model
    place = Place(
        ranks,
        stage,
        layout,
        accumulate=draw.choice([1, 1, 1, 2, 3]),
        precision=precision_for(draw, model, names) if draw.random() < 0.25 else None,
        offload=draw.choice([None, None, None, None, "cpu", "disk"]),
        remat=draw.choice([None, None, None, "layer", 2]),
        drop=draw.choice([(0.5, 1.0), (0.2, 0.5), (1.0, 1.0)])
        if model.layers and draw.random() < 0.15
        else None,
        donate=draw.random() < 0.4,
    )
    if place.offload == "disk":  # seconds on many ranks with many files each
        place = replace(place, ranks=min(place.ranks, 3))
        if layout:
            layout["unit_bytes"] = max(600, layout["unit_bytes"])
    carried = before is not None and before.lossy  # errors go along, and are asserted on
    if carried or (draw.random() < 0.4 and place.offload is None):
        compress = compress_for(draw, place, names, carried)
        if carried:
            assert before is not None
            place = replace(place, ranks=max(2, place.ranks), stage=stage or 0, offload=None)
            layout = place.layout or {"unit_bytes": 300}
            if place.stage != 3:
                layout = {k: x for k, x in layout.items() if k != "persist_below"}
            place = replace(place, layout=layout)
            if _momentum(before) != _momentum(replace(place, compress=compress)):
                place = replace(place, stage=before.stage)
                layout = {k: x for k, x in layout.items() if k != "persist_below"}
                place = replace(place, layout=layout)
                compress = before.compress
        place = replace(place, compress=compress)
    if place.lossy:
        # Each is lossy by itself; together they are held to the loss (test_quantize_pairs).
        place = replace(place, precision=None)
    elif draw.random() < 0.15 and case.matrices:
        place = replace(place, quantize=quantize_for(draw))
    if place.compress is not None and place.compress["method"] == "zero_one":
        place = replace(place, precision=None, quantize=None)
    order = list(WRAPS)
    draw.shuffle(order)
    return replace(place, order=tuple(order))


def split_over(draw: random.Random, case: Case, place: Place) -> Place:
    """The place with tensor ranks, where the case is one of theirs.

    Nothing there is rounded to a few bits, whose groups would be others in parts of leaves.
    """
    if case.kind != "parted":
        return place
    ranks = min(place.ranks, 2 if place.offload == "disk" else 3)
    order = list(place.order)
    order.insert(draw.randrange(len(order) + 1), "split")
    tensor = draw.choice([1, 2, 2, 3, 4])
    return replace(
        place,
        ranks=ranks,
        tensor=tensor,
        offload=None if tensor > 1 and place.stage is None else place.offload,  # which is refused
        compress=None,
        quantize=None,
        order=tuple(order),
    )


def replicas_for(number: int, place: Place) -> int:
    """Drawn apart, so that a number's case is what it was but for them."""
    draw = random.Random(f"replicas of {number}")
    if place.stage is None or place.compress is not None or draw.random() > 0.4:
        return 1
    return draw.choice([n for n in range(1, place.ranks + 1) if place.ranks % n == 0])


def carried_by(place: Place) -> Any:
    """What transforms put into the state, and so into a checkpoint."""
    compress = None if place.compress is None else place.compress["method"] == "zero_one"
    if place.ranks == 1 or place.stage is None:
        compress = None
    return compress, place.precision, place.quantize


def refuses(place: Place) -> bool:
    """Whether a place that was put together from two is one that the table refuses."""
    if place.compress is None:
        return False
    low = place.precision is not None
    odd = place.compress["method"] == "zero_one" and (low or place.quantize is not None)
    return odd or (low and "gather" in place.compress) or (place.lossy and low)


def _momentum(place: Place) -> bool:
    """Whether what is compressed is momentum: its errors mean nothing to gradients."""
    assert place.compress is not None
    return place.stage == 0 and place.compress["method"] == "onebit"


def precision_for(draw: random.Random, model: Model, names: set[str]) -> dict[str, Any]:
    how: dict[str, Any] = {"compute": "float64", "reduce": "float64"}
    if model.recast and "lion" not in names:  # a sign is right or wrong, never nearly right
        how["compute"] = draw.choice(["float64", "float32"])
    how["loss_scale"] = draw.choice([None, None, 8.0, "dynamic"])
    return how


def compress_for(
    draw: random.Random, place: Place, names: set[str], carried: bool
) -> dict[str, Any]:
    """Compression that has not begun yet, or one whose errors say what was not sent."""
    how: dict[str, Any] = {"method": draw.choice(LOSSY), "freeze_step": NEVER}
    if carried or draw.random() < 0.75:
        how["freeze_step"] = 0 if carried else draw.choice([0, 1])
    elif place.stage in (1, 2) and place.precision is None and draw.random() < 0.5:
        how["gather"] = draw.choice(["bf16", "int8", "int4", "onebit"])
    elif place.stage in (0, None) and names <= {"adam", "adamw"} and draw.random() < 0.5:
        how["method"] = "zero_one"
    if how["freeze_step"] < NEVER:
        # One bit freezes second moments; norms of what is compressed by unit are estimates.
        if how["method"] == "onebit" and names & {"adam", "adamw", "lamb"}:
            how["method"] = draw.choice(["int8", "int4", "powersgd"])
        if names & {"clip", "skip"}:
            how["freeze_step"] = NEVER
    if how["method"] == "powersgd":
        how["rank"] = draw.choice([1, 2])
    return how


def quantize_for(draw: random.Random) -> dict[str, Any]:
    bits = draw.choice([4, 6, 8, 16])
    how: dict[str, Any] = {"start_bits": bits, "target_bits": bits}
    how |= draw.choice([{"group_size": 4}, {"groups": 1}, {"groups": 3}])
    return how


def runs(case: Case) -> bool:
    """Whether what shrinking left of a case still means something."""
    for place in case.places:
        cuts = [case.rows * r // place.ranks for r in range(place.ranks + 1)]
        parts = [b - a for a, b in pairwise(cuts)]
        if min(parts) < place.accumulate * max(1, case.model.least_rows):
            return False
        if case.loss == "mean" and any(n % place.accumulate for n in parts):
            return False
        if (place.stage is None) != (not place.layout) or (place.stage is None and place.ranks > 1):
            return False
        if place.stage != 3 and "persist_below" in place.layout:
            return False
        if place.tensor > 1 and place.stage is None and place.offload is not None:
            return False
        if place.ranks % place.replicas or (place.replicas > 1 and place.stage is None):
            return False
    before, after = case.here, case.there
    if after is not None and case.moves == "save" and carried_by(before) != carried_by(after):
        return False
    if after is not None and before.lossy:
        return after.compress is not None and after.lossy and _momentum(before) == _momentum(after)
    if case.poison is not None:
        at = case.at(case.poison)
        return case.optimizer[0] == "skip" or at.precision is not None
    return not (case.frozen and case.by_hand)


def rows_for(draw: random.Random, case: Case) -> int:
    """Enough for each microbatch of each rank; even ones where the loss is a plain scalar."""
    least = max(1, case.model.least_rows)
    needed = [place.ranks * place.accumulate * least for place in case.places]
    if case.loss == "exact":
        return max(needed) + draw.randrange(6)
    rows = max(needed) + draw.randrange(4)
    while any(
        (rows * (r + 1) // p.ranks - rows * r // p.ranks) % p.accumulate
        for p in case.places
        for r in range(p.ranks)
    ):
        rows += 1
    return rows


def poison_for(draw: random.Random, case: Case) -> int | None:
    """A step that somebody leaves out as a whole, wherever it falls."""
    if case.kind == "attention" or draw.random() > 0.3:
        return None
    at = draw.randrange(case.all_steps)
    place = case.at(at)
    skips = case.optimizer[0] == "skip" and not case.model.buffered
    return at if (skips or place.precision is not None) and not place.lossy else None


# Refusals


def refused(number: int) -> tuple[Place, str]:
    """A composition that docs/composition.md refuses, drawn from a number, and why."""
    draw = random.Random(-1 - number)
    case = replace(drawn(number), kind="stack", optimizer=("adamw", {"lr": 0.02}))
    place = replace(
        place_for(draw, case),
        ranks=2,
        stage=draw.choice([0, 1, 2, 3]),
        layout={},
        compress=None,
        quantize=None,
        precision=None,
        offload=None,
    )
    why = draw.choice(["disk", "gather", "zero_one", "twice"])
    how: dict[str, Any] = {"method": draw.choice(LOSSY), "freeze_step": draw.choice([0, NEVER])}
    if why == "disk":
        place = replace(place, offload="disk", compress=how)
    elif why == "gather":
        gather = draw.choice(["bf16", "int8", "int4", "onebit"])
        if draw.random() < 0.5:
            place = replace(place, stage=draw.choice([0, 3]))
        else:
            place = replace(place, stage=draw.choice([1, 2]), precision={"compute": "float64"})
        place = replace(place, compress={**how, "gather": gather})
    elif why == "zero_one":
        place = replace(place, compress={"method": "zero_one", "freeze_step": 2})
        if draw.random() < 0.6:
            place = replace(place, stage=draw.choice([1, 2, 3]))
        elif draw.random() < 0.5:
            place = replace(place, stage=0, precision={"compute": "float64"})
        else:
            place = replace(place, stage=0, quantize={"start_bits": 8, "target_bits": 8})
    else:
        again = draw.choice(place.wrapped())
        order = [*place.order, again]
        draw.shuffle(order)
        place = replace(place, order=tuple(order))
    return place, why


# Shrinking


def smaller(case: Case) -> Iterator[Case]:
    """Cases that say the same with less, the greatest simplifications first."""
    if case.there is not None:
        yield replace(case, there=None, poison=_within(case.poison, case.steps))
        yield replace(case, here=case.there, there=None, poison=None)
    for name, plain in (
        ("poison", None),
        ("keyed", False),
        ("aux", False),
        ("by_hand", False),
        ("frozen", 0),
        ("optimizer", ("sgd", {"lr": 0.1})),
        ("noisy", False),
        ("loss", "mean"),
        ("moves", "unplace"),
    ):
        if getattr(case, name) != plain:
            yield replace(case, **{name: plain})
    name, how = case.optimizer
    inner = how.get("of", ())
    for part in (inner,) if name == "skip" else inner:
        yield replace(case, optimizer=part)
    usual: Any = Place()
    for where in ("here", "there"):
        place = getattr(case, where)
        if place is None:
            continue
        for f in fields(Place):
            value = getattr(usual, f.name)
            if f.name not in ("order", "ranks") and getattr(place, f.name) != value:
                yield replace(case, **{where: replace(place, **{f.name: value})})
        for ranks in range(1, place.ranks):
            yield replace(case, **{where: replace(place, ranks=ranks)})
    for steps in range(1, case.steps):
        yield replace(case, steps=steps, poison=_within(case.poison, steps))
    if case.there is not None and case.later > 1:
        yield replace(case, later=case.later - 1)
    if case.kind != "stack" or case.seed > 20:
        for seed in range(6):
            yield replace(case, seed=seed)
    for rows in range(1, case.rows):
        yield replace(case, rows=rows)


def _within(poison: int | None, steps: int) -> int | None:
    return poison if poison is not None and poison < steps else None
