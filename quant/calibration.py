"""Calibration: rounding that makes up for its own errors, from sample inputs.

A layer's output error is ``|(W - Q) X|^2 = tr((W - Q) H (W - Q)^T)`` with ``H = X X^T`` of the
inputs that the layer really gets. Columns are rounded one after the other. The columns that are not
yet rounded are changed so that they make up for the error, as far as ``H`` allows it.

Layers come in order. Each sees what the layers before it give once they are quantised.

Source: Frantar et al., GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
Transformers, 2022, https://arxiv.org/abs/2210.17323.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import optree
import torch
import torch.nn.functional as F
import torch.utils._pytree as torch_pytree
from torch import Tensor

from zfunc.errors import PlacementError
from zfunc.layout.layout import find_layers
from zfunc.modules.functional import Functional
from zfunc.quant import grids
from zfunc.quant.choice import Include, module_of
from zfunc.quant.grids import Format, Grid
from zfunc.quant.qtensor import QTensor, rows_of
from zfunc.quant.trees import format_of, mapped
from zfunc.trees.nodes import NAMESPACE, Tree

__all__ = ["calibrate", "compensated"]

BLOCK = 128  # columns rounded before the rest of the matrix hears of it
DAMPING = 0.01  # of the mean diagonal, added to it: inputs that never vary tell nothing


def calibrate(
    fn: Callable[..., Any],
    params: Tree,
    samples: Iterable[Any],
    bits: int = 8,
    group_size: int | None = 128,
    symmetric: bool = True,
    include: Include = None,
    *,
    dynamic: bool = False,
    model: Functional | None = None,
) -> Tree:
    """:func:`quantize_tree` with rounding that is fitted to sample inputs.

    Args:
        fn: ``fn(params, *sample)`` runs the model.
        params: a plain tree.
        samples: the further arguments of each call, a tuple or a single one; run once for
            each layer.
        bits, group_size, symmetric, include, dynamic, model: as for ``quantize_tree``;
            ``model`` is found by itself if ``fn`` is a functionalized module's ``apply``.

    Returns:
        As ``quantize_tree``. Weights that no sample reaches are rounded to the nearest.

    Raises:
        PlacementError: no sample at all, or none that reaches a weight to be quantised.

    >>> w, x = {"w": torch.randn(8, 16)}, torch.randn(64, 16) * torch.linspace(0.1, 3, 16)
    >>> fn = lambda p, x: F.linear(x, p["w"])
    >>> from zfunc.quant.trees import quantize_tree
    >>> error = lambda q: (fn(q, x) - fn(w, x)).norm()
    >>> bool(error(calibrate(fn, w, [x], bits=4)) < error(quantize_tree(w, bits=4)))
    True
    """
    form = format_of(bits, group_size, symmetric, dynamic)
    model = model or module_of(fn)
    calls = [sample if isinstance(sample, tuple) else (sample,) for sample in samples]
    if not calls:
        raise PlacementError("calibrate got no samples. Give it inputs like those to come.")
    watched = mapped(params, lambda path, x, turned: _Watched.of(path, x, turned), include, model)
    reached = 0
    stages = _stages(watched)
    for stage in stages:
        others = {id(x): x.plain for other in stages if other is not stage for x in other}
        part = _replaced(watched, others)  # what is not watched costs nothing
        with torch.no_grad():
            for call in calls:
                fn(part, *call)
        reached += sum(x.seen.count > 0 for x in stage)
        watched = _replaced(watched, {id(x): x.quantized(form) for x in stage})
    if not reached:
        raise PlacementError(
            "no sample reached a weight that is to be quantised. Does fn use the params that it "
            "is given, in F.linear, matmul or addmm?"
        )
    return watched


def _stages(watched: Tree) -> list[list[_Watched]]:
    """The watched leaves, layer by layer; those outside of layers come last."""
    leaves = optree.tree_leaves(watched, none_is_leaf=True, namespace=NAMESPACE)
    _, layers = find_layers(watched)
    inside = {i for layer in layers for i in range(layer.start, layer.stop)}
    spans = [range(layer.start, layer.stop) for layer in layers]
    rows = [[leaves[i] for i in span] for span in spans]
    rows.append([x for i, x in enumerate(leaves) if i not in inside])
    stages: list[list[_Watched]] = []
    met: set[int] = set()
    for row in rows:
        stage = [x for x in row if isinstance(x, _Watched) and id(x) not in met]
        met.update(map(id, stage))
        if stage:
            stages.append(stage)
    return stages


def _replaced(tree: Tree, new: dict[int, Any]) -> Tree:
    return optree.tree_map(lambda x: new.get(id(x), x), tree, namespace=NAMESPACE)


class _Inputs:
    """What a weight was multiplied with: the sum ``H`` of the inputs' outer products."""

    def __init__(self) -> None:
        self.gram: Tensor | None = None
        self.count = 0

    def add(self, x: Tensor) -> None:
        rows = x.detach().reshape(-1, x.shape[-1]).to(grids.wide(x.dtype))
        product = rows.t() @ rows
        self.gram = product if self.gram is None else self.gram.add_(product)
        self.count += len(rows)


