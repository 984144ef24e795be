"""``pipeline``: stages that have different layers, and microbatches that go through them.

Law: ``pipeline(f, n)(s, b) == accumulate(f, n)(s, b)``, for every schedule, any number of stages,
at every ZeRO stage: bitwise where ranks along ``data`` are one and no leaf is used by two stages,
up to the rounding of sums otherwise.

The loss is the user's own. Each rank runs it for each microbatch and each chunk of layers that it
has; layers of other chunks are skipped (:mod:`zfunc.rehearsal`), and what they would have given is
received where it is needed.

Source: Huang et al., GPipe, 2018; Narayanan et al., PipeDream and Megatron-LM, 2019 and 2021; Qi et
al., Zero Bubble Pipeline Parallelism, 2023.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import optree
import torch
from torch import Tensor

from zfunc.engine.context import PLACING, Context, current
from zfunc.engine.hooks import Gradients, LayerInfo, Order, Pending
from zfunc.engine.meshed import Meshed
from zfunc.engine.same_rows import same_arguments
from zfunc.engine.step import Differentiate, Transform, transform_of
from zfunc.engine.unit_info import UnitInfo
from zfunc.errors import CompositionError, PlacementError
from zfunc.layout.cutting import make_layout
from zfunc.layout.layout import whole
from zfunc.layout.readable import Readable
from zfunc.layout.replicated import Replicated
from zfunc.layout.stages import Stages
from zfunc.modules.functional import Functional
from zfunc.quant.model_files import known, read_files
from zfunc.ranks.axes import alone, group
from zfunc.ranks.comm import Group
from zfunc.ranks.meshes import ORDER, Mesh, laid_out
from zfunc.ranks.world import world_size
from zfunc.rehearsal.ghosts import RUN
from zfunc.schedules.catalogue import check_schedule
from zfunc.schedules.catalogue import schedule as made
from zfunc.schedules.pipeline_schedule import Schedule
from zfunc.transforms.accumulation import accumulated
from zfunc.transforms.microbatches import own_leaves
from zfunc.transforms.of_params import of_params
from zfunc.transforms.pipelining.assignment import agree, check_owners, followed
from zfunc.transforms.pipelining.description import balanced_by, described, predicts
from zfunc.transforms.pipelining.evaluation import can_be_staged, evaluated, predicted
from zfunc.transforms.pipelining.gradients import pipelined
from zfunc.transforms.pipelining.measuring import Measured, measured
from zfunc.transforms.pipelining.partition import Partition, check_partition, parts_of
from zfunc.transforms.sharding import Shard
from zfunc.trees import tree
from zfunc.trees.nodes import NAMESPACE, OPAQUE, Box, Placed, Tree, leaves_in
from zfunc.trees.tree import dotted

__all__ = ["Pipeline", "pipeline"]

NAME = "pipeline"
WEIGHTS = "weights of chunks"
EXCLUDED = {
    "accumulate": "pipeline cuts a batch into microbatches itself: leave out accumulate, and give "
    "their number as microbatches=.",
    "compress_grads": "compress_grads packs gradients for all ranks that share a state, and under "
    "pipeline those of a layer go to the ranks of its stage alone. Leave out one of them.",
}


@dataclass(frozen=True)
class Pipeline(Meshed):
    """See :func:`pipeline`."""

    microbatches: int = 1
    schedule: Any = "1f1b"
    chunks: int = 2
    partition: Partition = "flops"
    pipe: int | None = None
    mesh: Mesh | None = None
    axis: str = "pipe"
    example: Any = field(default=None, compare=False, repr=False)
    shard: Shard | None = field(default=None, compare=False, repr=False)
    plans: dict[int, Schedule] = field(default_factory=dict, init=False, compare=False, repr=False)
    of_params: bool = False  # the state is a params tree itself
    applied: Functional | None = field(default=None, compare=False, repr=False)
    position: ClassVar[int] = Order.PIPELINE
    by_unit: ClassVar[bool] = True
    represents: ClassVar[bool] = True
    needs_gradients: ClassVar[bool] = True
    name: ClassVar[str] = NAME

    def __repr__(self) -> str:
        how = self.schedule if isinstance(self.schedule, str) else "..."
        return f"pipeline(microbatches={self.microbatches}, schedule={how!r})"

    @property
    def axes(self) -> Mapping[str, int]:
        return {} if self.pipe is None else {self.axis: self.pipe}

    @property
    def averages(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.shard.averages if self.shard is not None else ()

    @property
    def has_stages(self) -> bool:
        """Whether there may be several stages."""
        return self.mesh is not None and dict(self.mesh.axes).get(self.axis, 1) != 1

    @property
    def group(self) -> Group:
        """The stages.

        Raises:
            CompositionError: there are several ranks, and nobody said how many are stages.
        """
        if self.mesh is None:
            if world_size() > 1:
                raise CompositionError(
                    f"pipeline over how many of the {world_size()} ranks? Give pipe=2, say, or "
                    "mesh=zf.mesh(data=..., pipe=...)."
                )
            return alone()
        return group(self.mesh, self.axis)

    @property
    def plan(self) -> Schedule:
        """What each stage does, in which order; made and checked once."""
        size = self.group.size
        if size not in self.plans:
            self.plans[size] = made(self.schedule, size, self.microbatches, self.chunks)
        return self.plans[size]

    def beside(self, others: Sequence[Transform]) -> Pipeline:
        for other in others:
            if other.name in EXCLUDED:
                raise CompositionError(EXCLUDED[other.name])
            if other.name == "offload" and getattr(other, "to", "") == "disk":
                raise CompositionError(
                    "beside pipeline a state is in memory: each stage has its own layers of it "
                    'alone. Leave out offload, or take offload(to="cpu").'
                )
        alike = replace(self, of_params=self.of_params or any(x.of_params for x in others))
        shard: Any = next((x for x in others if isinstance(x, Shard)), None)
        if shard is not None:
            return replace(alike, shard=None)
        uncut = Shard(stage=0, mesh=self.mesh, by=(self.name, repr(self)))
        return replace(alike, shard=uncut.beside([alike, *others]))

    # How the state is represented

    def stages(self, params: Tree, ranks: Group) -> Stages:
        """Which of some ranks have which leaves of a params tree."""
        rank_of, mesh = self.plan.rank_of, laid_out(self.mesh)
        work = self._work(ranks) if self.by_example else None
        parts = parts_of(params, len(rank_of), self.partition, work)
        if (placing := PLACING.get()) is not None:
            placing._memo().setdefault(WEIGHTS, {})[len(parts.chunk_of)] = parts.weights
        at = [mesh.coordinates(member)[self.axis] for member in ranks.members]
        holders = tuple(tuple(i for i, place in enumerate(at) if place == rank) for rank in rank_of)
        return Stages(parts.chunk_of, holders)

    def work(self, step: Any) -> tuple[int, ...]:
        """Of each stage of a step that has placed a state, that by which they are balanced."""
        known = step._memo().get(WEIGHTS, {})
        weights = known[max(known)] if known else ()
        rows = list(zip(self.plan.rank_of, weights, strict=True)) if weights else []
        return tuple(sum(n for rank, n in rows if rank == k) for k in range(self.group.size))

    def agree(self) -> None:
        """Raise if ranks were given other arguments; a collective of all ranks of the mesh.

        Raises:
            PlacementError: they were; names the arguments.
        """
        partition = ("partition", repr(self.partition))
        example = ("example", "given" if self.by_example else "not asked for")
        told = [*followed(self.schedule, self.plan), partition, example]
        agree(group(self.mesh, laid_out(self.mesh).names), told)

    @property
    def followed(self) -> str:
        """The arguments that each call follows."""
        return "; ".join(f"{what} {value}" for what, value in followed(self.schedule, self.plan))

    @property
    def by_example(self) -> bool:
        """Whether parts are balanced by the work on an example."""
        given = self.example is not None and self.partition == "flops"
        return given and not self.of_params  # an example is one of a step's batches

    def _work(self, ranks: Group) -> Measured | None:
        """What layers do on the example; looked at once.

        Raises:
            PlacementError: the ranks were given examples of other shapes.
        """
        placing, running = PLACING.get(), current()
        memo = placing._memo() if placing else running.memo if running else {}
        key = "work of layers", id(self.example)
        if key not in memo and placing is not None:
            found = measured(placing.fn, memo["placing"], self.example)
            rows = ranks.exchange([found.calls, *found.flops.items()], label="work of layers")
            if any(row != rows[0] for row in rows):
                raise PlacementError(
                    "pipeline(example=...): its layers do other work on some ranks than on others, "
                    "so these would divide the model otherwise. Give all ranks an example of the "
                    "same shapes."
                )
            memo[key] = self.example, found
        return memo[key][1] if key in memo else None

    def choose(self, params: Tree) -> Callable[[str], bool]:
        """Of which leaves of such params this rank's stage has something, by their paths.

        Args:
            params: the full tree, or its shapes.
        """
        rank_of, me = self.plan.rank_of, self.group.rank
        chunks = parts_of(params, len(rank_of), self.partition).chunk_of
        keys, _, _ = optree.tree_flatten_with_path(params, none_is_leaf=True, namespace=NAMESPACE)
        rows = zip(keys, chunks, strict=True)
        mine = {dotted(*key) for key, chunk in rows if rank_of[chunk] == me}
        return mine.__contains__

    def read(self, params: Any) -> Tree:
        """Params of which this rank has read its stage's leaves, where files are given."""
        if not isinstance(params, str | os.PathLike):
            return params
        return read_files(params, known(self.applied, params), choose=self.choose)

    def place(self, state: Any) -> Any:
        _ = self.group  # raises where nobody said how many stages there are
        state = self.read(state) if self.of_params else state
        placed = state if self.shard is None else self.shard.place(state)
        if not self.of_params or isinstance(placed, Placed | Box):
            return placed
        own = tree.map(torch.clone, placed)  # of one stage
        return Replicated(whole(make_layout(own, by=(self.name, repr(self)))), own)

    def unplace(self, state: Any) -> Any:
        return state if self.shard is None else self.shard.unplace(state)

    def check(self, state: Any) -> None:
        if self.shard is not None:
            self.shard.check(state)
        if self.group.size > 1:
            check_owners(state, self.plan.rank_of)

    # One call

    def guard(self, call: Callable[..., Any], state: Any, args: Any, kwargs: Any) -> Any:
        if self.shard is None:
            return call(state, args, kwargs)
        return self.shard.guard(call, state, args, kwargs)

    def configure(self, running: Context, state: Any) -> None:
        running.notes[NAME] = own_leaves(state)
        if self.shard is not None:
            self.shard.configure(running, state)

    def layer(self, call: Callable[..., Any], info: LayerInfo) -> Callable[..., Any]:
        run: Any = RUN.get()
        return call if run is None else partial(run.layer, call, info)

    def leave(self, value: Pending, unit: UnitInfo) -> Pending:
        return value if self.shard is None else self.shard.leave(value, unit)

    def differentiate(self, call: Differentiate, running: Context) -> Differentiate:
        own: dict[int, Tensor] = running.notes[NAME]
        if self.group.size == 1:
            n, by = self.microbatches, f"pipeline(..., {self.microbatches})"
            return lambda asked: accumulated(call, running, asked, n, own, by)

        def run(asked: Gradients) -> Any:
            if RUN.get() is not None:
                raise CompositionError(
                    "zf.value_and_grad was called within a loss under pipeline, of which no stage "
                    "has all. Within a layer torch.func.grad, or torch.autograd.grad, does it."
                )
            same_arguments((asked.args, asked.kwargs))
            return pipelined(running, asked, self.plan, self.group, own)

        return run

    def evaluate(self, call: Callable[..., Any], running: Context) -> Callable[..., Any]:
        def run(fn: Callable[..., Any], params: Any, args: Any, kwargs: Any) -> Any:
            if RUN.get() is not None and isinstance(params, Placed):
                raise CompositionError(
                    "zf.evaluate was called on a placed tree (a teacher, say) within a loss under "
                    "pipeline, and layers of the tree are on other stages. Evaluate it before, and "
                    "give the loss what it returns, in the batch."
                )
            if self.group.size == 1 or not can_be_staged(params, (args, kwargs)):
                return call(fn, params, args, kwargs)
            where, n = (self.plan.rank_of, self.group), self.microbatches
            same_arguments((args, kwargs))
            if self.of_params:
                return predicted(running, fn, params, (args, kwargs), *where, n)
            return evaluated(running, fn, params, (args, kwargs), *where)

        return run

    def finish(self, old: Any, out: Any) -> Any:
        return out if self.shard is None else self.shard.finish(old, out)

    # What it says of itself

    def expect(self, state: Any, memo: dict[Any, Any]) -> None:
        if self.shard is not None:
            self.shard.expect(state, memo)
        nodes = [x for x in leaves_in(state, OPAQUE) if isinstance(x, Readable)]
        memo[NAME] = next((node.layout for node in nodes if node.layout.layers), None)

    def describe(self, memo: Mapping[Any, Any]) -> list[str]:
        if self.group.size == 1:
            return [f"pipeline: one stage, {self.microbatches} microbatches one after the other"]
        if self.of_params:
            return predicts(self.microbatches, self.partition, self.plan.rank_of, memo.get(NAME))
        plan = memo.get("first rehearsed")
        name = self.schedule if isinstance(self.schedule, str) else "its own schedule"
        layout = memo.get(NAME)
        how = balanced_by(self.partition, self.by_example)
        weights = None if layout is None else memo.get(WEIGHTS, {}).get(len(layout.slots))
        sums = memo.get("reduce dtype")
        return described(self.plan, f"{name}, {how}", layout, plan, weights, sums)


