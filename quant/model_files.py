"""Parameters read from safetensors files straight into low bits, one tensor in full at a time."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from zfunc.errors import CheckpointError
from zfunc.files.tensorfiles import SafetensorsFiles
from zfunc.modules.functional import Functional
from zfunc.modules.units import TensorInfo
from zfunc.quant import files
from zfunc.quant.choice import Include, accepts, check_met, transposed_names
from zfunc.quant.qtensor import QTensor
from zfunc.quant.trees import format_of
from zfunc.trees.nodes import Tree

__all__ = ["quantize_files", "read_files"]

PathLike = str | os.PathLike[str]


def quantize_files(
    path: PathLike,
    bits: int,
    group_size: int | None,
    symmetric: bool,
    include: Include,
    *,
    dynamic: bool,
    model: Functional,
) -> Tree:
    """The params of a functionalized module, read from files and quantised leaf by leaf.

    Args:
        path: a safetensors file, a folder of them (with an index or without), or a file that
            ``quant.save`` wrote, which is taken as it is.
        bits, group_size, symmetric, include, dynamic: as for ``quantize_tree``.
        model: the module; the files' names are those of its ``state_dict``.

    Returns:
        A tree like ``model.params``; leaves that stay plain have the model's dtype.

    Raises:
        CheckpointError: files are missing or damaged, or lack a tensor of the model.
    """
    if files.is_low_bit(path):
        return files.load(path, like=model)
    form = format_of(bits, group_size, symmetric, dynamic)
    wanted, turned = accepts(include, model), transposed_names(model)
    shapes = {leaf.name: leaf.shape for leaf in model._pool.anatomy.leaves}
    chosen = {name for name, shape in shapes.items() if wanted(name, len(shape))}
    check_met(include, {name: len(shape) for name, shape in shapes.items()}, sorted(chosen))

    def low(name: str, x: Tensor) -> Tensor:
        return QTensor.quantize(x, form, name in turned, name) if name in chosen else x

    return read_files(path, model, low)


def read_files(
    path: PathLike, model: Functional, make: Callable[[str, Tensor], Tensor] = lambda name, x: x
) -> Tree:
    """The params of a functionalized module from files, one tensor in full at a time.

    Args:
        path: a safetensors file, or a folder of them.
        model: the module; its own parameters are not looked at (they may lie on ``meta``).
        make: ``(name, tensor as stored) -> leaf``, which then gets the model's dtype.

    Raises:
        CheckpointError: files are missing or damaged, or lack a tensor of the model.
    """
    source, anatomy = SafetensorsFiles(path), model._pool.anatomy
    prefix = getattr(model._pool.skeleton, "base_model_prefix", "") or ""
    called = {leaf.name: _called(leaf, source, path, prefix) for leaf in anatomy.leaves}
    tensors: dict[str, Any] = {}
    for leaf in anatomy.leaves:
        tensors[leaf.name] = make(leaf.name, source.read(called[leaf.name])).to(leaf.dtype)
    return anatomy.tree(tensors)


def _called(leaf: TensorInfo, source: SafetensorsFiles, path: PathLike, prefix: str) -> str:
    """The name of a leaf in the files: its own, or another one that it is tied to.

    Files of the model without its head (GPT-2's) leave the prefix of its names out.
    """
    aliases = [f"{home}.{attribute}" if home else attribute for home, attribute in leaf.homes]
    names = [leaf.name, *aliases]
    for name in (*names, *(name.removeprefix(f"{prefix}.") for name in names)):
        if name in source.tensors:
            found = torch.Size(source.tensors[name].shape)
            if found != leaf.shape:
                raise CheckpointError(
                    f"{os.fspath(path)}: {name} has shape {tuple(found)}, the model expects "
                    f"{tuple(leaf.shape)}."
                )
            return name
    some = ", ".join(sorted(source.tensors)[:3])
    raise CheckpointError(
        f"{os.fspath(path)} has no tensor {leaf.name}. It has {some}, ...: are "
        "these the files of this model?"
    )
