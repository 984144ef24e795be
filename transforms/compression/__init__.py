"""``compress_grads``: fewer bytes on the wire.

In the order of reading: ``methods``, ``transform``, ``error_feedback``, ``exchange`` and
``averaging`` (the compressed mean); ``onebit``, ``onebit_leaves``, ``quantized`` and ``low_rank``
(codecs); ``zero_one`` and ``local_steps`` (0/1 Adam); ``gathering`` (new parameters).
"""
