"""What an optimizer of torch has learned, as the state of one of ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import optree
import torch
from torch import Tensor

from zfunc.errors import CheckpointError
from zfunc.optim.adam_8bit import Adam8State
from zfunc.optim.adaptive import AdamState
from zfunc.optim.base import GradientTransformation
from zfunc.optim.descent import SgdState
from zfunc.optim.factored import FactoredState
from zfunc.optim.muon import MuonState
from zfunc.optim.scaling import ScaleByRmsState, ScaleByRssState, ScaleByStddevState, TraceState
from zfunc.optim.schedules import ScheduleState
from zfunc.optim.sign_descent import LionState
from zfunc.optim.trust_ratios import LambState
from zfunc.trees import tree
from zfunc.trees.nodes import NAMESPACE

__all__ = ["from_torch"]

Tree = Any
MOMENTUM = "momentum_buffer"
RATE = "lr"  # of a parameter's group
# Which entry of torch's is which field of ours.
FIELDS: dict[type, dict[str, str]] = {
    AdamState: {"mu": "exp_avg", "nu": "exp_avg_sq"},
    SgdState: {"trace": MOMENTUM},
    TraceState: {"trace": MOMENTUM},
    MuonState: {"mu": MOMENTUM},
    LambState: {"mu": "exp_avg", "nu": "exp_avg_sq"},
    LionState: {"mu": "exp_avg"},
    ScaleByRmsState: {"nu": "square_avg"},
    ScaleByStddevState: {"mu": "grad_avg", "nu": "square_avg"},
    ScaleByRssState: {"sum_of_squares": "sum"},
    ScheduleState: {},
}
OWN = (Adam8State, FactoredState)  # in no form that torch has


def from_torch(
    tx: GradientTransformation,
    params: Tree,
    state_dict: Mapping[str, Any],
    names: Sequence[str] | None = None,
    count: int | None = None,
) -> Any:
    """The state of ``tx`` with the moments and the count of a ``torch.optim`` optimizer.

    A run goes on where torch's stopped: ``step.place`` of
    ``dataclasses.replace(zf.TrainState.create(params, tx), opt_state=...)``.

    Args:
        tx: made for the same rule, as ``optim.adamw`` for ``torch.optim.AdamW``.
        params: the full parameters, a plain tree.
        state_dict: that of the optimizer.
        names: paths of the leaves in the order of torch's parameters, as
            ``[name for name, _ in model.named_parameters()]``. By default those that torch has
            kept, where its optimizer was given ``model.named_parameters()``.
        count: how many updates torch has made, from which a schedule goes on. By default what its
            state says; those of SGD and Muon do not say it, and a schedule begins anew.

    Returns:
        A plain state, of new tensors in the parameters' dtypes. The momentum of ``rmsprop`` lies
        behind the rate, and torch's before it: it is multiplied by the rate that torch has now.

    Raises:
        CheckpointError: names that are no leaves, shapes that differ, moments that are missing or
            that ``tx`` has no place for, leaves that have taken unequal numbers of steps.

    >>> from zfunc import optim
    >>> weight = torch.nn.Parameter(torch.zeros(2))
    >>> theirs = torch.optim.AdamW([("w", weight)])
    >>> weight.grad = torch.tensor([1.0, 2.0])
    >>> theirs.step()
    >>> tx, params = optim.adamw(1e-3), {"w": weight.detach()}
    >>> from_torch(tx, params, theirs.state_dict()).mu
    {'w': tensor([0.1000, 0.2000])}
    """
    known = _by_path(state_dict, names, tree.flatten_names(params))
    said = _count(known) if count is None else torch.tensor(count, dtype=torch.int64)
    taken = {"step"}

    def filled(node: Any, rated: bool = False) -> Any:
        if _has_trace_behind_its_rate(node):
            return (*map(filled, node[:-1]), filled(node[-1], rated=True))
        if isinstance(node, OWN):
            raise CheckpointError(
                f"moments of a {type(node).__name__} are in a form that torch has not: give the "
                "optimizer that keeps them as torch does, or start with new ones."
            )
        fields = FIELDS.get(type(node))
        if fields is None:
            return node
        new = {
            field: _moments(old, known, entry, rated)
            for field, entry in fields.items()
            if (old := getattr(node, field)) is not None
        }
        taken.update(fields[field] for field in new)
        if said is not None and "count" in node._fields:
            new["count"] = said.clone()
        return node._replace(**new)

    state = optree.tree_map(
        filled,
        tx.init(params),
        is_leaf=lambda x: type(x) in FIELDS or isinstance(x, OWN) or _has_trace_behind_its_rate(x),
        none_is_leaf=True,
        namespace=NAMESPACE,
    )
    for path, entry in known.items():
        if left := [k for k, x in entry.items() if isinstance(x, Tensor) and k not in taken]:
            raise CheckpointError(
                f"the optimizer keeps {left[0]} of {path}, for which this transformation has no "
                "place: its rule is another one (its momentum, centered, amsgrad?)."
            )
    return state


def _has_trace_behind_its_rate(node: Any) -> bool:
    """Whether this is the state of ``rmsprop`` with momentum, whose rate is in the trace."""
    kinds = [*map(type, node)] if type(node) is tuple else []
    return kinds[-2:] == [ScheduleState, TraceState] and len(kinds) > 2


def _by_path(
    state_dict: Mapping[str, Any], names: Sequence[str] | None, leaves: Mapping[str, Tensor]
) -> dict[str, Mapping[str, Any]]:
    """Torch's entries by leaf path."""
    groups = state_dict["param_groups"]
    order = [i for group in groups for i in group["params"]]
    if names is None:
        kept = [name for group in groups for name in group.get("param_names", [])]
        if len(kept) != len(order):
            raise CheckpointError(
                "this optimizer state does not say which parameter is which. Give names=[name for "
                "name, _ in model.named_parameters()], in the order that the optimizer was given."
            )
        names = kept
    if len(names) != len(order):
        raise CheckpointError(
            f"{len(names)} names were given for the {len(order)} parameters of the optimizer."
        )
    if unknown := [name for name in names if name not in leaves]:
        raise CheckpointError(
            f"the params have no leaf {unknown[0]!r}. Their paths are "
            f"{', '.join(map(repr, [*leaves][:5]))}, ...: give names in these words."
        )
    entries = {name: state_dict["state"].get(i, {}) for name, i in zip(names, order, strict=True)}
    rates = [float(group[RATE]) for group in groups for _ in group["params"]]
    for name, entry in entries.items():
        for key, x in entry.items():
            if isinstance(x, Tensor) and key != "step" and x.shape != leaves[name].shape:
                raise CheckpointError(
                    f"{name} has shape {tuple(leaves[name].shape)}, and its {key} in the optimizer "
                    f"{tuple(x.shape)}: this is the state of another model, or names are in "
                    "another order."
                )
    return {
        name: {**entry, RATE: rate}
        for (name, entry), rate in zip(entries.items(), rates, strict=True)
    }


def _count(known: Mapping[str, Mapping[str, Any]]) -> Tensor | None:
    """How many steps all leaves have taken, if torch counts them."""
    steps = {name: int(entry["step"]) for name, entry in known.items() if "step" in entry}
    if len({*steps.values()}) > 1:
        least, most = min(steps, key=steps.__getitem__), max(steps, key=steps.__getitem__)
        raise CheckpointError(
            f"{least} has taken {steps[least]} steps and {most} {steps[most]}: one count is kept "
            "for all. Give those that were not trained all the time a label of their own."
        )
    return torch.tensor(next(iter(steps.values())), dtype=torch.int64) if steps else None


def _moments(
    old: Tree, known: Mapping[str, Mapping[str, Any]], entry: str, rated: bool = False
) -> Tree:
    def one(path: str, x: Tensor) -> Tensor:
        found = known.get(path, {}).get(entry)
        if found is None:
            raise CheckpointError(
                f"the optimizer's state has no {entry} of {path}: it is that of another rule, or "
                "was saved before the first step, or this leaf was not trained (then freeze it)."
            )
        new = found.detach().to(x.device, x.dtype, copy=True)
        return new.mul_(-known[path][RATE]) if rated else new

    return tree.map_leaves(one, old)
