"""Optimizers by name: zfunc's, and the same written out literally on dicts of plain tensors.

A *spec* is a name with arguments, ``("adamw", {...})``; a ``"chain"`` has specs in it. What a
rule keeps (``slots``) is named as the leaves of zfunc's optimizer state are.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from zfunc import optim

__all__ = ["Rule", "Spec", "chosen", "literal", "product"]

Spec = tuple[str, dict[str, Any]]
Leaves = dict[str, Tensor]


def chosen(path: str, salt: int, parts: int = 2) -> int:
    """To which of ``parts`` a leaf belongs: by its path alone, evenly spread."""
    return zlib.crc32(f"{salt} {path}".encode()) % parts


def rate_of(lr: Any) -> Any:
    """A number, or zfunc's schedule."""
    return lr if isinstance(lr, float) else getattr(optim, lr[0])(*lr[1:])


def rate_at(lr: Any, count: int) -> float:
    """The same after ``count`` updates."""
    if isinstance(lr, float):
        return lr
    name, peak, *rest = lr
    if name == "linear":
        end, steps = rest
        return peak + (end - peak) * min(count / steps, 1.0)
    warmup, steps = (0, *rest) if name == "cosine" else rest
    if count < warmup:
        return peak * count / warmup
    part = min((count - warmup) / (steps - warmup), 1.0)
    return peak * (1 + math.cos(math.pi * part)) / 2


def mask_of(salt: int | None) -> Callable[[str], bool] | None:
    return None if salt is None else lambda path: chosen(path, salt) == 0


def product(spec: Spec) -> Any:
    """The spec as zfunc's ``GradientTransformation``."""
    name, how = spec
    if name == "chain":
        return optim.chain(*map(product, how["of"]))
    if name == "skip":
        return optim.skip_nonfinite(product(how["of"]))
    if name == "parts":
        named = {str(i): product(part) for i, part in enumerate(how["of"])}
        return optim.multi_transform(named, lambda path: str(chosen(path, how["salt"], len(named))))
    if name == "clip":
        return optim.clip_by_global_norm(how["norm"])
    if name == "decay":
        return optim.masked(optim.add_decayed_weights(how["rate"]), mask_of(how["salt"]))
    how = {**how, "lr": rate_of(how["lr"])}
    if "mask" in how:
        how["mask"] = mask_of(how["mask"])
    return getattr(optim, name)(**how)


class Rule:
    """Updates to be added, from gradients; ``slots`` are all that it keeps.

    Attributes:
        count: updates so far.
        kept: its running means, by their place in zfunc's state.
    """

    def __init__(self, how: dict[str, Any], params: Leaves) -> None:
        self.how, self.count = how, 0
        self.kept: dict[str, Leaves] = {}

    def zeros(self, place: str, params: Leaves) -> None:
        self.kept[place] = {path: torch.zeros_like(p) for path, p in params.items()}

    def update(self, grads: Leaves, params: Leaves) -> Leaves:
        raise NotImplementedError

    def slots(self) -> dict[str, Any]:
        kept = {f"{k}.{path}": x for k, mean in self.kept.items() for path, x in mean.items()}
        return {"0": torch.tensor(self.count), **kept}

    def decay_of(self, path: str) -> float:
        keep = mask_of(self.how.get("mask"))
        return self.how.get("weight_decay", 0.0) if keep is None or keep(path) else 0.0

    def mean(self, place: str, path: str, new: Tensor, past: float, weight: float) -> Tensor:
        self.kept[place][path] = self.kept[place][path] * past + new * weight
        return self.kept[place][path]


class Sgd(Rule):
    def __init__(self, how: dict[str, Any], params: Leaves) -> None:
        super().__init__(how, params)
        if how.get("momentum"):
            self.zeros("1", params)

    def update(self, grads: Leaves, params: Leaves) -> Leaves:
        rate, momentum = rate_at(self.how["lr"], self.count), self.how.get("momentum", 0.0)
        self.count += 1
        out = {}
        for path, g in grads.items():
            step = g
            if momentum:
                step = self.mean("1", path, g, momentum, 1.0)
            if self.how.get("nesterov"):
                step = g + momentum * step
            out[path] = -rate * step
        return out


class Lion(Rule):
    def __init__(self, how: dict[str, Any], params: Leaves) -> None:
        super().__init__(how, params)
        self.zeros("1", params)

    def update(self, grads: Leaves, params: Leaves) -> Leaves:
        rate, b1, b2 = rate_at(self.how["lr"], self.count), 0.9, 0.99
        self.count += 1
        out = {}
        for path, g in grads.items():
            step = torch.sign(self.kept["1"][path] * b1 + g * (1 - b1))
            out[path] = -rate * (step + self.decay_of(path) * params[path])
            self.mean("1", path, g, b2, 1 - b2)
        return out


