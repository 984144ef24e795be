"""The options that are combined on the pretended device, and which of them refuse each other."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

import zfunc as zf
from tests.gpu.training import Model, gpt_model
from zfunc import optim

__all__ = [
    "OPTIMIZERS",
    "OPTIONS",
    "STEPS",
    "Case",
    "model",
    "named",
    "refusal",
    "tolerance",
    "wrapped",
]

Case = dict[str, Any]
RATE = 1e-3
STEPS = 3

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "adamw": lambda: optim.adamw(RATE),
    "adam": lambda: optim.adam(RATE),
    "sgd": lambda: optim.sgd(RATE),
    "momentum": lambda: optim.sgd(RATE, momentum=0.9),
    "lamb": lambda: optim.lamb(RATE),
    "lion": lambda: optim.lion(RATE),
    "schedule": lambda: optim.adamw(optim.warmup_cosine(RATE, warmup=2, steps=10)),
    "masked": lambda: optim.chain(
        optim.masked(optim.add_decayed_weights(0.1), lambda path: "norm" not in path),
        optim.adam(RATE),
    ),
    "multi_transform": lambda: optim.multi_transform(
        {"a": optim.adamw(RATE), "b": optim.sgd(RATE)},
        lambda path: "a" if "blocks" in path else "b",
    ),
    "skip_nonfinite": lambda: optim.skip_nonfinite(optim.adamw(RATE)),
}

OPTIONS: dict[str, tuple[Any, ...]] = {
    "ranks": (1, 2),
    "stage": (3, None, 0, 1, 2),
    "optimizer": tuple(OPTIMIZERS),
    "clip": (False, True),
    "precision": (None, "bf16", "fp16"),
    "accumulate": (1, 2),
    "remat": (False, True),
    "donate": (False, True),
    "offload": (None, "cpu", "disk"),
    "compress": (None, "onebit", "int8", "int4", "powersgd", "zero_one"),
    "drop_layers": (False, True),
    "quantize": (False, True),
    "unit_bytes": (1 << 12, 1 << 10, 1 << 26),
    "persist_below": (0, 20),
    "dtype": ("float64", "float32"),
}
USUAL: Case = {name: values[0] for name, values in OPTIONS.items()}

ADAMS = ("adam", "adamw", "schedule")


def refusal(case: Case) -> str:
    """Why ``docs/composition.md`` refuses a case, or why it means nothing; ``""`` if it runs."""

    def has(**pairs: Any) -> bool:
        return all(
            name in case and (case[name] in want if isinstance(want, tuple) else case[name] == want)
            for name, want in pairs.items()
        )

    compresses = bool(case.get("compress"))
    if compresses and has(offload=("cpu", "disk")):
        return "compress_grads works on gradients that offload takes away"
    if has(compress="zero_one"):
        if has(stage=(1, 2, 3)):
            return "0/1 Adam needs whole moments"
        if case.get("precision"):
            return "0/1 Adam needs full precision"
        if has(quantize=True):
            return "0/1 Adam needs full precision"
        if case.get("optimizer", "adam") not in ADAMS:
            return "0/1 Adam needs Adam"
    return ""


def runs(case: Case) -> bool:
    """Whether a case, whole or in part, is one that runs."""
    if case.get("persist_below") and case.get("stage", 3) != 3:
        return False  # says nothing
    if case.get("persist_below") and case.get("compress") == "zero_one":
        return False  # of stage 0 alone
    if case.get("stage", 3) is None and case.get("unit_bytes", 1 << 12) != 1 << 12:
        return False
    if case.get("compress") and ("stage" in case and case["stage"] is None):
        return False  # nothing to send
    if case.get("compress") and case.get("ranks", 2) == 1:
        return False
    return not refusal(case)


def transforms(case: Case) -> list[Callable[[Any], Any]]:
    """What the step is wrapped in."""
    made: list[Callable[[Any], Any]] = []
    if case["donate"]:
        made.append(zf.donate)
    if case["stage"] is not None:
        how = {name: case[name] for name in ("stage", "unit_bytes", "persist_below")}
        made.append(lambda f: zf.shard(f, **how))
    if case["precision"] == "bf16":
        made.append(zf.precision)
    if case["precision"] == "fp16":
        made.append(lambda f: zf.precision(f, compute=torch.float16, loss_scale="dynamic"))
    if case["accumulate"] > 1:
        made.append(lambda f: zf.accumulate(f, case["accumulate"]))
    if case["remat"]:
        made.append(zf.remat)
    if case["offload"] == "cpu":
        made.append(zf.offload)
    if case["offload"] == "disk":
        made.append(lambda f: zf.offload(f, to="disk", path=tempfile.mkdtemp()))
    if case["compress"]:
        made.append(lambda f: zf.compress_grads(f, case["compress"], freeze_step=1))
    if case["drop_layers"]:
        made.append(lambda f: zf.drop_layers(f, theta=0.5, gamma=1.0))
    if case["quantize"]:
        bits = {"start_bits": 10, "target_bits": 8, "offset": 0, "period": 1}
        made.append(lambda f: zf.quantize(f, **bits))
    return made


def wrapped(case: Case, turn: int = 0) -> tuple[Callable[[Any], Any], Any]:
    """The wrap and the optimizer of a case; transforms are written in another order each turn."""
    made = transforms(case)
    cut = turn % len(made) if made else 0

    def wrap(step: Any) -> Any:
        for transform in (*made[cut:], *made[:cut]):
            step = transform(step)
        return step

    tx = OPTIMIZERS[case["optimizer"]]()
    return wrap, optim.chain(optim.clip_by_global_norm(0.5), tx) if case["clip"] else tx


def model(case: Case) -> Model:
    return gpt_model(depth=2, width=8, dtype=getattr(torch, case["dtype"]))


def rounded(case: Case, seed: int) -> Model:
    """The model of a case with other parameters, each moved by about a rounding."""
    given = model(case)
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(case["precision"])
    epsilon = torch.finfo(kind or getattr(torch, case["dtype"])).eps / 2
    draw = torch.Generator().manual_seed(seed)

    def moved(x: torch.Tensor) -> torch.Tensor:
        return x * (1 + epsilon * torch.randn(x.shape, generator=draw).to(x.dtype))

    params = zf.tree.map(moved, given.params())
    return replace(given, params=lambda: zf.tree.map(torch.clone, params))


def tolerance(case: Case) -> tuple[float, float]:
    """How far a run on the pretended GPU may be from that on the host, as ``near, apart``.

    The two runs differ in the order of sums, where the GPU's launchers ask for other twins than
    the host does, and in nothing else. So every number is within ``near``, relative and absolute.

    Rounding makes leaps of such differences: to 16 bits, to the few bits of compressed gradients
    and of quantised weights, and to the one bit of Lion's sign. In float64 and float32 few
    numbers lie so near to an edge that they come out on its other side. In 16 bits many do, and
    one of them may change the scale, the factors or the carried error that all numbers of its
    unit share. Then it is not single numbers that are compared but whole parts, by their norms:
    the parameters' difference may be ``apart`` times how far they have moved, that of the
    optimizer's state and of metrics ``apart`` times what they are. ``apart`` is 0 where rounding
    makes no leaps.
    """
    single, lion = case["dtype"] == "float32", case["optimizer"] == "lion"
    few = bool(case["compress"] or case["quantize"])
    if case["precision"]:
        sign = case["compress"] == "onebit" or (lion and few)
        return 1e-5, 0.4 if sign else 0.15 if few or lion else 0.02
    return (1e-5 if single else 1e-9), 0.1 if lion and single else 1e-2 if few else 0.0


def named(case: Case) -> str:
    """What is unusual about a case."""
    odd = [
        f"{name}={value}" if not isinstance(value, bool) else name if value else f"no {name}"
        for name, value in case.items()
        if value != USUAL[name]
    ]
    return " ".join(odd) or "usual"
