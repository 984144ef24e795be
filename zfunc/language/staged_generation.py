"""Texts on the stages of a pipeline: each has its own layers, and their part of the caches.

Texts go through in groups, as many as there are stages, so that each has something to do while a
group is with the others. The last stage chooses tokens and tells them to all: the first goes on
with them, and so every rank has the texts.

Ranks along ``data`` have texts of their own. Where they gather layers from each other for each
token, they take as many steps: whose texts have ended computes on until all have.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from zfunc.errors import PlacementError
from zfunc.language.decoding import Decoder, StagedDecoder
from zfunc.ranks.comm import Group, even_cuts
from zfunc.ranks.digests import digests
from zfunc.rehearsal.plans import Called, Rehearsed, Repeated, Same, Spec
from zfunc.transforms.pipelining.repeated import RepeatedStage, repeated

__all__ = ["comes_apart", "staged_columns"]


def comes_apart(decoder: Decoder) -> TypeGuard[StagedDecoder]:
    """Whether stages can have the layers of a decoder's model, and of its caches."""
    if not isinstance(decoder, StagedDecoder):
        return False
    try:
        decoder.unfilled(decoder.start(1, 2, None))
    except PlacementError as error:
        logging.getLogger("zfunc").info("layers are gathered, and not run by stages: %s", error)
        return False
    return True


Choose = Callable[[Tensor, int, slice], Tensor]
"""``(logits, n, rows)`` -> the n-th new token of these texts."""


@dataclass(eq=False)
class TextGroup:
    """Some of the texts.

    Attributes:
        rows: which.
        cache: what their layers on this stage have seen.
        used: how many positions of it are taken.
        columns: new tokens, ``[rows, 1]`` each.
        done: ``[rows, 1]``, which of them have ended.
    """

    rows: slice
    cache: Any
    used: int = 0
    columns: list[Tensor] = field(default_factory=list)
    done: Tensor | None = None

    def take(self, column: Tensor, ends: Tensor) -> None:
        """Add new tokens."""
        self.columns.append(column)
        if len(ends):
            self.done = torch.isin(column, ends)

    def have_ended(self, columns: int, ends: Tensor) -> bool:
        """Whether all texts had ended with so many new tokens."""
        if not columns or not len(ends):
            return False
        behind = self.columns[min(columns, len(self.columns)) - 1]
        return bool(torch.isin(behind, ends).all())


def staged_columns(
    decoder: StagedDecoder,
    params: Any,
    parts: Sequence[Tensor],
    mask: Tensor | None,
    choose: Choose,
    count: int,
    ends: Tensor,
    drawn: Any,
) -> Iterator[Tensor]:
    """What follows texts, ``[b, 1]`` at a time: the same on all ranks; a collective.

    Args:
        decoder: of the model.
        params: placed on stages.
        parts: the prompts ``[b, t]``, in as many parts as they are taken in.
        mask: ``[b, t + count]`` bool, False at padding, or None.
        choose: what the last stage does with logits.
        count: how many tokens at most.
        ends: tokens that end a text; once all texts have ended nothing follows.
        drawn: how ``choose`` draws, for a comparison.

    Raises:
        PlacementError: stages were given other texts, or draw in other ways; ranks that gather
            layers from each other take other numbers of steps. On all ranks.
    """
    with repeated(decoder.write, params) as stage:
        given = [*parts, ends, *([] if mask is None else [mask])]
        _check_alike(stage.ranks, given, (count, drawn))
        steps = _steps(stage.gathering, parts, count, ends)
        texts = StagedTexts(decoder, stage, choose, ends)
        texts.start(parts, mask, count, min(steps.texts, stage.ranks.size))
        texts.take_in(steps.parts)
        ended = False
        for n in range(count):
            if n + 1 < count:
                texts.advance(n + 1)
            else:
                texts.end()
            if not ended:
                yield texts.column(n)
                ended = all(group.have_ended(n + 1, ends) for group in texts.groups)
            if steps.end and all(stage.gathering.exchange(ended, label="texts have ended")):
                texts.end()
                return


