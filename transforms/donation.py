"""``donate``: a step may write its successor into the memory of the state it was given.

Law: ``donate(f)(s, b) == f(s, b)``, bitwise, as long as ``s`` is not used again; using it raises.

A pure step copies parameters and moments once, since nobody may see the old ones change. torch has
no donated buffers: :func:`zfunc.trees.memory.reuse` asks the running step if old ones are spent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from zfunc.engine.context import Context, current
from zfunc.engine.hooks import Order
from zfunc.engine.step import Transform, transform_of
from zfunc.trees.marks import any_spent, spent
from zfunc.trees.memory import Donation, blank
from zfunc.trees.nodes import Box, memory_of

__all__ = ["Donate", "donate"]

_GIVEN: ContextVar[list[Sequence[Tensor]] | None] = ContextVar("zfunc_given", default=None)
_STORY = (
    "the step failed ({}) after it had begun to write over the state that it was given, which is "
    "spent: old and new values are mixed. Go on from the last checkpoint (zf.restore), or leave "
    "out `donate` to keep the state when a step fails."
)


@dataclass(frozen=True, repr=False)
class Donate(Transform):
    """See :func:`donate`."""

    position: ClassVar[int] = Order.DONATE
    spends: ClassVar[bool] = True

    def guard(self, call: Callable[..., Any], state: Any, args: Any, kwargs: Any) -> Any:
        """If the call fails, what it has spent says so, and so does the error. Memory goes blank
        before it is overwritten: as long as nothing is blank the state is whole."""
        given: list[Sequence[Tensor]] = []
        token = _GIVEN.set(given)
        try:
            return call(state, args, kwargs)
        except BaseException as error:
            its = _with_views(*memory_of(state))
            if given and any(map(any_spent, [its, *given])):  # else it was spent when it came
                story = _STORY.format(type(error).__name__)
                # Leaves that autograd tracks went in as others in the same memory.
                for x in its:
                    if x.requires_grad and x.is_leaf:
                        x.__dict__["_zfunc_donated"] = True
                    if spent(x):
                        x.__dict__.setdefault("_zfunc_story", story)
                error.add_note(f"zfunc: {story}")
            raise
        finally:
            _GIVEN.reset(token)

    def configure(self, running: Context, state: Any) -> None:
        running.donation = Donation.of(running.tensors, running.boxes)
        if (given := _GIVEN.get()) is not None:
            given.append(running.tensors)

    def finish(self, old: Any, out: Any) -> Any:
        """Whatever does not live on in the result is spent, whether it was overwritten or not."""
        running, kept = current(), {id(x) for x in _with_views(*memory_of(out))}
        for x in () if running is None else _with_views(running.tensors, running.boxes):
            if id(x) not in kept:
                blank(x)
        return out

    def describe(self, memo: Mapping[Any, Any]) -> list[str]:
        return ["donate: new state in the memory of the old one, which is spent"]


def _with_views(tensors: Sequence[Tensor], boxes: Sequence[Box]) -> list[Tensor]:
    return [*tensors, *(x for box in boxes for x in box.views())]


@transform_of
def donate() -> Donate:
    """Let the step reuse the memory of its input state.

    Call it as ``donate(step)`` or as the decorator ``@donate()``. The state that went in is spent:
    using it again raises ``DonatedStateError``. Keep what you need by ``zf.full(state)`` or a copy.

    Ctrl-C waits for the end of the step, and is raised with the new values in the state that the
    step was given: ``except KeyboardInterrupt: zf.save(path, state)`` saves a whole state. A
    second Ctrl-C does not wait. A step that fails before it has written over anything leaves the
    state as it was; later than that, the error has a note that the state is spent.

    Raises:
        CompositionError: the step donates already.
    """
    return Donate()
