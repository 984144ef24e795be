"""Transforms that lay the ranks out along named axes: all of a step have one mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

from zfunc.engine.step import Transform
from zfunc.errors import CompositionError
from zfunc.ranks.meshes import ORDER, Mesh, mesh

__all__ = ["Meshed"]


class Meshed(Transform):
    """Base of transforms with a field ``mesh``, which the step fills in.

    A mesh that was given to any of them is that of all. Without one it is made of the sizes that
    they ask for, and ``data`` takes what is left of the ranks. The order in which a step is wrapped
    changes nothing.
    """

    @property
    def axes(self) -> Mapping[str, int]:
        """Sizes that it asks for, by the axes' names."""
        return {}

    def on_mesh(self, transforms: Sequence[Transform]) -> Self:
        """This transform on the mesh of all.

        Raises:
            CompositionError: one has another mesh than another one, or asks for another size.
        """
        found = _one_mesh(transforms)
        if found is None:
            return self
        fields: Any = self  # its subclasses are dataclasses
        on_it: Self = replace(fields, mesh=found)
        return on_it


def _one_mesh(transforms: Sequence[Transform]) -> Mesh | None:
    """The mesh that was given to any of them, or one of the sizes that they ask for."""
    given = {t.mesh: t.name for t in transforms if t.mesh is not None and t.mesh.given}
    if len(given) > 1:
        told = " and ".join(f"{name} has {on}" for on, name in given.items())
        raise CompositionError(f"a step has one mesh, but {told}. Give it to one of them.")
    sizes: dict[str, tuple[int, str]] = {}
    for on, name in given.items():
        known = {**dict.fromkeys(ORDER, 1), **dict(on.axes)}
        sizes = {axis: (size, f"{name} has {on}") for axis, size in known.items()}
    for t in transforms:
        for axis, size in t.axes.items() if isinstance(t, Meshed) else ():
            mine = (size, f"{t.name} asks for {axis}={size}")
            if (other := sizes.setdefault(axis, mine))[0] != size:
                raise CompositionError(
                    f"a step has one mesh, but {other[1]} and {mine[1]}. Let the sizes agree."
                )
    if given:
        return next(iter(given))
    asked: Any = {axis: size for axis, (size, _) in sizes.items()}
    return replace(mesh(**asked), given=False) if asked else None