@of_params
@transform_of
def pipeline(
    microbatches: int,
    schedule: Any = "1f1b",
    chunks: int = 2,
    partition: Any = "flops",
    *,
    pipe: int | None = None,
    mesh: Mesh | None = None,
    axis: str = "pipe",
    example: Any = None,
) -> Pipeline:
    """Give the ranks of a mesh axis different layers, and send microbatches through them.

    Call it as ``pipeline(step, 8)`` or as the decorator ``@pipeline(microbatches=8)``. The step,
    its loss and the model stay as they are. Beside ``shard`` each stage's part of the state is cut
    over the ranks along ``data``, at any ZeRO stage; alone it is whole on them (stage 0).

    For inference it takes a function of parameters in place of a step: a model's ``apply``,
    ``zf.quantize(model.apply, ...)``, or a function that ``zf.evaluate`` was given.
    ``predict.place(params)`` takes the full parameters, or the path of safetensors files, of which
    each rank reads its stage's leaves alone. ``predict(params, ids)`` runs stage by stage, and all
    ranks get what it returns; caches among it stay where they are, and are ``None``.
    ``zf.generate`` takes the placed parameters, too. Such a function computes each row by itself,
    since microbatches are rows, of all tensors that go in: no mean over the batch, no BatchNorm
    that is training, no second tensor of as many rows that all of them look at.

    Args:
        microbatches: into how many parts a batch is cut; in inference at most, where all tensors
            that go in, and all that come out, have its rows along dim 0.
        schedule: ``"gpipe"``, ``"1f1b"``, ``"interleaved"``, ``"zb"``, ``"zb_lean"``,
            ``"zbv"``, a :class:`~zfunc.Schedule`, or a function of (ranks, microbatches).
        chunks: how many parts of the model each rank has under ``"interleaved"``.
        partition: what the parts of the model are balanced by, ``"flops"`` or ``"parameters"``; or
            at which layers they begin and end.
        pipe: the number of stages, where no mesh is given; data fills the rest.
        mesh: the ranks by named axes (``zf.mesh(data=2, pipe=2)``).
        axis: the mesh axis along which ranks have different layers.
        example: a batch, by which ``"flops"`` balances: tensors, or what has a shape and a dtype
            (``torch.empty(8, 512, dtype=torch.int64, device="meta")``). Without one the elements
            of matrices count, those of a head too, and those of a table do not.

    Returns:
        A :class:`~zfunc.Step`. Every stage passes the same rows of a batch (``step.local_batch``).

    Raises:
        ValueError: a number that is not positive; an axis along which there are no stages.
        TypeError: a mesh that is none.
        CompositionError: the step has a pipeline already, or accumulates beside it; a partition
            that is none.
        ScheduleError: a schedule that is none, or cannot run.
        PlacementError: when a state is placed: it has fewer layers than there are parts, or ranks
            were given other arguments, or examples.
    """
    for name, value in (("microbatches", microbatches), ("chunks", chunks), ("pipe", pipe or 1)):
        if type(value) is not int or value < 1:
            raise ValueError(f"{name}={value!r}: expected a whole number, at least 1.")
    _check_axis(axis, mesh)
    check_schedule(schedule)  # on one rank, too, where nobody follows it
    how = (microbatches, schedule, chunks, check_partition(partition), pipe, mesh, axis, example)
    return Pipeline(*how)


def _check_axis(axis: Any, mesh: Any) -> None:
    if mesh is not None and not isinstance(mesh, Mesh):
        raise TypeError(
            f"mesh={mesh!r}: pipeline takes a mesh, mesh=zf.mesh(data=2, pipe=2), or pipe=2 alone."
        )
    others = {*ORDER} - {"pipe"}
    names = ["pipe"] if mesh is None else [x for x in mesh.names if x not in others]
    if axis not in names:
        raise ValueError(
            f"axis={axis!r}: stages lie along an axis of their own, and here may be {names}: ranks "
            "along 'data' and 'replica' have other rows, and along 'tensor' parts of each layer. "
            "Leave axis out, and give pipe=2, or mesh=zf.mesh(data=2, pipe=2)."
        )
