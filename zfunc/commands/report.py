"""What a run tells: a live line on the terminal, a row per step, a curve at the end.

The rows (JSON lines, each with ``step`` and ``loss``) are the record: written and
flushed as each step ends, so whatever ends a run, what it did so far is on disk, and
the curve is drawn from them and from nothing else.
"""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import accumulate
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

__all__ = ["Live", "Metrics", "draw_curve", "print_error", "read_rows", "readable", "si"]

Row = Mapping[str, Any]


class Metrics(AbstractContextManager["Metrics"]):
    """A file of JSON lines, one per step, complete up to the last step whatever happens.

    Args:
        path: the file; its folder is made. None writes nothing (all ranks but the first).
        keep: rows of steps up to this one stay (a resumed run goes on from there),
            later ones and a torn last line are dropped.
    """

    def __init__(self, path: Path | None, keep: int = 0) -> None:
        self._file = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            kept = [row for row in read_rows(path) if row["step"] <= keep]
            path.write_text("".join(json.dumps(row) + "\n" for row in kept))
            self._file = path.open("a")

    def write(self, step: int, loss: float, **more: Any) -> dict[str, Any]:
        """Append one row and flush it."""
        row = {"step": step, "loss": loss, **more}
        if self._file is not None:
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()
        return row

    def __exit__(self, *exc: object) -> None:
        if self._file is not None:
            self._file.close()


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics file, in order; [] if there is none. A torn last line is left out."""
    if not path.exists():
        return []
    lines = path.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


class Live(AbstractContextManager["Live"]):
    """Progress while a run is under way: a bar on a terminal, now and then a line elsewhere.

    The first step makes kernels and meets peers: no speed and no time is told before the second.

    Args:
        console: where to print; a quiet console silences all but the first rank.
        start: steps done before (a resumed run).
        steps: steps in all.
        tokens: tokens of one step, over all ranks.
        every: seconds between lines where there is no terminal.
        shown: named values to show beside the loss.
    """

    def __init__(
        self,
        console: Console,
        start: int,
        steps: int,
        tokens: int,
        every: float = 5.0,
        **shown: float | str,
    ) -> None:
        self._console, self._steps, self._tokens, self._every = console, steps, tokens, every
        self._shown: dict[str, float | str] = {"loss": math.nan, **shown}
        self._bar = Progress(
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[line]}"),
            TimeRemainingColumn(elapsed_when_finished=True),
            console=console,
            disable=not console.is_terminal or console.quiet,
        )
        self._task = self._bar.add_task("train", total=steps, completed=start, line="")
        self._began = self._printed = time.perf_counter()
        self._times: deque[float] = deque(maxlen=33)  # when steps ended

    def __enter__(self) -> Live:
        self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._bar.stop()

    def step(self, done: int, loss: float, **more: float | None) -> float:
        """Show that ``done`` steps are done; values that are None stay as they were.

        Returns:
            Tokens per second over the last steps; at first, of the first.
        """
        now = time.perf_counter()
        self._times.append(now)
        steps = len(self._times) - 1
        since = self._times[0] if steps else self._began
        speed = self._tokens * max(steps, 1) / max(now - since, 1e-9)
        self._shown |= {k: v for k, v in (("loss", loss), *more.items()) if v is not None}
        told = [*map(_text, self._shown.items()), *[f"{si(speed)} tokens/s"] * bool(steps)]
        self._bar.update(self._task, completed=done, line=" · ".join(told))
        if self._bar.disable and (now - self._printed > self._every or done == self._steps):
            self._printed = now
            left = (self._steps - done) * self._tokens / speed
            told += [f"{left:.0f} s left"] * bool(steps)
            self._console.print(" · ".join([f"step {done}/{self._steps}", *told]), soft_wrap=True)
        return speed


def _text(shown: tuple[str, float | str]) -> str:
    name, value = shown
    return f"{name} {value:.3f}" if isinstance(value, float) else f"{name} {value}"


def print_error(error: Exception) -> int:
    """Say on standard error what ended a command; its exit status."""
    text = f"[bold red]{type(error).__name__}[/bold red]: {escape(str(error))}"
    Console(stderr=True, highlight=False).print(text, soft_wrap=True)
    return 1


def si(number: float) -> str:
    """A number with three digits and a prefix.

    >>> si(1234567), si(12.5), si(0)
    ('1.23M', '12.5', '0')
    """
    for prefix in ("", "k", "M", "G"):
        if abs(number) < 999.5:
            return f"{number:.3g}{prefix}"
        number /= 1000
    return f"{number:.3g}T"


def readable(text: str) -> str:
    r"""A text in which whatever could steer a terminal is shown as a dot.

    >>> readable("red: \x1b[31m\n")
    'red: ·[31m\n'
    """
    return "".join(c if c.isprintable() or c in "\n\t" else "·" for c in text)


def smoothed(values: Sequence[float], part: float = 1 / 20) -> list[float]:
    """The mean around each value, over about ``part`` of all: it does not lag behind.

    As many values are taken before as after, fewer towards the ends, so that a straight line stays
    as it is.

    >>> smoothed([5.0, 4.0, 3.0, 2.0, 1.0], part=0.6)
    [5.0, 4.0, 3.0, 2.0, 1.0]
    """
    half, last = int(len(values) * part / 2), len(values) - 1
    sums = list(accumulate(values, initial=0.0))
    widths = [min(half, i, last - i) for i in range(len(values))]
    return [(sums[i + k + 1] - sums[i - k]) / (2 * k + 1) for i, k in enumerate(widths)]


def draw_curve(
    rows: Sequence[Row],
    path: Path,
    levels: Mapping[str, float] | None = None,
    unit: str = "byte",
) -> str | None:
    """Draw the loss of a run.

    Args:
        rows: as :func:`read_rows` gives them; ``val_loss`` is drawn where a row has it.
        path: the PNG to write.
        levels: named losses to draw as horizontal lines, to compare with.
        unit: of what a loss is the mean.

    Returns:
        None, or why nothing was drawn (no rows yet, no matplotlib).
    """
    if not rows:
        return "no curve: not one step was finished"
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return "no curve: matplotlib is not installed (pip install 'zfunc-torch[plot]')"
    figure = Figure(figsize=(7.2, 4.2), dpi=140, layout="constrained")
    FigureCanvasAgg(figure)  # draws to memory: no display, no global pyplot state
    axes = figure.add_subplot()
    steps, losses = [row["step"] for row in rows], [row["loss"] for row in rows]
    axes.plot(steps, losses, color="#9ecae1", linewidth=0.8, label="training batch")
    axes.plot(steps, smoothed(losses), color="#08519c", linewidth=1.6, label="smoothed")
    judged = [(row["step"], row["val_loss"]) for row in rows if row.get("val_loss") is not None]
    if judged:
        axes.plot(*zip(*judged, strict=True), "o-", color="#d94801", markersize=4, label="held out")
    for style, (name, level) in zip((":", "--", "-.") * 9, (levels or {}).items(), strict=False):
        axes.axhline(level, color="#636363", linewidth=1, linestyle=style, label=name)
    axes.set(xlabel="step", ylabel=f"nats per {unit}", title=f"loss over {steps[-1]} steps")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path)
    return None
