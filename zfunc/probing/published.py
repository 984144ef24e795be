"""What a model's own plan for tensor parallelism says otherwise: a cross-check, and no source.

Models of transformers may have one, by names: a table from a submodule, with ``*`` for the number
of a layer, to a style. Where both speak of a submodule they should say the same of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from torch import nn

from zfunc.modules.split_plans import Role, SplitPlan

__all__ = ["said_otherwise"]

NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
COLUMNS, ROWS = frozenset({Role.COLUMN, Role.HEAD}), frozenset({Role.ROW})
STYLES: Mapping[str, frozenset[Role]] = {
    "colwise": COLUMNS,
    "colwise_gather_output": COLUMNS,
    "packed_colwise": COLUMNS,
    "rowwise": ROWS,
    "rowwise_split_input": ROWS,
    "packed_rowwise": ROWS,
    "embedding_rowwise": frozenset({Role.EMBED}),
    "moe_tp_experts": frozenset({Role.NETWORK}),
    "mla_kv_a_proj": frozenset({Role.FEED}),
    "replicated_with_grad_allreduce": frozenset({Role.BETWEEN}),
}


def said_otherwise(module: nn.Module, plan: SplitPlan) -> dict[str, str]:
    """By the name of a submodule or a leaf what the model's own plan says, and what this one does.

    Args:
        module: the model; one that has no plan of its own says nothing.
        plan: how it is split here.

    >>> model = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 2))
    >>> model._tp_plan = {"0": "colwise", "1": "colwise"}
    >>> said_otherwise(model, SplitPlan(2, {}, {"0": Role.COLUMN, "1": Role.ROW}))
    {'1': 'colwise there, a row here'}
    """
    styles = getattr(module, "_tp_plan", None)
    if not isinstance(styles, Mapping):
        return {}
    found: dict[str, str] = {}
    names = [name for name, _ in module.named_modules(remove_duplicate=False)]
    for name, style in _listed(names, styles):
        role = plan.roles.get(name)
        if role not in STYLES[style] and not _as_well(name, style, plan):
            found[name] = f"{style} there, {_here(role)} here"
    leaves = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    for name, style in _listed(leaves, styles):
        if name not in plan.splits and STYLES[style] & (COLUMNS | ROWS):
            found[name] = f"{style} there, whole here"
    return found


def _listed(names: list[str], styles: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    for name in names:
        style = styles.get(name, styles.get(NUMBER.sub("*", name)))
        if isinstance(style, str) and style in STYLES:
            yield name, style


def _as_well(name: str, style: str, plan: SplitPlan) -> bool:
    """Whether its leaves are in parts here without a role of its own.

    Those that are whole there have gradients of their own then; a product's weight that other code
    reads is split along the same dimension.
    """
    dims = {split.dim for leaf, split in plan.splits.items() if leaf.rpartition(".")[0] == name}
    if Role.BETWEEN in STYLES[style]:
        return bool(dims)
    return name not in plan.roles and dims == {int(STYLES[style] <= ROWS)}


def _here(role: Role | None) -> str:
    if role is None:
        return "whole"
    return {Role.EMBED: "a table", Role.BETWEEN: "between"}.get(role, f"a {role.value}")
