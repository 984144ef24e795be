"""How long a device takes for one operation, from its shapes: a roofline with three corners cut.

A product fills a whole number of tiles on a whole number of multiprocessors, and short sums do not
fill their pipelines (``product_ramp``). Fused attention reaches a share of the peak, less on short
sequences. Whatever else there is moves its bytes through memory.
"""

from __future__ import annotations

import math
from typing import Any

from zfunc.errors import DeviceError
from zfunc.foresight.clusters import Cluster, peak_name
from zfunc.foresight.rows import StepRow

__all__ = ["OperationTimes"]

# Rows and columns of the tiles that libraries of products have, and what a small one reaches of a
# large one: it reads more of its operands for each product.
TILES = ((128, 256, 1.0), (256, 128, 1.0), (128, 128, 0.9), (64, 128, 0.75), (128, 64, 0.75))
SPLITS = (1, 2, 3, 4, 6, 8)  # of long sums, where there are few tiles
PRODUCTS = frozenset({"mm", "addmm", "addmm_", "bmm", "baddbmm", "baddbmm_", "_int_mm", "addbmm"})
BACKWARD = 63 / 73  # of attention, beside forward: Dao, FlashAttention-2, 2023
LOOKUPS = frozenset({"embedding", "gather", "index_select", "index"})


class OperationTimes:
    """Seconds of rows of kind ``"compute"``; equal rows are asked for once."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._known: dict[Any, float] = {}

    def of(self, row: StepRow) -> float:
        """Seconds, with the gap to the next operation."""
        key = (row.name, row.flops, row.read, row.written, row.shapes, row.dtype, row.causal)
        if key not in self._known:
            self._known[key] = self.cluster.gap + max(self._arithmetic(row), self._traffic(row))
        return self._known[key]

    def by_host(self, row: StepRow) -> float:
        """Seconds of what the host computes in its own memory.

        Raises:
            DeviceError: nobody has said how fast that is.
        """
        rate = self.cluster.host_memory_bandwidth * self.cluster.stream
        if not rate:
            raise DeviceError(
                "the optimizer of an offloaded state runs on the host, and the cluster does not "
                "say how fast its memory is: give host_memory_bandwidth= in bytes per second of "
                "one device."
            )
        return _bytes(row) / rate

    def _traffic(self, row: StepRow) -> float:
        return _bytes(row) / (self.cluster.memory_bandwidth * self.cluster.stream)

    def _arithmetic(self, row: StepRow) -> float:
        if not row.flops:
            return 0.0
        peak = self.cluster.peak(peak_name(row.dtype))
        if row.name.startswith("_scaled_dot_product"):
            return row.flops * (0.5 if row.causal else 1.0) / (peak * self._attention(row))
        return row.flops / (peak * self._product(row))

    def _attention(self, row: StepRow) -> float:
        """The share of the peak that it reaches."""
        keys = max((shape[-2] for shape in row.shapes if len(shape) == 4), default=1)
        ramp = self.cluster.attention_ramp * (1.0 if row.causal else 0.5)
        share = self.cluster.attention * keys / (keys + ramp)
        return share * BACKWARD if "backward" in row.name else share

    def _product(self, row: StepRow) -> float:
        """The share of the peak that it reaches."""
        cluster, whole = self.cluster, [s for s in row.shapes if len(s) > 1]
        if row.name not in PRODUCTS or len(whole) < 2:
            return cluster.product
        a, b = whole[-2:]
        m, k, n = a[-2], a[-1], b[-1]
        if cluster.kind == "cpu":
            return cluster.product * k / (k + cluster.product_ramp)
        count = a[0] if len(a) == 3 else 1
        return cluster.product * max(
            self._filled(count * parts, m, n, tile) * k / (k + parts * cluster.product_ramp)
            for tile in TILES
            for parts in SPLITS
        )

    def _filled(self, count: int, m: int, n: int, tile: tuple[int, int, float]) -> float:
        """The share of rounds of tiles that is of use."""
        rows, columns, reached = tile
        tiles = count * math.ceil(m / rows) * math.ceil(n / columns)
        rounds = math.ceil(tiles / self.cluster.multiprocessors)
        return reached * count * m * n / (rows * columns * rounds * self.cluster.multiprocessors)


def _bytes(row: StepRow) -> int:
    """What an operation moves: of a table that it looks things up in only what it takes."""
    if row.name in LOOKUPS:
        return 2 * row.written
    if row.name in ("copy_", "_foreach_copy_"):  # what is written over is not read
        return row.read
    return row.read + row.written
