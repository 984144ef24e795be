"""A driver with GPUs that are not there, and NCCL over gloo: what torch says, nothing of zfunc."""

# ruff: noqa: PT008  (plain functions, as those in their place are)
from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d


class Options:
    """Of the pretended NCCL."""

    _timeout = timedelta(seconds=30)
    is_high_priority_stream = False


class Nccl(dist.ProcessGroupGloo):
    """Gloo under the name of NCCL."""

    supports_splitting = False

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        super().__init__(store, rank, size, timeout=options._timeout)


Nccl.Options = Options  # type: ignore[attr-defined, misc, assignment]


@contextmanager
def gpus(visible: str, host: str, nccl: bool = True) -> Iterator[None]:
    """See these physical GPUs of a host, as under ``CUDA_VISIBLE_DEVICES``."""
    numbers = [number for number in visible.split(",") if number]
    state = {"device": 0}

    def properties(device: torch.device) -> Any:
        return mock.Mock(uuid=f"GPU-{host}-{numbers[device.index]}")

    def set_device(device: Any) -> None:
        index = torch.device("cuda", device).index if isinstance(device, int) else device.index
        assert 0 <= index < len(numbers), "invalid device ordinal"
        state["device"] = index

    with (
        mock.patch.dict(os.environ, {"CUDA_VISIBLE_DEVICES": visible}),
        mock.patch("torch.cuda.device_count", lambda: len(numbers)),
        mock.patch("torch.cuda.is_available", lambda: bool(numbers)),
        mock.patch("torch.accelerator.current_accelerator", lambda: torch.device("cuda")),
        mock.patch("torch.cuda.current_device", lambda: state["device"]),
        mock.patch("torch.cuda.set_device", set_device),
        mock.patch("torch.cuda.get_device_properties", properties),
        mock.patch("socket.gethostname", lambda: host),
        mock.patch("zfunc.ranks.devices.host", lambda: host),
        mock.patch.object(dist, "is_nccl_available", lambda: nccl),
        mock.patch.object(distributed_c10d, "is_nccl_available", lambda: nccl),
        mock.patch.object(distributed_c10d, "ProcessGroupNCCL", Nccl, create=True),
        mock.patch.object(dist, "ProcessGroupNCCL", Nccl, create=True),
    ):
        yield
