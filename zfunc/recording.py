"""Record how a state is initialised, to build it later one leaf at a time.

``record(make_state, *args)`` runs the function once on tensors without memory and
writes down what they go through (:mod:`zfunc.replay` has the tape). Three things make
the replay bitwise equal to a plain call:

- **Memory.** Operations are noted by the storage that they read and write, so views,
  ``p.data = x``, ties and in-place writes on views are followed by construction.
- **Randomness.** Nothing is drawn while recording, and a dispatch mode cannot see
  ``torch.manual_seed``. So each generator is put, after each draw, into a *mark*: a state
  of its own that no seed leads to. At the next draw the generator holds that mark (the
  stream went on), an older mark (``fork_rng`` or ``set_rng_state`` put it back), or a state
  that we did not write (somebody seeded it, and here is the state). All three replay.
  Marks keep ``initial_seed()``. At the end every generator is put back.
- **Values.** ``.item()``, ``if t.any():``, ``nonzero`` and the like compute what they ask
  for from the tape so far. If that comes from the global generator (rejection sampling
  in ``nn.init.trunc_normal_`` does so) the recording only holds for the generator state
  that it was made in, and ``replay`` checks it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, cast

import optree
import torch
from torch import Tensor, UntypedStorage
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from zfunc import replay
from zfunc.errors import PlacementError
from zfunc.replay import Cell, Draw, Leaf, Op, View, geometry, live, view

__all__ = ["Recording", "record"]

_DEVICE = torch.ops.prim.device.default
_COMPATIBLE = torch.ops.aten._has_compatible_shallow_copy_type.default
_LIFT = torch.ops.aten.lift_fresh.default
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_READS = {Tensor.numpy, Tensor.__array__, Tensor.tolist}
_POINTERS = {Tensor.data_ptr, Tensor.__reduce_ex__, Tensor.share_memory_}
_OVERWRITES = {  # in-place operations that do not look at what they replace
    *("zero_", "fill_", "copy_", "normal_", "uniform_", "random_", "bernoulli_"),
    *("exponential_", "cauchy_", "log_normal_", "geometric_"),
}
_MARKS = itertools.count(0x5EED0F2A)

_INSTEAD = "Build the state and call step.place(state) instead."
_MOVED = (
    "step.init: the initialiser looks at values that it draws (as nn.init.trunc_normal_ does), so "
    "it can only be replayed from the state of torch's generator in which it was recorded, and "
    "that state has changed since. Restore it with torch.set_rng_state, or record again."
)
_ON_META = (
    "step.init: the leaf {} is on the meta device, so it has no values. Leave out "
    "`with torch.device('meta')`: step.init builds no full state, whatever the device."
)
_MODULE = (
    "step.init: the leaf {} is a {}, a module, whose tensors are out of sight. "
    "Return zf.functionalize(module).params, or a dict of its parameters."
)
_OVER = (
    "step.init: {} got a tensor that make_state created but did not return, and its recording has "
    "ended. Return every tensor that is used later, as a leaf of the state."
)


def _refused(operation: Any, why: str) -> PlacementError:
    return PlacementError(f"step.init cannot replay make_state: {operation} {why}. {_INSTEAD}")


@dataclass(frozen=True)
class Recording:
    """A state's initialisation, not yet carried out.

    ``tree`` is what ``make_state`` returned, each tensor replaced by one on the meta device
    (same shape, stride, dtype, ties; Parameters stay Parameters).
    """

    tree: Any
    _ops: list[Op] = field(repr=False)
    _leaves: list[Leaf] = field(repr=False)
    _ends: list[tuple[torch.Generator, Cell]] = field(repr=False)
    _starts: list[Cell] = field(repr=False)
    _pinned: dict[torch.Generator, Tensor] = field(repr=False)

    def replay(self, take: Callable[[int, Tensor], None]) -> None:
        """Run the initialiser on real memory, handing over each leaf as soon as it is final.

        Draws keep their order. Every intermediate is freed after its last use. The generators
        end in the states in which a plain call would leave them.

        Args:
            take: called once per tensor leaf as ``take(i, tensor)``, in the order in which
                leaves become final. ``i`` is the position in ``optree.tree_leaves(tree,
                namespace="zfunc")``, counting every leaf (there is no call for those that are
                no tensors). Copy what you keep, and do not write to the tensor: it may share
                memory with other leaves and with values still needed. A tensor that existed
                before ``record`` is handed over itself.

        Raises:
            PlacementError: the initialiser looks at values that it draws, and the global
                generator is not in the state that it was recorded in.
        """
        with replay.LOCK:
            if not all(torch.equal(g.get_state(), state) for g, state in self._pinned.items()):
                raise PlacementError(_MOVED)
            memory: dict[Cell, Any] = {cell: cell.load() for cell in self._starts}
        ends = {cell for _, cell in self._ends}
        needed = [turn.op for turn in live(self._ops, self._leaves, ends)]
        turns = live(replay.schedule(needed), self._leaves, ends)
        for leaf in replay.run(turns, memory):
            leaf.hand_over(memory[leaf.view.cell], take)
        written = {leaf for turn in turns for leaf in turn.done}
        for leaf in self._leaves:
            if leaf not in written:
                leaf.hand_over(leaf.view.cell.load(), take)
        with replay.LOCK:
            for generator, cell in self._ends:
                generator.set_state(memory[cell] if cell in memory else cell.load())


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
    with replay.LOCK, _Generators() as generators:
        recorder = _Recorder(generators)
        try:
            with _Functions(recorder), recorder:
                tree = make_state(*args, **kwargs)
        except PlacementError:
            raise
        except Exception as error:
            error.add_note(f"This was raised while step.init recorded {make_state}. {_INSTEAD}")
            raise
        tree, leaves = recorder.collect(tree)
        starts, pinned = list(generators.starts), generators.pinned if recorder.looked else {}
        return Recording(tree, recorder.ops, leaves, generators.ends(), starts, pinned)


class _Recorded(Tensor):
    """A tensor without memory that names its device; only a recorder computes with it."""

    where: torch.device

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE:
            return args[0].where
        if func is _COMPATIBLE:  # `p.data = x` asks
            return all(isinstance(t, _Recorded) for t in args)
        raise PlacementError(_OVER.format(func))

    __torch_function__ = torch._C._disabled_torch_function_impl


class _Functions(TorchFunctionMode):
    """Catches what reaches into a tensor's memory without an operation."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        ours = bool(args) and isinstance(args[0], _Recorded)
        if ours and func in _POINTERS:
            raise _refused(func.__name__, "asks for the memory of a tensor that has none yet")
        if ours and func in _READS:
            with _disable_current_modes():
                value = func(self.recorder.value(args[0]), *args[1:], **(kwargs or {}))
            if hasattr(value, "flags"):
                value.flags.writeable = False  # a write would not reach the tensor
            return value
        if func == _SET_DATA and ours and not isinstance(args[1], _Recorded):
            with _disable_current_modes():
                args = (args[0], self.recorder.adopt(args[1]))
        elif func == _SET_DATA and isinstance(args[1], _Recorded) and not ours:
            raise _refused("tensor.data = ...", "changes a tensor that existed before make_state")
        return func(*args, **(kwargs or {}))


