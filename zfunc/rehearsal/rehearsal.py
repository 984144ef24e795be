"""The whole loss on ghosts: nothing is sent, drawn, kept or changed.

It finds which layers run in which order, what each returns, and which values one chunk computes and
another one uses. All ranks find the same, for nothing but shapes decides: so they know without a
message what will come, from whom, and of which shape.

Layers run on ghosts, too. If one looks at numbers (a router of experts), all is done again,
and then each layer computes, on numbers made up for it, what its results are like.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import optree
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from zfunc.engine import context
from zfunc.engine.context import Context
from zfunc.engine.hooks import LayerInfo
from zfunc.engine.primitives import CALLED
from zfunc.errors import CompositionError, ZfuncError
from zfunc.layout.layout import Layout
from zfunc.ranks.comm import Group
from zfunc.ranks.connected import ConnectedGroup
from zfunc.ranks.keys import scope
from zfunc.rehearsal.between import Between
from zfunc.rehearsal.crossing import Crossing, by_label, is_made_by
from zfunc.rehearsal.eager import uncompiled
from zfunc.rehearsal.failures import located
from zfunc.rehearsal.generators import GlobalGenerators
from zfunc.rehearsal.ghosts import (
    RUN,
    Ghost,
    GhostMemory,
    Recipe,
    become,
    form_of,
    ghost_leaves,
    ghost_like,
    holders,
    is_shared,
    named,
    settle,
)
from zfunc.rehearsal.known import nothing_sent
from zfunc.rehearsal.made_up import MadeUp, calls_in, memory_id, unmark, version_of
from zfunc.rehearsal.own_copies import OwnCopies
from zfunc.rehearsal.plans import Called, Label, Rehearsed, Repeated, Same, SameContainer, Spec
from zfunc.rehearsal.refs import GhostRef, Seam
from zfunc.rehearsal.repeats import Repeats
from zfunc.rehearsal.results import containers, flattened, is_array, structure, tensors_in
from zfunc.rehearsal.silence import silent
from zfunc.rehearsal.sites import site
from zfunc.rehearsal.work import Counting
from zfunc.rehearsal.writes import UsersTensors
from zfunc.trees.nodes import OPAQUE

__all__ = ["rehearse"]

WRITTEN = (
    " It was written to (acc[i] = x), and has had no name since: put such values into a list, and "
    "take torch.stack."
)


def rehearse(
    fn: Callable[..., Any],
    layout: Layout,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    chunk_of: Sequence[int] | None = None,
    device: torch.device | str = "cpu",
    about: str = "a batch",
    twice: bool = False,
) -> Rehearsed:
    """Run ``fn(params, *args, **kwargs)`` on the shapes of parameters, with gradients or without
    as they are on.

    Args:
        fn: a loss, or any pure function of a tree whose layers run through ``zf.layer``.
        layout: of the parameters.
        args, kwargs: its other arguments; real tensors are as on every stage. None is changed.
        chunk_of: for each of the layout's layers the chunk that it is in; all in one by default.
        device: where parameters will be.
        about: what is rehearsed, for messages.
        twice: whether to find out if it does the same when it runs again.

    Returns:
        What each chunk needs, gives and uses, and what the function returns.

    Raises:
        CompositionError: code outside layers looks at numbers that another stage has, or writes
            to its batch; a layer comes behind one of a later chunk; a chunk has no layer that runs.
        Exception: whatever a layer raises on these shapes; the message says which one.
    """
    chunks = list(chunk_of) if chunk_of is not None else [0] * len(layout.layers)
    rest, at = (args, dict(kwargs or {})), torch.device(device)

    def run(invents: bool) -> Rehearsed:
        copies = OwnCopies(Repeats() if twice else None)
        made = partial(_Rehearsal, layout, chunks, at, invents, about, copies)
        plan, repeats = made().run(fn, *rest), copies.repeats
        if repeats is not None and repeats.changed:
            repeats.second = True
            with suppress(Exception, _Looked):  # by ghosts that the first one has left, say
                made().run(fn, *rest)
                plan = replace(plan, unlike=repeats.difference())
        return plan

    try:
        return run(invents=False)
    except _Looked:
        return run(invents=True)


class _Looked(BaseException):
    """A layer wants to know numbers; no ``except Exception`` in a model may keep it."""


class _Silence(TorchFunctionMode):
    """A block in which collectives of real tensors send nothing, either."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        run = RUN.get()
        if func is ConnectedGroup._issue:
            if isinstance(run, _Rehearsal):
                run.check_group(args[0])
            return nothing_sent(*args, **(kwargs or {}))
        if not isinstance(run, _Rehearsal):
            return func(*args, **(kwargs or {}))
        run.keep(func, args, kwargs or {})
        out = run.traced(func, args, kwargs or {})
        run.made(func, out, (*args, *(kwargs or {}).values()))
        return out


