"""How a tree is distributed: leaves into units, units into flat buffers, buffers over ranks.

In the order of reading: ``layout``, ``freezing`` and ``cutting``, ``pieces``, ``sharded`` (a tree
of which a rank holds its part), ``replicated`` (one that every rank holds whole), ``streaming``
(to files and back); ``arriving``, ``unreduced`` and ``residuals`` are trees on their way.
"""
