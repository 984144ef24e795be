"""Where the ways to inputs and to weights part, in a graph of autograd.

A graph is made of nodes, whose edges lead to the nodes of what an operation was given. Some lead
on to the *inputs* of a piece of a computation, the rest at best to its *ends*, which are weights
or what stands before them. Nodes that lead to ends, but to no input, fall into *branches*: what is
connected belongs together, since a node must run once, with all of its gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor
from torch._C import DisableTorchFunctionSubclass
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, get_gradient_edge

__all__ = ["Branch", "Edge", "Kind", "Node", "Ways", "edge_of", "kind_of", "saved_by"]

Node = Any  # torch's type of it knows little of what it has
Edge = tuple[Node, int]

# Their gradients are a product for each operand, of which torch computes those that are asked for.
PRODUCTS = (
    *("Mm", "Addmm", "Bmm", "Baddbmm", "Addbmm", "GroupedMm", "Mv", "Addmv", "Addr", "Dot"),
    *("Vdot", "Linear", "Matmul", "Trilinear", "Convolution", "ConvolutionOverrideable", "ConvTbc"),
    *("ConvDepthwise2D", "ConvDepthwise3D"),
)
MATMULS = "Mm", "Addmm", "Bmm", "Baddbmm"
# What has come for them is what their operands get, but for a factor.
SUMS = "Add", "Sub"
# They compute the gradients of all operands together, with products in it.
AT_ONCE = "ScaledDotProduct", "Attention", "Rnn", "Lstm", "Solve", "Linalg", "Ormqr"


@dataclass(eq=False)
class Branch:
    """Nodes that lead to ends and to no input, as many as are connected.

    Attributes:
        ends: indices of the ends that they lead to.
        hooked: whether what one of them has saved can be had once only.
        early: whether they must run in one go with the way to inputs: because of that, because
            what leads to them computes all of its gradients at once or has hooks, because they
            share an end with others that must, or because something on the way is compiled.
    """

    ends: set[int] = field(default_factory=set)
    hooked: bool = False
    early: bool = False


class Ways:
    """The ways from ``outs`` to ``inputs``, and the branches towards ``ends``.

    Attributes:
        outs, inputs, ends: edges; ``None`` stands for what is not differentiable.
        way: the nodes that lead to inputs, those nearest to them first.
        parting: of these the nodes from which branches leave that run later: with their edges into
            them, the positions of these edges, and the branches.
        known: indices of the ends whose gradients are known with those of the inputs.
    """

    def __init__(self, *edges: Sequence[Edge | None]) -> None:
        self.outs, self.inputs, self.ends = edges
        self._goals: set[Edge | None] = {*self.inputs}
        self._ends: dict[Edge, list[int]] = {}
        for k, end in enumerate(self.ends):
            if end is not None:
                self._ends.setdefault(end, []).append(k)
        self.way: dict[Node, Kind] = {}
        self._beside: dict[Node, Kind] = {}
        self._aside: dict[Node, list[tuple[int, Edge]]] = {}  # edges towards ends alone
        self._place([edge[0] for edge in self.outs if edge is not None])
        self.known: list[int] = []
        for edge in [*self._ends]:
            if self._on_way(edge):
                self.known += self._ends.pop(edge)
        self._branches = self._connected()
        if self.way:
            self._find_early()
        self.parting = self._parting()

    def branch(self, edge: Edge) -> Branch | None:
        """The branch that an edge leads into; ``None`` if it leads to no end, or to an input."""
        return self._branches.get(edge[0]) or self._branches.get(edge)

    def is_early(self, edge: Edge) -> bool:
        """Whether what an edge leads to runs with the way to inputs."""
        if self._on_way(edge):
            return True
        branch = self.branch(edge)
        return branch is not None and branch.early

    def run_early(self) -> list[tuple[Node, Kind]]:
        """Nodes that run with the way to inputs, and what is known of them."""
        found = [*self.way.items()]
        for node, kind in self._beside.items():
            if self._branches[node].early:
                found.append((node, kind))
        return found

    def early_ends(self) -> list[int]:
        """Indices of the ends whose gradients come with those of the inputs."""
        return sorted({*self.known, *self._early()})

    def _on_way(self, edge: Edge) -> bool:
        return edge in self._goals or edge[0] in self.way

    def _place(self, roots: Iterable[Node]) -> None:
        """Find out where each node leads, behind all that it leads to."""
        for node, following in _children_first(roots):
            way, aside = False, []
            for at, edge in enumerate(following):
                if edge in self._goals or edge[0] in self.way:
                    way = True
                elif edge in self._ends or edge[0] in self._beside:
                    aside.append((at, edge))
            if way:
                self.way[node] = kind_of(node)
            elif aside:
                self._beside[node] = kind_of(node)
            if aside:
                self._aside[node] = aside

    def _connected(self) -> dict[Any, Branch]:
        """The branch of each node beside the way, and of each end. Ends with a value share one:
        their gradients are handed back together, and their hooks see the whole of them."""
        keys = {edge: _key(edge) for edge in self._ends}
        first: dict[Any, Any] = {key: key for key in keys.values()}
        for node in self._beside:
            for _, edge in self._aside[node]:
                if edge[0] not in first:
                    continue
                if node in first:
                    _join(first, node, edge[0])
                else:
                    first[node] = first[edge[0]]
            first.setdefault(node, node)
        valued = [edge[0] for edge in self._ends if edge[0] in first]
        hooked = [node for node, kind in self._beside.items() if _once_only(node, kind)]
        for group in (valued, hooked):
            for other in group[1:]:
                _join(first, group[0], other)
        made: dict[Any, Branch] = {}
        found: dict[Any, Branch] = {}
        for key, one in first.items():
            if first[one] is not one:
                one = _first(first, key)
            if one not in made:
                made[one] = Branch()
            found[key] = made[one]
        for edge, indices in self._ends.items():
            found[keys[edge]].ends.update(indices)
        for node in self._beside:
            for _, edge in self._aside[node]:
                found[node].ends.update(self._ends.get(edge, ()))
        for node in hooked:
            found[node].hooked = True
        return found

    def _find_early(self) -> None:
        branches = {*self._branches.values()}
        for branch in branches:
            branch.early = branch.hooked
        for node, aside in self._aside.items():
            kind = self.way.get(node)
            if kind is None or kind.function:
                continue
            if kind.at_once or _once_only(node, kind) or _has_hooks(node):
                for _, edge in aside:
                    if (into := self.branch(edge)) is not None:
                        into.early = True
        # Autograd that runs towards an end runs all that leads there.
        while (early := self._early()) and (
            late := [x for x in branches if not x.early and not x.ends.isdisjoint(early)]
        ):
            for branch in late:
                branch.early = True
        # Compiled by torch, a node refuses to run where others of its graph are to run once more.
        if [node for node, kind in self.run_early() if kind.compiled]:
            for branch in branches:
                branch.early = True

    def _early(self) -> set[int]:
        found: set[int] = set()
        for branch in self._branches.values():
            if branch.early:
                found |= branch.ends
        return found

    def _parting(self) -> list[tuple[Node, list[tuple[int, Edge, Branch]]]]:
        found = []
        for node, aside in self._aside.items():
            if node in self.way:
                later = []
                for at, edge in aside:
                    if (branch := self.branch(edge)) is not None and not branch.early:
                        later.append((at, edge, branch))
                if later:
                    found.append((node, later))
        return found


def _children_first(roots: Iterable[Node]) -> list[tuple[Node, Sequence[Edge]]]:
    """All nodes with their edges, each behind those that its edges lead to."""
    found: list[tuple[Node, Sequence[Edge]]] = []
    seen = set[Node]()
    stack: list[tuple[Node, Sequence[Edge] | None]] = [(node, None) for node in roots]
    while stack:
        node, following = stack.pop()
        if following is not None:
            found.append((node, following))
        elif node not in seen:
            seen.add(node)
            following = node.next_functions
            stack.append((node, following))
            for edge in following:
                if edge[0] is not None and edge[0] not in seen:
                    stack.append((edge[0], None))
    return found


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
    if not isinstance(x, Tensor):
        return x.node, x.output_nr
    if not x.requires_grad:
        return None
    with DisableTorchFunctionSubclass():  # of a leaf of a subclass it would give a view's edge
        if (node := x.grad_fn) is not None:
            return node, x.output_nr
        # As torch's get_gradient_edge does it, by fewer calls, where gradients are recorded.
        recorded: Any = x.view_as(x).grad_fn
        return recorded.next_functions[0] if recorded else get_gradient_edge(x)[:2]


def saved_by(node: Node, names: Iterable[str]) -> Sequence[Any]:
    """What a node has saved under some names: torch's ``SavedTensor``, each with the hooks that it
    went through."""
    found: list[Any] = []
    for name in names:
        try:
            value = getattr(node, name)
        except RuntimeError:  # a Function that has run already has nothing, which it may need not
            continue
        if isinstance(value, tuple):
            found += value
        else:
            found.append(value)
    return found


class Kind:
    """What is known of nodes of one name.

    Attributes:
        function: whether it is a ``torch.autograd.Function``, which computes everything.
        compiled: whether torch has compiled it.
        product: whether the gradients of operands are products, each computed by itself.
        matmul: whether it is a product of matrices: one operand's gradient takes nothing but the
            other.
        hands_on: whether it does nothing but hand on the gradient that comes.
        at_once: whether it computes the gradients of all operands together, with products in it.
        saved: the names of what it has saved.
    """

    def __init__(self, node: Node) -> None:
        name = type(node).__name__.rstrip("0123456789").removesuffix("Backward")
        self.function = isinstance(node, BackwardCFunction)
        self.compiled = self.function and name == "CompiledFunction"
        self.product = name in PRODUCTS and not self.function
        self.matmul = name in MATMULS and self.product
        self.hands_on = name in SUMS and not self.function
        self.at_once = any(word in name for word in AT_ONCE)
        self.saved = [name for name in dir(type(node)) if name.startswith("_raw_saved")]


# Types of nodes are few, but for those of Functions that a user makes anew each time.
_BUILT_IN: dict[type, Kind] = {}
_FUNCTIONS: WeakKeyDictionary[type, Kind] = WeakKeyDictionary()


def kind_of(node: Node) -> Kind:
    found = _BUILT_IN.get(type(node)) or _FUNCTIONS.get(type(node))
    if found is None:
        found = Kind(node)
        (_FUNCTIONS if found.function else _BUILT_IN)[type(node)] = found
    return found


def _has_hooks(node: Node) -> bool:
    """Whether a user has given the node a hook, which is to see all of its gradients, once.

    Only the handle of another hook leads to them."""
    handle = node.register_hook(_nothing)
    found: dict[int, Any] = handle.hooks_dict_ref()
    handle.remove()
    return bool(found)


def _nothing(*_: Any) -> None:
    """A hook that changes no gradient."""


def _once_only(node: Node, kind: Kind) -> bool:
    """Whether what the node has saved is worth too much to be had twice: a hook makes it, which
    may compute a whole layer again (``torch.utils.checkpoint``)."""
    for saved in saved_by(node, kind.saved) if kind.saved else ():  # most have saved nothing
        if saved.unpack_hook is not None:
            data = saved.data
            if not (isinstance(data, Tensor) or getattr(data, "repeatable", False)):
                return True
    return False
