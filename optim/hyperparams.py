"""Numbers of an optimizer that are in its state, where a run can see and change them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zfunc.optim.base import GradientTransformation
from zfunc.optim.rates import plain, started

__all__ = ["InjectHyperparamsState", "inject_hyperparams"]

Tree = Any
ALONE = {"mask", "moments"}  # of what makes an optimizer: they decide what is built


class InjectHyperparamsState(NamedTuple):
    """``count`` updates so far (0-d int64), the numbers by name (0-d float64, on the CPU), and the
    state of the optimizer."""

    count: Tensor  # type: ignore[assignment]  # optax's name; `tuple.count` is not missed
    hyperparams: dict[str, Tensor]
    inner_state: Any


def inject_hyperparams(
    factory: Callable[..., GradientTransformation], static_args: str | Iterable[str] = ()
) -> Callable[..., GradientTransformation]:
    """The optimizer's maker, of optimizers whose numbers are in ``state.hyperparams``.

    A number stays until somebody puts another one there; a schedule is looked up before each
    update, and what it gave can be read there.

    Args:
        factory: as :func:`zfunc.optim.adamw`; any function that makes a transformation.
        static_args: names of arguments that are left alone: numbers that decide what is built, and
            functions that are no schedules. A bool is left alone anyway, as are a ``mask`` and the
            ``moments`` of AdamW.

    Raises:
        ValueError: ``static_args`` names what ``factory`` does not take.

    >>> from zfunc import optim
    >>> tx = optim.inject_hyperparams(optim.sgd)(optim.linear(1.0, 0.0, 4), momentum=0.9)
    >>> state = tx.init(torch.zeros(1))
    >>> updates, state = tx.update(torch.ones(1), state)
    >>> updates, state.hyperparams["lr"].item()
    (tensor([-1.]), 1.0)
    >>> state.hyperparams["momentum"] = torch.tensor(0.0)
    >>> tx.update(torch.ones(1), state)[0]
    tensor([-0.7500])
    """
    static = {static_args} if isinstance(static_args, str) else {*static_args}
    signature = inspect.signature(factory)
    if unknown := sorted(static - {*signature.parameters}):
        raise ValueError(
            f"static_args names {', '.join(unknown)}; {factory.__name__} takes "
            f"{', '.join(signature.parameters)}."
        )
    static |= ALONE

    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> GradientTransformation:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return _injected(factory, bound, static)

    return make


def _injected(
    factory: Callable[..., GradientTransformation],
    bound: inspect.BoundArguments,
    static: set[str],
) -> GradientTransformation:
    given = {name: x for name, x in bound.arguments.items() if name not in static}
    schedules = {name: x for name, x in given.items() if callable(x)}
    numbers = {
        name: x
        for name, x in given.items()
        if isinstance(x, int | float | Tensor) and not isinstance(x, bool)
    }

    def values(count: Tensor, numbers: dict[str, Any]) -> dict[str, Tensor]:
        """The numbers of one update; new tensors, since memory of the old ones may be donated."""
        found = {name: _exact(x) for name, x in numbers.items()}
        return found | {name: f(count).double() for name, f in schedules.items()}

    def built(hyperparams: dict[str, Any]) -> GradientTransformation:
        found = {name: plain(x) for name, x in hyperparams.items()}
        call = inspect.BoundArguments(bound.signature, {**bound.arguments, **found})
        return factory(*call.args, **call.kwargs)

    def init(params: Tree) -> InjectHyperparamsState:
        count = started()
        found = values(count, numbers)
        return InjectHyperparamsState(count, found, built(found).init(params))

    def run(
        grads: Tree, state: InjectHyperparamsState, params: Tree, additive: bool
    ) -> tuple[Tree, InjectHyperparamsState]:
        now = values(state.count, {name: state.hyperparams[name] for name in numbers})
        tx = built(now)
        step = tx.additive if additive else tx.update
        updates, inner = step(grads, state.inner_state, params)
        return updates, InjectHyperparamsState(state.count + 1, now, inner)

    first = built(values(started(), numbers))
    return GradientTransformation(
        init,
        functools.partial(run, additive=False),
        additive=functools.partial(run, additive=True),
        checked=True,
        unfit=first.unfit,
    )


def _exact(x: Any) -> Tensor:
    return torch.as_tensor(x, dtype=torch.float64).detach().clone()
