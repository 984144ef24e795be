"""``zfunc calibrate``: the constants of the device that is here, for ``Foreseen.time``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from zfunc.commands.arguments import positive
from zfunc.commands.report import print_error
from zfunc.errors import DeviceError, ZfuncError
from zfunc.foresight.calibration import measure
from zfunc.foresight.clusters import Cluster
from zfunc.ranks.launching import launch
from zfunc.ranks.world import current

__all__ = ["add_calibrate"]


def add_calibrate(commands: Any) -> None:
    """Add the subcommand."""
    command = commands.add_parser(
        "calibrate",
        help="measure this device, for the times that zf.foresee tells",
        description="Measure products, memory, attention, launches, and collectives between "
        "ranks, all ranks at the same time, in a minute or two. Writes a JSON file for "
        "zf.Cluster.load, or for the measured_by of a preset of the same device.",
    )
    option = command.add_argument
    text = "local processes; by default one for each GPU"
    option("--ranks", type=positive, metavar="N", help=text)
    option("--device", choices=("cpu", "cuda"), help="by default cuda, where there is one")
    where = Path("calibration.json")
    option("--out", type=Path, metavar="FILE", default=where, help="what to write (%(default)s)")
    command.set_defaults(command=_calibrate_command)


def _calibrate_command(found: argparse.Namespace) -> int:
    kind = found.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind == "cuda" and not torch.cuda.is_available():
        return print_error(DeviceError("--device cuda: torch finds no GPU here."))
    if found.out.is_dir():
        return print_error(IsADirectoryError(f"--out {found.out}: this is a folder, name a file."))
    ranks = found.ranks or max(1, torch.cuda.device_count() if kind == "cuda" else 1)
    try:
        found.out.parent.mkdir(parents=True, exist_ok=True)  # before minutes are spent
        cluster = launch(_measured, kind, nprocs=ranks)[0]
        cluster.save(found.out)
    except KeyboardInterrupt:
        return 130
    except (ZfuncError, OSError) as error:
        return print_error(error)
    Console(highlight=False).print("\n".join(_lines(cluster, found.out)), soft_wrap=True)
    return 0


def _measured(kind: str) -> Cluster:
    return measure(current().device if kind == "cuda" else torch.device("cpu"))


def _lines(cluster: Cluster, path: Path) -> list[str]:
    peaks = [
        f"{name} {rate * cluster.product / 1e12:.3g} TFLOP/s"
        for name, rate in cluster.peak_flops.items()
    ]
    lines = [
        f"{cluster.device}: {cluster.calibrated}",
        f"large products: {', '.join(peaks)}; half of it at sums of {cluster.product_ramp:.0f}",
        f"memory: {cluster.memory_bandwidth * cluster.stream / 1e9:.3g} GB/s",
        f"attention: {cluster.attention:.0%} of the peak",
        f"an operation: {cluster.dispatch * 1e6:.3g} us of the host, "
        f"{cluster.gap * 1e6:.3g} us between two on the device",
    ]
    if cluster.measured_links:
        rate = cluster.nvlink * cluster.link_share
        lines.append(
            f"collectives of {cluster.gpus} ranks: {rate / 1e9:.3g} GB/s, "
            f"{cluster.latency * 1e6:.3g} us for the first byte"
        )
    return [*lines, f"written to {path}: zf.Cluster.load({str(path)!r})"]
