"""Pictures of a timeline: text, and files by matplotlib."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from zfunc.schedules.actions import Action
from zfunc.schedules.timelines import Timeline

__all__ = ["draw", "text_picture"]

WIDEST = 4000  # characters in a row of text
# Of each kind a light colour for the rank's first chunk and a darker one for its last.
COLOURS = {
    "F": ("#9ecae1", "#3182bd"),
    "B": ("#a1d99b", "#31a354"),
    "I": ("#fdd0a2", "#e6550d"),
    "W": ("#dadaeb", "#756bb1"),
}
NAMES = {"F": "forward", "B": "backward", "I": "gradients of inputs", "W": "gradients of weights"}


def text_picture(
    rank_of: Sequence[int], actions: Sequence[Sequence[Action]], when: Timeline
) -> str:
    """A line for each rank, in which every action has at least the room of its name."""
    names = {x: _name(x, rank_of) for x in when}
    scale = _scale(names, when)
    end = round(scale * max(stop for _, stop in when.values()))
    lines = []
    for rank, row in enumerate(actions):
        line = ""
        for action in row:
            start, stop = (round(scale * t) for t in when[action])
            width = stop - start
            line = line.ljust(start, ".") + names[action].ljust(width, "-")[:width]
        lines.append(f"rank {rank:<{len(str(len(actions) - 1))}} |{line.ljust(end, '.')}")
    return "\n".join(lines)


def _name(action: Action, rank_of: Sequence[int]) -> str:
    """``F3``, or ``F3b`` for the second chunk of its rank."""
    kind, microbatch, chunk = action
    return f"{kind}{microbatch}{_nth(chunk, rank_of)}"


def _nth(chunk: int, rank_of: Sequence[int]) -> str:
    if len(set(rank_of)) == len(rank_of):
        return ""
    nth = list(rank_of[:chunk]).count(rank_of[chunk])
    return chr(ord("a") + nth) if nth < 26 else f".{nth}"


def _scale(names: dict[Action, str], when: Timeline) -> float:
    """Characters for a unit of time: room for each name and a dash behind it, if there is."""
    room = [
        (len(name) + 1) / (stop - start)
        for x, name in names.items()
        for start, stop in [when[x]]
        if stop > start
    ]
    end = max(stop for _, stop in when.values())
    return min(max(room), max(WIDEST / end, min(room))) if room else 1.0


def draw(
    rank_of: Sequence[int],
    actions: Sequence[Sequence[Action]],
    when: Timeline,
    path: Path,
    bubble: float,
) -> Path:
    """The same as a file, in the format that its name ends in.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as problem:
        raise ImportError(
            "no plot: matplotlib is not installed (pip install 'zfunc-torch[plot]')"
        ) from problem
    ranks, end = len(actions), max(stop for _, stop in when.values())
    width = min(40.0, 2 + 0.3 * max(map(len, actions)))
    figure = Figure(figsize=(width, 1.3 + 0.36 * ranks), layout="constrained")
    FigureCanvasAgg(figure)  # draws to memory: no display, no global pyplot state
    axes = figure.add_subplot()
    bars = defaultdict(list)
    for action, (start, stop) in when.items():
        kind, microbatch, chunk = action
        rank, half = rank_of[chunk], _half(chunk, rank_of)
        bars[rank, COLOURS[kind][half]].append((start, stop - start))
        middle, colour = (start + stop) / 2, ("black", "white")[half]
        axes.text(middle, rank, str(microbatch), ha="center", va="center", fontsize=6, color=colour)
    for (rank, colour), spans in bars.items():
        axes.broken_barh(spans, (rank - 0.43, 0.86), color=colour, edgecolor="white", linewidth=0.5)
    axes.set(xlabel=f"time ({bubble:.1%} idle)", xlim=(0, end or 1), ylim=(ranks - 0.5, -0.5))
    axes.set_yticks(range(ranks), [f"rank {r}" for r in range(ranks)])
    axes.spines[["top", "right"]].set_visible(False)
    kinds = [kind for kind in NAMES if any(x.kind == kind for x in when)]
    patches = [Patch(color=COLOURS[kind][0], label=NAMES[kind]) for kind in kinds]
    figure.legend(handles=patches, ncols=4, frameon=False, fontsize=7, loc="outside upper center")
    # The same picture is the same file: nothing in it is drawn by chance or tells the date.
    stable = {"Date": None} if path.suffix == ".svg" else None
    with matplotlib.rc_context({"svg.hashsalt": "zfunc", "svg.fonttype": "none"}):
        figure.savefig(path, dpi=160, metadata=stable)
    return path


def _half(chunk: int, rank_of: Sequence[int]) -> int:
    """0 for the first half of its rank's chunks, 1 for the rest."""
    own = [k for k, rank in enumerate(rank_of) if rank == rank_of[chunk]]
    return int(2 * own.index(chunk) >= len(own) > 1)
