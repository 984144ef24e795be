"""Pytrees: one vocabulary for plain trees and for placed ones.

A *plain* tree has tensors at its leaves. A *placed* tree holds one or more :class:`Placed` nodes,
each the representation of a whole subtree that some transform chose (``shard``: this rank's part of
it). Every function below is right on both, and on a mixture, because a ``Placed`` node says itself
what ``map``, ``sums`` and ``full`` mean for it; this module knows no transform.

``None`` is a leaf here: it stands where a tree has no value (the gradient of a frozen parameter,
the moments of a masked one). Where the first tree of a ``map`` has ``None``, so has the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import optree
import torch
from torch import Tensor

from zfunc.errors import DonatedStateError, PlacementError
from zfunc.trees import norms
from zfunc.trees.marks import any_spent, carry, gone, part_of, spent
from zfunc.trees.nodes import (
    MAPPED,
    NAMESPACE,
    OPAQUE,
    PLACED,
    Box,
    Frozen,
    Layers,
    Lazy,
    Placed,
    Tree,
    Unprinted,
    boxes_in,
    held_in,
    in_full,
    leaves_in,
    opened,
    register,
)
from zfunc.trees.squares import square_sum, square_sums

__all__ = [
    "NAMESPACE",
    "Layers",
    "Lazy",
    "Placed",
    "dotted",
    "flatten_names",
    "full",
    "get",
    "global_norm",
    "leaf_norms",
    "leaves",
    "map",
    "map_leaves",
    "map_with_path",
    "merge",
    "paths",
    "register",
    "select",
    "set",
    "size_bytes",
    "whole",
]

_set = set
TRIED: ContextVar[Any] = ContextVar("zfunc_tried", default=lambda f: f)  # how map_leaves takes f


def dotted(*parts: Any) -> str:
    """The path of a leaf from its entries; empty ones are dropped."""
    return ".".join([text for part in parts if (text := str(part))])


def _flatten(tree: Tree) -> tuple[list[str], list[Any], optree.PyTreeSpec]:
    """Paths, leaves and structure; a ``Placed`` node counts as one leaf."""
    items, spec = _items(_standing(tree))
    return _names(spec), items, spec


def _items(tree: Tree) -> tuple[list[Any], optree.PyTreeSpec]:
    """Leaves and structure alone: paths cost more than both."""
    items, spec = optree.tree_flatten(tree, none_is_leaf=True, namespace=MAPPED)
    others = [item for item in items if not isinstance(item, Tensor)]
    if any(isinstance(item, Lazy) for item in others):
        return _items(_forced(optree.tree_unflatten(spec, items)))
    placed = any(isinstance(item, Placed) for item in others)
    if placed or any_spent(items):
        _check_each(items, spec)
    return items, spec


def _check_each(items: list[Any], spec: optree.PyTreeSpec) -> None:
    for i, item in enumerate(items):
        for x in item.held() if isinstance(item, Placed) else (item,):
            if x is not None and spent(x):
                raise DonatedStateError(x.__dict__.get("_zfunc_story") or gone(_names(spec)[i]))


def _names(spec: optree.PyTreeSpec) -> list[str]:
    return [dotted(*path) for path in spec.paths()]


def check_alive(tree: Tree) -> None:
    """Raise ``DonatedStateError`` if a leaf's memory belongs to a later state."""
    if any_spent(held_in(tree)):
        _flatten(tree)


