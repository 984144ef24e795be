"""``Profile``: what was found of a step, as figures, text, JSON, a trace and HTML."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from zfunc.foresight.costs import Cost, by_module, by_operator, covered
from zfunc.foresight.flops import CAUSAL, Flops, summed
from zfunc.foresight.peaks import Peak
from zfunc.foresight.prediction import SentBytes
from zfunc.foresight.profile_tables import as_html, as_text
from zfunc.foresight.watch import TimedRow

__all__ = ["Profile"]


@dataclass(frozen=True)
class Profile:
    """Where the time of a step went; printed it is a table of modules and one of operators.

    Seconds, FLOPs and bytes are this rank's. FLOPs are counted as ``zf.foresee`` counts them:
    :mod:`zfunc.foresight.flops`.

    Attributes:
        rank, ranks: the world.
        device: its name; ``"cpu"``.
        seconds: of the step that was watched.
        unwatched_seconds: of the one before it, which nobody watched.
        samples: rows of this rank's batch.
        state_bytes: of this rank's part of the state.
        sizes: elements of each full parameter, by path.
        kept: bytes of activations by module: what its own operators made in forward and was there
            when backward began.
        sent: what the step sent: a ledger.
        peak: what the device can do in the dtype that most is computed in.
        rows: the operations in their order, and what was sent between them.
        depth: how many levels of modules are printed.
    """

    rank: int
    ranks: int
    device: str
    seconds: float
    unwatched_seconds: float
    samples: int
    state_bytes: int
    sizes: dict[str, int] = field(repr=False)
    kept: Counter[str] = field(repr=False)
    sent: SentBytes = field(repr=False)
    peak: Peak
    rows: tuple[TimedRow, ...] = field(repr=False)
    depth: int = 3

    @cached_property
    def flops(self) -> Flops:
        """FLOPs by operator, layer and phase, as ``zf.foresee(...).flops``."""
        return summed(self.rows)

    @cached_property
    def modules(self) -> dict[str, Cost]:
        """What each module costs, by its dotted name; ``""`` is the whole step."""
        return by_module(self._computed, self.sizes, self.kept)

    @cached_property
    def operators(self) -> dict[str, Cost]:
        """What each operator costs, by its name; the longest first."""
        return by_operator(self._computed)

    @property
    def parameters(self) -> int:
        """How many parameters the model has, on all ranks together."""
        return sum(self.sizes.values())

    @property
    def macs(self) -> int:
        """Multiplications with an addition in forward."""
        return self.modules[""].macs

    @property
    def within(self) -> float:
        """The part of the step's time in which an operator was under way."""
        return covered(self._computed) / self.seconds

    @property
    def attributed(self) -> float:
        """The part of the step's time within operators, and between those of one module.

        The rest is Python outside of modules, and waiting for other ranks, threads and disks.
        """
        return self.within + self.modules[""].between_seconds / self.seconds

    @property
    def _computed(self) -> list[TimedRow]:
        return [row for row in self.rows if row.kind == "compute"]

    def json(self, path: str | Path | None = None) -> str:
        """All figures as JSON, written to a file if one is named."""
        own = ("rank", "ranks", "device", "seconds", "unwatched_seconds", "samples", "state_bytes")
        found = {name: getattr(self, name) for name in own}
        found |= {"parameters": self.parameters, "within": self.within}
        found |= {"attributed": self.attributed}
        found |= {"macs": self.macs, "flops": self.flops.by_phase, "causal": CAUSAL}
        found |= {"peak": asdict(self.peak), "sent_bytes": self.sent.total_bytes}
        found |= {"sent_by_label": self.sent.by_label, "sent_calls": self.sent.calls}
        found["modules"] = {name: _figures(cost) for name, cost in self.modules.items()}
        found["operators"] = {name: _figures(cost) for name, cost in self.operators.items()}
        return _written(found, path)

    def chrome(self, path: str | Path | None = None) -> str:
        """A trace for ``chrome://tracing`` or Perfetto, written to a file if one is named."""
        return _written({"traceEvents": [_event(row, self.rank) for row in self.rows]}, path)

    def __str__(self) -> str:
        return as_text(self)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return as_html(self)


def _written(found: Any, path: str | Path | None) -> str:
    text = json.dumps(found)
    if path is not None:
        Path(path).write_text(text)
    return text


def _figures(cost: Cost) -> dict[str, Any]:
    return {**asdict(cost), "macs": cost.macs, "flops_per_second": cost.flops_per_second}


def _event(row: TimedRow, rank: int) -> dict[str, Any]:
    """In microseconds; what is sent has no length, since it is waited for elsewhere."""
    compute = row.kind == "compute"
    told = {"layer": row.layer, "flops": row.flops, "read": row.read, "written": row.written}
    how = {"ph": "X", "dur": row.seconds * 1e6} if compute else {"ph": "i", "s": "t"}
    return {
        "name": f"{row.name} {row.label}".rstrip(),
        "cat": row.phase,
        "pid": rank,
        "tid": f"stream {row.stream}" if row.stream else "host",
        "ts": row.begin * 1e6,
        "args": {**told, "phase": row.phase, "shapes": row.shapes},
        **how,
    }
