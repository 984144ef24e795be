"""Operations of torch under the pretended device: seen below autograd, one by one.

Each is looked at as CUDA would: are its operands on one device, does the host need a value, what
is read and what is written. What an operator is, it is asked once (:class:`Known`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.gpu.memory import real_device

if TYPE_CHECKING:
    from tests.gpu.cuda import Cuda
    from tests.gpu.memory import Memory

__all__ = ["Mode", "leaves_of"]

aten = torch.ops.aten
MAY_MIX = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}
READS = {aten._local_scalar_dense, aten.equal, aten.is_nonzero}
READ_BY_TAG = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
# These take tensors of one device only, be they of no dimension.
STRICT = {aten.cat, aten.stack, aten.mm, aten.addmm, aten.bmm, aten.dot}
NEVER_MIXED = ("aten::_foreach_", "aten::_fused_")
NO_KERNEL = {aten.detach, aten.alias, aten.lift_fresh, aten.set_, aten.record_stream}
FRESH = {aten.empty, aten.empty_like, aten.new_empty, aten.empty_strided, aten.new_empty_strided}
NESTS = (tuple, list, dict)


def leaves_of(items: Any) -> Iterator[Any]:
    """What is in nested tuples, lists and dictionaries; a tenth of what torch's pytree takes."""
    for x in items.values() if isinstance(items, dict) else items:
        if isinstance(x, NESTS):
            yield from leaves_of(x)
        else:
            yield x


def _tensors(items: Any, found: list[Tensor]) -> list[Tensor]:
    for x in items:
        if isinstance(x, Tensor):
            found.append(x)
        elif isinstance(x, (list, tuple)):
            _tensors(x, found)
    return found


class Known:
    """What there is to know of an operator.

    Attributes:
        packet: without its overload.
        what: its name, as it is written down.
        sends: whether it is a collective.
        inside: whether it is written in Python, and seen while it runs.
        view: whether it gives another view of its operand.
        written: place and name of the arguments that it writes into.
        together: whether all its operands are on one device, be they of no dimension.
        fused: whether it is one of ``torch._fused_*``.
        indexes: whether masks and indices of the host are taken.
        mixes: whether its operands may be on several devices.
        silent: whether nothing is launched for it.
        reads: whether the host needs values to go on.
    """

    __slots__ = (
        "func", "fused", "indexes", "inside", "mixes", "packet", "reads", "sends", "silent",
        "together", "view", "what", "written",
    )  # fmt: skip

    def __init__(self, func: Any) -> None:
        schema, packet = func._schema, func.overloadpacket
        self.func, self.packet, self.what = func, packet, str(func)
        self.sends = func.namespace == "c10d"
        self.inside = func.namespace not in ("aten", "prims", "prim")
        shares = [r.alias_info is not None and not r.alias_info.is_write for r in schema.returns]
        alike = packet in (aten.detach, aten.alias, aten.lift_fresh)
        self.view = not self.inside and (alike or (bool(shares) and all(shares)))
        self.written = [
            (i, a.name)
            for i, a in enumerate(schema.arguments)
            if a.alias_info is not None and a.alias_info.is_write
        ]
        self.together = packet in STRICT or schema.name.startswith(NEVER_MIXED)
        self.fused = schema.name.startswith("aten::_fused_")
        self.indexes = packet in MAY_MIX
        self.mixes = self.indexes or packet in NO_KERNEL
        self.silent = packet in FRESH or packet in NO_KERNEL
        self.reads = packet in READS or bool(READ_BY_TAG.intersection(func.tags))

    def changed(self, args: Any, kwargs: Any) -> list[Tensor]:
        """The operands that it writes into."""
        given = [
            args[i] if i < len(args) else kwargs.get(name)
            for i, name in self.written
            if i < len(args) or name in kwargs
        ]
        return _tensors(given, [])


_KNOWN: dict[int, Known] = {}


def known(func: Any) -> Known:
    _KNOWN[id(func)] = made = Known(func)  # which keeps it, and with it its identity
    return made


class Mode(TorchDispatchMode):
    """Sees the operations that run, below autograd."""

    def __init__(self, cuda: Cuda) -> None:
        super().__init__()
        self.cuda = cuda

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # it would be imported, for seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_ = _KNOWN.get(id(func)) or known(func)
        if is_.view and not kwargs:
            return func(*args)  # launches nothing, reads and writes nothing
        kwargs = kwargs or {}
        if is_.sends:
            from tests.gpu import collectives

            return collectives.dispatch(self.cuda, func, args, kwargs)
        return _Operation(self, is_, args, kwargs).run()


