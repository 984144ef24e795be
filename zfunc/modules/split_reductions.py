"""Means over all features where each rank has some: what norms take them of is summed over ranks.

A norm over the outputs of a column needs a number or two a token of the features that other ranks
have: their sum, or that of their squares. Its code runs unmodified, in a block in which torch's
means over the last dimension are those over all ranks. All else that mixes features is as it was,
so whether a norm gives a rank's share is to be tried.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zfunc.layout.splits import Split
from zfunc.trees.function_modes import FunctionMode

__all__ = ["Reductions", "given_features", "reducing", "shares"]

Added = Callable[[Tensor], Tensor]


class Reductions(FunctionMode):
    """A block in which reductions over the last dimension go over all ranks.

    Args:
        like: this rank's features; reductions are those of tensors as wide, of as many dimensions.
        total: how many all ranks have.
        added: gives the sum over ranks of a tensor.
        share: of each feature, the part that this rank counts; None where all are its own.

    >>> x, half = torch.tensor([[1.0, 2.0, 3.0, 6.0]]), torch.tensor([[9.0]])
    >>> with Reductions(x[:, :2], 4, lambda mine: mine + half):
    ...     x[:, :2].mean(-1), x[:, :2].sum(-1, keepdim=True)
    (tensor([3.]), tensor([[12.]]))
    """

    def __init__(self, like: Tensor, total: int, added: Added, share: Tensor | None = None) -> None:
        super().__init__()
        self.width, self.dims = like.shape[-1], like.ndim
        self.total, self.added, self.share = total, added, share

    def called(self, func: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        reduce = REDUCTIONS.get(func)
        x = args[0] if args else named.get("input", named.get("x"))
        if reduce is None or not self._of_features(x):
            return func(*args, **named)
        given = {key: value for key, value in named.items() if value is not None}
        if not given.keys() <= inspect.signature(reduce).parameters.keys():
            return func(*args, **named)
        found = reduce(self, *args, **given)
        return func(*args, **named) if found is NotImplemented else found

    def _of_features(self, x: Any) -> bool:
        return isinstance(x, Tensor) and x.ndim == self.dims and x.shape[-1] == self.width

    def sum(self, x: Tensor) -> Tensor:
        """Over all features, ``[..., 1]``."""
        mine = x if self.share is None else x * self.share.to(x)
        return self.added(mine.sum(-1, keepdim=True))

    def mean(self, x: Tensor) -> Tensor:
        """Of all features, ``[..., 1]``."""
        return self.sum(x) / self.total


def shares(split: Split, rank: int) -> Tensor | None:
    """Of each of a rank's indices the part that it counts: several ranks may have the same."""
    if not split.shared:
        return None
    of = [1 / len(split.holders[i]) for i in split.indices(rank)]
    return torch.tensor(of, dtype=torch.float64)


# --- what torch calls them -----------------------------------------------------------------------


def _over_last(x: Tensor, dim: Any) -> bool:
    dims = dim if isinstance(dim, tuple | list) else (dim,)
    return len(dims) == 1 and dims[0] in (-1, x.ndim - 1)


def _kept(x: Tensor, keepdim: bool) -> Tensor:
    return x if keepdim else x.squeeze(-1)


def _sum(
    mode: Reductions, input: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Any:
    if not _over_last(input, dim):
        return NotImplemented
    return _kept(mode.sum(input if dtype is None else input.to(dtype)), keepdim)


def _mean(
    mode: Reductions, input: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Any:
    if not _over_last(input, dim):
        return NotImplemented
    return _kept(mode.mean(input if dtype is None else input.to(dtype)), keepdim)


def _norm(
    mode: Reductions,
    input: Tensor,
    ord: Any = 2,
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: Any = None,
) -> Any:
    if ord not in (2, 2.0, "fro") or not _over_last(input, dim):
        return NotImplemented
    x = input if dtype is None else input.to(dtype)
    return _kept(mode.sum(x.square()).sqrt(), keepdim)


def _var(
    mode: Reductions,
    input: Tensor,
    dim: Any = None,
    unbiased: bool = True,
    keepdim: bool = False,
    *,
    correction: float | None = None,
) -> Any:
    if not _over_last(input, dim):
        return NotImplemented
    less = float(unbiased) if correction is None else correction
    return _kept(mode.sum((input - mode.mean(input)).square()) / (mode.total - less), keepdim)


@functools.wraps(_var)  # its arguments, too
def _std(mode: Reductions, *args: Any, **kwargs: Any) -> Any:
    found = _var(mode, *args, **kwargs)
    return found if found is NotImplemented else found.sqrt()


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def _layer_norm(
    mode: Reductions,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Any:
    if len(normalized_shape) != 1:
        return NotImplemented
    x = _wide(input)
    x = x - mode.mean(x)
    x = x * (mode.mean(x.square()) + eps).rsqrt()
    return _affine(x.to(input.dtype), weight, bias)


def _rms_norm(
    mode: Reductions,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Any:
    if len(normalized_shape) != 1:
        return NotImplemented
    x = _wide(input)
    eps = torch.finfo(input.dtype).eps if eps is None else eps
    return _affine((x * (mode.mean(x.square()) + eps).rsqrt()).to(input.dtype), weight, None)


def _wide(x: Tensor) -> Tensor:
    """In float32 at least, as torch's own norms compute."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _each(names: Sequence[str], reduce: Callable[..., Any]) -> dict[Any, Callable[..., Any]]:
    """A reduction by all that torch calls it."""
    places = (torch, Tensor, torch.linalg, F)
    found = [getattr(place, name, None) for place in places for name in names]
    return {func: reduce for func in found if func is not None}


def _plain_norm(
    mode: Reductions,
    input: Tensor,
    p: Any = 2,
    dim: Any = None,
    keepdim: bool = False,
    dtype: Any = None,
) -> Any:
    return _norm(mode, input, p, dim, keepdim, dtype=dtype)


def _normalize(
    mode: Reductions, input: Tensor, p: float = 2.0, dim: int = 1, eps: float = 1e-12
) -> Any:
    found = _norm(mode, input, p, dim, True)
    return found if found is NotImplemented else input / found.clamp_min(eps)


REDUCTIONS: Mapping[Any, Callable[..., Any]] = {
    **_each(["sum"], _sum),
    **_each(["mean"], _mean),
    **_each(["var"], _var),
    **_each(["std"], _std),
    **_each(["vector_norm"], _norm),
    torch.norm: _plain_norm,
    Tensor.norm: _plain_norm,
    **_each(["normalize"], _normalize),
    **_each(["layer_norm"], _layer_norm),
    **_each(["rms_norm"], _rms_norm),
}


def reducing(
    inner: Callable[..., Any], total: int, added: Added, share: Tensor | None = None
) -> Callable[..., Any]:
    """A forward in such a block; what it is given says how many features this rank has.

    Args:
        total: how many all ranks have.
    """

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        like = given_features(args, kwargs)
        with nullcontext() if like is None else Reductions(like, total, added, share):
            return inner(*args, **kwargs)

    return forward


def given_features(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """The first floating tensor that a norm is given."""
    every = (x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.ndim)
    return next((x for x in every if x.is_floating_point()), None)
