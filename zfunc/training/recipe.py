"""The ready-made training step; a hand-written one uses the same primitives."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import optree
from torch import Tensor

from zfunc.engine import context
from zfunc.engine.communication import communication
from zfunc.engine.context import Context
from zfunc.engine.differentiation import value_and_grad
from zfunc.engine.state import check_optimizer
from zfunc.engine.step import Step
from zfunc.optim import Moved, apply_updates
from zfunc.optim.paces import check_fit, held
from zfunc.ranks import keys
from zfunc.ranks.collectives import mean_over
from zfunc.ranks.comm import Group
from zfunc.training.optimizer_states import foreign, same_kind, told
from zfunc.trees import tree

__all__ = ["train_step"]


def train_step(
    loss_fn: Callable[..., Any], tx: Any, has_aux: bool = False, skip_unused: bool = False
) -> Step:
    """The ready-made pure step ``(state, batch) -> (state, metrics)``.

    Args:
        loss_fn: ``loss_fn(params, batch)`` or ``loss_fn(params, batch, key)``, ``key``
            being a random key of this step and rank. If it has a parameter named
            ``buffers`` it gets the state's and returns ``(loss, new_buffers)``, with
            ``has_aux`` ``(loss, (new_buffers, aux))``.
        tx: the optimizer, a ``GradientTransformation``.
        has_aux: whether the loss comes with a dict of further metrics.
        skip_unused: whether a leaf of which no rank and no microbatch has used anything rests: it
            keeps its value and its moments, and its own count of updates, as a parameter whose
            ``grad`` is ``None`` does in ``torch.optim``. Otherwise its gradient is zero: moments
            fade, and weight decay acts. The ranks tell each other in one small exchange a step.
            How many updates each leaf has missed lies in ``state.aux["skip_unused"]``.

    Returns:
        A :class:`Step` on :class:`TrainState`. ``metrics`` holds 0-d tensors: ``loss``
        and those of aux (means over the ranks), and ``grad_norm``.

    Raises:
        TypeError: ``tx`` is no ``GradientTransformation``.
        CompositionError: ``skip_unused`` with ``lamb``, ``skip_nonfinite`` or a transformation of
            your own, which do not know of leaves that rest. (From the step) the state was made with
            another optimizer.

    >>> import torch, zfunc as zf
    >>> tx = zf.optim.sgd(0.5)
    >>> step = train_step(lambda params, batch: (params["w"] - batch).square().sum(), tx)
    >>> state = zf.TrainState.create({"w": torch.zeros(1)}, tx)
    >>> state, metrics = step(state, torch.ones(1))
    >>> state.params["w"], metrics["loss"]
    (tensor([1.]), tensor(1.))
    """
    check_optimizer(tx, "train_step()")
    if skip_unused:
        check_fit(tx)
    parameters = inspect.signature(loss_fn).parameters
    takes_buffers = "buffers" in parameters
    takes_key = "key" in parameters or len([p for p in parameters.values() if _is_needed(p)]) > 2
    differentiate = value_and_grad(loss_fn, has_aux=has_aux or takes_buffers)

    def step(state: Any, batch: Any) -> tuple[Any, dict[str, Any]]:
        args = (_key_of_rank(state),) if takes_key else ()
        extra = {"buffers": state.buffers} if takes_buffers else {}
        out, grads = differentiate(state.params, batch, *args, **extra)
        loss, buffers, aux = _unpack(out, state.buffers, takes_buffers, has_aux)
        metrics = {"loss": loss, "grad_norm": tree.global_norm(grads), **_averaged(aux)}
        updates, opt_state = _updated(tx, grads, state.opt_state, state.params)
        if skip_unused and not isinstance(updates, Moved):
            updates = held(updates)
        state = state.replace(
            params=apply_updates(state.params, updates),
            opt_state=opt_state,
            step=state.step + 1,
            buffers=buffers,
        )
        return state, metrics

    made = Step(step, tx=tx)
    if not skip_unused:
        return made
    from zfunc.transforms.resting import SkipUnused  # loads all transforms

    return made.wrap(SkipUnused())


def _updated(tx: Any, grads: Any, opt_state: Any, params: Any) -> tuple[Any, Any]:
    """``tx.update``, which says so if the state is another optimizer's."""
    try:
        updates, after = tx.update(grads, opt_state, params)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        if (why := foreign(tx, opt_state, params)) is None:
            raise
        raise why from error
    if (parted := same_kind(opt_state, after)) is not None:
        raise told(parted)
    return updates, after


def _is_needed(parameter: inspect.Parameter) -> bool:
    positional = parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    return positional and parameter.default is parameter.empty and parameter.name != "buffers"


def _key_of_rank(state: Any) -> Tensor:
    """The loss function's own key: none of those that decide the model's dropout."""
    key = keys.fold_in(keys.fold_in(state.key, state.step), _group().rank)
    return keys.fold_in(key, -1)


def _group() -> Group:
    running = context.current()
    return communication(running or Context()).everyone


def _unpack(out: Any, buffers: Any, takes_buffers: bool, has_aux: bool) -> tuple[Any, Any, Any]:
    """Loss, new buffers (means over the ranks) and aux."""
    if not takes_buffers:
        return (out[0], buffers, out[1]) if has_aux else (out, buffers, {})
    loss, rest = out
    new, aux = rest if has_aux else (rest, {})
    return loss, _averaged(new), aux


def _averaged(values: Any) -> Any:
    """Floating-point tensors as means over the ranks, anything else as it is."""

    def average(x: Any) -> Any:
        return mean_over(group, x) if isinstance(x, Tensor) and x.is_floating_point() else x

    group = _group()
    return optree.tree_map(average, values, namespace=tree.NAMESPACE)
