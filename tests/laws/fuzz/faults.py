"""Faults for the fuzzer to find: each patches zfunc, for as long as a ``with`` lasts.

A fault has a name, and says of a case whether it could show there, so that those are tried first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

from tests.laws.fuzz.cases import Case, names_in
from zfunc import tree
from zfunc.engine import differentiation, keys, state
from zfunc.engine.communication import communication
from zfunc.engine.unit_info import Ready
from zfunc.files import checkpoint
from zfunc.layout import counting, rounds, sharded
from zfunc.operators import stream
from zfunc.optim import clipping, rates
from zfunc.ranks.comm import Group
from zfunc.training import recipe
from zfunc.transforms import accumulation, layer_drop, sharding
from zfunc.transforms.compression import error_feedback

__all__ = ["FAULTS", "injected", "shows"]

Fault = Iterator[None]
FAULTS: dict[str, tuple[Callable[[], Any], Callable[[Case], bool]]] = {}


def fault(shows: Callable[[Case], bool]) -> Callable[[Callable[[], Fault]], Callable[[], Any]]:
    def note(make: Callable[[], Fault]) -> Callable[[], Any]:
        made = contextmanager(make)
        FAULTS[make.__name__.replace("_", " ")] = made, shows
        return made

    return note


def injected(name: str) -> Any:
    """The context in which a fault is there."""
    return FAULTS[name][0]()


def shows(name: str, case: Case) -> bool:
    """Whether a case has what the fault concerns."""
    return FAULTS[name][1](case)


def several(case: Case) -> bool:
    return any(place.ranks > 1 for place in case.places)


def accumulates(case: Case) -> bool:
    return any(place.accumulate > 1 for place in case.places)


@fault(several)
def a_mean_over_ranks_that_is_a_sum() -> Fault:
    def across(group: Group) -> Any:
        real = _across(group)

        def finish(loss: Any) -> Any:
            value, _, mean = real(loss)
            return value, None, mean

        return finish

    _across = differentiation._across
    with patch.object(differentiation, "_across", across):
        yield


@fault(lambda case: any(1 < place.replicas < place.ranks for place in case.places))
def replicas_that_keep_their_gradients() -> Fault:
    def advance(self: Any) -> None:
        self._second = self._first

    with patch.object(rounds.ReplicaSum, "advance", advance):
        yield


@fault(lambda case: case.model.buffered)
def a_stale_buffer() -> Fault:
    def unpack(out: Any, buffers: Any, takes_buffers: bool, has_aux: bool) -> Any:
        loss, _, aux = _unpack(out, buffers, takes_buffers, has_aux)
        return loss, buffers, aux

    _unpack = recipe._unpack
    with patch.object(recipe, "_unpack", unpack):
        yield


@fault(lambda case: case.model.buffered and several(case))
def buffers_and_metrics_of_one_rank() -> Fault:
    with patch.object(recipe, "_averaged", lambda values: values):
        yield


@fault(lambda case: case.there is not None and case.moves == "save")
def swapped_leaves_of_equal_shape() -> Fault:
    """Two leaves change places as a checkpoint is read."""

    def fill(reader: Any, stock: Any, name: str, elements: Any, out: Any) -> None:
        leaf, names = stock.tensors[name], sorted(stock.tensors)
        alike = [k for k in names if _kind(stock.tensors[k]) == _kind(leaf)]
        mine = [k for k in alike if k.split(".")[0] == name.split(".")[0]]
        other = mine[mine.index(name) ^ 1] if mine.index(name) ^ 1 < len(mine) else name
        _fill(reader, stock, other, elements, out)

    _fill, _kind = checkpoint._fill, checkpoint._kind
    with patch.object(checkpoint, "_fill", fill):
        yield


@fault(lambda case: case.there is not None and case.moves == "save")
def a_moment_that_is_not_restored() -> Fault:
    def fill(reader: Any, stock: Any, name: str, elements: Any, out: Any) -> None:
        _fill(reader, stock, name, elements, out)
        if (
            "opt" in name.split(".")[0]
            and out.is_floating_point()
            and name.endswith(("w", "weight"))
        ):
            out.zero_()

    _fill = checkpoint._fill
    with patch.object(checkpoint, "_fill", fill):
        yield


@fault(lambda case: any(place.lossy for place in case.places))
def a_dropped_residual() -> Fault:
    """Compression forgets what it has not sent."""

    def errors(self: Any) -> Any:
        out = real(self)
        return {
            kind: {k: x.map(torch.zeros_like, [x]) for k, x in held.items()}
            if kind == "worker"
            else held
            for kind, held in out.items()
        }

    real = error_feedback.Call.errors
    with patch.object(error_feedback.Call, "errors", errors):
        yield


@fault(accumulates)
def a_gradient_counted_twice() -> Fault:
    """That of a first microbatch."""

    def added(total: Any, new: Any, i: int) -> Any:
        return real(total, tree.map(lambda g: g * 2, new) if i == 0 else new, i)

    def add(self: Any, key: Any, value: Any) -> None:
        known = self.__dict__.setdefault("known", set())
        real_add(self, key, value if key in known else Ready([g * 2 for g in value.wait()]))
        known.add(key)

    real, real_add = accumulation._added, accumulation.UnitSums.add
    with (
        patch.object(accumulation, "_added", added),
        patch.object(accumulation.UnitSums, "add", add),
    ):
        yield


@fault(accumulates)
def an_accumulate_that_forgets_its_last_microbatch() -> Fault:
    """It takes the one before again."""

    def parts(asked: Any, n: int, *rest: Any, **how: Any) -> Iterator[Any]:
        last = None
        for k, part in enumerate(real(asked, n, *rest, **how)):
            last = last if k == n - 1 and last is not None else part
            yield last

    real = accumulation.microbatches
    with patch.object(accumulation, "microbatches", parts):
        yield


@fault(lambda case: bool(case.frozen))
def a_frozen_leaf_that_is_trained() -> Fault:
    def create(params: Any, tx: Any, **how: Any) -> Any:
        return real(params, tx, **{**how, "trainable": None})

    real = state.TrainState.create
    with patch.object(state.TrainState, "create", staticmethod(create)):
        yield


@fault(lambda case: case.noisy and several(case))
def a_random_key_used_on_all_ranks() -> Fault:
    class Alone:
        rank = 0

    def randomness(running: Any, call: int) -> Any:
        over = communication(running)
        everyone, over.everyone = over.everyone, Alone
        try:
            return real(running, call)
        finally:
            over.everyone = everyone

    real = differentiation.randomness
    with patch.object(differentiation, "randomness", randomness):
        yield


@fault(lambda case: case.noisy or case.keyed)
def a_random_key_used_in_every_step() -> Fault:
    def fold_in(key: Any, data: Any) -> Any:
        if isinstance(data, torch.Tensor) and data.dtype == torch.int64:
            data = torch.zeros_like(data)  # the step count is the only tensor folded in
        return real(key, data)

    real = keys.fold_in
    with patch.object(keys, "fold_in", fold_in):
        yield


@fault(lambda case: any(p.drop is not None and p.drop[0] < 1 for p in case.places))
def kept_layers_that_are_not_scaled() -> Fault:
    def toss(self: Any, owner: Any, key: Any, call: int) -> None:
        real(self, owner, key, call)
        for tossed in self._tossed.values():
            tossed[:] = [(1.0 if kept else p, kept) for p, kept in tossed]

    real = layer_drop._Coins.toss
    with patch.object(layer_drop._Coins, "toss", toss):
        yield


@fault(lambda case: "clip" in names_in(case.optimizer) and several(case))
def a_norm_of_one_rank() -> Fault:
    """Gradients are clipped to the norm of this rank's part."""

    def norm(grads: Any) -> Any:
        leaves = [x for x in tree.leaves(grads) if isinstance(x, torch.Tensor)]
        return torch.stack([x.double().square().sum() for x in leaves]).sum().sqrt()

    with patch.object(clipping, "known_norm", norm):
        yield