class Adam(Rule):
    eps = 1e-8

    def __init__(self, how: dict[str, Any], params: Leaves) -> None:
        super().__init__(how, params)
        self.zeros("1", params)
        self.zeros("2", params)

    def update(self, grads: Leaves, params: Leaves) -> Leaves:
        rate, b1, b2 = rate_at(self.how["lr"], self.count), 0.9, self.how.get("b2", 0.999)
        self.count += 1
        out = {}
        for path, g in grads.items():
            m = self.mean("1", path, g, b1, 1 - b1) / (1 - b1**self.count)
            v = self.mean("2", path, g * g, b2, 1 - b2) / (1 - b2**self.count)
            step = m / (v.sqrt() + self.eps) + self.decay_of(path) * params[path]
            out[path] = -rate * self.trust(step, params[path]) * step
        return out

    def trust(self, step: Tensor, param: Tensor) -> float | Tensor:
        return 1.0


class AdamW(Adam):
    def __init__(self, how: dict[str, Any], params: Leaves) -> None:
        super().__init__({"weight_decay": 0.01, **how}, params)


class Lamb(Adam):
    eps = 1e-6

    def trust(self, step: Tensor, param: Tensor) -> float | Tensor:
        size, length = param.norm(), step.norm()
        return size / length if size > 0 and length > 0 else 1.0


class Clip(Rule):
    def update(self, grads: Leaves, params: Leaves) -> Leaves:
        norm = sum(float(g.square().sum()) for g in grads.values()) ** 0.5
        factor = 1.0 if norm <= self.how["norm"] else self.how["norm"] / norm
        return {path: g * factor for path, g in grads.items()}

    def slots(self) -> dict[str, Any]:
        return {}


class Decay(Rule):
    def update(self, grads: Leaves, params: Leaves) -> Leaves:
        keep = mask_of(self.how["salt"])
        assert keep is not None
        rates = {path: self.how["rate"] * keep(path) for path in grads}
        return {path: g + rates[path] * params[path] for path, g in grads.items()}

    def slots(self) -> dict[str, Any]:
        return {}


class Chain(Rule):
    def __init__(self, how: dict[str, Any], params: Leaves) -> None:
        super().__init__(how, params)
        self.rules = [literal(part, params) for part in how["of"]]

    def update(self, grads: Leaves, params: Leaves) -> Leaves:
        for rule in self.rules:
            grads = rule.update(grads, params)
        return grads

    def slots(self) -> dict[str, Any]:
        rows = enumerate(self.rules)
        return {f"{i}.{k}": x for i, rule in rows for k, x in rule.slots().items()}


class Parts(Rule):
    """Each leaf has the rule of its label."""

    def __init__(self, how: dict[str, Any], params: Leaves) -> None:
        super().__init__(how, params)
        n = len(how["of"])
        self.mine = [
            {path: p for path, p in params.items() if chosen(path, how["salt"], n) == i}
            for i in range(n)
        ]
        self.rules = [literal(part, p) for part, p in zip(how["of"], self.mine, strict=True)]

    def update(self, grads: Leaves, params: Leaves) -> Leaves:
        out: Leaves = {}
        for rule, mine in zip(self.rules, self.mine, strict=True):
            out.update(rule.update({path: grads[path] for path in mine}, params))
        return out

    def slots(self) -> dict[str, Any]:
        rows = enumerate(self.rules)
        return {f"0.{i}.{k}": x for i, rule in rows for k, x in rule.slots().items()}


class Skip(Rule):
    def __init__(self, how: dict[str, Any], params: Leaves) -> None:
        super().__init__(how, params)
        self.rule, self.total, self.row = literal(how["of"], params), 0, 0

    def update(self, grads: Leaves, params: Leaves) -> Leaves:
        if all(bool(g.isfinite().all()) for g in grads.values()):
            self.row = 0
            return self.rule.update(grads, params)
        self.total, self.row = self.total + 1, self.row + 1
        return {path: torch.zeros_like(g) for path, g in grads.items()}

    def slots(self) -> dict[str, Any]:
        inner = {f"0.{k}": x for k, x in self.rule.slots().items()}
        return {**inner, "1": torch.tensor(self.total), "2": torch.tensor(self.row)}


RULES: dict[str, type[Rule]] = {
    "sgd": Sgd,
    "lion": Lion,
    "adam": Adam,
    "adamw": AdamW,
    "lamb": Lamb,
    "clip": Clip,
    "decay": Decay,
    "chain": Chain,
    "parts": Parts,
    "skip": Skip,
}


def literal(spec: Spec, params: Leaves) -> Rule:
    """The spec, written out; ``params`` are the leaves that are trained."""
    name, how = spec
    return RULES[name](how, params)