def align(trees: Sequence[Tree]) -> tuple[list[list[Any]], optree.PyTreeSpec]:
    """Flatten all trees along the one in which the most is placed."""
    if any(isinstance(tree, Placed) for tree in trees):  # one node stands for all that there is
        row = [tree.force() if isinstance(tree, Lazy) else tree for tree in trees]
        for tree in row if any_spent(held_in(tuple(row))) else ():
            check_alive(tree)  # says which
        return [row], _LEAF
    flat = [_items(tree) for tree in trees]
    if all(its == flat[0][1] for _, its in flat[1:]):
        return [list(row) for row in zip(*(items for items, _ in flat), strict=True)], flat[0][1]
    # Of trees that are alike the one with a layout: what comes out has it, too.
    rank = [(its.num_leaves, not boxes_in(x)) for (_, its), x in zip(flat, trees, strict=True)]
    spine = min(range(len(trees)), key=rank.__getitem__)
    spec = flat[spine][1]
    if not all(without for _, without in rank):
        trees = [opened(_forced(tree)) for tree in trees]
        flat = [_items(tree) for tree in trees]
    columns = []
    for i, tree in enumerate(trees):
        if flat[i][1] == flat[spine][1]:
            columns.append(flat[i][0])
            continue
        try:
            columns.append(_up_to(flat[spine][1], tree, trees[spine]))
        except (ValueError, TypeError) as error:
            raise PlacementError(_mismatch(trees[spine], tree, spine, i, error)) from None
    return [list(row) for row in zip(*columns, strict=True)], spec


def _up_to(spec: optree.PyTreeSpec, tree: Tree, spine: Tree) -> list[Any]:
    """The parts of ``tree`` at the leaves of ``spec``, which is that of ``spine``.

    Which leaves are frozen is no difference: of a ``Frozen`` and a dict each leaf has its like.
    """
    try:
        with Unprinted():
            return spec.flatten_up_to(tree)
    except (ValueError, TypeError):
        alike = _as_dicts(spine)
        if alike is spine and _as_dicts(tree) is tree:
            raise
        return _items(alike)[1].flatten_up_to(_as_dicts(tree))


def _forced(tree: Tree) -> Tree:
    """The tree with what its lazy parts compute."""
    items, spec = optree.tree_flatten(tree, none_is_leaf=True, namespace=OPAQUE)
    if not any(isinstance(item, Lazy) for item in items):
        return tree
    forced = [item.force() if isinstance(item, Lazy) else item for item in items]
    return _forced(optree.tree_unflatten(spec, forced))


def _standing(tree: Tree) -> Tree:
    """:func:`in_full`, also of what lazy parts compute: theirs, too, may be parts of leaves."""
    return in_full(_forced(tree))


def _as_dicts(tree: Tree) -> Tree:
    """The tree with a dict in place of every ``Frozen``; itself if there is none."""
    met: list[Frozen] = []

    def plain(node: Any) -> Any:
        if not isinstance(node, Frozen):
            return node
        met.append(node)
        return {key: _as_dicts(child) for key, child in node.items()}

    out = optree.tree_map(
        plain,
        tree,
        is_leaf=lambda node: isinstance(node, Frozen),
        none_is_leaf=True,
        namespace=MAPPED,
    )
    return out if met else tree


_LEAF = optree.treespec_leaf(none_is_leaf=True, namespace=MAPPED)


def _mismatch(a: Tree, b: Tree, i: int, j: int, error: Exception) -> str:
    have, want = _set(paths(b)), _set(paths(a))
    extra, missing = sorted(have - want), sorted(want - have)
    where = "; ".join(
        f"{what} {', '.join(found[:3])}{' ...' if len(found) > 3 else ''}"
        for what, found in (("only in the latter:", extra), ("only in the former:", missing))
        if found
    )
    return (
        f"trees {i} and {j} of one map differ in structure: {where or error}. "
        "Every tree must have the structure of the first (None where it has no value)."
    )


def map(f: Callable[..., Any], tree: Tree, *rest: Tree) -> Tree:
    """``f`` of corresponding leaves; elementwise on placed trees.

    On a placed tree ``f`` sees flat 1-D buffers that hold many leaves at once, so
    it must be elementwise: result[i] may depend on the arguments' element i alone.
    Plain and placed trees may be mixed; a 0-d leaf is broadcast over its
    counterpart. For anything else see :func:`map_leaves` and :func:`whole`.

    Raises:
        PlacementError: the trees differ in structure.

    >>> map(lambda a, b: a + b, {"w": 1, "b": None}, {"w": 2, "b": 3})
    {'w': 3, 'b': None}
    """
    return map_rows(f, *align((tree, *rest)))


