"""Placed trees: how a pytree is cut over ranks, and what stands for it on one of them.

In the order of reading: ``layout`` and ``cutting`` (leaves into units, units into flat buffers,
buffers over ranks), ``pieces`` and ``leaves``, ``sharded`` (the tree of which a rank holds its
part), ``placement`` (a whole state); ``unreduced``, ``residuals`` and ``estimated`` are what
gradients are on their way; ``hosted``, ``streamed`` and ``evaluation`` are trees not at hand.
"""
