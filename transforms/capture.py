"""``captured``: a whole training step as one CUDA graph.

Law: ``captured(step)`` gives the states and metrics of ``step``, bit for bit.

Small layers leave a GPU waiting for Python. A CUDA graph launches all that one call has launched,
on the addresses that it was launched with, and runs no Python at all. So what differs from step to
step has to come through memory: the batch is copied to where the recorded one was, a donated state
stays where it is, counts and rates are computed on the device, and each scope of randomness
(:class:`zfunc.random.scope`) has a generator of its own, seeded before each replay from the state's
key and step as the step itself would have done. What Python would have to decide anew cannot be
captured, and is refused by name.

Source: Carilli and others, *Accelerating PyTorch with CUDA Graphs*, 2021.
"""

from __future__ import annotations

import operator
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import optree
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zfunc.engine import context
from zfunc.engine.entries import entry
from zfunc.engine.interrupts import Succession
from zfunc.engine.step import Step, as_step
from zfunc.errors import CompositionError
from zfunc.quant.qtensor import QTensor
from zfunc.ranks import keys, world
from zfunc.ranks.comm import Group, groups_of
from zfunc.trees import memory, tree
from zfunc.trees.marks import carry
from zfunc.trees.nodes import NAMESPACE

__all__ = ["ONE_AT_A_TIME", "Captured", "Reads", "captured"]

ONE_AT_A_TIME = threading.Lock()  # torch allows one capture in a process
WARM = 2  # eager steps before the capture: plans, pools and workspaces are made in them
HOST = ("key", "step")  # entries that stay on the host, where randomness is decided


def captured(step: Callable[..., Any]) -> Captured:
    """Run a step as one CUDA graph.

    The first two calls run the step as it is, the third records it, and from then on each call is
    one launch. All of them are steps of the training.

    Args:
        step: a step that donates its state (``zf.donate``), wrapped in everything else that it is
            to be wrapped in: ``captured`` is the outermost. The third call fixes structure, shapes,
            dtypes and numbers of the batch (whatever the first two were given). A later one with
            others is refused, and the state is as it was: give it to ``.step``, pad the batch, or
            make a captured step for each shape; they may take turns on one state.

    Returns:
        A :class:`Captured`, called like the step. ``.step`` is the step itself.

    Raises:
        CompositionError: (from a call, before the state is touched) the step cannot be captured:
            the state is not on a GPU, or is not donated; a transform or the loss decides on the
            host; the batch is not like the one that was recorded. The message says which.

    >>> import zfunc as zf
    >>> tx = zf.optim.sgd(0.1)
    >>> step = captured(zf.donate(zf.train_step(lambda p, x: (p["w"] * x).sum(), tx)))
    >>> try:
    ...     step(zf.TrainState.create({"w": torch.ones(2)}, tx), torch.ones(2))
    ... except CompositionError as error:
    ...     print(str(error).split(":")[1].split(".")[0].strip())
    the state is on the CPU, and a CUDA graph needs a GPU
    """
    return Captured(as_step(step))


