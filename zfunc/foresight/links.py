"""Which way a collective, a message or a copy goes, and how long it takes there."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

from zfunc.errors import DeviceError
from zfunc.foresight.clusters import Cluster
from zfunc.foresight.rows import StepRow

__all__ = ["LinkTimes"]

MESSAGES = ("send", "receive")
COPIES = ("up", "down", "read", "write")
LARGE = 1 << 20  # bytes; what is smaller goes through a tree, not around a ring


class LinkTimes:
    """Seconds of rows of kind ``"start"``.

    Args:
        cluster: where ranks fill one node after the other.
        groups: the ranks along each axis.
    """

    def __init__(self, cluster: Cluster, groups: Mapping[str, tuple[int, ...]]) -> None:
        self.cluster = cluster
        self._spread = {axis: self._over_nodes(axis, ranks) for axis, ranks in groups.items()}
        self._ranks = {axis: len(ranks) for axis, ranks in groups.items()}

    def lane(self, row: StepRow) -> str:
        """What is busy meanwhile: ``"network"`` or ``"node"``; a copy's own name."""
        if row.name in COPIES:
            return row.name
        return "network" if self._spread[row.axis][0] > 1 else "node"

    def of(self, row: StepRow) -> float:
        """How long it takes.

        A ring moves all bytes but a rank's own through each of its links, within a node and
        between nodes at the same time; an ``all_reduce`` goes around twice. In an ``all_to_all``
        the bytes of each rank leave its node through its own link alone, and a ``broadcast`` moves
        whole.
        """
        if row.name in COPIES:
            return row.written / self._rate(row.name)
        (nodes, local, fewest), cluster = self._spread[row.axis], self.cluster
        ranks = self._ranks[row.axis]
        if ranks == 1:
            return 0.0
        inside, across = self._inside(), cluster.nic * cluster.link_share
        if row.name in MESSAGES:
            return cluster.latency + row.written / (across if nodes > 1 else inside)
        whole = row.name == "broadcast"
        longest = row.written * (1 if whole else (local - 1) / local) / inside if local > 1 else 0.0
        if nodes > 1:  # into the node with the fewest links most has to go
            moved = row.written if whole else row.written * (ranks - fewest) / ranks
            links = 1 if row.name == "all_to_all" else fewest
            longest = max(longest, moved / (links * across))
        rounds = 2 if row.name == "all_reduce" else 1
        return cluster.latency + rounds * (longest + self._through(nodes, ranks, row.written))

    def _rate(self, way: str) -> float:
        """Bytes per second to the host and back, or of drives.

        Raises:
            DeviceError: there is no such way.
        """
        cluster = self.cluster
        if way in ("up", "down"):
            field, rate, what = "pcie", cluster.pcie * cluster.link_share, "link to the host"
        else:
            field = f"drive_{way}"
            rate, what = getattr(cluster, field), "drives"
        if not rate:
            raise DeviceError(
                f"the step is offloaded, and the cluster has no {what}: give {field}= in bytes per "
                "second of one device."
            )
        return float(rate)

    def _through(self, nodes: int, ranks: int, nbytes: int) -> float:
        """What the first byte takes to all ranks: around a ring, or down a tree if it is small."""
        hop, network = self.cluster.hop, self.cluster.network_hop
        if nbytes > LARGE:
            return (ranks - nodes) * hop + (nodes - 1) * network
        return math.log2(ranks / nodes) * hop + math.log2(nodes) * network

    def _inside(self) -> float:
        return (self.cluster.nvlink or self.cluster.pcie) * self.cluster.link_share

    def _over_nodes(self, axis: str, ranks: tuple[int, ...]) -> tuple[int, int, int]:
        """Over how many nodes ranks are, and how many of them are in one: most, and fewest.

        Raises:
            DeviceError: there is no link between them.
        """
        cluster = self.cluster
        nodes = Counter(rank // cluster.gpus_per_node for rank in ranks)
        if len(nodes) > 1 and not cluster.nic:
            raise DeviceError(
                f"ranks along {axis!r} are on {len(nodes)} nodes of {cluster.gpus_per_node}, and "
                "the cluster has no link between nodes: give nic= in bytes per second, or a mesh "
                "whose axes stay within a node."
            )
        if max(nodes.values()) > 1 and not self._inside():
            raise DeviceError(
                f"ranks along {axis!r} share a node, and the cluster has no link within one: give "
                "nvlink= or pcie= in bytes per second."
            )
        return len(nodes), max(nodes.values()), min(nodes.values())
