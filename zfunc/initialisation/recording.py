"""Record how a state is initialised, to build it later one leaf at a time.

``record(make_state, *args)`` runs the function once on tensors without memory and
writes down what they go through (:mod:`zfunc.initialisation.replay` has the tape). Three things
make the replay bitwise equal to a plain call:

- **Memory.** Operations are noted by the storage that they read and write, so views,
  ``p.data = x``, ties and in-place writes on views are followed by construction.
- **Randomness.** Nothing is drawn while recording; :mod:`zfunc.initialisation.marks` notes which
  state each draw starts from, whoever seeded, saved or restored the generator in between.
- **Values.** ``.item()``, ``if t.any():``, ``nonzero`` and the like compute what they ask
  for from the tape so far. If that comes from the global generator (rejection sampling
  in ``nn.init.trunc_normal_`` does so) the recording only holds for the generator state
  that it was made in, and ``replay`` checks it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import optree
import torch
from torch import Tensor, UntypedStorage
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from zfunc.errors import PlacementError
from zfunc.initialisation import replay
from zfunc.initialisation.marks import Generators
from zfunc.initialisation.recorded import (
    COMPATIBLE,
    DEVICE,
    INSTEAD,
    Call,
    Recorded,
    covers,
    is_meta,
    recorded,
    refused,
)
from zfunc.initialisation.replay import Cell, Leaf, Op, Recording, View, geometry, live, view
from zfunc.trees.tree import dotted

__all__ = ["record"]

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
    with replay.LOCK, Generators() as generators:
        recorder = _Recorder(generators)
        try:
            with _Functions(recorder), recorder:
                tree = make_state(*args, **kwargs)
        except PlacementError:
            raise
        except Exception as error:
            error.add_note(f"This was raised while step.init recorded {make_state}. {INSTEAD}")
            raise
        tree, leaves = recorder.collect(tree)
        starts, pinned = list(generators.starts), generators.pinned if recorder.looked else {}
        return Recording(tree, recorder.ops, leaves, starts, generators.ends(), pinned)


class _Functions(TorchFunctionMode):
    """Catches what reaches into a tensor's memory without an operation."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        ours = bool(args) and isinstance(args[0], Recorded)
        if ours and func in _POINTERS:
            raise refused(func.__name__, "asks for the memory of a tensor that has none yet")
        if ours and func in _READS:
            with _disable_current_modes():
                value = func(self.recorder.value(args[0]), *args[1:], **(kwargs or {}))
            if hasattr(value, "flags"):
                value.flags.writeable = False  # a write would not reach the tensor
            return value
        if func == _SET_DATA and ours and not isinstance(args[1], Recorded):
            with _disable_current_modes():
                args = (args[0], self.recorder.adopt(args[1]))
        elif func == _SET_DATA and isinstance(args[1], Recorded) and not ours:
            raise refused("tensor.data = ...", "changes a tensor that existed before make_state")
        return func(*args, **(kwargs or {}))


def _exists(tensor: Tensor) -> bool:
    return not isinstance(tensor, Recorded) and not tensor.is_meta


