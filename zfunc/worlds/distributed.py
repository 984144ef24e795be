"""The world of a process under ``torch.distributed``, and the process groups of its meshes."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from zfunc.worlds import world
from zfunc.worlds.gloo import PointToPoint
from zfunc.worlds.nccl import Native
from zfunc.worlds.transport import Transport

__all__ = ["DistributedWorld"]


class DistributedWorld(world.World):
    """One rank of an initialised ``torch.distributed``."""

    def __init__(self, timeout: float | None = None) -> None:
        super().__init__(dist.get_rank(), dist.get_world_size(), timeout)
        self._accelerated = "nccl" in str(dist.get_backend_config())

    @property
    def device(self) -> torch.device:
        """The GPU that ``init`` selected for this rank, or the CPU."""
        if self._accelerated:
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")

    def connect(self, sizes: tuple[tuple[str, int], ...], axes: tuple[str, ...]) -> Transport:
        """The transport over the process group that a ``DeviceMesh`` has for these axes."""
        process_group = self.process_group(sizes, axes)
        cpu = PointToPoint(process_group, self.timeout)
        return Native(process_group, cpu) if self._accelerated else cpu

    def process_group(
        self, sizes: tuple[tuple[str, int], ...], axes: tuple[str, ...]
    ) -> dist.ProcessGroup:
        """The process group of ``axes``, shared with users of the same ``DeviceMesh``."""
        grid = self.device_mesh(sizes)
        if len(axes) == len(sizes) == 1:
            return grid.get_group()
        if len(axes) == 1:
            return grid.get_group(axes[0])
        if len(axes) == len(sizes):
            return dist.group.WORLD  # type: ignore[return-value]  # row-major, so ranks agree
        return grid[axes]._flatten().get_group()

    def device_mesh(self, sizes: tuple[tuple[str, int], ...]) -> DeviceMesh:
        """The ``DeviceMesh`` with these axes; made once, by all ranks together."""
        made: DeviceMesh | None = self.memo.get(("device_mesh", sizes))
        if made is None:
            names = tuple(name for name, _ in sizes)
            shape = tuple(size for _, size in sizes)
            made = init_device_mesh(self.device.type, shape, mesh_dim_names=names)
            self.memo["device_mesh", sizes] = made
        return made


def local_rank() -> int:
    """This rank's index on its host, as torchrun tells it."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def _find() -> DistributedWorld | None:
    return DistributedWorld() if dist.is_available() and dist.is_initialized() else None


world.finders.append(_find)
