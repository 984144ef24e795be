"""Machine code for this CPU, which LLVM makes in memory: nothing is built, no file is written.

Kernels are written with ``llvmlite.ir`` where torch has none that waits for memory alone. One is
a function of a pointer to its arguments, 8 bytes each, and takes its share of the work: every
thread of torch's own pool (GNU OpenMP) runs it at the same time and finds out which it is.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import platform
import sys
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from llvmlite import ir

__all__ = [
    "Emitter",
    "Host",
    "Kernel",
    "ahead",
    "compiled",
    "host",
    "once",
    "say_missing",
    "scratch",
    "single",
]

R = TypeVar("R")

_log = logging.getLogger("zfunc")
INSTALL = "pip install 'zfunc-torch[cpu]'"
OLDEST = 20  # LLVM's version from which pointers have no types
OPENMP = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
ROOM = 8 * 2**20  # bytes, as much as a main thread has
_one_at_a_time = threading.RLock()  # LLVM's global context is not made for several threads


@dataclass(frozen=True)
class Host:
    """What this CPU can do for such kernels.

    Attributes:
        isa: a key of :data:`ISAS`, the first that it has, or ``""``.
        tiles: whether it also has matrix registers for integers (AMX-INT8).
        why: in words, for ``zfunc doctor``.
        lacks: whether llvmlite, which could be installed, is all that there is not.
    """

    isa: str
    tiles: bool
    why: str
    lacks: bool = False


@functools.cache
def host() -> Host:
    """What there is here; asked once."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return Host("", False, "written for Linux on x86-64")
    return _with_room(_host)


def _host() -> Host:
    try:
        from llvmlite import binding as llvm
    except ImportError:
        return Host("", False, f"llvmlite is not installed ({INSTALL})", lacks=True)
    except OSError as error:
        return Host("", False, f"llvmlite does not load here ({error})", lacks=True)
    if llvm.llvm_version_info[0] < OLDEST:
        return Host("", False, f"llvmlite is too old ({INSTALL})", lacks=True)
    if _openmp() is None:
        return Host("", False, "this torch brings no GNU OpenMP")
    has = llvm.get_host_cpu_features()
    for isa, needed in ISAS.items():
        if all(has.get(feature) for feature in needed):
            tiles = isa == "avx512vnni" and all(has.get(f) for f in TILES) and _tiles_permitted()
            return Host(isa, tiles, f"{isa}{' and AMX' if tiles else ''}, through LLVM")
    return Host("", False, "this CPU has no AVX2")


@functools.cache
def say_missing() -> None:
    """Warn once in a process, when something first goes another way, that it is slower so."""
    if (found := host()).lacks:
        _log.warning(
            "%s: on this CPU products with low-bit weights, one-bit compression and levels of 8 "
            "and 4 bits take several times as long; `zfunc doctor` lists them.",
            found.why,
        )


ISAS = {
    "avx512vnni": ("avx512f", "avx512bw", "avx512vl", "avx512vnni"),
    "avxvnni": ("avx2", "fma", "f16c", "avxvnni"),
    "avx2": ("avx2", "fma", "f16c"),
}
TILES = ("amx-tile", "amx-int8")


def _tiles_permitted() -> bool:
    """Ask Linux for the matrix registers, which a process has to (``arch_prctl(2)``)."""
    SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA = 158, 0x1023, 18
    return bool(ctypes.CDLL(None).syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA) == 0)


@functools.cache
def _openmp() -> Any:
    """The OpenMP that torch runs on: its pool is warm, and no second one takes the cores."""
    folder = Path(torch.__file__).parent
    for place in (folder / "lib", folder.parent / "torch.libs"):
        for path in sorted(place.glob("libgomp*.so*")):
            try:
                found = ctypes.CDLL(str(path))
                if all(hasattr(found, name) for name in OPENMP):
                    return found
            except OSError:
                continue
    return None


Kernel = Callable[..., None]  # of arguments, and of threads: 0 stands for all


def compiled(module: ir.Module, name: str, isa: str = "") -> Kernel:
    """A kernel of a module as a function of its arguments.

    Args:
        module: has a function ``name(arguments: ptr) -> void``.
        isa: compile for this one, a key of :data:`ISAS`, without what goes beyond it.

    Returns:
        Called with addresses and sizes, it runs on all threads that torch computes with. The
        caller keeps what lies at the addresses alive.
    """
    with _one_at_a_time:
        jit = _with_room(lambda: _translated(module, name, isa))
        alone = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(jit.get_function_address(name))
        together = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_uint)(
            jit.get_function_address(f"{name}.parallel")
        )

    def run(arguments: Sequence[int], threads: int = 0) -> None:
        values = (ctypes.c_int64 * len(arguments))(*arguments)
        threads = threads or torch.get_num_threads()
        if threads == 1:  # outside of a team a thread is the only one
            alone(ctypes.addressof(values))
        else:
            together(ctypes.addressof(values), threads)

    return run


