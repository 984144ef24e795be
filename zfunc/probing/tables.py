"""The table of a vocabulary, and the head over it, outside of layers."""

from __future__ import annotations

import copy
from itertools import pairwise

import torch
from torch import Tensor, nn

from zfunc.layout.splits import Split
from zfunc.modules.split_plans import Role
from zfunc.modules.units import Anatomy
from zfunc.probing.calls import Probed
from zfunc.probing.products import product_of
from zfunc.ranks.comm import even_cuts

__all__ = ["FEW", "tables_of"]

FEW = 64  # elements: that a parameter as small stays whole needs no reason


def tables_of(
    found: Probed, anatomy: Anatomy, ways: int
) -> tuple[dict[str, Split], dict[str, Role], dict[str, str]]:
    """Splits by leaf, roles by submodule, and of what stays whole why."""
    modules = dict(found.module.named_modules(remove_duplicate=False))
    tables = {name for name, of_ids in found.lookups.items() if of_ids}
    sizes = {modules[name]._parameters["weight"].shape[0] for name in tables}
    roles = dict.fromkeys(tables, Role.EMBED)
    why: dict[str, str] = {}
    for name in (x for x in modules if x in found.called):  # in the order of the module
        product = product_of(modules[name]) if _outside(name, found) else None
        if product is not None and product.outputs in sizes:
            roles[name] = Role.HEAD
        elif product is not None and product.numel > FEW:
            why[name] = "it lies outside of layers, and is no head over a vocabulary"
    splits: dict[str, Split] = {}
    for leaf in anatomy.leaves:
        using = [(home, key) for home, key in leaf.homes if home in roles]
        if not using:
            continue
        home, key = using[0]
        reason = _refused(found, leaf.homes, roles, modules, leaf.shape[0], ways)
        if reason:
            why[leaf.name] = reason
            continue
        turned = roles[home] is Role.HEAD and key == "weight" and product_of(modules[home])
        dim = 1 if turned and turned.turned else 0
        ends = even_cuts(leaf.shape[dim], ways)
        splits[leaf.name] = Split.of(dim, [range(a, b) for a, b in pairwise(ends)])
    used = {
        home: leaf.name for leaf in anatomy.leaves for home, key in leaf.homes if key == "weight"
    }
    roles = {name: role for name, role in roles.items() if used.get(name) in splits}
    whole = {leaf.name for leaf in anatomy.leaves for home, _ in leaf.homes if home in roles}
    kept = {name: split for name, split in splits.items() if name in whole}
    return kept, roles, why


def _outside(name: str, found: Probed) -> bool:
    inside = [f"{each}." for kind in found.kinds for each in kind.names]
    return not any(f"{name}.".startswith(prefix) for prefix in inside)


def _refused(
    found: Probed,
    homes: tuple[tuple[str, str], ...],
    roles: dict[str, Role],
    modules: dict[str, nn.Module],
    size: int,
    ways: int,
) -> str | None:
    if found.failed is not None:
        return f"the module could not be called to its end ({found.failed})"
    if size < ways:
        return f"it has {size} rows for {ways} ranks"
    heads = [home for home, key in homes if roles.get(home) is Role.HEAD and key == "weight"]
    if len(homes) > 1 and any((p := product_of(modules[x])) and p.turned for x in heads):
        return "it is a table and a head that is turned"
    for home, key in homes:
        part = modules[home]
        if (home, key) in found.touched:
            return f"{home}.{key} is read by other code than a lookup or a product"
        if home not in roles and (product_of(part) or isinstance(part, nn.Embedding)):
            return f"{home}.{key} is tied to it, and was not called as a table or a head"
        if roles.get(home) is Role.EMBED and len(list(part.parameters())) > 1:
            return f"{home} has other parameters beside its table"
        if roles.get(home) is Role.EMBED and not _looks_up(part):
            return f"{home} does more than to look up rows"
    return None


def _looks_up(part: nn.Module) -> bool:
    """Whether parts of a small table give the rows that the whole gives: tried."""
    weight, rows = part._parameters["weight"], 6
    assert weight is not None
    generator = torch.Generator().manual_seed(0)
    full = torch.randn(rows, *weight.shape[1:], generator=generator, dtype=torch.float64)
    ids = torch.tensor([[0, 3, 5, 2]])
    twin = copy.copy(part)
    twin.__dict__ = {k: v for k, v in part.__dict__.items() if k != "forward"}
    twin.__dict__["padding_idx"] = None
    if getattr(part, "scale_grad_by_freq", False):
        return False

    def look_up(table: Tensor, at: Tensor) -> Tensor:
        twin.__dict__["_parameters"] = {"weight": table}
        out: Tensor = twin(at)
        return out

    try:
        whole = look_up(full, ids)
        total = torch.zeros_like(whole)
        for low, high in ((0, 4), (4, 6)):
            mine = (ids >= low) & (ids < high)
            y = look_up(full[low:high], (ids - low).clamp(0, high - low - 1))
            total = total + y.masked_fill(~mine[..., None], 0)
    except Exception:  # the module's own code on a small table
        return False
    return torch.allclose(total, whole, rtol=1e-9, atol=1e-9)
