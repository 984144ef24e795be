"""Record how a state is initialised, to build it later one leaf at a time.

``record(make_state, *args)`` runs the function once on tensors without memory and
writes down what they go through (:mod:`zfunc.initialisation.tape`). Three things
make the replay bitwise equal to a plain call:

- **Memory.** Operations are noted by the storage that they read and write, so views,
  ``p.data = x``, ties and in-place writes on views are followed by construction.
- **Randomness.** Nothing is drawn while recording. :mod:`zfunc.initialisation.generator_states`
  notes which state each draw starts from, whoever seeded, saved or restored the generator.
- **Values.** ``.item()``, ``if t.any():``, ``nonzero`` and the like compute what they ask
  for from the tape so far. If that comes from the global generator (rejection sampling
  in ``nn.init.trunc_normal_`` does so) the recording only holds for the generator state
  that it was made in, and ``replay`` checks it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any, cast

import optree
import torch
from torch import Tensor, UntypedStorage
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from zfunc.errors import PlacementError
from zfunc.initialisation import tape
from zfunc.initialisation.generator_states import GeneratorStates
from zfunc.initialisation.tape import MemoryCell, Recording, View, geometry, view
from zfunc.trees.tree import dotted

__all__ = ["record"]

DEVICE = torch.ops.prim.device.default
COMPATIBLE = torch.ops.aten._has_compatible_shallow_copy_type.default
_OVERWRITES = {  # in-place operations that do not look at what they replace
    *("zero_", "fill_", "copy_", "normal_", "uniform_", "random_", "bernoulli_"),
    *("exponential_", "cauchy_", "log_normal_", "geometric_"),
}

INSTEAD = "Build the state and call step.place(state) instead."
_OVER = (
    "step.init: {} got a tensor that make_state created but did not return, and its recording has "
    "ended. Return every tensor that is used later, as a leaf of the state."
)
_LIFT = torch.ops.aten.lift_fresh.default
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_READS = {Tensor.numpy, Tensor.__array__, Tensor.tolist}
_POINTERS = {Tensor.data_ptr, Tensor.__reduce_ex__, Tensor.share_memory_}
_ON_META = (
    "step.init: the leaf {} is on the meta device, so it has no values. Leave out "
    "`with torch.device('meta')`: step.init builds no full state, whatever the device."
)
_MODULE = (
    "step.init: the leaf {} is a {}, a module, whose tensors are out of sight. "
    "Return zf.functionalize(module).params, or a dict of its parameters."
)


def record(make_state: Callable[..., Any], *args: Any, **kwargs: Any) -> Recording:
    """Run ``make_state(*args, **kwargs)`` without memory, and note how to build its result.

    Every random generator is in the same state afterwards as before.

    Args:
        make_state: builds a pytree of tensors with torch's operations. Its Python side
            effects (prints, ``random``, ``numpy.random``) happen here, once.

    Returns:
        A :class:`Recording`, whose ``replay`` hands over the leaves of a plain call, bitwise.

    Raises:
        PlacementError: something in ``make_state`` cannot be replayed; the message names the
            operation or the leaf, and what to do instead.

    >>> recording = record(lambda: {"w": torch.zeros(2, 3).fill_(1.5)})
    >>> recording.tree["w"].shape, recording.tree["w"].device.type
    (torch.Size([2, 3]), 'meta')
    >>> recording.replay(lambda i, leaf: print(i, leaf.sum()))
    0 tensor(9.)
    """
    with tape.LOCK, GeneratorStates() as generators:
        recorder = _Recorder(generators)
        try:
            with _Functions(recorder), recorder:
                tree = make_state(*args, **kwargs)
        except PlacementError:
            raise
        except Exception as error:
            note = f"This was raised while step.init recorded {make_state}. "
            error.add_note(note + INSTEAD)
            raise
        tree, leaves = recorder.collect(tree)
        pinned, ends = generators.pinned if recorder.looked else {}, generators.ends()
        return Recording(tree, recorder.ops, leaves, generators.starts, ends, pinned)


def refused(operation: Any, why: str) -> PlacementError:
    return PlacementError(f"step.init cannot replay make_state: {operation} {why}. {INSTEAD}")


class RecordedTensor(Tensor):
    """A tensor without memory that names its device; only a recorder computes with it."""

    home: torch.device

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is DEVICE:
            return args[0].home
        if func is COMPATIBLE:  # `p.data = x` asks
            return all(isinstance(t, RecordedTensor) for t in args)
        raise PlacementError(_OVER.format(func))

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


def recorded(meta: Tensor, device: torch.device) -> RecordedTensor:
    """The tensor on meta, under the name of another device; it shares the storage."""
    tensor: Any = Tensor._make_subclass(
        RecordedTensor, meta, dispatch_device=True, device_for_backend_keys=device
    )
    tensor.home = device
    return cast(RecordedTensor, tensor)


def is_meta(tensor: Tensor) -> bool:
    return not isinstance(tensor, RecordedTensor) and tensor.is_meta


class OperatorCall:
    """An operation as it was called, with what its schema says about it."""

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        self.name: str = func.overloadpacket.__name__
        flat = pytree.tree_leaves((args, kwargs))
        self.tensors: list[Tensor] = [a for a in flat if isinstance(a, Tensor)]
        self.generator = next((a for a in flat if isinstance(a, torch.Generator)), None)
        self.only_shapes = self.name.endswith("_like") or self.name.startswith("new_")

    @cached_property
    def uses(self) -> list[tuple[Tensor, bool, bool]]:
        """Its tensors, each with whether it is read and whether it is written."""
        found = []
        for i, argument in enumerate(self.func._schema.arguments):
            value = self.args[i] if i < len(self.args) else self.kwargs.get(argument.name)
            blind = argument.is_out or (i == 0 and self.name in _OVERWRITES)
            reads = not blind and not self.only_shapes
            tensors = [t for t in pytree.tree_leaves(value) if isinstance(t, Tensor)]
            found += [(t, reads, argument.is_write) for t in tensors]
        return found

    @property
    def written(self) -> list[Tensor]:
        return [t for t, _, writes in self.uses if writes]

    @property
    def random(self) -> bool:
        seeded = torch.Tag.nondeterministic_seeded in self.func.tags
        return seeded or any(a.name == "generator" for a in self.func._schema.arguments)

    @property
    def looks(self) -> bool:
        """Whether the kind or the shape of its result depends on values."""
        returns = self.func._schema.returns
        tags = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
        python = returns and not any("Tensor" in str(result.type) for result in returns)
        return bool(python or tags.intersection(self.func.tags))

    @property
    def silent(self) -> bool:
        """Whether it only allocates, or only changes a tensor's view of its storage."""
        restrides = torch.Tag.inplace_view in self.func.tags and self.name != "resize_"
        return restrides or self.name.startswith(("empty", "new_empty"))

    @property
    def foreign(self) -> bool:
        """Whether it can simply run: all on meta, or a view of what existed before."""
        if any(isinstance(t, RecordedTensor) for t in self.tensors):
            return False
        if all(t.is_meta for t in self.tensors):
            device = self.kwargs.get("device")
            return torch.device(device).type == "meta" if device else bool(self.tensors)
        returns = self.func._schema.returns
        return bool(returns) and all(r.alias_info and not r.alias_info.is_write for r in returns)

    def on_meta(self, metas: dict[Tensor, Tensor]) -> Any:
        """Shape, strides and aliases of what it gives; what it does in place shows in ``metas``."""

        def meta(value: Any) -> Any:
            if isinstance(value, Tensor):
                return metas.get(value, value)
            return None if isinstance(value, torch.Generator) else value

        args, kwargs = pytree.tree_map(meta, (self.args, self.kwargs))
        if kwargs.get("device") is not None:
            kwargs["device"] = "meta"
        return self.func(*args, **kwargs)

    def on_tape(self, seen: dict[Tensor, View], device: torch.device) -> tuple[Any, Any]:
        """Its arguments for the replay: views stand for tensors, or shapes if these suffice."""

        def noted(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if self.only_shapes:
                return view(seen[value].cell.shadow, seen[value]) if value in seen else value
            if value not in seen:
                raise refused(self.func, "reads a tensor on the meta device, which has no values")
            return seen[value]

        args, kwargs = pytree.tree_map(noted, (self.args, self.kwargs))
        return args, {**kwargs, "device": device} if self.only_shapes else kwargs


def covers(v: View | None) -> bool:
    """Whether a view reaches every byte of its storage, and each once."""
    if v is None:
        return False
    width = 1
    for stride, size in sorted(zip(v.stride, v.size, strict=True)):
        if size != 1 and stride != width:
            return False
        width *= size
    return width * v.dtype.itemsize == v.cell.shadow.nbytes()


class _Functions(TorchFunctionMode):
    """Catches what reaches into a tensor's memory without an operation."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        ours = bool(args) and isinstance(args[0], RecordedTensor)
        if ours and func in _POINTERS:
            raise refused(func.__name__, "asks for the memory of a tensor that has none yet")
        if ours and func in _READS:
            with _disable_current_modes():
                value = func(self.recorder.value(args[0]), *args[1:], **(kwargs or {}))
            if hasattr(value, "flags"):
                value.flags.writeable = False  # a write would not reach the tensor
            return value
        if func == _SET_DATA and ours and not isinstance(args[1], RecordedTensor):
            with _disable_current_modes():
                args = (args[0], self.recorder.adopt(args[1]))
        elif func == _SET_DATA and isinstance(args[1], RecordedTensor) and not ours:
            raise refused("tensor.data = ...", "changes a tensor that existed before make_state")
        return func(*args, **(kwargs or {}))


def _exists(tensor: Tensor) -> bool:
    return not isinstance(tensor, RecordedTensor) and not tensor.is_meta


class _Recorder(TorchDispatchMode):
    """Notes operations instead of carrying them out."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the other way imports dynamo: 117 MiB, however small the state is

    def __init__(self, generators: GeneratorStates) -> None:
        super().__init__()
        self.ops: list[tape.RecordedOperation] = []
        self.looked = False  # at values drawn from the global generators
        self._generators = generators
        self._cells: dict[int, MemoryCell] = {}  # by the address of their shadow
        self._constants: dict[int, MemoryCell] = {}  # by the address of their real storage
        self._written: set[MemoryCell] = set()
        self._values: dict[MemoryCell, UntypedStorage] = {}  # computed, and not written since

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE:
            return self._cell(args[0]).device
        if func is COMPATIBLE:
            return RecordedTensor.__torch_dispatch__(func, types, args)
        if func is _LIFT and _exists(args[0]):
            return self.adopt(args[0], ours=True)
        call = OperatorCall(func, args, dict(kwargs or {}))
        if call.foreign:
            return func(*args, **call.kwargs)
        self._check(call)
        if not call.looks:
            try:
                return self._record(call)
            except NotImplementedError:
                pass  # no meta kernel: try it on values
        if call.written or call.random:
            raise refused(func, "draws or writes, and has no kernel for the meta device")
        args, kwargs = pytree.tree_map_only(RecordedTensor, self.value, (args, call.kwargs))
        result = func(*args, **kwargs)
        return pytree.tree_map_only(Tensor, lambda t: self.adopt(t, ours=True), result)

    def adopt(self, tensor: Tensor, ours: bool = False) -> RecordedTensor:
        """A recorded tensor whose value is a real one's (its own copy of it, if ``ours``)."""
        cell = self._constant(tensor, ours)
        return self._wrap(view(cell.shadow, geometry(tensor, cell)), cell.device)

    def value(self, tensor: Tensor) -> Tensor:
        """The real value of a recorded tensor at this moment; not to be written to."""
        cell, states = self._cell(tensor), self._generators.states
        if cell not in self._values:
            roots = {cell} & self._written
            ops = [turn.op for turn in tape.live(self.ops, roots=roots, known=states)]
            draws = [op.draw for op in ops if op.draw]
            self.looked |= any(draw.before in self._generators.rooted for draw in draws)
            after = {draw.after for draw in draws}
            memory = tape.CellValues(states)
            for _ in tape.run(tape.live(ops, roots={cell, *after}), memory):
                pass
            self._values[cell] = memory[cell]
            states.update((state, memory[state]) for state in after)
        return view(self._values[cell], geometry(tensor, cell))

    def collect(self, tree: Any) -> tuple[Any, list[tape.StateLeaf]]:
        """The tree on meta, and its tensor leaves as they live on the tape."""
        values, spec = optree.tree_flatten(tree, namespace="zfunc")
        leaves: dict[int, tape.StateLeaf] = {}
        for i, (path, value) in enumerate(zip(spec.paths(), values, strict=True)):
            name = dotted(*path) or "(the result itself)"
            if isinstance(value, torch.nn.Module):
                raise PlacementError(_MODULE.format(name, type(value).__name__))
            if isinstance(value, Tensor):
                leaf = leaves.get(id(value)) or self._leaf(name, value)
                leaves[id(value)] = replace(leaf, indices=(*leaf.indices, i))
        shadows = {key: leaf.tensor(leaf.view.cell.shadow) for key, leaf in leaves.items()}
        return spec.unflatten([shadows.get(id(v), v) for v in values]), list(leaves.values())

    def _leaf(self, name: str, tensor: Tensor) -> tape.StateLeaf:
        if is_meta(tensor):
            raise PlacementError(_ON_META.format(name))
        parameter = isinstance(tensor, torch.nn.Parameter)
        given = tensor if _exists(tensor) else None
        grad = tensor.requires_grad and tensor.is_leaf
        return tape.StateLeaf((), geometry(tensor, self._cell(tensor)), parameter, grad, given)

    def _check(self, call: OperatorCall) -> None:
        if call.func.namespace.startswith(("c10d", "_c10d")):
            raise refused(call.func, "communicates with other ranks")
        if any(not is_meta(t) and self._cell(t).fixed for t in call.written):
            why = "writes to a tensor that existed before make_state (clone it first)"
            raise refused(call.func, why)

    def _record(self, call: OperatorCall) -> Any:
        """Run the operation on meta for what it gives, and note it if it writes anything."""
        seen = {t: geometry(t, self._cell(t)) for t in call.tensors if not is_meta(t)}
        metas = {t: view(v.cell.shadow, v) for t, v in seen.items()}
        device = self._device(call)
        result = call.on_meta(metas)
        if device.type == "meta" and seen.keys().isdisjoint(call.written):
            return result
        known = set(self._cells)
        back = {id(meta): tensor for tensor, meta in metas.items()}

        def given(t: Tensor) -> Tensor:
            return back[id(t)] if id(t) in back else self._wrap(t, device)

        outputs = pytree.tree_map_only(Tensor, given, result)
        tensors = [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor)]
        views = [None if _address(t) in known else self._seen(t) for t in tensors]
        self._note(call, seen, tuple(views), device)
        for tensor in call.written:  # after t_(), set_() and the like, it is another view
            if self._seen(metas[tensor]) != geometry(tensor, self._cell(tensor)):
                tensor.data = self._wrap(metas[tensor], device)
        return outputs

    def _seen(self, meta: Tensor) -> View:
        return geometry(meta, self._cells[_address(meta)])

    def _note(
        self,
        call: OperatorCall,
        seen: dict[Tensor, View],
        outputs: tuple[View | None, ...],
        device: torch.device,
    ) -> None:
        args, kwargs = call.on_tape(seen, device)
        fresh = {v.cell for v in outputs if v}
        writes = fresh | {seen[t].cell for t in call.written}
        if call.silent or not writes:
            return
        reads = {seen[t].cell for t, reads, _ in call.uses if reads}
        blind = {seen[t].cell for t, reads, _ in call.uses if not reads and covers(seen.get(t))}
        erases = fresh | (blind & writes)
        draw = self._generators.draw(call.generator, device) if call.random else None
        if draw:
            reads.add(draw.before)
            erases.add(draw.after)
        cells = frozenset(reads), frozenset(writes | erases), frozenset(erases)
        dtype = torch.get_default_dtype()
        self.ops.append(
            tape.RecordedOperation(call.func, args, kwargs, outputs, *cells, draw, dtype)
        )
        self._written |= writes
        for cell in writes:
            self._values.pop(cell, None)

    def _device(self, call: OperatorCall) -> torch.device:
        if call.kwargs.get("device") is not None:
            return torch.device(call.kwargs["device"])
        ranked = sorted(call.tensors, key=lambda t: t.dim() == 0)  # a 0-d one decides last
        if not ranked:
            return torch.device("cpu")
        return ranked[0].device if is_meta(ranked[0]) else self._cell(ranked[0]).device

    def _cell(self, tensor: Tensor) -> MemoryCell:
        if not isinstance(tensor, RecordedTensor):
            return self._constant(tensor)
        if _address(tensor) not in self._cells:
            raise refused("an operation", "got a tensor that no operation of make_state created")
        return self._cells[_address(tensor)]

    def _constant(self, tensor: Tensor, ours: bool = False) -> MemoryCell:
        """The cell of a real tensor's storage."""
        if tensor.layout != torch.strided or type(tensor) not in (Tensor, torch.nn.Parameter):
            raise refused(type(tensor).__name__, "is not an ordinary dense tensor")
        storage = tensor.untyped_storage()
        if storage._cdata not in self._constants:
            if self._generators.marked(storage):
                raise refused("torch.get_rng_state", "was used as data")
            shadow = UntypedStorage(storage.nbytes(), device="meta")
            cell = MemoryCell(tensor.device, shadow, storage, ours)
            self._constants[storage._cdata] = self._cells[shadow._cdata] = cell
        return self._constants[storage._cdata]

    def _wrap(self, meta: Tensor, device: torch.device) -> RecordedTensor:
        if meta.layout != torch.strided:
            raise refused("a sparse tensor", "has no single storage")
        if _address(meta) not in self._cells:
            self._cells[_address(meta)] = MemoryCell(device, meta.untyped_storage())
        return recorded(meta, device)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