def map_rows(f: Callable[..., Any], rows: Sequence[list[Any]], spec: optree.PyTreeSpec) -> Tree:
    """:func:`map` of trees that are aligned."""
    return optree.tree_unflatten(spec, [_map_row(f, row) for row in rows])


def _map_row(f: Callable[..., Any], row: list[Any]) -> Any:
    if row[0] is None:
        return None
    placed = first_placed(row)
    return carry(f(*row), row[0]) if placed is None else placed.map(f, row)


def first_placed(row: Sequence[Any]) -> Placed | None:
    """The node that is asked what a function means: one that streams, or the first."""
    placed = [node for node in row if isinstance(node, Placed)]
    return next((node for node in placed if node.streams), placed[0] if placed else None)


def map_leaves(f: Callable[..., Any], tree: Tree, *rest: Tree) -> Tree:
    """``f(path, leaf, ...)`` of each leaf's local part.

    On plain trees the part is the leaf itself; on placed trees it is a 1-D piece
    of it (perhaps empty), and ``f`` must return a piece of the same length.
    """
    rows, spec = align([_standing(x) for x in (tree, *rest)])
    out: list[Any] = []
    for name, row in zip(_names(spec), rows, strict=True):
        placed = first_placed(row)
        if row[0] is None:
            out.append(None)
        elif placed is not None:
            out.append(placed.map_leaves(TRIED.get()(f), row, name))
        else:
            out.append(f(name, *row))
    return optree.tree_unflatten(spec, out)


map_with_path = map_leaves


def whole(f: Callable[..., Any], tree: Tree, *rest: Tree) -> Tree:
    """``f`` of corresponding *full* leaves, one leaf at a time.

    On placed trees a collective: each leaf is gathered, ``f`` runs on every rank,
    and this rank's part of the result is kept. For updates that are not
    elementwise (Muon, Adafactor).
    """
    rows, spec = align([_standing(x) for x in (tree, *rest)])
    out: list[Any] = []
    for row in rows:
        placed = first_placed(row)
        if row[0] is None:
            out.append(None)
        else:
            out.append(placed.whole(f, row) if placed is not None else f(*row))
    return optree.tree_unflatten(spec, out)


def select(tree: Tree, keep: Callable[[str], bool]) -> Tree:
    """The tree with ``None`` at each leaf whose dotted path ``keep`` rejects.

    >>> select({"w": 1, "b": 2}, lambda path: path == "w")
    {'w': 1, 'b': None}
    """
    names, items, spec = _flatten(tree)

    def selected(name: str, item: Any) -> Any:
        if isinstance(item, Placed):
            return item.select(lambda inner: keep(dotted(name, inner)))
        return item if keep(name) else None

    out = [selected(name, item) for name, item in zip(names, items, strict=True)]
    return opened(optree.tree_unflatten(spec, out))  # a part does not lie as the tree did


def merge(a: Tree, b: Tree) -> Tree:
    """``a`` with ``b``'s leaf wherever ``a`` has ``None``.

    >>> merge({"w": 1, "b": None}, {"w": None, "b": 2})
    {'w': 1, 'b': 2}
    """
    rows, spec = align((_standing(a), _standing(b)))
    return optree.tree_unflatten(spec, [_merged(x, y) for x, y in rows])


def _merged(x: Any, y: Any) -> Any:
    if not isinstance(x, Placed):
        return y if x is None else x
    return y.beneath(x) if isinstance(y, Placed) and y.streams and not x.streams else x.merge(y)


def leaves(tree: Tree) -> list[Any]:
    """The tensors a tree holds: leaves of plain parts, local buffers of placed ones."""
    forced = tree.force() if isinstance(tree, Lazy) else tree
    return optree.tree_leaves(forced, namespace=NAMESPACE)


def paths(tree: Tree) -> list[str]:
    """Dotted path of every leaf, in leaf order; those of placed subtrees included."""
    names, items, _ = _flatten(tree)
    out: list[str] = []
    for name, item in zip(names, items, strict=True):
        if isinstance(item, Placed):
            out.extend(dotted(name, inner) for inner in item.names())
        else:
            out.append(name)
    return out


