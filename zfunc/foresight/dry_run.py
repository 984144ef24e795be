"""A program run for its memory and its order, without its arithmetic.

Tensors are ordinary ones of the CPU, whose pages nobody touches: types, devices, strides, addresses
and what shares memory with what are those of the real run, so every branch of the program is the
real one. Views are taken. Any other operation on large tensors is answered with memory of the shape
that its kernel for meta tensors gives. Small tensors are computed: counters, keys, schedules and
scales keep their values. What comes of large ones is filled with ones where it is small, and
whoever reads such a value has read a guess, which is written down.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from zfunc.foresight.assumptions import ForesightError, Guesses, place
from zfunc.foresight.attention import FUSED, attention
from zfunc.foresight.flops import flops_of
from zfunc.foresight.geometry import Geometries, Made, Results, Returned
from zfunc.foresight.layer_names import CurrentLayer
from zfunc.foresight.pageless import pageless
from zfunc.foresight.rows import StepRow
from zfunc.foresight.schemas import ALLOCATES, is_causal, is_composite, shares, written_by
from zfunc.foresight.storages import SMALL, Storages
from zfunc.kernels.operators import RUNS
from zfunc.ranks.transport import Collective

__all__ = ["DryRun"]

aten = torch.ops.aten
PLAIN = frozenset({Tensor, torch.nn.Parameter})
# What collectives and copies bring, by the first word of their label.
KINDS = {"gather": "parameters", "join": "parameters", "up": "parameters", "reduce": "gradients"}
UNSEEN = frozenset({"mkldnn_rnn_layer", "_cudnn_rnn", "miopen_rnn"})  # they have workspaces
READS = (aten._local_scalar_dense.default, aten.equal.default)  # the host learns a value


class DryRun(TorchDispatchMode):
    """Answers operations inside the block.

    Attributes:
        storages: what lives, and what is known of it.
        guesses: values that were read and had to be guessed.
        layers: in which layer the program is.
        rows: what was done since :meth:`begin`.
    """

    every_operation = False  # what takes no memory may take none here, either
    supports_higher_order_operators = True  # to refuse them by name

    def __init__(self) -> None:
        super().__init__()
        self.storages, self.guesses, self.layers = Storages(), Guesses(), CurrentLayer()
        self.rows: list[StepRow] = []
        self._geometries = Geometries()
        # The caller's tensors on meta, each with what stands for it.
        self._constants: dict[Any, tuple[Tensor, Tensor]] = {}
        self._seeds: dict[torch.Generator, Tensor] = {}
        self._silent = False
        self._started: list[StepRow] = []
        self._before = 0  # what was started in earlier steps
        self._behind: list[int] | None = None
        self._on_host = False  # where the operation under way computes
        self._arriving = ""
        self.storages.kind = self._kind

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # it would be imported, for seconds

    def begin(self) -> None:
        """Begin rows, peak and timeline anew."""
        self._before += len(self._started)
        self.rows, self._started = [], []
        self.storages.begin()
        self.layers.begin()

    def restore_generators(self) -> None:
        """Put the generators that were drawn from back to where they were."""
        for generator, state in self._seeds.items():
            generator.set_state(state)

    def _kind(self) -> str:
        """What is made now, as far as its place tells."""
        layer, phase = self.layers.here()
        if phase == "backward":
            return "gradients"
        return "activations" if layer or torch.is_grad_enabled() else "other"

    # What the world tells (zfunc.ranks.foreseen.Arrivals)

    def issued(self, call: Collective, axis: str, nbytes: int, peer: int) -> int:
        return self._start(call.kind, call.label, nbytes, axis=axis, peer=peer)

    def waited(self, number: int) -> None:
        self._arriving = ""
        if number <= self._before:  # it was issued in an earlier step
            return
        if self._behind is not None:
            self._behind.append(number)
            return
        start = self._started[number - self._before - 1]
        self._arriving = KINDS.get(start.label.split(" ", 1)[0], "")
        row = StepRow("wait", start.name, label=start.label, axis=start.axis, number=number)
        self._add(replace(row, peer=start.peer))

    def _start(self, name: str, label: str, nbytes: int, **more: Any) -> int:
        number = self._before + len(self._started) + 1
        row = StepRow("start", name, *self.layers.here(), written=nbytes, label=label)
        self._started.append(replace(row, number=number, **more))
        self._add(self._started[-1])
        return number

    # What is told of copies (zfunc.buffers.moves.Moves)

    def moved(self, way: str, nbytes: int) -> int:
        after = max(self._behind or (), default=0)
        return self._start(way, way, nbytes, after=after)

    @contextmanager
    def behind(self) -> Iterator[None]:
        outer, self._behind = self._behind, []
        try:
            yield
        finally:
            self._behind = outer

    def hosts(self, x: Tensor) -> None:
        self.storages.hosts(x)

    def on_host(self, x: Tensor) -> bool:
        return self.storages.on_host(x)

    def arrived(
        self, written: Sequence[Tensor], given: Sequence[Tensor], fill: Callable[[], Any]
    ) -> None:
        storages, every = self.storages, [*written, *given]
        for x in every:
            storages.seen(x)
        if self._arriving:
            storages.mark(every, self._arriving)
        if any(storages.is_absent(x) or storages.is_callers(x) or _large(x) for x in every):
            self._overwrite(written)
            return
        self._silent = True
        try:
            fill()
        finally:
            self._silent = False
        storages.assume(written)

    def kernel(self, name: str, tensors: list[Tensor], twin: Callable[[], None]) -> None:
        """A kernel, which takes no memory while it runs: its twin tells what it writes."""
        (layer, phase), rows = self.layers.here(), self.rows
        self.rows = []
        self.storages.hidden += 1
        try:
            twin()
        finally:
            self.storages.hidden -= 1
            inside, self.rows = self.rows, rows
        flops, read = sum(row.flops for row in inside), sum(x.nbytes for x in tensors)
        dtype = tensors[0].dtype if tensors else None
        shapes = tuple(tuple(x.shape) for x in tensors)
        row = StepRow("compute", name, layer, phase, flops, read, shapes=shapes, dtype=dtype)
        self._add(replace(row, on_host=any(map(self.storages.on_host, tensors))))

    # Operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._silent:
            return func(*args, **kwargs)
        if isinstance(func, HigherOrderOperator):
            raise ForesightError(
                f"{func.name()} is an operator of functions, and nobody knows what shape it gives: "
                "write it with ordinary operators in the step that is foreseen "
                "(scaled_dot_product_attention, torch.where)."
            )
        if not PLAIN.issuperset(types):  # tensors of another kind answer themselves
            return NotImplemented
        if (inside := RUNS.get(func._schema.name)) is not None:  # an operator of ours
            with self:
                return inside(*args, **kwargs)
        if is_composite(func):  # it comes so in inference mode: who knows what it shares?
            with self:
                whole = func is aten.scaled_dot_product_attention.default
                return (attention if whole else func.decompose)(*args, **kwargs)
        flat, spec = pytree.tree_flatten((args, kwargs))
        tensors = [x for x in flat if isinstance(x, Tensor)]
        if any(x.is_meta for x in tensors):
            if all(x.is_meta for x in tensors) and not _leaves_meta(func, kwargs):
                return func(*args, **kwargs)
            flat = [
                self._with_memory(x) if isinstance(x, Tensor) and x.is_meta else x for x in flat
            ]
            args, kwargs = pytree.tree_unflatten(flat, spec)
            tensors = [x for x in flat if isinstance(x, Tensor)]
        if _changes_to_meta(func, kwargs):
            return func(*args, **kwargs)
        for x in tensors:
            self.storages.seen(x)
        if shares(func):
            return self._shared(func, args, kwargs)
        if func in READS:
            return self._read(func, args, kwargs, tensors)
        self._on_host = False
        if not tensors:
            return self._new(func, args, kwargs, flat, spec)
        results = self._geometries.of(func, flat, spec)
        self._kept_unseen(func)
        self._on_host = any(map(self.storages.on_host, tensors))
        out = self._answer(func, args, kwargs, flat, tensors, results)
        self._note(func, args, kwargs, tensors, out)
        return out

    def _answer(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        flat: Sequence[Any],
        tensors: Sequence[Tensor],
        results: Results | None,
    ) -> Any:
        storages, written = self.storages, written_by(func, args, kwargs)
        absent = any(storages.is_absent(x) or _large(x) for x in tensors)
        if absent or func._opname in FUSED or any(storages.is_callers(x) for x in written):
            if results is None:
                raise _unforeseen(func)
            return self._left_out(flat, results, written)
        if results is not None and results.numel > SMALL:
            return self._left_out(flat, results, written)
        assumed = any(storages.is_assumed(x) for x in tensors)
        self._remember(flat)
        out = func(*args, **kwargs)
        made = [x for x in pytree.tree_leaves(out) if isinstance(x, Tensor)]
        for x in made:
            storages.made(x, self._on_host)
        if func._opname in ALLOCATES:
            for x in made:
                x.zero_()  # whatever lay there would be read as a value
        elif assumed:
            for x in (*made, *written):
                if x.is_floating_point():  # a quotient of guesses is no overflow
                    x.nan_to_num_(1.0, 1.0, -1.0)
            storages.assume([*made, *written])
            if results is None:
                self.guesses.add(f"the shape of what {func._opname} gives")
        return out

    def _kept_unseen(self, func: Any) -> None:
        """Note memory that a kernel keeps for backward, of a size that only it knows."""
        if func._opname in UNSEEN and torch.is_grad_enabled():
            self.guesses.add(f"what {func._opname} keeps for backward, taken to be its results")

    def _left_out(self, flat: Sequence[Any], results: Results, written: Iterable[Tensor]) -> Any:
        """Memory for results, and no values."""
        self._overwrite(written)
        leaves = [self._leaf(x, flat) for x in results.leaves]
        return pytree.tree_unflatten(leaves, results.spec)

    def _leaf(self, x: Any, flat: Sequence[Any]) -> Any:
        if isinstance(x, Returned):
            return flat[x.index]
        if not isinstance(x, Made):
            return x
        made = pageless(x.size, x.stride, x.dtype)
        self.storages.made(made, self._on_host)
        self.storages.wrote(made)
        return made

    def _overwrite(self, written: Iterable[Tensor]) -> None:
        for x in written:
            self.storages.wrote(x)

    def _shared(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func._opname in ("resize_", "resize_as_"):
            _check_room(func, args)
        out = func(*args, **kwargs)
        if not func.is_view:
            for x in pytree.tree_leaves(out):
                if isinstance(x, Tensor):
                    self.storages.made(x)
        return out

    def _new(self, func: Any, args: Any, kwargs: Any, flat: Sequence[Any], spec: Any) -> Any:
        """A tensor of none: a large one gets no values."""
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "meta":
            return func(*args, **kwargs)
        if "device" in {argument.name for argument in func._schema.arguments}:
            on_meta, its = pytree.tree_flatten((args, {**kwargs, "device": torch.device("meta")}))
            results = self._geometries.of(func, on_meta, its)
            if results is not None and results.numel > SMALL:
                self._remember(flat)
                out = self._left_out(flat, results, ())
                self._note(func, args, kwargs, (), out)
                return out
        self._remember(flat)
        out = func(*args, **kwargs)
        for x in pytree.tree_leaves(out):
            if isinstance(x, Tensor):
                self.storages.made(x)
                if func._opname in ALLOCATES:
                    x.zero_()
        return out

    def _read(self, func: Any, args: Any, kwargs: Any, tensors: Sequence[Tensor]) -> Any:
        """A value for the host."""
        x, storages = tensors[0], self.storages
        if any(storages.is_absent(x) or _large(x) for x in tensors):
            value = True if func is READS[1] or x.dtype is torch.bool else x.new_ones(()).item()
        else:
            value = func(*args, **kwargs)
            if not any(storages.is_assumed(x) for x in tensors):
                return value
        if self.storages.hidden:  # a kernel has no host to tell
            return value
        what = "whether two tensors are equal" if func is READS[1] else f"a value of {_told(x)}"
        self.guesses.add(f"{what}, taken to be {value}")
        return value

    def _with_memory(self, x: Tensor) -> Tensor:
        """What stands for a tensor on meta that the program has from before."""
        key = (x.untyped_storage()._cdata, (x.size(), x.stride(), x.dtype, x.storage_offset()))
        if key not in self._constants:
            made = pageless(x.size(), x.stride(), x.dtype)
            self.storages.made(made)
            self.storages.wrote(made)
            self._constants[key] = x, made  # `x` is kept, or another could get its key
        return self._constants[key][1]

    def _remember(self, flat: Sequence[Any]) -> None:
        for x in flat:
            if isinstance(x, torch.Generator) and x not in self._seeds:
                self._seeds[x] = x.get_state()

    # Rows

    def _add(self, row: StepRow) -> None:
        self.rows.append(row)
        self.storages.row = len(self.rows)

    def _note(self, func: Any, args: Any, kwargs: Any, tensors: Sequence[Tensor], out: Any) -> None:
        if func._opname in ALLOCATES:
            return
        made = [x for x in pytree.tree_leaves(out) if isinstance(x, Tensor)]
        changed = made or written_by(func, args, kwargs)
        layer, phase = self.layers.here()
        flops = flops_of(func._opname, args, changed)
        if flops and torch.is_autocast_enabled("cuda"):
            self.guesses.add("autocast for cuda, which the CPU that stands for it does not know")
        row = StepRow(
            "compute",
            func._opname,
            layer,
            phase,
            flops,
            read=sum(x.nbytes for x in tensors),
            written=sum(x.nbytes for x in changed),
            elements=sum(x.numel() for x in changed),
            shapes=tuple(tuple(x.shape) for x in tensors),
            dtype=tensors[0].dtype if tensors else None,
            causal=is_causal(func, args, kwargs),
            on_host=self._on_host,
        )
        self._add(row)


def _leaves_meta(func: Any, kwargs: Any) -> bool:
    """Whether a constant on meta is asked for where numbers are."""
    device = kwargs.get("device")
    return func._opname == "_to_copy" and device is not None and device.type != "meta"


def _changes_to_meta(func: Any, kwargs: Any) -> bool:
    """Whether the shape of a tensor is asked for, without memory."""
    device = kwargs.get("device")
    return func._opname == "_to_copy" and device is not None and device.type == "meta"


def _check_room(func: Any, args: Any) -> None:
    """Raise if memory would grow in place: who counts it would not see that."""
    x, asked = args[:2]
    size = asked.shape if isinstance(asked, Tensor) else asked
    room = x.untyped_storage().nbytes() // x.itemsize - x.storage_offset()
    if prod(size) > room:
        raise ForesightError(
            f"{func._opname} makes a tensor of shape {list(x.shape)} one of {list(size)}, which "
            f"takes more memory: make a new one (torch.empty). This is at {place()}."
        )


def _large(x: Tensor) -> bool:
    return x.numel() > SMALL


def _told(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"


def _unforeseen(func: Any) -> ForesightError:
    return ForesightError(
        f"the shape of what {func._opname} gives depends on values, which a step that is foreseen "
        "does not have: write it with shapes that do not (torch.where, a mask, a fixed capacity)."
    )
