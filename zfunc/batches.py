"""A rank's part of a global batch."""

from __future__ import annotations

from typing import Any

import optree
from torch import Tensor

from zfunc.errors import PlacementError
from zfunc.nodes import NAMESPACE
from zfunc.worlds.axes import MESH, Mesh, group

__all__ = ["local_batch"]


def local_batch(batch: Any, mesh: Mesh | None = None, axis: str | tuple[str, ...] = "data") -> Any:
    """This rank's rows of a global batch, as views.

    Args:
        batch: pytree of tensors of the same size in dimension 0; 0-d tensors and
            other leaves are passed on. Sizes that do not divide are cut as evenly
            as can be (use ``zf.Mean`` in the loss: then the mean stays exact).
        mesh, axis: over which ranks it is cut.

    Raises:
        PlacementError: fewer rows than ranks, or leaves of different sizes.

    >>> import torch
    >>> local_batch({"x": torch.arange(4)})
    {'x': tensor([0, 1, 2, 3])}
    """
    ranks = group(mesh or MESH.get(), axis)
    leaves = optree.tree_leaves(batch, namespace=NAMESPACE)
    sizes = {x.shape[0] for x in leaves if isinstance(x, Tensor) and x.ndim}
    if len(sizes) > 1:
        raise PlacementError(
            f"the batch's tensors have {sorted(sizes)} rows; they must agree in dimension 0."
        )
    rows = next(iter(sizes), 0)
    if sizes and rows < ranks.size:
        raise PlacementError(
            f"a batch of {rows} rows cannot be cut over {ranks.size} ranks. Use a larger batch."
        )
    start, stop = rows * ranks.rank // ranks.size, rows * (ranks.rank + 1) // ranks.size

    def rows_of(x: Any) -> Any:
        return x[start:stop] if isinstance(x, Tensor) and x.ndim else x

    return optree.tree_map(rows_of, batch, namespace=NAMESPACE)
