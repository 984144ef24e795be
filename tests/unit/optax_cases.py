"""What is compared with optax: optimizers and schedules by both names, on numbers from formulas.

Plain data, without torch and without JAX, so that both sides read it.
"""

from __future__ import annotations

import math
from typing import Any

STEPS = 12
COUNTS = range(0, 40, 3)
SHAPES = {"b": 3, "w": 6}  # elements of each leaf
Case = tuple[str, tuple[Any, ...], dict[str, Any]]

# Name: the maker in both libraries, its arguments.
SAME: dict[str, Case] = {
    "rmsprop": ("rmsprop", (0.1,), {}),
    "rmsprop outside": ("rmsprop", (0.1,), {"eps_in_sqrt": False, "decay": 0.99}),
    "rmsprop centered": ("rmsprop", (0.1,), {"centered": True, "eps": 1e-4}),
    "rmsprop unbiased": ("rmsprop", (0.1,), {"bias_correction": True, "initial_scale": 0.5}),
    "rmsprop centered, unbiased": (
        "rmsprop",
        (0.1,),
        {"centered": True, "bias_correction": True, "eps": 1e-3},
    ),
    "rmsprop momentum": ("rmsprop", (0.1,), {"momentum": 0.9}),
    "rmsprop nesterov": ("rmsprop", (0.1,), {"momentum": 0.9, "nesterov": True}),
    "adagrad": ("adagrad", (0.1,), {}),
    "adagrad from zero": ("adagrad", (0.1,), {"initial_accumulator_value": 0.0}),
    "nadam": ("nadam", (0.1,), {"b1": 0.8}),
    "nadamw": ("nadamw", (0.1,), {"weight_decay": 0.3}),
    "radam": ("radam", (0.1,), {"b2": 0.9}),
    "radam nesterov": ("radam", (0.1,), {"b2": 0.9, "nesterov": True}),
    "radam threshold": ("radam", (0.1,), {"b2": 0.99, "threshold": 7.0, "eps_root": 1e-3}),
    "scale_by_adam": ("scale_by_adam", (), {"eps_root": 1e-3}),
    "scale_by_lion": ("scale_by_lion", (), {"b1": 0.8}),
    "scale_by_rms": ("scale_by_rms", (), {}),
    "scale_by_stddev": ("scale_by_stddev", (), {"eps": 1e-3}),
    "scale_by_rss": ("scale_by_rss", (), {}),
    "scale_by_radam": ("scale_by_radam", (), {}),
    "scale_by_learning_rate": ("scale_by_learning_rate", (0.3,), {}),
    "trace": ("trace", (0.9,), {}),
    "trace nesterov": ("trace", (0.9, True), {}),
    "scale": ("scale", (-0.3,), {}),
    "clip": ("clip", (0.7,), {}),
}
# Name: optax's maker and arguments; ours.
SCHEDULES: dict[str, tuple[Case, Case]] = {
    "polynomial": (
        ("polynomial_schedule", (2.0, 0.5, 3, 20, 4), {}),
        ("polynomial", (2.0, 0.5, 3, 20, 4), {}),
    ),
    "exponential": (
        ("exponential_decay", (2.0, 7, 0.3, 4), {}),
        ("exponential", (2.0, 0.3, 7, 4), {}),
    ),
    "exponential stairs": (
        ("exponential_decay", (2.0, 7, 0.3), {"staircase": True, "end_value": 0.05}),
        ("exponential", (2.0, 0.3, 7), {"staircase": True, "end": 0.05}),
    ),
    "exponential growth": (
        ("exponential_decay", (2.0, 7, 1.5), {"end_value": 9.0}),
        ("exponential", (2.0, 1.5, 7), {"end": 9.0}),
    ),
    "piecewise_constant": (
        ("piecewise_constant_schedule", (2.0, {6: 0.5, 21: 0.1}), {}),
        ("piecewise_constant", (2.0, {21: 0.1, 6: 0.5}), {}),
    ),
}
# Leaves of several dimensions, for what depends on them; the maker and its arguments.
MATRICES: dict[str, tuple[int, ...]] = {"m": (4, 6), "t": (2, 5, 3), "u": (7, 2), "v": (5,)}
FACTORED: dict[str, Case] = {
    "adafactor": ("adafactor", (0.1,), {"min_dim_size_to_factor": 3}),
    "adafactor momentum": (
        "adafactor",
        (0.1,),
        {
            "min_dim_size_to_factor": 3,
            "momentum": 0.8,
            "multiply_by_parameter_scale": False,
            "decay_offset": -2,
        },
    ),
    "adafactor whole": ("adafactor", (0.1,), {"factored": False, "clipping_threshold": None}),
    "clip_by_block_rms": ("clip_by_block_rms", (0.5,), {}),
    "scale_by_param_block_rms": ("scale_by_param_block_rms", (), {}),
}
JOINED = ("exponential", "polynomial", "piecewise_constant"), (5, 17)


def parameters() -> dict[str, list[float]]:
    return {name: [math.cos(3.1 * k) for k in range(n)] for name, n in SHAPES.items()}


def matrices(step: int | None = None) -> dict[str, list[float]]:
    """Flattened parameters, or the gradients of a step."""
    sizes = {name: math.prod(shape) for name, shape in MATRICES.items()}
    if step is None:
        return {name: [math.cos(3.1 * k + 1) for k in range(n)] for name, n in sizes.items()}
    return {
        name: [math.sin(1.7 * k * k + 0.9 * step) for k in range(n)] for name, n in sizes.items()
    }


def gradients(step: int) -> dict[str, list[float]]:
    """Of all signs and sizes; one element of them is always zero."""
    return {
        name: [math.sin(1.7 * k + 0.9 * step) * 2 * (k != 1) for k in range(n)]
        for name, n in SHAPES.items()
    }