def flatten_names(tree: Tree) -> dict[str, Any]:
    """``{dotted name: leaf}``: for a functionalized module, its ``state_dict`` names.

    Raises:
        PlacementError: two leaves have one name, as in ``{"a": {"b": 1}, "a.b": 2}``.

    >>> flatten_names({"blocks": Layers([{"w": 1}]), "head": 2})
    {'blocks.0.w': 1, 'head': 2}
    """
    names, items, _ = _flatten(tree)
    out: dict[str, Any] = {}
    for name, item in zip(names, items, strict=True):
        if isinstance(item, Placed):
            inner = flatten_names(item.full())
            its = {dotted(name, key): value for key, value in inner.items()}
        else:
            its = {} if item is None else {name: item}
        if both := its.keys() & out.keys():
            raise PlacementError(
                f"two leaves are called {min(both)}. Rename one of them: keys have no dots, best."
            )
        out.update(its)
    return out


def full(tree: Tree) -> Tree:
    """A plain, full copy of a placed tree; a collective (every rank calls it)."""
    check_alive(tree)

    def copy(node: Any) -> Any:
        if isinstance(node, Placed):
            return node.full()
        if (part := part_of(node)) is not None and part.split is not None:
            return part.split.gathered(node, part.group, "full")
        return node.clone() if isinstance(node, Tensor) else node

    return optree.tree_map(
        copy, opened(_standing(tree)), is_leaf=lambda x: isinstance(x, Placed), namespace=NAMESPACE
    )


def _sums(tree: Tree, f: Callable[[Tensor], Tensor]) -> Tree:
    check_alive(tree)
    nodes, spec = optree.tree_flatten(_standing(tree), namespace=PLACED)
    plain, kinds = _by_kind(nodes)
    out: list[Any] = list(nodes)
    for i in plain:
        x = nodes[i]
        if isinstance(x, Box):
            out[i] = optree.tree_map(f, x.tree, namespace=NAMESPACE)
        else:
            out[i] = f(x) if (part := part_of(x)) is None else part.total(f(part.counted(x)))
    for kind, where in kinds.items():
        for i, total in zip(where, kind.sums_of([nodes[i] for i in where], f), strict=True):
            out[i] = total
    return optree.tree_unflatten(spec, out)


def _by_kind(nodes: Sequence[Any]) -> tuple[list[int], dict[type[Placed], list[int]]]:
    """Which are plain leaves, and which placed nodes of each kind."""
    plain: list[int] = []
    kinds: dict[type[Placed], list[int]] = {}
    for i, node in enumerate(nodes):
        (kinds.setdefault(type(node), []) if isinstance(node, Placed) else plain).append(i)
    return plain, kinds


def leaf_norms(tree: Tree) -> Tree:
    """The 2-norm of every leaf, a 0-d tensor each; a collective on placed trees."""
    return optree.tree_map(torch.sqrt, _sums(tree, square_sum), namespace=NAMESPACE)


def global_norm(tree: Tree) -> Tensor:
    """The 2-norm of all leaves together, 0-d; a collective on placed trees.

    The squares are summed leaf by leaf, then over the leaves in leaf order, so
    that every rank gets the same bits. Within a step the norm of the same tensors,
    which nobody has written to since, is taken once: clipping and a metric share it. (What is
    written through ``x.data`` or NumPy nobody sees: write to ``x`` itself.)

    >>> global_norm({"a": torch.tensor([3.0]), "b": torch.tensor([[4.0]])})
    tensor(5.)
    """
    nodes = leaves_in(tree, PLACED)
    if any_spent(nodes) or any(isinstance(x, Placed | Box) for x in nodes):
        check_alive(tree)
    return norms.shared(nodes, _norm)


