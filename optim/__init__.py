"""Optimizers as pairs of pure functions: optax's contract on plain and placed trees.

``tx.init(params) -> opt_state``, ``tx.update(grads, opt_state, params) -> (updates,
opt_state)``, ``apply_updates(params, updates) -> params``.

In the order of reading: ``base`` and ``updates`` (the contract); ``rates``, ``moments``, ``decay``
and ``paces`` (what optimizers share); ``adaptive``, ``fused``, ``buffers``, ``adam_8bit`` (Adam);
``descent`` (SGD), ``sign_descent`` (Lion) and ``layerwise`` (LAMB) with ``trust_ratios`` and
``flat``; ``combining``, ``guarding``, ``clipping``, ``averaging``, ``schedules``,
``loss_scaling``; ``scaling`` and
``scaled_descent`` (optax's directions and what is chained from them), ``muon``, ``places`` (where
a rank's elements lie in full leaves) with ``factored`` (Adafactor) and ``noise``, ``lookahead``,
``multi_steps``, ``hyperparams``, ``torch_states``; ``choices``, ``elementwise`` and ``checking``
(what is checked). What Adam and LAMB become under ``compress_grads`` is in ``adam_onebit``,
``adam_zero_one`` and ``lamb_onebit``, with ``frozen`` and ``adjacent``.
"""

from __future__ import annotations

from zfunc.optim.adam_8bit import Adam8State
from zfunc.optim.adam_onebit import onebit_adam
from zfunc.optim.adam_zero_one import zero_one_adam
from zfunc.optim.adaptive import AdamState, adam, adamw
from zfunc.optim.averaging import EmaState, ema
from zfunc.optim.base import EmptyState, GradientTransformation, identity
from zfunc.optim.checking import check_elementwise
from zfunc.optim.clipping import clip, clip_by_global_norm
from zfunc.optim.combining import MaskedState, MultiTransformState, chain, masked, multi_transform
from zfunc.optim.decay import add_decayed_weights
from zfunc.optim.descent import SgdState, sgd
from zfunc.optim.factored import (
    FactoredState,
    adafactor,
    clip_by_block_rms,
    scale_by_factored_rms,
    scale_by_param_block_rms,
)
from zfunc.optim.guarding import SkipState, skip_nonfinite
from zfunc.optim.hyperparams import InjectHyperparamsState, inject_hyperparams
from zfunc.optim.lamb_onebit import onebit_lamb
from zfunc.optim.layerwise import lamb
from zfunc.optim.lookahead import LookaheadState, lookahead
from zfunc.optim.loss_scaling import DynamicScale, ScaleState, next_scale
from zfunc.optim.multi_steps import MultiSteps, MultiStepsState
from zfunc.optim.muon import MuonState, muon, orthogonal, scale_by_muon
from zfunc.optim.noise import AddNoiseState, add_noise
from zfunc.optim.scaled_descent import adagrad, nadam, nadamw, radam, rmsprop
from zfunc.optim.scaling import (
    ScaleByRmsState,
    ScaleByRssState,
    ScaleByStddevState,
    TraceState,
    scale,
    scale_by_adam,
    scale_by_learning_rate,
    scale_by_lion,
    scale_by_radam,
    scale_by_rms,
    scale_by_rss,
    scale_by_stddev,
    trace,
)
from zfunc.optim.schedules import (
    ScheduleState,
    constant,
    cosine,
    exponential,
    join_schedules,
    linear,
    one_cycle,
    piecewise_constant,
    polynomial,
    scale_by_schedule,
    warmup_cosine,
    warmup_stable_decay,
)
from zfunc.optim.sign_descent import LionState, lion
from zfunc.optim.torch_states import from_torch
from zfunc.optim.trust_ratios import LambState
from zfunc.optim.updates import Moved, apply_updates

__all__ = [
    "Adam8State",
    "AdamState",
    "AddNoiseState",
    "DynamicScale",
    "EmaState",
    "EmptyState",
    "FactoredState",
    "GradientTransformation",
    "InjectHyperparamsState",
    "LambState",
    "LionState",
    "LookaheadState",
    "MaskedState",
    "Moved",
    "MultiSteps",
    "MultiStepsState",
    "MultiTransformState",
    "MuonState",
    "ScaleByRmsState",
    "ScaleByRssState",
    "ScaleByStddevState",
    "ScaleState",
    "ScheduleState",
    "SgdState",
    "SkipState",
    "TraceState",
    "adafactor",
    "adagrad",
    "adam",
    "adamw",
    "add_decayed_weights",
    "add_noise",
    "apply_updates",
    "chain",
    "check_elementwise",
    "clip",
    "clip_by_block_rms",
    "clip_by_global_norm",
    "constant",
    "cosine",
    "ema",
    "exponential",
    "from_torch",
    "identity",
    "inject_hyperparams",
    "join_schedules",
    "lamb",
    "linear",
    "lion",
    "lookahead",
    "masked",
    "multi_transform",
    "muon",
    "nadam",
    "nadamw",
    "next_scale",
    "one_cycle",
    "onebit_adam",
    "onebit_lamb",
    "orthogonal",
    "piecewise_constant",
    "polynomial",
    "radam",
    "rmsprop",
    "scale",
    "scale_by_adam",
    "scale_by_factored_rms",
    "scale_by_learning_rate",
    "scale_by_lion",
    "scale_by_muon",
    "scale_by_param_block_rms",
    "scale_by_radam",
    "scale_by_rms",
    "scale_by_rss",
    "scale_by_schedule",
    "scale_by_stddev",
    "sgd",
    "skip_nonfinite",
    "trace",
    "warmup_cosine",
    "warmup_stable_decay",
    "zero_one_adam",
]
