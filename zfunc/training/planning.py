"""``plan``: which way to write a step is the fastest on a cluster that you may not have."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from zfunc import transforms
from zfunc.engine.batches import has_rows, leaves_of
from zfunc.engine.state import TrainState
from zfunc.foresight.choices import Plan, PlanRow, ordered, tried
from zfunc.foresight.clocks import notes_on
from zfunc.foresight.clusters import Cluster, check_cluster
from zfunc.modules.functional import Functional
from zfunc.optim import adamw
from zfunc.training.recipe import train_step

__all__ = ["plan"]

Told = Callable[[PlanRow], None]


def plan(
    step_of: Callable[..., Any] | None = None,
    make_state: Any = None,
    batch: Any = None,
    cluster: Cluster | None = None,
    over: Mapping[str, Iterable[Any]] | None = None,
    *,
    model: Functional | None = None,
    trials: int = 32,
    tell: Told | None = None,
) -> Plan:
    """Try ways to write a step, each foreseen on the cluster; nothing of it is computed.

    Args:
        step_of: ``step_of(**choice)`` returns a step. Without it a causal language model is trained
            with AdamW in bfloat16, and the usual stages, sizes of a mesh, microbatches and remat
            are tried, one change after the other, from what is best so far.
        make_state: the full state, or a function that makes it, as for ``foresee``; may be on meta.
        batch: of all ranks together, the same for all choices; may be on meta.
        cluster: how many ranks, and what they have.
        over: lists of values for ``step_of``'s keywords; all combinations are tried.
        model: in place of ``step_of``, ``make_state`` and ``over``: a module as a function, best
            made on meta, whose ``apply`` takes ``input_ids`` and ``labels`` and returns a ``loss``.
        trials: how many steps to try at most, without ``step_of``.
        tell: called with each choice when it is known, for progress.

    Returns:
        A :class:`Plan`: rows from the best to the worst, ``best``, and a table when printed.

    Raises:
        TypeError: neither ``step_of`` nor ``model``, both, or an argument that goes with the other;
            no cluster, or no lists in ``over``.
        ValueError: without ``step_of``, a batch without rows; a list in ``over`` is empty.

    >>> import zfunc as zf
    >>> def loss(params, x):
    ...     return (x @ params["w"]).square().mean()
    >>> tx = zf.optim.adamw(1e-3)
    >>> wide = zf.TrainState.create({"w": torch.empty(16384, 16384, device="meta")}, tx)
    >>> found = plan(
    ...     lambda stage: zf.shard(zf.train_step(loss, tx), stage=stage),
    ...     wide,
    ...     torch.empty(4096, 16384, device="meta"),
    ...     zf.Cluster.preset("a100-40", gpus=8),
    ...     over={"stage": [1, 3]},
    ... )
    >>> len(found.rows), found.best.sentence
    (2, 'zf.shard(step, stage=1)')
    """
    if (step_of is None) == (model is None):
        raise TypeError("plan: give step_of (with make_state and over), or model.")
    missing = [name for name, x in (("batch", batch), ("cluster", cluster)) if x is None]
    if step_of is not None and make_state is None:
        missing.append("make_state")
    if missing or (model is not None and (over is not None or make_state is not None)):
        what = f"{missing[0]} is missing" if missing else "over and make_state go with step_of"
        raise TypeError(f"plan: {what}.")
    assert cluster is not None
    check_cluster(cluster)
    if over is not None and not isinstance(over, Mapping):
        raise TypeError(f"plan: over={over!r}, expected keywords of step_of with lists of values.")
    for name, values in (over or {}).items():
        if isinstance(values, str) or not isinstance(values, Iterable):
            raise TypeError(f"plan: over[{name!r}]={values!r}, expected a list of values.")
    choices = {name: [*values] for name, values in (over or {}).items()}
    if empty := [name for name, values in choices.items() if not values]:
        raise ValueError(f"plan: over[{empty[0]!r}] has no values to try.")
    rows: list[PlanRow] = []
    attempts = (
        _usual(model, batch, cluster, trials)
        if model is not None
        else _all_of(step_of, make_state, batch, cluster, choices)
    )
    for row in attempts:
        rows.append(row)
        if tell is not None:
            tell(row)
    return Plan(ordered(rows), cluster, tuple(notes_on(cluster)))


def _all_of(
    step_of: Any, make_state: Any, batch: Any, cluster: Cluster, over: Mapping[str, Sequence[Any]]
) -> Iterator[PlanRow]:
    for values in product(*over.values()):
        given = dict(zip(over, values, strict=True))
        yield tried(partial(step_of, **given), make_state, batch, cluster, given)


@dataclass(frozen=True)
class UsualStep:
    """What is chosen without ``step_of``."""

    stage: int = 3
    tensor: int = 1
    pipe: int = 1
    microbatches: int = 1
    remat: bool = False
    unit_bytes: int = 64 << 20

    def step(self, model: Functional, tx: Any) -> Any:
        """The step that it stands for."""
        step = train_step(_loss_of(model), tx)
        if self.tensor > 1:
            step = transforms.split(step, model, tensor=self.tensor)
        if self.pipe > 1:
            step = transforms.pipeline(step, self.microbatches, pipe=self.pipe)
        elif self.microbatches > 1:
            step = transforms.accumulate(step, self.microbatches)
        step = transforms.remat(step) if self.remat else step
        step = transforms.precision(step, compute=torch.bfloat16)
        return transforms.donate(
            transforms.shard(step, stage=self.stage, unit_bytes=self.unit_bytes)
        )

    def neighbours(self, cluster: Cluster, rows: int) -> Iterator[UsualStep]:
        """What differs in one thing, what helps most often first."""
        yield replace(self, remat=not self.remat)
        for factor in (2, 0.5):
            yield replace(self, microbatches=int(self.microbatches * factor))
        yield replace(self, stage=1 if self.stage == 3 else 3)
        for name in ("tensor", "pipe"):
            for factor in (2, 0.5):
                size = int(getattr(self, name) * factor)
                more: dict[str, Any] = {name: size}
                if name == "pipe" and size > 1:
                    more["microbatches"] = max(self.microbatches, 2 * size)
                yield replace(self, **more)
        yield replace(self, unit_bytes=(512 << 20) if self.unit_bytes < 512 << 20 else 64 << 20)

    def possible(self, cluster: Cluster, rows: int) -> bool:
        """Whether sizes divide, and each microbatch has rows."""
        if min(self.tensor, self.pipe, self.microbatches) < 1:
            return False
        together = self.tensor * self.pipe
        if cluster.gpus % together or self.tensor > cluster.gpus_per_node:
            return False
        data = cluster.gpus // together
        return rows % (data * self.microbatches) == 0


def _usual(model: Functional, batch: Any, cluster: Cluster, trials: int) -> Iterator[PlanRow]:
    """From one recipe to the best of its neighbours, until none is better."""
    rows = next((x.shape[0] for _, x in leaves_of(batch) if has_rows(x)), 0)
    if not rows:
        raise ValueError("plan: the batch has no rows, so it cannot be cut over ranks.")
    tx = adamw(1e-4)
    state = TrainState.create(model.params, tx)
    known: dict[UsualStep, PlanRow] = {}

    def attempt(recipe: UsualStep) -> PlanRow:
        given = {**vars(recipe), "data": cluster.gpus // (recipe.tensor * recipe.pipe)}
        known[recipe] = tried(partial(recipe.step, model, tx), state, batch, cluster, given)
        return known[recipe]

    here = _first(cluster, rows)
    yield attempt(here)
    moved = True
    while moved and len(known) < trials:
        moved = False
        for recipe in here.neighbours(cluster, rows):
            if recipe in known or not recipe.possible(cluster, rows) or len(known) >= trials:
                continue
            yield attempt(recipe)
            if known[recipe].cost < known[here].cost:
                here, moved = recipe, True
                break


def _first(cluster: Cluster, rows: int) -> UsualStep:
    """Stage 3 with remat; parts of layers within a node where there are too few rows for data."""
    recipe = UsualStep(remat=True)
    while not recipe.possible(cluster, rows) and recipe.tensor < cluster.gpus_per_node:
        recipe = replace(recipe, tensor=recipe.tensor * 2)
    return recipe


def _loss_of(model: Functional) -> Callable[[Any, Any], Tensor]:
    def loss(params: Any, batch: Any) -> Tensor:
        given = batch if isinstance(batch, Mapping) else {"input_ids": batch, "labels": batch}
        found: Tensor = model.apply(params, **given, use_cache=False).loss
        return found

    return loss
