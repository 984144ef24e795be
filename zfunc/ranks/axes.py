"""Groups of ranks along the axes of a mesh.

They belong to the world; in a distributed one they are zfunc's own, beside the user's.
"""

from __future__ import annotations

from typing import cast

from zfunc.ranks.comm import Group
from zfunc.ranks.meshes import Axes, Mesh, laid_out
from zfunc.ranks.world import World, current

__all__ = ["alone", "group"]


def group(on: Mesh | None, axis: Axes) -> Group:
    """The ranks along ``axis`` of a mesh, in the current world; cached there.

    In a distributed world the first call is one that every rank makes: they agree on devices.

    Args:
        on: a mesh over the world; ``None`` is the whole world on one axis, ``"data"``.
        axis: the name of an axis, or several names for the flattened group.

    Raises:
        ValueError: no such axis, or the mesh does not cover this world.
    """
    world = current()
    cached: Group | None = world.memo.get((on, axis))
    if cached is None:
        whole = laid_out(on)
        cached = world.memo[on, axis] = _connected(world, whole, whole.checked(axis))
    return cached


def alone() -> Group:
    """The group of the calling rank only, for what is sharded over no axis."""
    world = current()
    made: Group = world.memo.get("alone") or world.memo.setdefault("alone", Group("none", world))
    return made


def _connected(world: World, on: Mesh, names: tuple[str, ...]) -> Group:
    # One group per set of ranks, however it is spelled: its collectives are numbered in one series.
    members = on.members(names, world.rank)
    made: Group | None = world.memo.get(("group", members))
    axis, alone = "+".join([x for x in names if on.size(x) > 1] or names), len(members) == 1
    if made is None:
        made = Group(axis, world, members) if alone else cast(Group, world.connect(axis, members))
        world.memo["group", members] = made
    elif len(on.names) > 1:  # what it is called on a mesh tells more than "data", all ranks
        made.axis = axis
    return made
