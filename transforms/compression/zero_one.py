"""0/1 Adam: second moments that learn ever more rarely, then ranks that average ever more rarely.

=========  ======================================  ==================================
phase      steps                                   what a rank sends
=========  ======================================  ==================================
learning   number ``t``, a multiple of the         gradients, plainly: both moments learn
           interval
           the others                              gradients, one bit: the first moment learns
frozen     the others                              nothing but flags, norms and losses
           number ``t``, a multiple of the         what it has moved since the last time, one
           interval                                bit (``local_steps``)
=========  ======================================  ==================================

While second moments learn the interval doubles after ``var_update_scaler`` updates of them; once
they are frozen, after ``local_step_scaler`` steps, up to ``local_step_clipper``.

The state holds what all ranks share, parameters and momentum of the last average, so it can be
evaluated and saved at any time; what each has done by itself since is carried in ``aux``.

Source: Lu et al., Maximizing Communication Efficiency for Large-scale Training via 0/1 Adam, 2022.
Here biases are corrected (that of second moments by the number of their own updates), weight decay
stays out of momentum, and learning gradients are compressed as DeepSpeed does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import optree
import torch
from torch import Tensor

from zfunc.buffers.readings import Reading
from zfunc.engine.carried import put, take
from zfunc.engine.communication import communication
from zfunc.engine.context import Context
from zfunc.engine.hooks import Gradients
from zfunc.engine.step import Differentiate, Transform
from zfunc.errors import CompositionError
from zfunc.optim import AdamState
from zfunc.optim.frozen import check_begun
from zfunc.transforms.compression.averaging import averaged
from zfunc.transforms.compression.error_feedback import Call
from zfunc.transforms.compression.local_steps import LocalCall, begun, drifted, gone_on
from zfunc.transforms.compression.onebit import OneBit
from zfunc.transforms.compression.transform import (
    NAME,
    SETTLED,
    CompressedMean,
    CompressGrads,
    as_unreduced,
    sum_of,
)
from zfunc.trees import tree
from zfunc.trees.nodes import NAMESPACE, Placed, Tree
from zfunc.trees.unreduced import Unreduced

__all__ = ["ZeroOne", "ZeroOneAdam"]

ONLY_ADAM = (
    "compress_grads(method='zero_one') works with optim.adam and optim.adamw, as the last or only "
    "transformation, given gradients as value_and_grad leaves them and the parameters: "
    "tx.update(grads, opt_state, params). For other optimizers use method='onebit'."
)


@dataclass(frozen=True)
class ZeroOne(OneBit):
    """One bit an element, and how often.

    Attributes:
        var_update_scaler: updates of second moments before their interval doubles.
        local_step_scaler: steps with frozen ones before the interval of averages doubles.
        local_step_clipper: the longest interval of averages.
    """

    var_update_scaler: int = 16
    local_step_scaler: int = 32768
    local_step_clipper: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("var_update_scaler", "local_step_scaler", "local_step_clipper"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"{name}={value!r}: expected a whole number, at least 1.")

    def learning_interval(self, t: int) -> int:
        """The interval of plain steps around step ``t``, from 1.

        >>> [ZeroOne(var_update_scaler=2).learning_interval(t) for t in range(1, 9)]
        [1, 1, 2, 2, 2, 2, 4, 4]
        """
        interval, last = 1, 0
        while t > (end := (last // interval + self.var_update_scaler) * interval):
            last, interval = end, 2 * interval
        return interval

    def average_interval(self, n: int) -> int:
        """The interval of averages in the ``n``-th step with frozen second moments, from 1."""
        doublings = min((n - 1) // self.local_step_scaler, self.local_step_clipper.bit_length())
        return min(self.local_step_clipper, 1 << doublings)

    def kind(self, t: int, frozen: int | None) -> str:
        """What step ``t`` does, where ``frozen`` steps, or as yet none, came before the freeze."""
        if frozen is None or t <= frozen:
            return "compressed" if t % self.learning_interval(t) else "dense"
        return "local" if t % self.average_interval(t - frozen) else "average"


@dataclass(frozen=True, repr=False)
class ZeroOneAdam(CompressGrads):
    """See :func:`zfunc.transforms.compression.methods.compress_grads`."""

    codec: ZeroOne = ZeroOne()

    def beside(self, others: Sequence[Transform]) -> CompressGrads:
        made = super().beside(others)
        if made.shard is not None and made.shard.stage != 0:
            raise CompositionError(
                f"compress_grads(method='zero_one') at ZeRO stage {made.shard.stage}: between "
                "averages each rank takes steps of its own, and needs all moments for them. Write "
                "shard(step, stage=0), or compress_grads(step, method='onebit')."
            )
        if other := next((t.name for t in others if t.name in ("precision", "quantize")), None):
            raise CompositionError(
                f"compress_grads(method='zero_one') beside {other}: its numbers do not resolve "
                "what a rank has moved by itself. Leave it out, or use method='onebit'."
            )
        return made

    def place(self, state: Any) -> Any:
        full, rest = take(state, NAME)
        counts = _adam_counts(rest)
        if not counts:
            raise CompositionError(f"the state has no moments of Adam. {ONLY_ADAM}")
        carried, placed = take(super().place(state), NAME)
        if carried is None:
            return placed
        was = None if full is None else full.get("zero_one")
        own = begun(carried["worker"])
        count = int(carried["count"])
        # Of the optimizer's own count: a run that goes on may count its steps from 0 again.
        variances = torch.tensor(max(counts)) if was is None else was["variances"].clone()
        frozen = torch.tensor(-1) if was is None else was["frozen_at"].clone()
        if was is None and self._froze_at(count) is not None:
            frozen = torch.tensor(self._froze_at(count))
        own = own if was is None else gone_on(own, was)
        return put(
            placed,
            NAME,
            {**carried, "zero_one": {"variances": variances, "frozen_at": frozen, **own}},
        )

    @property
    def _form(self) -> int:
        return 2

    @property
    def _kinds(self) -> set[str]:
        return super()._kinds | {"zero_one"}

    def _froze_at(self, count: int) -> int | None:
        step = self.freeze_step
        return step if isinstance(step, int) and count >= step else None

    def _reached(self, count: int) -> bool:
        """Whether a step up to the next one is other than plain."""
        began = self.codec.learning_interval(count + 1) > 1
        return began or self._froze_at(count) is not None

    def _kind(self, carried: Mapping[str, Any]) -> str:
        frozen = int(carried["zero_one"]["frozen_at"])
        return self.codec.kind(int(carried["count"]) + 1, None if frozen < 0 else frozen)

    # One call

    def configure(self, running: Context, state: Any) -> None:
        if self._ranks == 1:
            return
        carried = take(state, NAME)[0]
        kind = self._kind(carried)
        call = LocalCall(self.shard.group, self.codec, 0, kind != "dense", carried, kind=kind)
        over = communication(running)
        call.deciding, call.sharing = over.deciding, over.sharing
        running.notes[NAME] = call
        running.reduction = LocalMean(self, call)
        if call.active:
            over.keeps = lambda unit: True

    def differentiate(self, call: Differentiate, running: Context) -> Differentiate:
        mine: Any = running.notes.get(NAME)

        def there(asked: Gradients) -> Any:
            return call(replace(asked, params=drifted(mine, asked.params)))

        return super().differentiate(call if mine is None else there, running)

    def _arrived(self, running: Context, call: Call, grads: Tree, params: Tree) -> Tree:
        local = super()._arrived(running, call, grads, params)
        if not isinstance(call, LocalCall) or call.kind != "compressed" or call.skipped:
            return local
        return as_unreduced(averaged(call, local), params, done=True)

    def _enough(self, least: int) -> str:
        more = 2 * self.codec.var_update_scaler
        return f"{least} of them updates at least (var_update_scaler={more} makes more)"

    def _next(self, call: Call) -> dict[str, Any]:
        assert isinstance(call, LocalCall)
        was, after = call.carried["zero_one"], super()._next(call)
        count, frozen = int(after["count"]), was["frozen_at"].clone()
        if int(frozen) < 0 and (self._froze_at(count) is not None or self._settled(call, count)):
            frozen = torch.tensor(count)
            for kind in ("worker", "server"):  # what they lack were gradients, not movements
                after[kind] = {k: x.map(torch.zeros_like, [x]) for k, x in after[kind].items()}
        after["frozen"] = torch.tensor(int(frozen) >= 0 or bool(after["frozen"]))
        own = {"variances": was["variances"] + int(call.learnt and not call.skipped)}
        return {**after, "zero_one": {**own, "frozen_at": frozen, **call.own_nodes()}}

    def _begins(self, call: Call, count: int) -> tuple[bool, float]:
        looked = call.window and count % call.window == 0
        return self._reached(count), call.norm if looked else float(call.carried["norm"])

    def _settled(self, call: LocalCall, count: int) -> bool:
        """By the rule of 1-bit Adam; see there."""
        if self.freeze_step != "auto" or not call.window or count % call.window:
            return False
        before = float(call.carried["norm"])
        near = min(call.norm, before) >= SETTLED * max(call.norm, before)
        return count >= 2 * call.window and near and before > 0

    # What it says of itself

    def describe(self, memo: Mapping[Any, Any]) -> list[str]:
        if self._ranks == 1:
            return super().describe(memo)
        codec, freeze = self.codec, f"after {self.freeze_step} steps"
        return [
            f"compress_grads: 0/1 Adam; second moments learn {codec.var_update_scaler} times in "
            "every step, then as often in every second, and so on, and freeze "
            + ("once they have settled" if self.freeze_step == "auto" else freeze),
            f"then ranks average movements, ever more rarely (the interval doubles after "
            f"{codec.local_step_scaler} steps, up to {codec.local_step_clipper})",
            f"errors, drift and momentum take 12 bytes a parameter and 4/{self._ranks} as an owner",
        ]


class LocalMean(CompressedMean):
    """How one call of 0/1 Adam averages; ranks may go their own ways in it."""

    call: LocalCall

    def __init__(self, by: ZeroOneAdam, call: LocalCall) -> None:
        super().__init__(by, call)
        self.unsettled = bool(call.carried["frozen"]) and not call.active

    def apart(self, grads: Tree, number: int, decay: float) -> LocalCall | None:
        call = self.call
        if not all(isinstance(node, Unreduced) for node in _nodes(grads)):
            raise CompositionError(f"gradients were averaged before the optimizer. {ONLY_ADAM}")
        call.number = number
        if call.skipped or call.kind in ("dense", "compressed"):
            return None
        self.by.warn_if_early(int(call.carried["zero_one"]["variances"]), decay)
        return call

    def reduce(self, tree: Tree, momentum: bool = False) -> Tree:
        apart = not self.call.skipped and self.call.kind in ("local", "average")
        if apart and any(isinstance(x, Unreduced) and not x.done for x in _nodes(tree)):
            raise CompositionError(f"zf.reduced met a rank's own gradients. {ONLY_ADAM}")
        return super().reduce(tree, momentum)

    def settle(self, old: Tree, new: Tree, decay: float | None = None) -> Tree:
        """Second moments whose bias is corrected by the number of their own updates.

        The optimizer divides by ``1 - b2**t``, so what it keeps of ``k`` updates is
        ``(1 - b2**t) / (1 - b2**k)`` times their running mean.
        """
        call = self.call
        if not call.number or decay is None:
            raise CompositionError(ONLY_ADAM)
        call.window = max(call.window, round(1 / (1 - decay)))
        if call.active:
            check_begun(call.number)
            new, at = old, call.number - 1
        else:
            call.learnt, at = True, call.number
            before = min(int(call.carried["zero_one"]["variances"]), call.number - 1)
            if old is not None and before < call.number - 1:
                new = _learnt(old, new, decay, call.number, before)
        if self.by.freeze_step == "auto" and (int(call.carried["count"]) + 1) % call.window == 0:
            call.norms.append(Reading(sum_of(call, new) / (1 - decay**at)))
        return new


def _nodes(tree: Tree) -> list[Any]:
    return optree.tree_leaves(tree, is_leaf=lambda x: isinstance(x, Placed), namespace=NAMESPACE)


def _adam_counts(state: Any) -> list[int]:
    """How many updates each Adam in a state has made."""
    found = optree.tree_leaves(
        state, is_leaf=lambda x: isinstance(x, AdamState), namespace=NAMESPACE
    )
    return [int(x.count) for x in found if isinstance(x, AdamState)]


def _learnt(old: Tree, new: Tree, decay: float, number: int, before: int) -> Tree:
    """The ``before + 1``-th update of second moments, which is what step ``number`` makes of it.

    Args:
        old: as kept before it, of ``before`` updates.
        new: ``decay * old + (1 - decay) * squares``.
    """
    was = (1 - decay ** (number - 1)) / (1 - decay**before)
    now = (1 - decay**number) / (1 - decay ** (before + 1))

    def one(b: Tensor, a: Tensor) -> Tensor:
        return ((b + a * (decay * (1 / was - 1))) * now).to(b.dtype)

    return tree.map(one, new, old)
