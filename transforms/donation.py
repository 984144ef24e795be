"""``donate``: a step may write its successor into the memory of the state it was given.

Law: ``donate(f)(s, b) == f(s, b)``, bitwise, as long as ``s`` is not used again; using
it raises ``DonatedStateError``.

A pure step copies parameters and moments once, since nobody may see the old ones
change. torch has no donated buffers as XLA has, so the places that write new values
(:func:`zfunc.context.reuse`) ask the running step whether the old ones are spent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from zfunc.context import Context, Donation, blank
from zfunc.nodes import leaves_in
from zfunc.step import Transform, transform_of

__all__ = ["Donate", "donate"]


@dataclass(frozen=True)
class Donate(Transform):
    """See :func:`donate`."""

    position: ClassVar[int] = 0  # memory itself: it sees the state first and the result last
    name: ClassVar[str] = "donate"

    def __repr__(self) -> str:
        return "donate"

    def configure(self, running: Context, state: Any) -> None:
        running.donation = Donation.of(x for x in leaves_in(state) if isinstance(x, Tensor))

    def finish(self, old: Any, out: Any) -> Any:
        """Whatever does not live on in the result is spent, whether it was overwritten or not."""
        kept = set(map(id, leaves_in(out)))
        for x in leaves_in(old):
            if id(x) not in kept and isinstance(x, Tensor):
                blank(x)
        return out

    def describe(self, memo: Mapping[Any, Any]) -> list[str]:
        return ["donate: new state in the memory of the old one, which is spent"]


@transform_of
def donate() -> Donate:
    """Let the step reuse the memory of its input state.

    Call it as ``donate(step)`` or as the decorator ``@donate()``. The state that
    went in is spent: using it again raises ``DonatedStateError``. Keep what you
    still need by ``zf.full(state)`` or a copy.

    Raises:
        CompositionError: the step donates already.
    """
    return Donate()
