"""A cluster as numbers: its devices, the links between them, and what is reached of both."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch

from zfunc.errors import DeviceError
from zfunc.foresight.peaks import as_torch_takes
from zfunc.foresight.presets import ALWAYS_GUESSED, GUESSED, PRESETS, preset_of

__all__ = ["Cluster", "check_cluster", "peak_name"]

MEASURED = (  # what a calibration knows better
    *("peak_flops", "multiprocessors", "memory_bandwidth", "product", "product_ramp"),
    *("stream", "attention", "attention_ramp", "gap", "dispatch"),
)
NO_NUMBERS = ("device", "kind", "peak_flops", "calibrated")
RATES = ("nvlink", "nic", "pcie", "drive_read", "drive_write", "host_memory_bandwidth")
COUNTS = ("gpus", "gpus_per_node", "multiprocessors")
ADDED = ("product_ramp", "attention_ramp", "gap", "dispatch", "latency", "hop", "network_hop")


@dataclass(frozen=True)
class Cluster:
    """Devices in nodes. Rates are bytes per second, each way, of one device; times are seconds.

    Attributes:
        device: its name, as torch gives it.
        gpus: how many devices there are, one for each rank.
        gpus_per_node: ranks in order fill one node after the other.
        memory: bytes of one device.
        peak_flops: FLOP/s of products, by dtype (``"bfloat16"``), and of ``"tf32"``.
        memory_bandwidth: of its memory, reading and writing together.
        multiprocessors: that share a product between them.
        nvlink: between devices of a node, whatever its maker calls it; 0 where there is only PCIe.
        nic: to other nodes; 0 if there is none.
        pcie: to the host.
        drive_read, drive_write: of the drives, one device's share; 0 if there are none.
        host_memory_bandwidth: of the host's memory, one device's share, reading and writing
            together. There an optimizer computes whose state is offloaded.
        kind: ``"cuda"``, or ``"cpu"``, where operations take the host's own time.
        product: share of the peak that large products reach.
        product_ramp: length of the sums of a product that reaches half of it.
        stream: share of the memory's bandwidth that other operations reach.
        attention: share of the peak that fused attention reaches on long sequences, forward.
        attention_ramp: keys at which it reaches half of that under a causal mask.
        link_share: share of a link's rate that collectives reach.
        gap: that a device loses between two operations.
        dispatch: that the host takes to ask for one.
        latency: of a collective; ``hop`` and ``network_hop`` for each device and each node that it
            goes on to. By default those that NCCL reckons with (its tuning.cc: a ring, Simple).
        calibrated: where and when its numbers were measured; ``""`` if they are published ones.

    Raises:
        ValueError: a number that none of that kind can be.

    >>> cluster = Cluster.preset("a100-80", gpus=1024, nic=12.5e9)
    >>> cluster.nodes, cluster.peak("bfloat16")
    (128, 312000000000000.0)
    """

    device: str
    gpus: int
    memory: int
    peak_flops: Mapping[str, float] = field(hash=False)
    memory_bandwidth: float
    multiprocessors: int
    nvlink: float
    nic: float
    pcie: float
    gpus_per_node: int = 8
    drive_read: float = 0.0
    drive_write: float = 0.0
    host_memory_bandwidth: float = 0.0
    kind: str = "cuda"
    product: float = 0.8
    product_ramp: float = 256.0
    stream: float = 0.9
    attention: float = 0.5
    attention_ramp: float = 512.0
    link_share: float = 0.8
    gap: float = 2e-6
    dispatch: float = 10e-6
    latency: float = 8.4e-6
    hop: float = 3.4e-6
    network_hop: float = 14e-6
    calibrated: str = ""

    def __post_init__(self) -> None:
        peaks = self.peak_flops
        _check("peak_flops", peaks, "FLOP/s by the name of a dtype", isinstance(peaks, Mapping))
        object.__setattr__(self, "peak_flops", dict(peaks))
        for name in ("device", "kind", "calibrated"):
            _check(name, getattr(self, name), "text", isinstance(getattr(self, name), str))
        for f in fields(self):
            if f.name not in NO_NUMBERS:
                _check(f.name, getattr(self, f.name), "a number", _is_number(getattr(self, f.name)))
        if self.kind not in ("cuda", "cpu"):
            raise ValueError(f"Cluster: kind={self.kind!r}, expected 'cuda' or 'cpu'.")
        if "float32" not in peaks:
            raise ValueError("Cluster: peak_flops lacks 'float32', which stands for other dtypes.")
        for dtype, x in peaks.items():
            _check(f"peak_flops[{dtype!r}]", x, "a number above 0", _is_number(x) and x > 0)
        for name in COUNTS:
            x = getattr(self, name)
            _check(name, x, "a whole number above 0", isinstance(x, int) and x > 0)
        for name in ("memory", "memory_bandwidth"):
            _check(name, getattr(self, name), "more than 0", getattr(self, name) > 0)
        for name in ("product", "stream", "attention", "link_share"):
            _check(name, getattr(self, name), "a share, 0 < x <= 1", 0 < getattr(self, name) <= 1)
        for name in (*RATES, *ADDED):
            _check(name, getattr(self, name), "0 or more", getattr(self, name) >= 0)

    @property
    def nodes(self) -> int:
        """How many nodes its devices fill."""
        return -(-self.gpus // self.gpus_per_node)

    @property
    def guessed(self) -> tuple[str, ...]:
        """Fields whose numbers nobody has published or measured, unless you gave them."""
        if self.calibrated:
            return ()
        return (*GUESSED.get(preset_of(self.device), ()), *ALWAYS_GUESSED)

    def peak(self, dtype: str) -> float:
        """FLOP/s of products in a dtype by its name, as torch takes them now (float32 perhaps in
        TF32); those of float32 where nothing is said of it."""
        known = self.peak_flops
        return known.get(as_torch_takes(dtype, known), known["float32"])

    @classmethod
    def preset(cls, name: str, gpus: int, **given: Any) -> Cluster:
        """A cluster of published numbers (:mod:`zfunc.foresight.presets`).

        Args:
            name: of the device, lower case, such as ``"a100-80"``.
            gpus: how many.
            **given: fields to have otherwise; dtypes in ``peak_flops`` are added to those known.

        Raises:
            ValueError: no such name, or no such field.
        """
        if name not in PRESETS:
            raise ValueError(f"Cluster.preset: no {name!r}; there are {', '.join(PRESETS)}.")
        _check_names(given)
        known = PRESETS[name]
        if "peak_flops" in given:
            given["peak_flops"] = {**known["peak_flops"], **given["peak_flops"]}
        return cls(**{**known, "gpus": gpus, **given})

    def measured_by(self, calibration: Cluster | str | Path) -> Cluster:
        """This cluster with the constants that a calibration has measured on such a device.

        Links are taken from it where it has measured them.

        Raises:
            DeviceError: it was measured on another device, or nothing was measured.
        """
        found = calibration if isinstance(calibration, Cluster) else Cluster.load(calibration)
        if not found.calibrated or (found.device, found.kind) != (self.device, self.kind):
            how = "a calibration of" if found.calibrated else "no calibration, but published for"
            raise DeviceError(
                f"this is {how} {found.device!r}, and the cluster has {self.device!r}: run "
                "`zfunc calibrate` on one of its own devices."
            )
        known = {name: getattr(found, name) for name in (*MEASURED, "calibrated")}
        if found.measured_links:  # of the others nobody knows which share is reached
            rate = found.nvlink * found.link_share / self.link_share
            known |= {"nvlink": rate, "latency": found.latency, "hop": 0.0}
        return replace(self, **known)

    @property
    def measured_links(self) -> bool:
        """Whether a calibration measured collectives: their latency is that of all hops."""
        return bool(self.calibrated) and self.hop == 0

    def save(self, path: str | Path) -> Path:
        """Write all fields as JSON; returns the path."""
        Path(path).write_text(json.dumps(asdict(self), indent=1) + "\n")
        return Path(path)

    @classmethod
    def load(cls, path: str | Path, **given: Any) -> Cluster:
        """Read what :meth:`save` or ``zfunc calibrate`` wrote.

        Args:
            path: of the file.
            **given: fields to have otherwise.

        Raises:
            ValueError: it has no such fields, or lacks some.
        """
        try:
            found = json.loads(Path(path).read_text(encoding="utf-8-sig"))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path}: this is no JSON ({error}).") from error
        if not isinstance(found, dict):
            raise ValueError(f"{path}: expected a JSON object of the fields of a Cluster.")
        _check_names({**found, **given}, f"{path}: ")
        needed = [f.name for f in fields(cls) if f.default is MISSING]
        if missing := [name for name in needed if name not in {**found, **given}]:
            raise ValueError(f"{path}: it lacks {', '.join(missing)}.")
        return cls(**{**found, **given})


def check_cluster(cluster: Any) -> None:
    """Raise if something else was given.

    Raises:
        TypeError: it is no cluster.
    """
    if not isinstance(cluster, Cluster):
        raise TypeError(
            f"{cluster!r} is no cluster: give zf.Cluster.preset('h100', gpus=8), say, or "
            "zf.Cluster.load(path)."
        )


def peak_name(dtype: torch.dtype | None) -> str:
    """The name of a dtype in ``peak_flops``.

    >>> peak_name(torch.bfloat16)
    'bfloat16'
    """
    return str(dtype or torch.float32).removeprefix("torch.")


def _is_number(x: Any) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool) and not math.isnan(x)


def _check(name: str, found: Any, expected: str, right: bool) -> None:
    if not right:
        raise ValueError(f"Cluster: {name}={found!r}, expected {expected}.")


def _check_names(given: Mapping[str, Any], where: str = "Cluster: ") -> None:
    known = [f.name for f in fields(Cluster)]
    if unknown := [name for name in given if name not in known]:
        raise ValueError(f"{where}no field {', '.join(unknown)}; there are {', '.join(known)}.")