def _translated(module: ir.Module, name: str, isa: str) -> Any:
    """Machine code for a module and its entry, kept for good."""
    from llvmlite import binding as llvm

    for symbol in OPENMP:
        address = ctypes.cast(getattr(_openmp(), symbol), ctypes.c_void_p).value
        llvm.add_symbol(symbol, address)
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    _with_entry(module, name)
    machine = _machine(isa)
    code = llvm.parse_assembly(str(module))
    code.verify()
    tuning = llvm.create_pipeline_tuning_options(speed_level=2)
    tuning.loop_unrolling = False  # it is written as it should run
    passes = llvm.create_pass_builder(machine, tuning)
    passes.getModulePassManager().run(code, passes)
    jit = llvm.create_mcjit_compiler(code, machine)
    jit.finalize_object()
    _KEPT.append((jit, machine))
    return jit


def _with_room(make: Callable[[], R]) -> R:
    """The result of a function that runs in a thread of its own, with ``ROOM`` for its stack.

    LLVM needs more than servers give to their threads, and the end of a stack ends the process.
    """
    done: Future[R] = Future()

    def run() -> None:
        try:
            done.set_result(make())
        except BaseException as error:
            done.set_exception(error)

    thread = threading.Thread(target=run, name="zfunc compiles", daemon=False)
    usual = threading.stack_size(ROOM)  # of threads to come
    try:
        thread.start()
    finally:
        threading.stack_size(usual)
    thread.join()  # a daemon, as threads of simulated ranks are, would end a process with an abort
    return done.result()


class _Scratch(threading.local):
    memory: Tensor | None = None


_scratch = _Scratch()
LINE = 64  # bytes of a cache line
MOST = 1 << 22  # bytes of scratch that a thread keeps


def scratch(sizes: Sequence[int], threads: int = 0) -> tuple[Tensor, list[int]]:
    """Memory for a kernel to work in, off the stack, and its arguments that say where it is.

    Args:
        sizes: bytes of the parts that each thread asks :meth:`Emitter.scratch` for.
        threads: that the kernel runs on; 0 stands for all.

    Returns:
        ``(memory, [address, bytes of a thread])``. The memory must be held until the kernel has
        run; its contents may go with the next call.
    """
    each = sum(size + -size % LINE for size in sizes)
    needed = each * (threads or torch.get_num_threads()) + LINE
    memory = _scratch.memory
    if memory is None or memory.nbytes < needed:
        memory = torch.empty(needed, dtype=torch.uint8)
        if needed <= MOST:
            _scratch.memory = memory
    address = memory.data_ptr()
    return memory, [address + -address % LINE, each]


_KEPT: list[Any] = []  # machine code lives as long as the process


def once(make: Callable[..., R]) -> Callable[..., R]:
    """``functools.cache`` for several threads: what one of them makes the others wait for.

    >>> once(int)("7")
    7
    """
    cached = functools.cache(make)

    @functools.wraps(make)
    def made(*args: Hashable) -> R:
        with _one_at_a_time:
            return cached(*args)

    return made


@functools.cache
def ahead(run: Callable[..., object], *args: Hashable) -> threading.Thread:
    """Call ``run(*args)`` in the background, once in a process, for the machine code it has made.

    Who needs that code sooner waits for it. An error is left to those who do. Where there is no
    such code, nothing is called.

    Returns:
        The thread, which the end of the process waits for.

    >>> ahead(scratch, (64,)).join()
    """

    def quietly() -> None:
        with suppress(Exception):
            if host().isa:
                run(*args)

    thread = threading.Thread(target=quietly, name="zfunc compiles ahead", daemon=False)
    thread.start()
    return thread


def _machine(isa: str) -> Any:
    from llvmlite import binding as llvm

    cpu, features = llvm.get_host_cpu_name(), llvm.get_host_cpu_features()
    if isa in ("avxvnni", "avx2"):
        cpu, features = "haswell", dict.fromkeys(ISAS[isa], True)
        text = ",".join(f"+{name}" for name in features)
    else:
        text = features.flatten()
    target = llvm.Target.from_default_triple()
    return target.create_target_machine(cpu=cpu, features=text, opt=3, jit=True)


