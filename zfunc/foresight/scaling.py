"""How a step scales: it is foreseen on more and more devices of a kind."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from zfunc.engine.batches import has_rows, leaves_of, mapped
from zfunc.foresight.choices import tried
from zfunc.foresight.clocks import notes_on
from zfunc.foresight.clusters import Cluster, check_cluster
from zfunc.foresight.drawing import draw_scaling, in_notebook
from zfunc.foresight.texts import bytes_text, printed, seconds_text

__all__ = ["Scaling", "ScalingPoint", "scale_out"]


@dataclass(frozen=True)
class ScalingPoint:
    """A step on so many devices.

    Attributes:
        gpus: how many.
        samples: of a step, all ranks together.
        seconds: that it takes.
        binds: what most of them are for.
        fits: whether a device's memory holds it.
        peak_bytes, sent_bytes: of a rank, the worst one.
        error: why it cannot run; then nothing else is known.
    """

    gpus: int
    samples: int
    seconds: float = 0.0
    binds: str = ""
    fits: bool = False
    peak_bytes: int = 0
    sent_bytes: int = 0
    error: str = ""

    @property
    def rate(self) -> float:
        """Samples per second, all devices together."""
        return self.samples / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class Scaling:
    """A step on several numbers of devices; printed it is a table, in a notebook also a picture.

    Attributes:
        points: by the number of devices.
        strong: whether the batch is the same for all; else it grows with them.
        cluster: the kind of cluster.
        tokens: of a sample; 0 if nobody counts them.
    """

    points: tuple[ScalingPoint, ...]
    strong: bool
    cluster: Cluster = field(repr=False)
    tokens: int = 0

    @property
    def efficiency(self) -> tuple[float, ...]:
        """Of each point: samples per second and device, beside those of the first that can run.

        0 for a point that cannot run.
        """
        each = [point.rate / point.gpus for point in self.points]
        first = next((rate for rate in each if rate), 1.0)
        return tuple(rate / first for rate in each)

    def table(self) -> Table:
        """For rich."""
        how = "strong scaling, the same batch" if self.strong else "weak scaling, the batch grows"
        found = Table(title=f"{self.cluster.device}: {how}", title_justify="left")
        rate = "tokens/s" if self.tokens else "samples/s"
        for name in ("GPUs", "batch", "time", rate, "efficiency", "bound by", "peak", "fits"):
            found.add_column(name, justify="right")
        for point, share in zip(self.points, self.efficiency, strict=True):
            if point.error:
                found.add_row(str(point.gpus), str(point.samples), "", "", "", point.error)
                continue
            found.add_row(
                str(point.gpus),
                str(point.samples),
                seconds_text(point.seconds),
                f"{point.rate * (self.tokens or 1):,.4g}",
                f"{share:.1%}",
                point.binds,
                bytes_text(point.peak_bytes),
                "yes" if point.fits else "no",
            )
        return found

    def __str__(self) -> str:
        notes = "".join(f"\nassumed: {note}" for note in notes_on(self.cluster))
        return printed(self.table()).export_text().rstrip() + notes

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return in_notebook(str(self), self.plot)

    def json(self) -> str:
        """All points as JSON."""
        rows = [
            {**asdict(point), "rate": point.rate, "efficiency": share}
            for point, share in zip(self.points, self.efficiency, strict=True)
        ]
        kind = {"device": self.cluster.device, "strong": self.strong, "tokens": self.tokens}
        return json.dumps({**kind, "points": rows}, indent=1)

    def save(self, path: str | Path) -> Path:
        """Write ``json()``; returns the path."""
        Path(path).write_text(self.json() + "\n")
        return Path(path)

    def plot(self, path: str | Path) -> Path:
        """Draw samples (or tokens) per second and efficiency over devices; returns the path.

        Args:
            path: ``.png``, ``.svg`` or whatever matplotlib knows.

        Raises:
            ImportError: matplotlib is not installed.
        """
        shares = zip(self.points, self.efficiency, strict=True)
        times = self.tokens or 1
        rows = [(point.gpus, point.rate * times, share) for point, share in shares if share]
        return draw_scaling(rows, "tokens/s" if self.tokens else "samples/s", Path(path))


def scale_out(
    step: Any,
    make_state: Any,
    batch: Any,
    cluster: Cluster,
    gpus: Iterable[int],
    strong: bool = False,
    tokens: int = 0,
) -> Scaling:
    """Foresee a step on more and more devices of a cluster; nothing of it is computed.

    Weak scaling: the batch grows with the devices, so a rank has as many rows as it had on the
    fewest. Strong scaling: the batch is the same for all.

    Args:
        step: as for ``foresee``, on a mesh that leaves the size of ``data`` open.
        make_state: as for ``foresee``.
        batch: of all ranks together, on the fewest devices; may be on meta.
        cluster: what the devices are; its own number of them does not count.
        gpus: how many, such as ``(8, 64, 512)``.
        strong: strong scaling, else weak.
        tokens: of a sample, to show tokens per second instead of samples.

    Raises:
        TypeError: ``gpus`` are no whole numbers; no cluster.
        ValueError: no numbers, or one that is no multiple of the least; a batch without rows.

    >>> import zfunc as zf
    >>> tx = zf.optim.adamw(1e-3)
    >>> step = zf.train_step(lambda params, x: (x @ params["w"]).square().mean(), tx)
    >>> wide = zf.TrainState.create({"w": torch.empty(16384, 16384, device="meta")}, tx)
    >>> x = torch.empty(4096, 16384, device="meta")
    >>> h100 = zf.Cluster.preset("h100", gpus=8)
    >>> found = scale_out(zf.shard(step, stage=1), wide, x, h100, gpus=(8, 64))
    >>> [point.samples for point in found.points], found.efficiency[1] < found.efficiency[0]
    ([4096, 32768], True)
    """
    check_cluster(cluster)
    numbers = [*gpus] if isinstance(gpus, Iterable) else [None]
    if not all(type(n) is int for n in numbers):
        raise TypeError(f"scale_out: gpus={gpus!r}, expected whole numbers, such as (8, 64).")
    sizes = sorted({n for n in numbers if n is not None})
    rows = next((x.shape[0] for _, x in leaves_of(batch) if has_rows(x)), 0)
    if not sizes or sizes[0] < 1 or any(size % sizes[0] for size in sizes):
        raise ValueError(f"scale_out: gpus={sizes}, expected multiples of the least, at least 1.")
    if not rows:
        raise ValueError("scale_out: the batch has no rows, so it cannot be cut or grow.")
    points = []
    for size in sizes:
        times = 1 if strong else size // sizes[0]
        row = tried(
            lambda: step, make_state, _repeated(batch, times), replace(cluster, gpus=size), {}
        )
        known = {name: getattr(row, name) for name in SHARED}
        points.append(ScalingPoint(size, rows * times, **known))
    return Scaling(tuple(points), strong, cluster, tokens)


SHARED = ("seconds", "binds", "fits", "peak_bytes", "sent_bytes", "error")


def _repeated(batch: Any, times: int) -> Any:
    """A batch with so many times the rows."""
    if times == 1:
        return batch

    def longer(x: Any) -> Any:
        return torch.as_tensor(x).repeat(times, *[1] * (x.ndim - 1)) if has_rows(x) else x

    return mapped(longer, batch, lambda some: some * times)
