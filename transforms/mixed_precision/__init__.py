"""``precision`` computes in 16 bits and updates parameters in the precision that the state has.

``transform`` is the transform. ``masters`` keeps the parameters in full precision, makes their
16-bit copies, and handles overflow.
"""
