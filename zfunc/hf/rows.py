"""Which rows of a batch a rank gets where ranks share the work on them (``split``, ``pipeline``).

Trainer gives every process rows of its own. On a mesh with axes ``tensor`` or ``pipe`` the ranks
along those get the same ones, and metrics count them once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from accelerate.data_loader import prepare_data_loader
from accelerate.utils import recursively_apply
from torch import Tensor

from zfunc.ranks.meshes import Mesh
from zfunc.ranks.world import rank, world_size

__all__ = ["gathered_once", "loader_of", "sharers"]


def sharers(mesh: Mesh | None) -> int:
    """How many ranks get the same rows."""
    return 1 if mesh is None else world_size() // len(mesh.members(mesh.batch, rank()))


def loader_of(accelerator: Any, mesh: Mesh, loader: Any) -> Any:
    """A data loader of this rank's rows; see ``Accelerator.prepare_data_loader``."""
    peers = mesh.members(mesh.batch, rank())
    prepared = prepare_data_loader(
        loader,
        accelerator.device,
        num_processes=len(peers),
        process_index=peers.index(rank()),
        split_batches=accelerator.split_batches,
        put_on_device=accelerator.device_placement,
        rng_types=accelerator.rng_types.copy(),
        dispatch_batches=False,  # else one rank reads, for all processes
        even_batches=accelerator.even_batches,
        use_seedable_sampler=accelerator.use_seedable_sampler,
        data_seed=accelerator.dataloader_config.data_seed,
        non_blocking=accelerator.non_blocking,
        use_stateful_dataloader=accelerator.use_stateful_dataloader,
    )
    accelerator._dataloaders.append(prepared)
    return prepared


@contextmanager
def gathered_once(accelerator: Any, mesh: Mesh | None) -> Iterator[None]:
    """A block in which ``accelerator.gather`` gives the rows of ranks that share them once."""
    if mesh is None or sharers(mesh) == 1:
        yield
        return
    gather, firsts = accelerator.gather, list(mesh.members(mesh.batch, 0))
    accelerator.gather = lambda tensors: recursively_apply(partial(_of, firsts), gather(tensors))
    try:
        yield
    finally:
        del accelerator.gather  # the class's method again


def _of(ranks: list[int], rows: Tensor) -> Tensor:
    return rows.unflatten(0, (world_size(), -1))[ranks].flatten(0, 1)
