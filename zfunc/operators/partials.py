"""Numbers that a rank has of its part alone, where they meet parts again.

Between a column and its row ``h / h.norm(dim=-1)`` divides by the norm of this rank's features,
and so does ``w / w.norm()`` of a split leaf. All ranks agree in what comes of it, so that nobody
can see it behind. It is looked for in the first step: what is summed over a dimension that ranks
have in parts is to be summed over ranks, too, before it is used with parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import optree
import torch
from torch import Tensor

from zfunc.errors import PlacementError
from zfunc.operators.parts import RUNS, runs_of
from zfunc.trees.function_modes import FunctionMode
from zfunc.trees.inside import inside_function
from zfunc.trees.marks import part_of

__all__ = ["Partials"]

ALONG, PARTIAL = "_zfunc_along", "_zfunc_partial"

_OVER_ALL = (
    "sum mean var std var_mean std_mean prod amax amin max min all any argmax argmin median nansum "
    "nanmean count_nonzero logsumexp"
)
_NORMS = "norm vector_norm linalg_vector_norm linalg_norm"
_SCANS = "softmax log_softmax softmin cumsum cumprod logcumsumexp layer_norm rms_norm"
_EACH = (
    "radd iadd rsub isub subtract rmul imul multiply rdiv truediv rtruediv itruediv divide rpow "
    "negative to type float double half bfloat16 contiguous detach dropout hardswish softsign "
    "logsigmoid relu6"
)
Place = tuple[int, Any]
"""Where a function's dimensions stand among its arguments, and which they are by default."""

MIXED: dict[str, Place] = {
    **dict.fromkeys(_SCANS.split(), (1, None)),
    "sort": (1, -1),
    "argsort": (1, -1),
    "normalize": (2, 1),
}
"""Functions of which each number depends on all that it goes over."""
SUMS: dict[str, Place] = {
    **dict.fromkeys(_OVER_ALL.split(), (1, None)),
    **dict.fromkeys(_NORMS.split(), (2, None)),
    "topk": (2, -1),
    **MIXED,
}
EACH = frozenset(_EACH.split())
"""What works on each number by itself, beside the operators of which torch says so."""
PIECES = ("chunk", "split", "tensor_split")


class Partials(FunctionMode):
    """A block in which such numbers may not meet parts unsummed.

    Args:
        axis: over whose ranks leaves are split.
    """

    def __init__(self, axis: str) -> None:
        super().__init__()
        self.axis = axis

    def called(self, func: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        out = func(*args, **named)
        if inside_function():
            return out
        given = list(_tensors((*args, *named.values())))
        dims = {dim for x in given if (dim := _along(x)) is not None}
        sums = next((told for x in given if (told := x.__dict__.get(PARTIAL))), None)
        name = getattr(func, "__name__", "").strip("_")
        if not dims and sums is None:
            return out
        if name in SUMS and not (name in ("max", "min") and len(given) > 1):
            self._sum(name, given[0], out, args, named)
        elif name in PIECES:
            _note(out, ALONG, *dims)
        elif _works_on_each(name):
            if dims and sums is not None:
                raise self._refused(sums, name)
            if len(dims) == 1:
                self._same_runs(name, given, out)
            _note(out, PARTIAL, sums) if sums is not None else _note(out, ALONG, *dims)
        return out

    def _same_runs(self, name: str, given: Sequence[Tensor], out: Any) -> None:
        """Let the result remember which features these are, if all operands have the same."""
        runs = {found for x in given if (found := runs_of(x)) is not None}
        if len(runs) > 1:
            raise PlacementError(
                f"{name} takes features that ranks of axis {self.axis!r} have split in two ways, "
                f"{' and '.join(map(str, runs))}. Split the leaves that made them alike."
            )
        _note(out, RUNS, *runs)

    def _sum(
        self, name: str, x: Tensor, out: Any, args: Sequence[Any], named: Mapping[str, Any]
    ) -> None:
        dim, over = _along(x), _dims(name, x, args, named)
        if dim is None:
            _note(out, PARTIAL, x.__dict__.get(PARTIAL))
        elif over is not None and dim not in over:
            kept = isinstance(out, Tensor) and out.dim() < x.dim()
            _note(out, ALONG, dim + (sum(other > dim for other in over) if kept else 0))
        elif name in MIXED:
            raise self._refused(f"{name} over dimension {dim}", "")
        else:
            _note(out, PARTIAL, f"{name} over dimension {dim}")

    def _refused(self, sums: str, used: str) -> PlacementError:
        meets = f", and {used} uses it with parts" if used else ""
        return PlacementError(
            f"{sums} takes in what this rank of axis {self.axis!r} has{meets}: other ranks have "
            f"others, and the whole is neither. Sum over ranks in between, zf.psum(x, "
            f"{self.axis!r}), do it where the leaf is whole, or behind zf.row."
        )


@cache
def _works_on_each(name: str) -> bool:
    packet = getattr(torch.ops.aten, name, None)
    overloads = [getattr(packet, x) for x in getattr(packet, "overloads", list)()]
    return name in EACH or any(torch.Tag.pointwise in x.tags for x in overloads)


def _tensors(values: Any) -> Iterator[Tensor]:
    return (x for x in optree.tree_leaves(values) if isinstance(x, Tensor))


def _along(x: Tensor) -> int | None:
    """Which dimension ranks have in parts, counted from the last one."""
    part = part_of(x)
    if part is not None and part.split is not None and part.group.size > 1:
        found: int = part.split.dim - x.dim()
        return found
    noted: int | None = x.__dict__.get(ALONG)
    return noted


def _note(out: Any, key: str, *values: Any) -> None:
    """Let results remember; not where there are several answers."""
    if len(values) != 1 or values[0] is None:
        return
    for x in _tensors((out,)):
        x.__dict__.pop(ALONG if key == PARTIAL else PARTIAL, None)
        x.__dict__[key] = values[0]


def _dims(
    name: str, x: Tensor, args: Sequence[Any], named: Mapping[str, Any]
) -> frozenset[int] | None:
    """Over which dimensions a function goes, counted from the last one; None: over all."""
    at, default = SUMS[name]
    if name in ("layer_norm", "rms_norm"):
        shape = named.get("normalized_shape", args[1] if len(args) > 1 else x.shape)
        return frozenset(range(-len(shape), 0))
    found = named.get("dim", named.get("axis", args[at] if len(args) > at else default))
    if found is None or isinstance(found, bool | str):
        return None
    dims = found if isinstance(found, tuple | list) else (found,)
    return frozenset(dim if dim < 0 else dim - x.dim() for dim in dims) or None
