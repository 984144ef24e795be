"""What one way to write a step costs on a cluster, and a table of several."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.table import Table
from torch import Tensor

from zfunc.engine.batches import has_rows, leaves_of, local_batch, mapped
from zfunc.engine.step import Step, as_step
from zfunc.errors import ZfuncError
from zfunc.foresight.assumptions import allowance
from zfunc.foresight.clusters import Cluster
from zfunc.foresight.dry_run import DryRun
from zfunc.foresight.prediction import Foreseen, foresee, times_together
from zfunc.foresight.sentences import sentence
from zfunc.foresight.stages import differing_stages
from zfunc.foresight.texts import bytes_text, printed, seconds_text
from zfunc.foresight.timing import Timing
from zfunc.ranks.foreseen import ForeseenWorld, foreseeing
from zfunc.ranks.meshes import laid_out

__all__ = ["Plan", "PlanRow", "ordered", "tried"]

REFUSED = (ZfuncError, ValueError)  # a choice that makes no sense, or is too small for it


@dataclass(frozen=True)
class PlanRow:
    """One way to write a step, and what it costs; the worst of the ranks that differ.

    Attributes:
        given: the keywords that ``step_of`` had.
        sentence: the line to write, around ``step``.
        error: why it cannot run; then nothing else is known.
        fits: whether a rank's memory holds it.
        spare_bytes: what is left of a rank's memory; below 0 what is missing. Allowances for what
            is not tensors (``assumptions``) are taken off.
        peak_bytes, state_bytes, sent_bytes, flops: of one step of a rank.
        seconds: that a step takes.
        binds: what most of them are for: ``"compute"``, or what is waited for.
        rank: which has the highest peak.
        assumed: what the figures rest on.
    """

    given: Mapping[str, Any] = field(hash=False)
    sentence: str = ""
    error: str = ""
    fits: bool = False
    spare_bytes: int = 0
    peak_bytes: int = 0
    state_bytes: int = 0
    sent_bytes: int = 0
    flops: int = 0
    seconds: float = 0.0
    binds: str = ""
    rank: int = 0
    assumed: tuple[str, ...] = ()

    @property
    def cost(self) -> tuple[int, float]:
        """What plans go by, smaller is better: it fits, then seconds, else what is missing."""
        if self.error:
            return 2, 0.0
        return (0, self.seconds) if self.fits else (1, -float(self.spare_bytes))


def tried(
    make: Callable[[], Any], make_state: Any, batch: Any, cluster: Cluster, given: Mapping[str, Any]
) -> PlanRow:
    """Foresee a step on each rank that differs.

    Args:
        make: returns a step, or a function ``(state, batch) -> (state, metrics)``.
        make_state: as for ``foresee``.
        batch: of all ranks together.
        cluster: how many ranks, and what they have.
        given: what it was made of.
    """
    line = ""
    seen: list[Foreseen] = []
    times: list[Timing] = []
    try:
        step = as_step(make())
        line = sentence(step)
        for rank in dict.fromkeys((0, _fullest(step, batch, cluster))):
            stages = _stages(step, make_state, batch, cluster, rank)
            seen += stages
            times += times_together(stages, cluster)
    except REFUSED as error:
        return PlanRow(dict(given), line, str(error).partition("\n")[0] or type(error).__name__)
    worst = max(seen, key=lambda each: each.peak_bytes)
    slowest = max(times, key=lambda each: (float(each), each.parts.get("compute", 0.0)))
    spare = cluster.memory - worst.peak_bytes - allowance(worst.peak_bytes, cluster.kind)
    return PlanRow(
        given=dict(given),
        sentence=line,
        fits=spare >= 0,
        spare_bytes=spare,
        peak_bytes=worst.peak_bytes,
        state_bytes=max(each.state_bytes for each in seen),
        sent_bytes=max(each.sent.total_bytes for each in seen),
        flops=max(each.flops.total for each in seen),
        seconds=float(slowest),
        binds=slowest.binds,
        rank=worst.rank,
        assumed=tuple(dict.fromkeys(str(x) for each in seen for x in each.assumptions)),
    )


def _stages(step: Step, make_state: Any, batch: Any, cluster: Cluster, rank: int) -> list[Foreseen]:
    """A rank, and those of the other stages beside it that differ."""
    first = _foresee_rank(step, make_state, batch, cluster, rank)
    ranks = [first.groups[first.pipe][k] for k in differing_stages(first.work)[1:]]
    return [first, *(_foresee_rank(step, make_state, batch, cluster, other) for other in ranks)]


def _fullest(step: Step, batch: Any, cluster: Cluster) -> int:
    """A rank that has the most rows of the batch: the last one, where they are cut unevenly."""
    rows = next((x.shape[0] for _, x in leaves_of(batch) if has_rows(x)), 0)
    with foreseeing(ForeseenWorld(0, cluster.gpus, cluster.kind, DryRun())):
        on = laid_out(step.mesh)
        peers = on.members(on.batch, 0)
    return peers[-1] if rows % len(peers) else 0


def _foresee_rank(step: Step, make_state: Any, batch: Any, cluster: Cluster, rank: int) -> Foreseen:
    """One rank of a cluster, with its rows of a batch of all ranks together."""
    with foreseeing(ForeseenWorld(rank, cluster.gpus, cluster.kind, DryRun())):
        rows = local_batch(batch, step.mesh)
    own = mapped(_apart, rows, lambda encodings: encodings)
    return foresee(step, make_state, own, cluster.gpus, rank, cluster.kind)


def _apart(x: Any) -> Any:
    """A tensor that has no memory of other ranks' rows."""
    return x.clone() if isinstance(x, Tensor) else x


