"""Where the ways to inputs and to weights part, in a graph of autograd.

A graph is made of nodes, whose edges lead to the nodes of what an operation was given. Some lead
on to the *inputs* of a piece of a computation, the rest at best to its *ends*, which are weights
or what stands before them. Nodes that lead to ends, but to no input, fall into *branches*: what is
connected belongs together, since a node must run once, with all of its gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, get_gradient_edge

__all__ = ["Branch", "Edge", "Node", "Ways", "edge_of", "is_function", "is_product", "saved_by"]

Node = Any  # torch's type of it knows little of what it has
Edge = tuple[Node, int]

# Their gradients are a product for each operand, of which torch computes those that are asked for.
PRODUCTS = (
    *("Mm", "Addmm", "Bmm", "Baddbmm", "Addbmm", "GroupedMm", "Mv", "Addmv", "Dot", "Vdot"),
    *("Linear", "Matmul", "Trilinear", "Convolution", "ConvolutionOverrideable", "ConvTbc"),
    *("ConvDepthwise2D", "ConvDepthwise3D"),
)
# They compute the gradients of all operands together, with products in it.
AT_ONCE = "ScaledDotProduct", "Attention", "Rnn", "Lstm", "Solve", "Linalg"


@dataclass(eq=False)
class Branch:
    """Nodes that lead to ends and to no input, as many as are connected.

    Attributes:
        ends: indices of the ends that they lead to.
        early: whether they must run in one go with the way to inputs, because what they have saved
            can be had once only, or what leads to them computes all of its gradients at once.
    """

    ends: set[int] = field(default_factory=set)
    early: bool = False


class Ways:
    """The ways from ``outs`` to ``inputs``, and the branches towards ``ends``.

    Attributes:
        outs, inputs, ends: edges; ``None`` stands for what is not differentiable.
        way: the nodes that lead to inputs, nearest to the outputs first.
    """

    def __init__(self, *edges: Sequence[Edge | None]) -> None:
        self.outs, self.inputs, self.ends = edges
        self._next: dict[Node, list[tuple[int, Edge]]] = {}
        order = [*self._children_first(edge[0] for edge in self.outs if edge is not None)]
        self._goals = {edge for edge in self.inputs if edge is not None}
        on_way = self._leading_to(self._goals, order)
        self._on_way = on_way
        self.way = [node for node in reversed(order) if node in on_way]
        self._known: list[int] = []
        self._ends: dict[Edge, list[int]] = {}
        for k, end in enumerate(self.ends):
            if end is not None and (end in self._goals or end[0] in on_way):
                self._known.append(k)
            elif end is not None:
                self._ends.setdefault(end, []).append(k)
        beside = self._leading_to(self._ends.keys(), order) - on_way
        self._beside = [node for node in order if node in beside]
        self._branches = self._connected()
        if self.way:
            self._find_early()

    def branch(self, edge: Edge) -> Branch | None:
        """The branch that an edge leads into; ``None`` if it leads to no end, or to an input."""
        return self._branches.get(edge[0]) or self._branches.get(edge)

    def _leaving(self, node: Node) -> Iterator[tuple[int, Edge, Branch]]:
        for at, edge in self._next[node]:
            branch = None if edge in self._goals else self.branch(edge)
            if branch is not None:
                yield at, edge, branch

    def parting(self) -> Iterator[tuple[Node, list[tuple[int, Edge, Branch]]]]:
        """Nodes on the way with edges into branches that run later: positions, edges, branches."""
        for node in self.way:
            leaving = [x for x in self._leaving(node) if not x[2].early]
            if leaving:
                yield node, leaving

    def is_early(self, edge: Edge) -> bool:
        """Whether what an edge leads to runs with the way to inputs."""
        branch = self.branch(edge)
        return (
            edge in self._goals or edge[0] in self._on_way or (branch is not None and branch.early)
        )

    def run_early(self) -> Iterator[Node]:
        """Nodes that run with the way to inputs."""
        yield from self.way
        yield from (node for node in self._beside if self._branches[node].early)

    def early(self) -> list[int]:
        """Indices of the ends whose gradients are known with those of the inputs."""
        branches = self._branches.values()
        return sorted({*self._known, *(k for x in branches if x.early for k in x.ends)})

    def _children_first(self, roots: Iterable[Node]) -> Iterator[Node]:
        """All nodes, each behind those that its edges lead to."""
        stack = [(node, False) for node in roots]
        while stack:
            node, done = stack.pop()
            if done:
                yield node
            elif node not in self._next:
                found = enumerate(node.next_functions)
                self._next[node] = [(at, edge) for at, edge in found if edge[0] is not None]
                stack.append((node, True))
                stack += [(edge[0], False) for _, edge in self._next[node]]

    def _leading_to(self, goals: Iterable[Edge], order: Sequence[Node]) -> set[Node]:
        """The nodes from which one of the edges, or a node that leads there, is the next."""
        goals, found = {*goals}, set[Node]()
        for node in order if goals else ():
            if any(edge in goals or edge[0] in found for _, edge in self._next[node]):
                found.add(node)
        return found

    def _connected(self) -> dict[Any, Branch]:
        """The branch of each node beside the way, and of each end. Ends with a value share one:
        their gradients are handed back together, and their hooks see the whole of them."""
        first: dict[Any, Any] = {node: node for node in self._beside}
        first |= {key: key for key in map(_key, self._ends)}
        for node in self._beside:
            for _, edge in self._next[node]:
                if edge[0] in first:
                    _join(first, node, edge[0])
        valued = [edge[0] for edge in self._ends if edge[0] in first]
        hooked = [node for node in self._beside if _once_only(node)]
        for group in (valued, hooked):
            for other in group[1:]:
                _join(first, group[0], other)
        made: dict[Any, Branch] = {}
        found = {key: made.setdefault(_first(first, key), Branch()) for key in first}
        for edge, indices in self._ends.items():
            found[_key(edge)].ends.update(indices)
        for node in self._beside:
            for _, edge in self._next[node]:
                found[node].ends.update(self._ends.get(edge, ()))
        return found

    def _find_early(self) -> None:
        for node in self._beside:
            if _once_only(node):
                self._branches[node].early = True
        for node in self.way:
            branches = [branch for *_, branch in self._leaving(node)]
            if branches and not is_function(node) and (_at_once(node) or _once_only(node)):
                for branch in branches:
                    branch.early = True


def _key(edge: Edge) -> Any:
    """What stands for an end among what is connected: one of no elements connects nothing."""
    node, i = edge
    return edge if 0 in node._input_metadata[i].shape else node


def _first(first: dict[Any, Any], key: Any) -> Any:
    while first[key] is not key:
        first[key] = key = first[first[key]]
    return key


def _join(first: dict[Any, Any], a: Any, b: Any) -> None:
    first[_first(first, a)] = _first(first, b)


def edge_of(x: Tensor | GradientEdge) -> Edge | None:
    """Where gradients of ``x`` go; ``None`` if it has none."""
    if isinstance(x, Tensor):
        if not x.requires_grad:
            return None
        x = get_gradient_edge(x)
    return x.node, x.output_nr


def is_function(node: Node) -> bool:
    """Whether the node is that of a ``torch.autograd.Function``, which computes everything."""
    return isinstance(node, BackwardCFunction)


def is_product(node: Node) -> bool:
    """Whether the gradients of the node's operands are products, each computed by itself."""
    return _kind(node) in PRODUCTS


def _at_once(node: Node) -> bool:
    return any(word in _kind(node) for word in AT_ONCE)


def _kind(node: Node) -> str:
    return str(node.name()).rstrip("0123456789").removesuffix("Backward")


_NAMES: dict[type, tuple[str, ...]] = {}  # of what nodes of a kind save


def saved_by(node: Node) -> Iterator[Any]:
    """What a node has saved: torch's ``SavedTensor``, each with the hooks that it went through."""
    kind = type(node)
    if kind not in _NAMES:
        _NAMES[kind] = tuple(name for name in dir(kind) if name.startswith("_raw_saved"))
    for name in _NAMES[kind]:
        value = getattr(node, name)
        if isinstance(value, tuple):
            yield from value
        else:
            yield value


def _once_only(node: Node) -> bool:
    """Whether what the node has saved is worth too much to be had twice: a hook makes it, which
    may compute a whole layer again (``torch.utils.checkpoint``)."""
    return any(
        saved.unpack_hook is not None
        and not isinstance(saved.data, Tensor)
        and not getattr(saved.data, "repeatable", False)
        for saved in saved_by(node)
    )
