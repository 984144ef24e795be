"""State on disk: two generations of every unit, checksums, one owner.

In the order of reading: ``blocks`` and ``ring`` (files and memory), ``store`` and ``columns`` (who
writes where), ``generations`` (which slots are the newest whole state), ``stored`` (the tree),
``successor`` (the next state), ``recovery`` (what a killed process left).
"""
