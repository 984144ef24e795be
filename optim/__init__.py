"""Optimizers as pairs of pure functions: optax's contract on plain and placed trees.

``tx.init(params) -> opt_state``, ``tx.update(grads, opt_state, params) -> (updates,
opt_state)``, ``apply_updates(params, updates) -> params``.

In the order of reading: ``base`` and ``updates`` (the contract); ``rates``, ``moments``, ``decay``
and ``paces`` (what optimizers share); ``adaptive`` with ``fused`` and ``buffers`` (Adam);
``descent`` (SGD), ``sign_descent`` (Lion) and ``layerwise`` (LAMB) with ``flat``; ``combining``,
``guarding``, ``clipping``, ``averaging``, ``schedules``, ``loss_scaling``; ``choices``,
``elementwise`` and ``checking`` (what is checked). What Adam and LAMB become under
``compress_grads`` is in ``adam_onebit``, ``adam_zero_one`` and ``lamb_onebit``, with ``frozen``
and ``adjacent``.
"""

from __future__ import annotations

from zfunc.optim.adam_onebit import onebit_adam
from zfunc.optim.adam_zero_one import zero_one_adam
from zfunc.optim.adaptive import AdamState, adam, adamw
from zfunc.optim.averaging import EmaState, ema
from zfunc.optim.base import EmptyState, GradientTransformation, identity
from zfunc.optim.checking import check_elementwise
from zfunc.optim.clipping import clip_by_global_norm
from zfunc.optim.combining import MaskedState, MultiTransformState, chain, masked, multi_transform
from zfunc.optim.decay import add_decayed_weights
from zfunc.optim.descent import SgdState, sgd
from zfunc.optim.guarding import SkipState, skip_nonfinite
from zfunc.optim.lamb_onebit import onebit_lamb
from zfunc.optim.layerwise import LambState, lamb
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
from zfunc.optim.sign_descent import LionState, lion
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
    "onebit_adam",
    "onebit_lamb",
    "scale_by_schedule",
    "sgd",
    "skip_nonfinite",
    "warmup_cosine",
    "zero_one_adam",
]