class _Generators:
    """Follows random generators while nothing is drawn, by marking their states."""

    def __init__(self) -> None:
        self.states: dict[Cell, Tensor] = {}  # those computed so far
        self.starts: dict[Cell, torch.Generator] = {}
        self._originals: dict[torch.Generator, Tensor] = {}
        self._marks: dict[bytes, Cell] = {}

    def __enter__(self) -> _Generators:
        if torch.cuda.is_available():
            torch.cuda.init()  # there are no generators before
        for generator in (torch.default_generator, *torch.cuda.default_generators):
            start = Cell(start=generator)
            self.starts[start] = generator
            self.states[start] = self._originals[generator] = generator.get_state()
            self._mark(generator, start)
        return self

    def __exit__(self, *error: object) -> None:
        for generator, state in self._originals.items():
            generator.set_state(state)

    @property
    def pinned(self) -> dict[torch.Generator, Tensor]:
        """The states that the global generators started in."""
        return {generator: self._originals[generator] for generator in self.starts.values()}

    def draw(self, generator: torch.Generator) -> Draw:
        """The generator takes one turn, from the state that it is in to a new one."""
        self._originals.setdefault(generator, generator.get_state())
        draw = Draw(generator, self._state(generator), Cell())
        self._mark(generator, draw.after)
        return draw

    def ends(self) -> list[tuple[torch.Generator, Cell]]:
        """The state that make_state left each generator in."""
        return [(generator, self._state(generator)) for generator in self._originals]

    def marked(self, storage: UntypedStorage) -> bool:
        """Whether these bytes are a mark, and so no state of a generator at all."""
        content = torch.empty(0, dtype=torch.uint8, device=storage.device)
        return storage.nbytes() < 10_000 and _bytes(content.set_(storage).cpu()) in self._marks

    def _state(self, generator: torch.Generator) -> Cell:
        state = generator.get_state()
        return self._marks.get(_bytes(state)) or Cell(constant=state)

    def _mark(self, generator: torch.Generator, cell: Cell) -> None:
        state = generator.get_state()
        if state.numel() == 16:  # CUDA's: a seed and an offset, which is a multiple of 4
            state.view(torch.int64)[1] = 4 * next(_MARKS)
        else:  # the seed, which stays, and then the stream
            other = torch.Generator(generator.device).manual_seed(next(_MARKS))
            state[8:] = other.get_state()[8:]
        generator.set_state(state)
        self._marks[_bytes(generator.get_state())] = cell


