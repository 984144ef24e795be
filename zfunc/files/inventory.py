"""The leaves of a state, by their names in files.

Names are those of the full, plain tree, however the state is placed here. That is why a state
saved by any world and stage can be restored into any other.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import optree
import torch
from torch import Tensor

from zfunc.errors import CheckpointError
from zfunc.files.elements import Elements, elements_of
from zfunc.ranks.comm import even_cuts
from zfunc.ranks.meshes import laid_out
from zfunc.ranks.world import current
from zfunc.trees.marks import carry, part_of
from zfunc.trees.nodes import NAMESPACE, Box, Lazy, LeafInfo, Placed, Span, in_full, opened
from zfunc.trees.tree import check_alive, dotted

__all__ = ["Inventory", "TensorLeaf", "full_names", "own_share", "rebuilt", "shares", "take_stock"]

SHARE = 1 << 12  # elements: what ranks hold in common is divided in multiples of it
Fill = Callable[[str, Elements, Tensor], None]


@dataclass(frozen=True)
class TensorLeaf:
    """A full tensor leaf: its shape and dtype.

    ``each``: it has a row for each rank, and starts from their mean on other numbers of ranks.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    each: bool = False

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class Inventory:
    """The leaves of a state.

    Attributes:
        tensors: name -> shape and dtype of every full tensor, on all ranks the same.
        static: name -> value of every other leaf: numbers, strings, ``None``.
        rows: the tree's nodes (``Placed`` ones count as one leaf), each with the names
            of its leaves.
        spec: the structure above the rows.
        boxes: by row, boxes of parts of leaves, in whose place placed nodes stand.
    """

    tensors: dict[str, TensorLeaf]
    static: dict[str, Any]
    rows: tuple[tuple[Any, tuple[str, ...]], ...]
    spec: optree.PyTreeSpec
    boxes: Mapping[int, Box]

    def spans(self) -> list[tuple[str, Span]]:
        """What this rank holds, in the order in which ``streamed`` gives it."""
        return [(name, span) for node, names in self.rows for name, span in _spans(node, names)]

    def streamed(
        self, resident: bool | None = None, common: bool = False
    ) -> Iterator[tuple[str, Span, Tensor]]:
        """The values, each a 1-D tensor that is valid until the next.

        Args:
            resident: only those of nodes that lie in memory (or only the others).
            common: only those of nodes of which other ranks hold something, too.
        """
        for node, names in self.rows:
            if resident is not None and resident != getattr(node, "resident", True):
                continue
            if common and not any(len(span.replicas) > 1 for _, span in _spans(node, names)):
                continue
            if isinstance(node, Placed):
                for span, x in node.streamed():
                    yield names[span.index], span, x
            elif isinstance(node, Tensor):
                ((name, span),) = _spans(node, names)
                yield name, span, node.detach().reshape(-1)


def take_stock(state: Any) -> Inventory:
    """The inventory of a plain or placed state.

    Raises:
        DonatedStateError: its memory belongs to a later state.
        CheckpointError: it holds something that cannot be written without pickle.
    """
    check_alive(state)
    keys, _, _ = _flatten(opened(in_full(state)))
    _, nodes, spec = _flatten(state)
    boxes = {i: node for i, node in enumerate(nodes) if isinstance(node, Box)}
    nodes = [in_full(node) if i in boxes else node for i, node in enumerate(nodes)]
    infos = [_infos_of(node) for node in nodes]
    full_keys = [(*key, *info.keys) for key, row in zip(keys, infos, strict=True) for info in row]
    names = iter(full_names(full_keys))
    tensors: dict[str, TensorLeaf] = {}
    static: dict[str, Any] = {}
    rows = []
    for node, row in zip(nodes, infos, strict=True):
        mine = tuple(next(names) for _ in row)
        rows.append((node, mine))
        for name, info in zip(mine, row, strict=True):
            if info.shape is not None and info.dtype is not None:
                tensors[name] = TensorLeaf(info.shape, info.dtype, info.each)
            else:
                static[name] = None if isinstance(node, Placed) else _checked(name, node)
    return Inventory(tensors, static, tuple(rows), spec, boxes)


def _flatten(state: Any) -> tuple[list[tuple[Any, ...]], list[Any], optree.PyTreeSpec]:
    keys, nodes, spec = optree.tree_flatten_with_path(
        state,
        is_leaf=lambda x: isinstance(x, Placed | Lazy) or _of_parts(x),
        none_is_leaf=True,
        namespace=NAMESPACE,
    )
    if any(isinstance(node, Lazy) for node in nodes):
        forced = [node.force() if isinstance(node, Lazy) else node for node in nodes]
        return _flatten(optree.tree_unflatten(spec, forced))
    return keys, nodes, spec


def _of_parts(x: Any) -> bool:
    return isinstance(x, Box) and x.layout.along is not None


def _infos_of(node: Any) -> list[LeafInfo]:
    if isinstance(node, Placed):
        return node.leaf_infos()
    if isinstance(node, Tensor):
        split = None if (part := part_of(node)) is None else part.split
        shape = tuple(node.shape) if split is None else split.full(node.shape)
        return [LeafInfo((), shape, node.dtype)]
    return [LeafInfo((), None, None)]


def _checked(name: str, value: Any) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise CheckpointError(
        f"{name or 'the state'} is a {type(value).__module__}.{type(value).__qualname__}, which a "
        "checkpoint cannot hold: its leaves are tensors, numbers, strings and None (nothing is "
        "pickled). Make it a tensor, or keep it out of the state."
    )