class _Operation:
    """One operation under the mode."""

    __slots__ = ("args", "cuda", "func", "given", "is_", "kwargs", "memory", "mine", "mode")

    def __init__(self, mode: Mode, is_: Known, args: Any, kwargs: Any) -> None:
        self.mode, self.cuda, self.func, self.is_ = mode, mode.cuda, is_.func, is_
        self.args, self.kwargs = args, kwargs
        self.given = _tensors(kwargs.values(), _tensors(args, []))
        find = mode.cuda.find
        self.memory: list[Memory | None] = [find(x) for x in self.given]
        self.mine = [
            x
            for x, memory in zip(self.given, self.memory, strict=True)
            if memory is not None and memory.device is not None
        ]

    def run(self) -> Any:
        goal, pin = self._goal() if self.kwargs else (None, False)
        if self.is_.inside:
            return self._inside()
        if goal is None and not self.mine:
            return self._on_host(pin)
        if self.is_.packet is aten.copy_ and len(self.mine) == 1:
            return self._copied()
        if self.is_.packet is aten._foreach_copy_ and len(self.mine) < len(self.given):
            return self._copied_lists()
        if self.mine:
            self._check()
            if self._reads():
                self.cuda.sync(self.is_.what)
        changed = self.is_.changed(self.args, self.kwargs)
        if changed:
            self._written(changed)
        out = self.func(*self.args, **self.kwargs)
        if goal != "host" and not self.is_.view:
            self._launched(out, goal, changed)
        return out

    def _goal(self) -> tuple[Any, bool]:
        """The GPU that results are asked for on, ``"host"``, or None where operands decide."""
        self.kwargs = dict(self.kwargs)
        pin = bool(self.kwargs.get("pin_memory"))
        if pin:
            self.kwargs["pin_memory"] = False
        asked = self.kwargs.get("device")
        if self.is_.packet is aten._to_copy:  # Tensor.to and its like never come here to move
            self.kwargs.pop("device", None)
            return None, pin
        # Autograd clones a gradient so, and names its device as torch sees it here.
        if asked is None or self.is_.packet is aten.new_empty_strided:
            return None, pin
        if asked.type == "cuda":
            self.kwargs["device"] = torch.device("cpu")
            return self.cuda.device if asked.index is None else asked.index, pin
        return ("host" if asked.type == "cpu" and self.mine else None), pin

    def _inside(self) -> Any:
        """An operator that is written in Python runs under our eyes, as it would for a GPU."""
        if not self.mine:
            return self.func(*self.args, **self.kwargs)
        with self.mode:
            keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
            return self.func.redispatch(keys, *self.args, **self.kwargs)

    def _on_host(self, pin: bool) -> Any:
        cuda = self.cuda
        if not self.is_.view and not cuda.thread.quiet:
            locked = [
                x
                for x, memory in zip(self.given, self.memory, strict=True)
                if memory is not None and memory.pinned
            ]
            if locked:
                where = cuda.where()
                changed = {id(x) for x in self.is_.changed(self.args, self.kwargs)}
                cuda.host.step()
                for x in locked:
                    cuda.use(cuda.host, x, id(x) in changed, where, self.is_.what)
        out = self.func(*self.args, **self.kwargs)
        if pin:
            cuda.lock(out)
        return out

    def _copied(self) -> Any:
        from tests.gpu import transfers

        into, source = self.args[:2]
        eager = not (self.kwargs.get("non_blocking") or self.args[2:3] == (True,))
        transfers.noted(self.cuda, into, source, blocking=eager, name="copy_")
        self._written([into])
        if self.cuda.recording is not None:
            self.cuda.recording.other(lambda: into.copy_(source) and None)
        return self.func(*self.args, **self.kwargs)

    def _copied_lists(self) -> Any:
        from tests.gpu import transfers

        eager = not (self.kwargs.get("non_blocking") or self.args[2:3] == (True,))
        for into, source in zip(*self.args[:2], strict=True):
            transfers.noted(self.cuda, into, source, blocking=eager, name="_foreach_copy_")
        self._written(list(self.args[0]))
        return self.func(*self.args, **self.kwargs)

    def _check(self) -> None:
        """CUDA takes operands on one device; numbers of the host travel with some launches."""
        if len(self.mine) == len(self.given) or self.is_.mixes or self.cuda.thread.quiet:
            return
        lr = self.kwargs.get("lr") if self.is_.fused else None  # is read where it is
        others = [
            x
            for x, memory in zip(self.given, self.memory, strict=True)
            if (memory is None or memory.device is None)
            and (x.ndim or self.is_.together)
            and x is not lr
            and real_device(x).type != "meta"
        ]
        if others:
            shapes = [tuple(x.shape) for x in others]
            self.cuda.mixed(self.is_.what, f"{shapes} on the host")

    def _reads(self) -> bool:
        """Whether the host needs values of the device to go on."""
        packet, args = self.is_.packet, self.args
        if not self.is_.indexes:
            return self.is_.reads
        masks = [x for x in args[1] if x is not None and x.dtype in (torch.bool, torch.uint8)]
        fills = packet is not aten.index and args[2].numel() == 1 and len(masks) == len(args[1])
        return bool(masks) and not fills

    def _written(self, changed: list[Tensor]) -> None:
        if self.cuda.thread.changed is not None:
            self.cuda.thread.changed |= _storages(changed)
        if self.cuda.recording is not None:
            self.cuda.recording.about_to_write(changed)

    def _launched(self, out: Any, goal: int | None, changed: list[Tensor]) -> None:
        """What comes out is the GPU's, and a kernel has been launched."""
        cuda = self.cuda
        outs = _tensors(out if isinstance(out, (list, tuple)) else (out,), [])
        if goal is None and self.mine:
            goal = next(m.device for m in self.memory if m is not None and m.device is not None)
        for x in outs:
            cuda.adopt(x, goal)
        if cuda.recording is not None:
            cuda.recording.operation(self.func, self.args, self.kwargs, out)
        if self.is_.silent:
            return
        changed = [x for x in changed if cuda.on_gpu(x)]
        given = _storages(self.mine)
        fresh = [x for x in outs if x.untyped_storage()._cdata not in given]
        ids = {id(x) for x in changed}
        reads = [x for x in self.mine if id(x) not in ids]
        named = cuda.named((self.args, self.kwargs, outs)) if cuda.keeps_arguments else ()
        cuda.issue(self.is_.what, reads, [*changed, *fresh], arguments=named)


def _storages(tensors: Iterable[Tensor]) -> set[int]:
    return {x.untyped_storage()._cdata for x in tensors}
