"""Functions of split leaves, with which models are written that tensor parallelism splits.

In the order of reading: ``parts`` (what an operator is told of a leaf), ``conjugates`` (pairs of
maps that are each other's derivative), ``products`` (``column`` and ``row``), ``vocabulary``
(``embed``) and ``likelihoods`` (``cross_entropy``).
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
from zfunc.operators.vocabulary import embed

__all__ = [
    "between",
    "column",
    "copied",
    "cross_entropy",
    "embed",
    "gathered",
    "gathered_positions",
    "row",
    "scattered_positions",
    "shared",
    "summed",
]