def _norm(nodes: Sequence[Any]) -> Tensor:
    nodes = [x for node in nodes for x in _as_flats(node)]
    plain, kinds = _by_kind(nodes)
    rows = {plain[0]: _squares([nodes[i] for i in plain])} if plain else {}
    if plain and kinds:
        rows = dict(zip(plain, rows[plain[0]].split(1), strict=True))
    for kind, where in kinds.items():
        rows.update(zip(where, kind.square_sums_of([nodes[i] for i in where]), strict=True))
    parts = [rows[i] for i in sorted(rows) if rows[i].numel()]
    if not parts:
        return torch.zeros(())
    return (torch.cat(parts) if len(parts) > 1 else parts[0]).sum().sqrt()


def _squares(leaves: Sequence[Any]) -> Tensor:
    """The squares of the norms of plain leaves; of full ones, where these are parts of such."""
    parts = [part_of(x) for x in leaves]
    if (part := next((p for p in parts if p is not None), None)) is None:
        return square_sums(leaves)
    pairs = zip(leaves, parts, strict=True)
    row = square_sums([x if p is None else p.counted(x) for x, p in pairs])
    split = torch.tensor([p is not None for p in parts], device=row.device)
    return torch.where(split, part.total(row.clone()), row)


def _as_flats(node: Any) -> Sequence[Any]:
    """A whole tree with a layout as a node of few buffers, or as its leaves."""
    if not isinstance(node, Box):
        return (node,)
    flat = node.flat if (standing := node.standing()) is None else standing
    return leaves_in(node.tree) if flat is None else (flat,)


def size_bytes(tree: Tree) -> int:
    """Bytes of the tensors that this rank holds; memory shared by leaves counts once."""
    seen: dict[Any, int] = {}
    for leaf in leaves(tree):
        if isinstance(leaf, Tensor) and leaf.numel():
            key: Any = leaf.data_ptr()
            if leaf.is_meta:  # where all of them lie at 0
                key = leaf.untyped_storage()._cdata, leaf.storage_offset()
            seen[key] = max(seen.get(key, 0), leaf.nbytes)
    return sum(seen.values())


def get(tree: Tree, path: str) -> Any:
    """The full value of the leaf at ``path``; a collective where it is placed.

    Raises:
        PlacementError: no such leaf; the closest paths are named.
    """
    names, items, _ = _flatten(tree)
    for name, item in zip(names, items, strict=True):
        if name == path:
            return item.full() if isinstance(item, Placed) else item
        if isinstance(item, Placed) and (name == "" or path.startswith(name + ".")):
            return item.get(path[len(name) + 1 :] if name else path)
    raise PlacementError(_no_such_leaf(tree, path))


def set(tree: Tree, path: str, value: Any) -> Tree:
    """A copy of the tree with the leaf at ``path`` replaced by the full ``value``.

    Raises:
        PlacementError: no such leaf, or a value of another shape.
    """
    if isinstance(tree, Box) and (standing := tree.standing()) is not None:
        return tree.holding(standing.set(path, value))
    names, items, spec = _flatten(tree)
    for i, (name, item) in enumerate(zip(names, items, strict=True)):
        if isinstance(item, Placed) and (name == "" or path.startswith(name + ".")):
            items[i] = item.set(path[len(name) + 1 :] if name else path, value)
        elif name == path:
            if isinstance(item, Tensor) and item.shape != torch.as_tensor(value).shape:
                raise PlacementError(
                    f"{path} has shape {tuple(item.shape)}, the new value "
                    f"{tuple(torch.as_tensor(value).shape)}. Give a value of the leaf's shape."
                )
            items[i] = (
                carry(torch.as_tensor(value).to(item), item) if torch.is_tensor(item) else value
            )
        else:
            continue
        return optree.tree_unflatten(spec, items)
    raise PlacementError(_no_such_leaf(tree, path))


def _no_such_leaf(tree: Tree, path: str) -> str:
    import difflib

    close = difflib.get_close_matches(path, paths(tree), n=3, cutoff=0.3)
    return f"no leaf at {path!r}. The closest paths are {', '.join(close) or '(none)'}."
