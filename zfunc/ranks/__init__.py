"""Ranks: the processes or threads that a step runs on, and the collectives between them.

In the order of reading: ``world`` (who am I, how many are we), ``axes`` (the named mesh), ``comm``
(collectives as the rest of zfunc sees them), ``transport`` (what a backend provides),
``accounting`` (what was sent), ``simulation``, ``devices``, ``distributed``, ``launching``;
``gloo`` with ``wires``, ``routes`` and ``halving``, and ``nccl``, are the backends. ``collectives``
are those that users call; ``random`` gives all ranks the same numbers.
"""
