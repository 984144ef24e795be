"""NCCL that is not there: its process groups are gloo's, its collectives run on their own stream.

The project asks ``torch.distributed`` for NCCL as it would beside GPUs. Torch then makes a
``ProcessGroupNCCL``, which here is gloo under that name, on connections of its own; collectives
on the device's tensors go through it, those on the host's through the gloo that was asked for.
``Work.wait`` makes the current stream wait, and the numbers are there from then on.
"""

from __future__ import annotations

import itertools
import sys
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import device_mesh, distributed_c10d
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from tests.gpu.clocks import Actor

if TYPE_CHECKING:
    from tests.gpu.cuda import Cuda

__all__ = ["Issued", "dispatch", "patches"]

MOVES = {
    "allreduce_": "all_reduce",
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "broadcast_": "broadcast",
    "alltoall_base_": "all_to_all",
    "allgather_into_tensor_coalesced_": "all_gather",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "allreduce_coalesced_": "all_reduce",
    "barrier": "barrier",
    "send": "send",
    "recv_": "recv",
}


class Options(dist.ProcessGroupGloo._Options):  # type: ignore[name-defined, misc]
    """As ``ProcessGroupNCCL.Options``: torch fills it in."""


class PretendedNCCL(dist.ProcessGroupGloo):
    """Gloo under NCCL's name."""

    Options = Options  # type: ignore[assignment]

    def __init__(self, store: Any, rank: int, size: int, options: Options) -> None:
        super().__init__(store, rank, size, timeout=options._timeout)
        self._given = options
        _KEPT.append(self)  # torch keeps the part of it that is C++

    @property
    def options(self) -> Options:  # type: ignore[override]
        return self._given

    @property
    def supports_splitting(self) -> bool:
        return False  # gloo's are made anew


def split_group(
    parent_pg: Any = None, split_ranks: Any = None, timeout: Any = None, **how: Any
) -> Any:
    """``dist.split_group``, by groups made anew: each rank gets the one that it is in."""
    mine = None
    for ranks in split_ranks:
        made = dist.new_group(ranks, timeout=timeout, group_desc=how.get("group_desc"))
        mine = made if dist.get_rank() in ranks else mine
    return mine


_KEPT: list[Any] = []


class Issued(dist.Work):
    """A collective under way. It keeps its tensors until it is waited for, as NCCL's does."""

    def __init__(
        self, cuda: Cuda, comm: Actor, number: int, what: str, work: Any, held: Any
    ) -> None:
        super().__init__()
        self.cuda, self.number, self.what = cuda, number, what
        self.clock = dict(comm.clock)
        self.work, self.held = work, held

    def wait(self, timeout: timedelta | None = None) -> bool:
        self.finish()
        self.cuda.current.learn(self.clock)
        self.cuda.note("await", self.what, number=self.number)
        self.held = ()
        if timeout is not None and timeout > timedelta(0):
            self.cuda.sync("Work.wait(timeout)")  # that one blocks the host
        return True

    def finish(self) -> None:
        """The bytes are there."""
        work, self.work = self.work, None
        if work is not None:
            with _disable_current_modes():  # gloo's own copies
                work.wait()
        if self in self.cuda.collectives:
            self.cuda.collectives.remove(self)

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def exception(self) -> None:
        return None


