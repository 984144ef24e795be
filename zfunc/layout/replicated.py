"""``Replicated``: a tree that every rank holds whole, and where its leaves lie.

At ZeRO stages 0 to 2 the parameters are such a node. To whoever indexes it or iterates over it,
and to every function of pytrees, it is the tree itself, with plain tensors at its leaves. Beside
them it knows its layout, and the flats whose views the leaves are, so that a step computes with a
few buffers. Views are made when somebody asks for them.

New parameters of stages 1 and 2 are gathered when a step ends. The node is returned before they
are there. Whoever looks at it waits for all of it, and the next step waits for one unit after
the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from threading import RLock
from typing import Any

import optree
import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from zfunc.errors import DesyncError, DonatedStateError, PlacementError
from zfunc.layout.arriving import Arrival
from zfunc.layout.freezing import freeze
from zfunc.layout.layout import Layout, whole
from zfunc.layout.pieces import cut_flats, leaves_of, stored
from zfunc.layout.pool import empty, pool
from zfunc.layout.sharded import Sharded, replaced
from zfunc.ranks.comm import Group, groups_of
from zfunc.ranks.world import current
from zfunc.trees import memory
from zfunc.trees.marks import gone, spent
from zfunc.trees.nodes import Box, Tree, Unprinted, opened, register

__all__ = ["Replicated", "boxed", "gathered_again", "packed"]

Take = Callable[[int, torch.dtype, torch.device | None], Tensor]
_ONE_AT_A_TIME = RLock()  # threads that read a state get the same leaves


class Replicated(Box):
    """A whole tree with a layout; give it the tree, or the flats.

    Attributes:
        layout: how the leaves lie in flats.
        under_way: for each flat that is being gathered, what to wait for.
    """

    def __init__(
        self,
        layout: Layout,
        tree: Tree = None,
        flats: Sequence[Tensor | None] | None = None,
        under_way: Mapping[int, Arrival] | None = None,
    ) -> None:
        self.layout = layout
        self.under_way = dict(under_way or {})
        self._tree = tree
        self._flats = None if flats is None else tuple(flats)
        self._read: list[Any] = []
        if tree is not None and layout.along is not None:
            for slot, leaf in zip(layout.slots, self.leaves, strict=True):
                if isinstance(leaf, Tensor):
                    layout.marked(slot, leaf)

    @property
    def placed_by(self) -> tuple[str, str] | None:
        return self.layout.by

    # What it holds

    @property
    def flats(self) -> tuple[Tensor | None, ...] | None:
        """The flats, which may be under way; ``None`` where the leaves do not lie in any.

        Whoever has looked into the tree may have written to its containers: then it counts.
        """
        if self._tree is not None:
            leaves = self.leaves
            if any(map(spent, leaves)):
                return None
            with _outside_of_functorch():
                self._flats = _flats_under(self.layout, leaves, self._flats)
        return self.buffers

    @property
    def buffers(self) -> tuple[Tensor | None, ...] | None:
        """The flats as they were when somebody asked last; they may be spent."""
        return None if not self._flats and self.layout.flats else self._flats

    @property
    def leaves(self) -> list[Any]:
        """The leaves by leaf index, ``None`` where there is no value.

        Raises:
            PlacementError: somebody has changed the structure of the tree.
        """
        try:
            return list(self.layout.spec.flatten_up_to(self.tree))
        except (ValueError, TypeError):
            raise PlacementError(
                "the structure of a placed tree was changed in place: a step keeps the structure "
                "of its params."
            ) from None

    @property
    def tree(self) -> Tree:
        """The tree itself, of plain tensors."""
        if self._tree is None:
            with _outside_of_functorch():
                self.wait()
                with _ONE_AT_A_TIME:
                    self._make()
        return self._tree

    def _make(self) -> None:
        if self._tree is not None:
            return  # by another thread
        self._read = self._views()
        self._tree = optree.tree_unflatten(self.layout.spec, self._read)
        if (running := memory.current()) is not None:
            running.looked_into.add(self)

    def _views(self) -> list[Any]:
        layout, flats = self.layout, self._flats or ()
        leaves: list[Any] = [None] * len(layout.slots)
        for i, (flat, row) in enumerate(zip(flats, layout.by_flat, strict=True)):
            if flat is None or not row:
                continue
            if spent(flat):
                raise DonatedStateError(flat.__dict__.get("_zfunc_story") or gone(row[0].path))
            for slot, view in zip(row, layout.views(i, flat.detach()), strict=True):
                layout.marked(slot, view)
                leaves[slot.index] = view if layout.flats[i].trainable else freeze(view)
        return leaves

    def packed(self, take: Take = empty) -> Replicated | None:
        """The same tree, its leaves in flats, copied there if need be, in memory from ``take``.

        ``None`` where leaves of one flat have a value and others have none.
        """
        if self.flats is not None:
            return self
        leaves, flats = self.leaves, []
        for i, row in enumerate(self.layout.by_flat):
            some = [leaves[slot.index] for slot in row]
            if not _could_lie(self.layout, leaves):
                return None
            lacking = sum(x is None for x in some)
            if 0 < lacking < len(row):
                return None
            flats.append(None if lacking else self.layout.pack(i, some, take))
        return Replicated(self.layout, flats=flats)

    @property
    def flat(self) -> Sharded | None:
        if (flats := self.flats) is None:
            return None
        self.wait()
        return Sharded(whole(self.layout), flats)

    def standing(self) -> Sharded | None:
        if self.layout.along is None:
            return None
        if (known := self.flat) is not None:
            return known
        leaves = self.leaves
        here = whole(self.layout).select(lambda i: leaves[i] is not None)
        return Sharded(here, cut_flats(here, self.tree, 0))

    def staged(self) -> Sharded | None:
        packed = self.packed(pool().take)
        return None if packed is None else packed.flat

    def boxed(self, new: Tree) -> Tree:
        return boxed(self.layout, new)

    def holding(self, node: Any) -> Any:
        if not isinstance(node, Sharded) or node.layout.axis != ():
            return node
        if node.layout is (mine := whole(self.layout)) or node.layout == mine:
            return Replicated(self.layout, flats=node.flats)
        return self.boxed(Replicated(node.layout, flats=node.flats).tree)  # of some of the leaves

    def cut(self, layout: Layout, rank: int) -> list[Tensor | None] | None:
        if self.layout != layout or (flats := self.flats) is None:
            return None
        self.wait()
        rows = [(x, *spec.bounds(rank)) for x, spec in zip(flats, layout.flats, strict=True)]
        return [x if x is None else x.detach()[low:high] for x, low, high in rows]

    def replaced(
        self, layout: Layout, flats: Sequence[Tensor | None], under_way: Mapping[int, Arrival]
    ) -> Tree:
        if layout == self.layout and (None not in flats or self.flats is not None):
            old = self.flats or flats
            new = [b if a is None else a for a, b in zip(flats, old, strict=True)]
            left = {i: x for i, x in self.under_way.items() if flats[i] is None}
            return Replicated(layout, None, new, {**left, **under_way})
        for arrival in under_way.values():
            arrival.finish()
        return boxed(self.layout, replaced(layout, flats, self.tree))

    def merged(self, other: Tree) -> Tree:
        """This tree with the leaves that it lacks taken from ``other``."""
        flats = self.flats
        if flats and None not in flats:
            return self
        if flats and isinstance(other, Replicated):
            return other.replaced(self.layout, flats, self.under_way)
        theirs = self.layout.spec.flatten_up_to(opened(other))
        leaves = [b if a is None else a for a, b in zip(self.leaves, theirs, strict=True)]
        return boxed(self.layout, optree.tree_unflatten(self.layout.spec, leaves))

    def held(self) -> list[Tensor]:
        """The tensors in memory, which may be under way: the flats, or leaves that lie in none."""
        flats = self.flats
        return [x for x in (self.leaves if flats is None else flats) if isinstance(x, Tensor)]

    def wait(self, flats: Sequence[int] | None = None) -> None:
        """Wait until some flats, or all, are there.

        Raises:
            DesyncError: a peer took another path; the message names the unit.
        """
        for i in list(self.under_way) if flats is None else flats:
            if (arrival := self.under_way.get(i)) is not None:
                arrival.finish()
                self.under_way.pop(i, None)

    def views(self) -> list[Tensor]:
        """The leaves, if somebody has asked for them."""
        leaves = [] if self._tree is None else self.leaves
        both = {id(x): x for x in (*self._read, *leaves) if isinstance(x, Tensor)}
        return list(both.values())

    def __reduce__(self) -> tuple[Any, ...]:
        self.wait()
        flats = self.flats
        return Replicated, (self.layout, None if flats else self.tree, flats or None)

    # It is read like the tree that it holds

    def forms(self) -> Tree:
        """What its leaves are; those that are under way are not waited for."""
        from zfunc.layout.forms import forms  # where something is shown

        return forms(self.layout)

    def __repr__(self) -> str:
        from zfunc.trees.forms import as_text, form

        return as_text(form(self))

    def _repr_html_(self) -> str:
        from zfunc.trees.forms import as_html, form

        return as_html(form(self))

    def __getitem__(self, entry: Any) -> Any:
        return self.tree[entry]

    def __setitem__(self, entry: Any, value: Any) -> None:
        self.tree[entry] = value

    def __delitem__(self, entry: Any) -> None:
        del self.tree[entry]

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self.tree, name, value)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in _OWN:
            raise AttributeError(name)
        return getattr(self.tree, name)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.tree)

    def __len__(self) -> int:
        return len(self.tree)

    def __contains__(self, entry: Any) -> bool:
        return entry in self.tree

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = opened((args, kwargs or {}))
        return func(*args, **kwargs)

    def __bool__(self) -> bool:
        return bool(self.tree)

    def __eq__(self, other: Any) -> Any:
        return self.tree == other if self.layout.spec.is_leaf() else self is other

    def __ne__(self, other: Any) -> Any:
        return self.tree != other if self.layout.spec.is_leaf() else self is not other

    __hash__ = object.__hash__


_OWN = ("layout", "under_way", "_tree", "_flats", "_read")  # absent while a node is being made
_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "matmul", "pow", "or", "and")
_OTHERS = ("neg", "abs", "lt", "le", "gt", "ge", "reversed")


def _operator(name: str) -> Callable[..., Any]:
    def operate(self: Replicated, *args: Any) -> Any:
        known = getattr(self.tree, name, None)
        return NotImplemented if known is None else known(*args)

    return operate


for _name in (*_BINARY, *(f"r{name}" for name in _BINARY), *_OTHERS):
    setattr(Replicated, f"__{_name}__", _operator(f"__{_name}__"))


def _outside_of_functorch() -> AbstractContextManager[Any]:
    """``torch.func`` forbids to write to what it is not given, and wraps whatever is made."""
    active = torch._C._are_functorch_transforms_active()
    return temporarily_clear_interpreter_stack() if active else nullcontext()


def _flats_under(
    layout: Layout, leaves: Sequence[Any], known: Sequence[Tensor | None] | None
) -> tuple[Tensor | None, ...]:
    """The flats that the leaves are views of, those that are known if it is these; else none."""
    flats: list[Tensor | None] = []
    for i, row in enumerate(layout.by_flat):
        some = [leaves[slot.index] for slot in row]
        old = known[i] if known else None
        if all(x is None for x in some):
            flats.append(None if row else layout.pack(i, some) if old is None else old)
            continue
        if not all(isinstance(x, Tensor) for x in some):
            return ()
        if any(x.requires_grad for x in some) or [x.shape for x in some] != layout.shapes[i]:
            return ()
        if (found := layout.buffer_under(i, some)) is None:
            return ()
        same = old is not None and not spent(old) and old.data_ptr() == found.data_ptr()
        flats.append(old if same else found)
    return tuple(flats)


def boxed(layout: Layout, tree: Tree) -> Tree:
    """A tree with a layout as one node, if it is one of tensors that could lie so."""
    if isinstance(tree, Replicated):
        return tree
    try:
        with Unprinted():
            leaves: list[Any] = layout.spec.flatten_up_to(tree)
    except (ValueError, TypeError):
        return tree
    return Replicated(layout, tree) if _could_lie(layout, leaves) else tree


def _could_lie(layout: Layout, leaves: Sequence[Any]) -> bool:
    """Whether leaves are tensors of a layout's shapes, of one dtype in each flat."""
    for x, slot in zip(leaves, layout.slots, strict=True):
        if x is None:
            continue
        if slot is None or not isinstance(x, Tensor):
            return False
        if x.shape != slot.own and not spent(x):
            return False
    plain = ([slot for slot in row if slot.code is None] for row in layout.by_flat)
    rows = ([leaves[slot.index] for slot in row] for row in plain)
    return all(len({x.dtype for x in row if x is not None}) <= 1 for row in rows)


