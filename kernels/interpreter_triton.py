"""bfloat16 for Triton's interpreter, which keeps it as uint16 and computes with the raw bits.

Up to 3.9 at least, casts to bfloat16 truncate, and sums, comparisons and dots are of bit
patterns. Here every operand is widened to float32 first, and every result rounded to nearest
even. Nothing is changed if the interpreter gets a sum and a dot right by itself. For processes
that do nothing else: the tests', and the one that ``zfunc doctor --verify`` starts
(:mod:`zfunc.kernels.interpreted`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

__all__ = ["knows_bfloat16", "teach"]


@triton.jit
def _sums(x, y, out):
    at = tl.arange(0, 16)
    tl.store(out + at, tl.load(x + at) + tl.load(y + at))


def knows_bfloat16() -> bool:
    """By a sum, on the CPU. Triton has to have been imported with ``TRITON_INTERPRET=1``."""
    x = torch.tensor([1.0, 1.0 + 2**-7, 3.0, -2.5] * 4).to(torch.bfloat16)
    out = torch.zeros_like(x)
    _sums[(1,)](x, x.flip(0), out)
    return torch.equal(out, x + x.flip(0))


def is_bf16(handle: Any) -> bool:
    return handle.dtype.scalar == tl.bfloat16


def widened(bits: Any) -> Any:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def rounded(x: Any) -> Any:
    u = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    even = ((u + 0x7FFF + ((u >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FC0), even).reshape(np.shape(x))


def teach() -> None:
    """Replace what the interpreter does with bfloat16, if it is wrong; silence numpy."""
    np.seterr(all="ignore")  # a GPU divides by zero without a word
    if knows_bfloat16():
        return
    from triton.runtime import interpreter

    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    reduce = interpreter.ReduceScanOpInterface
    binary, unary, dot = builder.binary_op, builder.unary_op, builder.create_dot
    apply = reduce.apply

    def wide(h: Any) -> Any:
        return handle(widened(h.data), tl.float32) if is_bf16(h) else h

    def binary_op(self: Any, left: Any, right: Any, op: Callable[..., Any]) -> Any:
        if not is_bf16(left):
            return binary(self, left, right, op)
        y = op(widened(left.data), widened(right.data))
        return handle(y, tl.int1) if y.dtype == np.bool_ else handle(rounded(y), tl.bfloat16)

    def unary_op(self: Any, x: Any, op: Callable[..., Any]) -> Any:
        if not is_bf16(x):
            return unary(self, x, op)
        return handle(rounded(op(widened(x.data))), tl.bfloat16)

    def cast(self: Any, source: Any, to: Any) -> Any:
        source = wide(source)
        if to.scalar == tl.bfloat16:
            return handle(rounded(source.data.astype(np.float32)), tl.bfloat16)
        return handle(source.data.astype(interpreter._get_np_dtype(to)), to.scalar)

    def reduced(self: Any, x: Any) -> Any:
        several = isinstance(x, tuple)
        xs = x if several else (x,)
        ours = [is_bf16(t.handle) for t in xs]
        found = apply(
            self, tuple(_float32(t, wide) if b else t for t, b in zip(xs, ours, strict=True))
        )
        flags = ours + [False] * len(found)
        found = tuple(
            t.to(tl.bfloat16) if b and t.dtype.scalar == tl.float32 else t
            for t, b in zip(found, flags, strict=False)
        )
        return found if several else found[0]

    builder.binary_op, builder.unary_op, builder.cast_impl = binary_op, unary_op, cast
    builder.create_dot = lambda self, a, b, *rest: dot(self, wide(a), wide(b), *rest)
    reduce.apply = reduced
    if not knows_bfloat16():
        raise RuntimeError(f"the interpreter of Triton {triton.__version__} still gets bf16 wrong")


def _float32(x: Any, wide: Callable[[Any], Any]) -> Any:
    shape = list(x.handle.data.shape)
    return tl.core.tensor(wide(x.handle), tl.block_type(tl.float32, shape))