@fault(lambda case: True)
def a_schedule_that_is_a_step_late() -> Fault:
    """And bias corrections with it: counts are read before the first update as after it."""

    def at(rate: Any, count: Any) -> Any:
        return real(rate, count + 1)

    real = rates.at
    from zfunc.optim import (
        adam_onebit,
        adam_zero_one,
        adaptive,
        descent,
        lamb_onebit,
        sign_descent,
        trust_ratios,
    )

    rules = (adam_onebit, adam_zero_one, adaptive, descent, lamb_onebit, sign_descent, trust_ratios)
    with ExitStack() as stack:
        for rule in rules:
            stack.enter_context(patch.object(rule, "at", at))
        yield


@fault(lambda case: any(p.ranks > 1 and p.stage == 3 for p in case.places))
def a_part_of_another_rank() -> Fault:
    """A step returns parameters of which one flat is that of the step before."""

    def sealed(self: Any, old: Any, new: Any) -> Any:
        out = real(self, old, new)
        params = out["net"] if isinstance(out, dict) else out.params
        before = old["net"] if isinstance(old, dict) else old.params
        if isinstance(params, sharded.Sharded) and isinstance(before, sharded.Sharded):
            flats = list(params.flats)
            flats[-1] = before.flats[-1]
            params = sharded.Sharded(params.layout, flats)
            out = {**out, "net": params} if isinstance(out, dict) else out.replace(params=params)
        return out

    real = sharding.Shard._sealed
    with patch.object(sharding.Shard, "_sealed", sealed):
        yield


def parted(case: Case) -> bool:
    return any(place.tensor > 1 for place in case.places)


@fault(lambda case: any(p.tensor > 1 and p.stage is not None for p in case.places))
def whole_leaves_counted_on_every_tensor_rank() -> Fault:
    """In norms: as if each of these ranks had a part of them."""

    def counted(on: Any, flat: int, rank: int) -> Any:
        full, some = real(on, flat, rank)
        first = not (on.flats[flat].whole and rank) and on.parts.rank > 0
        segments = on.segments(flat, rank) if first else ()
        return [*full, *(row for row in segments if row[0].split is None)], some

    real = counting._split
    with patch.object(counting, "_split", counted):
        yield


@fault(parted)
def gradients_before_a_product_that_stay_in_parts() -> Fault:
    """Each tensor rank keeps what its own outputs make of them."""
    with patch.object(stream, "copied", lambda x, *ranks: x):
        yield
