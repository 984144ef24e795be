"""The engine: steps, the transforms around them, and passes of parameters unit by unit.

In the order of reading: ``step`` (what a step is, and what a transform may do), ``context`` (one
call), ``hooks`` (in which order transforms act, and what they are given); ``primitives`` and
``differentiation`` (what a step is written with); ``communication`` and ``unit_info`` (over which
ranks, in which units), ``passes`` with ``sources``, ``unit_runs`` and ``plans`` (parameters enter,
gradients leave), ``accord`` (ranks that take other paths); ``placement`` (a whole state is placed).
"""
