"""A step as the line of code that makes it."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any, cast

import torch

from zfunc import transforms
from zfunc.engine.step import Step, Transform
from zfunc.ranks.meshes import Mesh

__all__ = ["sentence"]


def sentence(step: Step, base: str = "step") -> str:
    """The expression that wraps a step in these transforms, innermost first.

    Args:
        step: wrapped in transforms of zfunc.
        base: the name of what they are wrapped around.

    What cannot be written in a word (a model, rules, a schedule of your own) stands there by the
    name of its argument.

    >>> import zfunc as zf
    >>> step = zf.shard(zf.precision(zf.accumulate(len, 4)), stage=1, mesh=zf.mesh(tensor=2))
    >>> sentence(step)
    'zf.precision(zf.accumulate(zf.shard(step, stage=1, mesh=zf.mesh(data=-1, tensor=2)), n=4))'
    """
    told = False
    for transform in step.transforms:
        mesh = transform.mesh
        shown = mesh is not None and mesh.given and not told
        told = told or shown
        arguments = [f"{name}={_written(name, x)}" for name, x in _given(transform, shown)]
        base = f"zf.{transform.name}({', '.join([base, *arguments])})"
    return base


def _given(transform: Transform, with_mesh: bool) -> list[tuple[str, Any]]:
    """The arguments of a transform that are not their defaults."""
    function = getattr(transforms, transform.name, None)
    known = {} if function is None else inspect.signature(function).parameters
    fields = {f.name: f for f in dataclasses.fields(cast(Any, transform))}
    found = []
    for name, parameter in known.items():
        field = fields.get(name) or fields.get(f"{name}_dtype")
        if field is None or (name == "mesh" and not with_mesh):
            continue
        value = getattr(transform, field.name)
        if value is not None and value not in (parameter.default, field.default):
            found.append((name, value))
    return found


def _written(name: str, value: Any) -> str:
    if isinstance(value, Mesh):
        return f"zf.{value!r}"
    if isinstance(value, torch.dtype | bool | int | float | str):
        return repr(value)
    if isinstance(value, tuple) and all(isinstance(x, str | int | float) for x in value):
        return repr(value)
    return name
