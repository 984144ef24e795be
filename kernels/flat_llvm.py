"""LLVM for elementwise kernels over flat buffers: sixteen elements are loaded, renewed, stored.

Memory is passed over once and nothing waits in a cache, so such a kernel takes the time that its
bytes take. An element comes out with the same bits wherever it lies and however many threads
there are: those behind the last whole vector go through the same instructions under a mask.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zfunc.kernels import llvm
from zfunc.kernels.llvm import Writer, host

__all__ = [
    "ALONE",
    "LANES",
    "bits",
    "lanes",
    "over_flat",
    "read",
    "shared_out",
    "stored",
    "write",
]

LANES = 16
AHEAD = 1024  # bytes from here to what is asked of memory
ALONE = 1 << 14  # up to so many elements one thread is done before others have begun

Vectors = Mapping[str, Any]
Formula = Callable[[Writer, Vectors, Vectors], Vectors]


def over_flat(
    name: str,
    state: Sequence[str],
    numbers: Sequence[str],
    prepared: Callable[..., Sequence[float]],
    formula: Formula,
) -> Callable[..., None]:
    """The launcher of a kernel ``(grad, *state, *new state, low, hyper=)``.

    Args:
        name: of the kernel.
        state: the names of the buffers that it renews, the parameters first.
        numbers: the names of the scalars in the formula.
        prepared: from the hyperparameters to these numbers, which are rounded to float32.
        formula: writes the operations of 16 elements: from ``grad`` and the state to the new
            state, all of them vectors of float32, and so are the numbers.
    """

    @functools.cache
    @llvm.once
    def made(isa: str, grad: torch.dtype, low: torch.dtype | None) -> llvm.Kernel:
        news = [f"new {label}" for label in state]
        w = Writer(name, ["grad", *state, *news, "low", "n", *numbers])
        a = w.arguments
        known = {x: w.splat(w.b.bitcast(w.b.trunc(a[x], w.i32), w.f32)) for x in numbers}

        def vector(at: Any, mask: Any) -> None:
            values = {"grad": read(w, a["grad"], at, grad, mask)}
            values |= {x: read(w, a[x], at, torch.float32, mask) for x in state}
            after = formula(w, values, known)
            for label, new in zip(state, news, strict=True):
                write(w, a[new], at, after[label], torch.float32, mask)
            if low is not None:
                write(w, a["low"], at, after[state[0]], low, mask)

        shared_out(w, a["n"], vector)
        return llvm.compiled(w.done(), name, isa)

    def launch(grad: Tensor, *buffers: Any, hyper: Tensor) -> None:
        *kept, low = buffers
        kernel = made(host().isa, grad.dtype, None if low is None else low.dtype)
        addresses = [0 if x is None else x.data_ptr() for x in (grad, *kept, low)]
        n = grad.numel()
        kernel([*addresses, n, *map(bits, prepared(*hyper.tolist()))], 1 if n < ALONE else 0)

    return launch


def lanes(
    w: Writer,
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


def shared_out(w: Writer, n: Any, vector: Callable[[Any, Any], None]) -> None:
    """:func:`lanes` of this thread's share of ``n`` elements."""
    first, last = w.share(w.b.udiv(w.sum(n, LANES - 1), w.n(LANES)))
    start, end = (w.times(x, LANES) for x in (first, last))
    stop = w.b.select(w.b.icmp_signed("<", end, n), end, n)
    lanes(w, start, stop, lambda at, mask, _: vector(at, mask))


def read(w: Writer, base: Any, at: Any, dtype: torch.dtype, mask: Any = None) -> Any:
    """16 elements from element ``at`` on, as float32; zeros where there is none."""
    address = w.at(base, w.times(at, dtype.itemsize))
    if mask is None:
        w.prefetch(w.at(address, AHEAD))
    kind = w.vector({torch.float32: w.f32, torch.float16: w.ir.HalfType()}.get(dtype, w.i16))
    x = w.load(address, kind) if mask is None else w.masked_load(address, kind, mask)
    if dtype == torch.bfloat16:
        x = w.b.shl(w.b.zext(x, w.vector(w.i32)), w.constant(w.i32, 16))
        return w.b.bitcast(x, w.vector(w.f32))
    return w.b.fpext(x, w.vector(w.f32)) if dtype == torch.float16 else x


def write(w: Writer, base: Any, at: Any, x: Any, dtype: torch.dtype, mask: Any = None) -> None:
    """Store 16 values of float32 in ``dtype``, from element ``at`` on."""
    address, value = w.at(base, w.times(at, dtype.itemsize)), stored(w, x, dtype)
    if mask is None:
        w.store(value, address)
    else:
        w.masked_store(value, address, mask)


def stored(w: Writer, x: Any, dtype: torch.dtype) -> Any:
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


def bits(x: float) -> int:
    """The bits of a number in float32, as an integer.

    >>> hex(bits(1.0))
    '0x3f800000'
    """
    return int.from_bytes(struct.pack("<f", llvm.single(x)), "little")
