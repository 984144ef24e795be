"""``value_and_grad`` and ``evaluate``: where parameters enter and gradients leave.

Both run on ``torch.autograd.grad`` over plain tensors, not on ``torch.func.grad``:
that keeps the graph for a second derivative nobody asked for (twice the peak
memory) and forbids the saved-tensor hooks that ZeRO-3 lives on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from typing import Any

import optree
import torch
from torch import Tensor

from zfunc.buffers.readings import sent
from zfunc.engine import context
from zfunc.engine.communication import communication
from zfunc.engine.context import Context
from zfunc.engine.hooks import Collector, Finish, Gradients
from zfunc.engine.passes import Pass, enter
from zfunc.engine.plans import PassPlan, there
from zfunc.engine.primitives import Mean, Ref
from zfunc.engine.products import SHORT, products
from zfunc.engine.recomputation import taken
from zfunc.engine.sources import Source
from zfunc.engine.unit_runs import dense
from zfunc.engine.versions import check, versions
from zfunc.errors import CompositionError, PlacementError
from zfunc.layout.cutting import make_layout
from zfunc.layout.freezing import all_frozen, check_trainable, frozen_among, is_frozen
from zfunc.layout.layout import Layout
from zfunc.layout.readable import Readable
from zfunc.layout.replicated import Replicated
from zfunc.ranks.comm import Group
from zfunc.ranks.keys import scope
from zfunc.trees.nodes import (
    NAMESPACE,
    PLACED,
    Box,
    Placed,
    Tree,
    boxes_in,
    held_in,
    leaves_in,
    opened,
)
from zfunc.trees.tree import check_alive, dotted

__all__ = [
    "check_depends",
    "checked",
    "computed_in",
    "detached",
    "evaluate",
    "is_evaluated",
    "new_pass",
    "randomness",
    "seeded",
    "split_aux",
    "value_and_grad",
]

EVALUATED = "_zfunc_evaluated"
BESIDE = "plain."  # what the names of plain tensors beside placed trees begin with


def value_and_grad(
    loss_fn: Callable[..., Any], has_aux: bool = False
) -> Callable[..., tuple[Any, Any]]:
    """A function that returns the loss and its gradients.

    Args:
        loss_fn: ``loss_fn(params, *args)`` -> a 0-d floating-point tensor or a
            :class:`Mean`; with ``has_aux`` a pair of that and anything else.
        has_aux: whether ``loss_fn`` returns such a pair.

    Returns:
        ``run(params, *args, **kwargs) -> (loss, grads)``, or ``((loss, aux), grads)``.
        ``grads`` has the structure of ``params``: zeros for unused leaves, ``None``
        for frozen ones. Under data parallelism both are means over the ranks; ``aux``
        stays this rank's own. Placed trees among the further arguments enter
        without gradients. In a step ``params`` may hold placed trees and plain tensors
        (soft prompts, say), alike on all ranks: gradients of the latter are plain.

    Raises:
        ValueError: the loss is no 0-d floating-point tensor, or depends on no parameter; or
            under ``torch.inference_mode``.
        CompositionError: it is called inside ``torch.func`` or ``zf.evaluate``.
        PlacementError: a leaf cannot be differentiated, or the loss writes to it in place (named
            by its path).

    >>> value_and_grad(lambda p, x: (p["w"] * x).sum())({"w": torch.ones(2)}, 3.0)
    (tensor(6.), {'w': tensor([3., 3.])})
    """

    @functools.wraps(loss_fn)
    def run(params: Tree, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        check_alive(params)
        if torch.is_inference_mode_enabled():  # before torch says so of an operator, in its words
            raise ValueError(
                "value_and_grad was called under torch.inference_mode, in which nothing can be "
                "differentiated. Call the step outside of it, or under torch.no_grad."
            )
        if torch._C._functorch.maybe_current_level() is not None:
            raise CompositionError(
                "value_and_grad runs torch's backward, which torch.func (jvp, vmap, grad) cannot "
                "follow. Within them take torch.func.grad_and_value(loss_fn) in its place."
            )
        running = context.current()
        if running is not None and any(owner.evaluating for owner in running.passes):
            raise CompositionError(
                "value_and_grad was called inside zf.evaluate, within a step: its gradients would "
                "be this rank's own. Call value_and_grad in the step itself."
            )
        asked = Gradients(loss_fn, has_aux, params, args, kwargs)
        if running is None or running.passes:
            (loss, aux), grads = _local(asked, _alone)
        else:
            (loss, aux), grads = _in_step(running, asked)
        return ((loss, aux) if has_aux else loss), grads

    return run


def _alone(loss: Any) -> tuple[Tensor, Tensor | None, Callable[[], Tensor]]:
    value = loss.value() if isinstance(loss, Mean) else loss
    return checked(value), None, lambda: value.detach()


def _across(group: Group) -> Finish:
    """How a loss is averaged over ranks: what to differentiate, its seed, and the mean."""

    def finish(loss: Any) -> tuple[Tensor, Tensor | None, Callable[[], Tensor]]:
        if group.size == 1:
            return _alone(loss)
        if isinstance(loss, Mean):
            total = checked(loss.total)
            count = sent(loss.count, total, torch.float64)
            sums = torch.stack([total.detach().double(), count])
            sums = group.all_reduce(sums, label="loss").wait()
            value = (sums[0] / sums[1]).to(total.dtype)
            return total, (1.0 / sums[1]).to(total.dtype), lambda: value
        value = checked(loss)
        handle = group.all_reduce(value.detach().clone(), label="loss")
        seed = torch.full_like(value, 1.0 / group.size)
        return value, seed, lambda: handle.wait() / group.size

    return finish


def checked(loss: Any) -> Tensor:
    """The loss, if it is a 0-d floating-point tensor.

    Raises:
        ValueError: it is not.
    """
    if not isinstance(loss, Tensor) or loss.ndim or not loss.is_floating_point():
        found = (
            f"a {loss.dtype} tensor of shape {tuple(loss.shape)}"
            if isinstance(loss, Tensor)
            else f"a {type(loss).__name__}"
        )
        raise ValueError(
            f"the loss function returned {found}; expected a 0-d floating-point tensor or "
            "zf.Mean(total, count). Take the mean, or pass has_aux=True if it returns a pair."
        )
    return loss


def split_aux(out: Any, has_aux: bool) -> tuple[Any, Any]:
    if not has_aux:
        return out, None
    if not (isinstance(out, tuple) and len(out) == 2):
        raise ValueError(
            f"with has_aux=True the loss function must return (loss, aux), not a "
            f"{type(out).__name__}"
        )
    return out


def _local(asked: Gradients, finish: Finish) -> tuple[tuple[Tensor, Any], Tree]:
    """Differentiate plain parameters on this rank; nested calls keep the graph."""
    params, outside = opened(asked.params), context.current() is None
    boxes = boxes_in(asked.params) if outside else ()
    if any(isinstance(x, Placed) for x in _nodes(params)) or any(
        x.placed_by and x.layout.everyone.size > 1 for x in boxes
    ):
        raise PlacementError(
            "value_and_grad met placed parameters outside a step, where nobody says how their "
            "gradients are averaged. Call it inside a function wrapped by the transform that "
            "placed them (shard, ...), or take plain ones by zf.full."
        )
    keys, leaves, spec = optree.tree_flatten_with_path(
        params, none_is_leaf=True, namespace=NAMESPACE
    )
    for key, leaf in zip(keys, leaves, strict=True):
        _check_differentiable(dotted(*key), leaf)
    nested = torch.is_grad_enabled() and any(_belongs_to_a_graph(x) for x in leaves)
    still = frozen_among(leaves, spec)
    live = [x is not None and not f for x, f in zip(leaves, still, strict=True)]
    if any(still) and not any(live):
        raise all_frozen([dotted(*key) or "params" for key in keys])
    with torch.enable_grad():
        inputs = [
            (x.view_as(x) if nested and x.requires_grad else x.detach().requires_grad_())
            if on
            else x
            for x, on in zip(leaves, live, strict=True)
        ]
        before = versions(inputs)
        token = _INSIDE.set(True)
        try:
            with taken():
                out = asked.loss_fn(
                    optree.tree_unflatten(spec, inputs), *asked.args, **asked.kwargs
                )
        finally:
            _INSIDE.reset(token)
        check(inputs, before, lambda i: f"parameter {dotted(*keys[i])}")
        loss, aux = split_aux(out, asked.has_aux)
        loss, seed, value = finish(loss)
        seed = seeded(seed, asked.seed, loss)
    check_depends(loss)
    wrt = [x for x, on in zip(inputs, live, strict=True) if on]
    grads = iter(
        torch.autograd.grad(loss, wrt, seed, create_graph=nested, allow_unused=True) if wrt else ()
    )
    filled = [
        (torch.zeros_like(x) if (g := next(grads)) is None else dense(g)) if on else None
        for x, on in zip(leaves, live, strict=True)
    ]
    mean = loss if nested and seed is None else value()
    return (mean, detached(aux) if not nested else aux), optree.tree_unflatten(spec, filled)


def seeded(seed: Tensor | None, factor: Tensor | None, loss: Tensor) -> Tensor | None:
    """The seed of backward times ``factor``."""
    if factor is None:
        return seed
    factor = sent(factor, loss)
    return factor if seed is None else seed * factor


_INSIDE: ContextVar[bool] = ContextVar("zfunc_inside_loss", default=False)


def _belongs_to_a_graph(x: Tensor | None) -> bool:
    """Whether somebody may differentiate once more; of leaves only a surrounding loss does."""
    return x is not None and x.requires_grad and (_INSIDE.get() or x.grad_fn is not None)


def _nodes(params: Tree) -> list[Any]:
    return leaves_in(params, PLACED)


def _check_differentiable(path: str, leaf: Any) -> None:
    if leaf is None:
        return
    check_trainable(path, leaf)
    if leaf.is_inference():
        raise PlacementError(
            f"parameter {path or 'params'} was made under torch.inference_mode, and cannot be "
            "differentiated. `step.place(state)` outside of that mode copies it; or clone it."
        )


def check_depends(loss: Tensor) -> None:
    if not loss.requires_grad:
        raise ValueError(
            "the loss depends on none of the parameters given to value_and_grad. Does the loss "
            "function use its first argument, and not a params tree from outside?"
        )


def detached(aux: Any) -> Any:
    return optree.tree_map(
        lambda x: x.detach() if isinstance(x, Tensor) else x, aux, namespace=NAMESPACE
    )


def _in_step(running: Context, asked: Gradients) -> tuple[tuple[Tensor, Any], Tree]:
    running.asked += 1
    call = functools.partial(_one_pass, running)
    for transform in running.transforms:
        call = transform.differentiate(call, running)
    return call(asked)


def _one_pass(running: Context, asked: Gradients) -> tuple[tuple[Tensor, Any], Tree]:
    call, running.differentiated = running.differentiated, running.differentiated + 1
    owner = new_pass(running, asked.collector)
    finish = asked.finish or _across(communication(running).everyone)
    with randomness(running, call):
        if running.by_unit:
            return _by_unit(running, owner, call, asked, finish)
        running.passes.append(owner)
        try:
            out = _local(asked, finish)
            owner.finish()
            return out
        finally:
            running.passes.pop()
            owner.close()


def new_pass(running: Context, collector: Collector | None = None) -> Pass:
    over = communication(running)
    leaving: list[Any] = [*running.leaving]
    if collector is not None:
        leaving.append(collector)
    leaving.sort(key=lambda t: -t.position)
    first = bool(leaving) and leaving[0] is collector  # nothing becomes of gradients before
    return Pass(
        before=[t.enter for t in running.entering if t.before_gather],
        after=[t.enter for t in running.entering if not t.before_gather],
        leave=[t.leave for t in leaving],
        plan=PassPlan(prefetch=over.prefetch, room=over.room),
        running=running,
        waiting={} if collector is None else collector.waiting,
        holding=collector is not None and collector.holding,
        take=collector.take if collector is not None and first else None,
        adds=collector is not None and first and (collector.holding or over.everyone.size == 1),
        spill=over.spill,
    )


def randomness(running: Context, call: int) -> AbstractContextManager[Any]:
    """The scope of one loss: torch's random functions are decided by the step's key."""
    running.layer_calls = 0
    if running.key is None:
        return nullcontext()
    rank = communication(running).everyone.rank
    scopes: Callable[[int], scope] | None = running.notes.get(("scopes", rank))
    if scopes is None:
        from zfunc.engine.keys import key_of  # few states have a key

        if (key := key_of(running)) is None:
            return nullcontext()
        scopes = running.notes["scopes", rank] = scope.folded(key)(rank).inner()
    running.layer_scope = scopes(2 * call + 1).inner()
    return scopes(2 * call)


def _by_unit(
    running: Context, owner: Pass, call: int, asked: Gradients, finish: Finish
) -> tuple[tuple[Tensor, Any], Tree]:
    """Differentiate parameters that enter and leave unit by unit."""
    rebuild, sources = _sources(running, owner, asked.params)
    if not any(source.layout.trains for source in sources):
        raise all_frozen([slot.path for source in sources for slot in source.layout.present])
    plan = ("plan", "grad", call)
    owner.memory, owner.place = running.memo, ("script", call)
    owner.plan.order = running.memo.get(plan) or there([source.layout for source in sources])
    for transform in running.transforms:
        owner.plan.order = transform.foresee(owner.plan.order, owner)
    running.passes.append(owner)
    try:
        if not owner.holding or any(source.sharded and source.cut for source in sources):
            over = communication(running)
            owner.agree(over.everyone, over.group)
        with torch.enable_grad():
            tree = rebuild([source.view() for source in sources])
            args, kwargs = _entered_arguments((asked.args, asked.kwargs))
            with taken():
                loss, aux = split_aux(asked.loss_fn(tree, *args, **kwargs), asked.has_aux)
            del tree, args, kwargs
            owner.computed()
            loss, seed, value = finish(loss)
            seed = seeded(seed, asked.seed, loss)
        if loss.requires_grad or not owner.thinned:
            check_depends(loss)
            owner.go_back([loss], [seed])
        owner.finish()
        running.memo[plan] = tuple(owner.plan.events)
        running.memo["most under way", call] = owner.plan.most_ahead, owner.most_in_flight
        running.memo["sources", call] = [(source.layout, source.cut) for source in sources]
        holding, results = owner.holding, owner.results
        grads = None if holding else rebuild([source.gradients(results) for source in sources])
        return (value(), detached(aux)), grads
    finally:
        running.passes.pop()
        owner.close()


def _sources(
    running: Context, owner: Pass, params: Tree
) -> tuple[Callable[[list[Any]], Tree], list[Source]]:
    """The placed nodes of a params tree, or a plain tree as a whole, each one source."""
    kinds, over = Readable | Replicated, communication(running)
    if not any(isinstance(node, kinds) for node in _nodes(params)):
        layout, cut = over.layout_for(params)
        source = owner.add(layout, params, over.group, cut=cut, differentiated=True)
        return lambda new: opened(new[0]), [source]
    nodes, spec = optree.tree_flatten(params, none_is_leaf=True, namespace=PLACED)
    placed = [i for i, node in enumerate(nodes) if isinstance(node, kinds)]
    paths = spec.paths() if running.reached is not None or len(placed) < len(nodes) else []
    sources = [
        owner.add(
            *(nodes[i].layout, nodes[i], over.group),
            cut=_is_cut(running, nodes[i]),
            differentiated=True,
            name_of=str if running.reached is None else functools.partial(dotted, *paths[i]),
        )
        for i in placed
    ]
    known = set(placed)
    plain = [i for i, node in enumerate(nodes) if node is not None and i not in known]
    if plain:
        beside = {dotted(BESIDE[:-1], *paths[i]): nodes[i] for i in plain}
        source = owner.add(
            _layout_beside(running, beside),
            *(beside, over.group),
            cut=False,
            differentiated=True,
            spills=False,
            name_of=lambda path: path.removeprefix(BESIDE),
        )
        sources.append(source)

    def rebuild(new: list[Any]) -> Tree:
        out: list[Any] = [None] * len(nodes)
        for i, tree in zip(placed, new, strict=False):
            out[i] = tree
        if plain:
            for i, name in zip(plain, beside, strict=True):
                out[i] = new[-1][name]
        return optree.tree_unflatten(spec, out)

    return rebuild, sources


def _is_cut(running: Context, node: Any) -> bool:
    """Whether the gradients of a node are; it may be on disk and whole on every rank."""
    if isinstance(node, Replicated):
        return communication(running).layout_for(node)[1]
    return bool(node.layout.axis != ())


def _layout_beside(running: Context, beside: dict[str, Any]) -> Layout:
    """How plain tensors beside placed trees lie: whole on every rank, which has the same ones.

    Raises:
        PlacementError: a leaf is no floating-point tensor, or, when they are met first, ranks
            hold different ones; on all ranks.
    """
    for name, leaf in beside.items():
        _check_differentiable(name.removeprefix(BESIDE), leaf)
    memo = running.memo.setdefault("beside", {})
    key = tuple((name, x.shape, x.dtype, is_frozen(x)) for name, x in beside.items())
    if key not in memo:
        from zfunc.engine.agreement import check_same  # few steps have such tensors

        over = communication(running)
        check_same(over.everyone, {"plain params beside placed ones": beside})
        memo[key] = make_layout(beside, world=over.group.size)
    layout: Layout = memo[key]
    return layout


def _entered_arguments(tree: Any) -> Any:
    """Placed trees enter; layers that have not entered yet stay references."""
    return optree.tree_map(
        enter,
        tree,
        is_leaf=lambda x: isinstance(x, Placed | Box | Ref),
        none_is_leaf=True,
        namespace=NAMESPACE,
    )


def evaluate(fn: Callable[..., Any]) -> Callable[..., Any]:
    """``fn(params, *args)`` without gradients, on plain or on placed trees.

    Works inside a step and outside one. What ``fn`` returns is this rank's own
    (``zf.pmean`` averages it). A collective where a tree is placed.

    >>> evaluate(lambda p, x: p["w"] * x)({"w": torch.ones(2)}, 3.0)
    tensor([3., 3.])
    """

    @functools.wraps(fn)
    def run(params: Tree, *args: Any, **kwargs: Any) -> Any:
        check_alive(params)
        running = context.current() or Context()
        call = functools.partial(_evaluated, running)
        for transform in running.transforms:
            call = transform.evaluate(call, running)
        return call(fn, params, args, kwargs)

    run.__dict__[EVALUATED] = True
    return run


def is_evaluated(fn: Callable[..., Any]) -> bool:
    """Whether a function is one that :func:`evaluate` made."""
    return EVALUATED in getattr(fn, "__dict__", {})


def _evaluated(
    running: Context, fn: Callable[..., Any], params: Tree, args: Any, kwargs: Any
) -> Any:
    owner = new_pass(running)
    owner.evaluating = bool(running.transforms)
    if running.transforms:
        owner.memory, owner.place = running.memo, ("script", "evaluate", running.evaluated)
        running.evaluated += 1
    running.passes.append(owner)
    token = context.push(running)
    try:
        with torch.no_grad(), products(computed_in(params)):
            tree, args, kwargs = _entered_arguments((params, args, kwargs))
            trees = enumerate(source.layout for source in owner.sources)
            owner.plan.order = [(k, i) for k, of in trees for i in range(len(of.units))]
            out = fn(tree, *args, **kwargs)
            owner.computed()
            owner.finish()
            return out
    finally:
        running.passes.pop()
        owner.close()
        context.pop(token)


def computed_in(params: Tree) -> torch.dtype | None:
    """The 16-bit dtype of parameters that ``precision`` placed, or None."""
    dtypes = {x.dtype for x in held_in(params) if x.is_floating_point()}
    return dtypes.pop() if len(dtypes) == 1 and dtypes <= SHORT else None
