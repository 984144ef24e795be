"""Worlds: the ranks a step runs on, as processes under gloo or NCCL, or as threads.

In the order of reading: ``world`` (who am I, how many are we), ``axes`` (the named mesh),
``transport`` (what a backend provides), ``accounting`` (what was sent), ``simulation``,
``devices``, ``distributed``, ``launching``; ``gloo`` with ``wires``, ``routes`` and ``halving``,
and ``nccl``, are the backends.
"""
