"""Parameters read from safetensors files straight into low bits, one tensor in full at a time."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from zfunc.errors import CheckpointError, PlacementError
from zfunc.files.elements import Elements
from zfunc.files.tensorfiles import SafetensorsFiles
from zfunc.layout.cutter import Cutter
from zfunc.layout.splits import Split
from zfunc.modules.functional import Functional
from zfunc.modules.units import TensorInfo
from zfunc.quant import files
from zfunc.quant.choice import Include, accepts, check_met, transposed_names
from zfunc.quant.qtensor import QTensor
from zfunc.quant.trees import format_of
from zfunc.trees.nodes import Tree
from zfunc.trees.tree import map_with_path

__all__ = ["known", "quantize_files", "read_files", "shapes_of"]

PathLike = str | os.PathLike[str]
MakeCutter = Callable[..., Cutter]
"""``(params, grains) -> Cutter``: how such params are split, by shapes alone."""
Choose = Callable[[Tree], Callable[[str], bool]]
"""``params -> (name -> bool)``: of which leaves of such params this rank has anything."""


def quantize_files(
    path: PathLike,
    bits: int,
    group_size: int | None,
    symmetric: bool,
    include: Include,
    *,
    dynamic: bool,
    model: Functional,
    cutter: MakeCutter | None = None,
    choose: Choose | None = None,
) -> Tree:
    """The params of a functionalized module, read from files and quantised leaf by leaf.

    Args:
        path: a safetensors file, a folder of them (with an index or without), or a file that
            ``quant.save`` wrote, which is taken as it is.
        bits, group_size, symmetric, include, dynamic: as for ``quantize_tree``.
        model: the module; the files' names are those of its ``state_dict``.
        cutter, choose: see :func:`read_files`.

    Returns:
        A tree like ``model.params``; leaves that stay plain have the model's dtype.

    Raises:
        CheckpointError: files are missing or damaged, or lack a tensor of the model.
    """
    if files.is_low_bit(path):
        return _cut(files.load(path, like=model), cutter)
    form = format_of(bits, group_size, symmetric, dynamic)
    wanted, turned = accepts(include, model), transposed_names(model)
    shapes = {leaf.name: leaf.shape for leaf in model._pool.anatomy.leaves}
    chosen = {name for name, shape in shapes.items() if wanted(name, len(shape))}
    check_met(include, {name: len(shape) for name, shape in shapes.items()}, sorted(chosen))

    def low(name: str, x: Tensor) -> Tensor:
        if name not in chosen:
            return x
        whole = form.fitted(shapes[name][0 if name in turned else -1])
        if x.is_meta:
            return QTensor.absent(x, form, name in turned).grouped(whole)
        return QTensor.quantize(x, form, name in turned, name).grouped(whole)

    if cutter is None:
        return read_files(path, model, low, choose=choose)
    grains = {
        name: whole.group_size
        for name in chosen
        if (whole := form.fitted(shapes[name][0 if name in turned else -1])).group_size
    }

    def alone(name: str, split: Split) -> bool:
        """Whether what a rank has of a leaf is rounded as in the full one."""
        inner = split.dim == (0 if name in turned else len(shapes[name]) - 1)
        return name not in chosen or not inner or name in grains

    return read_files(path, model, low, lambda params: cutter(params, grains), alone, choose)


def read_files(
    path: PathLike,
    model: Functional,
    make: Callable[[str, Tensor], Tensor] = lambda name, x: x,
    cutter: MakeCutter | None = None,
    alone: Callable[[str, Split], bool] = lambda name, split: True,
    choose: Choose | None = None,
) -> Tree:
    """The params of a functionalized module from files, one tensor in full at a time.

    Args:
        path: a safetensors file, or a folder of them.
        model: the module; its own parameters are not looked at (they may lie on ``meta``).
        make: ``(name, tensor as stored) -> leaf``, which then gets the model's dtype.
        cutter: takes this rank's parts; of leaves that are split only these are read, and kept.
        alone: ``(name, split)``, whether ``make`` of a part is the part of what it makes of all;
            else all of the leaf is read.
        choose: of which leaves this rank has anything. Others are not read, and are on ``meta``.

    Raises:
        CheckpointError: files are missing or damaged, or lack a tensor of the model.
    """
    source, anatomy = SafetensorsFiles(path), model._pool.anatomy
    prefix = getattr(model._pool.skeleton, "base_model_prefix", "") or ""
    called = {leaf.name: _called(leaf, source, path, prefix) for leaf in anatomy.leaves}
    parts = None if cutter is None else cutter(shapes_of(model))
    wanted = (lambda name: True) if choose is None else choose(shapes_of(model))
    tensors: dict[str, Any] = {}
    for leaf in anatomy.leaves:
        name, split = leaf.name, None if parts is None else parts.splits.get(leaf.name)
        if not wanted(name):
            shape = (
                leaf.shape
                if split is None or parts is None
                else split.shape(leaf.shape, parts.rank)
            )
            own = make(name, torch.empty(shape, dtype=leaf.dtype, device="meta"))
            tensors[name] = own if parts is None else parts.marked(name, own)
        elif parts is None:
            tensors[name] = make(name, source.read(called[name])).to(leaf.dtype)
        elif split is None or not alone(name, split):
            full = make(name, source.read(called[name])).to(leaf.dtype)
            tensors[name] = parts.local(name, full, copy=split is not None)
        else:
            own = make(name, _part(source, called[name], split, parts.rank)).to(leaf.dtype)
            tensors[name] = parts.marked(name, own)
    return anatomy.tree(tensors)


def known(model: Functional | None, path: PathLike) -> Functional:
    """The model whose parameters are to be read from files.

    Raises:
        PlacementError: there is none.
    """
    if model is None:
        raise PlacementError(
            f"place({os.fspath(path)!r}): to read parameters from files the model must be "
            "known. Quantise its apply: zf.quantize(zf.functionalize(model).apply, bits=8), "
            "split it: zf.split(model.apply, model), or give it stages: zf.pipeline(model.apply)."
        )
    return model


def shapes_of(model: Functional) -> Tree:
    """A tree like a module's params, on ``meta``."""
    leaves = model._pool.anatomy.leaves
    made = {x.name: torch.empty(x.shape, dtype=x.dtype, device="meta") for x in leaves}
    return model._pool.anatomy.tree(made)


def _part(source: SafetensorsFiles, name: str, split: Split, rank: int) -> Tensor:
    """A rank's part of a tensor: nothing else of it is held."""
    leaf = source.tensors[name]
    out = torch.empty(split.shape(leaf.shape, rank), dtype=leaf.dtype)
    source.fill(name, Elements(0, out.numel(), split.rows(leaf.shape, rank)), out.view(-1))
    return out


def _cut(params: Tree, cutter: MakeCutter | None) -> Tree:
    """This rank's parts of params that were read in full."""
    if cutter is None:
        return params
    parts = cutter(params)
    return map_with_path(lambda path, x: parts.local(path, x, copy=True), params)


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
        f"{os.fspath(path)} has no tensor {leaf.name}. It has {some}, ...: are these the files of "
        "this model? Of some (mixtures of experts) transformers makes others as it loads: then let "
        "it load them, functionalize what from_pretrained gives, and place its params."
    )