def _bytes(state: Tensor) -> bytes:
    return bytes(state.numpy())


class _Call:
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
        if any(isinstance(t, _Recorded) for t in self.tensors):
            return False
        if all(t.is_meta for t in self.tensors):
            return torch.device(self.kwargs.get("device") or self._meta_or_cpu).type == "meta"
        returns = self.func._schema.returns
        return all(r.alias_info and not r.alias_info.is_write for r in returns) and bool(returns)

    @property
    def _meta_or_cpu(self) -> str:
        return "meta" if self.tensors else "cpu"


def _is_meta(tensor: Tensor) -> bool:
    return not isinstance(tensor, _Recorded) and tensor.is_meta


def _exists(tensor: Tensor) -> bool:
    return not isinstance(tensor, _Recorded) and not tensor.is_meta


class _Recorder(TorchDispatchMode):
    """Notes operations instead of carrying them out."""

    def __init__(self, generators: _Generators) -> None:
        super().__init__()
        self.ops: list[Op] = []
        self.looked = False  # at values drawn from the global generators
        self._generators = generators
        self._rooted = set(generators.starts)  # states that go back to a global one
        self._cells: dict[int, Cell] = {}  # by the address of their shadow
        self._constants: dict[int, Cell] = {}  # by the address of their real storage
        self._values: dict[Cell, UntypedStorage] = {}  # computed, and not written since

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE:
            return self._cell(args[0]).device
        if func is _COMPATIBLE:
            return _Recorded.__torch_dispatch__(func, types, args)
        if func is _LIFT and _exists(args[0]):
            return self.adopt(args[0], ours=True)
        call = _Call(func, args, dict(kwargs or {}))
        if call.foreign:
            return func(*args, **call.kwargs)
        self._check(call)
        if not call.looks:
            try:
                return self._record(call)
            except NotImplementedError:
                pass  # no meta kernel: try it on values
        if call.written or call.random:
            raise _refused(func, "draws or writes, and has no kernel for the meta device")
        args, kwargs = pytree.tree_map_only(_Recorded, self.value, (args, call.kwargs))
        result = func(*args, **kwargs)
        return pytree.tree_map_only(Tensor, lambda t: self.adopt(t, ours=True), result)

    def adopt(self, tensor: Tensor, ours: bool = False) -> _Recorded:
        """A recorded tensor whose value is a real one's (its own copy of it, if ``ours``)."""
        cell = self._constant(tensor, ours)
        return self._wrap(view(cell.shadow, geometry(tensor, cell)), cell.device)

    def value(self, tensor: Tensor) -> Tensor:
        """The real value of a recorded tensor at this moment; not to be written to."""
        cell, states = self._cell(tensor), self._generators.states
        if cell not in self._values:
            ops = [turn.op for turn in live(self.ops, roots=[cell], known=states)]
            draws = [op.draw for op in ops if op.draw]
            self.looked |= any(draw.before in self._rooted for draw in draws)
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
            name = ".".join(map(str, path)) or "(the result itself)"
            if isinstance(value, torch.nn.Module):
                raise PlacementError(_MODULE.format(name, type(value).__name__))
            if isinstance(value, Tensor):
                leaf = leaves.get(id(value)) or self._leaf(name, value)
                leaves[id(value)] = replace(leaf, indices=(*leaf.indices, i))
        shadows = {key: leaf.tensor(leaf.view.cell.shadow) for key, leaf in leaves.items()}
        return spec.unflatten([shadows.get(id(v), v) for v in values]), list(leaves.values())

    def _leaf(self, name: str, tensor: Tensor) -> Leaf:
        if _is_meta(tensor):
            raise PlacementError(_ON_META.format(name))
        parameter = isinstance(tensor, torch.nn.Parameter)
        given = tensor if _exists(tensor) else None
        grad = tensor.requires_grad and tensor.is_leaf
        return Leaf((), geometry(tensor, self._cell(tensor)), parameter, grad, given)

    def _check(self, call: _Call) -> None:
        if call.func.namespace.startswith(("c10d", "_c10d")):
            raise _refused(call.func, "communicates with other ranks")
        if any(_is_meta(t) != (self._device(call).type == "meta") for t in call.written):
            raise _refused(call.func, "reads a tensor on the meta device, which has no values")
        if any(not _is_meta(t) and self._cell(t).fixed for t in call.written):
            why = "writes to a tensor that existed before make_state (clone it first)"
            raise _refused(call.func, why)

    def _record(self, call: _Call) -> Any:
        """Run the operation on meta for what it gives, and note it if it writes anything."""
        seen = {t: geometry(t, self._cell(t)) for t in call.tensors if not _is_meta(t)}
        metas = {t: view(v.cell.shadow, v) for t, v in seen.items()}
        device = self._device(call)
        result = _on_meta(call, metas)
        if device.type == "meta":
            return result
        flat, spec = pytree.tree_flatten(result)
        tensors = [t for t in flat if isinstance(t, Tensor)]
        fresh = [_address(t) not in self._cells for t in tensors]
        back = {id(meta): tensor for tensor, meta in metas.items()}
        given = {id(t): back[id(t)] if id(t) in back else self._wrap(t, device) for t in tensors}
        views = [geometry(t, self._cells[_address(t)]) for t in tensors]
        outputs = [v if f else None for v, f in zip(views, fresh, strict=True)]
        self._note(call, seen, tuple(outputs), device)
        for tensor in call.written:
            meta = metas[tensor]
            if geometry(meta, self._cells[_address(meta)]) != geometry(tensor, self._cell(tensor)):
                tensor.data = self._wrap(meta, device)
        return pytree.tree_unflatten([given.get(id(t), t) for t in flat], spec)

    def _note(
        self,
        call: _Call,
        seen: dict[Tensor, View],
        outputs: tuple[View | None, ...],
        device: torch.device,
    ) -> None:
        fresh = {v.cell for v in outputs if v}
        writes = fresh | {seen[t].cell for t in call.written}
        if call.silent or not writes:
            return
        reads = {seen[t].cell for t, reads, _ in call.uses if reads and t in seen}
        blind = {seen[t].cell for t, reads, _ in call.uses if not reads and _covers(seen.get(t))}
        erases = fresh | (blind & writes)
        draw = self._draw(call, device)
        if draw:
            reads, writes, erases = reads | {draw.before}, writes | {draw.after}, erases | {draw.after}
        args, kwargs = _on_tape(call, seen, device)
        cells = frozenset(reads), frozenset(writes), frozenset(erases)
        dtype = torch.get_default_dtype()
        self.ops.append(Op(call.func, args, kwargs, outputs, *cells, draw, dtype))
        for cell in writes:
            self._values.pop(cell, None)

    def _draw(self, call: _Call, device: torch.device) -> Draw | None:
        if not call.random:
            return None
        draw = self._generators.draw(call.generator or _default_generator(device))
        if draw.before in self._rooted:
            self._rooted.add(draw.after)
        return draw

    def _device(self, call: _Call) -> torch.device:
        if call.kwargs.get("device") is not None:
            return torch.device(call.kwargs["device"])
        ranked = sorted(call.tensors, key=lambda t: t.dim() == 0)  # a 0-d one decides last
        if not ranked:
            return torch.device("cpu")
        return ranked[0].device if _is_meta(ranked[0]) else self._cell(ranked[0]).device

    def _cell(self, tensor: Tensor) -> Cell:
        if not isinstance(tensor, _Recorded):
            return self._constant(tensor)
        if _address(tensor) not in self._cells:
            raise _refused("an operation", "got a tensor that no operation of make_state created")
        return self._cells[_address(tensor)]

    def _constant(self, tensor: Tensor, ours: bool = False) -> Cell:
        """The cell of a real tensor's storage."""
        if tensor.layout != torch.strided or type(tensor) not in (Tensor, torch.nn.Parameter):
            raise _refused(type(tensor).__name__, "is not an ordinary dense tensor")
        storage = tensor.untyped_storage()
        if storage._cdata not in self._constants:
            if self._generators.marked(storage):
                raise _refused("torch.get_rng_state", "was used as data")
            shadow = UntypedStorage(storage.nbytes(), device="meta")
            cell = Cell(tensor.device, shadow, storage, ours)
            self._constants[storage._cdata] = self._cells[shadow._cdata] = cell
        return self._constants[storage._cdata]

    def _wrap(self, meta: Tensor, device: torch.device) -> _Recorded:
        if meta.layout != torch.strided:
            raise _refused("a sparse tensor", "has no single storage")
        if _address(meta) not in self._cells:
            self._cells[_address(meta)] = Cell(device, meta.untyped_storage())
        recorded = Tensor._make_subclass(
            _Recorded, meta, dispatch_device=True, device_for_backend_keys=device
        )
        recorded.where = device
        return cast(_Recorded, recorded)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type != "cuda":
        return torch.default_generator
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]


