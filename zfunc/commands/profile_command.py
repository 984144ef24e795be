"""``zfunc profile``: one training step of a language model, by module and by operator."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

import zfunc as zf
from zfunc import optim
from zfunc.commands.arguments import natural, positive
from zfunc.commands.report import print_error
from zfunc.commands.text_models import DTYPES, causal_module, our_shape, read_config
from zfunc.commands.training import Run, transformed
from zfunc.language import gpt
from zfunc.language.gpt import GPTConfig
from zfunc.ranks import world

__all__ = ["add_profile"]


def add_profile(commands: Any) -> None:
    """Add the subcommand."""
    command = commands.add_parser(
        "profile",
        help="say where the time of a training step goes, with FLOPs and bytes by module",
        description="Run a training step of the built-in GPT, or of the model in a folder, on "
        "random tokens, and print its modules as a tree: parameters, FLOPs forward, backward and "
        "recomputed, MACs, bytes, time, FLOP/s. Of the folder config.json suffices: no weights "
        "are read, nothing is downloaded. Your own step: print(zf.profile(step, state, batch)).",
        epilog="examples: zfunc profile --stage 3 --remat --depth 4; zfunc profile --model "
        "./Qwen2-0.5B --context 512 --batch 1 --precision bf16 --chrome trace.json",
    )
    command.set_defaults(command=lambda found: _profile_command(command, found))
    _add_output(command.add_argument_group("what is shown").add_argument)
    _add_model(command.add_argument_group("the model and its batch").add_argument)
    _add_transforms(command.add_argument_group("the transforms around the step").add_argument)


def _add_output(option: Callable[..., Any]) -> None:
    option("--depth", type=natural, metavar="N", default=3, help="levels of modules (%(default)s)")
    option("--json", type=Path, metavar="FILE", help="write all figures of the first rank there")
    option("--chrome", type=Path, metavar="FILE", help="write a trace for chrome://tracing there")
    option("--warmup", type=positive, metavar="N", default=2, help="steps before it (%(default)s)")


def _add_model(option: Callable[..., Any]) -> None:
    shape = GPTConfig()
    option("--model", type=Path, metavar="DIR", help="a folder with config.json, of Hugging Face "
           "or of zfunc train; by default the built-in GPT of this shape:")  # fmt: skip
    option("--width", type=positive, default=shape.width, help="features (%(default)s)")
    option("--blocks", type=positive, default=shape.depth, help="its layers (%(default)s)")
    option("--heads", type=positive, default=shape.heads, help="attention heads (%(default)s)")
    option("--batch", type=positive, default=8, help="sequences, all ranks together (%(default)s)")
    option("--context", type=positive, default=128, help="tokens of a sequence (%(default)s)")
    option("--ranks", type=positive, help="local processes; by default one for each GPU, or 1")


def _add_transforms(option: Callable[..., Any]) -> None:
    option("--stage", type=int, choices=range(4), default=3, help="ZeRO (%(default)s)")
    option("--precision", choices=tuple(DTYPES), help="what layers compute in")
    option("--remat", action="store_true", help="recompute layers in backward")
    option("--accumulate", type=positive, metavar="N", default=1, help="microbatches (%(default)s)")
    option("--offload", choices=("none", "cpu"), default="none", help="where the state lives")
    option("--compress", choices=("int8", "int4"), help="how gradients travel")


def _profile_command(command: argparse.ArgumentParser, found: argparse.Namespace) -> int:
    given = argparse.Namespace(**{k: v for k, v in vars(found).items() if k != "command"})
    try:
        ranks = _ranks(given)
    except ValueError as error:
        command.error(str(error))
    try:
        if ranks > 1 and "RANK" not in os.environ:
            zf.launch(_profile_rank, given, nprocs=ranks)
        else:
            if ranks > 1 or torch.cuda.is_available():
                zf.init()
            _profile_rank(given)
    except KeyboardInterrupt:
        return 130
    except zf.ZfuncError as error:
        return print_error(error)
    return 0


def _ranks(found: argparse.Namespace) -> int:
    """How many ranks take part.

    Raises:
        ValueError: the batch does not split over them.
    """
    under_torchrun = int(os.environ.get("WORLD_SIZE", 0)) if "RANK" in os.environ else 0
    ranks = int(under_torchrun or found.ranks or torch.cuda.device_count() or 1)
    parts = ranks * found.accumulate
    if found.batch % parts:
        raise ValueError(
            f"--batch {found.batch} does not split over {ranks} rank(s) of {found.accumulate} "
            f"microbatch(es): expected a multiple of {parts}"
        )
    return ranks


@dataclass(frozen=True)
class _Model:
    """A language model to train: its loss, its parameters, how many tokens it knows."""

    loss: Callable[[Any, Tensor], Tensor]
    params: Any
    vocab: int


def _profile_rank(found: argparse.Namespace) -> None:
    """Every rank profiles its step; the first one prints."""
    alone = zf.world_size() == 1 and torch.cuda.is_available()
    device = torch.device("cuda") if alone else world.current().device
    model, tx = _model(found), optim.adamw(1e-3)
    names = ("stage", "precision", "remat", "accumulate", "offload", "compress")
    run = Run(**{name: getattr(found, name) for name in names})
    step = transformed(zf.train_step(model.loss, tx), run)
    params = zf.tree.map(lambda x: x.to(device), model.params)
    ids = torch.randint(model.vocab, (found.batch, found.context + 1))
    state = zf.TrainState.create(params, tx, key=0)
    rows = step.local_batch(ids).to(device)
    seen = zf.profile(step, state, rows, depth=found.depth, warmup=found.warmup)
    if zf.rank() == 0:
        Console(highlight=False, markup=False).print(str(seen), soft_wrap=True)
        for path, write in ((found.json, seen.json), (found.chrome, seen.chrome)):
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                write(path)


def _model(found: argparse.Namespace) -> _Model:
    """The model that is asked for, with random parameters.

    Raises:
        CheckpointError: the folder has no configuration.
        PlacementError: it is that of no causal language model.
    """
    shape = GPTConfig(width=found.width, depth=found.blocks, heads=found.heads)
    if found.model is not None:
        home, document = read_config(found.model)
        ours = our_shape(home, document)
        if ours is None:
            return _theirs(home)
        shape, _ = ours
    params = gpt.init(shape, zf.random.key(0))
    return _Model(partial(_our_loss, shape=shape), params, shape.vocab)


def _our_loss(params: Any, ids: Tensor, shape: GPTConfig) -> Tensor:
    return gpt.loss(params, ids, shape)


def _theirs(home: Path) -> _Model:
    model = zf.functionalize(causal_module(home), train=True)

    def loss(params: Any, ids: Tensor) -> Tensor:
        out: Tensor = model.apply(params, input_ids=ids, labels=ids, use_cache=False).loss
        return out

    return _Model(loss, model.params, model.config.vocab_size)
