"""Which kind of device a rank computes on, or stands for where a step is foreseen."""

from contextvars import ContextVar

import torch

__all__ = ["FORESEEN", "kind"]

FORESEEN: ContextVar[str] = ContextVar("zfunc_foreseen", default="")


def kind(device: torch.device) -> str:
    """``"cpu"``, ``"cuda"``, ...: of a device, or of the one that it stands for."""
    return FORESEEN.get() or device.type
