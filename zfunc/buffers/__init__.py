"""Memory of the host, and copies between it and devices, for which nobody waits without need.

``pages`` maps host memory in whole pages and page-locks it, so that a GPU can copy by itself.
``ring`` hands such memory out and takes it back. ``copies`` has the copies that units of a model
take, on streams of their own; ``uploads`` those of small tensors. ``readings`` and ``numbers``
are about single numbers that the host needs from a device, or the other way round. ``heap`` gives
back what the C library keeps of freed memory. ``moves`` is who hears of copies in a step that is
foreseen.
"""
