"""Optimizers as pairs of pure functions: optax's contract on plain and placed trees.

``tx.init(params) -> opt_state``, ``tx.update(grads, opt_state, params) -> (updates,
opt_state)``, ``apply_updates(params, updates) -> params``.
"""

from __future__ import annotations

from zfunc.optim.adaptive import AdamState, LambState, adam, adamw, lamb
from zfunc.optim.averaging import EmaState, ema
from zfunc.optim.base import EmptyState, GradientTransformation, check_elementwise, identity
from zfunc.optim.clipping import clip_by_global_norm
from zfunc.optim.combining import MaskedState, MultiTransformState, chain, masked, multi_transform
from zfunc.optim.decay import add_decayed_weights
from zfunc.optim.descent import LionState, SgdState, lion, sgd
from zfunc.optim.guarding import SkipState, skip_nonfinite
from zfunc.optim.loss_scaling import DynamicScale, ScaleState, next_scale
from zfunc.optim.schedules import (
    ScheduleState,
    constant,
    cosine,
    linear,
    one_cycle,
    scale_by_schedule,
    warmup_cosine,
)
from zfunc.optim.updates import Moved, apply_updates

__all__ = [
    "AdamState",
    "DynamicScale",
    "EmaState",
    "EmptyState",
    "GradientTransformation",
    "LambState",
    "LionState",
    "MaskedState",
    "Moved",
    "MultiTransformState",
    "ScaleState",
    "ScheduleState",
    "SgdState",
    "SkipState",
    "adam",
    "adamw",
    "add_decayed_weights",
    "apply_updates",
    "chain",
    "check_elementwise",
    "clip_by_global_norm",
    "constant",
    "cosine",
    "ema",
    "identity",
    "lamb",
    "linear",
    "lion",
    "masked",
    "multi_transform",
    "next_scale",
    "one_cycle",
    "scale_by_schedule",
    "sgd",
    "skip_nonfinite",
    "warmup_cosine",
]
