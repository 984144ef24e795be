"""``precision``: 16 bits to compute in, and ``masters`` in full precision."""