def _spans(node: Any, names: Sequence[str]) -> list[tuple[str, Span]]:
    if isinstance(node, Placed):
        return [(names[span.index], span) for span in node.spans()]
    return [(names[0], _span(node))] if isinstance(node, Tensor) else []


def _span(leaf: Tensor) -> Span:
    """What this rank holds of a plain leaf: all of it, but for one that is marked as a part."""
    if (part := part_of(leaf)) is None or part.split is None:
        return Span(0, 0, leaf.numel(), tuple(range(current().size)))
    mesh, rank = laid_out(part.mesh), current().rank
    others = tuple(name for name in mesh.names if name != part.axis)
    same = mesh.members(others, rank) if others else (rank,)
    return Span(0, 0, leaf.numel(), same, part.split.rows(leaf.shape, part.group.rank))


def full_names(keys: Sequence[tuple[Any, ...]]) -> list[str]:
    """The dotted paths; leaves whose dotted paths are the same are told apart by their keys.

    >>> full_names([("a", "b"), ("c",), ("a.b",)])
    ["'a'/'b'", 'c', "'a.b'"]
    """
    names = [dotted(*key) for key in keys]
    twice = {name for name, count in Counter(names).items() if count > 1}
    return [
        "/".join(map(repr, key)) if name in twice else name
        for name, key in zip(names, keys, strict=True)
    ]


def shares(span: Span) -> list[tuple[int, int]]:
    """The positions in a span that each of its ranks writes, so that each is written once."""
    numel = span.stop - span.start
    cuts = even_cuts(-(-numel // SHARE), len(span.replicas))
    return list(pairwise(min(cut * SHARE, numel) for cut in cuts))


def own_share(span: Span) -> tuple[int, int]:
    """The positions in a span that this rank writes."""
    return shares(span)[span.replicas.index(current().rank)]


def rebuilt(
    stock: Inventory, static: dict[str, Any], fill: Fill, lacking: Collection[str] = ()
) -> Any:
    """A state placed like the one in ``stock``, with new values.

    Args:
        static: the values of its leaves that are no tensors.
        fill: ``fill(name, elements, out)`` writes these of the full leaf to the 1-D tensor
            ``out``.
        lacking: names of leaves without a new value: plain ones stay as they are, and placed
            ones, errors that none have been left out of yet, are zero.
    """
    plain = iter(_arranged([node for node, _ in stock.rows if isinstance(node, Tensor)]))
    nodes = []
    for i, (node, names) in enumerate(stock.rows):
        if isinstance(node, Placed):
            new = node.refilled(_filling(fill, names, lacking))
            nodes.append(stock.boxes[i].holding(new) if i in stock.boxes else new)
        elif isinstance(node, Tensor):
            new = next(plain)
            if names[0] in lacking:
                new.copy_(node)
            else:
                _fill_whole(fill, names[0], elements_of(_span(node)), new)
            nodes.append(carry(new, node))
        else:
            nodes.append(static[names[0]])
    return optree.tree_unflatten(stock.spec, nodes)


def _filling(
    fill: Fill, names: Sequence[str], lacking: Collection[str]
) -> Callable[[Span, Tensor], None]:
    def one(span: Span, out: Tensor) -> None:
        if names[span.index] in lacking:
            out.zero_()
        else:
            fill(names[span.index], elements_of(span), out)

    return one


def _fill_whole(fill: Fill, name: str, elements: Elements, out: Tensor) -> None:
    if out.is_contiguous():
        fill(name, elements, out.view(-1))
        return
    flat = torch.empty(out.numel(), dtype=out.dtype, device=out.device)
    fill(name, elements, flat)
    out.copy_(flat.view(out.shape))


def _arranged(leaves: Sequence[Tensor]) -> list[Tensor]:
    """Fresh tensors like these; those that lie in one buffer lie in one buffer again.

    ``place`` packs the leaves of a unit into one flat, which the step counts on where it
    can. Leaves that overlap, or use little of their buffer, get memory of their own.
    """
    together: dict[int, list[Tensor]] = {}
    for x in leaves:
        if x.numel():
            together.setdefault(x.untyped_storage().data_ptr(), []).append(x)
    buffers: dict[int, Tensor] = {}
    for at, row in together.items():
        whole = row[0].untyped_storage().nbytes()
        if _apart(row) and whole <= 2 * sum(x.nbytes for x in row) + 4096:
            buffers[at] = torch.zeros(whole, dtype=torch.uint8, device=row[0].device)
    return [_placed_in(buffers, x) for x in leaves]


def _apart(row: Sequence[Tensor]) -> bool:
    """Whether no byte belongs to two elements."""
    end = 0
    for x in sorted(row, key=lambda x: x.data_ptr()):
        start = int(x.storage_offset()) * x.element_size()
        if not x.is_contiguous() or start < end:
            return False
        end = start + x.nbytes
    return True


def _placed_in(buffers: dict[int, Tensor], x: Tensor) -> Tensor:
    base = buffers.get(x.untyped_storage().data_ptr()) if x.numel() else None
    if base is None or base.numel() % x.element_size():
        return torch.zeros_like(x)  # keeps the strides, too
    return base.view(x.dtype).as_strided(x.shape, x.stride(), x.storage_offset())
