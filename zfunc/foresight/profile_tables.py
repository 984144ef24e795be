"""A profile as tables: modules as a tree, and operators."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Protocol

from rich.console import Console
from rich.table import Table
from rich.text import Text

from zfunc.foresight.costs import Cost
from zfunc.foresight.flops import CAUSAL
from zfunc.foresight.peaks import Peak
from zfunc.foresight.prediction import SentBytes

__all__ = ["as_html", "as_text"]

WIDTH = 132
WIDEST = 44  # name of an operator
MOST = 12  # operators that are shown
FEW = 0.001  # of the time: operators below are left out


class Figures(Protocol):
    """What is shown of a :class:`~zfunc.foresight.profiles.Profile`."""

    @property
    def rank(self) -> int: ...
    @property
    def ranks(self) -> int: ...
    @property
    def device(self) -> str: ...
    @property
    def seconds(self) -> float: ...
    @property
    def unwatched_seconds(self) -> float: ...
    @property
    def samples(self) -> int: ...
    @property
    def state_bytes(self) -> int: ...
    @property
    def sent(self) -> SentBytes: ...
    @property
    def peak(self) -> Peak: ...
    @property
    def depth(self) -> int: ...
    @property
    def parameters(self) -> int: ...
    @property
    def within(self) -> float: ...
    @property
    def modules(self) -> Mapping[str, Cost]: ...
    @property
    def operators(self) -> Mapping[str, Cost]: ...


def as_text(seen: Figures) -> str:
    """As ``print`` shows it."""
    return "\n".join(line.rstrip() for line in _drawn(seen).export_text().splitlines())


def as_html(seen: Figures) -> str:
    """As a notebook shows it."""
    code = '<pre style="font-family:monospace;line-height:1.2">{code}</pre>'
    return _drawn(seen).export_html(inline_styles=True, code_format=code)


def _drawn(seen: Figures) -> Console:
    console = Console(file=io.StringIO(), width=WIDTH, record=True, color_system=None)
    console.print("\n".join(_head(seen)), soft_wrap=True, highlight=False)
    console.print(_modules(seen))
    console.print(_operators(seen))
    return console


def _head(seen: Figures) -> list[str]:
    whole, peak = seen.modules[""], seen.peak
    known = peak.flops_per_second
    at_best = "unknown" if known is None else f"{told(known)}FLOP/s"
    of_it = "" if known is None else f", {whole.flops / seen.seconds / known:.1%} of the peak"
    rate = f", {seen.samples / seen.seconds:.4g} samples/s" if seen.samples else ""
    loss = f"forward {told(whole.forward)}FLOPs in {_time(whole.forward_seconds)}"
    again = f" ({told(whole.recomputed)}FLOPs of it recomputed)" if whole.recomputed else ""
    back = f"backward {told(whole.backward + whole.recomputed)}FLOPs{again}"
    back += f" in {_time(whole.backward_seconds)}"
    update = f"; update in {_time(update)}" if (update := whole.update_seconds) else ""
    return [
        f"rank {seen.rank} of {seen.ranks} on {seen.device}: {told(seen.parameters)}parameters, "
        f"{told(seen.state_bytes)}B of state, {told(seen.sent.total_bytes)}B sent",
        f"a step takes {_time(seen.seconds)} ({_time(seen.unwatched_seconds)} unwatched){rate}; "
        f"{seen.within:.1%} of it within operators, "
        f"{whole.between_seconds / seen.seconds:.1%} between those of a module",
        f"{loss}, {told(whole.macs)}MACs; {back}{update}",
        f"all in all {told(whole.flops)}FLOPs (attention under a causal mask counted "
        f"{CAUSAL}), {told(whole.flops / seen.seconds)}FLOP/s{of_it}",
        f"the peak: {at_best}, {peak.source}",
    ]


FLOPS = ("FLOPs forward", "backward", "recomputed")
COST = ("moved", "time", "%", "FLOP/s")


def _modules(seen: Figures) -> Table:
    table = _table("module", "parameters", *FLOPS, "MACs", "kept", *COST, "between")
    for name, cost in seen.modules.items():
        level = name.count(".") + 1 if name else 0
        if level <= seen.depth:
            label = "  " * level + (name.rpartition(".")[2] or "step")
            own = [_some(cost.macs), _some(cost.kept_bytes, "B")]
            row = [told(cost.parameters), *_flops(cost), *own, *_cost(seen, cost)]
            table.add_row(Text(label), *row, _time(cost.between_seconds))
    return table


def _operators(seen: Figures) -> Table:
    table, rest = _table("operator", "calls", *FLOPS, *COST), Cost()
    for i, (name, cost) in enumerate(seen.operators.items()):
        if i < MOST and cost.seconds >= FEW * seen.seconds:
            table.add_row(Text(name), str(cost.calls), *_flops(cost), *_cost(seen, cost))
        else:
            rest.join(cost)
    if rest.calls:
        table.add_row("others", str(rest.calls), *_flops(rest), *_cost(seen, rest))
    return table


def _table(first: str, *columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1))
    table.add_column(f"\n{first}", no_wrap=True, max_width=WIDEST)
    for name in columns:
        table.add_column(f"\n{name}", justify="right", no_wrap=True)
    return table


def _flops(cost: Cost) -> list[str]:
    return [_some(cost.forward), _some(cost.backward), _some(cost.recomputed)]


def _cost(seen: Figures, cost: Cost) -> list[str]:
    share = f"{cost.seconds / seen.seconds:.1%}"
    rate = _some(cost.flops_per_second)
    return [_some(cost.bytes_moved, "B"), _time(cost.seconds), share, rate]


def _some(number: float, unit: str = "") -> str:
    return f"{told(number)}{unit}" if number else ""


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def told(number: float) -> str:
    """A number with a prefix, in powers of 1,000; a space behind it, before the unit.

    >>> told(853_032_960), told(200), told(0)
    ('853 M', '200 ', '0 ')
    """
    size = float(number)
    for prefix in ("", "k", "M", "G", "T"):
        if abs(size) < 999.5:
            return f"{size:.3g} {prefix}"
        size /= 1000
    return f"{size:.3g} P"
