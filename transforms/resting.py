"""``SkipUnused``: a leaf that a step has not used rests, as torch's whose gradient is ``None``.

Law: ``step`` is what ``torch.optim`` makes of the whole batch after
``zero_grad(set_to_none=True)``: a parameter that backward has reached on no rank and in no
microbatch keeps its value and its moments, bit for bit, and its own count of updates, by which
Adam corrects their bias. A step that uses all leaves is the bare one, bitwise.

Each rank notes during backward which leaves get a gradient. The ranks put that together in one
exchange a step of a bit for each leaf, from host to host: the device is not waited for, and the
update leaves out what it need not do. How many updates each leaf has missed is carried in the
state's ``aux``, also in a full one, under ``"skip_unused"``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from zfunc.engine import context
from zfunc.engine.carried import held, may_lose, put, take
from zfunc.engine.communication import communication
from zfunc.engine.context import Context
from zfunc.engine.entries import Entries
from zfunc.engine.hooks import Gradients, Order
from zfunc.engine.step import Differentiate, Transform
from zfunc.errors import CompositionError, DesyncError, PlacementError
from zfunc.optim.base import present

__all__ = ["SkipUnused"]

NAME = "skip_unused"
MISSED = "missed"

may_lose(NAME, [MISSED])  # checkpoints of a run in which all leaves took part lack it


@dataclass
class _Call:
    """What one call of a step knows: all leaves by path, what they have missed, who took part."""

    paths: tuple[str, ...]
    missed: Tensor
    used: list[bool] = field(default_factory=list)


@dataclass(frozen=True)
class SkipUnused(Transform):
    """See ``skip_unused`` of :func:`zfunc.train_step`."""

    position: ClassVar[int] = Order.SKIP_UNUSED
    by_unit: ClassVar[bool] = True
    name: ClassVar[str] = NAME

    def __repr__(self) -> str:
        return NAME

    def obstacle(self) -> str:
        return "asks on the host which leaves the ranks have used"

    def beside(self, others: Sequence[Transform]) -> SkipUnused:
        if any(other.name == "compress_grads" for other in others):
            raise CompositionError(
                "skip_unused and compress_grads exclude each other: what compression has left out "
                "of earlier gradients goes into the update of a leaf that no rank has used. Leave "
                "out one of them."
            )
        return self

    def place(self, state: Any) -> Any:
        return put(state, NAME, {MISSED: self._missed(state, _paths(state))})

    def parts(self, placed: Any) -> list[Any]:
        return [take(placed, NAME)[1]]

    def _missed(self, state: Any, paths: Sequence[str]) -> Tensor:
        """``[1, leaves]``, int64: of each leaf how many updates it has missed."""
        found = held(Entries(state)).get(NAME)
        if found is None:
            return torch.zeros(1, len(paths), dtype=torch.int64, device="cpu")
        missed: Tensor = found[MISSED]
        if tuple(missed.shape) != (1, len(paths)):
            raise PlacementError(
                f"the state's aux[{NAME!r}] counts for {missed.shape[-1]} leaves, but its params "
                f"have {len(paths)}. Take the entry out of aux to let all leaves begin alike."
            )
        return missed

    # One call

    def configure(self, running: Context, state: Any) -> None:
        paths = _paths(state)
        running.notes[NAME] = _Call(paths, self._missed(state, paths))
        running.reached = set()

    def open(self, state: Any) -> Any:
        return take(state, NAME)[1]

    def differentiate(self, call: Differentiate, running: Context) -> Differentiate:
        def run(asked: Gradients) -> tuple[tuple[Tensor, Any], Any]:
            out = call(asked)
            mine: _Call = running.notes[NAME]
            mine.used = _agreed(running, mine.paths)
            counts = mine.missed[0].tolist()
            if any(counts) or not all(mine.used):
                rows = zip(mine.paths, counts, mine.used, strict=True)
                running.missed = {path: count for path, count, used in rows if used}
            return out

        return run

    def finish(self, old: Any, out: Any) -> Any:
        running = context.current()
        assert running is not None
        mine: _Call = running.notes[NAME]
        state, *rest = out
        missed = mine.missed + ~torch.tensor([mine.used])
        return (put(state, NAME, {MISSED: missed}), *rest)

    def describe(self, memo: Mapping[Any, Any]) -> list[str]:
        return ["skip_unused: leaves that no rank has used keep their values, moments and counts"]


def _paths(state: Any) -> tuple[str, ...]:
    return tuple(present(Entries(state)["params"]))


def _agreed(running: Context, paths: Sequence[str]) -> list[bool]:
    """Which leaves some rank has used; a collective."""
    assert running.reached is not None
    own = [path in running.reached for path in paths]
    group = communication(running).deciding
    if group.size == 1:
        return own
    bits = sum(1 << i for i, used in enumerate(own) if used)
    found = group.exchange([len(own), f"{bits:x}"], label="leaves in use")
    if any(count != len(own) for count, _ in found):
        raise DesyncError(
            f"the ranks hold params of different structure: {[count for count, _ in found]} leaves."
        )
    union = 0
    for _, text in found:
        union |= int(text, 16)
    return [bool(union >> i & 1) for i in range(len(own))]
