"""``step.init``: a state is placed while it is made, so that nobody holds all of it.

The initialiser runs once on tensors without memory, and its operations are recorded on a tape. The
tape is then run on real memory, in an order in which one leaf after the other is final. Each rank
copies its part of the leaf, and the leaf is dropped. The result is that of a plain call, bitwise.

In the order of reading: ``placing``, ``recorder``, ``generator_states``, ``tape``.
"""
