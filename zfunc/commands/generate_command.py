"""``zfunc generate``: continue a text with a model on disk, as it is being written."""

from __future__ import annotations

import argparse
import io
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

import torch
from rich.console import Console
from rich.markup import escape
from torch import Tensor

import zfunc as zf
from zfunc.commands.arguments import natural, positive
from zfunc.commands.report import print_error, readable, si
from zfunc.commands.text_models import DTYPES, Storage, TextModel, open_text_model, read_config
from zfunc.language.sampling import check_sampling

__all__ = ["add_generate"]

LONGEST = 8  # tokens that one character may take


def add_generate(commands: Any) -> None:
    """Add the subcommand."""
    command = commands.add_parser(
        "generate",
        help="continue a text with a trained model, in 8 or 4 bits if asked for",
        description="Continue a text, written out as it comes. MODEL is what `zfunc train` wrote "
        "(its --out folder), or a folder with config.json, *.safetensors and a tokenizer, as "
        "Hugging Face's causal models come; nothing is downloaded and no code in it is run. With "
        "--bits weights are rounded one by one while they are read.",
        epilog="examples: zfunc generate runs/train --prompt 'The import statement' --bits 8; "
        "zfunc generate ./Qwen2-0.5B --temperature 0 < question.txt",
    )
    command.set_defaults(command=lambda found: _generate_command(command, found))
    option = command.add_argument
    option("model", metavar="MODEL", type=Path, help="a folder, or a safetensors file in it")
    option("--prompt", metavar="TEXT", help="what to continue; by default, or if -, standard input")
    text = "how many to add (200)"
    option("--max-new-tokens", metavar="N", type=positive, default=200, help=text)
    words = command.add_argument_group("how tokens are chosen").add_argument
    words("--temperature", type=float, default=0.8, help="0 takes the likeliest token (0.8)")
    words("--top-k", metavar="K", type=int, help="draw from the K likeliest tokens only")
    words("--top-p", metavar="P", type=float, help="draw from the fewest tokens of probability P")
    words("--seed", type=int, default=0, help="another one, another text (0)")
    held = command.add_argument_group("how weights are held").add_argument
    held("--bits", type=int, choices=(8, 4), help="round the weights of linear layers")
    held("--group-size", metavar="G", type=natural, default=128, help="weights that share a scale; "
         "0 for one in each row (128)")  # fmt: skip
    held("--dynamic", action="store_true", help="with --bits 8: round inputs too (W8A8), faster")
    held("--dtype", choices=tuple(DTYPES), help="of all else; by default as stored")
    text = "ranks that share each layer: local processes, or those that torchrun started (1)"
    held("--tensor", metavar="T", type=positive, default=1, help=text)
    held("--pipe", metavar="P", type=positive, default=1, help="ranks that have different layers, "
         "processes as for --tensor (1)")  # fmt: skip
    held("--device", type=torch.device, help="cpu, cuda, cuda:1, ...; by default a GPU if any")


def _generate_command(command: argparse.ArgumentParser, found: argparse.Namespace) -> int:
    try:
        _check(found)
        read_config(found.model)  # before a text is asked for
        prompt = _prompt(found.prompt)
        storage = _storage(found)
    except ValueError as error:
        command.error(str(error))
    except zf.ZfuncError as error:
        return print_error(error)
    console = Console(stderr=True, highlight=False)
    try:
        _start(found, prompt, storage)
    except KeyboardInterrupt:
        console.print("\ninterrupted")
        return 130
    except BrokenPipeError:  # who reads has seen enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (zf.ZfuncError, ValueError) as error:
        return print_error(error)
    return 0


def _start(found: argparse.Namespace, prompt: str, storage: Storage) -> None:
    """Continue the text here, or on as many ranks as are to share the model."""
    given = argparse.Namespace(**{k: v for k, v in vars(found).items() if k != "command"})
    if storage.ranks > 1 and "RANK" not in os.environ:
        zf.launch(_run, given, prompt, storage, nprocs=storage.ranks)
        return
    if storage.ranks > 1:
        zf.init()
    _run(given, prompt, storage)


