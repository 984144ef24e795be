"""A plan of how a module is split over ranks: which leaves, and what its parts do with theirs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from zfunc.layout.splits import Split

__all__ = ["LayerStream", "Role", "SplitPlan"]


class Role(StrEnum):
    """What a submodule does where its leaves are split (Shoeybi et al. 2019, "Megatron-LM")."""

    COLUMN = "column"  # whole inputs, this rank's part of the outputs
    ROW = "row"  # parts of the inputs, whole outputs: they are summed
    HEAD = "head"  # as a column, and the outputs are put together
    EMBED = "embed"  # this rank's rows of a table: what is looked up is summed
    BETWEEN = "between"  # whole leaves between a column and a row: their gradients are summed
    FEED = "feed"  # whole leaves whose outputs parts read as they are: gradients of both are summed
    NETWORK = "network"  # column and row in one forward, as of experts in one leaf: it is summed


@dataclass(frozen=True)
class LayerStream:
    """How a layer runs whose stream is cut along positions (Korthikanti et al. 2022).

    Attributes:
        given: names of its arguments that are cut.
        gathered: by the name of a submodule within it, those of its arguments that are put
            together before.
        ended: products of whole leaves of whose outputs each rank takes its positions.
        made: places, behind the first, of those of its results that are cut, too.
        parts_given, parts_made: arguments and results that are for each head, say: of those ranks
            have others, and not of positions.
    """

    given: tuple[str, ...]
    gathered: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    ended: tuple[str, ...] = ()
    made: tuple[int, ...] = ()
    parts_given: tuple[str, ...] = ()
    parts_made: tuple[int, ...] = ()


@dataclass(frozen=True)
class SplitPlan:
    """How a module is split over the ranks of an axis.

    Attributes:
        ways: the number of ranks.
        splits: by a leaf's name in the module's parameters; leaves that are not here stay whole. Of
            tied leaves the one name that the parameters have.
        roles: by the name of a submodule; others work as they are.
        attributes: by the name of a submodule, numbers that it keeps and that differ here, such as
            how many heads it has, for each rank; a dotted one belongs to a copy of that object.
        inputs: by the name of a submodule, of which of its arguments each rank takes a part; along
            that dimension they may repeat, once for each text of a batch.
        norms: by the name of a submodule, how the features are split over which it takes means.
        once: by the name of a network, whole leaves of its own that the first rank alone counts, as
            a bias behind its last product; by that of a row whose own forward adds its bias, this.
        between: by the name of a submodule that is ``BETWEEN``, those of its own whole leaves of
            which each rank has a part of the gradient; all, of one that is not here.
        whole: by the name of a leaf or a submodule that might have been split, why it is not.
        streams: by the name of a layer, how it runs on positions of the stream; others run on all.
        pointwise: names of submodules outside of layers that run on positions, too.
        uncut: by the name of a layer, why it does not.
        numbers: by dotted names, integers that submodules of its model keep, as how many features
            a head has: of another model of the same shapes the plan would be wrong.
    """

    ways: int
    splits: Mapping[str, Split]
    roles: Mapping[str, Role] = field(default_factory=dict)
    attributes: Mapping[str, Mapping[str, tuple[int, ...]]] = field(default_factory=dict)
    whole: Mapping[str, str] = field(default_factory=dict)
    inputs: Mapping[str, Mapping[str, Split]] = field(default_factory=dict)
    norms: Mapping[str, Split] = field(default_factory=dict)
    once: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    streams: Mapping[str, LayerStream] = field(default_factory=dict)
    pointwise: tuple[str, ...] = ()
    uncut: Mapping[str, str] = field(default_factory=dict)
    numbers: Mapping[str, int] = field(default_factory=dict, compare=False, repr=False)
    between: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
