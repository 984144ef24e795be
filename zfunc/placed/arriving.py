"""Leaves whose values are on their way: what a step returned is gathered while the next one begins.

At ZeRO stages 1 and 2 a step ends with the gathers of its new parameters. It returns them under
way: each leaf is a tensor of its full shape in the memory that is being filled, of a class whose
torch functions wait first. The next step waits unit by unit, as each enters; whoever looks
earlier waits for what he looks at. Once waited for, a leaf is an ordinary tensor.

Not everything that reads a tensor is such a function (``torch.tensor``, ``y.data = x``, DLPack,
extensions in C++). So only a step is given such leaves: between steps whoever asks a
``TrainState`` for its parameters waits for all of them, and no other state has any. Within a
step there is ``torch.func``, which wraps its arguments itself: it is made to wait here.
"""

from __future__ import annotations

import atexit
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
import torch._functorch.eager_transforms as functorch
import torch.utils._pytree as torch_pytree
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from zfunc.comm import Group, Handle
from zfunc.errors import DesyncError
from zfunc.worlds.accounting import on_close
from zfunc.worlds.world import current, on_leave

__all__ = [
    "Arrival",
    "arrive",
    "completed",
    "gathered_again",
    "is_arriving",
    "is_passing",
    "looking",
    "on_their_way",
    "passing",
    "settled",
]

looking = torch._C.DisableTorchFunctionSubclass
"""Inside it, nobody waits: for asking many tensors where they lie, and not what they hold."""


@dataclass(eq=False)
class Arrival:
    """What several leaves wait for.

    Attributes:
        group: whose ranks hold the parts of them.
        start: begins their gather; from the same memory, so it may be begun anew.
        handle: the gather that is under way.
    """

    group: Group
    start: Callable[[], Handle[Tensor]]
    handle: Handle[Tensor]

    def finish(self) -> None:
        """Return when they are there."""
        self.handle.wait()


class Arriving(Tensor):
    """A leaf whose memory is being filled."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _LOOKS:
            with looking():
                return func(*args, **(kwargs or {}))
        # What is copied deeply brings along all that has been copied so far, some of it half made.
        met = args[0] if func is Tensor.__deepcopy__ else (args, kwargs)
        settled(torch_pytree.tree_leaves(met))
        return func(*args, **(kwargs or {}))


# What is known before the values are. (Not `dim`: vmap asks for it, and nothing else, in time.)
_LOOKS = {
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "is_meta")),
    *(getattr(Tensor, name).__get__ for name in ("requires_grad", "is_leaf")),
    Tensor.is_floating_point,
    Tensor.numel,
}


def arrive(leaves: Iterable[Tensor], arrival: Arrival) -> None:
    """Let leaves wait for their gather as soon as somebody looks at one of them."""
    if not _FOLLOWED:
        arrival.finish()
        return
    for leaf in leaves:
        leaf.__dict__["_zfunc_arrival"] = arrival
        leaf.__class__ = Arriving
    memo = current().memo
    if "arrivals" not in memo:
        memo["arrivals"] = WeakSet(), set()
        atexit.unregister(completed)
        atexit.register(completed)  # what was registered last runs first: the world is still there
    pending, groups = memo["arrivals"]
    pending.add(arrival)
    groups.add(arrival.group)


def is_arriving(x: Any) -> bool:
    """Whether somebody has still to wait for a leaf."""
    return type(x) is Arriving


def settled(xs: Iterable[Any]) -> None:
    """Wait for those of some leaves that are arriving.

    Raises:
        DesyncError: a peer took another path; the message names the unit.
    """
    for x in xs:
        if type(x) is Arriving:
            arrival = x.__dict__.get("_zfunc_arrival")
            if arrival is None:
                continue  # another thread has waited just now
            if torch._C._are_functorch_transforms_active():  # which would forbid to write
                with temporarily_clear_interpreter_stack():
                    arrival.finish()
            else:
                arrival.finish()
            _arrived(x)


def _arrived(x: Tensor) -> None:
    x.__class__ = Tensor
    x.__dict__.pop("_zfunc_arrival", None)


def gathered_again(leaves: Sequence[Any], everyone: Group) -> None:
    """Let leaves arrive whose gathers ended with an earlier epoch of the world; a collective.

    What has arrived on a rank it sends to those where it has not. Where a leaf has arrived on no
    rank of its group it is gathered anew: each rank's own part is where it was.

    Args:
        leaves: those of one state, alike on all ranks.
        everyone: the ranks of the world.
    """
    waiting: dict[int, Arrival] = {}
    for i, x in enumerate(leaves):
        try:
            settled((x,))
        except DesyncError:
            waiting[i] = x.__dict__["_zfunc_arrival"]
    mine = [[i, list(arrival.group.members)] for i, arrival in waiting.items()]
    missing: dict[tuple[int, tuple[int, ...]], set[int]] = {}
    for rank, row in enumerate(everyone.exchange(mine, label="still under way")):
        for i, members in row:
            missing.setdefault((i, tuple(members)), set()).add(rank)
    groups = {group.members: group for group in current().groups}
    begun: set[Arrival] = set()
    for (i, members), ranks in sorted(missing.items()):
        if everyone.rank not in members:
            continue
        if len(ranks) < len(members):
            source = next(k for k, rank in enumerate(members) if rank not in ranks)
            with looking():
                there = leaves[i].detach().contiguous()
                groups[members].broadcast(there, source, label="still under way").wait()
                if i in waiting:
                    leaves[i].detach().copy_(there)
        elif waiting[i] not in begun:
            begun.add(waiting[i])
            waiting[i].handle = waiting[i].start()
            waiting[i].finish()
        if i in waiting:
            _arrived(leaves[i])


_PASSING: ContextVar[bool] = ContextVar("zfunc_passing", default=False)


@contextmanager
def passing() -> Iterator[None]:
    """Within the block, a step's call, states give their parameters as they are: under way."""
    token = _PASSING.set(True)
    try:
        yield
    finally:
        _PASSING.reset(token)


def is_passing() -> bool:
    """Whether a step is being called."""
    return _PASSING.get()


def on_their_way() -> bool:
    """Whether anything on this rank may still have to be waited for."""
    return bool(current().memo.get("arrivals", ((), ()))[0])


def _waiting(wrap: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(wrap)
    def wait(x: Tensor, *args: Any) -> Tensor:
        settled((x,))
        return wrap(x, *args)

    return wait


def _wait_in_functorch() -> bool:
    """Let ``torch.func`` wait: it asks a tensor nothing before it wraps it.

    Returns:
        Whether this torch wraps as those do that are known.
    """
    names = ("_wrap_for_grad", "_wrap_functional_tensor")
    known = all(hasattr(functorch, name) for name in names)
    for name in names if known else ():
        setattr(functorch, name, _waiting(getattr(functorch, name)))
    return known


_FOLLOWED = _wait_in_functorch()


def completed() -> None:
    """End what this rank takes part in: its peers may wait for it, though nobody here does."""
    pending, groups = current().memo.get("arrivals", ((), ()))
    with suppress(DesyncError):
        for arrival in list(pending):
            arrival.finish()
        for group in groups:
            group._finish_dropped()


on_leave.append(completed)
on_close.append(completed)
