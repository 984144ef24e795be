"""``compress_grads``: fewer bytes on the wire, with error feedback.

Law: until compression begins, bitwise the step without it; on one rank always. From then on
all ranks still end in the same bits as each other, and the sum of what was averaged lags
behind the sum of what should have been by what the errors hold: nothing is lost, only late.

1-bit Adam (Tang et al., 2021) warms up, then freezes the second moments. What is left of Adam
is linear in the gradients, so momentum may be averaged in their place, and its signs suffice.
Adam and LAMB hand over momentum in units of the roots of the frozen second moments (not in the
paper): all elements are then of one size, as a sign with a shared scale takes them to be.
What is compressed depends on what is cut:

=======  =======================================================  =======================
stage    compressed                                               errors, a parameter
=======  =======================================================  =======================
0        one bit: what the optimizer calls ``zf.reduced`` on,    4 bytes, and 4 shared
         momentum (Adam, LAMB, SGD with momentum) or gradients    out over the ranks
         (others); integers: gradients
1, 2, 3  gradients, unit by unit as backward passes them: this    4 bytes
         is the reduce-scatter, so that moments stay cut
=======  =======================================================  =======================

Integers of eight or four bits, and products of low rank (PowerSGD), leave enough of a gradient
that nothing has to freeze: the optimizer is the plain one, and there is no warm-up unless
``freeze_step`` says so.

At stages 1 and 2 ``gather`` packs what parameters are gathered as, too.

With one bit at stage 0 gradients are :class:`~zfunc.trees.unreduced.Unreduced`, so that nobody
takes a rank's own for the mean. Parts of a params entry that are differentiated alone at stages 1
to 3, and small leaves that stage 3 keeps whole, are averaged plainly.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import optree
import torch
from torch import Tensor

from zfunc.buffers.readings import Reading, on_host
from zfunc.engine import context
from zfunc.engine.carried import held, may_lose, may_stay, put, take
from zfunc.engine.communication import communication
from zfunc.engine.context import Context
from zfunc.engine.entries import Entries
from zfunc.engine.hooks import Gradients, Order, Pending
from zfunc.engine.placement import homes_of
from zfunc.engine.signs import sign
from zfunc.engine.step import Differentiate, Transform
from zfunc.engine.unit_info import Ready, UnitInfo
from zfunc.errors import CompositionError, NonFiniteError, PlacementError
from zfunc.kernels import llvm
from zfunc.layout.layout import Layout
from zfunc.layout.replicated import Replicated
from zfunc.layout.residuals import Residual
from zfunc.layout.sharded import Sharded
from zfunc.transforms.compression.averaging import (
    averaged,
    estimated,
    scattered,
    summed,
)
from zfunc.transforms.compression.error_feedback import Call, carried_on, fresh, is_finite, sums
from zfunc.transforms.compression.exchange import Codec
from zfunc.transforms.compression.gathering import (
    GATHERS,
    before,
    check_gather,
    joined,
)
from zfunc.transforms.compression.low_rank import PowerSGD, bases_of
from zfunc.transforms.compression.onebit import OneBit, rehearse
from zfunc.trees import tree
from zfunc.trees.nodes import NAMESPACE, Placed, Tree, opened
from zfunc.trees.reduction import Reduction
from zfunc.trees.unreduced import Unreduced
from zfunc.trees.withheld import Withheld

__all__ = ["NAME", "SETTLED", "CompressGrads", "CompressedMean", "as_unreduced", "sum_of"]

NAME = "compress_grads"
SETTLED = 0.96  # of the 1-norm of second moments, against what it was a window before
# What errors are left out of. The sizes differ: errors of one would be leaps to another.
FORMS = ("gradients", "momentum in units of its own", "movements")
EARLY = 0.1  # of the steps that second moments look back, the fewest before a freeze
_log = logging.getLogger("zfunc")
KINDS = ("worker", "server", "bases", "updates", "zero_one")
may_lose(NAME, KINDS[:4], sort="form")
may_stay(NAME)
sign(Residual, NAME)


@dataclass(frozen=True)
class CompressGrads(Transform):
    """See :func:`compress_grads`."""

    method: str = "onebit"
    freeze_step: int | str = "auto"
    codec: Codec | PowerSGD = field(default_factory=OneBit, repr=False)
    gather: str | None = None
    shard: Any = field(default=None, repr=False)

    position: ClassVar[int] = Order.COMPRESS
    name: ClassVar[str] = NAME

    def __repr__(self) -> str:
        return f"compress_grads({self.method!r}, freeze_step={self.freeze_step!r})"

    def obstacle(self) -> str:
        return "decides on the host when compression begins and whether a step is left out"

    def beside(self, others: Sequence[Transform]) -> CompressGrads:
        if any(other.name == NAME for other in others):
            raise CompositionError(
                "this step is wrapped in compress_grads already. A transform acts once: choose one "
                "method."
            )
        made = replace(self, shard=next((t for t in others if t.name == "shard"), None))
        if made.shard is not None and made.shard.replicated:
            raise CompositionError(
                f"compress_grads compresses what goes over the ranks of one axis, and "
                f'{made.shard.mesh} has replicas. Cut over both axes, shard(axis=("replica", '
                '"data")), or leave out compress_grads.'
            )
        if isinstance(self.codec, PowerSGD) and any(other.name == "split" for other in others):
            raise CompositionError(
                'compress_grads("powersgd") carries a basis for each leaf, and ranks that split '
                'leaves would have one for each part, which no checkpoint holds. Take "int8", '
                '"int4" or "onebit" beside split.'
            )
        if self.gather is not None:
            check_gather(self.gather, made.shard, others)
        return made

    @property
    def _ranks(self) -> int:
        return 1 if self.shard is None else self.shard.group.size

    # How the state is represented

    def place(self, state: Any) -> Any:
        full, state = take(state, NAME)
        if self._ranks == 1:
            return state
        if full is not None:
            count = int(full["count"])
        else:
            step = Entries(state).get("step")
            count = int(step) if isinstance(step, int | Tensor) else 0
        bases = partial(bases_of, self.codec) if isinstance(self.codec, PowerSGD) else None
        serving = self.shard.stage == 0 and bases is None
        updating = self.gather is not None
        begun = fresh(
            state,
            self.shard.params,
            count,
            self._reached(count),
            serving,
            bases,
            updating,
            whole=not self.shard.stage,
        )
        begun["form"] = torch.tensor(self._form)
        errors = [x for node in begun["worker"].values() for x in node.held() if x is not None]
        if isinstance(self.codec, OneBit) and any(on_host(x) for x in errors):
            # Or the first compressed step would wait for it.
            llvm.ahead(rehearse, self.codec, self.shard.stage)
        if full is None:
            return put(state, NAME, begun)
        return put(state, NAME, self._ours(carried_on(begun, full)))

    @property
    def _form(self) -> int:
        """What errors are left out of: gradients, momentum in units of its own, or movements."""
        return 0 if self.shard.stage or not self.codec.freezes else 1

    def _ours(self, carried: dict[str, Any]) -> dict[str, Any]:
        """The carried state of another stage or method, without errors of other sizes."""
        if int(carried["form"]) == self._form:
            return carried
        none = {
            kind: {name: node.map(torch.zeros_like, [node]) for name, node in carried[kind].items()}
            for kind in ("worker", "server")
        }
        return {**carried, **none, "form": torch.tensor(self._form)}

    def _reached(self, count: int) -> bool:
        if isinstance(self.freeze_step, int):
            return count >= self.freeze_step
        return not self.codec.freezes  # then there is nothing to wait for

    def unplace(self, state: Any) -> Any:
        """Before compression begins nothing is carried that a fresh start would not find."""
        carried, rest = take(state, NAME)
        return rest if carried is None or not carried["frozen"] else state

    def check(self, state: Any) -> None:
        if self._ranks == 1:
            return
        carried = held(Entries(state)).get(NAME)
        if carried is None:
            raise PlacementError(
                f"the state carries no errors of compression (an entry {NAME!r} of aux), so "
                f"{self!r} has not placed it. Call state = step.place(full_state) first."
            )
        has = {kind for kind in KINDS if carried.get(kind)}
        if has != (needs := self._kinds) and carried.get("worker") is not None:
            listed = [" and ".join(sorted(some)) or "nothing" for some in (has, needs)]
            raise PlacementError(
                f"the state carries {listed[0]} of compression, so another method than {self!r} "
                f"has placed it, which needs {listed[1]}. `unplace` it with the step that placed "
                "it, and `place` the result here."
            )
        if (form := int(carried["form"])) != self._form:
            raise PlacementError(
                f"the state carries errors of {FORMS[form]}, those of {self!r} are of "
                f"{FORMS[self._form]}. `unplace` it with the step that placed it, and `place` the "
                "result here."
            )

    @property
    def _kinds(self) -> set[str]:
        """Of what is carried from step to step, which kinds this method and stage have."""
        low_rank = isinstance(self.codec, PowerSGD)
        found = {"worker"} | ({"bases"} if low_rank else set())
        found |= {"server"} if self.shard.stage == 0 and not low_rank else set()
        return found | ({"updates"} if self.gather is not None else set())

    # One call

    def configure(self, running: Context, state: Any) -> None:
        if self._ranks == 1:
            return
        carried = take(state, NAME)[0]
        active = bool(carried["frozen"]) or self._reached(int(carried["count"]))
        call = Call(self.shard.group, self.codec, self.shard.stage, active, carried)
        over = communication(running)
        call.deciding, call.sharing = over.deciding, over.sharing
        running.notes[NAME] = call
        mean = running.reduction = CompressedMean(self, call)
        if active:
            if self.gather is not None:
                mean.old = before(state, self.shard.params, self.shard.group.rank)
            # Plain tensors beside cut trees are averaged as they are, at once.
            whole = not self.shard.stage
            over.keeps = lambda unit: (
                whole if not unit.cut else call.entry_of(unit.layout) is not None
            )

    def open(self, state: Any) -> Any:
        return take(state, NAME)[1]

    def leave(self, value: Pending, unit: UnitInfo) -> Pending:
        """What shard has left to us: to their owners with it, or back as it is."""
        if not unit.kept:
            return value
        call, fulls = unit.running.notes[NAME], value.wait()
        name = call.entry_of(unit.layout)
        if name is not None and self.codec.freezes:
            call.see(name, unit.layout, unit.trainable, fulls)
        else:
            call.finite += [is_finite(full) for full in fulls]
        if not unit.cut:
            return Ready([summed(unit, *each) for each in zip(unit.trainable, fulls, strict=True)])
        assert name is not None
        return scattered(call, unit, name, fulls)

    def differentiate(self, call: Differentiate, running: Context) -> Differentiate:
        mine: Any = running.notes.get(NAME)

        def run(asked: Gradients) -> Any:
            out, grads = call(asked)
            return out, None if grads is None else self._arrived(running, mine, grads, asked.params)

        return call if mine is None else run

    def _arrived(self, running: Context, call: Call, grads: Tree, params: Tree) -> Tree:
        """The gradients of one ``value_and_grad(...)(params)`` as the function is to see them."""
        squares: Mapping[str, Tensor] = {}
        if call.active:
            grads, squares = self._agreed(running, call, grads)
        if call.stage:
            return grads
        done = call.skipped or not call.active
        if not self.codec.freezes and done:
            return grads
        known = {} if done else {name: row.unbind() for name, row in squares.items()}

        def square(home: tuple[Layout, int] | None) -> Tensor | None:
            row = None if home is None else known.get(call.entry_of(home[0]) or "")
            return None if row is None or home is None else row[home[1]]

        local = as_unreduced(grads, params, done, square)
        return local if self.codec.freezes else averaged(call, local)

    def _agreed(
        self, running: Context, call: Call, grads: Tree
    ) -> tuple[Tree, Mapping[str, Tensor]]:
        """Gradients with the norms that all ranks had together; NaN if any rank saw a number
        that is not finite, for then this call will change nothing. And the squares of those
        norms, by params entry."""
        bad, squares = call.agreed()
        before = call.doubts.get(running.asked)
        doubt = bad if before is None else before[0] + bad
        call.doubts[running.asked] = doubt, Reading(doubt)
        settle = partial(self._settle, running, call)
        offloaded = any(t.name == "offload" for t in running.transforms)
        if on_host(bad) or not call.stage or offloaded:
            if settle():
                return estimated(call, grads, squares) if call.stage else grads, squares
            return tree.map(lambda g: torch.full_like(g, torch.nan), grads), {}
        if running.donation is not None:
            running.donation = Withheld.until(running.donation, settle)
        squares = {name: x.masked_fill(bad > 0, torch.nan) for name, x in squares.items()}
        grads = tree.map(lambda g: g.masked_fill_(bad > 0, torch.nan), grads)
        return estimated(call, grads, squares), squares

    def _settle(self, running: Context, call: Call) -> bool:
        """Read what the ranks saw, and say whether this call changes anything."""
        doubts, call.doubts = call.doubts, {}
        for asked, (_, reading) in doubts.items():
            if not reading.wait() or call.skipped:
                continue
            if asked > 1 and running.donation is not None:
                raise NonFiniteError(
                    "a gradient is not finite on some rank, in a step that has donated the memory "
                    "of another optimizer's state already, so that it cannot be skipped as a "
                    "whole. Leave out donate, or guard each optimizer with optim.skip_nonfinite."
                )
            call.skipped = True
            call.restore()
            running.donation = None  # the old state is the new one
        return not call.skipped

    def warn_if_early(self, count: int, decay: float | None) -> None:
        """Say once that too little has gone into second moments that stay what they are."""
        running = context.current()
        if decay is None or running is None or self.shard.group.rank:
            return
        least = max(10, round(EARLY / (1 - decay)))
        if count < least and "early" not in running.memo:
            running.memo["early"] = True
            _log.warning(
                "%r: second moments are frozen after %d updates of a mean over some %d (b2=%g). "
                "Steps may become far too large, and training diverge. Give it 15 to 20 %% of all "
                "steps, %s, or freeze_step='auto'.",
                self, count, round(1 / (1 - decay)), decay, self._enough(least),
            )  # fmt: skip

    def _enough(self, least: int) -> str:
        return f"{least} at least"

    def finish(self, old: Any, out: Any) -> Any:
        running = context.current()
        if running is None or (call := running.notes.get(NAME)) is None:
            return out
        self._settle(running, call)
        several = isinstance(out, tuple) and len(out) > 0 and type(out[0]) is type(old)
        new = out[0] if several else out
        if type(new) is not type(old):
            return out
        if call.skipped:
            new = _advanced(take(old, NAME)[1], new)
        new = put(new, NAME, self._next(call))
        return (new, *out[1:]) if several else new

    def _next(self, call: Call) -> dict[str, Any]:
        was, count = call.carried, int(call.carried["count"]) + 1
        if call.skipped:
            call.restore()
        begins, norm = self._begins(call, count)
        return {
            "count": was["count"] + 1,
            "form": torch.tensor(self._form),
            "frozen": torch.tensor(begins),
            "skipped": was["skipped"] + int(call.skipped),
            "norm": torch.tensor(norm, dtype=torch.float64),
            **call.errors(),
        }

    def _begins(self, call: Call, count: int) -> tuple[bool, float]:
        """Whether the next step compresses, and the norm of second moments to compare with.

        By the rule of 1-bit Adam, looked at once in a window of ``1 / (1 - b2)`` steps: their
        1-norm, bias corrected, is within 4 % of what it was a window before. The first
        window is not an average of as many steps yet. Without second moments there is
        nothing to wait for.
        """
        before = float(call.carried["norm"])
        if call.active or self.freeze_step != "auto":
            return call.active or self._reached(count), before
        if not call.window:
            return True, before
        if count % call.window:
            return False, before
        near = min(call.norm, before) >= SETTLED * max(call.norm, before)
        return count >= 2 * call.window and near and before > 0, call.norm

    # What it says of itself

    def expect(self, state: Any, memo: dict[Any, Any]) -> None:
        carried, _ = take(state, NAME)
        if carried is None and "said" not in memo:
            memo["said"] = True
            _log.warning("%r: one rank has nothing to send, and nothing is compressed", self)

    def describe(self, memo: Mapping[Any, Any]) -> list[str]:
        when = "once second moments have settled" if self.codec.freezes else "from the start"
        if isinstance(self.freeze_step, int):
            when = f"after {self.freeze_step} steps"
        if self._ranks == 1:
            return [f"compress_grads: {self.method} {when}; on one rank there is nothing to send"]
        stage, ranks = self.shard.stage, self._ranks
        whole = stage or not self.codec.freezes
        what = "gradients" if whole else "momentum (or what the optimizer averages)"
        alone = stage or isinstance(self.codec, PowerSGD)
        held = "4 bytes a parameter" + ("" if alone else f" and 4/{ranks} as an owner")
        return [f"compress_grads: {self.method} {what} {when}; errors take {held}"]


class CompressedMean(Reduction):
    """How one call averages, as optimizers ask for it.

    Attributes:
        by: the transform.
        call: the call.
        old: this rank's parts of the parameters before the step, where these are joined with the
            others' as compressed updates.
    """

    def __init__(self, by: CompressGrads, call: Call) -> None:
        self.by, self.call = by, call
        self.freezes = by.codec.freezes
        self.frozen = self.freezes and call.active
        self.old: dict[str, list[Tensor | None]] | None = None

    def reduce(self, tree: Tree, momentum: bool = False) -> Tree:
        return tree if self.call.stage else averaged(self.call, tree, momentum)

    def settle(self, old: Tree, new: Tree, decay: float | None = None) -> Tree:
        by, call = self.by, self.call
        if not self.freezes:
            return new
        count = int(call.carried["count"])
        if call.active:
            if not count:
                raise CompositionError(
                    f"{by!r} freezes second moments that nothing has gone into yet. Give it a "
                    "freeze_step of 1 at least: 15 to 20 % of all steps is usual."
                )
            by.warn_if_early(count, decay)
            return old
        if by.freeze_step == "auto" and decay is not None:
            call.window = max(call.window, round(1 / (1 - decay)))
            if (count + 1) % call.window == 0:
                call.norms.append(Reading(sum_of(call, new) / (1 - decay ** (count + 1))))
        return new

    def join(self, node: Any, params: Any) -> Any:
        if self.old is None or self.by.gather is None:
            return None
        return joined(self.call, GATHERS[self.by.gather], self.old, node, params)


def as_unreduced(
    grads: Tree,
    params: Tree,
    done: bool,
    square: Callable[[tuple[Layout, int] | None], Tensor | None] = lambda home: None,
) -> Tree:
    """Gradients as nodes that say to which of the parameters they belong.

    Args:
        square: of such a place, see :class:`~zfunc.trees.unreduced.Unreduced`.
    """
    if isinstance(grads, Replicated):
        homes: Sequence[Any] = [(grads.layout, i) for i in range(len(grads.layout.slots))]
    else:
        homes = homes_of(optree.tree_leaves(opened(params), none_is_leaf=True, namespace=NAMESPACE))
    leaves, spec = optree.tree_flatten(opened(grads), none_is_leaf=True, namespace=NAMESPACE)
    nodes = [
        None if g is None else Unreduced(g, home, done, square(home))
        for g, home in zip(leaves, homes, strict=True)
    ]
    return optree.tree_unflatten(spec, nodes)


def sum_of(call: Call, moments: Tree) -> Tensor:
    """The sum of second moments, the same on all ranks: 0-d, float64."""
    nodes = optree.tree_leaves(
        moments, is_leaf=lambda x: isinstance(x, Placed), namespace=NAMESPACE
    )
    total = sums(tree.leaves(moments))
    if any(isinstance(node, Sharded) for node in nodes):
        total = call.group.all_reduce(total, label="second moments").wait()
    if call.sharing.size > 1:  # whole leaves count once for each: now as in the window before
        total = call.sharing.all_reduce(total, label="second moments").wait()
    return total


def _advanced(old: Any, new: Any) -> Any:
    """The old state, with the step count of the new one."""
    entries, after = Entries(old), Entries(new)
    if "step" in entries and "step" in after:
        entries["step"] = after["step"]
    return entries.rebuild()
