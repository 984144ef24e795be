"""Foresight: what a step costs on machines that are not here.

The step is run as one rank of many, on ordinary tensors that have addresses and no memory behind
them. Nothing is sent. In the order of reading: ``prediction`` (``foresee``), ``inputs`` (what it
begins with), ``dry_run`` (operations without arithmetic), ``geometry`` (the shapes that they result
in), ``storages`` (what lives, and what is known of it), ``pageless`` (memory that is only
addresses), ``attention`` (as a GPU does it), ``rows`` (what was done), ``layer_names`` (where),
``flops`` (how much it is), ``assumptions`` (what had to be guessed). The world that has one rank is
``zfunc.ranks.foreseen``.

How long it takes: ``clusters`` (where), ``presets`` (published numbers), ``operation_times`` and
``links`` (how long each row takes), ``clocks`` (which wait for which), ``timing`` (the answer).
"""

from zfunc.foresight.assumptions import Assumption, ForesightError
from zfunc.foresight.clusters import Cluster
from zfunc.foresight.prediction import Foreseen, SentBytes, foresee
from zfunc.foresight.rows import StepRow
from zfunc.foresight.timing import LaneSpan, Timing

__all__ = [
    "Assumption",
    "Cluster",
    "Foreseen",
    "ForesightError",
    "LaneSpan",
    "SentBytes",
    "StepRow",
    "Timing",
    "foresee",
]
