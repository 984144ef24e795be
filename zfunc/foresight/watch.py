"""A step watched operation by operation: where each belongs, how long it takes, what it moves."""

from __future__ import annotations

import re
import weakref
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode

from zfunc.foresight.flops import formula_of
from zfunc.foresight.layer_names import CurrentLayer
from zfunc.foresight.op_times import Times
from zfunc.foresight.own_flops import OwnFlops
from zfunc.foresight.rows import StepRow
from zfunc.foresight.schemas import (
    ALLOCATES,
    is_causal,
    is_composite,
    shares,
    writes,
    written_by,
)
from zfunc.kernels.operators import RUNS

__all__ = ["TimedRow", "Watch"]

PLAIN = frozenset({Tensor, torch.nn.Parameter})
LAYER = re.compile(r"(?:.*?\.)?\d+(?=\.)")  # of a parameter's path, up to the number in a stack


@dataclass(frozen=True)
class TimedRow(StepRow):
    """One operation that was done, or the start of a collective or a message.

    Attributes:
        begin: seconds since the step began.
        seconds: how long it took; on a GPU until the stream was through with it.
        stream: the number of the GPU's stream; 0 on the host.
    """

    begin: float = 0.0
    seconds: float = 0.0
    stream: int = 0

    def in_update(self) -> TimedRow:
        """The same, if it is one of forward, as part of the update."""
        return replace(self, phase="update") if self.phase == "forward" else self


@dataclass(frozen=True)
class _Operator:
    """What is asked of an operator at each call."""

    name: str
    passes: bool  # it computes nothing
    composite: bool
    own: bool
    formula: Any
    writes: bool

    @classmethod
    def of(cls, func: Any) -> _Operator:
        if isinstance(func, HigherOrderOperator):  # of functions, which it runs unseen
            return cls(func.name(), False, False, False, None, True)
        name, own = func._opname, func._schema.name in RUNS
        written = bool(writes(func))
        return cls(name, shares(func), is_composite(func), own, formula_of(name), written)