def _check(found: argparse.Namespace) -> None:
    check_sampling(found.temperature, found.top_k, found.top_p, found.seed)
    if found.dynamic and found.bits != 8:
        raise ValueError("--dynamic rounds the inputs of 8-bit weights: add --bits 8")
    if found.tensor * found.pipe > 1 and "RANK" in os.environ:
        _check_ranks(found, int(os.environ.get("WORLD_SIZE", 1)))


def _check_ranks(found: argparse.Namespace, world: int) -> None:
    asked = {"tensor": found.tensor, "pipe": found.pipe}
    if world % (found.tensor * found.pipe):
        told = " ".join(f"--{name} {size}" for name, size in asked.items() if size > 1)
        some = "it" if 1 in asked.values() else f"{found.tensor * found.pipe}"
        raise ValueError(f"{told} under torchrun with {world} ranks: expected a multiple of {some}")
    if found.prompt in (None, "-"):
        raise ValueError("ranks of torchrun cannot all read standard input: give --prompt TEXT")


def _prompt(given: str | None) -> str:
    """The text to continue.

    Raises:
        ValueError: there is none.
    """
    if given is None and sys.stdin.isatty():
        raise ValueError("no text to continue: give --prompt TEXT, or write it to standard input")
    text = sys.stdin.read() if given in (None, "-") else str(given)
    if not text:
        raise ValueError("the text to continue is empty: give at least a character")
    return text


def _storage(found: argparse.Namespace) -> Storage:
    device = found.device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device {device}: torch sees no GPU here")
    dtype = None if found.dtype is None else DTYPES[found.dtype]
    group = found.group_size or None
    sizes = found.tensor, found.pipe
    return Storage(found.bits, group, found.dynamic, dtype, device, *sizes)


@torch.no_grad()
def _run(found: argparse.Namespace, prompt: str, storage: Storage) -> None:
    """Continue the text; of several ranks the first one writes."""
    first = zf.rank() == 0
    console = Console(file=sys.stderr if first else io.StringIO(), highlight=False)
    model = open_text_model(found.model, storage)
    size = f"{si(zf.tree.size_bytes(model.params))}B"
    ranks = f" on the first of {storage.ranks} ranks" if storage.pipe > 1 else ""
    ranks = ranks or (f" on each of {storage.tensor} ranks" if storage.tensor > 1 else "")
    console.print(f"[dim]{escape(model.said)}, {size}{ranks}[/dim]", soft_wrap=True)
    before = model.encode(prompt)
    ids = torch.tensor([before], device=storage.device)
    file = sys.stdout if first else io.StringIO()
    out = TokenWriter(file, model, before)
    if file.isatty():
        out.show(prompt)
    start = time.perf_counter()
    zf.generate(
        model.decoder,
        model.params,
        ids,
        max_new_tokens=found.max_new_tokens,
        temperature=found.temperature,
        top_k=found.top_k,
        top_p=found.top_p,
        key=zf.random.key(found.seed),
        stop=model.stop,
        stream=out,
    )
    out.finish()
    seconds = time.perf_counter() - start
    rate = si(out.count / seconds)
    console.print(f"[dim]{out.count} tokens in {seconds:.1f} s, {rate} tokens/s[/dim]")


class TokenWriter:
    """Writes tokens as text while they come; a character only once all of it is there.

    Args:
        file: where to.
        model: knows how ids are read.
        before: the ids of the prompt: whether a word begins with a space depends on them.
    """

    def __init__(self, file: TextIO, model: TextModel, before: Sequence[int]) -> None:
        self.count = 0
        self._file, self._decode, self._ends = file, model.decode, set(model.stop)
        self._ids = list(before[-LONGEST:])
        # What is decoded begins at the first of these; what is out ends at the second.
        self._start, self._out = 0, len(self._ids)

    def __call__(self, tokens: Tensor) -> None:
        self.count += 1
        if int(tokens[0]) not in self._ends:
            self._ids.append(int(tokens[0]))
            self._write(last=False)

    def _write(self, last: bool) -> None:
        known = self._decode(self._ids[self._start : self._out])
        text = self._decode(self._ids[self._start :])
        half = text.endswith("\ufffd") and len(self._ids) - self._out < LONGEST
        if half and not last:
            return
        self.show(text[len(known) :])
        self._start, self._out = self._out, len(self._ids)

    def show(self, text: str) -> None:
        self._file.write(readable(text))
        self._file.flush()

    def finish(self) -> None:
        self._write(last=True)
        self.show("\n")
