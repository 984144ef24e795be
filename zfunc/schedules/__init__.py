"""Schedules of pipelines as plain data: nothing here computes, sends, or knows a tensor.

In the order of reading: ``actions`` (what a rank can do and what that needs), ``checks`` and
``timelines`` (whether it can run, and when each action does), ``drawing``, ``pipeline_schedule``
(the value itself). Then those that have names: ``in_turn``, ``list_scheduling`` and
``zero_bubble``, and ``catalogue``, which finds the one that is meant. ``partition`` says where a
row of layers is cut into stages.
"""

from __future__ import annotations

from zfunc.schedules.actions import UNIT, Action
from zfunc.schedules.catalogue import SCHEDULES, ScheduleLike, schedule
from zfunc.schedules.in_turn import gpipe, interleaved, one_f_one_b
from zfunc.schedules.partition import balanced_cuts, checked_cuts
from zfunc.schedules.pipeline_schedule import Schedule
from zfunc.schedules.zero_bubble import zb, zb_lean, zbv

__all__ = [
    "SCHEDULES",
    "UNIT",
    "Action",
    "Schedule",
    "ScheduleLike",
    "balanced_cuts",
    "checked_cuts",
    "gpipe",
    "interleaved",
    "one_f_one_b",
    "schedule",
    "zb",
    "zb_lean",
    "zbv",
]
