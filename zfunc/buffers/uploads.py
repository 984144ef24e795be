"""Small host tensors on their way to a device, for which the host does not wait.

``torch.tensor(x, device="cuda")`` and a copy from pageable memory wait until the device has done
all that was asked of it before. A copy from page-locked memory does not, and torch's allocator of
such memory keeps a block from being used again before the copy out of it is over.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["on_device"]


def on_device(x: Tensor, device: torch.device | str | None) -> Tensor:
    """``x`` on a device; itself, if it is there (or ``device`` is ``None``).

    From a device to the host it is an ordinary copy, which waits.

    >>> on_device(torch.ones(2), "cpu")
    tensor([1., 1.])
    """
    if device is None:
        return x
    goal = torch.device(device)
    if x.device.type == goal.type and goal.index in (None, x.device.index):
        return x
    if x.device.type == "cpu" and goal.type == "cuda":
        return x.pin_memory().to(goal, non_blocking=True)
    return x.to(goal)
