"""The plain run of a case in float64, written out, and the comparison with zfunc's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.laws.cases import bits, named
from tests.laws.fuzz.cases import Case, Place, names_in
from tests.laws.fuzz.models import rebuilt
from tests.laws.fuzz.rules import literal
from tests.laws.fuzz.running import Plain, theta_at
from tests.laws.fuzz.trial import Leg, beginning, entry, left_in, legs
from zfunc.quant.fake import Grouping, fake_quantize

__all__ = ["check"]

Leaves = dict[str, Tensor]


def check(case: Case) -> None:
    """Run a case and compare it with the plain loop.

    Raises:
        AssertionError: they differ, or ranks do, or a state was changed that should not be.
    """
    ran = legs(case)
    plain = PlainRun(case)
    for leg in ran:
        plain.follow(leg)
        plain.compare(leg)


class PlainRun:
    """One process, one loop, no zfunc but what it noted of its random numbers.

    Attributes:
        params: all leaves by path; ``trained`` of them have a gradient.
    """

    def __init__(self, case: Case) -> None:
        self.case, self.tree = case, case.model.params()
        leaves = {k: p for k, p in named(self.tree).items() if p is not None}
        self.params: Leaves = {k: p.detach().clone() for k, p in leaves.items()}
        self.start = dict(self.params)
        self.trained = [path for path in self.params if not (case.frozen and case.stays(path))]
        self.rule = literal(case.optimizer, {k: self.params[k] for k in self.trained})
        buffers = case.model.buffers()
        self.buffers = None if buffers is None else {k: b.clone() for k, b in buffers.items()}
        self.steps = 0
        self.seen: dict[bytes, str] = {}  # what has been drawn, and where
        self.left: Leaves = {}
        self.by_rank: Leaves = {}  # the part of it that ranks keep for themselves

    # One step

    def follow(self, leg: Leg) -> None:
        """Take the steps of a leg, and compare their metrics."""
        self.take_up(leg)
        self.check_randomness(leg)
        count = len(leg.metrics[0])
        for i in range(count):
            loss, norm, aux = self.step(leg, i)
            if self.case.poison == leg.first + i:
                continue
            wanted = {"loss": loss, **aux}
            if not (leg.place.lossy and leg.left[i + 1]):
                wanted["grad_norm"] = norm  # else an estimate
            for rank, rows in enumerate(leg.metrics):
                for name, value in wanted.items():
                    self.near(rows[i][name], value, f"{name}, step {leg.first + i}, rank {rank}")

    def take_up(self, leg: Leg) -> None:
        """What was left out before goes along."""
        if leg.place.lossy or self.left:
            owning = leg.place.stage == 0 and leg.place.compress["method"] != "powersgd"
            if leg.first and self.case.moves == "save" and not owning:
                self.left = self.by_rank  # what an owner left out is dropped, as documented
            most = leg.place.layout.get("persist_below", 0)
            for path in {**self.left, **leg.left[0]}:
                zero = torch.zeros_like(self.params[path])
                if path not in leg.left[0] and zero.numel() <= most:
                    continue  # a leaf that every rank has whole is not compressed here
                a, b = self.left.get(path, zero), leg.left[0].get(path, zero)
                self.near(b, a, f"left out of {path}, taken up")

    def step(self, leg: Leg, i: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        place = leg.place
        loss, grads, buffers, aux = self.gradients(leg, i)
        if place.lossy:
            before, after, factor = leg.left[i], leg.left[i + 1], self.assumed(place, leg.first + i)
            for path, g in grads.items():
                zero = torch.zeros_like(g)
                grads[path] = g + (before.get(path, zero) - after.get(path, zero)) * factor
            self.left = after
        norm = sum(g.square().sum() for g in grads.values()) ** 0.5
        finite = all(bool(g.isfinite().all()) for g in grads.values())
        self.steps += 1
        if place.precision is not None and not finite:
            return loss, norm, aux  # a step that precision leaves out
        updates = self.rule.update(grads, self.params)
        self.params = {k: p + updates[k] if k in updates else p for k, p in self.params.items()}
        self.buffers = buffers
        return loss, norm, aux

    def gradients(self, leg: Leg, i: int) -> Any:
        """Loss, gradients, buffers and aux of the whole batch, part by part."""
        case, place = self.case, leg.place
        batch, n, ranks = case.batch(leg.first + i), place.accumulate, place.ranks
        theta = None if place.drop is None else theta_at(self.steps, *place.drop)
        entered = {k: self.entered(k, p, place) for k, p in self.params.items()}
        total, grads, sizes, ends = 0.0, {}, [], []
        whole = float(batch["counts"].sum())
        for r in range(ranks):
            low, high = case.rows * r // ranks, case.rows * (r + 1) // ranks
            buffers = self.buffers
            for k in range(n):
                small, more = divmod(high - low, n)  # longer microbatches come first
                a, b = (low + small * j + min(j, more) for j in (k, k + 1))
                part = {name: x[a:b] for name, x in batch.items()}
                run = Plain(leg.notes[r][i * n + k], theta)
                errors, buffers = case.model.errors(
                    rebuilt(self.tree, entered), part, run, self.key, buffers
                )
                run.check()
                counts = part["counts"].to(errors.dtype)
                if case.loss == "exact":
                    loss = (errors * counts).sum() / whole
                else:
                    loss = errors.mean() / (n * ranks)
                wrt = [entered[path] for path in self.trained]
                found = torch.autograd.grad(loss, wrt, allow_unused=True)
                for path, g in zip(self.trained, found, strict=True):
                    zero = torch.zeros_like(self.params[path])
                    g = zero if g is None else g.double()
                    grads[path] = grads.get(path, zero) + g
                total = total + loss.detach().double()
                sizes.append(errors.detach().abs().mean().double())
            ends.append(buffers)
        aux = {"size": sum(sizes) / len(sizes), "rows": torch.tensor(case.rows)}
        new = self.mean_of(ends) if case.model.buffered else self.buffers
        return total, grads, new, aux if case.aux else {}

    def assumed(self, place: Place, i: int) -> float:
        """The size of an exact loss's batch as the first microbatch lets one expect, relative to
        what it is: compression takes place in units of this, and errors stay in them."""
        if self.case.loss == "mean" or place.accumulate == 1:
            return 1.0
        counts, first = self.case.batch(i)["counts"], 0.0
        for r in range(place.ranks):
            low, high = (self.case.rows * k // place.ranks for k in (r, r + 1))
            first += float(counts[low : low - (low - high) // place.accumulate].sum())
        return max(first, 1.0) * place.accumulate / float(counts.sum())

    @property
    def key(self) -> Tensor | None:
        return torch.zeros(()) if self.case.keyed else None

    def entered(self, path: str, p: Tensor, place: Place) -> Tensor:
        """A parameter as the loss sees it: cast, rounded, asking for a gradient."""
        if place.precision is not None:
            p = p.to(getattr(torch, place.precision["compute"]))
        how = dict(place.quantize or {"target_bits": 16})
        bits = how.pop("target_bits")
        how.pop("start_bits", None)
        if bits < 16 and path in self.case.matrices:
            p = fake_quantize(p, Grouping(**how).format(p.shape, bits))
        return p.detach().clone().requires_grad_(path in self.trained)

    def mean_of(self, ends: list[Any]) -> Any:
        return {
            k: sum(e[k] for e in ends) / len(ends) if b.is_floating_point() else b
            for k, b in ends[0].items()
        }

    # What is asserted

    def near(self, x: Tensor, y: Tensor, where: str) -> None:
        assert x.shape == y.shape, f"{where}: shape {tuple(x.shape)} for {tuple(y.shape)}"
        if not x.numel():
            return
        gap = float((x.double() - y.double()).abs().max())
        most = self.tolerance * max(1.0, float(y.abs().max()))
        assert gap <= most, f"{where}: off by {gap:.2e}, allowed {most:.1e}"

    @property
    def tolerance(self) -> float:
        """Sums in another order, in float64; else what float32 resolves, times a few steps."""
        low = any(p.precision and p.precision["compute"] == "float32" for p in self.case.places)
        return 3e-4 if low else 1e-9

    def check_randomness(self, leg: Leg) -> None:
        """Ranks, steps, microbatches and layers draw numbers of their own; coins are common."""
        count, n = len(leg.metrics[0]), leg.place.accumulate
        for r, notes in enumerate(leg.notes):
            assert len(notes) == count * n, f"rank {r}: the loss ran {len(notes)} times"
            for call, noted in enumerate(notes):
                step = call // n * n
                assert noted.kept == leg.notes[0][step].kept, f"rank {r}: other layers ran"
                for site, drawn in noted.drawn.items():
                    where = f"site {site} of call {call} after step {leg.first} on rank {r}"
                    if drawn and drawn[0].numel():
                        other = self.seen.setdefault(bits(drawn[0]), where)
                        assert other == where, f"{where} drew the numbers of {other}"

    def compare(self, leg: Leg) -> None:
        """The state at the end of a leg, and what it evaluates to."""
        case, state = self.case, leg.state
        params = {k: p for k, p in named(entry(state, "params")).items() if p is not None}
        assert params.keys() == self.params.keys()
        for path, p in params.items():
            if path in self.trained:
                self.near(p, self.params[path], f"params.{path}")
            else:
                assert bits(p) == bits(self.start[path]), f"params.{path} is frozen, and changed"
        self.by_rank = left_in(state, ("worker",))
        slots = self.rule.slots()
        held = {k: x for k, x in named(entry(state, "opt_state")).items() if x is not None}
        for path, x in slots.items():
            self.near(held[path], x, f"opt_state.{path}")
        more = [k for k in held.keys() - slots.keys() if held[k].numel()]
        assert not more or "lamb" in names_in(case.optimizer), f"more in opt_state: {more}"
        assert int(entry(state, "step")) == self.steps
        assert bits(entry(state, "key")) == bits(entry(beginning(case), "key"))
        for name, b in ({} if case.by_hand else self.buffers or {}).items():
            self.near(entry(state, "buffers")[name], b, f"buffers.{name}")
        with torch.no_grad():
            tree = rebuilt(self.tree, self.params)
            batch = case.batch(leg.first)
            errors, _ = case.model.errors(tree, batch, Quietly(), None, self.buffers)
        if case.poison != leg.first and not case.model.buffered:
            for rank, found in enumerate(leg.errors):
                self.near(found, errors, f"evaluated on rank {rank}")


class Quietly(Plain):
    """A plain evaluation."""