class _Watched(Tensor):
    """A weight that notes what it is multiplied with."""

    plain: Tensor
    path: str
    turned: bool  # this view is [k, n]
    stored: bool  # and so is the leaf
    seen: _Inputs

    @staticmethod
    def of(path: str, x: Tensor, turned: bool) -> _Watched:
        self: _Watched = x.detach().as_subclass(_Watched)
        self.plain, self.path, self.turned, self.stored = x.detach(), path, turned, turned
        self.seen = _Inputs()
        return self

    def quantized(self, form: Format) -> QTensor:
        """The leaf in few bits, compensated if there was anything to see."""
        # Who multiplies with it says which dimension is summed over.
        rows = rows_of(self.plain, self.stored)
        gram, form = self.seen.gram, form.fitted(rows.shape[1])
        if gram is None or gram.shape[0] != rows.shape[1]:
            return QTensor.quantize(self.plain, form, self.stored, self.path)
        codes, grid = compensated(rows, gram, form, self.path)
        return QTensor.of(codes, grid, form, self.plain, self.stored)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _TURNS:
            turned: _Watched = func(args[0].plain).as_subclass(_Watched)
            own: _Watched = args[0]
            turned.plain, turned.path, turned.seen = func(own.plain), own.path, own.seen
            turned.turned, turned.stored = not own.turned, own.stored
            return turned
        place = _FACTORS.get(func)
        if place is not None and len(args) > place[1]:
            x, weight = args[place[0]], args[place[1]]
            if isinstance(weight, _Watched) and weight.turned == place[2]:
                weight.seen.add(x)
        plain = torch_pytree.tree_map_only(_Watched, lambda x: x.plain, (args, kwargs))
        return func(*plain[0], **plain[1])


_TURNS = (Tensor.t, torch.t, *(getattr(Tensor, name).__get__ for name in ("T", "mT")))
# Where a product's input and weight stand among its arguments, and whether the weight is [k, n].
_FACTORS: dict[Any, tuple[int, int, bool]] = {
    F.linear: (0, 1, False),
    torch.matmul: (0, 1, True),
    torch.mm: (0, 1, True),
    Tensor.matmul: (0, 1, True),
    Tensor.mm: (0, 1, True),
    Tensor.__matmul__: (0, 1, True),
    torch.addmm: (1, 2, True),
    Tensor.addmm: (1, 2, True),
}


def compensated(
    rows: Tensor, gram: Tensor, form: Format, name: str = "weight"
) -> tuple[Tensor, Grid]:
    """Codes of a weight whose rounding errors cancel on typical inputs.

    Args:
        rows: ``[n, k]``.
        gram: ``[k, k]``, the sum of the outer products of its inputs.

    Returns:
        int8 codes ``[n, k]``, and their grids, which are those of plain rounding.
    """
    n, k = rows.shape
    grid, width = grids.fit(rows, form, name), form.width(k)
    # The heaviest columns first, while all others can still make up for them.
    order = gram.diagonal().argsort(descending=True, stable=True)
    factor = _inverse_factor(gram.double()[order][:, order])
    work = rows.to(torch.float64)[:, order].clone()
    group = (order // width).tolist()
    scale = grid.scale.double().t().contiguous()
    zero = None if grid.zero is None else grid.zero.double().t().contiguous()
    top = 2 ** (form.bits - 1) - 1
    codes = torch.empty(k, n, dtype=torch.float64)
    for start in range(0, k, BLOCK):
        stop = min(start + BLOCK, k)
        part, errors = work[:, start:stop].t().contiguous(), torch.empty(stop - start, n).double()
        inner = factor[start:stop, start:stop]
        for i in range(stop - start):
            step, shift = scale[group[start + i]], 0.0 if zero is None else zero[group[start + i]]
            code = (part[i] / step).round_().add_(shift).clamp_(-top - 1, top)
            codes[start + i] = code
            errors[i] = (part[i] - (code - shift) * step) / inner[i, i]
            part[i + 1 :].addr_(inner[i, i + 1 :], errors[i], alpha=-1)
        work[:, stop:] -= errors.t() @ factor[start:stop, stop:]
    back = torch.empty_like(codes)
    back[order] = codes
    return back.t().to(torch.int8).contiguous(), grid


def _inverse_factor(gram: Tensor) -> Tensor:
    """The upper Cholesky factor of the damped inverse of ``gram``."""
    diagonal = gram.diagonal()
    damping = DAMPING * float(diagonal.mean())
    eye = torch.eye(len(gram), dtype=gram.dtype)
    for _ in range(20):
        lower, failed = torch.linalg.cholesky_ex(gram + max(damping, 1e-30) * eye)
        if not failed:
            inverse = torch.cholesky_inverse(lower)
            upper, failed = torch.linalg.cholesky_ex(inverse, upper=True)
            if not failed:
                return upper
        damping = 10 * max(damping, 1e-12)
    return eye
