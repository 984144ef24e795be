"""A plan in words: what is split how, what stays whole, and why."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from zfunc.engine.hooks import Description
from zfunc.layout.splits import Split
from zfunc.modules.split_plans import LayerStream, SplitPlan

__all__ = ["ModulePlan", "text_of"]

NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


@dataclass(frozen=True)
class ModulePlan(SplitPlan):
    """A plan that prints what is split how, what stays whole, and why.

    Attributes:
        shapes: of all leaves, by name.
        otherwise: by the name of a submodule or a leaf, what a plan that the model itself has, as
            those of Hugging Face do, says of it that this one does not.
    """

    shapes: Mapping[str, Sequence[int]] = field(default_factory=dict, compare=False, repr=False)

    otherwise: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    def __str__(self) -> str:
        lines = [text_of(self, self.shapes)]
        if self.otherwise:
            lines += ["the model's own plan says otherwise:", *_grouped(self.otherwise.items())]
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return Description(self)._repr_html_()


def text_of(plan: SplitPlan, shapes: Mapping[str, Sequence[int]] | None = None) -> str:
    """What a plan splits, and what it leaves whole, a line for all layers that are alike.

    Args:
        shapes: of the leaves by name; with them the text begins with how much is split.

    >>> half = Split.of(0, [[0, 1], [2, 3]])
    >>> print(text_of(SplitPlan(2, {"layers.0.up.weight": half, "layers.1.up.weight": half})))
    split over 2 ranks:
      layers.{0-1}.up.weight: 4 along dimension 0 as 2, 2
    """
    lines = [_first(plan, shapes)]
    lines += _grouped(
        (name, f"{_role(plan, name)}{_sizes(split)}") for name, split in plan.splits.items()
    )
    between = [(name, role) for name, role in plan.roles.items() if role == "between"]
    if between:
        lines.append("whole between them, gradients summed:")
        lines += _grouped((name, "") for name, _ in between)
    if plan.norms:
        lines.append("means over the features of all ranks:")
        lines += _grouped((name, f"{split.size}") for name, split in plan.norms.items())
    once = {name: keys for name, keys in plan.once.items() if plan.roles.get(name) != "row"}
    if once:
        lines.append("counted on the first rank alone:")
        lines += _grouped((name, ", ".join(keys)) for name, keys in once.items())
    if plan.attributes:
        lines.append("numbers that differ:")
        lines += _grouped(
            (f"{name}.{key}", ", ".join(map(str, values)))
            for name, attributes in plan.attributes.items()
            for key, values in attributes.items()
        )
    if plan.streams:
        lines.append("on positions of the stream:")
        lines += _grouped((name, _stream(its)) for name, its in plan.streams.items())
        lines += _grouped((name, "") for name in plan.pointwise)
    if plan.uncut:
        lines.append("on the whole stream:")
        lines += _grouped((name or "the module", why) for name, why in plan.uncut.items())
    if plan.whole:
        lines.append("left whole:")
        lines += _grouped(plan.whole.items())
    return "\n".join(lines)


def _first(plan: SplitPlan, shapes: Mapping[str, Sequence[int]] | None) -> str:
    if not plan.splits:
        return f"nothing is split over {plan.ways} ranks"
    if shapes is None:
        return f"split over {plan.ways} ranks:"
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    total = max(1, sum(sizes.values()))
    cut = sum(sizes.get(name, 0) for name in plan.splits)
    return f"split over {plan.ways} ranks: {cut / total:.0%} of {total:,} parameters"


def _role(plan: SplitPlan, leaf: str) -> str:
    role = plan.roles.get(leaf.rpartition(".")[0])
    return "" if role is None else f"{role.value}, "


def _stream(stream: LayerStream) -> str:
    return f"{', '.join(stream.given)}, put together at {', '.join(stream.gathered) or 'no place'}"


def _sizes(split: Split) -> str:
    widths = [split.width(rank) for rank in range(split.ways)]
    even = len(set(widths)) == 1 and len(widths) > 4
    sizes = f"{widths[0]} each" if even else ", ".join(map(str, widths))
    runs = max(map(len, split.runs))
    more = f" in {runs} runs" if runs > 1 else ""
    shared = ", some on several ranks" if split.shared else ""
    return f"{split.size} along dimension {split.dim} as {sizes}{more}{shared}"


def _grouped(rows: Iterable[tuple[str, str]]) -> list[str]:
    """A line for all names that differ in their numbers alone and of which the same is said."""
    found: dict[tuple[str, str], list[tuple[int, ...]]] = {}
    for name, said in rows:
        pattern = NUMBER.sub("{}", name)
        numbers = tuple(int(x) for x in NUMBER.findall(name))
        found.setdefault((pattern, said), []).append(numbers)
    return [
        f"  {_filled(pattern, numbers)}{': ' if said else ''}{said}"
        for (pattern, said), numbers in found.items()
    ]


def _filled(pattern: str, numbers: Sequence[tuple[int, ...]]) -> str:
    for column in zip(*numbers, strict=True):
        pattern = pattern.replace("{}", _range(sorted(set(column))), 1)
    return pattern


def _range(values: Sequence[int]) -> str:
    if len(values) == 1:
        return str(values[0])
    steady = list(values) == list(range(values[0], values[-1] + 1))
    return f"{{{values[0]}-{values[-1]}}}" if steady else f"{{{','.join(map(str, values))}}}"
