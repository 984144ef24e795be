"""Named axes over the ranks: ``data``, ``tensor``, ``pipe``.

A :class:`Mesh` is a value: names and sizes, nothing more. Its groups belong to the world, which
caches them; in a distributed world they are zfunc's own, beside the process groups of the user
(``zfunc.ranks.distributed``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

from zfunc.ranks.comm import Group
from zfunc.ranks.world import World, current

__all__ = ["Mesh", "alone", "group", "mesh"]


@dataclass(frozen=True)
class Mesh:
    """Names and sizes of the axes along which ranks are laid out, row-major.

    >>> grid = Mesh((("data", 2), ("tensor", 3)))
    >>> grid.size("tensor"), grid.coordinates(4)
    (3, {'data': 1, 'tensor': 1})
    """

    axes: tuple[tuple[str, int], ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The axes' names, slowest first."""
        return tuple(name for name, _ in self.axes)

    @property
    def world_size(self) -> int:
        """The number of ranks that the mesh covers."""
        return math.prod(size for _, size in self.axes)

    def size(self, axis: str | tuple[str, ...]) -> int:
        """The number of ranks along ``axis``, or along several axes flattened.

        Raises:
            ValueError: the mesh has no such axis.
        """
        sizes = dict(self.axes)
        return math.prod(sizes[name] for name in self.checked(axis))

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where ``rank`` stands on each axis."""
        place: dict[str, int] = {}
        for name, size in reversed(self.axes):
            rank, place[name] = divmod(rank, size)
        return {name: place[name] for name in self.names}

    def rank(self, coordinates: dict[str, int]) -> int:
        """The rank at ``coordinates``: the inverse of :meth:`coordinates`."""
        rank = 0
        for name, size in self.axes:
            rank = rank * size + coordinates[name]
        return rank

    def members(self, axis: str | tuple[str, ...], rank: int) -> tuple[int, ...]:
        """The ranks that differ from ``rank`` only along ``axis``, ``rank`` among them, in order.

        >>> Mesh((("data", 2), ("tensor", 3))).members("data", 4)
        (1, 4)
        """
        names, here = self.checked(axis), self.coordinates(rank)
        fixed = {name: at for name, at in here.items() if name not in names}
        return tuple(
            other
            for other in range(self.world_size)
            if fixed.items() <= self.coordinates(other).items()
        )

    def checked(self, axis: str | tuple[str, ...]) -> tuple[str, ...]:
        """``axis`` as a tuple of names in the mesh's order.

        Raises:
            ValueError: the mesh has no such axis.
        """
        asked = (axis,) if isinstance(axis, str) else tuple(axis)
        unknown = [name for name in asked if name not in self.names]
        if unknown or not asked:
            raise ValueError(f"axis {axis!r}: expected one or more of {list(self.names)}")
        return tuple(name for name in self.names if name in asked)


def mesh(data: int = -1, tensor: int = 1, pipe: int = 1) -> Mesh:
    """A mesh over all ranks of this world; one size may be -1 and fills it.

    Raises:
        ValueError: the sizes do not multiply to the number of ranks.

    >>> mesh().size("data")
    1
    """
    sizes = {"data": data, "tensor": tensor, "pipe": pipe}
    ranks = current().size
    asked = ", ".join(f"{name}={size}" for name, size in sizes.items())
    open_axes = [name for name, size in sizes.items() if size == -1]
    if len(open_axes) > 1 or any(size < 1 and size != -1 for size in sizes.values()):
        raise ValueError(f"mesh({asked}): expected positive sizes, at most one of them -1")
    known = math.prod(size for size in sizes.values() if size != -1)
    if ranks % known or (not open_axes and known != ranks):
        needs = f"a multiple of {known}" if open_axes else str(known)
        raise ValueError(f"mesh({asked}) needs {needs} ranks, this world has {ranks}")
    for name in open_axes:
        sizes[name] = ranks // known
    return Mesh(tuple(sizes.items()))


def group(on: Mesh | None, axis: str | tuple[str, ...]) -> Group:
    """The ranks along ``axis`` of a mesh, in the current world; cached there.

    In a distributed world the first call is one that every rank makes: they agree on devices.

    Args:
        on: a mesh over the world; ``None`` is the whole world on one axis, ``"data"``.
        axis: the name of an axis, or several names for the flattened group.

    Raises:
        ValueError: no such axis, or the mesh does not cover this world.
    """
    world = current()
    on = Mesh((("data", world.size),)) if on is None else on
    cached: Group | None = world.memo.get((on, axis))
    if cached is None:
        cached = world.memo[on, axis] = _connected(world, on, on.checked(axis))
    return cached


def alone() -> Group:
    """The group of the calling rank only, for what is sharded over no axis."""
    world = current()
    made: Group | None = world.memo.get("alone")
    if made is None:
        made = world.memo["alone"] = Group("none", world)
    return made


def _connected(world: World, on: Mesh, names: tuple[str, ...]) -> Group:
    if on.world_size != world.size:
        raise ValueError(
            f"{on} covers {on.world_size} ranks, this world has {world.size}: "
            "make the mesh with zf.mesh() inside the world it is for"
        )
    # One group per set of ranks, however it is spelled: its collectives are numbered in one series.
    members = on.members(names, world.rank)
    made: Group | None = world.memo.get(("group", members))
    if made is None:
        axis, alone = "+".join(names), len(members) == 1
        made = Group(axis, world, members) if alone else cast(Group, world.connect(axis, members))
        world.memo["group", members] = made
    return made
