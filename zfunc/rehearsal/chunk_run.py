"""One microbatch through one chunk: the loss runs, and only the chunk's layers compute.

Before the first of them there are ghosts. The values that the chunk needs arrive, each in the
place of its ghost, when layers meet that. Behind the last of them there are ghosts again, until the
values that others need have been met; then the run ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from zfunc.buffers.readings import on_host
from zfunc.engine import context
from zfunc.engine.hooks import LayerInfo
from zfunc.engine.primitives import CALLED
from zfunc.errors import CompositionError, NonFiniteError
from zfunc.rehearsal import known
from zfunc.rehearsal.between import Between, BetweenLayers
from zfunc.rehearsal.eager import uncompiled
from zfunc.rehearsal.ghosts import (
    RUN,
    Ghost,
    become,
    form_of,
    ghost_leaves,
    ghost_like,
    holders,
    in_function,
    named,
    settle,
    with_makers,
)
from zfunc.rehearsal.plans import (
    MADE,
    Called,
    Label,
    Rehearsed,
    Repeated,
    Same,
    SameContainer,
    Spec,
)
from zfunc.rehearsal.results import (
    are_alike,
    containers,
    flattened,
    is_array,
    replaced,
    structure,
)
from zfunc.rehearsal.sites import site
from zfunc.rehearsal.values import is_same, is_value
from zfunc.trees.nodes import Tree

__all__ = ["ChunkRun", "Done"]

assert known  # what it knows of single functions holds here, too


LEAVES = frozenset((Tensor, Ghost))  # among arguments: they need not be flattened


class Done(BaseException):
    """A chunk has computed all that it has to; no ``except Exception`` in a model may keep it."""


def _stands(then: Any, x: Any) -> bool:
    """Whether what a layer returned in the rehearsal stands for what it returns."""
    if isinstance(x, Tensor):
        return isinstance(then, Spec | Same | Repeated)
    if isinstance(then, Same | SameContainer):
        return True
    return not isinstance(then, Spec) and is_same(x, then)


def _told(x: Any) -> str:
    if isinstance(x, Spec | Same | Repeated | Tensor):
        return "a tensor"
    return repr(x) if is_value(x) and not is_array(x) else f"another {type(x).__name__}"


def _become_own(ghost: Ghost, new: Tensor) -> None:
    """Let a ghost be what was made here for it, with the hooks that it was given before."""
    hooks = ghost.__dict__.get("hooks")
    become(ghost, new)
    if hooks and ghost.requires_grad:
        ghost.register_hook(partial(_call_all, hooks))


def _call_all(hooks: Mapping[int, Any], grad: Tensor) -> Tensor:
    """What those hooks make of a gradient that nobody has removed."""
    for hook in [*hooks.values()]:
        new = hook(grad)
        grad = grad if new is None else new
    return grad


def _come_to(back: list[int], n: int, grads: Any) -> None:
    """A hook of a node of autograd: backward has come to a call."""
    back[:] = [n]


def _check_numbers(outs: Sequence[Any]) -> None:
    """Under ``torch.autograd.set_detect_anomaly``, which looks for NaN in backward itself.

    Raises:
        NonFiniteError: there is one in what a layer returns.
    """
    for position, x in enumerate(outs):
        if not isinstance(x, Tensor) or type(x) is Ghost or not x.is_floating_point():
            continue
        if many := int(x.detach().isnan().sum()):
            raise NonFiniteError(
                f"{many} of {x.numel()} numbers of its result {position}, of shape "
                f"{list(x.shape)}, are NaN; no layer before it gave one."
            )


def _is_one(x: Any, y: Any) -> bool:
    """Whether a result of a layer is an argument of it, or another result, or all of its memory."""
    if x is y:
        return True
    if not (isinstance(x, Tensor) and isinstance(y, Tensor)) or Ghost in (type(x), type(y)):
        return False
    return x.data_ptr() == y.data_ptr() and x.shape == y.shape and x.stride() == y.stride()


def _is_near(x: Tensor, y: Tensor) -> bool:
    if x.is_floating_point() or x.is_complex():
        return torch.allclose(x, y, 1e-2, 1e-2, equal_nan=True)
    return torch.equal(x, y)


def _as_sent(x: Tensor, spec: Spec) -> Tensor:
    """A value that has come in one stretch, with the strides that it had: a mask of dropout, say,
    is drawn in the order of memory."""
    like = torch.empty_strided(spec.shape, spec.stride, dtype=x.dtype, device=x.device)
    return like.copy_(x) if like.untyped_storage().nbytes() == spec.nbytes else x


_recording: Callable[[], AbstractContextManager[None]] = partial(torch._C._InferenceMode, False)
"""A block for what comes and goes, which may be met first in ``no_grad``: it has a gradient for
whoever uses it elsewhere. Without torch's wrapper."""


