"""``Trainer`` and ``Seq2SeqTrainer``."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import transformers

from zfunc.hf.training import Bridge

__all__ = ["Seq2SeqTrainer", "Trainer"]


class Trainer(Bridge, transformers.Trainer):
    """``transformers.Trainer`` whose training step is zfunc's.

    What it logs, evaluates and saves is what Trainer would under ``DistributedDataParallel``;
    dropout draws other numbers. Start one process a rank, with torchrun say.

    Args:
        *args, **kwargs: Trainer's own.
        transforms: ``transforms(step)``, or ``transforms(step, model)`` with the
            :class:`~zfunc.Functional` that ``zf.split`` asks for: the step in its transforms; by
            default ``zf.shard`` at stage 0. ``bf16``, ``fp16`` and ``gradient_checkpointing`` of
            ``TrainingArguments`` add ``zf.precision`` and ``zf.remat``; ``zf.donate`` is there.
        optimizer: ``lr -> GradientTransformation``, with the learning rate of Trainer's schedule;
            by default the one that ``TrainingArguments.optim`` names.

    Raises:
        CompositionError: a training argument that cannot be honoured (:mod:`zfunc.hf.fields` has
            the table), ``optimizers``, an overridden ``create_optimizer``, a model with running
            statistics, ``zf.accumulate`` in ``transforms``; ``hyperparameter_search``.
        PlacementError: something reads or writes the model's parameters during ``train()``.

    Source: Hugging Face, transformers, ``Trainer``.

    >>> import tempfile, torch, zfunc as zf
    >>> from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments
    >>> small = {"vocab_size": 8, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 1}
    >>> model = GPT2LMHeadModel(GPT2Config(**small, bos_token_id=0, eos_token_id=0))
    >>> row = {"input_ids": torch.arange(6), "labels": torch.arange(6)}
    >>> trainer = zf.hf.Trainer(
    ...     model=model,
    ...     args=TrainingArguments(
    ...         output_dir=tempfile.mkdtemp(), max_steps=2, use_cpu=True, report_to="none",
    ...         save_strategy="no", disable_tqdm=True
    ...     ),
    ...     train_dataset=[row] * 16,
    ...     transforms=lambda step: zf.shard(step, stage=3),
    ... )
    >>> trainer.train().global_step  # doctest: +ELLIPSIS
    {'train_runtime'...
    2
    """


class Seq2SeqTrainer(Bridge, transformers.Seq2SeqTrainer):
    """``transformers.Seq2SeqTrainer`` whose training step is zfunc's; see :class:`Trainer`.

    With ``predict_with_generate`` every rank holds the whole model while it evaluates.
    """

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        with self._whole() if self.args.predict_with_generate else nullcontext():
            return super().evaluation_loop(*args, **kwargs)
