"""What quantising did to each leaf, errors and bytes, as a table and as a plot."""

from __future__ import annotations

import io
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zfunc.errors import PlacementError
from zfunc.quant.qtensor import QTensor
from zfunc.trees.nodes import Tree
from zfunc.trees.tree import flatten_names

__all__ = ["LeafReport", "Report", "report"]


@dataclass(frozen=True)
class LeafReport:
    """One quantised leaf.

    Attributes:
        path, format: which leaf, in what.
        shape: of the leaf.
        largest: the largest error of an element.
        rms: the root mean square of the errors.
        sqnr: signal to quantisation noise, ``10 log10(sum w^2 / sum error^2)`` in dB.
        before, after: bytes.
    """

    path: str
    format: str
    shape: tuple[int, ...]
    largest: float
    rms: float
    sqnr: float
    before: int
    after: int


@dataclass(frozen=True)
class Report:
    """A row for each quantised leaf; prints as a table (``str``, or rich's ``print``)."""

    rows: tuple[LeafReport, ...]

    @property
    def before(self) -> int:
        """Bytes of the quantised leaves as they were."""
        return sum(row.before for row in self.rows)

    @property
    def after(self) -> int:
        """Bytes that they take now."""
        return sum(row.after for row in self.rows)

    def worst(self) -> LeafReport:
        """The leaf with the lowest signal to noise ratio."""
        return min(self.rows, key=lambda row: row.sqnr)

    def __rich__(self) -> Any:
        from rich.table import Table

        share = self.after / self.before if self.before else 0.0
        table = Table(
            title=f"{len(self.rows)} leaves: {self.before:,} bytes to {self.after:,} ({share:.1%})"
        )
        table.add_column("leaf", overflow="fold")
        table.add_column("shape")
        table.add_column("format", overflow="fold")
        for name in ("max error", "rms error", "SQNR dB", "bytes"):
            table.add_column(name, justify="right")
        for row in self.rows:
            shape = " x ".join(map(str, row.shape))
            numbers = f"{row.largest:.2e}", f"{row.rms:.2e}", f"{row.sqnr:.1f}", f"{row.after:,}"
            table.add_row(row.path, shape, row.format, *numbers)
        return table

    def __str__(self) -> str:
        from rich.console import Console

        out = io.StringIO()
        Console(file=out, width=120).print(self.__rich__())
        return out.getvalue()

    def plot(self, path: str | Path) -> Path:
        """Draw each leaf's signal to noise ratio to a PNG (needs matplotlib).

        Returns:
            The file.
        """
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        rows = self.rows[::-1]
        figure = Figure(figsize=(7.2, 1.2 + 0.18 * len(rows)), dpi=140, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        finite = [row.sqnr if math.isfinite(row.sqnr) else 0.0 for row in rows]
        axes.barh([row.path for row in rows], finite, color="#6baed6")
        axes.set(xlabel="signal to quantisation noise, dB", title="what quantising kept")
        axes.tick_params(axis="y", labelsize=6)
        axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(path)
        return Path(path)


def report(before: Tree, after: Tree) -> Report:
    """Compare a tree with its quantised form.

    Args:
        before: plain parameters.
        after: the same with :class:`QTensor` leaves.

    Raises:
        PlacementError: the trees differ in their leaves.

    >>> import torch
    >>> from zfunc.quant.trees import quantize_tree
    >>> w = {"w": torch.linspace(-1, 1, 512).reshape(4, 128)}
    >>> round(report(w, quantize_tree(w, bits=8)).rows[0].sqnr)
    50
    """
    plain, low = flatten_names(before), flatten_names(after)
    if plain.keys() != low.keys():
        differ = sorted(plain.keys() ^ low.keys())
        raise PlacementError(f"the trees differ in {', '.join(differ[:3])}: one has no such leaf.")
    rows = [_row(path, plain[path], x) for path, x in low.items() if isinstance(x, QTensor)]
    return Report(tuple(rows))


def _row(path: str, before: Tensor, after: QTensor) -> LeafReport:
    if before.shape != after.shape:
        raise PlacementError(
            f"{path} has shape {tuple(before.shape)} before and {tuple(after.shape)} after."
        )
    wanted = before.detach().float()
    error = wanted - after.dequantize(torch.float32)
    noise, signal = float(error.square().sum()), float(wanted.square().sum())
    sqnr = math.inf if noise == 0 else 10 * math.log10(signal / noise) if signal else -math.inf
    return LeafReport(
        path,
        str(after.format),
        tuple(before.shape),
        float(error.abs().max()) if error.numel() else 0.0,
        math.sqrt(noise / max(1, error.numel())),
        sqnr,
        before.nbytes,
        after.nbytes,
    )
