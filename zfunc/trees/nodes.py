"""The kinds of nodes that zfunc adds to pytrees, and how a node becomes known.

Nodes are registered in optree's namespace ``"zfunc"`` and in torch's own pytree
registry, so that ``torch.func`` and ``torch.compile`` see them as well.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import optree
import torch
import torch.utils._pytree as torch_pytree
from torch import Tensor
from torch.overrides import TorchFunctionMode

from zfunc.trees.squares import square_sum

__all__ = [
    "HELD",
    "MAPPED",
    "NAMESPACE",
    "OPAQUE",
    "PLACED",
    "Box",
    "Frozen",
    "Layers",
    "Lazy",
    "LeafInfo",
    "Placed",
    "Span",
    "Tree",
    "Unprinted",
    "boxes_in",
    "held_in",
    "in_full",
    "leaves_in",
    "memory_of",
    "opened",
    "register",
]

NAMESPACE = "zfunc"
# The same nodes but some, which are leaves there: `is_leaf=` would ask Python about every leaf.
PLACED = "zfunc.placed"  # placed nodes and boxes are leaves
OPAQUE = "zfunc.opaque"  # and so are trees that are computed only if somebody looks
MAPPED = "zfunc.mapped"  # the same, but boxes are no leaves
HELD = "zfunc.held"  # boxes are leaves, and no others
Tree = Any
T = TypeVar("T", bound=type)


def register(
    cls: T,
    flatten: Callable[[Any], tuple[Sequence[Any], Any, Sequence[Any]]],
    unflatten: Callable[[Any, Any], Any],
    exact: Callable[[Any, Any], Any] | None = None,
) -> T:
    """Make ``cls`` a pytree node, for optree (namespace ``"zfunc"``) and for torch.

    Args:
        cls: the class.
        flatten: node -> ``(children, static, entries)``; ``static`` must be
            hashable and comparable, ``entries`` name the children in paths.
        unflatten: ``(static, children)`` -> node.
        exact: the same for torch, whose functions count on a node of this class, whatever its
            children are.

    Returns:
        ``cls``, so that it can be used behind a class definition.
    """

    def torch_flatten(node: Any) -> tuple[list[Any], Any]:
        children, static, _ = flatten(node)
        return list(children), static

    def torch_flatten_with_keys(node: Any) -> tuple[list[tuple[Any, Any]], Any]:
        children, static, entries = flatten(node)
        keys = [torch_pytree.MappingKey[Any, Any](entry) for entry in entries]
        return list(zip(keys, children, strict=True)), static

    for namespace in (NAMESPACE, PLACED, OPAQUE, MAPPED, HELD):
        if namespace not in getattr(cls, "leaf_in", ()):
            optree.register_pytree_node(cls, flatten, unflatten, namespace=namespace)
    torch_pytree.register_pytree_node(
        cls,
        torch_flatten,
        lambda children, static: (exact or unflatten)(static, list(children)),
        serialized_type_name=f"zfunc.{cls.__qualname__}",
        flatten_with_keys_fn=torch_flatten_with_keys,
    )
    return cls


class Layers(list[Any]):
    """A stack of layers' parameters: a list that marks each child as one unit.

    >>> Layers([{"w": 1}, {"w": 2}])[1]
    {'w': 2}
    """

    def __repr__(self) -> str:
        return f"Layers({super().__repr__()})"


register(
    Layers,
    lambda layers: (tuple(layers), None, tuple(range(len(layers)))),
    lambda _, children: Layers(children),
)


class Frozen(dict[str, Any]):
    """A dict of parameters; what it has under the keys ``frozen`` gets no gradient.

    So the structure of a tree says it, and copies that keep the structure cannot lose it.

    >>> import copy
    >>> copy.deepcopy(Frozen({"a": 1, "w": 2}, {"w"})).frozen
    frozenset({'w'})
    """

    frozen: frozenset[str]

    def __init__(self, items: Any, frozen: Iterable[str]) -> None:
        super().__init__(items)
        self.frozen = frozenset(frozen)

    def copy(self) -> Frozen:
        return Frozen(self, self.frozen)

    def __or__(self, other: Any) -> Any:
        return Frozen({**self, **other}, self.frozen) if isinstance(other, dict) else NotImplemented

    def __reduce__(self) -> tuple[Any, ...]:
        return Frozen, (dict(self), self.frozen)


def _flatten_frozen(node: Frozen) -> tuple[list[Any], Any, tuple[str, ...]]:
    keys = tuple(sorted(node))  # the order in which the leaves of a plain dict come
    return [node[key] for key in keys], (keys, node.frozen), keys


register(
    Frozen,
    _flatten_frozen,
    lambda static, children: Frozen(zip(static[0], children, strict=True), static[1]),
)


@dataclass(frozen=True)
class LeafInfo:
    """One full leaf of a placed tree: its keys from the node on, its shape and dtype.

    ``shape`` and ``dtype`` are ``None`` where the tree has no value. ``each``: its first
    dimension is the ranks, each of which has a row of its own.
    """

    keys: tuple[Any, ...]
    shape: tuple[int, ...] | None
    dtype: torch.dtype | None
    each: bool = False


@dataclass(frozen=True)
class Span:
    """Elements of one leaf, as a rank holds them: what goes to and from files.

    Attributes:
        index: of the leaf, in leaf order.
        start, stop: elements of ``leaf.reshape(-1)``; of ``rows`` where there are some.
        replicas: the ranks of the world that hold the same elements, this one among them.
        rows: which elements of the leaf are counted (a ``splits.Strided``), if not all.
    """

    index: int
    start: int
    stop: int
    replicas: tuple[int, ...]
    rows: Any = None


class Placed:
    """A node that stands for a whole subtree in another representation.

    Subclasses are values. They say what the functions of this module mean for
    them; ``others`` are the further arguments of a ``map``, each either a
    ``Placed`` node of the same tree or a plain tree of the same structure.

    Attributes:
        streams: whether what is computed with it is put off, and done unit by unit.
    """

    streams: ClassVar[bool] = False
    leaf_in: ClassVar[tuple[str, ...]] = (PLACED, OPAQUE, MAPPED)

    @property
    def placed_by(self) -> tuple[str, str] | None:
        """The name of the transform that placed it, and how that writes itself, if it is known."""
        return None

    def map(self, f: Callable[..., Any], others: Sequence[Any]) -> Any:
        """Apply an elementwise ``f`` to this node's data."""
        raise NotImplementedError

    def map_leaves(self, f: Callable[..., Any], others: Sequence[Any], prefix: str) -> Any:
        """Apply ``f(path, part, ...)`` to the local part of each leaf."""
        raise NotImplementedError

    def by_unit(self, f: Callable[..., Sequence[Any]], outs: int, others: Sequence[Any]) -> Any:
        """``f(part, ...)`` of the parts of one unit at a time, ``outs`` nodes; if it streams."""
        raise NotImplementedError

    def at_hand(self, number: Tensor) -> Tensor:
        """A 0-d tensor on the host, and with it what the update will need there; if it streams."""
        raise NotImplementedError

    def sums(self, f: Callable[[Tensor], Tensor]) -> Any:
        """A plain tree with ``f(leaf)`` (a 0-d sum over elements) at each leaf."""
        raise NotImplementedError

    def totals(self, parts: Mapping[str, Tensor], shape: tuple[int, ...] = ()) -> Any:
        """A plain tree of each leaf's sum over the ranks, of which each has its part already.

        A collective; where ranks hold the same they are counted once.

        Args:
            parts: by leaf path, of this rank's pieces; leaves of which it has none are left out.
            shape: of each part.
        """
        raise NotImplementedError

    @classmethod
    def sums_of(cls, nodes: Sequence[Any], f: Callable[[Tensor], Tensor]) -> list[Any]:
        """``sums`` of several nodes of this kind, together."""
        return [node.sums(f) for node in nodes]

    @classmethod
    def square_sums_of(cls, nodes: Sequence[Any]) -> list[Tensor]:
        """For each of several nodes the squares of its leaves' norms, 1-D, in leaf order."""
        trees = cls.sums_of(nodes, square_sum)
        rows = [optree.tree_leaves(sums, namespace=NAMESPACE) for sums in trees]
        return [torch.stack(row) if row else torch.zeros(0) for row in rows]

    def full(self) -> Any:
        """The plain tree; a collective."""
        raise NotImplementedError

    def whole(self, f: Callable[..., Tensor], others: Sequence[Any]) -> Any:
        """Apply ``f`` to one full leaf at a time; a collective."""
        raise NotImplementedError

    def get(self, path: str) -> Any:
        """The full value of the leaf or subtree at ``path``; a collective."""
        raise NotImplementedError

    def set(self, path: str, value: Any) -> Any:
        """A copy with the leaf at ``path`` replaced by the full ``value``."""
        raise NotImplementedError

    def held(self) -> Sequence[Tensor | None]:
        """The tensors that this rank holds."""
        raise NotImplementedError

    def sample(self, plain: Tree) -> Any:
        """A tiny plain tree, placed as this one would be in a world of one rank."""
        raise NotImplementedError

    def names(self) -> list[str]:
        """Dotted paths of the leaves, in leaf order."""
        raise NotImplementedError

    @property
    def num_leaves(self) -> int:
        """How many leaves the subtree has, those without a value included."""
        raise NotImplementedError

    def pieces(self) -> dict[int, Tensor]:
        """This rank's 1-D piece (perhaps empty) of each leaf that has a value, by leaf index."""
        raise NotImplementedError

    def join(self, params: Any) -> Any:
        """The plain tree ``params`` with this node's values, from all ranks, in place of its own.

        Leaves that this node lacks are passed on as they are. A collective; within a step the
        values may still be on their way (:mod:`zfunc.layout.arriving`).
        """
        raise NotImplementedError

    def select(self, keep: Callable[[str], bool]) -> Any:
        """This node restricted to the leaves whose path ``keep`` accepts."""
        raise NotImplementedError

    def merge(self, other: Any) -> Any:
        """This node with the leaves that it lacks taken from ``other``."""
        raise NotImplementedError

    def beneath(self, other: Any) -> Any:
        """``other``, which is in memory, with the leaves that it lacks taken from this node."""
        return other.merge(self)

    # To and from files, without ever holding more than one unit besides what is held anyway

    resident: bool = True
    """Whether the values lie in memory. Others are copied to files before `save` returns."""

    def leaf_infos(self) -> list[LeafInfo]:
        """What the full tree's leaves are, in leaf order; the same on all ranks."""
        raise NotImplementedError

    def spans(self) -> list[Span]:
        """What this rank holds, unit by unit; known without reading any value."""
        raise NotImplementedError

    def streamed(self) -> Iterator[tuple[Span, Tensor]]:
        """The values of :meth:`spans`, in that order; each a 1-D tensor, valid until the next."""
        raise NotImplementedError

    def refilled(self, fill: Callable[[Span, Tensor], None]) -> Any:
        """A new node of this placement; ``fill(span, out)`` writes the 1-D tensor ``out``.

        Called in the order of :meth:`spans`. Padding is zero, marks are kept, and this
        node is not changed.
        """
        raise NotImplementedError


