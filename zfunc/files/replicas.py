"""Replicas: what several ranks hold is written once, so it has to be the same on all of them.

Before anything is written each rank takes digests of what others hold, too, and the ranks compare
them. Digests of chunks that a rank is going to write are kept for the manifest, so nothing is read
twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from zfunc.engine.agreement import COUNTED
from zfunc.errors import CheckpointError
from zfunc.files.chunks import digest, pieces_of
from zfunc.files.elements import Elements, elements_of
from zfunc.files.inventory import Inventory, shares
from zfunc.files.saving import agreed
from zfunc.ranks.comm import Group
from zfunc.ranks.digests import as_bytes, digests
from zfunc.ranks.transport import named
from zfunc.trees.nodes import Span

__all__ = ["Replicas", "check_replicas", "look_at"]

Place = tuple[str, str, tuple[int, ...]]  # a leaf, which elements, the ranks that hold them
Summary = Sequence[tuple[Sequence[int], str]]
Row = tuple[str, str, Sequence[int], str, str]


@dataclass(frozen=True)
class Replicas:
    """What this rank holds in common with others.

    Attributes:
        bits: digest of each span.
        devices: the kind of device that it lies on.
        chunks: of those on the host, digests of chunks by leaf and elements.
    """

    bits: dict[Place, str] = field(default_factory=dict)
    devices: dict[Place, str] = field(default_factory=dict)
    chunks: dict[tuple[str, Elements], str] = field(default_factory=dict)

    def rows(self) -> list[Row]:
        """Place, digest and device of each span."""
        return [(*place, bits, self.devices[place]) for place, bits in self.bits.items()]

    def summary(self) -> Summary:
        """One digest for each set of ranks."""
        rows: dict[tuple[int, ...], list[str]] = {}
        for (name, elements, ranks), bits in self.bits.items():
            rows.setdefault(ranks, []).append(f"{name!r} {elements} {bits}")
        return [(ranks, digest("\n".join(row).encode())) for ranks, row in rows.items()]


def look_at(stock: Inventory, weighed: bool = False) -> Replicas:
    """Take digests of what this rank holds in common with others, where it lies.

    Args:
        weighed: so that those of the host compare with those of a device.
    """
    seen = Replicas()
    later: dict[Place, Tensor] = {}
    for resident in (True, False):
        for name, span, x in stock.streamed(resident, common=True):
            if len(span.replicas) == 1:
                continue
            place = (name, str(elements_of(span)), span.replicas)
            seen.devices[place] = x.device.type
            if x.device.type == "cpu" and not weighed:
                seen.bits[place] = _of_chunks(seen, name, span, x)
            elif resident:
                later[place] = x
            else:  # gone with the next
                (seen.bits[place],) = digests([x], weighed)
    seen.bits.update(zip(later, digests(list(later.values()), weighed), strict=True))
    return seen


def _of_chunks(seen: Replicas, name: str, span: Span, x: Tensor) -> str:
    """The digest of those of the chunks in which all ranks together write a span."""
    found = []
    data, elements = as_bytes(x.contiguous()), elements_of(span)
    for low, high in shares(span):
        for a, b in pieces_of(low, high, x.dtype):
            found.append(digest(data[a * x.itemsize : b * x.itemsize]))
            seen.chunks[name, elements.part(a, b).simple] = found[-1]
    return digest("".join(found).encode())


def check_replicas(
    ranks: Group, stock: Inventory, seen: Replicas, summaries: Sequence[Summary], label: str
) -> None:
    """Raise ``CheckpointError`` if ranks differ in what they hold in common; a collective.

    Args:
        summaries: of all ranks.
    """
    if _alike(summaries):
        return
    rows = ranks.exchange(seen.rows(), label=label)
    if _on_other_devices(rows):  # digests of hosts and of devices tell nothing of each other
        seen = agreed(ranks, lambda: look_at(stock, weighed=True), label=label)
        rows = ranks.exchange(seen.rows(), label=label)
    found: dict[Any, dict[str, list[int]]] = {}
    for rank, theirs in enumerate(rows):
        for name, elements, members, bits, _ in theirs:
            found.setdefault((name, elements, tuple(members)), {}).setdefault(bits, []).append(rank)
    for (name, _, members), holders in found.items():
        if len(holders) > 1 or len(*holders.values()) != len(members):
            raise CheckpointError(_apart(name, list(holders.values()), members))


def _alike(summaries: Sequence[Summary]) -> bool:
    found: dict[tuple[int, ...], list[str]] = {}
    for summary in summaries:
        for members, bits in summary:
            found.setdefault(tuple(members), []).append(bits)
    return all(len(row) == len(ranks) == row.count(row[0]) for ranks, row in found.items())


def _on_other_devices(rows: Sequence[Sequence[Row]]) -> bool:
    found: dict[Any, set[str]] = {}
    for theirs in rows:
        for name, elements, members, _, device in theirs:
            found.setdefault((name, elements, tuple(members)), set()).add(device)
    return any(len(devices) > 1 for devices in found.values())


def _apart(name: str, holders: Sequence[Sequence[int]], members: Sequence[int]) -> str:
    rest = [rank for rank in members if rank not in {r for row in holders for r in row}]
    told = " and ".join(f"one on {named(row)}" for row in holders)
    told += f", none on {named(rest)}" * bool(rest)
    what = f"ranks hold {name} in common, but it has several values: {told}. "
    if name.partition(".")[0] not in COUNTED:
        return what + (
            "The replicas have diverged, so no checkpoint of them is one state: something in the "
            "step depends on the rank, such as a gradient or a random number of its own that is "
            "averaged nowhere (zf.value_and_grad averages, and zf.pmean). Mend that, and go on "
            "from an earlier checkpoint."
        )
    return what + (
        "Average what each rank computes by itself before it enters the state (zf.pmean), or keep "
        "it out of the state."
    )
