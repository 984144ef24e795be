"""New parameters of ZeRO 1 and 2 on their way to all ranks, as compressed updates.

Every rank has the parameters whole and updates the part that it owns. Instead of that part it may
send what the step has changed in it, packed, and keep what packing left out for the next step. All
ranks, the owner too, add the same numbers to the same parameters, so they stay equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from zfunc.context import reuse
from zfunc.errors import CompositionError
from zfunc.nodes import Tree, carry, spent
from zfunc.placed.dense import dense_of, spread_part, squeezed_part
from zfunc.placed.layout import Layout
from zfunc.placed.pieces import full_around, leaves_of
from zfunc.placed.placement import Entries
from zfunc.placed.sharded import Sharded
from zfunc.transforms.error_feedback import Call, layouts_of
from zfunc.transforms.exchange import Codec, codecs_of
from zfunc.transforms.onebit import OneBit
from zfunc.transforms.quantized import Int4, Int8

__all__ = ["GATHERS", "Half", "before", "check_gather", "gathered_bytes", "joined"]


@dataclass(frozen=True)
class Half:
    """Numbers rounded to bfloat16."""

    def of_momentum(self) -> Half:
        """Itself."""
        return self

    def over(self, leaves: Sequence[tuple[int, int, int]]) -> Half:
        """Itself: each number is by itself."""
        return self

    def nbytes(self, n: int, dtype: torch.dtype) -> int:
        """Bytes of ``n`` elements."""
        return 2 * n

    def pack_(self, x: Tensor, error: Tensor) -> Tensor:
        """``x + error`` as bytes; ``error`` becomes what they leave out."""
        error += x
        short = error.bfloat16()
        error -= short
        return short.view(torch.uint8)

    def unpack(self, data: Tensor, n: int, dtype: torch.dtype) -> Tensor:
        """The numbers, of ``dtype``, that bytes stand for: ``[n]``."""
        return data.contiguous().view(torch.bfloat16).to(dtype)


GATHERS: Mapping[str, Any] = {"bf16": Half(), "int8": Int8(), "int4": Int4(), "onebit": OneBit()}


def check_gather(gather: str, shard: Any, others: Sequence[Any]) -> None:
    """Raise ``CompositionError`` where parameters are not gathered after a step, or not in fp32."""
    if shard is not None and shard.stage not in (1, 2):
        why = (
            "no parameters are gathered" if shard.stage == 0 else "they are gathered as they enter"
        )
        raise CompositionError(
            f"compress_grads(gather={gather!r}) at ZeRO stage {shard.stage}: {why}. Leave gather "
            "out, or write shard(step, stage=2)."
        )
    if any(other.name == "precision" for other in others):
        raise CompositionError(
            f"compress_grads(gather={gather!r}) beside precision: parameters are gathered in 16 "
            "bits already, from masters that stay cut. Leave gather out."
        )


def before(state: Any, rank: int) -> dict[str, list[Tensor | None]]:
    """A copy of what this rank owns of the params entries: a step may update it in place."""
    out: dict[str, list[Tensor | None]] = {}
    for name, (layout, _) in layouts_of(state).items():
        leaves = leaves_of(layout, Entries(state)[name])
        row: list[Tensor | None] = []
        for i, slots in enumerate(layout.by_flat):
            some = [leaves[slot.index] for slot in slots]
            if not slots or not layout.flats[i].trainable or layout.flats[i].whole:
                row.append(None)
                continue
            full = layout.buffer_under(i, some)
            low, high = layout.flats[i].bounds(rank)
            row.append((layout.pack(i, some) if full is None else full)[low:high].clone())
        out[name] = row
    return out


def joined(
    call: Call,
    codec: Codec,
    old: Mapping[str, list[Tensor | None]],
    node: Sharded,
    params: Tree,
) -> Tree | None:
    """The plain tree ``params`` after a step, or ``None`` where it must be gathered as it is.

    Args:
        old: what :func:`before` gave.
        node: what this rank has made of its part.
    """
    name, layout, rank = call.entry_of(node.layout), node.layout, node.group.rank
    leaves = leaves_of(layout, params)
    rounds: list[tuple[Any, tuple[int, ...], torch.dtype] | None] = []
    if name is None or name in call.joined or not _there(layout, leaves, node, rank):
        return None
    call.joined.add(name)
    for i, local in enumerate(node.flats):
        mine = old[name][i]
        if local is None or mine is None:
            rounds.append(None)
            continue
        kept = call.updates[name][i]
        assert kept is not None
        call.updates[name][i] = kept = reuse(kept)
        error = squeezed_part(layout, i, rank, kept)
        move = squeezed_part(layout, i, rank, (local - mine).to(kept.dtype))
        codecs = codecs_of(codec, layout, i)
        data = codecs[rank].pack_(move, error)
        if error.data_ptr() != kept.data_ptr():
            kept.copy_(spread_part(layout, i, rank, error))
        cuts = dense_of(layout, i).cuts
        parts = zip(codecs, pairwise(cuts), strict=True)
        at = (0, *accumulate(each.nbytes(b - a, kept.dtype) for each, (a, b) in parts))
        label = f"join {layout.units[layout.unit_of_flat[i]].name}"
        full = data.new_empty(at[-1])
        rounds.append((node.group.all_gather(full, data, cuts=at, label=label), at, kept.dtype))
    for i, started in enumerate(rounds):
        local = node.flats[i]
        if local is None:
            continue
        if started is None:
            base = local  # kept whole: every rank has made the same of it
        else:
            base = _old(layout, i, leaves, local, old[name][i], rank)
            _add(base, layout, i, codec, *started)
        for slot, view in zip(layout.by_flat[i], layout.views(i, base), strict=True):
            leaves[slot.index] = carry(view, leaves[slot.index])
    return layout.spec.unflatten(leaves)


def _there(layout: Layout, leaves: list[Any], node: Sharded, rank: int) -> bool:
    """Whether the old parameters can still be read, in their memory or in that of the new part."""
    for i, slots in enumerate(layout.by_flat):
        local, spec = node.flats[i], layout.flats[i]
        if local is None or not any(spent(leaves[slot.index]) for slot in slots):
            continue
        around = local.untyped_storage().nbytes() == spec.length * local.element_size()
        if spec.whole or not around or local.storage_offset() != spec.bounds(rank)[0]:
            return False
    return True


def _old(
    layout: Layout, flat: int, leaves: list[Any], local: Tensor, mine: Any, rank: int
) -> Tensor:
    """The full flat before the step, in memory of its own, or that of the old one if donated."""
    row = [leaves[slot.index] for slot in layout.by_flat[flat]]
    low, high = layout.flats[flat].bounds(rank)
    if any(spent(leaf) for leaf in row):
        base = full_around(local, layout.flats[flat].length, low)
        base[low:high] = mine
        return base
    full = layout.buffer_under(flat, row)
    return layout.pack(flat, row) if full is None else full.clone()


def _add(
    base: Tensor,
    layout: Layout,
    flat: int,
    codec: Codec,
    handle: Any,
    at: tuple[int, ...],
    dtype: torch.dtype,
) -> None:
    dense, data = dense_of(layout, flat), handle.wait()
    rows = zip(codecs_of(codec, layout, flat), pairwise(dense.cuts), pairwise(at), strict=True)
    moved = torch.cat([each.unpack(data[c:d], b - a, dtype) for each, (a, b), (c, d) in rows])
    for slot, start in zip(dense.slots, dense.starts, strict=True):
        base[slot.start : slot.start + slot.numel] += moved[start : start + slot.numel]


def gathered_bytes(codec: Codec, layout: Layout, rank: int) -> int:
    """Bytes that ``rank`` sends for one params entry."""
    total = 0
    for i, spec in enumerate(layout.flats):
        cuts = dense_of(layout, i).cuts
        if spec.trainable and not spec.whole and cuts[-1]:
            dtype = torch.float64 if spec.dtype == torch.float64 else torch.float32
            mine = codecs_of(codec, layout, i)[rank]
            total += mine.nbytes(cuts[rank + 1] - cuts[rank], dtype) * (layout.world - 1)
    return total