register(
    Replicated,
    lambda node: ((node.tree,), node.layout, ("",)),
    lambda layout, children: boxed(layout, children[0]),
    exact=lambda layout, children: Replicated(layout, children[0]),
)


def gathered_again(boxes: Sequence[Replicated], everyone: Group) -> None:
    """Let flats arrive whose gathers ended with an earlier epoch of the world; a collective.

    What has arrived on a rank it sends to those where it has not. Where a flat has arrived on no
    rank of its group it is gathered anew: each rank's own part is where it was.

    Args:
        boxes: those of one state, alike on all ranks.
        everyone: the ranks of the world.
    """
    waiting: dict[tuple[int, int], Arrival] = {}
    for k, box in enumerate(boxes):
        for i, arrival in list(box.under_way.items()):
            try:
                box.wait((i,))
            except DesyncError:
                waiting[k, i] = arrival
    mine = [[*key, list(arrival.group.members)] for key, arrival in waiting.items()]
    missing: dict[tuple[int, int, tuple[int, ...]], set[int]] = {}
    for rank, row in enumerate(everyone.exchange(mine, label="still under way")):
        for k, i, members in row:
            missing.setdefault((k, i, tuple(members)), set()).add(rank)
    groups = {group.members: group for group in groups_of(current())}
    for (k, i, members), ranks in sorted(missing.items()):
        if everyone.rank not in members:
            continue
        flats, here = boxes[k].flats, waiting.get((k, i))
        flat = None if flats is None else flats[i]
        assert flat is not None
        if len(ranks) < len(members):
            source = next(r for r, rank in enumerate(members) if rank not in ranks)
            groups[members].broadcast(flat.detach(), source, label="still under way").wait()
        elif here is not None:
            here.handle = here.again()
            here.finish()
        boxes[k].under_way.pop(i, None)


def packed(layout: Layout, node: Tree) -> Replicated:
    """A copy of a plain tree, in the layout's full flats."""
    leaves, flats = stored(layout, leaves_of(layout, opened(node))), []
    for i, row in enumerate(layout.by_flat):
        some = [leaves[slot.index] for slot in row]
        alive = not row or any(x is not None for x in some)
        flats.append(layout.pack(i, some) if alive else None)
    return Replicated(layout, flats=flats)
