"""Named axes over the ranks; a :class:`Mesh` is a value, made wherever it is needed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from zfunc.ranks.world import current

__all__ = ["BATCH", "ORDER", "SHARED", "Axes", "Mesh", "laid_out", "mesh"]

ORDER = ("pipe", "replica", "data", "tensor")  # slowest first: tensor ranks are neighbours
BATCH = ("replica", "data")  # along which ranks have other rows of a batch
SHARED = ("pipe", "tensor")  # along which they work together on the same ones
Axes = str | tuple[str, ...]


@dataclass(frozen=True)
class Mesh:
    """Names and sizes of the axes along which ranks are laid out, row-major.

    One size may be -1: it fills the world, that of the calling rank wherever a number is asked for.
    What a step made of the sizes that its transforms ask for is not ``given`` by the user.

    >>> grid = Mesh((("data", 2), ("tensor", 3)))
    >>> grid.size("tensor"), grid.coordinates(4)
    (3, {'data': 1, 'tensor': 1})
    """

    axes: tuple[tuple[str, int], ...]
    given: bool = field(default=True, compare=False, repr=False)

    def __post_init__(self) -> None:
        sizes = [size for _, size in self.axes]
        wrong = any(type(x) is not int or (x < 1 and x != -1) for x in sizes)
        if wrong or sizes.count(-1) > 1 or len(set(self.names)) < len(sizes):
            raise ValueError(f"{self}: expected axes of positive sizes, at most one of them -1")

    def __repr__(self) -> str:
        asked = [f"{name}={size}" for name, size in self.axes if size != 1]
        return f"mesh({', '.join(asked or (f'{name}=1' for name in self.names))})"

    @property
    def names(self) -> tuple[str, ...]:
        """The axes' names, slowest first."""
        return tuple(name for name, _ in self.axes)

    @property
    def sizes(self) -> dict[str, int]:
        """The axes' sizes by name, in their order."""
        return dict(self.closed().axes)

    @property
    def world_size(self) -> int:
        """The number of ranks that the mesh covers."""
        return math.prod(self.sizes.values())

    @property
    def batch(self) -> tuple[str, ...]:
        """The axes along which ranks have other rows of a batch."""
        return tuple(name for name in self.names if name in BATCH)

    def closed(self, ranks: int | None = None) -> Mesh:
        """The mesh with all its sizes, checked if it is said for how many ranks.

        Raises:
            ValueError: the sizes do not multiply to that number.

        >>> mesh(data=-1, tensor=2).closed(6)
        mesh(data=3, tensor=2)
        """
        is_open = any(size == -1 for _, size in self.axes)
        if ranks is None and not is_open:
            return self
        ranks = current().size if ranks is None else ranks
        known = math.prod(size for _, size in self.axes if size != -1)
        if ranks % known or (not is_open and known != ranks):
            needs = f"a multiple of {known}" if is_open else str(known)
            raise ValueError(
                f"{self} needs {needs} ranks, this world has {ranks}. Start so many, or give "
                "another mesh: one size may be -1 and takes what is left."
            )
        return Mesh(tuple((n, ranks // known if size == -1 else size) for n, size in self.axes))

    def size(self, axis: Axes) -> int:
        """The number of ranks along ``axis``, or along several axes flattened."""
        return math.prod(self.sizes[name] for name in self.checked(axis))

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where ``rank`` stands on each axis."""
        place: dict[str, int] = {}
        for name, size in reversed(self.sizes.items()):
            rank, place[name] = divmod(rank, size)
        return {name: place[name] for name in self.names}

    def members(self, axis: Axes, rank: int) -> tuple[int, ...]:
        """The ranks that differ from ``rank`` only along ``axis``, ``rank`` among them, in order.

        >>> Mesh((("data", 2), ("tensor", 3))).members("data", 4)
        (1, 4)
        """
        along, here = self.checked(axis), self.coordinates(rank).items()
        fixed = {(name, at) for name, at in here if name not in along}
        return tuple(r for r in range(self.world_size) if fixed <= self.coordinates(r).items())

    def checked(self, axis: Axes) -> tuple[str, ...]:
        """``axis`` as a tuple of names in the mesh's order.

        Raises:
            ValueError: the mesh has no such axis.
        """
        asked = (axis,) if isinstance(axis, str) else tuple(axis)
        if not asked or not set(asked) <= set(self.names):
            raise ValueError(f"axis {axis!r}: expected one or more of {list(self.names)}")
        return tuple(name for name in self.names if name in asked)


def mesh(
    data: int = -1, tensor: int = 1, pipe: int = 1, replica: int = 1, order: Sequence[str] = ORDER
) -> Mesh:
    """The ranks by named axes; one size may be -1 and fills the world.

    A value, which can be made anywhere: a step compares it with the world where it places or
    initialises a state, or is called.

    Args:
        data: ranks that have other rows, and cut a state among them (``zf.shard``).
        tensor, pipe: ranks that share the work of a layer; ranks that have other layers.
        replica: groups of all these, each with a whole state of its own.
        order: the axes, slowest first.

    Raises:
        ValueError: a size that is not positive, or a second -1; an order of other axes.

    >>> mesh(data=2, replica=2)
    mesh(replica=2, data=2)
    """
    sizes = {"data": data, "tensor": tensor, "pipe": pipe, "replica": replica}
    if sorted(order) != sorted(sizes):
        raise ValueError(f"order={tuple(order)}: expected {', '.join(ORDER)} in some order")
    return Mesh(tuple((name, sizes[name]) for name in order))


def laid_out(on: Mesh | None) -> Mesh:
    """A mesh in the calling rank's world; ``None`` is all ranks along ``"data"``."""
    ranks = current().size
    return Mesh((("data", ranks),)) if on is None else on.closed(ranks)