class Watch(TorchDispatchMode):
    """Notes operations inside the block, which run as they are.

    Attributes:
        layers: in which layer the program is.
        times: takes the times of operations.
        homes: the addresses of plain parameters, and their paths: layers that are only numbered are
            called like the parameters that they read.
        kept: bytes of what a layer's forward has made and was there when backward began.

    Args:
        times: as above.
        on_gpu: whether operations without tensors may run on a GPU.
    """

    supports_higher_order_operators = True

    def __init__(self, times: Times, on_gpu: bool) -> None:
        super().__init__()
        self.layers, self.kept = CurrentLayer(), Counter[str]()
        self.times, self._on_gpu = times, on_gpu
        self.homes: dict[int, str] = {}
        self._operators: dict[Any, _Operator] = {}
        self._noted: list[tuple[Any, ...]] = []
        self._names: dict[str, str] = {}  # of layers that are numbered
        self._own = OwnFlops()
        self._alive: dict[int, tuple[Any, str, int]] = {}  # storages, by the reference to each
        self._live: Counter[str] = Counter()
        self._computing = False  # nothing of backward since

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # it would be imported, for seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not PLAIN.issuperset(types):  # tensors of another kind answer themselves
            return NotImplemented
        operator = self._operators.get(func)
        if operator is None:
            operator = self._operators[func] = _Operator.of(func)
        if operator.passes:
            return func(*args, **kwargs)
        if operator.composite:  # in inference mode
            with self:
                return func.decompose(*args, **kwargs)
        given = _tensors((*args, *kwargs.values()))
        layer, phase = self.layers.here()
        there = self._on_gpu and (not given or any(x.is_cuda for x in given))
        begin = self.times.now(there)
        out = func(*args, **kwargs)
        end = self.times.now(there)
        made = _tensors((out,))
        if not made and operator.writes and not isinstance(func, HigherOrderOperator):
            made = written_by(func, args, kwargs)
        flops: Any = 0
        causal = False
        if operator.formula is not None:
            flops, causal = operator.formula(args, made), is_causal(func, args, kwargs)
        elif operator.own:
            flops = self._own.asked(func, args, kwargs)
        stream = torch.cuda.current_stream().stream_id if there else 0
        self._noted.append((
            *(operator.name, layer, phase, flops, begin, end, stream),
            *(sum(x.nbytes for x in given), sum(x.nbytes for x in made)),
            *(sum(x.numel() for x in made), tuple(tuple(x.shape) for x in given)),
            *(given[0].dtype if given else None, causal),
        ))  # fmt: skip
        if self.homes and layer.isdigit() and layer not in self._names:
            self._call(layer, given)
        if phase != "forward":
            if self._computing:
                self._begin_backward()
        elif not operator.writes and operator.name not in ALLOCATES and torch.is_grad_enabled():
            self._made(layer, made)
        return out

    def started(self, kind: str, label: str, axis: str, nbytes: int) -> None:
        """A collective, or a message, has been issued."""
        layer, phase = self.layers.here()
        self._noted.append((kind, layer, phase, self.times.now(False), label, axis, nbytes))

    def rows(self) -> tuple[TimedRow, ...]:
        """What was done, once the device is through with it; layers have their names."""
        return tuple(self._row(*noted) if len(noted) > 7 else self._start(*noted)
                     for noted in self._noted)  # fmt: skip

    def kept_bytes(self) -> Counter[str]:
        """What is kept, by the names of the layers."""
        named: Counter[str] = Counter()
        for layer, nbytes in self.kept.items():
            named[self._names.get(layer, layer)] += nbytes
        return named

    def _row(self, name: str, layer: str, phase: str, flops: Any, begin: Any, end: Any,
             stream: int, read: int, written: int, elements: int, shapes: Any,
             dtype: Any, causal: bool) -> TimedRow:  # fmt: skip
        start = self.times.seconds(begin)
        return TimedRow(
            *("compute", name, self._names.get(layer, layer), phase),
            flops=flops if isinstance(flops, int) else self._own.of(flops),
            read=read,
            written=written,
            elements=elements,
            shapes=shapes,
            dtype=dtype,
            causal=causal,
            begin=start,
            seconds=self.times.seconds(end) - start,
            stream=stream,
        )

    def _start(self, kind: str, layer: str, phase: str, at: Any, label: str, axis: str,
               nbytes: int) -> TimedRow:  # fmt: skip
        place, begin = self._names.get(layer, layer), self.times.seconds(at)
        return TimedRow(
            *("start", kind, place, phase), written=nbytes, label=label, axis=axis, begin=begin
        )

    def _call(self, layer: str, given: list[Tensor]) -> None:
        for x in given:
            found = LAYER.match(self.homes.get(x.data_ptr(), ""))
            if found is not None:
                self._names[layer] = found[0]

    # What forward keeps for backward

    def _made(self, layer: str, made: list[Tensor]) -> None:
        self._computing = True
        for x in made:
            storage = x.untyped_storage()
            ref = weakref.ref(storage, self._freed)
            self._alive[id(ref)] = ref, layer, storage.nbytes()
            self._live[layer] += storage.nbytes()

    def _freed(self, ref: Any) -> None:
        _, layer, nbytes = self._alive.pop(id(ref))
        self._live[layer] -= nbytes

    def _begin_backward(self) -> None:
        self._computing = False
        for layer, nbytes in self._live.items():
            self.kept[layer] = max(self.kept[layer], nbytes)


def _tensors(values: Any) -> list[Tensor]:
    """The tensors among arguments, those of lists included."""
    found: list[Tensor] = []
    for x in values:
        if isinstance(x, Tensor):
            found.append(x)
        elif isinstance(x, list | tuple):
            found += _tensors(x)
    return found
