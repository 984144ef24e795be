"""Pytrees: the kinds of nodes that zfunc adds, and one vocabulary for plain and placed trees.

In the order of reading: ``nodes``, ``marks`` (of plain leaves), ``tree``; ``squares`` and ``norms``
(sums of squares and norms of trees), ``memory`` (donated memory, and what else trees know of a
running step), ``boxes`` (whole trees as few buffers), ``reduction`` and ``unreduced`` (what is each
rank's own, and how it is averaged), ``unitwise``, ``zeros``, ``origins``.
"""
