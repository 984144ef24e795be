"""The engine: steps, the transforms around them, and passes of parameters unit by unit.

In the order of reading: ``step`` (what a step is, and what a transform may do), ``context`` (one
call of it), ``primitives`` and ``differentiation`` (what a step is written with), ``passes`` with
``sources``, ``unit_runs`` and ``plans`` (parameters enter, gradients leave), ``accord`` (ranks that
take other paths), ``seams`` (what transforms are given); ``placement`` (a whole state is placed).
"""
