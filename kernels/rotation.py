r"""Rotary positions: pairs of features of queries and keys turned by the angle of their place.

For a pair :math:`(a, b)` of a head and the angle :math:`\theta` of its position:

.. math::
    a' = a \cos\theta - b \sin\theta, \qquad b' = b \cos\theta + a \sin\theta

Pairs are feature i and feature i + R/2 of the first R (``"half"``: Llama, GPT-NeoX), or neighbours
(``"interleaved"``: GPT-J, the paper). What is behind the first R is passed on. Backward
is the turn by the opposite angle: the same kernel, to any order, in both modes.

Source: Su et al., RoFormer, 2021.

**Traffic** an element in 16 bits: 4 bytes; cosines and sines are read once for all heads of a
position, queries and keys in one launch. Some 5 operations: bound by memory.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from zfunc.kernels import dispatch
from zfunc.kernels.operators import (
    KernelError,
    fronted,
    numbers,
    operator,
    together,
    undifferentiated,
    wide,
)
from zfunc.kernels.tracing import in_graph

__all__ = ["rotary"]

Layout = Literal["half", "interleaved"]
Given = tuple[Tensor, Tensor, Tensor, Tensor]  # queries, keys, cosines, sines


def rotary(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, layout: Layout = "half"
) -> tuple[Tensor, Tensor]:
    """Turn queries and keys.

    Args:
        q: ``[B, Hq, T, D]``, bfloat16, float16 or float32 (float64 is taken by the twin), in any
            strides: also ``[B, T, Hq, D]`` transposed.
        k: ``[B, Hk, T, D]`` of the same dtype.
        cos, sin: ``[T, R / 2]``, or ``[B, T, R / 2]`` where positions differ in the batch, of
            any floating-point dtype, R at most D. They get no gradient.
        layout: which features are a pair.

    Returns:
        Both, turned, in the memory layout that they came in.

    Raises:
        KernelError: shapes, dtypes or devices do not fit, or ``cos`` or ``sin`` requires a
            gradient.

    >>> x = torch.tensor([1.0, 2.0]).view(1, 1, 1, 2)
    >>> quarter = torch.tensor([[0.0]]), torch.tensor([[1.0]])
    >>> rotary(x, x, *quarter)[0].flatten()
    tensor([-2.,  1.])
    """
    undifferentiated("rotary", "the rotation in plain torch", cos, sin)
    _check(q, k, cos, sin, layout)
    if cos.dim() == 2:
        cos, sin = cos[None], sin[None]
    return Rotary.apply(q, k, cos, sin, layout == "interleaved", False)


def _check(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, layout: str) -> None:
    shapes = f"q {list(q.shape)}, k {list(k.shape)}, cos {list(cos.shape)}, sin {list(sin.shape)}"
    if layout not in ("half", "interleaved"):
        raise KernelError(f'kernels.rotary: layout={layout!r}; expected "half" or "interleaved".')
    if q.dtype != k.dtype or not numbers(q, cos, sin):
        raise KernelError(
            f"kernels.rotary: q is {q.dtype}, k is {k.dtype}, cos is {cos.dtype}, sin is "
            f"{sin.dtype}; expected floating-point numbers of 16 bits or more, q and k of one "
            "dtype."
        )
    fits = (
        q.dim() == k.dim() == 4
        and q.shape[0] == k.shape[0]
        and q.shape[2:] == k.shape[2:]
        and cos.shape == sin.shape
        and cos.dim() in (2, 3)
        and cos.shape[-2] == q.shape[2]
        and 2 * cos.shape[-1] <= q.shape[3]
        and (cos.dim() == 2 or cos.shape[0] in (1, q.shape[0]))
    )
    if not fits:
        raise KernelError(
            f"kernels.rotary: {shapes}; expected [B, Hq, T, D], [B, Hk, T, D] and twice "
            "[T, R/2] or [B, T, R/2] with R at most D."
        )
    together("rotary", q=q, k=k, cos=cos, sin=sin)


@in_graph
@dispatch.steady
class Rotary(torch.autograd.Function):
    """The turn; its derivatives are turns."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, back: bool
    ) -> tuple[Tensor, Tensor]:
        return _rotary(q, k, cos, sin, interleaved, back)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, _, cos, sin, ctx.interleaved, ctx.back = inputs
        ctx.save_for_backward(cos, sin)
        ctx.save_for_forward(cos, sin)

    @staticmethod
    def backward(ctx: Any, grad_q: Tensor, grad_k: Tensor) -> tuple[Any, ...]:
        turn = (*ctx.saved_tensors, ctx.interleaved, not ctx.back)
        return *Rotary.apply(grad_q, grad_k, *turn), None, None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent_q: Tensor, tangent_k: Tensor, *_: None) -> Any:
        return Rotary.apply(tangent_q, tangent_k, *ctx.saved_tensors, ctx.interleaved, ctx.back)


def _rooms(q: Tensor, k: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k)


def _batch(op: Any, info: Any, dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
    """One call: the batch of ``vmap`` is more of ``B``."""
    size = info.batch_size
    q, k, cos, sin = fronted(size, dims[:4], args[:4])
    assert q is not None and k is not None and cos is not None and sin is not None
    if dims[2] is None and dims[3] is None and args[2].shape[0] == 1:
        cos, sin = args[2], args[3]
    else:
        wanted = (size, q.shape[1], *cos.shape[2:])
        cos, sin = (x.expand(wanted).flatten(0, 1) for x in (cos, sin))
    out = op(q.flatten(0, 1), k.flatten(0, 1), cos, sin, *args[4:])
    return tuple(x.unflatten(0, (size, -1)) for x in out), (0, 0)


@operator(_rooms, batch=_batch)
def _rotary(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, back: bool
) -> tuple[Tensor, Tensor]:
    out = _rooms(q, k)
    if q.numel() or k.numel():
        given = (q, k, cos.contiguous(), sin.contiguous())
        dispatch.run("rotary", given, out, interleaved=interleaved, back=back)
    return out


def twin(given: Given, out: tuple[Tensor, Tensor], *, interleaved: bool, back: bool) -> None:
    """The same in torch."""
    q, k, cos, sin = given
    c, s = (x.to(wide(q))[:, None] for x in (cos, sin))
    s = -s if back else s
    half = cos.shape[-1]
    for x, y in zip((q, k), out, strict=True):
        a, b = _pairs(x, half, interleaved)
        new_a, new_b = _pairs(y, half, interleaved)
        for new, first, second, sign in ((new_a, a, b, -1), (new_b, b, a, 1)):
            if new.dtype == c.dtype:
                torch.mul(first, c, out=new).addcmul_(second, s, value=sign)
            else:
                new.copy_(torch.addcmul(first * c, second, s, value=sign))
        y[..., 2 * half :].copy_(x[..., 2 * half :])


def _pairs(x: Tensor, half: int, interleaved: bool) -> tuple[Tensor, Tensor]:
    if interleaved:
        return x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]
    return x[..., :half], x[..., half : 2 * half]


dispatch.register("rotary", twin, "rotation_triton", "4 B (bf16)")
