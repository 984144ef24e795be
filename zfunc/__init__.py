"""zfunc: large-model training in PyTorch as a matter of composing pure functions.

    step = shard(donate(train_step), stage=3)
    state = step.place(zf.TrainState.create(model.params, tx))
    for batch in data:
        state, metrics = step(state, batch)

See ``docs/tour.md`` for a tour of 15 minutes.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from zfunc import errors
from zfunc.engine import context, step
from zfunc.engine.differentiation import evaluate, value_and_grad
from zfunc.engine.hooks import LayerInfo
from zfunc.engine.passes import layer, scan
from zfunc.engine.primitives import Mean
from zfunc.engine.step import Step, Transform, transform_of
from zfunc.errors import (
    BackwardError,
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
from zfunc.ranks import comm, random
from zfunc.ranks.meshes import Mesh, mesh
from zfunc.ranks.world import finders, rank, world_size
from zfunc.trees import tree
from zfunc.trees.reduction import linear_map, reduced, settled
from zfunc.trees.tree import Layers, full

if TYPE_CHECKING:  # at run time by `__getattr__`
    from zfunc import hf as hf
    from zfunc import kernels, optim, quant, transforms
    from zfunc.engine.batches import local_batch
    from zfunc.engine.state import TrainState
    from zfunc.files.checkpoint import checkpoints, restore, save
    from zfunc.files.extras import extra
    from zfunc.files.pretrained import export_safetensors, import_safetensors
    from zfunc.foresight.choices import Plan
    from zfunc.foresight.clusters import Cluster
    from zfunc.foresight.prediction import Foreseen, foresee
    from zfunc.foresight.profiles import Profile
    from zfunc.foresight.profiling import profile
    from zfunc.foresight.scaling import Scaling, scale_out
    from zfunc.language.generation import generate
    from zfunc.layout.splits import Cut
    from zfunc.modules.functional import Functional, functionalize
    from zfunc.operators.likelihoods import cross_entropy
    from zfunc.operators.products import column, row
    from zfunc.operators.vocabulary import embed
    from zfunc.ranks.collectives import axis_index, pmean, psum
    from zfunc.ranks.launching import init, launch
    from zfunc.ranks.redistribution import (
        all_gather,
        all_to_all,
        pmax,
        pmin,
        ppermute,
        psum_scatter,
    )
    from zfunc.ranks.simulation import simulate
    from zfunc.schedules.pipeline_schedule import Schedule
    from zfunc.training.planning import plan
    from zfunc.training.recipe import train_step
    from zfunc.training.stopping import preemption
    from zfunc.training.world_recovery import recover_world
    from zfunc.transforms import (
        accumulate,
        compress_grads,
        donate,
        drop_layers,
        offload,
        pipeline,
        precision,
        quantize,
        remat,
        shard,
        split,
    )
    from zfunc.transforms.capture import captured
    from zfunc.transforms.offloading.recovery import recover

# Where these were before they had rooms; `from zfunc.tree import Layers` goes on working.
for _moved in (comm, context, random, step, tree):
    sys.modules[f"zfunc.{_moved.__name__.rpartition('.')[2]}"] = _moved

__version__ = "0.1.0"

_HOMES = {  # imported on first use: nobody pays for what is not used
    "engine.batches": ("local_batch",),
    "engine.state": ("TrainState",),
    "files.checkpoint": ("checkpoints", "restore", "save"),
    "files.extras": ("extra",),
    "files.pretrained": ("export_safetensors", "import_safetensors"),
    "foresight.clusters": ("Cluster",),
    "foresight.choices": ("Plan",),
    "foresight.prediction": ("Foreseen", "foresee"),
    "foresight.scaling": ("Scaling", "scale_out"),
    "foresight.profiles": ("Profile",),
    "foresight.profiling": ("profile",),
    "language.generation": ("generate",),
    "layout.splits": ("Cut",),
    "modules.functional": ("Functional", "functionalize"),
    "operators.likelihoods": ("cross_entropy",),
    "operators.products": ("column", "row"),
    "operators.vocabulary": ("embed",),
    "ranks.collectives": ("axis_index", "pmean", "psum"),
    "ranks.launching": ("init", "launch"),
    "ranks.redistribution": (
        *("all_gather", "all_to_all", "pmax", "pmin", "ppermute", "psum_scatter"),
    ),
    "ranks.simulation": ("simulate",),
    "schedules.pipeline_schedule": ("Schedule",),
    "training.planning": ("plan",),
    "training.recipe": ("train_step",),
    "training.stopping": ("preemption",),
    "training.world_recovery": ("recover_world",),
    "transforms": (
        *("accumulate", "compress_grads", "donate", "drop_layers", "offload", "pipeline"),
        *("precision", "quantize", "remat", "shard", "split"),
    ),
    "transforms.capture": ("captured",),
    "transforms.offloading.recovery": ("recover",),
}
_LATER = {name: home for home, names in _HOMES.items() for name in names}
_ROOMS = ("hf", "kernels", "optim", "quant", "transforms")

__all__ = [
    "BackwardError",
    "CheckpointError",
    "Cluster",
    "CompositionError",
    "Cut",
    "DesyncError",
    "DeviceError",
    "DonatedStateError",
    "Foreseen",
    "Functional",
    "LayerInfo",
    "Layers",
    "Mean",
    "Mesh",
    "NonFiniteError",
    "PlacementError",
    "Plan",
    "Profile",
    "Scaling",
    "Schedule",
    "Sharded",
    "Step",
    "TrainState",
    "Transform",
    "ZfuncError",
    "accumulate",
    "all_gather",
    "all_to_all",
    "axis_index",
    "captured",
    "checkpoints",
    "column",
    "comm",
    "compress_grads",
    "cross_entropy",
    "donate",
    "drop_layers",
    "embed",
    "errors",
    "evaluate",
    "export_safetensors",
    "extra",
    "foresee",
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
    "pipeline",
    "plan",
    "pmax",
    "pmean",
    "pmin",
    "ppermute",
    "precision",
    "preemption",
    "profile",
    "psum",
    "psum_scatter",
    "quant",
    "quantize",
    "random",
    "rank",
    "recover",
    "recover_world",
    "reduced",
    "remat",
    "restore",
    "row",
    "save",
    "scale_out",
    "scan",
    "settled",
    "shard",
    "simulate",
    "split",
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


@finders.append
def _joined_by_torch() -> Any:
    """The world of a process group that was made without ``zf.init``."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    from zfunc.ranks.distributed import DistributedWorld  # only where there are several ranks

    return DistributedWorld()


def __dir__() -> list[str]:
    """All names, those that nobody has used yet included: what completion in a shell shows."""
    return sorted({*globals(), *__all__})
