"""zfunc: large-model training in PyTorch as a matter of composing pure functions.

    step = shard(donate(train_step), stage=3)
    state = step.place(zf.TrainState.create(model.params, tx))
    for batch in data:
        state, metrics = step(state, batch)

See ``docs/all-of-zfunc.md`` for the whole library on one page.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from zfunc import comm, errors, random, tree
from zfunc.batches import local_batch
from zfunc.collectives import axis_index, pmean, psum
from zfunc.differentiation import evaluate, value_and_grad
from zfunc.disk.recovery import recover
from zfunc.errors import (
    CheckpointError,
    CompositionError,
    DesyncError,
    DeviceError,
    DonatedStateError,
    NonFiniteError,
    PlacementError,
    ZfuncError,
)
from zfunc.files.checkpoint import checkpoints, restore, save
from zfunc.files.pretrained import export_safetensors, import_safetensors
from zfunc.graphs import captured
from zfunc.language.generation import generate
from zfunc.modules.functional import Functional, functionalize
from zfunc.placed.sharded import Sharded
from zfunc.placed.unreduced import linear_map
from zfunc.primitives import Mean, layer, reduced, scan, settled
from zfunc.recipe import train_step
from zfunc.renewal import recover_world
from zfunc.state import TrainState
from zfunc.step import Step, Transform
from zfunc.stopping import preemption
from zfunc.tree import Layers, full
from zfunc.worlds.axes import Mesh, mesh
from zfunc.worlds.launching import init, launch
from zfunc.worlds.simulation import simulate
from zfunc.worlds.world import rank, world_size

if TYPE_CHECKING:  # at run time by `__getattr__`
    from zfunc import kernels, optim, quant, transforms
    from zfunc.transforms import (
        accumulate,
        compress_grads,
        donate,
        drop_layers,
        offload,
        precision,
        quantize,
        remat,
        shard,
    )

__version__ = "0.1.0"

_TRANSFORMS = (
    "accumulate",
    "compress_grads",
    "donate",
    "drop_layers",
    "offload",
    "precision",
    "quantize",
    "remat",
    "shard",
)
_ROOMS = ("kernels", "optim", "quant", "transforms")

__all__ = [
    "CheckpointError",
    "CompositionError",
    "DesyncError",
    "DeviceError",
    "DonatedStateError",
    "Functional",
    "Layers",
    "Mean",
    "Mesh",
    "NonFiniteError",
    "PlacementError",
    "Sharded",
    "Step",
    "TrainState",
    "Transform",
    "ZfuncError",
    "accumulate",
    "axis_index",
    "captured",
    "checkpoints",
    "comm",
    "compress_grads",
    "donate",
    "drop_layers",
    "errors",
    "evaluate",
    "export_safetensors",
    "full",
    "functionalize",
    "generate",
    "import_safetensors",
    "init",
    "kernels",
    "launch",
    "layer",
    "linear_map",
    "local_batch",
    "mesh",
    "offload",
    "optim",
    "pmean",
    "precision",
    "preemption",
    "psum",
    "quant",
    "quantize",
    "random",
    "rank",
    "recover",
    "recover_world",
    "reduced",
    "remat",
    "restore",
    "save",
    "scan",
    "settled",
    "shard",
    "simulate",
    "train_step",
    "transforms",
    "tree",
    "value_and_grad",
    "world_size",
]


if not TYPE_CHECKING:  # a checker would take any name for one of ours

    def __getattr__(name: str) -> Any:
        """Transforms and rooms on first use: the core itself imports no transform."""
        if name in _TRANSFORMS:
            return getattr(importlib.import_module("zfunc.transforms"), name)
        if name in _ROOMS:
            return importlib.import_module(f"zfunc.{name}")
        raise AttributeError(f"module 'zfunc' has no attribute {name!r}")


def __dir__() -> list[str]:
    """All names, those that nobody has used yet included: what completion in a shell shows."""
    return sorted({*globals(), *__all__})
