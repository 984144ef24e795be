"""The command line: ``zfunc train``, ``zfunc generate``, ``zfunc convert``, ``zfunc doctor``.

``training`` is the job behind ``zfunc train``, to be read as a longer example.
"""