class Box:
    """A plain tree, and what a transform knows of it; functions of pytrees see the tree.

    Attributes:
        tree: the tree.
        layout: how its leaves lie in buffers.
    """

    leaf_in: ClassVar[tuple[str, ...]] = (PLACED, OPAQUE, HELD)
    tree: Any
    layout: Any

    @property
    def placed_by(self) -> tuple[str, str] | None:
        """As of :class:`Placed`."""
        return None

    def held(self) -> Sequence[Tensor]:
        """The tensors in memory; leaves may be views of them."""
        raise NotImplementedError

    def views(self) -> Sequence[Tensor]:
        """The leaves that somebody may hold already, beside what is in memory."""
        raise NotImplementedError

    @property
    def flat(self) -> Placed | None:
        """The same tree as a node of a few buffers; ``None`` where its leaves lie in none."""
        raise NotImplementedError

    def standing(self) -> Placed | None:
        """A node that stands for the full tree, if the leaves are parts of full ones."""
        return None

    def staged(self) -> Placed | None:
        """As ``flat``, of leaves that are copied side by side for the time of an update."""
        raise NotImplementedError

    def boxed(self, new: Tree) -> Tree:
        """A plain tree in a box like this one, if its leaves could lie so."""
        raise NotImplementedError

    def holding(self, node: Any) -> Any:
        """A node like ``flat`` in a box like this one; what is none is passed on."""
        raise NotImplementedError

    def merged(self, other: Tree) -> Tree:
        """This tree with the leaves that it lacks taken from ``other``."""
        raise NotImplementedError

    def cut(self, layout: Any, rank: int) -> list[Tensor | None] | None:
        """What a rank owns of the buffers, if they are those of this layout."""
        raise NotImplementedError

    def replaced(
        self, layout: Any, flats: Sequence[Tensor | None], under_way: Mapping[int, Any]
    ) -> Any:
        """The tree with new values from full buffers of a layout, which may be under way."""
        raise NotImplementedError


