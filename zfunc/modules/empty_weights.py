"""Building a module without memory for its parameters: only its structure and buffers are real."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

__all__ = ["without_parameters"]


@contextmanager
def without_parameters() -> Iterator[None]:
    """Modules that this thread builds inside have their parameters on ``meta``.

    Buffers (rotary tables, masks) are made as ever, which ``torch.device("meta")`` would not do.
    One parameter at a time is in memory, until it is registered, and nothing initialises it.

    >>> import torch
    >>> with without_parameters():
    ...     norm = nn.BatchNorm1d(3)
    >>> norm.weight.device.type, norm.running_var
    ('meta', tensor([1., 1., 1.]))
    """
    mine = threading.get_ident()

    def emptied(module: nn.Module, name: str, p: Tensor | None) -> nn.Parameter | None:
        # A parameter that is there already is left alone: tied ones stay one object.
        if p is None or p.is_meta or threading.get_ident() != mine:
            return None
        return nn.Parameter(p.detach().to("meta"), requires_grad=p.requires_grad)

    handle = register_module_parameter_registration_hook(emptied)  # type: ignore[arg-type]
    try:
        yield
    finally:
        handle.remove()
