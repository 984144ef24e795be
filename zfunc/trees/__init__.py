"""Pytrees: the kinds of nodes that zfunc adds, and one vocabulary for plain and placed trees.

In the order of reading: ``nodes``, ``tree``; ``squares`` and ``norms`` (sums of squares and norms
of trees), ``memory`` (donated memory, and what else trees know of a running step), ``unitwise``,
``zeros``, ``origins``.
"""