class Steps(NamedTuple):
    """In how many steps ranks that gather layers from each other continue their texts.

    Attributes:
        texts: how many each of them has, at least.
        parts: this rank's prompts, in as many parts as theirs.
        end: whether any text may end before the last token.
    """

    texts: int
    parts: Sequence[Tensor]
    end: bool


def _steps(ranks: Group, parts: Sequence[Tensor], count: int, ends: Tensor) -> Steps:
    length = sum(part.shape[1] for part in parts)
    own = len(parts[0]), length, len(parts), count, bool(len(ends))
    texts, lengths, numbers, counts, end = zip(*ranks.exchange(own, label="steps"), strict=True)
    if len({*counts}) > 1:
        raise PlacementError(
            f"ranks that gather layers from each other are to add {sorted({*counts})} tokens, and "
            "take as many steps. Give all of them the same max_new_tokens."
        )
    # As many parts as the longest prompts need, but none without a token.
    if (number := min(max(numbers), min(lengths))) != len(parts):
        parts = torch.cat([*parts], dim=1).tensor_split(number, dim=1)
    return Steps(min(texts), parts, any(end))


def _check_alike(ranks: Group, given: Sequence[Tensor], how: Any) -> None:
    told = [(tuple(x.shape), found) for x, found in zip(given, digests(given), strict=True)]
    every = ranks.exchange((told, how), label="texts")
    if other := next((rank for rank, theirs in enumerate(every) if theirs != every[0]), 0):
        raise PlacementError(
            f"stage {other} of a pipeline was given other texts, masks, numbers of tokens, stops "
            "or ways to draw (key, temperature, top_k, top_p) than stage 0: stages continue the "
            "same texts. Give all of them the same ones."
        )


