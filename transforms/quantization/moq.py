"""Mixture of quantization: train into low bits on a schedule.

Law: with ``target_bits=16`` the step is the bare one, bitwise. Otherwise the loss sees every chosen
weight as ``quant.fake_quantize`` rounds it, at the bits that the schedule has reached. The gradient
with respect to the rounded weight is handed on as it is (straight through). The optimizer goes on
with the unrounded weights. This is the same on all ranks, at each ZeRO stage.

The schedule is part of the state. It lies in ``aux``, and is saved and restored with it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import optree
import torch
from torch import Tensor

from zfunc.buffers.readings import number, on_host
from zfunc.engine import carried, context
from zfunc.engine.context import Context
from zfunc.engine.entries import ROLES, Entries, Roles
from zfunc.engine.hooks import Gradients, Order, Pending
from zfunc.engine.keys import key_of
from zfunc.engine.step import Differentiate, Transform
from zfunc.engine.unit_info import UnitInfo
from zfunc.errors import PlacementError
from zfunc.layout.layout import Slot
from zfunc.layout.low_bits import refuse_low_bits
from zfunc.layout.readable import Readable
from zfunc.layout.replicated import Replicated
from zfunc.quant import schedules
from zfunc.quant.choice import Include, accepts, check_met
from zfunc.quant.curvature import ROOT, layer_names, top_eigenvalues
from zfunc.quant.fake import Grouping, fake_quantize
from zfunc.quant.schedules import FULL, Rules, Schedule
from zfunc.ranks import random
from zfunc.trees.nodes import NAMESPACE, OPAQUE, Placed, leaves_in
from zfunc.trees.tree import dotted

__all__ = ["MoQ"]

NAME = "quantize"
carried.may_lose(NAME, ["chosen", "begun"])  # checkpoints of before lack them
TAG = -5  # sets the rounding's key apart from the other keys of a step


@dataclass(frozen=True)
class MoQ(Transform):
    """See :func:`zfunc.transforms.quantize`."""

    rules: Rules = field(default_factory=Rules)
    grouping: Grouping = field(default_factory=Grouping)
    rounding: str = "nearest"
    curvature: str | None = None
    include: Include = None
    roles: Roles = ROLES

    position: ClassVar[int] = Order.QUANTIZE
    name: ClassVar[str] = NAME

    def __post_init__(self) -> None:
        if self.rounding not in ("nearest", "stochastic"):
            raise ValueError(
                f'rounding={self.rounding!r}: expected "nearest" or "stochastic" (by the state\'s '
                "key)."
            )
        if self.curvature not in (None, "power_iteration"):
            raise ValueError(
                f'curvature={self.curvature!r}: expected None or "power_iteration", which delays '
                "the layers whose Hessian has the largest top eigenvalue."
            )

    def __repr__(self) -> str:
        rules = self.rules
        return f"quantize(start_bits={rules.start_bits}, target_bits={rules.target_bits})"

    def obstacle(self) -> str:
        return "counts bits down on the host"

    # The state

    def chosen(self, state: Any) -> dict[str, torch.Size]:
        """Paths and shapes of the weights that are rounded, in the order of the schedule."""
        entries = Entries(state)
        shapes: dict[str, torch.Size] = {}
        for name in self.roles.found("params", entries, NAME):
            shapes.update(_shapes(entries[name]))
        wanted = accepts(self.include)
        picked = sorted(path for path, shape in shapes.items() if self._fits(path, shape, wanted))
        check_met(self.include, {path: len(shape) for path, shape in shapes.items()}, picked)
        return {path: shapes[path] for path in picked}

    def _fits(self, path: str, shape: torch.Size, wanted: Callable[[str, int], bool]) -> bool:
        # A stack of matrices is rounded matrix by matrix, where nothing else is said.
        ndim = min(len(shape), 2) if self.include is None else len(shape)
        return wanted(path, ndim)

    def place(self, state: Any) -> Any:
        refuse_low_bits(state, "quantize(step)", "Leave it out: that base stays as it is.")
        paths = self.chosen(state)
        chosen = torch.tensor(_digest(paths), device="cpu")  # int64
        begun = {**schedules.start(self.rules, len(paths)), "chosen": chosen}
        return carried.put(state, NAME, begun)

    def unplace(self, state: Any) -> Any:
        return carried.take(state, NAME)[1]

    def parts(self, placed: Any) -> list[Any]:
        return [self.unplace(placed)]

    def check(self, state: Any) -> None:
        entries = Entries(state)
        if carried.take(state, NAME)[0] is None:
            raise PlacementError(
                f"the state ({entries}) carries no bit schedule: {self!r} did not place it. Call "
                "state = step.place(full_state) first."
            )
        if self.rounding == "stochastic" and entries.get("key") is None:
            raise PlacementError(
                f"stochastic rounding needs the entry 'key', which the state ({entries}) lacks. "
                "zf.TrainState has one; in a dict keep key=zf.random.key(0)."
            )

    def open(self, state: Any) -> Any:
        return carried.take(state, NAME)[1]

    # One call

    def configure(self, running: Context, state: Any) -> None:
        schedule = carried.take(state, NAME)[0]
        paths = self.chosen(state)
        others = "chosen" in schedule and number(schedule["chosen"]) != _digest(paths)
        if len(paths) != len(schedule["bits"]) or others:
            raise PlacementError(
                f"the bit schedule has {len(schedule['bits'])}{' other' if others else ''} "
                f"weights, the state has {len(paths)} to be rounded. It was placed by a step with "
                f"another `include` than {self!r}, or for another model."
            )
        self._check_begun(schedule)
        if "quantize and split" not in running.memo:
            self._check_split(state, paths)
            running.memo["quantize and split"] = True
        running.notes[NAME] = WeightRounding(self, schedule, list(paths), key_of(running))

    def _check_split(self, state: Any, paths: Collection[str]) -> None:
        """Raise if a group of weights would lie on several ranks that share a leaf."""
        entries = Entries(state)
        for name in self.roles.found("params", entries, NAME):
            for node in leaves_in(entries[name], OPAQUE):
                for slot in node.layout.present if isinstance(node, Readable | Replicated) else ():
                    if slot.split is not None and slot.path in paths:
                        self.grouping.check_split(slot.path, slot.shape, slot.split)

    def _check_begun(self, schedule: Schedule) -> None:
        """Refuse a schedule that began otherwise: it would go on as it began, without a word."""
        mine = [self.rules.start_bits, self.rules.period]
        begun = schedule["begun"].tolist() if "begun" in schedule else mine
        if begun != mine:
            raise PlacementError(
                "the bit schedule of the state began with start_bits={}, period={}; this step has "
                "start_bits={}, period={}, which count where a state is placed and not later. Give "
                "the step those of the state, or begin anew: step.place(other.unplace(state)). "
                "Other settings of the schedule may change.".format(*begun, *mine)
            )

    def enter(self, value: Pending, unit: UnitInfo) -> Pending:
        running = unit.running
        call: WeightRounding | None = None if running is None else running.notes.get(NAME)
        if call is None or not call.rounds:
            return value
        slots = [slot for i in unit.flats for slot in unit.layout.by_flat[i]]
        if not any(slot.path in call.rounds for slot in slots):
            return value
        return RoundedUnit(value, unit, slots, call)

    def differentiate(self, call: Differentiate, running: Context) -> Differentiate:
        """Where a bit is about to fall and curvature counts, measure it first."""

        def run(asked: Gradients) -> tuple[tuple[Tensor, Any], Any]:
            mine: WeightRounding = running.notes[NAME]
            if self.curvature and mine.curvature is None and mine.due:
                mine.measure(asked)
            return call(asked)

        return run

    def finish(self, old: Any, out: Any) -> Any:
        running = context.current()
        assert running is not None
        call: WeightRounding = running.notes[NAME]
        following = schedules.advance(call.schedule, self.rules, call.curvature)
        if isinstance(out, tuple) and out and type(out[0]) is type(old):
            return (self._with(out[0], following), *out[1:])
        return self._with(out, following) if type(out) is type(old) else out

    def _with(self, state: Any, schedule: Schedule) -> Any:
        entries = Entries(state)
        if not any(name in entries for name in self.roles.named("params")):
            return state  # a dict that is no state: metrics alone, say
        return carried.put(state, NAME, schedule)

    def describe(self, memo: Mapping[Any, Any]) -> list[str]:
        rules, slower = self.rules, ", sensitive layers later" if self.curvature else ""
        return [
            f"quantize: weights rounded {self.rounding} from {rules.start_bits} to "
            f"{rules.target_bits} bits, one bit after {rules.period}, {2 * rules.period}, "
            f"{4 * rules.period}, ... steps{slower}"
        ]


class WeightRounding:
    """What one call of a step rounds, and how.

    Attributes:
        rounds: path -> (bits, mixing ratio) of the weights that are not passed on as they are.
        curvature: of each weight's layer relative to the largest, once it is measured.
    """

    def __init__(
        self, owner: MoQ, schedule: Schedule, paths: list[str], key: Tensor | None
    ) -> None:
        self.owner, self.schedule, self.paths = owner, schedule, paths
        self.key = None if key is None else random.fold_in(key, TAG)
        self.curvature: Tensor | None = None
        on = number(schedule["steps"]) >= owner.rules.offset
        ratios = schedule["ratio"].tolist() if owner.rules.mix_rate else [0.0] * len(paths)
        rows = zip(paths, schedule["bits"].tolist(), ratios, strict=True)
        self.rounds = {path: (bits, mix) for path, bits, mix in rows if on and bits < FULL}

    @cached_property
    def due(self) -> bool:
        """Whether a weight loses a bit when this step is done."""
        return any(schedules.dropping(self.schedule, self.owner.rules).tolist())

    def measure(self, asked: Gradients) -> None:
        key = self.key if self.key is not None else random.key(0)
        values = top_eigenvalues(
            asked.loss_fn,
            asked.params,
            *asked.args,
            key=key,
            has_aux=asked.has_aux,
            tol=1e-2,
            **asked.kwargs,
        )
        sizes = {name: abs(float(value)) for name, value in values.items()}
        largest = max(sizes.values(), default=0.0) or 1.0
        layers = [name for name in layer_names(asked.params) if name != ROOT]
        # As in DeepSpeed: a layer of which nothing is known counts as the most sensitive one.
        relative = [sizes.get(_layer_of(path, layers), 0.0) / largest or 1.0 for path in self.paths]
        self.curvature = torch.tensor(relative)

    def round(self, path: str, x: Tensor) -> Tensor:
        bits, mix = self.rounds[path]
        noise = None
        if self.owner.rounding == "stochastic":
            assert self.key is not None
            key = random.fold_in(self.key, zlib.crc32(path.encode()))
            noise = random.uniform(key, x.shape, torch.float32, x.device, low=-0.5, high=0.5)
        form = self.owner.grouping.format(x.shape, bits)
        rounded = fake_quantize(x, form, noise, path, check=on_host(x))
        return x * mix + rounded * (1 - mix) if mix else rounded


def _digest(paths: Iterable[str]) -> int:
    """What tells which weights a schedule is of."""
    return zlib.crc32("\n".join(paths).encode())


def _layer_of(path: str, layers: list[str]) -> str:
    found = [name for name in layers if path.startswith(name + ".")]
    return max(found, key=len, default=ROOT)


@dataclass
class RoundedUnit:
    """A unit's values with the chosen leaves rounded, made when they are waited for."""

    value: Pending
    unit: UnitInfo
    slots: list[Slot]
    call: WeightRounding
    made: list[Tensor] | None = None

    def wait(self) -> list[Tensor]:
        if self.made is None:
            with torch.no_grad():
                self.made = self._rounded(self.value.wait())
        return self.made

    def _rounded(self, values: list[Tensor]) -> list[Tensor]:
        layout, flats = self.unit.layout, self.unit.flats
        whole = len(values) == len(flats) and all(
            x.shape == (layout.flats[i].length,) for i, x in zip(flats, values, strict=True)
        )
        if not whole:  # leaf by leaf: the tree is plain
            return [
                self.call.round(slot.path, x) if slot.path in self.call.rounds else x
                for slot, x in zip(self.slots, values, strict=True)
            ]
        out = []
        for i, full in zip(flats, values, strict=True):
            row = [slot for slot in layout.by_flat[i] if slot.path in self.call.rounds]
            new = full.detach().clone() if row else full
            for slot in row:
                view = new.narrow(0, slot.start, slot.numel).view(slot.shape)
                view.copy_(self.call.round(slot.path, view))
            out.append(new)
        return out

    def advance(self) -> None:
        """The gather has one round."""


def _shapes(params: Any) -> dict[str, torch.Size]:
    """Shapes of the floating-point leaves of a tree, plain or placed, by dotted path."""
    keys, nodes, _ = optree.tree_flatten_with_path(
        params, is_leaf=lambda x: isinstance(x, Placed), none_is_leaf=True, namespace=NAMESPACE
    )
    shapes: dict[str, torch.Size] = {}
    for key, node in zip(keys, nodes, strict=True):
        if isinstance(node, Placed):
            present = node.layout.present  # type: ignore[attr-defined]
            shapes.update((slot.path, torch.Size(slot.shape)) for slot in present)
        elif isinstance(node, Tensor) and node.is_floating_point():
            shapes[dotted(*key)] = node.shape
    return shapes
