"""Matrix products of tensors that disagree in dtype run in 16 bits.

torch promotes dtypes in elementwise functions and refuses them in products. Where
parameters are 16-bit, what meets them need not be: a batch of floats, a buffer, a
captured weight. Within :func:`products` a product (a convolution, a norm with
weights, attention) of mixed floating-point dtypes casts its arguments to the 16-bit
one. Unlike autocast this touches nothing on which the arguments agree: fp32 angles of
rotary positions are multiplied in fp32, and a loss on fp32 logits stays fp32.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from zfunc.trees.nodes import Placed

__all__ = ["SHORT", "active", "products"]

SHORT = {torch.bfloat16, torch.float16}

_PRODUCTS: set[Callable[..., Any]] = {
    *(getattr(Tensor, name) for name in ("__matmul__", "__rmatmul__")),
    *(
        getattr(home, name)
        for home in (torch, Tensor)
        for name in (
            *("matmul", "mm", "bmm", "mv", "dot", "vdot", "inner", "outer", "ger"),
            *("addmm", "addbmm", "baddbmm", "addmv", "addr", "tensordot", "einsum", "bilinear"),
            *("conv1d", "conv2d", "conv3d", "chain_matmul", "group_norm", "layer_norm"),
            *("conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "rms_norm", "prelu"),
            *("lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell"),
            *("rnn_tanh_cell", "rnn_relu_cell"),
        )
        if hasattr(home, name)
    ),
    *(F.linear, F.bilinear, F.conv1d, F.conv2d, F.conv3d, F.layer_norm, F.group_norm),
    *(F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d, F.rms_norm, F.prelu),
    *(F.scaled_dot_product_attention, F.multi_head_attention_forward, torch.linalg.multi_dot),
}
_NORMS: set[Callable[..., Any]] = {F.batch_norm, F.instance_norm}


class _Products(TorchFunctionMode):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _PRODUCTS:
            args, kwargs = self._agreeing(args, kwargs)
        elif func in _NORMS:
            args, kwargs = _with_wide_weights(*args, **(kwargs or {}))
        elif func is Tensor.unflatten and torch.compiler.is_compiling():
            func = torch.unflatten  # that of tensors calls `super()`, which dynamo does not follow
        return func(*args, **(kwargs or {}))

    def _agreeing(self, args: tuple[Any, ...], kwargs: Any) -> tuple[tuple[Any, ...], Any]:
        found: set[torch.dtype] = set()

        def seen(x: Any) -> Any:
            x = x.full() if isinstance(x, Placed) else x  # it would gather behind our back
            if _is_float(x):
                found.add(x.dtype)
            return x

        given: Any = _mapped(seen, (args, kwargs or {}))
        if len(found) > 1 and self.dtype in found:
            given = _mapped(lambda x: x.to(self.dtype) if _is_float(x) else x, given)
        return given


def _mapped(fn: Callable[[Any], Any], x: Any) -> Any:
    """``fn`` of what arguments hold; written out, so that a compiler can follow it."""
    if type(x) is tuple or type(x) is list:
        return type(x)([_mapped(fn, y) for y in x])
    return {k: _mapped(fn, y) for k, y in x.items()} if type(x) is dict else fn(x)


def _is_float(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def _with_wide_weights(
    x: Tensor,
    mean: Any = None,
    var: Any = None,
    weight: Any = None,
    bias: Any = None,
    *rest: Any,
    running_mean: Any = None,
    running_var: Any = None,
    **kwargs: Any,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a norm that keeps statistics, weights in the statistics' dtype.

    Statistics are fp32 whatever the activations are, and kernels want weights alike.
    """
    mean = running_mean if mean is None else mean
    var = running_var if var is None else var
    if _is_float(mean):
        weight, bias = (w.to(mean.dtype) if _is_float(w) else w for w in (weight, bias))
    return (x, mean, var, weight, bias, *rest), kwargs


class _Active(threading.local):
    dtype: torch.dtype | None = None


_active = _Active()


class _Entered(AbstractContextManager[None]):
    """The mode, and a note that it is on in this thread."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.mode = _Products(dtype)

    def __enter__(self) -> None:
        self.before, _active.dtype = _active.dtype, self.mode.dtype
        self.mode.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.mode.__exit__(*error)
        _active.dtype = self.before


def active() -> torch.dtype | None:
    """The dtype of the innermost :func:`products` of this thread."""
    return _active.dtype


def products(dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """Within it, products of mixed floating-point dtypes run in ``dtype``; of None, as before.

    >>> x, w = torch.ones(2, 3), torch.ones(3, 1, dtype=torch.bfloat16)
    >>> with products(torch.bfloat16):
    ...     (x @ w).dtype, (x + w.T).dtype
    (torch.bfloat16, torch.float32)
    """
    if dtype is None or _active.dtype == dtype:
        return nullcontext()
    return _Entered(dtype)
