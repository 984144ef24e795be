"""Which kind of device a rank computes on: what depends on it asks here."""

from contextvars import ContextVar

import torch

__all__ = ["FORESEEN", "kind"]

FORESEEN: ContextVar[str] = ContextVar("zfunc_foreseen", default="")
"""What a CPU without values stands for, where a step is foreseen (``zfunc.foresight``)."""


def kind(device: torch.device) -> str:
    """``"cpu"``, ``"cuda"``, ...: of a device, or of the one that it stands for."""
    return FORESEEN.get() or device.type