_LEAVES = {Tensor, torch.nn.Parameter, type(None)}


class Unprinted(TorchFunctionMode):
    """Where two structures differ optree's error writes out both; a tensor's values would be
    waited for, on a GPU, and nobody reads them."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return "tensor" if func is Tensor.__repr__ else func(*args, **(kwargs or {}))


_UNPRINTED = Unprinted()


MISS = 20  # hits that pay for one miss
MOST = 256  # structures that are remembered


class _Known:
    """A structure, and whether trying it first pays.

    To find out a structure takes three times as long as to walk along it, and to learn that
    another one was expected forty times: optree writes out both.
    """

    __slots__ = ("credit", "spec")

    def __init__(self, spec: optree.PyTreeSpec) -> None:
        self.spec, self.credit = spec, MISS

    def leaves(self, tree: Tree, namespace: str) -> list[Any] | None:
        """The leaves of a tree of this structure, if it is worth while to ask."""
        if self.credit < 0:
            self.credit += 1
            return None
        try:
            with _UNPRINTED:
                items = self.spec.flatten_up_to(tree)
        except (ValueError, TypeError):
            self.credit -= MISS
            return None
        self.credit = min(self.credit + 1, 4 * MISS)
        odd = set(map(type, items)) - _LEAVES  # a subtree may stand where a leaf was
        strange = [x for x in items if type(x) in odd] if odd else []
        fits = optree.all_leaves(strange, none_is_leaf=True, namespace=namespace)
        return items if fits else None


class _Seen(threading.local):
    """Structures by what tells them at a glance. Ranks that are threads have equal layouts, which
    are long to compare; those of one rank are the same."""

    def __init__(self) -> None:
        self.specs: dict[Any, _Known] = {}


_seen = _Seen()


def _glance(tree: Any) -> tuple[Any, ...]:
    """What tells a tree from most others without walking along it."""
    seen: list[Any] = []
    todo = [(tree, True)]
    while todo:
        x, deep = todo.pop()
        seen.append(None if isinstance(x, Tensor) else type(x))
        if isinstance(x, dict):
            seen += len(x), next(iter(x), None)
        elif (layout := getattr(x, "__dict__", {}).get("layout")) is not None:
            seen.append(id(layout))
        elif isinstance(x, tuple | list):
            seen.append(len(x))
            todo += [(y, deep) for y in x[:8]] if isinstance(x, tuple) else ()
        elif seen[-1] and deep and hasattr(x, "__dict__"):
            seen.append(len(x.__dict__))
            todo += [(y, False) for y in x.__dict__.values()]
    return tuple(seen)


def leaves_in(tree: Tree, namespace: str = NAMESPACE) -> list[Any]:
    """The leaves of a tree, ``None`` aside; in an ``OrderedDict`` perhaps in another order.

    A step asks for those of its state time and again. Walking along a structure that is known
    takes a tenth of finding it out. optree walks along that of a ``dict`` through an
    ``OrderedDict`` of the same keys, too: who pairs leaves with paths or values flattens.

    >>> leaves_in({"b": None, "a": [1, 2]})
    [1, 2]
    """
    if type(tree) is Tensor:
        return [tree]
    key = namespace, _glance(tree)
    known = _seen.specs.get(key)
    items = None if known is None else known.leaves(tree, namespace)
    if items is None:
        items, spec = optree.tree_flatten(tree, none_is_leaf=True, namespace=namespace)
        if len(items) > 1 and not _holds(spec):
            if len(_seen.specs) >= MOST:
                _seen.specs.clear()
            _seen.specs.setdefault(key, _Known(spec)).spec = spec
    return [x for x in items if x is not None]


def memory_of(tree: Tree) -> tuple[list[Tensor], list[Box]]:
    """The tensors that a tree has in memory, of which its leaves may be views, and its boxes."""
    found = leaves_in(tree, HELD)
    boxes = [x for x in found if isinstance(x, Box)]
    rows = (x.held() if isinstance(x, Box) else [x] for x in found) if boxes else [found]
    return [x for row in rows for x in row if isinstance(x, Tensor)], boxes


def held_in(tree: Tree) -> list[Tensor]:
    """The tensors that a tree has in memory, of which its leaves may be views."""
    return memory_of(tree)[0]


def boxes_in(tree: Tree) -> list[Box]:
    """The boxes in a tree."""
    return memory_of(tree)[1]


def opened(tree: Tree) -> Tree:
    """A tree with plain trees in place of boxes; itself if there are none."""
    return tree.tree if isinstance(tree, Box) else _instead_of_boxes(tree, lambda box: box.tree)


def in_full(tree: Tree) -> Tree:
    """A tree with nodes that know the full leaves in place of boxes that hold parts of them."""
    return _instead_of_boxes(tree, lambda box: box if (it := box.standing()) is None else it)


def _instead_of_boxes(tree: Tree, f: Callable[[Box], Any]) -> Tree:
    if not boxes_in(tree):
        return tree
    one = lambda x: f(x) if isinstance(x, Box) else x  # noqa: E731
    return optree.tree_map(one, tree, none_is_leaf=True, namespace=OPAQUE)


def _holds(spec: optree.PyTreeSpec) -> bool:
    """Whether a structure keeps values alive: one of a node that only it can rebuild does."""
    static = gc.get_referents(spec)
    static += [y for x in static if type(x) is tuple for y in x]
    return any(isinstance(x, Placed | Lazy | Tensor) for x in static)


class Lazy:
    """A tree that is computed only if somebody looks; it reads like the tree that it stands for."""

    leaf_in: ClassVar[tuple[str, ...]] = (OPAQUE, MAPPED)

    def force(self) -> Tree:
        """The tree itself, which may be a dict or a single tensor."""
        raise NotImplementedError

    def __getitem__(self, entry: Any) -> Any:
        return self.force()[entry]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # copying and unpickling ask for such names before there is a tree
            raise AttributeError(name)
        return getattr(self.force(), name)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.force())

    def __len__(self) -> int:
        return len(self.force())

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Functions of torch see the tree: flattening a lazy node computes it."""
        values: Any = [*args, kwargs or {}]
        values = optree.tree_map(lambda x: x, values, namespace=NAMESPACE)
        return func(*values[:-1], **values[-1])
