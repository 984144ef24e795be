"""LLVM for kernels over flat buffers: sixteen elements are loaded, worked on, stored.

An element comes out with the same bits wherever it lies and however many threads there are: those
behind the last whole vector go through the same instructions under a mask.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from zfunc.kernels import llvm
from zfunc.kernels.llvm import Emitter, Kernel

__all__ = [
    "LANES",
    "call",
    "lanes",
    "least",
    "read",
    "runs",
    "shared_out",
    "threads",
    "write",
    "written",
]

LANES = 16
AHEAD = 1024  # bytes from here to what is asked of memory
ALONE = 1 << 14  # up to so many elements one thread is done before others have begun


def written(*arguments: str) -> Callable[[Callable[..., None]], Callable[..., Kernel]]:
    """A decorator: what writes a kernel, given a writer and a variant, becomes what gives it.

    That is made of ``(isa, *variant)``, compiled once, and has the function's name.

    Args:
        arguments: of the kernel, see :class:`~zfunc.kernels.llvm.Emitter`.
    """

    def giving(write: Callable[..., None]) -> Callable[..., Kernel]:
        name = write.__name__.strip("_")

        @functools.cache
        @llvm.once
        def kernel(isa: str, *variant: Any) -> Kernel:
            w = Emitter(name, arguments, isa)
            write(w, *variant)
            return llvm.compiled(w.done(), name, isa)

        return kernel

    return giving


def call(kernel: Kernel, n: int, *arguments: Tensor | int | None) -> None:
    """Run a kernel over ``n`` elements, on one thread if they are few.

    Args:
        arguments: tensors stand for their addresses, ``None`` for 0.
    """
    addresses = [x.data_ptr() if isinstance(x, Tensor) else x or 0 for x in arguments]
    kernel(addresses, threads(n))


def threads(n: int) -> int:
    """How many work on ``n`` elements; 0 stands for all."""
    return 1 if n < ALONE else 0


def lanes(
    w: Emitter,
    start: Any,
    stop: Any,
    vector: Callable[[Any, Any, Sequence[Any]], Sequence[Any] | None],
    carried: Sequence[Any] = (),
) -> Sequence[Any]:
    """Write ``vector(first element, mask, carried)`` for elements ``start`` to ``stop``.

    The mask is ``None`` where all 16 exist. What a vector returns the next one is given, and what
    the last one returned is the result.
    """
    whole = w.b.sub(stop, w.b.and_(w.b.sub(stop, start), w.n(LANES - 1)))
    with w.loop(start, whole, LANES, carried) as each:
        each.then = list(vector(each.index, None, each.values) or ())
    with w.loop(whole, stop, LANES, each.values) as rest:
        mask = w.below(w.b.sub(stop, rest.index))
        rest.then = list(vector(rest.index, mask, rest.values) or ())
    return rest.values


def shared_out(w: Emitter, n: Any, vector: Callable[[Any, Any], None]) -> None:
    """:func:`lanes` of this thread's share of ``n`` elements."""
    first, last = w.share(w.b.udiv(w.sum(n, LANES - 1), w.n(LANES)))
    start, stop = w.times(first, LANES), least(w, w.times(last, LANES), n)
    lanes(w, start, stop, lambda at, mask, _: vector(at, mask))


@contextmanager
def runs(w: Emitter, n: Any, size: int) -> Iterator[tuple[Any, Any, Any]]:
    """Each of this thread's runs of ``size`` among ``n`` elements: its number, its ends."""
    with w.loop(*w.share(w.b.udiv(w.sum(n, size - 1), w.n(size)))) as each:
        start = w.times(each.index, size)
        yield each.index, start, least(w, w.sum(start, size), n)


def least(w: Emitter, x: Any, y: Any) -> Any:
    """The lesser of two numbers."""
    return w.b.select(w.b.icmp_signed("<", x, y), x, y)


def read(w: Emitter, base: Any, at: Any, dtype: torch.dtype, mask: Any = None) -> Any:
    """16 elements from element ``at`` on, as float32; zeros where there is none."""
    address = w.at(base, w.times(at, dtype.itemsize))
    if mask is None:
        w.prefetch(w.at(address, AHEAD))
    kind = w.vector({torch.float32: w.f32, torch.float16: w.ir.HalfType()}.get(dtype, w.i16))
    x = w.load(address, kind, mask=mask)
    if dtype == torch.bfloat16:
        x = w.b.shl(w.b.zext(x, w.vector(w.i32)), w.constant(w.i32, 16))
        return w.b.bitcast(x, w.vector(w.f32))
    return w.b.fpext(x, w.vector(w.f32)) if dtype == torch.float16 else x


def write(w: Emitter, base: Any, at: Any, x: Any, dtype: torch.dtype, mask: Any = None) -> None:
    """Store 16 values of float32 in ``dtype``, from element ``at`` on."""
    w.store(_stored(w, x, dtype), w.at(base, w.times(at, dtype.itemsize)), mask=mask)


def _stored(w: Emitter, x: Any, dtype: torch.dtype) -> Any:
    """Float32 in ``dtype``, rounded to nearest, ties to even; bfloat16 as integers."""
    if dtype == torch.float16:
        return w.b.fptrunc(x, w.vector(w.ir.HalfType()))
    if dtype == torch.float32:
        return x
    whole = w.b.bitcast(x, w.vector(w.i32))
    sixteen, quiet = w.constant(w.i32, 16), w.constant(w.i32, 0x7FC00000)
    odd = w.b.and_(w.b.lshr(whole, sixteen), w.constant(w.i32, 1))
    rounded = w.b.add(whole, w.b.add(odd, w.constant(w.i32, 0x7FFF)))
    rounded = w.b.select(w.b.fcmp_unordered("uno", x, x), quiet, rounded)
    return w.b.trunc(w.b.lshr(rounded, sixteen), w.vector(w.i16))
