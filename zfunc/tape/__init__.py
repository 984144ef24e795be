"""A tape of how a state is initialised, run again one leaf at a time by ``step.init``.

In the order of reading: ``replay``, ``recorded``, ``marks``, ``recording``.
"""