class Captured:
    """A step that is replayed as a CUDA graph; see :func:`captured`.

    Attributes:
        step: the step itself, which may be called as well.
    """

    def __init__(self, step: Step) -> None:
        self.step = step

    def __repr__(self) -> str:
        return f"captured({self.step!r})"

    def __call__(self, state: Any, *args: Any, **kwargs: Any) -> Any:
        """One step: ``(state, *args) -> (state, metrics)``."""
        if context.current() is not None:
            raise CompositionError(
                "captured() is the outermost of all: a graph of a part of a step would leave the "
                "rest behind. Write captured(shard(donate(step))), not shard(captured(step))."
            )
        succession = Succession(self.step.guarded(self._call), state, args, kwargs)
        while True:  # in the outermost frame: see Succession
            try:
                return operator.call(succession.result)
            except BaseException as error:
                if succession.may_raise(error):
                    raise

    def _call(self, state: Any, args: Any, kwargs: Any) -> Any:
        tree.check_alive(state)
        run = self._run()
        if run.graph is None:
            _check(self.step, state, (args, kwargs), run)
            if run.calls < WARM:
                run.calls += 1
                return run.warm(self.step, state, args, kwargs)
            run.graph = _Graph(self.step, state, args, kwargs, run)
        return run.graph.replay(state, args, kwargs)

    def _run(self) -> _Run:
        runs = world.current().memo.setdefault("captured", weakref.WeakKeyDictionary())
        if self not in runs:
            runs[self] = _Run()
        found: _Run = runs[self]
        return found

    def place(self, state: Any) -> Any:
        """See :meth:`zfunc.Step.place`."""
        return self.step.place(state)

    def unplace(self, state: Any) -> Any:
        """See :meth:`zfunc.Step.unplace`."""
        return self.step.unplace(state)

    def init(self, make_state: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """See :meth:`zfunc.Step.init`."""
        return self.step.init(make_state, *args, **kwargs)

    def local_batch(self, batch: Any) -> Any:
        """See :meth:`zfunc.Step.local_batch`: it knows the step's mesh."""
        return self.step.local_batch(batch)

    def describe(self, batch: Any = None) -> Any:
        """See :meth:`zfunc.Step.describe`."""
        return self.step.describe(batch)

    def close(self) -> None:
        """Let go of the graph and of what the step holds; the next call begins anew."""
        world.current().memo.get("captured", {}).pop(self, None)
        self.step.close()

    def __enter__(self) -> Captured:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@world.on_renewal.append
def _forget() -> None:
    """A graph holds collectives of groups that were made anew since."""
    world.current().memo.pop("captured", None)


def in_graph_memory(x: Tensor) -> bool:
    """Whether a tensor lies where a graph of this rank writes its state."""
    runs = world.current().memo.get("captured", {}).values()
    return any(run.graph is not None and run.graph.owns(x) for run in runs)


@dataclass
class _Run:
    """What one rank knows of a captured step.

    Attributes:
        calls: how many eager ones there have been.
        obstacles: what the last of them did that a graph cannot.
        scopes: its scopes of randomness.
        groups: those whose ranks took part in it.
        graph: the recorded step, once it is.
        stream: on which all of this runs.
    """

    calls: int = 0
    obstacles: list[str] = field(default_factory=list)
    scopes: _Scopes = field(default_factory=lambda: _Scopes())
    groups: list[Group] = field(default_factory=list)
    graph: _Graph | None = None
    stream: Any = None

    def warm(self, step: Step, state: Any, args: Any, kwargs: Any) -> Any:
        """An eager step, on the stream and with the state as they will be recorded."""
        device = _device(state)
        self.stream = self.stream or torch.cuda.Stream(device)
        self.scopes.paths.clear()
        reads = Reads(device)
        here = torch.cuda.current_stream(device)
        self.stream.wait_stream(here)
        _kept_for(self.stream, state)  # the step lets go of it while this stream still reads it
        before = _collectives()
        with torch.cuda.stream(self.stream), self.scopes.of(state), reads, _ending():
            out = step(_counted_on(state, device), *args, **kwargs)
        here.wait_stream(self.stream)
        _kept_for(here, out)  # where the caller uses it and lets go of it
        self.obstacles = [f"waits for the GPU, in {name}" for name in reads.found]
        after = {group: n for group, n in _collectives().items() if n != before.get(group)}
        self.groups = list(after)
        for group, (_, hosted) in after.items():
            if hosted != before.get(group, (0, 0))[1]:
                self.obstacles.append(f"exchanges values through the host, in {group}")
        return out


class _Scopes:
    """The scopes of randomness that one step opens, in order.

    Noted in an eager step; while the step is recorded each has a generator of its own.

    Attributes:
        paths: what was folded into the state's key to make each scope's.
        generators: theirs, once there are some.
    """

    def __init__(self) -> None:
        self.paths: list[tuple[Any, ...]] = []
        self.generators: list[torch.Generator] = []
        self.recording = False
        self._next = 0
        self._outer: list[torch.Generator] = []

    @contextmanager
    def of(self, state: Any) -> Iterator[None]:
        """Watch the scopes that are opened inside the block."""
        key, step = (entry(state, name) for name in HOST)
        with keys.watched(self, key, step):
            yield

    def register(self, graph: Any, device: torch.device) -> None:
        """A generator for each scope, known to the graph."""
        self._next = 0  # an earlier recording may have been broken off
        self.generators = [torch.Generator(device) for _ in self.paths]
        for generator in self.generators:
            graph.register_generator_state(generator)

    def enter(self, path: tuple[Any, ...] | None) -> None:
        """A scope opens; ``path`` is ``None`` if its key does not come from the state's."""
        if path is None:
            raise CompositionError(
                "captured(): something draws random numbers by a key that does not come from "
                "state.key by zf.random.fold_in, so a replay could not renew it. Fold "
                "numbers into the key that the loss is given."
            )
        if not self.recording:
            self.paths.append(path)
            return
        if self._next >= len(self.paths) or self.paths[self._next] != path:
            raise CompositionError(
                "captured(): the step opens other scopes of randomness than in the call before "
                f"(number {self._next}). Layers that come and go (drop_layers, branches of the "
                "loss) cannot be captured."
            )
        device = self._default()
        self._outer.append(device.graphsafe_get_state())
        device.graphsafe_set_state(self.generators[self._next])
        self._next += 1

    def leave(self) -> None:
        """The scope opened last closes: the one around it goes on where it was."""
        if self.recording:
            self._default().graphsafe_set_state(self._outer.pop())

    def seed(self, state: Any) -> None:
        """Let the next replay draw what the step would draw on this state."""
        key, step = (entry(state, name) for name in HOST)
        for path, generator in zip(self.paths, self.generators, strict=True):
            own = key
            for data in path:
                own = keys.fold_in(own, step if data is keys.STEP else data)
            generator.manual_seed(keys.scope(own).seed)

    def _default(self) -> torch.Generator:
        return torch.cuda.default_generators[torch.cuda.current_device()]


class _Graph:
    """One recorded step: where it reads and writes, and how it is repeated."""

    def __init__(self, step: Step, state: Any, args: Any, kwargs: Any, run: _Run) -> None:
        device = _device(state)
        state = _counted_on(state, device)
        leaves, self._spec = _flat(state)
        self._state = [_alias(x) for x in leaves]
        given, self._given_spec = _flat((args, kwargs))
        self._given = [x.clone() if isinstance(x, Tensor) else x for x in given]
        self._homes = {_at(x) for x in (*self._state, *self._given) if _is_on_device(x)}
        self._scopes, self._groups = run.scopes, run.groups
        self._stream = run.stream
        self._graph = torch.cuda.CUDAGraph()
        self._scopes.register(self._graph, device)
        how: Any = {"stream": run.stream, "capture_error_mode": "thread_local"}
        args, kwargs = optree.tree_unflatten(self._given_spec, self._given)
        # The step spends what it is given; the first replay is still to read the state itself.
        given_state = optree.tree_unflatten(self._spec, [_alias(x) for x in leaves])
        self._scopes.recording = True
        try:
            with (
                ONE_AT_A_TIME,
                torch.cuda.graph(self._graph, **how),
                self._scopes.of(given_state),
                _ending(),
            ):
                new, out = step(given_state, *args, **kwargs)
                made, spec = _flat(new)
                self._check_kept(spec, made)
                self._bring_home(self._state, made)
        finally:
            self._scopes.recording = False
        self._marks = made
        self._out, self._out_spec = _flat(out)
        self._check_out()

    def _check_kept(self, spec: Any, made: Sequence[Any]) -> None:
        """Raise if the new state is not of the old one's form: it is the next call's old one."""
        if spec != self._spec:
            raise CompositionError(
                "captured(): the step returns a state of another structure than it was given. "
                "Call the step itself until the structure stays."
            )
        for path, old, new in zip(_paths(spec), self._state, made, strict=True):
            if not isinstance(old, Tensor):
                continue
            if (old.shape, old.dtype, old.device) != (new.shape, new.dtype, new.device):
                raise CompositionError(
                    f"captured(): {path} goes in as {_kind(old)} and comes out as {_kind(new)}; "
                    "a graph needs both alike."
                )
            if old.device.type == "cpu" and not _counted(old, new) and not torch.equal(old, new):
                raise CompositionError(
                    f"captured(): the step changes {path} on the host, where a replay runs no "
                    "Python; only counting up by one is understood. Keep it on the GPU."
                )
        self._counting = [
            not _is_on_device(old) and isinstance(old, Tensor) and _counted(old, new)
            for old, new in zip(self._state, made, strict=True)
        ]

    def _bring_home(self, homes: Sequence[Any], values: Sequence[Any]) -> None:
        """Copy what lies elsewhere to where a replay reads it; leaves may have changed places."""
        away = [
            (home, x.clone() if _at(x) in self._homes else x)
            for home, x in zip(homes, values, strict=True)
            if _is_on_device(home) and not _same_memory(home, x)
        ]
        for home, x in away:
            home.copy_(x, non_blocking=True)

    def _check_out(self) -> None:
        for path, x in zip(_paths(self._out_spec), self._out, strict=True):
            if isinstance(x, Tensor) and x.device.type == "cpu":
                raise CompositionError(
                    f"captured(): the step returns {path} on the host, where a replay would not "
                    "renew it. Compute it from tensors on the GPU, or leave it out."
                )

    def replay(self, state: Any, args: Any, kwargs: Any) -> Any:
        """One step."""
        leaves, spec = _flat(state)
        given, given_spec = _flat((args, kwargs))
        _check_same("the state", self._spec, self._state, spec, leaves)
        _check_same("the batch", self._given_spec, self._given, given_spec, given)
        here = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(here)  # all memory of the graph's is this stream's
        with torch.cuda.stream(self._stream):
            self._bring_home((*self._given, *self._state), (*given, *leaves))
            self._scopes.seed(state)
            for group in self._groups:  # ranks that take another path are told, one step later
                group.mark("replay")
            try:
                self._graph.replay()
                out = [x.clone() if isinstance(x, Tensor) else x for x in self._out]
            except BaseException:
                self._spend(leaves)  # some of it may be overwritten
                raise
        here.wait_stream(self._stream)
        _kept_for(here, out)
        fresh = []
        for home, old, counting, like in zip(
            self._state, leaves, self._counting, self._marks, strict=True
        ):
            if _is_on_device(home):
                fresh.append(_alias(home, like))
                memory.blank(old)
            else:
                fresh.append(old + 1 if counting else old)
                if counting:
                    memory.blank(old)
        return (
            optree.tree_unflatten(self._spec, fresh),
            optree.tree_unflatten(self._out_spec, out),
        )

    def owns(self, x: Tensor) -> bool:
        """Whether a tensor lies in the memory that replays write the state to."""
        return any(_is_on_device(home) and _at(home) == _at(x) for home in self._state)

    def _spend(self, leaves: Sequence[Any]) -> None:
        """Blank what of a state lies on the device."""
        for home, old in zip(self._state, leaves, strict=True):
            if _is_on_device(home):
                memory.blank(old)


@contextmanager
def _ending() -> Iterator[None]:
    """Steps end the gathers that they start."""
    token = context.ENDING.set(True)
    try:
        yield
    finally:
        context.ENDING.reset(token)


def _collectives() -> dict[Group, tuple[int, int]]:
    """How many each group of this rank has issued, and how many of them were the host's work."""
    groups = groups_of(world.current())
    return {group: (group.issued, group.hosted) for group in groups if group.size > 1}


# What can be captured


def _check(step: Step, state: Any, given: Any, run: _Run) -> None:
    """Raise ``CompositionError`` if the step cannot be captured; nothing is touched."""
    if why := _obstacle(step, state, given, run):
        raise CompositionError(
            f"captured() cannot take this step: {why}. Call the step itself "
            "(`captured_step.step`) where that must stay."
        )


def _obstacle(step: Step, state: Any, given: Any, run: _Run) -> str | None:
    for transform in step.transforms:
        if why := transform.obstacle():
            return f"{transform!r} {why}"
    device = _device(state)
    if device.type != "cuda":
        return "the state is on the CPU, and a CUDA graph needs a GPU"
    if not any(t.name == "donate" for t in step.transforms):
        return "it does not donate its state, whose memory a graph writes into: zf.donate(step)"
    for path, x in zip(_paths(_flat(given)[1]), _flat(given)[0], strict=True):
        if isinstance(x, Tensor) and x.device != device:
            return (
                f"the batch's {path} is on {x.device} and the state on {device}: "
                "move it there first, x.to(device, non_blocking=True)"
            )
    if run.calls == WARM and run.obstacles:
        return f"it {run.obstacles[0]}"
    return None


def _check_same(what: str, spec: Any, old: Sequence[Any], its: Any, new: Sequence[Any]) -> None:
    if spec != its:
        raise CompositionError(
            f"captured(): {what} has another structure than the one that was captured. Make a "
            "captured step for each structure."
        )
    for path, a, b in zip(_paths(spec), old, new, strict=True):
        if not _alike(a, b) and not (what == "the state" and _is_counter(a, b)):
            raise CompositionError(
                f"captured(): {what}'s {path} was {_kind(a)} when the step was captured and is "
                f"{_kind(b)} now. A graph has fixed shapes and numbers: pad the batch, drop the "
                "last one, give a number as a tensor on the GPU, or make a captured step for each."
            )


def _alike(a: Any, b: Any) -> bool:
    """Whether a graph that has seen ``a`` may be given ``b``."""
    if isinstance(a, Tensor):
        return _kind(a) == _kind(b)
    same: Any = type(a) is type(b) and a == b
    return bool(same.all() if hasattr(same, "all") else same)


def _counted(old: Tensor, new: Tensor) -> bool:
    """Whether a number of the host has been counted up by one."""
    return old.ndim == 0 and not old.is_floating_point() and bool(new - old == 1)


def _is_counter(a: Any, b: Any) -> bool:
    """Whether a count that was taken to the GPU comes from the host once more."""
    both = isinstance(a, Tensor) and isinstance(b, Tensor)
    return both and not a.ndim and (a.shape, a.dtype) == (b.shape, b.dtype)


def _kind(x: Any) -> str:
    return f"{x.dtype} {tuple(x.shape)} on {x.device}" if isinstance(x, Tensor) else repr(x)


def _flat(given: Any) -> tuple[list[Any], Any]:
    leaves, spec = optree.tree_flatten(given, none_is_leaf=True, namespace=NAMESPACE)
    return leaves, spec


def _paths(spec: Any) -> list[str]:
    return [tree.dotted(*path) for path in spec.paths()]


def _device(state: Any) -> torch.device:
    """The GPU that a state is on, or the CPU."""
    leaves = [x for x in _flat(state)[0] if isinstance(x, Tensor)]
    return next((x.device for x in leaves if x.device.type != "cpu"), torch.device("cpu"))


def _counted_on(state: Any, device: torch.device) -> Any:
    """The state with the optimizer's counts on the GPU, where a replay counts on."""
    leaves, spec = _flat(state)
    host = {id(entry(state, name)) for name in HOST}
    moved = [
        carry(x.to(device), x)
        if isinstance(x, Tensor) and x.device.type == "cpu" and not x.ndim and id(x) not in host
        else x
        for x in leaves
    ]
    return optree.tree_unflatten(spec, moved)


def _kept_for(stream: Any, given: Any) -> None:
    """Memory of another stream is not handed out anew before this one has used it."""
    for x in _flat(given)[0]:
        if _is_on_device(x):
            x.record_stream(stream)


def _is_on_device(x: Any) -> bool:
    return isinstance(x, Tensor) and x.device.type != "cpu"


def _alias(x: Any, like: Any = None) -> Any:
    """A tensor of its own in the same memory; on the host a copy, for `donate` blanks that, too."""
    if not isinstance(x, Tensor):
        return x
    return carry(x.detach() if _is_on_device(x) else x.clone(), x if like is None else like)


def _at(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _same_memory(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.stride() == b.stride()


class Reads(TorchDispatchMode):
    """Notes the operations that make a number of Python, or a shape, of a device's values.

    Attributes:
        found: their names.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self.found: list[str] = []

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # layers are compiled while it watches: during a capture none can be

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, QTensor) for kind in types):
            return NotImplemented  # it comes back as operations on what it is made of
        if _reads(func, args) and any(
            isinstance(x, Tensor) and x.device == self._device for x in tree_leaves((args, kwargs))
        ):
            self.met(func)
        return func(*args, **(kwargs or {}))

    def met(self, func: Any) -> None:
        """What becomes of such an operation."""
        self.found.append(str(func))


_INDEXED = (torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_)


def _reads(func: Any, args: Any) -> bool:
    """Whether an operation waits for values. Indices do, as masks only: they are counted."""
    if getattr(func, "overloadpacket", None) in _INDEXED:
        return any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])
    return bool(
        torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags
    )