def _covers(v: View | None) -> bool:
    """Whether a view reaches every byte of its storage, and each once."""
    if v is None:
        return False
    width = 1
    for stride, size in sorted(zip(v.stride, v.size, strict=True)):
        if size != 1 and stride != width:
            return False
        width *= size
    return width * v.dtype.itemsize == v.cell.shadow.nbytes()


def _on_meta(call: _Call, metas: dict[Tensor, Tensor]) -> Any:
    """Shapes, strides and aliases of what the operation gives; in place, they change ``metas``."""

    def meta(value: Any) -> Any:
        if isinstance(value, Tensor):
            return metas.get(value, value)
        return None if isinstance(value, torch.Generator) else value

    args, kwargs = pytree.tree_map(meta, (call.args, call.kwargs))
    if kwargs.get("device") is not None:
        kwargs["device"] = "meta"
    return call.func(*args, **kwargs)


def _on_tape(call: _Call, seen: dict[Tensor, View], device: torch.device) -> tuple[Any, Any]:
    """The arguments with which to replay the operation: views, or bare shapes, for tensors."""

    def noted(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if call.only_shapes:
            return view(seen[value].cell.shadow, seen[value]) if value in seen else value
        if value not in seen:
            raise _refused(call.func, "reads a tensor on the meta device, which has no values")
        return seen[value]

    args, kwargs = pytree.tree_map(noted, (call.args, call.kwargs))
    if call.only_shapes:  # the shape's own device is meta now
        kwargs["device"] = device
    return args, kwargs
