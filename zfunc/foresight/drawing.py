"""Pictures of a step that was foreseen: memory by what it holds, lanes of what is busy, scaling."""

from __future__ import annotations

from base64 import b64encode
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from html import escape
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

__all__ = ["draw_lanes", "draw_memory", "draw_scaling", "in_notebook"]

COLOURS = {  # from what stays to what comes and goes
    "parameters": "#4269d0",
    "moments": "#6cc5b0",
    "buffers": "#9c6b4e",
    "gradients": "#ff725c",
    "activations": "#efb118",
    "other": "#9498a0",
}
LANES = {
    "compute": "#4269d0",
    "node": "#efb118",
    "network": "#ff725c",
    "up": "#6cc5b0",
    "down": "#3ca951",
    "read": "#a463f2",
    "write": "#ff8ab7",
}
MOST = 20_000  # bars of a picture; shorter ones are left out first
GB = 1e9


def draw_memory(
    live: Mapping[str, Sequence[tuple[int, int]]], rows: int, peak_bytes: int, path: Path
) -> Path:
    """Bytes alive over a step, one band for each kind.

    Args:
        live: by kind, ``(number of the row, bytes)`` at each change.
        rows: how many there are.
        peak_bytes: of all together.
        path: where; the format is that of its ending.

    Raises:
        ImportError: matplotlib is not installed.
    """
    figure, axes = _figure(8.0, 3.6)
    at = list(range(rows + 1))
    kinds = [kind for kind in COLOURS if any(n for _, n in live.get(kind, ()))]
    bands = [[n / GB for n in _at_rows(live[kind], at)] for kind in kinds]
    colours = [COLOURS[kind] for kind in kinds]
    axes.stackplot(at, *bands, labels=kinds, colors=colours, step="post", linewidth=0)
    axes.axhline(peak_bytes / GB, color="black", linewidth=0.6, linestyle="--")
    axes.text(
        rows, peak_bytes / GB, f"{peak_bytes / GB:.4g} GB", ha="right", va="bottom", fontsize=7
    )
    axes.set(xlabel="operations of one step, in order", ylabel="GB of tensors", xlim=(0, rows))
    figure.legend(ncols=len(kinds) or 1, frameon=False, fontsize=7, loc="outside upper center")
    return _saved(figure, path)


def draw_lanes(
    lanes: Sequence[tuple[str, str, str, float, float]], seconds: float, path: Path
) -> Path:
    """What each lane does when: overlap is where bars stand above each other.

    Args:
        lanes: lane, name, layer, start and seconds of each.
        seconds: of all.
        path: where; the format is that of its ending.

    Raises:
        ImportError: matplotlib is not installed.
    """
    names = list(dict.fromkeys(lane for lane, *_ in lanes))
    figure, axes = _figure(9.0, 0.8 + 0.45 * len(names))
    shown = sorted(lanes, key=lambda span: -span[-1])[:MOST]
    for at, name in enumerate(names):
        bars = [(start, took) for lane, _, _, start, took in shown if lane == name]
        axes.broken_barh(bars, (at - 0.4, 0.8), color=LANES.get(name, "#9498a0"), linewidth=0)
    axes.set(xlabel="seconds", xlim=(0, seconds or 1), ylim=(len(names) - 0.5, -0.5))
    axes.set_yticks(range(len(names)), names)
    return _saved(figure, path)


def draw_scaling(rows: Sequence[tuple[int, float, float]], rate: str, path: Path) -> Path:
    """What devices do together, beside what as many of the first would, and what is left of it.

    Args:
        rows: devices, samples or tokens per second, and efficiency.
        rate: what that is called.
        path: where; the format is that of its ending.

    Raises:
        ImportError: matplotlib is not installed.
    """
    figure, axes = _figure(6.4, 3.6)
    gpus, rates = [row[0] for row in rows], [row[1] for row in rows]
    axes.set(xlabel="GPUs", ylabel=rate, xscale="log", yscale="log")
    if rows:
        line = [rates[0] / gpus[0] * n for n in gpus]
        axes.plot(gpus, line, color="#9498a0", linewidth=1, linestyle="--", label="linear")
        axes.plot(gpus, rates, color=COLOURS["parameters"], marker="o", label="foreseen")
        axes.legend(frameon=False, fontsize=8)
    for n, height, share in rows:
        below = {"ha": "left", "va": "top", "fontsize": 7}
        axes.annotate(f"{share:.0%}", (n, height), (4, -4), textcoords="offset points", **below)
    axes.set_xticks(gpus, [str(n) for n in gpus])
    axes.minorticks_off()
    return _saved(figure, path)


def in_notebook(text: str, draw: Callable[[Path], Path]) -> str:
    """Text as HTML, with a picture below it if matplotlib is there.

    Args:
        text: plain.
        draw: writes the picture to a path.
    """
    shown = f"<pre>{escape(text)}</pre>"
    if find_spec("matplotlib") is None:
        return shown
    with TemporaryDirectory() as folder:
        data = draw(Path(folder) / "picture.png").read_bytes()
    picture = f"data:image/png;base64,{b64encode(data).decode()}"
    return f'{shown}<img width="720" style="max-width: 100%" src="{picture}">'


def _at_rows(line: Sequence[tuple[int, int]], at: Sequence[int]) -> list[int]:
    """The most that is alive from each row to the next one."""
    numbers = [row for row, _ in line]
    found = []
    for row in at:
        first, last = bisect_right(numbers, row - 1), bisect_right(numbers, row)
        before = [line[first - 1][1]] if first else [0]
        found.append(max([n for _, n in line[first:last]] or before))
    return found


def _figure(width: float, height: float) -> tuple[Any, Any]:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as problem:
        raise ImportError(
            "no plot: matplotlib is not installed (pip install 'zfunc-torch[plot]')"
        ) from problem
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)  # draws to memory: no display, no global pyplot state
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _saved(figure: Any, path: Path) -> Path:
    figure.savefig(path, dpi=160, metadata={"Date": None} if path.suffix == ".svg" else None)
    return path