class StagedTexts:
    """Texts under way.

    Args:
        decoder, stage: what they are made by.
        choose, ends: see :func:`staged_columns`.
    """

    def __init__(
        self, decoder: StagedDecoder, stage: RepeatedStage, choose: Choose, ends: Tensor
    ) -> None:
        self.decoder, self.stage, self.choose, self.ends = decoder, stage, choose, ends
        self.groups: list[TextGroup] = []
        self.running: list[TextGroup] = []  # through the call before
        self.plans: dict[Any, StepPlans] = {}

    def start(self, parts: Sequence[Tensor], mask: Tensor | None, count: int, groups: int) -> None:
        """Divide the texts into groups, whose caches are empty."""
        length = sum(part.shape[1] for part in parts) + count
        cuts = even_cuts(len(parts[0]), groups)
        for a, b in itertools.pairwise(cuts):
            its = None if mask is None else mask[a:b]
            self.groups.append(TextGroup(slice(a, b), self.decoder.start(b - a, length, its)))

    def take_in(self, parts: Sequence[Tensor]) -> None:
        """Let all groups take the prompts in; the first tokens are chosen."""
        for part in parts:
            last = part is parts[-1]
            tokens = [part[group.rows] for group in self.groups]
            self._step(self.groups, tokens, 0 if last else None)

    def advance(self, n: int) -> None:
        """Choose the ``n``-th tokens. A group of which all texts had ended one step ago rests,
        unless layers are gathered for it with other ranks.

        Whether they have in the last step is not known yet where others go on.
        """
        every = self.stage.gathering.size > 1
        live = [x for x in self.groups if every or not x.have_ended(n - 1, self.ends)]
        self._step(live, [None] * len(live), n)

    def end(self) -> None:
        """The last tokens arrive."""
        running, self.running = self.running, []
        if running:
            self.stage.finish()
            for i, group in enumerate(running):
                self._arrive(group, i)

    def column(self, n: int) -> Tensor:
        """The ``n``-th new token of each text; a text that has ended repeats its last one."""
        return torch.cat([x.columns[min(n, len(x.columns) - 1)] for x in self.groups])

    # One call of the model

    def _step(
        self, groups: Sequence[TextGroup], given: Sequence[Tensor | None], n: int | None
    ) -> None:
        device = self.stage.device
        tokens: list[Tensor | None] = list(given)
        likes = [
            torch.zeros(group.rows.stop - group.rows.start, 1, dtype=torch.int64, device=device)
            if x is None
            else x
            for group, x in zip(groups, given, strict=True)
        ]
        plans = [self._plan(*each) for each in zip(groups, likes, strict=True)]
        answers = [] if n is None else [_column(len(x), device) for x in likes]
        before = {id(group): i for i, group in enumerate(self.running)}
        self.stage.turn_to(plans, answers)
        for _, i, k in self.stage.actions[self.stage.me]:
            group = groups[i]
            with self.stage.telling(("F", i, k)):
                if tokens[i] is None:
                    tokens[i] = self._arrive(group, before[id(group)])
                logits = self.stage.computed(i, k, group.cache, tokens[i])
                if k == self.stage.last and n is not None:
                    self.stage.tell(i, self._chosen(group, logits, n))
        for group in self.running:
            if all(group is not other for other in groups):
                self._arrive(group, before[id(group)])
        for group, x in zip(groups, tokens, strict=True):
            assert x is not None  # each stage has had all groups
            group.cache = self.decoder.behind(group.cache, x)
            group.used += x.shape[1]
        self.running = [] if n is None else list(groups)

    def _chosen(self, group: TextGroup, logits: Tensor, n: int) -> Tensor:
        column = self.choose(logits, n, group.rows)[:, None]
        if group.done is not None:
            column = torch.where(group.done, group.columns[-1], column)
        group.take(column, self.ends)
        return column

    def _arrive(self, group: TextGroup, i: int) -> Tensor:
        """The last tokens of a group; the last stage has them."""
        if self.stage.is_last:
            return group.columns[-1]
        group.take(self.stage.told(i), self.ends)
        return group.columns[-1]

    def _plan(self, group: TextGroup, tokens: Tensor) -> Rehearsed:
        known = self.plans.setdefault(tuple(tokens.shape), StepPlans())
        if (found := known.at(group.used)) is None:
            plan = self.stage.rehearsed(lambda: (self.decoder.unfilled(group.cache), tokens))
            found = known.found(group.used, plan)
        return found


class StepPlans:
    """What a model does with so many tokens, when so many positions are taken.

    Boundaries are the same for each single token of most models, whatever their caches hold. Two
    rehearsals one behind the other that find the same are taken for all that follow; a run that
    met something else would raise.
    """

    def __init__(self) -> None:
        self.used, self.plan, self.steady = -1, None, False  # type: int, Rehearsed | None, bool

    def at(self, used: int) -> Rehearsed | None:
        """What is known."""
        return self.plan if self.steady or used == self.used else None

    def found(self, used: int, plan: Rehearsed) -> Rehearsed:
        """Note down what a rehearsal has found."""
        follows = self.plan is not None and used > self.used
        self.steady = follows and _alike(self.plan, plan)  # type: ignore[arg-type]
        self.used, self.plan = used, plan
        return plan


def _alike(a: Rehearsed, b: Rehearsed) -> bool:
    """Whether stages do and send the same by two plans."""
    same = a.crossing == b.crossing and a.uses == b.uses and len(a.calls) == len(b.calls)
    return same and all(map(_called_alike, a.calls, b.calls))


def _called_alike(a: Called, b: Called) -> bool:
    if (a.layer, a.index, a.inside, a.arguments) != (b.layer, b.index, b.inside, b.arguments):
        return False
    if a.writes != b.writes or len(a.results) != len(b.results):
        return False
    return all(
        x == y if isinstance(x, Spec | Same | Repeated) else type(x) is type(y)
        for x, y in zip(a.results, b.results, strict=True)
    )


def _column(rows: int, device: torch.device) -> Spec:
    return Spec((rows, 1), torch.int64, device, False, (1, 1))