_unsafe_view = torch.ops.aten._unsafe_view.default._op  # without torch's wrapper


def _unleaved(x: Tensor) -> Tensor:
    """The same memory, and no view for autograd: it may be written to, which a leaf may not."""
    new: Tensor = _unsafe_view(x, x.shape) if x.requires_grad else x.detach()
    return new


def _ones(x: Tensor) -> Tensor:
    """A tensor like that, of which a random function makes something. How much it draws may depend
    on the strides."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).fill_(1)


class ChunkRun:
    """One microbatch through one chunk. See ``ghosts.GhostRun``.

    Args:
        plan: what the rehearsal of this microbatch's shapes has found.
        chunk: which one.
        receive: gives the value of a label, from another chunk; it may wait.
        enter_roots: the leaves outside layers with these indices, differentiable.
        send: is given what later chunks need as soon as all of it is there. What follows in the
            loss is its way out.

    Attributes:
        outs: what others need of this chunk, by label.
        inputs: what was received, by label; where a gradient goes, a leaf of the graph.
        begins: where gradients go on to what was computed here before the first layer, and the
            tensors there; of a chunk that has received nothing that has a gradient.
    """

    def __init__(
        self,
        plan: Rehearsed,
        chunk: int,
        receive: Callable[[Label, Spec], Tensor],
        enter_roots: Callable[[frozenset[int]], Mapping[int, Tensor]],
        send: Callable[[Mapping[Label, Tensor]], None] = lambda outs: None,
    ) -> None:
        self.plan, self.chunk, self.receive, self.enter_roots = plan, chunk, receive, enter_roots
        self.send = send
        self.active, self.within, self.over, self.finished = False, -1, False, False
        self.route = plan.routes[chunk]
        self.roots: dict[int, Any] = ghost_leaves(
            plan.layout, plan.device, plan.compute, plan.layout.root_leaves
        )
        self.entered: frozenset[int] = frozenset()
        self.wanted = dict(self.route.needs)
        self.inputs: dict[Label, Tensor] = {}
        self.outs: dict[Label, Tensor] = {}
        self.begins: dict[Any, tuple[GradientEdge, Tensor]] = {}
        self.taken: list[tuple[Tensor, set[int]]] = []  # received ones, and hooks given in layers
        self.next, self.failed = 0, -1
        self.skipped: dict[int, Any] = {}  # what stands for results of layers that do not run here
        self.overwritten: list[tuple[Tensor, Tensor]] = []
        self.back: list[int] = []  # to which call backward has come; it holds no tensors
        self.error: BaseException | None = None

    @property
    def place(self) -> str:
        """Where forward has failed, or backward has come to, for messages."""
        n = self.back[0] if self.back else self.failed
        if n >= 0:
            return f"layer {self.plan.calls[n].name} (call {n})"
        if self.next == 0:
            return "before the first layer"
        return f"behind layer {self.plan.calls[self.next - 1].name} (call {self.next - 1})"

    def run(
        self,
        fn: Callable[..., Any],
        tree_of: Callable[[dict[int, Any]], Tree],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run the loss as far as this chunk goes.

        Args:
            fn: what was rehearsed.
            tree_of: the params tree, given the leaves outside layers by index.
            args, kwargs: its other arguments.

        Returns:
            What ``fn`` returns, in the last chunk; else None.

        Raises:
            CompositionError: it does something else than in the rehearsal.
        """
        if self.chunk == 0:
            self._activate()
        tokens = RUN.set(self), CALLED.set(False)
        given = kwargs or {}
        try:
            if self.route.between:
                self.between = Between()
                with uncompiled(), BetweenLayers(self):
                    out = fn(tree_of(self.roots), *args, **given)
            else:
                out = fn(tree_of(self.roots), *args, **given)
        except Done:
            out = None
        finally:
            CALLED.reset(tokens[1])
            RUN.reset(tokens[0])
            self.roots = {}
            for x, was in reversed(self.overwritten):
                if type(x) is Ghost:  # to others a value has come in the meantime
                    become(x, was)
            self.overwritten.clear()
        if self.error is not None:
            raise self.error
        self._sort_hooks()
        self.taken.clear()
        if not self.over:
            if not self.route.ends or self.next < len(self.plan.calls):
                raise self._differs(f"the loss returned when it was the turn of {self._expected()}")
            self._give()
        result = self._result(out) if self.route.ends else None
        self.finished = True
        return result

    def _give(self) -> None:
        if lacking := self.route.gives.keys() - self.outs.keys():
            raise self._differs(f"{self._at(min(lacking))} was not given what it was then")
        with _recording():
            self.send(self.outs)

    def _expected(self) -> str:
        if self.next < len(self.plan.calls):
            return f"layer {self.plan.calls[self.next].name}"
        return "the end of the loss"

    def _result(self, out: Any) -> Any:
        leaves, _ = flattened(out)
        for x in leaves:
            if type(x) is Ghost:
                self.used("the result of the loss", [x], False, False)
        return out

    # --- what operations tell ---

    def used(self, func: Any, ghosts: Sequence[Ghost], light: bool, below: bool) -> bool:
        if not self.active or self.finished:  # what backward runs again has been looked at
            return False
        for g in ghosts:
            self._make(g, below)
        rest = [g for g in ghosts if type(g) is Ghost]
        if not rest:
            return True
        if light and all(g.light for g in rest):
            return False
        what = func if isinstance(func, str) else f"{named(func)} at {site()}"
        raise self._differs(f"{what} uses a value of shape {list(rest[0].shape)} of another stage")

    def _make(self, x: Any, below: bool = False) -> None:
        """Make a value of parameters alone, where it is used or sent, of leaves that are here."""
        if not self._can_make(x):
            return
        for ghost in with_makers(x, self._can_make):
            if ghost.leaves and (below or in_function()):
                raise self._fail(
                    "a value made of parameters outside the layers was given to a "
                    f"torch.autograd.Function, or to torch.func, at {site()}, in another stage of "
                    "the pipeline than where it was made: its gradient would be lost. Make it "
                    "where it is used."
                )
            # A region that backward runs again finds it made, and is not to count what that saves.
            with saved_tensors_hooks(Tensor.detach, Tensor.detach):
                _become_own(ghost, ghost.recipe.made())

    def _can_make(self, x: Any) -> bool:
        if type(x) is not Ghost or not x.light or x.recipe is None:
            return False
        return (x.leaves or set()) <= self.entered

    def counted(self, flops: int) -> None:
        """Work is counted in the rehearsal."""

    def draws(self, func: Any, args: Any, kwargs: dict[str, Any], uneven: bool) -> None:
        """Draw as much: what this chunk draws later comes from the same place in the stream."""
        attends = named(func) == "scaled_dot_product_attention"
        if attends and not (*args[4:5], kwargs.get("dropout_p", 0))[0]:
            return
        args, kwargs = replaced((args, kwargs), _ones)
        with torch.no_grad():
            func(*args, **kwargs)

    def writes(self, func: Any, x: Ghost) -> None:
        """What may be written to was found in the rehearsal."""

    def overwrote(self, x: Tensor, was: Tensor) -> None:
        """A tensor of the user's, say: what is in it only the stage knows that writes to it."""
        self.overwritten.append((x, was))

    def refused(self, message: str) -> BaseException:
        return self._fail(message)

    def _fail(self, message: str) -> CompositionError:
        error = CompositionError(message)
        self.error = self.error or error
        return error

    def _differs(self, what: str, more: str = "") -> CompositionError:
        return self._fail(
            f"stage {self.chunk} of a pipeline: {what}, unlike in the rehearsal of this batch's "
            "shapes. Which layers run, and on what, may depend on shapes and on what no rank "
            "computes, and on nothing else: decide inside of a layer, or for all microbatches. "
            "What changes between steps belongs in the batch: a bool is rehearsed anew." + more
        )

    # --- layers ---

    def layer(self, call: Callable[..., Any], info: LayerInfo, /, *xs: Any, **kw: Any) -> Any:
        """What the ``layer`` hook comes to."""
        n = self.plan.positions.get(info.index)
        if n is None or self.within >= 0:
            return call(*xs, **kw)
        plan = self.plan.calls[n]
        if n < self.next and (plan.chunk == self.chunk or n in self.skipped):  # in backward
            if plan.chunk != self.chunk:
                return self.skipped[n]
            self._come_again(n, flattened((xs, kw))[0])
            return call(*xs, **kw)
        if self.over and not self.plan.to_the_end:
            raise Done
        plain = not kw and LEAVES.issuperset(map(type, xs))
        ins = [*xs] if plain else flattened((xs, kw))[0]
        layer = None if info.key is None else info.key[1]
        if n != self.next or layer != plan.layer or len(ins) != plan.arguments:
            raise self._unexpected(n, plan, layer, ins)
        self.next += 1
        for x in ins:
            if type(x) is Ghost and x.recipe is not None and not x.leaves:
                settle(x)
        if (n, "in") in self.route.places:
            self._meet(n, "in", ins)
        if plan.chunk != self.chunk:
            out = self._skip(xs, kw, n, plan, ins)
        else:
            out = self._compute(call, xs, kw, n, plan, ins)
        if self.route.between:
            self.between.behind(n)
        return out

    def _unexpected(
        self, n: int, plan: Called, layer: int | None, ins: Sequence[Any]
    ) -> CompositionError:
        name = "unknown" if layer is None else self.plan.layout.layers[layer].name
        if n != self.next:
            return self._differs(f"layer {name} runs, and it was the turn of {self._expected()}")
        if layer != plan.layer:
            return self._differs(
                f"layer {name} runs in the place of layer {plan.name}",
                " A model that leaves layers out by chance (layerdrop) has to be told not to; "
                "zf.drop_layers does it for all stages alike.",
            )
        return self._differs(
            f"layer {plan.name} got {len(ins)} arguments, and not {plan.arguments}"
        )

    def _compute(
        self,
        call: Callable[..., Any],
        xs: tuple[Any, ...],
        kw: dict[str, Any],
        n: int,
        plan: Called,
        ins: Sequence[Any],
    ) -> Any:
        if not self.active:
            self._activate()
        if n == self.route.first and not self.taken:  # no input has a gradient
            self._begin(ins)
        self._sort_hooks()
        self.within, self.failed = n, n
        try:
            out = call(*xs, **kw)
        finally:
            self.within = -1
        self._sort_hooks(own=True)
        whole = plan.whole((xs, kw)) if plan.returns_containers else ()
        outs, _ = flattened(out, whole=whole)
        if torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled():
            _check_numbers(outs)
        self._compare_results(n, ins, out, outs)
        self.failed = -1
        for x in outs:
            if type(x) is Ghost:
                settle(x)
            elif isinstance(x, Tensor) and x.grad_fn is not None:  # backward may fail there
                x.grad_fn.register_prehook(partial(_come_to, self.back, n))
        self._meet(n, "out", outs)
        return out

    def _begin(self, given: Sequence[Any]) -> None:
        for x in given:
            if isinstance(x, Tensor) and type(x) is not Ghost and x.grad_fn is not None:
                # Where a layer writes to a view, gradients go on to the whole, and not to the view.
                if x._base is not None and x._base.grad_fn is not None:
                    x = x._base
                edge = get_gradient_edge(x)
                self.begins[edge.node, edge.output_nr] = edge, x

    def _compare_results(self, n: int, ins: Sequence[Any], out: Any, outs: Sequence[Any]) -> None:
        """What other stages take a layer to return, since they have not run it."""
        plan = self.plan.calls[n]
        if len(outs) != len(plan.results):
            raise self._differs(
                f"layer {plan.name} returned {len(outs)} values, and not {len(plan.results)}"
            )
        alone = plan.structure is None and isinstance(out, Tensor)
        if not alone and not are_alike(structure(out), plan.structure):
            raise self._differs(f"layer {plan.name} returned them in other containers")
        for x, then in zip(outs, plan.results, strict=True):
            if not _stands(then, x):
                raise self._differs(
                    f"layer {plan.name} returned {_told(x)}, and {_told(then)} then. What depends "
                    "on numbers is to be a tensor"
                )
            if not isinstance(then, Same | Repeated):
                continue
            of, at = ins if type(then) is Same else outs, then.position
            if not _is_one(x, of[at]):
                what = f"its argument {at}" if of is ins else f"its result {at} twice"
                raise self._differs(
                    f"layer {plan.name} returned {what} then, and something else now. Where that "
                    "depends on numbers return a tensor of its own, x.clone()"
                )

    def _skip(
        self, xs: tuple[Any, ...], kw: dict[str, Any], n: int, plan: Called, ins: Sequence[Any]
    ) -> Any:
        self.active = False
        route = self.route
        if n >= route.last and not (route.ends or self.over) and plan.chunk > self.chunk:
            self.over = True
            self._give()
            if not self.plan.to_the_end:
                raise Done
        if plan.inside and (running := context.current()) is not None:
            running.layer_calls += plan.inside
        for p in plan.writes:
            self._written(ins[p], plan.chunk)
        around = containers((xs, kw)) if plan.returns_containers else []
        outs: list[Any] = []
        for x in plan.results:
            if type(x) is Spec:
                outs.append(ghost_like(x.form, x.device, plan.chunk, x.needs_grad))
            elif type(x) is Same:
                outs.append(ins[x.position])
            elif type(x) is Repeated:
                outs.append(outs[x.position])
            else:
                outs.append(around[x.position] if type(x) is SameContainer else x)
        if (n, "out") in route.places:  # what was given has been met
            self._meet(n, "out", outs)
        out = self.skipped[n] = outs[0] if plan.structure is None else plan.rebuild(outs)
        return out

    def _written(self, x: Any, chunk: int) -> None:
        """An argument that the layer, which does not run here, would have written to."""
        if isinstance(x, Tensor) and type(x) is not Ghost and chunk < self.chunk:
            was = ghost_like(form_of(x), x.device, chunk, x.requires_grad)
            become(x, was)
            self.overwrote(x, was)

    def hooked(self, x: Ghost) -> None:
        """Where hooks may be given was found in the rehearsal."""

    def _sort_hooks(self, own: bool = False) -> None:
        """Keep those that received values have now, or forget those that the loss has given to them
        outside of layers: the stage that has made them has them, too, and their whole gradient."""
        for x, kept in self.taken:
            hooks: Any = None if type(x) is Ghost else x._backward_hooks
            if hooks and own:
                kept.update(hooks)
            elif hooks:
                for key in hooks.keys() - kept:
                    del hooks[key]

    # --- values that come and go ---

    def _meet(self, n: int, side: str, leaves: Sequence[Any]) -> None:
        for label in self.route.places.get((n, side), ()):
            self._goes(label, leaves[label[2]] if label[2] < len(leaves) else None)

    def made(self, func: Any, out: Any) -> None:
        """A function of tensors has given something."""
        for label, x in () if self.within >= 0 or self.over else self.between.labels(func, out):
            if label in self.route.places.get(label[:2], ()):
                self._goes(label, x)

    def _goes(self, label: Label, x: Any) -> None:
        if label in self.wanted:
            if type(x) is not Ghost:
                self._check_made(label, x)
            self._take(label, x)
        if label in self.route.gives and label not in self.outs:
            if type(x) is Ghost:
                self._make(x)  # given to another stage's layer as it is: no operation has used it
            if not isinstance(x, Tensor) or type(x) is Ghost:
                raise self._differs(f"{self._at(label)} has no value to send ({label})")
            self._fits(label, self.route.gives[label], x)
            self.outs[label] = x

    def _at(self, label: Label) -> str:
        if label[0] < 0:
            return "what comes before the first layer"
        name = f"layer {self.plan.calls[label[0]].name}"
        return f"what comes behind {name}" if label[1].startswith(MADE) else name

    def _fits(self, label: Label, spec: Spec, x: Tensor) -> None:
        if tuple(x.shape) != spec.shape or x.dtype != spec.dtype:
            raise self._differs(
                f"{self._at(label)} has a value of shape {list(x.shape)} and {x.dtype}, and not of "
                f"{list(spec.shape)} and {spec.dtype}"
            )
        if x.requires_grad and not spec.needs_grad:
            raise self._differs(f"a value at {self._at(label)} has a gradient")

    def _check_made(self, label: Label, x: Any) -> None:
        """A value that comes, and was made here already of another that has come (``norm(x)``
        beside ``x``)."""
        if not isinstance(x, Tensor):
            raise self._differs(f"{self._at(label)} was not given what it was then")
        self._fits(label, self.wanted[label][1], x)

    def _activate(self) -> None:
        """Leaves outside layers come."""
        self.active, uses = True, self.route.uses
        if not uses:
            return
        with _recording():
            for i, leaf in self.enter_roots(uses).items():
                if i not in uses:
                    continue
                if self.next == 0:
                    self.roots[i] = leaf
                else:
                    self._replace(self.roots[i], leaf)
        self.entered = uses

    def _replace(self, ghost: Ghost, leaf: Tensor) -> None:
        new = leaf.view_as(leaf) if type(leaf) is Tensor else leaf.detach()  # stored in low bits
        new.__dict__.update({k: x for k, x in leaf.__dict__.items() if k.startswith("_zfunc")})
        _become_own(ghost, new)

    def _take(self, label: Label, x: Tensor) -> None:
        """What has been sent comes as soon as it is met: code before the first layer of this chunk
        may want to keep it, for a region that backward runs again. Hooks of what was made here, and
        its gradient, are those of the stage that has sent it."""
        _, spec = self.wanted.pop(label)
        with _recording():
            came = self.receive(label, spec).detach()
            if came.stride() != spec.stride and came.numel() > 1:
                came = _as_sent(came, spec)
            if type(x) is not Ghost and on_host(x) and not _is_near(x.detach(), came):
                raise self._differs(f"{self._at(label)} was given other numbers")
            if spec.needs_grad:
                came.requires_grad_()
                self.taken.append((x, set()))
            self.inputs[label] = came
            # What autograd has kept already stays, and its gradient goes the way of what it is of.
            if type(x) is Ghost or holders(x) == 1:
                become(x, _unleaved(came))

    def _come_again(self, n: int, leaves: Sequence[Any]) -> None:
        """In a region that backward runs again values come again, where a layer meets them."""
        for label in self.route.places.get((n, "in"), ()):
            x = leaves[label[2]] if label[2] < len(leaves) else None
            if label in self.inputs and type(x) is Ghost:
                become(x, _unleaved(self.inputs[label]))