@dataclass(frozen=True)
class Plan:
    """All that was tried, the best first; printed it is a table.

    Attributes:
        rows: what was tried.
        cluster: for which it was.
        notes: what times rest on.
    """

    rows: tuple[PlanRow, ...]
    cluster: Cluster = field(repr=False)
    notes: tuple[str, ...] = ()

    @property
    def best(self) -> PlanRow | None:
        """The fastest that fits; None if nothing does."""
        return self.rows[0] if self.rows and self.rows[0].fits else None

    @property
    def assumed(self) -> tuple[str, ...]:
        """What times and all rows rest on."""
        return tuple(dict.fromkeys([*self.notes, *(x for row in self.rows for x in row.assumed)]))

    @property
    def verdict(self) -> str:
        """What to do, in a sentence."""
        if self.best is not None:
            return f"best: {self.best.sentence}"
        held = [row for row in self.rows if not row.error]
        if not held:
            first = self.rows[0].error if self.rows else "nothing was tried"
            return f"nothing can run: {first}"
        least = max(held, key=lambda row: row.spare_bytes)
        return (
            f"nothing fits {bytes_text(self.cluster.memory)} a device: "
            f"{bytes_text(-least.spare_bytes)} are missing for {least.sentence}"
        )

    def table(self) -> Table:
        """For rich."""
        found = Table(title=f"{self.cluster.gpus} x {self.cluster.device}", title_justify="left")
        for name in ("time", "fits", "left", "peak", "sent", "bound by", "sentence"):
            found.add_column(
                name, overflow="fold", justify="left" if name == "sentence" else "right"
            )
        for row in self.rows:
            found.add_row(*_cells(row))
        return found

    def __str__(self) -> str:
        notes = "".join(f"\nassumed: {note}" for note in self.assumed)
        return f"{printed(self.table()).export_text().rstrip()}\n{self.verdict}{notes}"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        form = "<pre>{code}</pre>"
        return printed(self.table(), 140).export_html(inline_styles=True, code_format=form)

    def json(self) -> str:
        """All rows as JSON."""
        return json.dumps([_plain(row) for row in self.rows], indent=1)

    def save(self, path: str | Path) -> Path:
        """Write ``json()``; returns the path."""
        Path(path).write_text(self.json() + "\n")
        return Path(path)


def ordered(rows: Sequence[PlanRow]) -> tuple[PlanRow, ...]:
    """The best first."""
    return tuple(sorted(rows, key=lambda row: row.cost))


def _cells(row: PlanRow) -> list[str]:
    if row.error:
        return ["", "no", "", "", "", "", f"{row.sentence or dict(row.given)}: {row.error}"]
    return [
        seconds_text(row.seconds),
        "yes" if row.fits else "no",
        bytes_text(row.spare_bytes),
        bytes_text(row.peak_bytes),
        bytes_text(row.sent_bytes),
        row.binds,
        row.sentence,
    ]


def _plain(row: PlanRow) -> dict[str, Any]:
    given = {name: x if _is_plain(x) else repr(x) for name, x in row.given.items()}
    return {**asdict(replace(row, given={})), "given": given}  # what is given may not be copied


def _is_plain(x: Any) -> bool:
    return isinstance(x, bool | int | float | str | None)
