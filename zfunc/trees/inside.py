"""Whether code runs within the forward of a ``torch.autograd.Function``."""

from __future__ import annotations

import torch

__all__ = ["inside_function"]


def inside_function() -> bool:
    """Within ``autograd.Function.forward``, the one place that turns off forward-mode AD alone.

    ``Function.apply`` asks no ``__torch_function__``, so this is where it can be noticed.
    """
    return not (torch._C._is_fwd_grad_enabled() or torch.is_inference_mode_enabled())
