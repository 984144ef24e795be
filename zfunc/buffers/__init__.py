"""Memory of the host and of devices: pinned pages, rings of buffers, and copies between the two.

In the order of reading: ``pages``, ``ring``, ``copies``, ``uploads``; ``readings`` and ``numbers``
are about single numbers.
"""
