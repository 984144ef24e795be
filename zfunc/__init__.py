"""zfunc: large-model training in PyTorch as a matter of composing pure functions.

    step = shard(donate(train_step), stage=3)
    state = step.place(zf.TrainState.create(model.params, tx))
    for batch in data:
        state, metrics = step(state, batch)

See ``docs/all-of-zfunc.md`` for the whole library on one page.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from zfunc import errors
from zfunc.engine import context, step
from zfunc.engine.batches import local_batch
from zfunc.engine.context import LayerInfo
from zfunc.engine.differentiation import evaluate, value_and_grad
from zfunc.engine.passes import layer, scan
from zfunc.engine.primitives import Mean, reduced, settled
from zfunc.engine.state import TrainState
from zfunc.engine.step import Step, Transform, transform_of
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
from zfunc.layout.sharded import Sharded
from zfunc.layout.unreduced import linear_map
from zfunc.ranks import comm, random
from zfunc.ranks import distributed as _  # noqa: F401  (it finds a process group of the user's)
from zfunc.ranks.axes import Mesh, mesh
from zfunc.ranks.collectives import axis_index, pmean, psum
from zfunc.ranks.world import rank, world_size
from zfunc.trees import tree
from zfunc.trees.tree import Layers, full

if TYPE_CHECKING:  # at run time by `__getattr__`
    from zfunc import kernels, optim, quant, transforms
    from zfunc.files.checkpoint import checkpoints, restore, save
    from zfunc.files.pretrained import export_safetensors, import_safetensors
    from zfunc.language.generation import generate
    from zfunc.modules.functional import Functional, functionalize
    from zfunc.ranks.launching import init, launch
    from zfunc.ranks.simulation import simulate
    from zfunc.training.recipe import train_step
    from zfunc.training.renewal import recover_world
    from zfunc.training.stopping import preemption
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
    from zfunc.transforms.capture import captured
    from zfunc.transforms.offloading.recovery import recover

# Where these were before they had rooms; `from zfunc.tree import Layers` goes on working.
for _moved in (comm, context, random, step, tree):
    sys.modules[f"zfunc.{_moved.__name__.rpartition('.')[2]}"] = _moved

__version__ = "0.1.0"

_LATER = {  # on first use: nobody pays for what is not used
    "Functional": "modules.functional",
    "accumulate": "transforms",
    "captured": "transforms.capture",
    "checkpoints": "files.checkpoint",
    "compress_grads": "transforms",
    "donate": "transforms",
    "drop_layers": "transforms",
    "export_safetensors": "files.pretrained",
    "functionalize": "modules.functional",
    "generate": "language.generation",
    "import_safetensors": "files.pretrained",
    "init": "ranks.launching",
    "launch": "ranks.launching",
    "offload": "transforms",
    "precision": "transforms",
    "preemption": "training.stopping",
    "quantize": "transforms",
    "recover": "transforms.offloading.recovery",
    "recover_world": "training.renewal",
    "remat": "transforms",
    "restore": "files.checkpoint",
    "save": "files.checkpoint",
    "shard": "transforms",
    "simulate": "ranks.simulation",
    "train_step": "training.recipe",
}
_ROOMS = ("kernels", "optim", "quant", "transforms")

__all__ = [
    "CheckpointError",
    "CompositionError",
    "DesyncError",
    "DeviceError",
    "DonatedStateError",
    "Functional",
    "LayerInfo",
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
    "transform_of",
    "transforms",
    "tree",
    "value_and_grad",
    "world_size",
]


if not TYPE_CHECKING:  # a checker would take any name for one of ours

    def __getattr__(name: str) -> Any:
        """Whatever the core does without, on first use."""
        if name in _LATER:
            found = getattr(importlib.import_module(f"zfunc.{_LATER[name]}"), name)
            globals()[name] = found
            return found
        if name in _ROOMS:
            return importlib.import_module(f"zfunc.{name}")
        raise AttributeError(f"module 'zfunc' has no attribute {name!r}")


def __dir__() -> list[str]:
    """All names, those that nobody has used yet included: what completion in a shell shows."""
    return sorted({*globals(), *__all__})
