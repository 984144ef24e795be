"""``step.init``: place a state while it is being made, leaf by leaf.

The initialiser runs twice: once without memory, which gives the structure and with
it the placed state's buffers, and once for real (:mod:`zfunc.initialisation.tape`), when each
leaf's part is copied out as soon as the leaf is final and the rest is dropped. The tape is
imported by the first call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import torch
from torch import Tensor

from zfunc.ranks.axes import group
from zfunc.trees.marks import carry
from zfunc.trees.nodes import NAMESPACE, OPAQUE, Placed, in_full, leaves_in, opened

__all__ = ["init"]

Write = Callable[[Tensor], Any] | None


def init(
    place: Callable[[Any], Any],
    parts: Callable[[Any], list[Any]],
    make_state: Callable[..., Any],
    args: Any,
    kwargs: Any,
) -> Any:
    """``place(make_state(*args, **kwargs))``, holding one leaf at a time.

    Args:
        place: representation of a state whose tensors are on ``meta``.
        parts: what of a placed state has the structure of the full one.

    Raises:
        PlacementError: ``make_state`` does something that cannot be replayed.
    """
    from zfunc.initialisation import tape
    from zfunc.initialisation.recorder import record

    ranks = group(None, "data")  # simulated ones share the generator: read it before any moves it
    ranks.barrier(label="init")
    random_state = torch.get_rng_state()
    ranks.barrier(label="init")
    recording = record(make_state, *args, **kwargs)
    placed = materialised(place(recording.tree))
    writes = [_writes(recording.tree, part) for part in parts(placed)]
    with tape.LOCK:
        torch.set_rng_state(random_state)
        recording.replay(lambda i, leaf: _write(writes, i, leaf.detach()))
    for kind in {type(node) for node in leaves_in(placed, OPAQUE)}:
        if hasattr(kind, "seal"):  # of nodes that lie in files
            kind.seal(placed)
    return placed


def materialised(state: Any) -> Any:
    """A tree on ``meta`` in real, zeroed memory; tensors that shared memory share it again."""
    storages: dict[int, Tensor] = {}
    device = torch.get_default_device()

    def real(x: Any) -> Any:
        if not (isinstance(x, Tensor) and x.is_meta):
            return x
        storage = x.untyped_storage()
        if storage._cdata not in storages:
            storages[storage._cdata] = torch.zeros(
                storage.nbytes(), dtype=torch.uint8, device=device
            )
        base = storages[storage._cdata].view(x.dtype)
        return carry(base.as_strided(x.shape, x.stride(), x.storage_offset()), x)

    return optree.tree_map(real, state, namespace=NAMESPACE)


def _writes(full: Any, placed: Any) -> list[Write]:
    """For each leaf of the full state what to do with its value."""
    nodes, spec = optree.tree_flatten(
        opened(in_full(placed)),
        is_leaf=lambda x: isinstance(x, Placed),
        none_is_leaf=True,
        namespace=NAMESPACE,
    )
    writes: list[Write] = []
    for node, part in zip(nodes, spec.flatten_up_to(full), strict=True):
        if hasattr(type(node), "writer"):  # in parts, on the host or on disk
            leaves = optree.tree_leaves(part, none_is_leaf=True, namespace=NAMESPACE)
            writes += [node.writer(i) for i, leaf in enumerate(leaves) if leaf is not None]
        elif isinstance(node, Tensor):
            writes.append(node.copy_)
        else:  # what is no tensor stands in the recorded tree already
            writes += [None] * len(optree.tree_leaves(part, namespace=NAMESPACE))
    return writes


def _write(writes: list[list[Write]], i: int, value: Tensor) -> None:
    for part in writes:
        if (write := part[i]) is not None:
            write(value)