def _with_entry(module: ir.Module, name: str) -> None:
    """``name.parallel(arguments, threads)``: the kernel in that many threads of OpenMP's pool."""
    from llvmlite import ir

    pointer, number = ir.PointerType(), ir.IntType(32)
    nothing = ir.VoidType()
    start = ir.Function(
        module, ir.FunctionType(nothing, [pointer, pointer, number, number]), "GOMP_parallel"
    )
    entry = ir.Function(module, ir.FunctionType(nothing, [pointer, number]), f"{name}.parallel")
    b = ir.IRBuilder(entry.append_basic_block())
    b.call(start, [module.get_global(name), entry.args[0], entry.args[1], number(0)])
    b.ret_void()


@dataclass
class _Loop:
    """A loop that is being written: its counter, what it carries, and what the next round gets."""

    index: Any
    values: list[Any]
    then: list[Any] = field(default_factory=list)


class Emitter:
    """Writes one kernel: addresses in bytes, loops, vectors.

    >>> w = Emitter("nothing", ["x", "n"])
    >>> w.done().name
    'nothing'
    """

    def __init__(self, name: str, arguments: Sequence[str], isa: str = "") -> None:
        from llvmlite import binding as llvm
        from llvmlite import ir

        self.ir, self.isa = ir, isa
        self.i1, self.i8, self.i16, self.i32, self.i64 = map(ir.IntType, (1, 8, 16, 32, 64))
        self.f32, self.f64 = ir.FloatType(), ir.DoubleType()
        self.pointer, self.version = ir.PointerType(), llvm.llvm_version_info[0]
        self.module = ir.Module(name)
        self.module.triple = llvm.get_default_triple()
        kind = ir.FunctionType(ir.VoidType(), [self.pointer])
        self.function = ir.Function(self.module, kind, name)
        self.b = ir.IRBuilder(self.function.append_basic_block("entry"))
        given = self.function.args[0]
        self.arguments = {
            name: self.load(self.at(given, 8 * i), self.i64) for i, name in enumerate(arguments)
        }

    def done(self) -> ir.Module:
        self.b.ret_void()
        return self.module

    # Numbers and addresses

    def n(self, value: int) -> Any:
        """A 64-bit constant, as counters and offsets are."""
        return self.ir.Constant(self.i64, value)

    def sum(self, *terms: Any) -> Any:
        return functools.reduce(self.b.add, [self._number(t) for t in terms])

    def times(self, *factors: Any) -> Any:
        return functools.reduce(self.b.mul, [self._number(f) for f in factors])

    def _number(self, x: Any) -> Any:
        return self.n(x) if isinstance(x, int) else x

    def at(self, base: Any, offset: Any) -> Any:
        """The address ``offset`` bytes behind ``base``, a pointer or a number."""
        if base.type == self.i64:
            base = self.b.inttoptr(base, self.pointer)
        return self.b.gep(base, [self._number(offset)], source_etype=self.i8)

    def load(self, address: Any, kind: Any, align: int = 1, *, mask: Any = None) -> Any:
        """A value; with a mask a vector, zeros where it is not set, and there nothing is read."""
        if mask is not None:
            one, zeros = self.ir.Constant(self.i32, 1), self.ir.Constant(kind, None)  # alignment
            name = f"llvm.masked.load.{_name(kind)}.p0"
            return self.intrinsic(name, kind, address, one, mask, zeros)
        value = self.b.load(address, typ=kind)
        value.align = align
        return value

    def store(self, value: Any, address: Any, align: int = 1, *, mask: Any = None) -> None:
        """With a mask the elements of a vector for which it is set."""
        if mask is None:
            self.b.store(value, address).align = align
            return
        name = f"llvm.masked.store.{_name(value.type)}.p0"
        one = self.ir.Constant(self.i32, 1)
        self.intrinsic(name, self.ir.VoidType(), value, address, one, mask)

    def scratch(self) -> Callable[[Any], Any]:
        """This thread's share of :func:`scratch`: gives the addresses of parts of so many bytes.

        The kernel has the arguments ``scratch`` and ``scratch_bytes``.
        """
        a = self.arguments
        at = self.sum(a["scratch"], self.times(self.thread(), a["scratch_bytes"]))

        def part(size: Any) -> Any:
            nonlocal at
            here = self.at(at, 0)
            at = self.sum(at, self.b.and_(self.sum(size, LINE - 1), self.n(-LINE)))
            return here

        return part

    def room(self, kind: Any, count: int) -> Any:
        """The address of ``count`` values on the stack, 64 bytes aligned; not within a loop.

        A few KB in all: threads may have small stacks, and their end ends the process.
        """
        address = self.b.alloca(kind, self._number(count))
        address.align = 64
        return self.b.inttoptr(self.b.ptrtoint(address, self.i64), self.pointer)

    def prefetch(self, address: Any) -> None:
        """Ask for the line at ``address``, which is not read yet; it need not exist."""
        read, soon, data = (self.ir.Constant(self.i32, v) for v in (0, 3, 1))
        self.intrinsic("llvm.prefetch.p0", self.ir.VoidType(), address, read, soon, data)

    # Control

    @contextmanager
    def loop(
        self, start: Any, stop: Any, step: int = 1, carried: Sequence[Any] = ()
    ) -> Iterator[_Loop]:
        """``for index in range(start, stop, step)``; ``carried`` values go through ``then``.

        After it, ``values`` are those that came out.
        """
        b, start, stop = self.b, self._number(start), self._number(stop)
        before = b.block
        head, body, end = (b.append_basic_block(part) for part in ("head", "body", "end"))
        b.branch(head)
        b.position_at_end(head)
        index = b.phi(self.i64)
        index.add_incoming(start, before)
        phis = [b.phi(value.type) for value in carried]
        for phi, value in zip(phis, carried, strict=True):
            phi.add_incoming(value, before)
        b.cbranch(b.icmp_signed("<", index, stop), body, end)
        b.position_at_end(body)
        made = _Loop(index, list(phis))
        yield made
        following = b.add(index, self.n(step))
        b.branch(head)
        index.add_incoming(following, b.block)
        for phi, value in zip(phis, made.then or phis, strict=True):
            phi.add_incoming(value, b.block)
        b.position_at_end(end)

    def share(self, items: Any) -> tuple[Any, Any]:
        """First and last (excluded) of this thread's share of ``items``."""
        mine, all_ = self.thread(), self._ask("omp_get_num_threads")
        ends = (self.times(items, x) for x in (mine, self.sum(mine, 1)))
        first, last = (self.b.udiv(end, all_) for end in ends)
        return first, last

    def thread(self) -> Any:
        """Which thread this is."""
        return self._ask("omp_get_thread_num")

    def _ask(self, name: str) -> Any:
        kind = self.ir.FunctionType(self.i32, [])
        return self.b.zext(self.b.call(self.declared(name, kind), []), self.i64)

    def declared(self, name: str, kind: Any) -> Any:
        return self.module.globals.get(name) or self.ir.Function(self.module, kind, name)

    def intrinsic(self, name: str, result: Any, *values: Any) -> Any:
        """Call LLVM's function of that name."""
        kind = self.ir.FunctionType(result, [v.type for v in values])
        return self.b.call(self.declared(name, kind), values)

    # Vectors of 16

    def vector(self, kind: Any, count: int = 16) -> Any:
        return self.ir.VectorType(kind, count)

    def constant(self, kind: Any, value: Any, count: int = 16) -> Any:
        values = value if isinstance(value, list) else [value] * count
        return self.ir.Constant(self.vector(kind, count), values)

    def splat(self, value: Any, count: int = 16) -> Any:
        kind = self.vector(value.type, count)
        nothing = self.ir.Constant(kind, self.ir.Undefined)
        one = self.b.insert_element(nothing, value, self.ir.Constant(self.i32, 0))
        return self.b.shuffle_vector(one, nothing, self.constant(self.i32, 0, count))

    def below(self, left: Any) -> Any:
        """A mask of 16: which of 0, 1, ... are below ``left``."""
        lanes = self.constant(self.i32, list(range(16)))
        return self.b.icmp_signed("<", lanes, self.splat(self.b.trunc(left, self.i32)))

    def multiply_add(self, a: Any, b: Any, c: Any) -> Any:
        """``a * b + c`` rounded once."""
        return self.intrinsic(f"llvm.fma.v{a.type.count}f32", a.type, a, b, c)


def _name(vector: Any) -> str:
    """A type of vectors as LLVM's functions are named after it: ``v16f32``."""
    kind = {"float": "f32", "half": "f16"}.get(str(vector.element), str(vector.element))
    return f"v{vector.count}{kind}"


def single(x: float) -> float:
    """A number rounded to float32; infinite beyond its range.

    >>> single(0.1), single(-1e40)
    (0.10000000149011612, -inf)
    """
    return ctypes.c_float(x).value
