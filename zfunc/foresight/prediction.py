"""``foresee``: what a step holds and sends as one rank of many, without running its arithmetic."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zfunc.buffers.moves import MOVES
from zfunc.engine.batches import has_rows, leaves_of
from zfunc.engine.entries import Entries
from zfunc.engine.meshed import Meshed
from zfunc.engine.step import Step, as_step
from zfunc.errors import CompositionError, DeviceError, PlacementError
from zfunc.foresight.assumptions import Assumption, later, outside
from zfunc.foresight.attention import as_on_a_gpu
from zfunc.foresight.clocks import replay
from zfunc.foresight.clusters import Cluster, check_cluster
from zfunc.foresight.drawing import draw_memory, in_notebook
from zfunc.foresight.dry_run import DryRun
from zfunc.foresight.flops import Flops, summed
from zfunc.foresight.inputs import check_step, state_after, without_values
from zfunc.foresight.layer_names import named
from zfunc.foresight.rows import StepRow
from zfunc.foresight.stages import ForeseenStage, times_of_stages
from zfunc.foresight.texts import bytes_text
from zfunc.foresight.timing import Timing
from zfunc.kernels.dispatch import INSTEAD
from zfunc.ranks.accounting import Ledger, ledger
from zfunc.ranks.comm import groups_of
from zfunc.ranks.foreseen import ForeseenWorld, foreseeing
from zfunc.ranks.meshes import Mesh
from zfunc.ranks.world import World
from zfunc.rehearsal.eager import uncompiled
from zfunc.transforms.pipelining.transform import Pipeline
from zfunc.trees import tree

__all__ = ["Foreseen", "SentBytes", "foresee", "times_together"]

KINDS = ("cpu", "cuda")


@dataclass
class SentBytes(Ledger):
    """A ledger that also counts calls by kind and by axis."""

    calls_by_kind: Counter[str] = field(default_factory=Counter)
    calls_by_axis: Counter[str] = field(default_factory=Counter)

    def record(self, kind: str, label: str, axis: str, payload: int, headers: int) -> None:
        super().record(kind, label, axis, payload, headers)
        self.calls_by_kind[kind] += 1
        self.calls_by_axis[axis] += 1


@dataclass(frozen=True)
class Foreseen:
    """What one rank of many holds, sends and computes; printed it is a summary.

    Attributes:
        ranks, rank: the world, and which of its ranks this is.
        state_bytes: of its part of the state.
        sent: what it sends in a steady step, the last one that was traced.
        first: what it sends in the first one.
        peak_bytes: the most bytes of tensors alive in the steady step, the state included.
        place_peak_bytes: the same while the state is placed, the full one included.
        flops: what it computes in the steady step.
        rows: the operations of the steady step, and what is sent between them.
        timeline: ``(number of the row, bytes alive)``, of the steady step.
        live: the same by what it is: ``"parameters"`` (gathered ones, too), ``"moments"`` (the
            optimizer's state), ``"buffers"``, ``"gradients"`` (of activations, too, and whatever
            backward makes), ``"activations"`` (whatever forward makes), ``"other"``.
        at_peak: bytes of each of them when most are alive.
        assumptions: what all this rests on.
        device: the kind of device that was foreseen.
        groups: the ranks along each axis of the mesh.
        pipe: the axis of a pipeline's stages; ``""`` if there are none.
        work: of each stage, by which they are balanced.
        bubble: the share of a pipeline's time that equal stages wait, as its schedule says.
    """

    ranks: int
    rank: int
    state_bytes: int
    sent: SentBytes
    first: SentBytes
    peak_bytes: int
    place_peak_bytes: int
    flops: Flops
    rows: tuple[StepRow, ...] = field(repr=False)
    timeline: tuple[tuple[int, int], ...] = field(repr=False)
    assumptions: tuple[Assumption, ...]
    device: str = "cuda"
    groups: Mapping[str, tuple[int, ...]] = field(default_factory=dict, repr=False)
    pipe: str = ""
    work: tuple[int, ...] = ()
    bubble: float = 0.0
    live: Mapping[str, tuple[tuple[int, int], ...]] = field(default_factory=dict, repr=False)
    at_peak: Mapping[str, int] = field(default_factory=dict)

    def plot(self, path: str | Path) -> Path:
        """Draw the memory of the steady step, by what it holds; returns the path.

        Args:
            path: ``.png``, ``.svg`` or whatever matplotlib knows.

        Raises:
            ImportError: matplotlib is not installed.
        """
        return draw_memory(self.live, len(self.rows), self.peak_bytes, Path(path))

    def time(self, cluster: Cluster, others: Sequence[Foreseen] = ()) -> Timing:
        """How long a steady step takes on a cluster: its rows on clocks.

        Args:
            cluster: where; ranks fill one node after the other.
            others: of a pipeline, what is foreseen of other stages: at least of the first, the
                last, and one of each kind between them (``work``). Then a stage waits for what
                these really take. Without them stages are taken to be equal.

        Raises:
            DeviceError: the step was foreseen on another kind of device, or the cluster lacks
                devices or a link that it needs.

        >>> import zfunc as zf
        >>> tx = zf.optim.sgd(0.1)
        >>> step = zf.train_step(lambda params, x: (x @ params["w"]).square().mean(), tx)
        >>> wide = zf.TrainState.create({"w": torch.empty(8192, 8192, device="meta")}, tx)
        >>> x = torch.empty(64, 8192, device="meta")
        >>> seen = foresee(zf.shard(step, stage=3), wide, x, ranks=16)
        >>> seen.time(zf.Cluster.preset("h100", gpus=16)).binds
        'communication'
        """
        return times_together([self, *others], cluster)[0]

    def _check_on(self, cluster: Cluster) -> None:
        check_cluster(cluster)
        if cluster.kind != self.device:
            raise DeviceError(
                f"the step was foreseen with device={self.device!r}, and the cluster's are "
                f"{cluster.kind!r} ({cluster.device}): foresee it with device={cluster.kind!r}."
            )
        if cluster.gpus < self.ranks:
            raise DeviceError(
                f"the step was foreseen on {self.ranks} ranks, and the cluster has "
                f"{cluster.gpus} devices: give gpus={self.ranks}, or foresee fewer ranks."
            )

    def __str__(self) -> str:
        kinds, held = _listed(self.sent.by_kind), _listed(self.at_peak)
        state, sent = bytes_text(self.state_bytes), bytes_text(self.sent.total_bytes)
        peak, place = bytes_text(self.peak_bytes), bytes_text(self.place_peak_bytes)
        lines = [
            f"rank {self.rank} of {self.ranks} holds {state} of the state",
            f"a step holds at most {peak}, place {place}",
            *([f"at the peak: {held}"] if held else []),
            f"it sends {sent} in {self.sent.calls} calls: {kinds}",
            f"it computes {self.flops.total / 1e12:.4g} TFLOPs "
            f"(attention under a causal mask counted {self.flops.causal})",
            *(f"assumed: {assumption}" for assumption in self.assumptions),
        ]
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return in_notebook(str(self), self.plot)


def foresee(
    step: Any,
    make_state: Any,
    batch: Any,
    ranks: int = 1024,
    rank: int = 0,
    device: str = "cuda",
    mesh: Mesh | None = None,
    steps: int = 2,
) -> Foreseen:
    """Run a step as one rank of many, on tensors that have addresses and no memory.

    The step is the real one, with its transforms, hooks, branches and collectives. Only arithmetic
    on large tensors is left out.

    Args:
        step: a step, or a function ``(state, batch) -> (state, metrics)``.
        make_state: the full state, or a function that makes it. Its tensors may be on meta. What
            is real is neither copied nor changed: shapes, dtypes and small values are used.
        batch: what this one rank would pass to the step, likewise.
        ranks: how many ranks there are.
        rank: which of them.
        device: the kind of device that they compute on, ``"cpu"`` or ``"cuda"``.
        mesh: how they are laid out, for a step that does not say so.
        steps: how many are traced; the last one is steady.

    Raises:
        TypeError: ``step`` is no function of a state and a batch, or ``mesh`` is no mesh.
        ValueError: no such rank or device; the mesh does not cover the ranks; fewer than 2 steps.
        CompositionError: the step has another mesh, or takes none; or it is a captured one.
        ForesightError: a shape depends on values, or an operator has no kernel for meta tensors.

    >>> import zfunc as zf
    >>> def step(state, batch):
    ...     loss = lambda p, b: (b @ p["w"]).square().mean()
    ...     loss, grads = zf.value_and_grad(loss)(state["params"], batch)
    ...     new = zf.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)
    ...     return {"params": new}, {"loss": loss}
    >>> state = {"params": {"w": torch.empty(1 << 15, 1 << 15, device="meta")}}
    >>> seen = foresee(zf.shard(step, stage=3), state, torch.empty(8, 1 << 15), ranks=1024)
    >>> seen.state_bytes == 4 << 20, seen.sent.calls
    (True, 3)
    """
    check_step(step, "foresee")
    _check(ranks, rank, device, steps)
    step, run = _on(as_step(step), mesh, ranks), DryRun()
    step = named(step, run.layers)
    world = ForeseenWorld(rank, ranks, device, run)
    fused = as_on_a_gpu() if device == "cuda" else nullcontext()
    with _alone(run), foreseeing(world), fused, uncompiled(), run:
        state = step.place(without_values(make_state, run.storages))
        place_peak, sent = run.storages.peak, []
        given = without_values(batch, run.storages)
        run.storages.mark(_tensors(given), "other")
        inference = any(t.of_params for t in step.transforms)
        _mark(run, state)
        for _ in range(steps):
            gc.collect()
            run.begin()
            run.guesses.clear()
            with _counted(world) as counts, _told_of(given, run):
                out = step(state, given)
            sent.append(counts)
            state = state_after(step, state, out)
            del out
            if not inference:  # whose weights in low bits would be unpacked to be looked at
                _mark(run, state)
        size = tree.size_bytes(state)
        pipe = next((t for t in step.transforms if isinstance(t, Pipeline) and t.has_stages), None)
        work = () if pipe is None else pipe.work(step)
    live, at_peak = run.storages.by_kind()
    groups = {group.axis: group.members for group in groups_of(world) if group.members}
    return Foreseen(
        ranks=ranks,
        rank=rank,
        state_bytes=size,
        sent=sent[-1],
        first=sent[0],
        peak_bytes=run.storages.peak,
        place_peak_bytes=place_peak,
        flops=summed(run.rows),
        rows=tuple(run.rows),
        timeline=tuple(run.storages.timeline),
        live=live,
        at_peak=at_peak,
        assumptions=(
            *run.guesses.listed(),
            *later(step, sent[-1].calls_by_label, ranks),
            *outside(step, device, ranks),
        ),
        device=device,
        groups=groups,
        pipe="" if pipe is None else pipe.axis,
        work=work,
        bubble=_bubble(pipe, len(work)),
    )


STATE = {"params": "parameters", "opt_state": "moments", "buffers": "buffers"}


def _mark(run: DryRun, state: Any) -> None:
    """Say what the tensors of a state are."""
    try:
        entries = Entries(state)
    except PlacementError:  # a params tree
        run.storages.mark(_tensors(state), "parameters")
        return
    for name in entries.names:
        run.storages.mark(_tensors(entries[name]), STATE.get(name, "other"))


def _tensors(node: Any) -> list[Tensor]:
    return [x for x in tree.leaves(node) if isinstance(x, Tensor)]


def _listed(parts: Mapping[str, int]) -> str:
    """Bytes by name, the most first."""
    found = sorted(parts.items(), key=lambda part: -part[1])
    return ", ".join(f"{name} {bytes_text(n)}" for name, n in found if n)


def _bubble(pipe: Pipeline | None, stages: int) -> float:
    return 0.0 if pipe is None or stages < 2 else pipe.plans[stages].bubble()


def times_together(seen: Sequence[Foreseen], cluster: Cluster) -> list[Timing]:
    """How long ranks of one step take: stages of a pipeline beside each other.

    Raises:
        DeviceError: as for :meth:`Foreseen.time`.
    """
    for each in seen:
        each._check_on(cluster)
    pipe, work = seen[0].pipe, seen[0].work
    if len(seen) > 1 and len(work) > 1:
        stages = [ForeseenStage(x.groups[pipe].index(x.rank), x.rows, x.groups) for x in seen]
        found = times_of_stages(stages, work, cluster, pipe)
        if found is not None:
            return found
    return [replay(x.rows, cluster, x.groups, x.bubble) for x in seen]


def _check(ranks: int, rank: int, device: str, steps: int) -> None:
    if type(ranks) is not int or ranks < 1:
        raise ValueError(f"foresee: ranks={ranks!r}, expected 1 or more.")
    if type(rank) is not int or not 0 <= rank < ranks:
        raise ValueError(f"foresee: rank={rank!r}, expected 0 to {ranks - 1}, of ranks={ranks}.")
    if device not in KINDS:
        raise ValueError(f"foresee: device={device!r}, expected one of {', '.join(KINDS)}.")
    if type(steps) is not int or steps < 2:
        raise ValueError(f"foresee: steps={steps!r}, expected 2 or more: the first is not steady.")


def _on(step: Step, mesh: Mesh | None, ranks: int) -> Step:
    """The step on this mesh, if it says none itself."""
    if mesh is None:
        return step
    if not isinstance(mesh, Mesh):
        raise TypeError(f"foresee: mesh={mesh!r}, expected zf.mesh(data=8), say.")
    mine = step.mesh
    if mine is not None and mine.given:
        if mine.closed(ranks) == mesh.closed(ranks):
            return step
        raise CompositionError(f"foresee: the step has {mine}, and mesh= is {mesh}: leave one out.")
    at = next((i for i, t in enumerate(step.transforms) if isinstance(t, Meshed)), None)
    if at is None:
        raise CompositionError(
            f"foresee: no transform of {step!r} lays ranks out, so mesh={mesh} would change "
            "nothing: wrap it in zf.shard, zf.split or zf.pipeline."
        )
    given = list(step.transforms)
    on_it: Any = given[at]
    given[at] = replace(on_it, mesh=mesh)
    return replace(step, transforms=tuple(t.on_mesh(given) for t in given))


@contextmanager
def _alone(run: DryRun) -> Iterator[None]:
    """Leave generators of random numbers as they were, and launch no kernel."""
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.callback(run.restore_generators)
        if torch.get_default_device().type != "cpu":  # which stands for all devices
            stack.enter_context(torch.device("cpu"))
        if torch.is_anomaly_enabled():  # what looks for NaN reads values
            stack.enter_context(torch.autograd.set_detect_anomaly(False))
        if not gc.get_freeze_count():  # what was there before need not be looked through
            gc.freeze()
            stack.callback(gc.unfreeze)
        stack.callback(INSTEAD.reset, INSTEAD.set(run.kernel))
        stack.callback(MOVES.reset, MOVES.set(run))
        yield


@contextmanager
def _told_of(batch: Any, run: DryRun) -> Iterator[None]:
    """What a step raises inside the block says which batch it was given, and what was guessed."""
    try:
        yield
    except Exception as error:
        rows = [(".".join(map(str, path)), x) for path, x in leaves_of(batch) if has_rows(x)]
        told = ", ".join(f"{name} {list(x.shape)}".lstrip() for name, x in rows) or "none"
        error.add_note(f"foresee: does the batch fit the step? Its tensors: {told}")
        if guesses := run.guesses.listed():
            error.add_note(f"foresee: guessed before, at {'; '.join(map(str, guesses))}")
        raise


@contextmanager
def _counted(world: World) -> Iterator[SentBytes]:
    sent = SentBytes()
    world.ledgers.append(sent)
    try:
        with ledger():  # what is under way is sent before it closes
            yield sent
    finally:
        world.ledgers[:] = [other for other in world.ledgers if other is not sent]
