"""Runs of Trainer, plain under DDP and ours, on the ranks that ``zf.launch`` has started."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from torch.utils.data import Dataset

import zfunc as zf

LLAMA = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
LLAMA |= {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True}
BERT = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
BERT |= {"num_attention_heads": 2, "max_position_embeddings": 16, "num_labels": 3}
BERT |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
T5 = {"vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
T5 |= {"dropout_rate": 0.0, "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}

GROUPED: dict[str, Any] = {"train_sampling_strategy": "group_by_length"}
if int(transformers.__version__.split(".")[0]) < 5:
    GROUPED = {"group_by_length": True}


def model_of(family: str, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    if family == "llama":
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))
    elif family == "bert":
        model = transformers.BertForSequenceClassification(transformers.BertConfig(**BERT))
    else:
        model = transformers.T5ForConditionalGeneration(transformers.T5Config(**T5))
    return model.to(dtype)


class Tokens(Dataset):  # type: ignore[type-arg]
    """Rows of tokens; labels are padded unevenly, or a class of three."""

    def __init__(self, family: str, n: int, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(2, 32, (n, 12), generator=draw)
        self.ends = torch.randint(4, 13, (n,), generator=draw)
        self.family = family

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        ids, end = self.ids[i], int(self.ends[i])
        if self.family == "bert":
            return {"input_ids": ids, "labels": ids.sum() % 3}
        labels = ids.clone()
        labels[end:] = -100
        return {"input_ids": ids, "labels": labels}


class InDouble:
    """A loss of the user's own, in the dtype of the logits (Hugging Face's is in float32)."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        out = model(input_ids=inputs["input_ids"])
        logits, labels = out.logits[:, :-1], inputs["labels"][:, 1:]
        total = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"
        )
        count = (labels != -100).sum() if num_items_in_batch is None else num_items_in_batch
        loss = total / count * dist.get_world_size()
        return (loss, {"loss": loss, "logits": out.logits}) if return_outputs else loss


def metrics(found: Any) -> dict[str, float]:
    predicted = found.predictions[0] if isinstance(found.predictions, tuple) else found.predictions
    return {"sum": float(predicted.astype("float64").sum())}


@dataclass
class Run:
    """What a run leaves behind."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    evals: list[dict[str, float]] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    generated: Any = None
    sent: int | None = None
    folder: str = ""


def recorded(kind: Any) -> Any:
    """A Trainer that keeps the losses of its microbatches as they are."""

    class Recorded(kind):  # type: ignore[misc]
        seen: list[Tensor]

        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            loss: Tensor = super().training_step(*args, **kwargs)
            self.__dict__.setdefault("seen", []).append(loss.double())
            return loss

    return Recorded


COUNT = itertools.count()


def run(
    family: str,
    transforms: Callable[[Any], Any] | None = None,
    dtype: torch.dtype = torch.float32,
    resume: str | None = None,
    model: Any = None,
    mixin: type | None = None,
    held_out: int = 6,
    **changes: Any,
) -> Run:
    """Train; with ``transforms`` by ours, else by transformers' own."""
    out = str(Path.cwd() / f"run-{next(COUNT)}") if resume is None else str(Path(resume).parent)
    settings: dict[str, Any] = {
        "output_dir": out,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 4,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "max_grad_norm": 0.5,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 1,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "no",
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "log_level": "error",
        **changes,
    }
    os.environ.pop("ACCELERATE_MIXED_PRECISION", None)  # transformers 4 keeps that of earlier runs
    seq2seq = family == "t5"
    base = "Seq2SeqTrainer" if seq2seq else "Trainer"
    kind = getattr(transformers if transforms is None else zf.hf, base)
    kind = kind if mixin is None else type("Made", (mixin, kind), {})
    args = getattr(transformers, "Seq2SeqTrainingArguments" if seq2seq else "TrainingArguments")
    model = model_of(family, dtype) if model is None else model
    trainer = recorded(kind)(
        model=model,
        args=args(**settings),
        train_dataset=Tokens(family, 24, 1),
        eval_dataset=Tokens(family, held_out, 2),
        compute_metrics=metrics,
        **({} if transforms is None else {"transforms": transforms}),
    )
    trainer.pop_callback(transformers.PrinterCallback)
    trainer.train(resume_from_checkpoint=resume)
    n = settings["gradient_accumulation_steps"]
    losses = torch.stack(trainer.seen).unflatten(0, (-1, n)).sum(1)
    dist.all_reduce(losses)
    history = trainer.state.log_history
    result = Run(
        losses=(losses / dist.get_world_size()).tolist(),
        norms=[float(x["grad_norm"]) for x in history if "grad_norm" in x],
        rates=[x["learning_rate"] for x in history if "learning_rate" in x],
        evals=[{k: v for k, v in x.items() if k in KEPT} for x in history if "eval_loss" in x],
        weights={k: v.detach().clone() for k, v in model.state_dict().items()},
        folder=out,
    )
    if transforms is not None:
        result.sent = trainer._step.describe().sent_bytes
    if family != "bert":
        ids = torch.arange(2, 6)[None]
        result.generated = model.eval().generate(ids, max_new_tokens=4, do_sample=False).tolist()
    return result


KEPT = ("eval_loss", "eval_sum")
