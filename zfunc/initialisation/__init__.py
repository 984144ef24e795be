"""``step.init``: an initialiser is recorded on a tape and run again, one leaf at a time.

In the order of reading: ``placing``, ``recording``, ``recorded``, ``marks``, ``replay``.
"""