class _Rehearsal:
    """One run of the whole loss. See ``ghosts.GhostRun``."""

    def __init__(
        self,
        layout: Layout,
        chunk_of: Sequence[int],
        device: torch.device,
        invents: bool,
        about: str,
        copies: OwnCopies,
    ) -> None:
        self.layout, self.chunk_of, self.device = layout, chunk_of, device
        self.made_up = MadeUp() if invents else None
        self.chunk, self.within, self.failed, self.about = 0, -1, -1, about
        self.calls: list[Called] = []
        self.crossing: list[dict[Label, Crossing]] = [{} for _ in range(self.chunks)]
        self.uses: list[set[int]] = [set() for _ in range(self.chunks)]
        self.flops, self.flops_outside = [0], [0] * self.chunks
        self.flops_between = [0]
        self.overwritten: list[tuple[Tensor, Tensor]] = []
        self.between = Between()
        self.own = UsersTensors()
        self.copies = copies
        self.generators = GlobalGenerators()
        self.light_uses: dict[tuple[int, int], tuple[Ghost, Recipe | None]] = {}  # by chunk
        self.hooks: list[tuple[Ghost, str]] = []  # of what is made of parameters, and where
        self.viewed: dict[int, Tensor] = {}  # by memory: what layers have returned views of
        self.crossed: dict[tuple[int, GhostMemory], set[Label]] = {}
        self.error: BaseException | None = None
        self.layer_of = {
            i: k for k, layer in enumerate(layout.layers) for i in range(layer.start, layer.stop)
        }

    @property
    def chunks(self) -> int:
        return max(self.chunk_of, default=0) + 1

    @property
    def inside(self) -> bool:
        return self.within >= 0

    # --- the whole of it ---

    def run(self, fn: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Rehearsed:
        if torch.is_inference_mode_enabled():  # there nobody counts what is written to
            with torch.inference_mode(False), torch.no_grad():
                return self.run(fn, args, kwargs)
        running = context.current() or Context()
        every = range(len(self.layout.slots))
        leaves = ghost_leaves(self.layout, self.device, running.compute, every)
        tree = self.layout.tree(leaves, self._refs(leaves).__getitem__)
        given, copies = _copied((args, kwargs))
        for x, _ in copies:
            self.own.own(x)
        tokens = context.push(_beside(running)), RUN.set(self), CALLED.set(self.copies)
        try:
            # One rank that is a thread at a time: what they close over is the same.
            own_numbers, watched = self._put_back(), _Silence()
            with scope(0), own_numbers, uncompiled(), silent(), watched:
                out = self.copies.begin(fn)(tree, *given[0], **given[1])
                if self.error is not None:
                    raise self.error
                out = self._returned(out)
                self._outside()
                crossing = tuple(map(by_label, self.crossing))  # before tensors are put back
        except Exception as error:
            if (found := self._located(error)) is error:
                raise
            raise found from error
        finally:
            CALLED.reset(tokens[2])
            RUN.reset(tokens[1])
            context.pop(tokens[0])
        self._check(copies)
        return Rehearsed(
            calls=tuple(self.calls),
            crossing=crossing,
            uses=tuple(map(frozenset, self.uses)),
            result=out,
            flops=tuple(self.flops[: len(self.calls)]),
            flops_outside=tuple(self.flops_outside),
            flops_between=tuple(self.flops_between),
            writes=self.own.written_outside,
            to_the_end=self.copies.changed or self.generators.drawn,
            draws=self.generators.drawn,
            unlike="",
            layout=self.layout,
            device=self.device,
            compute=running.compute,
        )

    @contextmanager
    def _put_back(self) -> Iterator[None]:
        """A block behind which tensors of the user's are what they were."""
        try:
            yield
        finally:
            try:
                for x, was in reversed(self.overwritten):
                    become(x, was)
            finally:
                if self.made_up is not None:
                    self.made_up.forget_marks()
                self.own.restore()
                self.generators.put_back()

    def _located(self, error: Exception) -> Exception:
        """An error of a layer says which one it is; all ranks have the same."""
        if isinstance(error, ZfuncError) or self.failed < 0:
            return error
        call = self.calls[self.failed]
        place = f"stage {call.chunk} of the pipeline, layer {call.name} (call {self.failed})"
        return located(error, f"in a rehearsal, on the shapes of {self.about}: {place}")

    def _refs(self, leaves: Mapping[int, Any]) -> list[GhostRef]:
        refs = []
        for k, layer in enumerate(self.layout.layers):
            row = [leaves.get(i) for i in range(layer.start, layer.stop)]
            params = optree.tree_unflatten(layer.spec, row)
            trains = any(x.needs for x in row if x is not None)
            refs.append(GhostRef(self.layout, k, params, trains))
        return refs

    def _returned(self, out: Any) -> Any:
        leaves, rebuild = flattened(out)
        for x in leaves:
            if type(x) is Ghost:
                self._use(x, "the result of the loss")
        return rebuild([_spec(x) if isinstance(x, Tensor) else x for x in leaves])

    def _check(self, copies: Sequence[tuple[Tensor, int]]) -> None:
        if any(x._version != was for x, was in copies):
            raise CompositionError(
                "the loss writes to its batch in place, and would do so once for each stage of a "
                "pipeline. Let it write to a copy: x.clone()."
            )
        self._check_hooks()
        if self.chunks > 1:
            self._check_writes()
        lacking = set(range(self.chunks)) - {call.chunk for call in self.calls}
        if self.layout.layers and not self.calls:
            raise CompositionError(
                "no layer runs in this loss, so stages of a pipeline would have nothing to do. A "
                "loss calls the model on the params that it is given, model.apply(params, ...), "
                "and returns a tensor that is made of what comes."
            )
        if lacking and self.layout.layers:
            k = min(lacking)
            names = [self.layout.layers[i].name for i, c in enumerate(self.chunk_of) if c == k]
            which = f"none of {', '.join(names[:5])}" if names else "no layer"
            raise CompositionError(
                f"stage {k} of the pipeline would have nothing to do: {which} runs in this loss. "
                "Take fewer stages, or cut elsewhere."
            )

    def _check_hooks(self) -> None:
        """One of what several stages make of parameters would be called on a part on each."""
        for x, at in self.hooks:
            chunks = {
                k
                for (_, k), (g, recipe) in self.light_uses.items()
                if (recipe is None and g.memory is x.memory) or g is x or is_made_by(recipe, x)
            }
            if len(chunks) > 1:
                raise CompositionError(
                    f"at {at} a hook was given to a value made of parameters, of which stages "
                    f"{', '.join(map(str, sorted(chunks)))} of the pipeline have a part of the "
                    "gradient each. Change the whole gradient behind value_and_grad."
                )

    def _check_writes(self) -> None:
        """What one stage writes to tensors of the user's another one does not know."""
        if found := self.own.stale():
            write, reader = found
            raise CompositionError(
                f"{write.at}, in stage {write.chunk} of a pipeline, writes to a tensor that stage "
                f"{reader} reads, for the next microbatch: it would find the old numbers there. "
                "Let one layer read and write it."
            )

    # --- what operations tell ---

    def used(self, func: Any, ghosts: Sequence[Ghost], light: bool, below: bool) -> bool:
        if self.made_up is not None and self.inside and not below:
            for g in ghosts:
                if type(g) is Ghost:  # not one that stands twice among the arguments
                    self._use(g, func)
                    self.made_up.fill(g, self.within)
            return True
        if not light:
            for g in ghosts:
                self._use(g, func)
        return False

    def counted(self, flops: int) -> None:
        if self.inside:
            self.flops[self.within] += flops
        else:
            self.flops_outside[self.chunk] += flops
            self.flops_between[-1] += flops

    def draws(self, func: Any, args: Any, kwargs: dict[str, Any], uneven: bool) -> None:
        """Nothing is drawn in a rehearsal. Later chunks will draw as much, without the numbers."""
        if uneven and self.chunk < self.chunks - 1:
            raise self._fail(
                f"{named(func)} at {site()}, outside the layers, draws as many random numbers as "
                "the values make it, and other stages of a pipeline, which have none, could not "
                "draw as many. Do it inside a layer, which has random numbers of its own."
            )

    def writes(self, func: Any, x: Ghost) -> None:
        if not self.inside and not x.light and x.home != self.chunk:
            raise self._fail(
                f"{named(func)} at {site()}, outside the layers and behind some of stage "
                f"{self.chunk} of a pipeline, writes to a value of an earlier one, stage {x.home}. "
                "Let it give a new tensor: x = x + y."
            )
        if x.memory.is_here and self.chunks > 1:
            raise self._view_written(func)
        if len(self.crossed.get((self.chunk, x.memory), ())) > 1:
            raise self._fail(
                f"{named(func)} at {site()}, in stage {self.chunk} of a pipeline, writes to a "
                f"value of shape {list(x.shape)}, of whose memory an earlier stage sends a second "
                "one (a view of it, say), which would stay as it was. Let it give a new tensor, or "
                "let layers return x.clone()."
            )

    def _view_written(self, func: Any) -> CompositionError:
        return self._fail(
            f"{named(func)} at {site()} writes to a tensor that a layer was given, or to a view of "
            "it that the layer has returned: other stages of a pipeline have one, and not the "
            "other. Let it give a new tensor, or let the layer return x.clone()."
        )

    def keep(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Before a function of tensors is called: what it may write to."""
        for x in self.own.keep(func, args, kwargs):
            if memory_id(x) in self.viewed and self.chunks > 1:
                raise self._view_written(func)
            self.own.write(x, self.within, self.chunk, f"{named(func)} at {site()}")

    def overwrote(self, x: Tensor, was: Tensor) -> None:
        self.overwritten.append((x, was))

    def refused(self, message: str) -> BaseException:
        if self.inside and self.made_up is None:
            return _Looked()
        self.error = self.error or CompositionError(message)
        return self.error

    def _use(self, g: Ghost, func: Any) -> None:
        if 0 <= g.within != self.within:
            self._use_kept(g.within, g.home)
        if g.light:
            self._use_leaves(g.leaves or frozenset())
            self.light_uses[id(g), self.chunk] = g, g.recipe
        elif g.home != self.chunk:
            self._cross(g, func)

    def _use_kept(self, n: int, chunk: int) -> None:
        """A value that a layer has left somewhere, and did not return."""
        if chunk == self.chunk and (self.inside or self.chunk == self.chunks - 1):
            return  # whoever runs this has run that layer
        if self.chunks > 1:
            raise self._kept_by(n, f"is used at {site()}")

    def _kept_by(self, n: int, how: str) -> CompositionError:
        name = self.calls[n].name
        return self._fail(
            f"a value that layer {name} has kept (in a list, as an attribute, by a hook) {how}, in "
            f"stage {self.chunk} of a pipeline: stages that do not run the layer have none. Let "
            "the layer return it."
        )

    def _changes(self, n: int) -> CompositionError:
        name = self.calls[n].name
        return self._fail(
            f"layer {name} changes a list, dict, set, array or dataclass that it was given, in "
            f"stage {self.chunk} of a pipeline: stages that do not run the layer have it as it "
            "was. Let the layer return what it puts there."
        )

    def _use_leaves(self, leaves: frozenset[int]) -> None:
        for i in leaves - self.uses[self.chunk]:
            k = self.layer_of.get(i)
            if k is None:
                self.uses[self.chunk].add(i)
            elif not self.inside or k != self.calls[self.within].layer:
                slot = self.layout.slots[i]
                raise self._fail(
                    f"{'' if slot is None else slot.path} is a parameter of layer "
                    f"{self.layout.layers[k].name}, and is read outside of its call at {site()}, "
                    "where another stage of the pipeline may be. Read it inside of the layer, or "
                    "keep it outside of all layers."
                )

    def _cross(self, g: Ghost, func: Any) -> None:
        name = g.made_as or g.known_as
        if name is None:
            what = func if isinstance(func, str) else f"{named(func)} at {site()}"
            raise self._fail(
                f"{what}, in stage {self.chunk} of a pipeline, uses a value of shape "
                f"{list(g.form.shape)} computed in stage {g.home} that no layer was given. Pass it "
                "to the layers as an argument, or compute it inside of them."
                + (WRITTEN if g.memory.version else "")
            )
        found = Crossing(g.known_as, g.made_as, g.home, g.spec, g, g.of)
        self.crossing[self.chunk].setdefault(name, found)
        self.crossed.setdefault((self.chunk, g.memory), set()).add(name)

    def made(self, func: Any, out: Any, given: Any) -> None:
        """Outside of layers, what may have to be sent has a name."""
        for n in self.own.called(func, given, out, self.within, self.chunk) - {self.within}:
            self._use_kept(n, self.calls[n].chunk)
        for label, x in () if self.inside else self.between.labels(func, out):
            if type(x) is Ghost:
                if self.copies.repeats is not None:
                    self.copies.repeats.called(named(func), given)
                found = tensors_in(given)
                if x.made_as is not None and any(g is x for g in found):
                    continue  # it was given as it is (x.contiguous()), and is known by its maker
                x.made = label, x.memory.version
                x.of = [g for g in found if type(g) is Ghost and g is not x]

    def hooked(self, x: Ghost) -> None:
        """Whoever makes a value has its hooks, and comes no further than to the next stage."""
        if x.light:
            self.hooks.append((x, site()))
        elif x.home < self.chunk:
            raise self._fail(
                f"at {site()}, in stage {self.chunk} of a pipeline, a hook was given to a value of "
                f"shape {list(x.form.shape)} that stage {x.home} has computed and passed on. Give "
                "it where the value is made: behind the layer that returns it, before the next one."
            )

    def check_group(self, ranks: Group) -> None:
        """Nothing that all stages have to take part in: each is somewhere else in the loss."""
        staged = any(unit.chunk for unit in self.layout.units)
        if staged and set(self.layout.ranks.members) <= set(ranks.members):
            raise self._fail(
                f"at {site()} the loss gathers, or sums, over all stages of a pipeline, and each "
                "of them is somewhere else in it. Did it read a placed tree from outside, "
                "state.params? Use the parameters that it is given, and read others before."
            )

    def _fail(self, message: str) -> CompositionError:
        error = CompositionError(message)
        self.error = self.error or error
        return error

    # --- layers ---

    def layer(self, call: Callable[..., Any], info: LayerInfo, /, *xs: Any, **kw: Any) -> Any:
        """What the ``layer`` hook comes to."""
        if info.key is None or info.key[0] is not None or self.inside:
            return call(*xs, **kw)
        n, index = len(self.calls), info.key[1]
        ins, remake = flattened((xs, kw))
        self._label(n, "in", ins)
        self._outside()
        self._begin(info, index)
        if self.copies.repeats is not None:
            self.copies.repeats.called("layer", ins)
        own = {id(x): _alias(x, n) for x in ins if type(x) is Ghost}
        around = containers((xs, kw))
        if own:
            xs, kw = remake([own.get(id(x), x) for x in ins])
        inner = containers((xs, kw))
        before, shown = [version_of(x) for x in ins], _shown(xs, kw)
        running = context.current()
        assert running is not None
        counted = running.layer_calls
        self.within, self.own.arguments = n, set(map(id, ins))
        try:
            out = call(*xs, **kw) if self.made_up is None else self._on_numbers(call, xs, kw)
        except Exception:
            self.failed = n
            raise
        finally:
            self.within, self.own.arguments = -1, set()
        if self.chunks > 1 and _shown(xs, kw) != shown:
            raise self._changes(n)
        unmark(ins)  # what is in its arguments now is told below
        given = {id(alias): x for x in ins if (alias := own.get(id(x))) is not None}
        given |= {id(x): was for x, was in zip(inner, around, strict=True)}
        outs, rebuild = flattened(out, whole=given)
        new = self._results(ins, [given.get(id(x), x) for x in outs])
        for alias in own.values():
            alias.maker, alias.label, alias.leaves, alias.recipe = self.chunk, None, None, None
            alias.of = ()
        self._label(n, "out", new)
        self.own.forget(ins)  # what is in its arguments now is told below
        writes = tuple(p for p, x in enumerate(ins) if version_of(x) != before[p])
        for p in writes:
            if type(ins[p]) is not Ghost:
                self._elsewhere(ins[p])
        self.own.behind_layer()
        self.generators.end_layer()
        self.copies.end_layer()
        self.between.behind(n)
        self.calls[n] = replace(
            self.calls[n],
            inside=running.layer_calls - counted,
            arguments=len(ins),
            results=tuple(_kept(x, ins, around, new[:p]) for p, x in enumerate(new)),
            structure=structure(out),
            rebuild=rebuild,
            writes=writes,
        )
        return rebuild(new)

    def _on_numbers(self, call: Callable[..., Any], xs: tuple[Any, ...], kw: dict[str, Any]) -> Any:
        """What a layer that looks at numbers returns, as ghosts."""
        assert self.made_up is not None
        with Counting() as counting:
            try:
                out = self.made_up.emptied(call(*xs, **kw), self.chunk)
            except BaseException:
                with suppress(CompositionError):  # that the layer's error holds on to numbers
                    self.made_up.forget()
                raise
            for x in self.made_up.forget():
                self.writes(self.calls[self.within].name, x)
                x.memory.written(self.chunk, needs=True)
        self.counted(counting.flops)
        return out

    def traced(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """What a function of tensors gives. What is made of numbers that a layer was given is no
        one else's, either."""
        if self.made_up is None:
            return func(*args, **kwargs)
        given = [x for x in flattened((args, kwargs))[0] if isinstance(x, Tensor)]
        calls = calls_in(given)
        for n in calls - {self.within}:
            self._use_kept(n, self.calls[n].chunk)
        if not (calls and self.inside):
            return func(*args, **kwargs)
        return self.made_up.traced(func, args, kwargs, given, self.within)

    def _elsewhere(self, x: Tensor) -> None:
        """A tensor that a layer has written to: only its stage knows what is in it."""
        if self.chunks > 1 and is_shared(x):  # nobody could tell whoever has the rest of it
            raise self._fail(
                f"layer {self.calls[-1].name}, in stage {self.chunk} of a pipeline, writes into an "
                f"argument of shape {list(x.shape)} that shares memory with another tensor, as a "
                "view does: other stages would not know what is in that. Give the layer one of its "
                "own, x.clone(), or let it return what it makes."
            )
        was = ghost_like(form_of(x), x.device, self.chunk, True)
        become(x, was)
        self.overwrote(x, was)

    def _outside(self) -> None:
        """What has changed since the last layer was changed outside of layers."""
        self.generators.begin_layer()
        self.copies.begin_layer()

    def _begin(self, info: LayerInfo, index: int) -> None:
        chunk, name = self.chunk_of[index], self.layout.layers[index].name
        if self.calls and chunk < self.chunk:
            raise self._fail(
                f"layer {name}, of stage {chunk} of the pipeline, runs behind layer "
                f"{self.calls[-1].name} of stage {self.chunk}. Layers must run in the order of "
                "their stages. Give pipeline an example= of a batch: then they are divided in the "
                "order in which they run. Or cut elsewhere: one that runs twice has one stage, and "
                "two passes of a model are one over their rows, joined."
            )
        self.chunk, self.failed = chunk, -1
        self.calls.append(Called(name, index, chunk, info.index, 0, 0, (), None, _no_rebuild, ()))
        self.flops.append(0)
        self.flops_between.append(0)

    def _label(self, n: int, side: str, leaves: Sequence[Any]) -> None:
        for p, x in enumerate(leaves):
            if type(settle(x)) is not Ghost:
                continue
            if x.within >= 0 and self.chunks > 1:
                raise self._kept_by(x.within, "is given to another one")
            if x.light and x.recipe is not None:  # from here on it is a value of this chunk
                self._use(x, "")
                x.maker, x.leaves, x.recipe, x.made = self.chunk, None, None, None
            # What a region that backward runs again has kept is to come before that.
            kept = holders(x) > 1 and x.made_as is not None
            if not x.light and x.known_as is None and not kept:
                x.label = (n, side, p), x.memory.version

    def _results(self, ins: Sequence[Any], outs: Sequence[Any]) -> list[Any]:
        """A layer's results: what it made is a new ghost, whatever it is made of."""
        known = {id(x): x for x in ins}
        given = [x for x in ins if isinstance(x, Tensor) and type(x) is not Ghost]
        memories = {memory_id(x): GhostMemory() for x in given}
        for memory in memories.values():
            memory.is_here = True
        for x in outs:
            if isinstance(x, Tensor) and id(x) not in known:
                known[id(x)] = self._result(x, memories)
        return [known.get(id(x), x) for x in outs]

    def _result(self, x: Tensor, memories: dict[int, GhostMemory]) -> Tensor:
        if type(x) is not Ghost:
            memory = memories.setdefault(memory_id(x), GhostMemory())
            if memory.is_here:
                self.viewed[memory_id(x)] = x
            return ghost_like(form_of(x), x.device, self.chunk, x.requires_grad, memory=memory)
        if x.light:
            return x
        return ghost_like(x.form, x.device, x.maker, x.tracked, memory=x.memory)


def _no_rebuild(leaves: Sequence[Any]) -> NoReturn:
    raise AssertionError("a layer that has not returned")


def _alias(x: Ghost, n: int) -> Ghost:
    """A ghost for the time of one call, with the same memory: what a layer does with it, other
    than to return it, is no one else's."""
    made = ghost_like(x.form, x.device, x.maker, x.tracked, x.leaves, x.recipe, x.memory)
    made.label, made.version, made.within = x.label, x.version, n
    made.made, made.of = x.made, x.of
    marks = {key: value for key, value in x.__dict__.items() if key.startswith("_zfunc")}
    made.__dict__.update(marks)
    return made


def _shown(xs: tuple[Any, ...], kw: dict[str, Any]) -> tuple[Any, list[Any]]:
    """What containers hold: how they stand in each other, and which leaves they have."""
    given: Any = (xs, kw)
    spec = optree.tree_structure(given, none_is_leaf=True, namespace=OPAQUE)
    return spec, [(id(x), _content(x)) for x in flattened(given)[0]]


def _content(x: Any) -> Any:
    """What is in a leaf that is no tensor, and can be changed."""
    if isinstance(x, set):
        return frozenset(x)
    return x.tobytes() if is_array(x) else bytes(x) if isinstance(x, bytearray) else None


def _kept(x: Any, ins: Sequence[Any], around: Sequence[Any], before: Sequence[Any]) -> Any:
    """What is known of a layer's result when it does not run."""
    if (position := next((p for p, y in enumerate(around) if y is x), None)) is not None:
        return SameContainer(position)
    position = next((p for p, y in enumerate(ins) if y is x), None)
    if position is not None and not isinstance(x, int | float | str | None):
        return Same(position)
    position = next((p for p, y in enumerate(before) if y is x), None)
    if position is not None and isinstance(x, Tensor):
        return Repeated(position)
    return x.spec if type(x) is Ghost else x


def _spec(x: Tensor) -> Spec:
    if type(x) is Ghost:
        return x.spec
    return Spec(tuple(x.shape), x.dtype, x.device, x.requires_grad, x.stride())


def _copied(tree: Any) -> tuple[Any, list[tuple[Tensor, int]]]:
    """Arguments that may be written to, and the copies that are among them with their versions."""
    copies: dict[int, Tensor] = {}

    def copy(x: Any) -> Any:
        if type(x) is not Tensor or x.requires_grad:
            return x.copy("K") if is_array(x) else x
        return copies.setdefault(id(x), x.clone())

    leaves, rebuild = flattened(tree)
    return rebuild([copy(x) for x in leaves]), [(x, x._version) for x in copies.values()]


def _beside(running: Context) -> Context:
    """The context of a rehearsal: the step's, without randomness; layers come here."""
    transforms = (Seam(), *running.transforms)
    return replace(
        running, transforms=transforms, layer_calls=0, layer_scope=None, passes=list(running.passes)
    )
