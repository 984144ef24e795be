"""The command line: ``zfunc train``, ``generate``, ``convert``, ``doctor``, ``calibrate``.

``cli`` parses arguments, and each command has a file. ``training`` is the job behind ``zfunc
train``, to be read as a longer example. ``text_models`` opens models on disk. ``report`` has what
a run writes: rows of metrics, a progress bar, the curve of the loss.
"""