class _Recorder(TorchDispatchMode):
    """Notes operations instead of carrying them out."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the other way imports dynamo: 117 MiB, however small the state is

    def __init__(self, generators: Generators) -> None:
        super().__init__()
        self.ops: list[Op] = []
        self.looked = False  # at values drawn from the global generators
        self._generators = generators
        self._cells: dict[int, Cell] = {}  # by the address of their shadow
        self._constants: dict[int, Cell] = {}  # by the address of their real storage
        self._written: set[Cell] = set()
        self._values: dict[Cell, UntypedStorage] = {}  # computed, and not written since

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE:
            return self._cell(args[0]).device
        if func is COMPATIBLE:
            return Recorded.__torch_dispatch__(func, types, args)
        if func is _LIFT and _exists(args[0]):
            return self.adopt(args[0], ours=True)
        call = Call(func, args, dict(kwargs or {}))
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
        args, kwargs = pytree.tree_map_only(Recorded, self.value, (args, call.kwargs))
        result = func(*args, **kwargs)
        return pytree.tree_map_only(Tensor, lambda t: self.adopt(t, ours=True), result)

    def adopt(self, tensor: Tensor, ours: bool = False) -> Recorded:
        """A recorded tensor whose value is a real one's (its own copy of it, if ``ours``)."""
        cell = self._constant(tensor, ours)
        return self._wrap(view(cell.shadow, geometry(tensor, cell)), cell.device)

    def value(self, tensor: Tensor) -> Tensor:
        """The real value of a recorded tensor at this moment; not to be written to."""
        cell, states = self._cell(tensor), self._generators.states
        if cell not in self._values:
            roots = {cell} & self._written
            ops = [turn.op for turn in live(self.ops, roots=roots, known=states)]
            draws = [op.draw for op in ops if op.draw]
            self.looked |= any(draw.before in self._generators.rooted for draw in draws)
            after = {draw.after for draw in draws}
            memory: dict[Cell, Any] = dict(states)
            for _ in replay.run(live(ops, roots={cell, *after}), memory):
                pass
            self._values[cell] = memory[cell] if cell in memory else cell.load()
            states.update((state, memory[state]) for state in after)
        return view(self._values[cell], geometry(tensor, cell))

    def collect(self, tree: Any) -> tuple[Any, list[Leaf]]:
        """The tree on meta, and its tensor leaves as they live on the tape."""
        values, spec = optree.tree_flatten(tree, namespace="zfunc")
        leaves: dict[int, Leaf] = {}
        for i, (path, value) in enumerate(zip(spec.paths(), values, strict=True)):
            name = dotted(*path) or "(the result itself)"
            if isinstance(value, torch.nn.Module):
                raise PlacementError(_MODULE.format(name, type(value).__name__))
            if isinstance(value, Tensor):
                leaf = leaves.get(id(value)) or self._leaf(name, value)
                leaves[id(value)] = replace(leaf, indices=(*leaf.indices, i))
        shadows = {key: leaf.tensor(leaf.view.cell.shadow) for key, leaf in leaves.items()}
        return spec.unflatten([shadows.get(id(v), v) for v in values]), list(leaves.values())

    def _leaf(self, name: str, tensor: Tensor) -> Leaf:
        if is_meta(tensor):
            raise PlacementError(_ON_META.format(name))
        parameter = isinstance(tensor, torch.nn.Parameter)
        given = tensor if _exists(tensor) else None
        grad = tensor.requires_grad and tensor.is_leaf
        return Leaf((), geometry(tensor, self._cell(tensor)), parameter, grad, given)

    def _check(self, call: Call) -> None:
        if call.func.namespace.startswith(("c10d", "_c10d")):
            raise refused(call.func, "communicates with other ranks")
        if any(not is_meta(t) and self._cell(t).fixed for t in call.written):
            why = "writes to a tensor that existed before make_state (clone it first)"
            raise refused(call.func, why)

    def _record(self, call: Call) -> Any:
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
        fresh = [self._cells[_address(t)] if _address(t) not in known else None for t in tensors]
        views = [
            geometry(t, cell) if cell else None for t, cell in zip(tensors, fresh, strict=True)
        ]
        self._note(call, seen, tuple(views), device)
        for tensor in call.written:
            self._restride(tensor, metas[tensor], device)
        return outputs

    def _restride(self, tensor: Tensor, meta: Tensor, device: torch.device) -> None:
        """After t_(), set_() and the like, the tensor is another view."""
        if geometry(meta, self._cells[_address(meta)]) != geometry(tensor, self._cell(tensor)):
            tensor.data = self._wrap(meta, device)

    def _note(
        self,
        call: Call,
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
        self.ops.append(Op(call.func, args, kwargs, outputs, *cells, draw, dtype))
        self._written |= writes
        for cell in writes:
            self._values.pop(cell, None)

    def _device(self, call: Call) -> torch.device:
        if call.kwargs.get("device") is not None:
            return torch.device(call.kwargs["device"])
        ranked = sorted(call.tensors, key=lambda t: t.dim() == 0)  # a 0-d one decides last
        if not ranked:
            return torch.device("cpu")
        return ranked[0].device if is_meta(ranked[0]) else self._cell(ranked[0]).device

    def _cell(self, tensor: Tensor) -> Cell:
        if not isinstance(tensor, Recorded):
            return self._constant(tensor)
        if _address(tensor) not in self._cells:
            raise refused("an operation", "got a tensor that no operation of make_state created")
        return self._cells[_address(tensor)]

    def _constant(self, tensor: Tensor, ours: bool = False) -> Cell:
        """The cell of a real tensor's storage."""
        if tensor.layout != torch.strided or type(tensor) not in (Tensor, torch.nn.Parameter):
            raise refused(type(tensor).__name__, "is not an ordinary dense tensor")
        storage = tensor.untyped_storage()
        if storage._cdata not in self._constants:
            if self._generators.marked(storage):
                raise refused("torch.get_rng_state", "was used as data")
            shadow = UntypedStorage(storage.nbytes(), device="meta")
            cell = Cell(tensor.device, shadow, storage, ours)
            self._constants[storage._cdata] = self._cells[shadow._cdata] = cell
        return self._constants[storage._cdata]

    def _wrap(self, meta: Tensor, device: torch.device) -> Recorded:
        if meta.layout != torch.strided:
            raise refused("a sparse tensor", "has no single storage")
        if _address(meta) not in self._cells:
            self._cells[_address(meta)] = Cell(device, meta.untyped_storage())
        return recorded(meta, device)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
