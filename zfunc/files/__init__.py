"""Checkpoints, and other people's files: safetensors and JSON, any world into any other.

In the order of reading: ``chunks`` and ``manifest`` (what a checkpoint is), ``inventory`` (what a
state is in files), ``folder`` and ``locking``, ``reading``, ``saving``, ``replicas``,
``background``, ``checkpoint``; then ``tensorfiles``, ``pretrained``, ``distcp`` and ``conversion``.
"""
