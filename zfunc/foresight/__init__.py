"""Foresight: what a step costs, on machines that are not here and on the one that is.

To foresee a step it is run as one rank of many, on ordinary tensors that have addresses and no
memory behind them. Nothing is sent. In the order of reading: ``prediction`` (``foresee``),
``inputs`` (what it begins with), ``dry_run`` (operations without arithmetic), ``geometry`` (the
shapes that they result in), ``schemas`` (what an operator says of itself), ``storages`` (what
lives, and what is known of it), ``pageless`` (memory that is only addresses), ``attention`` (as a
GPU does it), ``rows`` (what was done), ``layer_names`` (where), ``flops`` (how much it is),
``assumptions`` (what had to be guessed). The world that has one rank is ``zfunc.ranks.foreseen``.

To profile it, it is run as it is: ``profiling`` (``profile``), ``watch`` (operation by operation),
``op_times`` (when), ``module_names`` (where, in layers and outside), ``own_flops`` (of our own
operators), ``costs`` (sums), ``peaks`` (what a device can do), ``profiles`` and ``profile_tables``
(what is shown).

How long it takes: ``clusters`` (where), ``presets`` (published numbers), ``operation_times`` and
``links`` (how long each row takes), ``clocks`` (which wait for which), ``stages`` (of a pipeline,
together), ``timing`` (the answer). ``choices`` compares steps, ``sentences`` writes them down,
``texts`` figures. ``scaling`` compares numbers of devices. ``drawing`` draws.
"""

from zfunc.foresight.assumptions import Assumption, ForesightError
from zfunc.foresight.choices import Plan, PlanRow
from zfunc.foresight.clusters import Cluster
from zfunc.foresight.prediction import Foreseen, SentBytes, foresee
from zfunc.foresight.profiles import Profile
from zfunc.foresight.profiling import profile
from zfunc.foresight.rows import StepRow
from zfunc.foresight.scaling import Scaling, ScalingPoint, scale_out
from zfunc.foresight.timing import LaneSpan, Timing
from zfunc.foresight.watch import TimedRow

__all__ = [
    "Assumption",
    "Cluster",
    "Foreseen",
    "ForesightError",
    "LaneSpan",
    "Plan",
    "PlanRow",
    "Profile",
    "Scaling",
    "ScalingPoint",
    "SentBytes",
    "StepRow",
    "TimedRow",
    "Timing",
    "foresee",
    "profile",
    "scale_out",
]
