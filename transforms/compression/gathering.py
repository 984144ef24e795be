"""New parameters of ZeRO 1 and 2 on their way to all ranks, as compressed updates.

Every rank has the parameters whole and updates the part that it owns. Instead of that part it may
send what the step has changed in it, packed, and keep what packing left out for the next step. All
ranks, the owner too, add the same numbers to the same parameters, so they stay equal.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from zfunc.engine.entries import Entries
from zfunc.errors import CompositionError
from zfunc.layout.dense import dense_of, spread_part, squeezed_part
from zfunc.layout.layout import Layout
from zfunc.layout.pieces import full_around
from zfunc.layout.replicated import Replicated
from zfunc.layout.sharded import Sharded, cut
from zfunc.transforms.compression.averaging import has_copies
from zfunc.transforms.compression.error_feedback import Call
from zfunc.transforms.compression.exchange import Codec, codecs_of
from zfunc.transforms.compression.onebit import OneBit
from zfunc.transforms.compression.quantized import Int4, Int8
from zfunc.trees.marks import spent
from zfunc.trees.memory import reuse
from zfunc.trees.nodes import Tree

__all__ = ["GATHERS", "Half", "before", "check_gather", "joined"]


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


def before(state: Any, names: Collection[str], rank: int) -> dict[str, list[Tensor | None]]:
    """A copy of what this rank owns of the params entries: a step may update it in place."""
    out: dict[str, list[Tensor | None]] = {}
    for name in names:
        entry = Entries(state).get(name)
        if isinstance(entry, Replicated):
            layout = entry.layout
            flats = cut(layout, entry, rank, copy=True).flats
            moves = [
                row and flat.trainable and not flat.whole
                for row, flat in zip(layout.by_flat, layout.flats, strict=True)
            ]
            out[name] = [x if moving else None for x, moving in zip(flats, moves, strict=True)]
    return out


def joined(
    call: Call,
    codec: Codec,
    old: Mapping[str, list[Tensor | None]],
    node: Sharded,
    params: Tree,
) -> Tree | None:
    """The whole tree ``params`` after a step, or ``None`` where it must be gathered as it is.

    Args:
        old: what :func:`before` gave.
        node: what this rank has made of its part.
    """
    name, layout, rank = call.entry_of(node.layout), node.layout, node.group.rank
    if not isinstance(params, Replicated) or (flats := params.buffers) is None:
        return None
    params.wait()
    rounds: list[tuple[Any, tuple[int, ...], torch.dtype] | None] = []
    if name is None or name in call.joined or not _there(layout, flats, node, rank):
        return None
    call.joined.add(name)
    exact: dict[int, Any] = {}
    for i, local in enumerate(node.flats):
        mine, label = old[name][i], f"join {layout.units[layout.unit_of_flat[i]].name}"
        if local is None or mine is None:
            rounds.append(None)
            continue
        if has_copies(layout.by_flat[i]):
            full, cuts = local.new_empty(layout.flats[i].length), layout.flats[i].cuts
            exact[i] = node.group.all_gather(full, local, cuts=cuts, label=label)
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
        full = data.new_empty(at[-1])
        rounds.append((node.group.all_gather(full, data, cuts=at, label=label), at, kept.dtype))
    new = []
    for i, started in enumerate(rounds):
        local = node.flats[i]
        if i in exact:
            new.append(exact[i].wait())
            continue
        if local is None or started is None:
            new.append(local)  # kept whole: every rank has made the same of it
            continue
        base = _old(layout, i, flats[i], local, old[name][i], rank)
        _add(base, layout, i, codec, *started)
        new.append(base)
    return params.replaced(layout, new, {})


def _there(layout: Layout, flats: Sequence[Tensor | None], node: Sharded, rank: int) -> bool:
    """Whether the old parameters can still be read, in their memory or in that of the new part."""
    for spec, old, local in zip(layout.flats, flats, node.flats, strict=True):
        if local is None or not spent(old):
            continue
        around = local.untyped_storage().nbytes() == spec.length * local.element_size()
        if spec.whole or not around or local.storage_offset() != spec.bounds(rank)[0]:
            return False
    return True


def _old(
    layout: Layout, flat: int, full: Tensor | None, local: Tensor, mine: Any, rank: int
) -> Tensor:
    """The full flat before the step, in memory of its own, or that of the old one if donated."""
    if full is not None and not spent(full):
        return full.clone()
    low, high = layout.flats[flat].bounds(rank)
    base = full_around(local, layout.flats[flat].length, low)
    base[low:high] = mine
    return base


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
