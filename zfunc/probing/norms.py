"""Norms over all that columns give: what they take means of can be summed over ranks.

Such a norm makes one piece of all heads, and would keep them on one rank. The sums that it takes
over features are a number or two a token: where ranks are told them, the rest of it falls apart.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from zfunc.layout.splits import Split
from zfunc.modules.split_reductions import shares
from zfunc.probing.exactness import close
from zfunc.probing.flows import Pairing, connected
from zfunc.probing.reaches import Refused
from zfunc.probing.stages import Stage, Trace, Whole

__all__ = ["add_up", "features_of", "norms_between", "told"]


def norms_between(stage: Stage, pairing: Pairing) -> list[str]:
    """Submodules that sum over as many features as a product of a pairing has, between these."""
    bare = [
        name
        for name, part in stage.layer.named_modules()
        if name and name not in stage.products and not part._modules
    ]
    with stage.reducing(bare):
        trace = stage.run(grad=True)
    columns = [trace.outputs[name] for name in pairing.columns if name not in pairing.common]
    widths = {y.shape[-1] for y in columns}
    widths |= {stage.products[name].inputs for name in pairing.rows}
    return [
        name
        for name, x in trace.entered.items()
        if trace.sums[name] and x.shape[-1] in widths and connected(x, columns)
    ]


def features_of(
    trace: Trace, name: str, columns: dict[str, Split], rows: dict[str, Split]
) -> Split:
    """How the features that a norm is given are split: they are a column's, or a row's.

    Raises:
        Refused: they are nobody's.
    """
    x = trace.entered[name]
    for column, split in columns.items():
        y = trace.outputs[column]
        if x.shape == y.shape and close(x.detach(), y.detach()):
            return split
    for split in (*rows.values(), *columns.values()):
        if split.size == x.shape[-1]:
            return split
    raise Refused(f"{name} sums over what is neither a column's nor a row's")


def told(base: Trace, norms: dict[str, Split], rank: int) -> dict[str, Whole]:
    """What a rank is told of norms, from a run on the whole."""
    return {
        name: Whole(split.size, [x.detach() for x in base.sums.get(name, ())], shares(split, rank))
        for name, split in norms.items()
    }


def add_up(base: Trace, traces: Sequence[Trace], norms: dict[str, Split]) -> bool:
    """Whether the sums that ranks take add up to those of the whole."""
    for name in norms:
        whole, parts = base.sums.get(name, []), [trace.sums.get(name, []) for trace in traces]
        if any(len(own) != len(whole) for own in parts):
            return False
        totals: list[Tensor] = [sum(own[i] for own in parts) for i in range(len(whole))]  # type: ignore[misc]
        if not all(close(x, y) for x, y in zip(totals, whole, strict=True)):
            return False
    return True
