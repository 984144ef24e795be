"""A case under zfunc: each leg in its own simulated world, with all that the plain run needs."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import zfunc as zf
from tests.laws.cases import assert_same, bits, named
from tests.laws.fuzz.cases import Case, Place
from tests.laws.fuzz.models import PARTED
from tests.laws.fuzz.rules import product
from tests.laws.fuzz.running import Noted, Noting, Quiet
from zfunc import optim, tree

__all__ = ["Leg", "beginning", "composed", "entry", "left_in", "legs", "loss_of", "step_of"]

ROLES = {"net": "params", "net_opt": "opt_state"}
SEED = 11  # of the state's key


@dataclass
class Leg:
    """What one world saw.

    Attributes:
        first: the number of its first step.
        notes: by rank that has rows of its own, of each call of the loss.
        metrics: by such ranks, of each step.
        left: what compression had not sent, before the first step and after each.
        state: the full state at its end, as rank 0 has it.
        errors: by such ranks, the loss of each row of the first batch, evaluated at the end.
    """

    place: Place
    first: int
    notes: list[list[Noted]]
    metrics: list[list[dict[str, Any]]] = field(default_factory=list)
    left: list[dict[str, Tensor]] = field(default_factory=list)
    state: Any = None
    errors: list[Tensor] = field(default_factory=list)


def loss_of(case: Case, notes: list[list[Noted]]) -> Callable[..., Any]:
    """The loss as zfunc is given it."""
    model = case.model

    def core(params: Any, batch: Any, key: Any, buffers: Any) -> Any:
        noted = Noted()
        notes[zf.rank()].append(noted)
        errors, new = model.errors(params, batch, Noting(noted), key, buffers)
        counts = batch["counts"].to(errors.dtype)
        loss: Any = errors.mean()
        if case.loss == "exact":
            loss = zf.Mean((errors * counts).sum(), counts.sum())
        aux: Any = {"size": errors.detach().abs().mean(), "rows": torch.tensor(case.rows)}
        if model.buffered:
            return loss, (new, aux) if case.aux else new
        return (loss, aux) if case.aux else loss

    if case.keyed and model.buffered:
        return lambda params, batch, key, buffers: core(params, batch, key, buffers)
    if case.keyed:
        return lambda params, batch, key: core(params, batch, key, None)
    if model.buffered:
        return lambda params, batch, buffers: core(params, batch, None, buffers)
    return lambda params, batch: core(params, batch, None, None)


def step_of(case: Case, loss: Callable[..., Any]) -> zf.Step:
    """The bare step: the ready-made one, or one by hand on a dict."""
    tx = product(case.optimizer)
    if not case.by_hand:
        return zf.train_step(loss, tx, has_aux=case.aux)

    def step(state: Any, batch: Any) -> Any:
        value, grads = zf.value_and_grad(loss)(state["net"], batch)
        updates, opt_state = tx.update(grads, state["net_opt"], state["net"])
        new = {
            **state,
            "net": optim.apply_updates(state["net"], updates),
            "net_opt": opt_state,
            "step": state["step"] + 1,
        }
        return new, {"loss": value, "grad_norm": tree.global_norm(grads)}

    return zf.Step(step, tx=tx)


def composed(case: Case, place: Place, step: zf.Step, folder: Path) -> zf.Step:
    """The step in all that the place says, in its order."""
    roles = {"roles": ROLES} if case.by_hand else {}

    def precision(step: Any) -> Any:
        how = dict(place.precision or {})
        for name in ("compute", "reduce"):
            if name in how:
                how[name] = getattr(torch, how[name])
        return zf.precision(step, **how, **roles)

    def offload(step: Any) -> Any:
        disk = {"path": folder} if place.offload == "disk" else {}
        return zf.offload(step, to=place.offload, **disk, **roles)

    def shard(step: Any) -> Any:
        mesh = zf.mesh(replica=place.replicas, tensor=place.tensor) if place.replicas > 1 else None
        return zf.shard(step, stage=place.stage, mesh=mesh, **place.layout, **roles)

    wraps: dict[str, Callable[[Any], Any]] = {
        "shard": shard,
        "split": lambda f: zf.split(f, rules=PARTED, tensor=place.tensor),
        "accumulate": lambda f: zf.accumulate(f, place.accumulate),
        "precision": precision,
        "offload": offload,
        "remat": lambda f: zf.remat(f, policy=place.remat),
        "drop_layers": lambda f: zf.drop_layers(f, *place.drop),
        "compress_grads": lambda f: zf.compress_grads(f, **place.compress),
        "quantize": lambda f: zf.quantize(
            f, include=lambda path: path in case.matrices, **place.quantize, **roles
        ),
        "donate": zf.donate,
    }
    for name in place.wrapped():
        step = wraps[name](step)
    return step


def beginning(case: Case, blank: bool = False) -> Any:
    """The state before the first step; a blank one has none of its numbers."""
    params, buffers, tx = case.model.params(), case.model.buffers(), product(case.optimizer)
    key = SEED
    if blank:
        params, key = tree.map(torch.zeros_like, params), 99
        buffers = None if buffers is None else {k: torch.zeros_like(b) for k, b in buffers.items()}
    if case.by_hand:
        zero = torch.zeros((), dtype=torch.int64)
        state = {"net": params, "net_opt": tx.init(params), "step": zero, "aux": {}}
        return {**state, "key": zf.random.key(key)}
    trainable = (lambda path: not case.stays(path)) if case.frozen else None
    return zf.TrainState.create(params, tx, key=key, buffers=buffers, trainable=trainable)


def entry(state: Any, name: str) -> Any:
    """An entry of a state of either kind."""
    if isinstance(state, dict):
        return state.get({"params": "net", "opt_state": "net_opt"}.get(name, name))
    return getattr(state, name)


def left_in(state: Any, kinds: tuple[str, ...] = ("worker", "server")) -> dict[str, Tensor]:
    """What compression has not sent, in the mean over the ranks, by leaf."""
    carried = (entry(state, "aux") or {}).get("compress_grads")
    left: dict[str, Tensor] = {}
    if carried is None:
        return left
    for kind in kinds:
        for held in carried[kind].values():
            for path, x in named(held).items():
                if x is not None:
                    mean = x.double().mean(0) if kind == "worker" else x.double()
                    left[path] = left[path] + mean if path in left else mean
    return left


def bare_of(state: Any) -> Any:
    """A full state without what compression carries."""
    if isinstance(state, dict):
        return {**state, "aux": {}}
    return state.replace(aux={})


def legs(case: Case) -> list[Leg]:
    """The case, run."""
    with tempfile.TemporaryDirectory(prefix="zfunc-fuzz-") as folder:
        out: list[Leg] = []
        for place in case.places:
            out.append(_leg(case, place, out[-1] if out else None, Path(folder)))
        return out


def _leg(case: Case, place: Place, before: Leg | None, folder: Path) -> Leg:
    first = 0 if before is None else case.steps
    count = case.steps if before is None else case.later
    leg = Leg(place, first, [[] for _ in range(place.world)])
    start, saved = beginning(case), folder / "saved"
    if before is not None:
        start = before.state if place.lossy else bare_of(before.state)
    _ = case.model.params(), case.matrices  # made once, not by each rank

    def body() -> Any:
        step = step_of(case, loss_of(case, leg.notes))
        with composed(case, place, step, folder / f"tier {first}") as step:
            if before is not None and case.moves == "save":
                state = zf.restore(saved, like=step.place(beginning(case, blank=True)))
                found = step.unplace(state)
                assert_same(bare_of(found), bare_of(before.state), "restored")
            else:
                state = step.place(start)
                assert_same(bare_of(step.unplace(state)), bare_of(start), "placed")
            metrics, left = [], [left_in(step.unplace(state))]
            for i in range(first, first + count):
                batch, old = step.local_batch(case.batch(i)), _seen(place, state)
                new, out = step(state, batch)
                assert _seen(place, state) == old, f"step {i} changed the state that it was given"
                state = new
                metrics.append(out)
                if place.lossy:
                    left.append(left_in(step.unplace(state)))
            full = step.unplace(state)
            if before is None and case.there is not None and case.moves == "save":
                zf.save(saved, state)
            noted: Any = Quiet(Noted())
            errors = zf.evaluate(
                lambda p, b, buffers: case.model.errors(p, b, noted, None, buffers)
            )
            rows, _ = errors(entry(state, "params"), case.batch(first), entry(state, "buffers"))
            return metrics, left, full, rows

    runs = zf.simulate(place.world)(body)()
    for rank, run in enumerate(runs):
        assert_same(run[2], runs[0][2], f"ranks {rank} and 0")
    leg.metrics = _once([run[0] for run in runs], place, "metrics")
    leg.notes = _once(leg.notes, place, "layers that ran and numbers that were drawn")
    leg.errors = _once([run[3] for run in runs], place, "losses of rows")
    leg.left, leg.state = runs[0][1], runs[0][2]
    return leg


def _once(by_rank: list[Any], place: Place, what: str) -> list[Any]:
    """Of each tensor group what its first rank saw: what they all did."""
    for rank, mine in enumerate(by_rank):
        first = by_rank[rank - rank % place.tensor]
        assert_same(_plain(mine), _plain(first), f"{what} on tensor rank {rank % place.tensor}")
    return by_rank[:: place.tensor]


def _plain(found: Any) -> Any:
    """Notes as dicts, so that they are compared."""
    calls = found if isinstance(found, list) else []
    return [vars(call) if isinstance(call, Noted) else call for call in calls] or found


def _seen(place: Place, state: Any) -> list[bytes] | None:
    """The bits of a state in memory that a step must leave alone."""
    if place.donate or place.offload == "disk":
        return None
    return [bits(x) for x in tree.leaves(state) if isinstance(x, Tensor)]
