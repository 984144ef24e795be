"""What ``zfunc train`` trains: the built-in GPT on bytes, or a Hugging Face model on its tokens."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.markup import escape
from torch import Tensor, nn

import zfunc as zf
from zfunc.commands.report import readable
from zfunc.commands.text_models import (
    CONFIG,
    Words,
    causal_module,
    ends,
    our_shape,
    read_config,
    words,
    write_config,
)
from zfunc.errors import CheckpointError
from zfunc.language import gpt
from zfunc.language.corpus import Corpus, divided, entropies, read_source
from zfunc.language.gpt import GPTConfig
from zfunc.language.gpt_decoding import GPTDecoder
from zfunc.modules.empty_weights import without_parameters
from zfunc.quant.model_files import read_files

__all__ = ["PROMPT", "Subject", "built_in", "of_folder", "read_tokens", "verdict"]

PROMPT = 64  # tokens of held-out text before a sample
BESIDE = (".json", ".jinja", ".model", ".txt")  # what a tokenizer consists of


@dataclass(frozen=True)
class Subject:
    """A language model and its text, as functions of parameters.

    Attributes:
        corpus: ids to train on and ids held out.
        unit: what an id is.
        count: of parameters.
        init: makes the parameters to begin with.
        loss: ``loss(params, ids)``, the mean over ``ids`` ``[b, t + 1]``, in nats.
        score: ``score(params, ids, targets)``, the sum over targets that are not -100.
        split: ``split(step, tensor=)``, the step with layers shared by ranks.
        write: writes what belongs beside the checkpoints.
        export: writes the trained parameters, where that is another file than the checkpoints;
            a collective.
        decoder: what ``zf.generate`` takes.
        decode: ids -> text.
        longest: ids that the model takes at most; None if there is no such number.
    """

    corpus: Corpus
    unit: str
    count: int
    init: Callable[[], Any]
    loss: Callable[[Any, Tensor], Tensor]
    score: Callable[[Any, Tensor, Tensor], Tensor]
    split: Callable[..., Any]
    write: Callable[[Path], None]
    export: Callable[[Path, Any], str] | None
    decoder: Any
    decode: Callable[[list[int]], str]
    longest: int | None = None

    def sample(self, params: Any, count: int, seed: int) -> str:
        """Held-out text, and how the model goes on, for a terminal."""
        device = zf.tree.leaves(params)[0].device
        prompt = self.corpus.heldout[:PROMPT].long().to(device)
        if self.longest is not None:
            prompt = prompt[: self.longest // 2]
            count = min(count, self.longest - len(prompt))
        how: dict[str, Any] = {"max_new_tokens": count, "temperature": 0.8}
        out = zf.generate(self.decoder, params, prompt, key=zf.random.key(seed), **how)
        before, after = (
            readable(self.decode(part.tolist())) for part in out.split([len(prompt), count])
        )
        return f"[dim]{escape(before)}[/dim]{escape(after)}"


def built_in(config: GPTConfig, corpus: Corpus, context: int, seed: int) -> Subject:
    """The small GPT on bytes."""

    def loss(params: Any, ids: Tensor) -> Tensor:
        return gpt.loss(params, ids, config)

    def score(params: Any, ids: Tensor, targets: Tensor) -> Tensor:
        return gpt.score(params, ids, targets, config)

    return Subject(
        corpus,
        "byte",
        gpt.count(config),
        init=lambda: gpt.init(config, zf.random.key(seed)),
        loss=loss,
        score=score,
        split=partial(zf.split, rules=gpt.rules(config)),
        write=lambda folder: write_config(folder, config, context),
        export=None,
        decoder=GPTDecoder(config, window=context),
        decode=lambda ids: bytes(ids).decode(errors="replace"),
    )


# --- Hugging Face -------------------------------------------------------------------------------


def of_folder(home: Path, data: str, context: int, seed: int, device: torch.device) -> Subject:
    """The causal model of a folder, with its weights if they are there, else with new ones.

    Raises:
        CheckpointError: the folder lacks a configuration or a tokenizer.
        PlacementError: transformers is not installed, or makes no causal model of it.
        ValueError: the text is too short, or is none.
        OSError: the text cannot be read.
    """
    corpus = read_tokens(home, data, context)
    module, stored = _module(home, seed)
    both = [zf.functionalize(module, train=train) for train in (True, False)]
    buffers = {name: x.to(device) for name, x in both[0].buffers.items()}
    model, decoder = (replace(each, buffers=buffers) for each in both)

    def loss(params: Any, ids: Tensor) -> Tensor:
        out: Tensor = model.apply(params, ids, labels=ids, use_cache=False).loss
        return out

    def score(params: Any, ids: Tensor, targets: Tensor) -> Tensor:
        logits = model.apply(params, ids, use_cache=False, train=False).logits
        flat, wanted = logits.flatten(0, 1).float(), targets.flatten()
        return nn.functional.cross_entropy(flat, wanted, ignore_index=-100, reduction="sum")

    config = module.config
    config.architectures = [type(module).__name__]
    return Subject(
        corpus,
        "token",
        sum(x.numel() for x in module.parameters()),
        init=lambda: read_files(home, model) if stored else model.params,
        loss=loss,
        score=score,
        split=lambda step, tensor: zf.split(step, model, tensor=tensor),
        write=lambda folder: _beside(home, config, folder),
        export=_exported,
        decoder=decoder,
        decode=_words(home)[1],
        longest=_longest(read_config(home)[1]),
    )


def read_tokens(home: Path, data: str, context: int, heldout: float = 0.1) -> Corpus:
    """A text as a model's tokens, one document after the other, its last part held out.

    Args:
        home: the model's folder. Without a tokenizer in it tokens are bytes, if the model knows
            just 256.
        data: a built-in text, a text file, or a ``.jsonl`` file with a field ``text`` in each line.
        context: tokens of a window.
        heldout: the fraction that is held out.

    Raises:
        CheckpointError: there is no configuration, or no tokenizer that it needs.
        ValueError: the text is too short, or is none; ``context`` is longer than the model's.
        OSError: the text cannot be read.
    """
    _, document = read_config(home)
    if our_shape(home, document) is not None:
        raise CheckpointError(
            f"{home} holds the built-in GPT: leave --model out, and give --resume to go on with it."
        )
    longest = _longest(document)
    if longest is not None and context > longest:
        raise ValueError(f"--context {context}: this model takes {longest} tokens at most")
    encode, end = _words(home)[0], ends(home, document)[:1]
    ids: list[int] = []
    for text in _documents(data):
        ids += encode(text)
        ids += [i for i in end if ids[-1:] != [i]]
    return divided(data, torch.tensor(ids, dtype=torch.long), heldout, context, "tokens")


def _longest(document: dict[str, Any]) -> int | None:
    found = document.get("max_position_embeddings") or document.get("n_positions")
    return found if isinstance(found, int) else None


def _documents(data: str) -> Iterator[str]:
    if not data.endswith(".jsonl"):
        name, content = read_source(data)
        try:
            yield content.decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"{name} is no text in UTF-8: {error.reason}") from None
        return
    with Path(data).open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                text = json.loads(line)["text"]
            except (ValueError, KeyError, TypeError):
                text = None
            if not isinstance(text, str):
                raise ValueError(
                    f'{data}, line {number}: expected an object with a field "text", a string'
                )
            yield text


def _words(home: Path) -> Words:
    _, document = read_config(home)
    try:
        return words(home)
    except CheckpointError:
        if document.get("vocab_size") != 256:
            raise
    return (
        lambda text: list(text.encode()),
        lambda ids: bytes(ids).decode(errors="replace"),
    )


def _module(home: Path, seed: int) -> tuple[Any, bool]:
    """The module, and whether its weights are in files; else it has new ones.

    Raises:
        CheckpointError: they are in files that are pickle.
    """
    if any(home.glob("*.safetensors")):
        with without_parameters():
            return causal_module(home, torch.float32), True
    if pickled := next(home.glob("pytorch_model*.bin"), None):
        raise CheckpointError(
            f"{pickled} is pickle, which may run code when it is read. Save the model again as "
            "safetensors (save_pretrained), or remove the file to begin with new weights."
        )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return causal_module(home, torch.float32), False


def _beside(home: Path, config: Any, folder: Path) -> None:
    """The configuration and the tokenizer, so that the folder is one of Hugging Face."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in home.iterdir():
        if file.suffix in BESIDE and file.name != CONFIG and ".index." not in file.name:
            shutil.copyfile(file, folder / file.name)
    config.save_pretrained(folder)


def _exported(folder: Path, params: Any) -> str:
    zf.export_safetensors(folder, params)
    return f"model: {folder} (from_pretrained and zfunc generate read it)"


# --- what it reached ----------------------------------------------------------------------------


def verdict(val_loss: float, subject: Subject) -> str:
    """The held-out loss; of bytes beside what their statistics alone would reach."""
    if subject.unit != "byte":
        return (
            f"\nheld-out loss {val_loss:.3f} nats per {subject.unit}, "
            f"perplexity {math.exp(min(val_loss, 700.0)):.4g}"
        )
    corpus = subject.corpus
    own = entropies(corpus.heldout)
    whole = entropies(torch.cat([corpus.train, corpus.heldout]))
    side = "below" if val_loss < own.bigram else "above"
    return (
        "\nnats per byte         held-out text   whole corpus\n"
        f"unigram entropy       {own.unigram:13.3f}   {whole.unigram:12.3f}\n"
        f"bigram entropy        {own.bigram:13.3f}   {whole.bigram:12.3f}\n"
        f"this model            {val_loss:13.3f}\n"
        f"[bold]{abs(own.bigram - val_loss):.3f} {side} the bigram entropy[/bold] of the same text"
    )
