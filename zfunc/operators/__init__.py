"""Functions of split leaves, with which models are written that tensor parallelism splits.

In the order of reading: ``parts`` (what an operator is told of a leaf), ``conjugates`` (pairs of
maps that are each other's derivative), ``stream`` (what lies between a row and the next column),
``products`` (``column`` and ``row``), ``vocabulary`` (``embed``), ``likelihoods``
(``cross_entropy``), ``randomness`` (``in_parts``) and ``partials`` (what of a part meets parts).
"""

from __future__ import annotations

from zfunc.operators.conjugates import (
    copied,
    gathered,
    gathered_positions,
    scattered_positions,
    shared,
    summed,
)
from zfunc.operators.likelihoods import cross_entropy
from zfunc.operators.products import between, column, row
from zfunc.operators.randomness import in_parts
from zfunc.operators.stream import positions
from zfunc.operators.vocabulary import embed

__all__ = [
    "between",
    "column",
    "copied",
    "cross_entropy",
    "embed",
    "gathered",
    "gathered_positions",
    "in_parts",
    "positions",
    "row",
    "scattered_positions",
    "shared",
    "summed",
]