def dispatch(cuda: Cuda, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An operation of ``c10d``: on the device's tensors NCCL's."""
    name = func._schema.name.partition("::")[2]
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    mine = [x for x in tensors if cuda.on_gpu(x)]
    if not mine:
        return func(*args, **kwargs)
    if len(mine) < len(tensors):
        cuda.mixed(name, "NCCL takes tensors of the GPU only")
    for x in tensors:
        if not x.is_contiguous():
            raise ValueError(f"{name}: Tensors must be contiguous: {tuple(x.shape)} {x.stride()}")
    if name not in MOVES:
        raise NotImplementedError(f"the pretended NCCL has no {name}")
    labels = [a.name for a in func._schema.arguments]
    named = dict(zip(labels, args, strict=False)) | kwargs
    work = _issued(cuda, func, name, named)
    cuda.collectives.append(work)
    boxed = work.boxed()
    return boxed if len(func._schema.returns) == 1 else (named[labels[0]], boxed)


def _issued(cuda: Cuda, func: Any, name: str, named: dict[str, Any]) -> Issued:
    group = dist.ProcessGroup.unbox(named["process_group"])
    name_of = _named(group)
    comm = cuda.actors.setdefault(name_of, Actor(name_of))
    comm.learn(cuda.current.clock)
    reads, writes = _sides(name, named)
    number, what = next(_NUMBERS), MOVES[name]
    cuda.issue(
        what,
        reads,
        writes,
        kind="collective",
        on=comm,
        label=_label(),
        group=comm.name,
        nbytes=max(sum(x.nbytes for x in side) for side in (reads, writes)),
        number=number,
        arguments=cuda.named((reads, writes)),
    )
    if cuda.recording is not None:  # a replay waits at once: its numbers are needed in order
        cuda.recording.about_to_write(writes)
        cuda.recording.other(lambda: _started(func, named, group).wait() and None)
    return Issued(cuda, comm, number, what, _started(func, named, group), (reads, writes))


def _started(func: Any, named: dict[str, Any], group: Any) -> Any:
    """The same operation on gloo's connections under NCCL's name."""
    for label in ("input_tensor", "input", "inputs"):  # it may be a part of the result
        if label in named:
            named = named | {label: tree_map_only(Tensor, torch.clone, named[label])}
    named = named | {"process_group": _beside(group).boxed()}
    out = func(**named)
    return dist.Work.unbox(out if len(func._schema.returns) == 1 else out[-1])


def _beside(group: Any) -> Any:
    """A process group whose tensors of the host go where those of the device go in ``group``."""
    name = _named(group)
    if name not in _BESIDE:
        backend = group._get_backend(torch.device("cuda"))
        made = dist.ProcessGroup(group.get_group_store(), group.rank(), group.size())
        made._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        kind = dist.ProcessGroup.BackendType.GLOO
        made._register_backend(torch.device("cpu"), kind, backend)
        made._set_group_name(f"{name} beside")
        _BESIDE[name] = made
    return _BESIDE[name]


def _named(group: Any) -> str:
    """A communicator's name. Groups that torch did not make, but the project, have none."""
    if id(group) not in _NAMES:
        name = group.group_name or f"without a name {len(_NAMES)}"
        _NAMES[id(group)] = (f"nccl {name} of {group.size()}", group)
    return _NAMES[id(group)][0]


_BESIDE: dict[str, Any] = {}
_NAMES: dict[int, tuple[str, Any]] = {}
_NUMBERS = itertools.count()


def _sides(name: str, named: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    """What a collective reads, and what it writes."""
    if name in ("_allgather_base_", "_reduce_scatter_base_"):
        return [named["input_tensor"]], [named["output_tensor"]]
    if name == "alltoall_base_":
        return [named["input"]], [named["output"]]
    if name in ("allgather_into_tensor_coalesced_", "reduce_scatter_tensor_coalesced_"):
        return list(named["inputs"]), list(named["outputs"])
    if name == "barrier":
        return [], []
    tensors = list(named["tensors"])
    if name == "send":
        return tensors, []
    return ([], tensors) if name == "recv_" else (tensors, tensors)


def _label() -> str:
    """What the project calls the collective that is being issued: the label of its ``Call``."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        call = frame.f_locals.get("call")
        if call is not None and hasattr(call, "label"):
            return str(call.label)
        frame = frame.f_back
    return ""


def patches() -> list[tuple[Any, str, Any]]:
    """What ``torch.distributed`` finds where NCCL would be."""
    limit = timedelta(minutes=10)
    return [
        (distributed_c10d, "_NCCL_AVAILABLE", True),
        (distributed_c10d, "ProcessGroupNCCL", PretendedNCCL),
        (dist, "ProcessGroupNCCL", PretendedNCCL),
        (distributed_c10d, "default_pg_nccl_timeout", limit),
        (distributed_c10d, "split_group", split_group),
        (dist, "split_group", split_group),
        (device_mesh, "split_group", split_group),
    ]
