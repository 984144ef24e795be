"""Hugging Face's ``Trainer`` whose training step is one of zfunc's, in any transforms.

A script changes the import of ``Trainer`` and adds one argument::

    trainer = zf.hf.Trainer(..., transforms=lambda step: zf.shard(step, stage=3))

In the order of reading: ``fields`` (what becomes of each training argument), ``optimizers``,
``standins`` (the modules that Trainer sees), ``training``, ``trainers``.
"""

from __future__ import annotations

try:
    import accelerate  # noqa: F401  # Trainer cannot do without it
    import transformers  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"zfunc.hf needs transformers and accelerate ({error}). "
        "Install them: pip install 'zfunc-torch[hf]'"
    ) from error

from zfunc.hf.trainers import Seq2SeqTrainer, Trainer

__all__ = ["Seq2SeqTrainer", "Trainer"]
