"""The command line: ``zfunc train``, ``generate``, ``plan``, ``profile`` and smaller ones.

Flags become a :class:`~zfunc.commands.training.Run`, and the ranks that carry it out start here.
"""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape

import zfunc as zf
from zfunc.commands.arguments import Parser, made_folder, natural, positive, rate, wrong_file
from zfunc.commands.calibrate_command import add_calibrate
from zfunc.commands.convert_command import add_convert
from zfunc.commands.doctor_command import add_doctor
from zfunc.commands.generate_command import add_generate
from zfunc.commands.plan_command import add_plan
from zfunc.commands.profile_command import add_profile
from zfunc.commands.report import draw_curve, print_error, read_rows
from zfunc.commands.subjects import read_tokens
from zfunc.commands.text_models import DTYPES, LOW_BIT
from zfunc.commands.training import Run, train_rank
from zfunc.files.folder import list_steps
from zfunc.files.locking import hold
from zfunc.language.corpus import SOURCES, Corpus, entropies, read_corpus
from zfunc.language.gpt import GPTConfig
from zfunc.schedules.catalogue import SCHEDULES, schedule

__all__ = ["main", "parser", "run_of", "train"]

FINE = 3e-5  # learning rate for weights that are trained already


def main(arguments: Sequence[str] | None = None) -> int:
    """The ``zfunc`` command.

    Args:
        arguments: as typed after ``zfunc``; by default those of this process.

    Returns:
        An exit status: 0, 1 after an error, 2 for arguments that mean nothing, 130 after Ctrl-C.
    """
    found = parser().parse_args(arguments)
    return int(found.command(found))


def parser() -> argparse.ArgumentParser:
    """The arguments that ``zfunc`` understands, with their help."""
    top = Parser(prog="zfunc", description="Functional transforms for training steps in PyTorch.")
    top.add_argument("--version", action="version", version=f"zfunc {zf.__version__}")
    top.set_defaults(command=lambda found: _help(top))
    commands = top.add_subparsers(title="commands", metavar="command")
    _add_train(commands)
    add_generate(commands)
    add_plan(commands)
    add_convert(commands)
    add_profile(commands)
    add_doctor(commands)
    add_calibrate(commands)
    return top


def _help(top: argparse.ArgumentParser) -> int:
    top.print_help()
    return 0


def _add_train(commands: Any) -> None:
    command = commands.add_parser(
        "train",
        help="train a small GPT, or a Hugging Face model, on a text, under any transforms",
        description="Train a byte-level GPT on the prose that every Python ships (or on a file "
        "of yours), sharded over local ranks, all GPUs, or the ranks that torchrun started. "
        "With --model, train the causal language model of a Hugging Face folder instead, and "
        "write another such folder. Writes metrics.jsonl and loss.png; ends with the held-out "
        "loss, of bytes beside the text's own entropies.",
    )
    command.set_defaults(command=lambda found: _train_command(command, found))
    _add_run(command.add_argument_group("the run"))
    _add_model(command.add_argument_group("the model and its optimizer"))
    _add_transforms(command.add_argument_group("the transforms around the step"))


def _add_run(group: Any) -> None:
    option = _options(group)
    option("--ranks", "local processes; by default one for each GPU, or 2", type=positive)
    option("--steps", "optimizer steps in all", type=positive, default=Run.steps)
    option("--batch", f"sequences per step, all ranks together ({Run.batch})", type=positive)
    option("--context", "bytes per sequence", type=positive, default=Run.context)
    option("--seed", "of the weights and of the data", type=int, default=Run.seed)
    data = f"a text file, JSON lines with a field text, or one of {', '.join(SOURCES)}"
    option("--data", data, metavar="FILE", default=Run.data)
    option("--out", "folder for the results", type=Path, metavar="DIR", default=Run.out)
    every = "steps between checkpoints, 0 for none"
    option("--save-every", every, type=natural, metavar="N", default=Run.save_every)
    option("--keep", "checkpoints to keep", type=positive, metavar="N", default=Run.keep)
    option("--resume", "go on from the newest checkpoint in the folder", action="store_true")
    option("--sample", "bytes to write at the end", type=natural, metavar="N", default=Run.sample)


def _add_model(group: Any) -> None:
    option, shape = _options(group), GPTConfig()
    folder = "a Hugging Face folder: config.json, tokenizer and, to go on from them, weights"
    option("--model", folder, dest="folder", type=Path, metavar="DIR")
    option("--width", "features", type=positive, default=shape.width)
    option("--depth", "blocks", type=positive, default=shape.depth)
    option("--heads", "attention heads", type=positive, default=shape.heads)
    option("--tied", "let one table embed and predict", action="store_true")
    peak = f"peak learning rate of AdamW ({Run.lr:g}; with --model {FINE:g})"
    option("--lr", peak, type=rate)


def _add_transforms(group: Any) -> None:
    option = _options(group)
    stage = "ZeRO: split 0 nothing, 1 optimizer state, 2 and gradients, 3 and parameters"
    option("--stage", stage, type=int, choices=range(4), default=Run.stage)
    shared = "ranks that share the work of each layer, by its heads; the others have other rows"
    option("--tensor", shared, type=positive, metavar="T", default=Run.tensor)
    stages = "stages, ranks that have different layers; a batch goes through them in microbatches"
    option("--pipe", stages, type=positive, metavar="P", default=Run.pipe)
    names = tuple(SCHEDULES)
    option("--schedule", "what stages do when", choices=names, default=Run.schedule)
    parts = "microbatches of a step; with --pipe by default 4 for each stage"
    option("--microbatches", parts, type=positive, metavar="N")
    tiers = ("none", "cpu", "disk")
    option("--offload", "where the state lives", choices=tiers, default=Run.offload)
    methods = ("onebit", "zero_one", "int8", "int4")
    option("--compress", "how gradients travel (zero_one: at --stage 0)", choices=methods)
    option("--drop", "progressive layer dropping, down to THETA", type=float, metavar="THETA")
    option("--precision", "what layers compute in", choices=tuple(DTYPES))
    option("--remat", "recompute layers in backward", action="store_true")
    option("--accumulate", "microbatches per step", type=positive, metavar="N", default=1)
    low = "train weights into so many bits, for `zfunc generate --bits`"
    option("--quantize", low, type=int, choices=(8, 4))
    bits = "bits to begin with; by default 16, or what the run has time for"
    option("--quantize-from", bits, type=int, choices=range(4, 17), metavar="BITS")
    period = "steps until the first bit falls, each further one takes twice as long"
    option("--quantize-period", period, type=positive, metavar="N")
    group = "weights that share a scale, 0 for a whole matrix"
    option("--quantize-group", group, type=natural, metavar="G", default=Run.quantize_group)
    option("--quantize-curvature", "sensitive layers lose their bits later", action="store_true")


def _options(group: Any) -> Callable[..., None]:
    """``add_argument`` with the help first, and the default, if there is one, in it."""

    def option(flag: str, text: str, **kw: Any) -> None:
        group.add_argument(flag, help=f"{text} (%(default)s)" if "default" in kw else text, **kw)

    return option


def run_of(found: argparse.Namespace) -> Run:
    """The run that parsed arguments describe.

    Raises:
        ValueError: they contradict each other.
    """
    world = int(os.environ.get("WORLD_SIZE", 0)) if "RANK" in os.environ else 0
    if world and found.ranks not in (None, world):
        raise ValueError(f"--ranks {found.ranks} under torchrun with {world}: leave --ranks out")
    together = found.tensor * found.pipe
    ranks = world or found.ranks or torch.cuda.device_count() or max(2, together)
    _check_mesh(found, ranks)
    microbatches = _microbatches(found)
    many = microbatches or found.accumulate
    parts = ranks // together * many
    batch = found.batch or -(-Run.batch // parts) * parts
    if batch % parts:
        raise ValueError(
            f"--batch {batch} does not split over {ranks // together} ranks of "
            f"{many} microbatch(es): expected a multiple of {parts}, such as "
            f"{-(-batch // parts) * parts}"
        )
    if found.drop is not None and not 0 < found.drop <= 1:
        raise ValueError(f"--drop {found.drop:g}: expected a probability, 0 < THETA <= 1")
    _check_low_bits(found)
    if found.folder is not None:
        _check_folder(found)
    shape = {name: getattr(found, name) for name in ("width", "depth", "heads", "tied")}
    same = {
        name: getattr(found, name)
        for name in Run.__dataclass_fields__
        if name not in ("model", "ranks", "batch", "resume", "microbatches", "lr")
    }
    # Under torchrun --max-restarts the job that comes back goes on with what it had.
    resume = found.resume or int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0
    lr = (Run.lr if found.folder is None else FINE) if found.lr is None else found.lr
    how = {"lr": lr, "ranks": ranks, "batch": batch, "resume": resume, "microbatches": microbatches}
    return Run(model=GPTConfig(**shape), **how, **same)


def _microbatches(found: argparse.Namespace) -> int | None:
    """Of the stages; ``None`` where there is no pipeline.

    Raises:
        ValueError: there are more parts of the model than blocks, or what else asks for something
            that stages do not have.
    """
    if found.pipe == 1 and found.schedule != Run.schedule:
        raise ValueError(
            f"--schedule {found.schedule} without stages, which it is for: give --pipe 2, or leave "
            "it out."
        )
    if found.pipe == 1 and found.microbatches is None:
        return None
    if found.accumulate > 1:
        raise ValueError(
            f"--accumulate {found.accumulate} with stages, which cut a batch themselves: leave it "
            f"out, and give --microbatches {found.accumulate}"
        )
    if found.pipe > 1 and (found.compress or found.offload == "disk"):
        what = f"--compress {found.compress}" if found.compress else "--offload disk"
        raise ValueError(f"{what} with --pipe {found.pipe}: stages do without. Leave out one.")
    many = found.microbatches or 4 * found.pipe
    chunks = schedule(found.schedule, found.pipe, many).chunks
    if found.folder is None and chunks > found.depth:
        raise ValueError(
            f"--pipe {found.pipe} with --schedule {found.schedule} takes a model apart into "
            f"{chunks}, and it has --depth {found.depth} blocks. Take fewer stages, or more blocks."
        )
    return int(many)


def _check_mesh(found: argparse.Namespace, ranks: int) -> None:
    tensor, pipe = found.tensor, found.pipe
    if found.folder is None and tensor > found.heads:
        raise ValueError(
            f"--tensor {tensor} with --heads {found.heads}: each rank needs a head. Take at most "
            f"--tensor {found.heads}, or more heads."
        )
    if ranks % (tensor * pipe):
        told = [f"--tensor {tensor}"] * (tensor > 1) + [f"--pipe {pipe}"] * (pipe > 1)
        parts = tensor * pipe
        raise ValueError(
            f"{' with '.join(told)} does not divide {ranks} ranks: expected a multiple of {parts}, "
            f"such as {-(-ranks // parts) * parts} (--ranks, or what torchrun starts)"
        )


def _check_folder(found: argparse.Namespace) -> None:
    shape = GPTConfig()
    told = [name for name in ("width", "depth", "heads", "tied", "quantize")
            if getattr(found, name) != getattr(shape, name, None)]  # fmt: skip
    if told:
        flags = ", ".join(f"--{name}" for name in told)
        raise ValueError(f"{flags} with --model: these are of the built-in GPT. Leave them out.")
    if found.out.resolve() == found.folder.resolve():
        raise ValueError(f"--out {found.out} is the folder of --model: it would be written over")


def _check_low_bits(found: argparse.Namespace) -> None:
    start = found.quantize_from
    if found.quantize is None:
        if start or found.quantize_period or found.quantize_curvature:
            raise ValueError("--quantize-from, -period and -curvature need --quantize 8 or 4")
    elif start is not None and start < found.quantize:
        raise ValueError(
            f"--quantize-from {start} lies below --quantize {found.quantize}: bits only fall"
        )


def _train_command(command: argparse.ArgumentParser, found: argparse.Namespace) -> int:
    try:
        run = run_of(found)
        if run.folder is None:
            corpus = read_corpus(run.data, context=run.context)
        else:
            corpus = read_tokens(run.folder, run.data, run.context)
        made_folder("--out", run.out)
    except zf.ZfuncError as error:
        return print_error(error)
    except ValueError as error:
        command.error(str(error))
    except OSError as error:
        command.error(wrong_file("--data", found.data, error))
    return train(run, corpus)


def train(run: Run, corpus: Corpus) -> int:
    """Start the ranks of a run, wait for them, and draw its curve whatever ended it.

    Under torchrun this process is one of the ranks; with one rank it is the only one;
    else ``run.ranks`` local processes are started.

    Returns:
        An exit status, as :func:`main`.
    """
    console, first = Console(highlight=False, stderr=True), os.environ.get("RANK", "0") == "0"
    try:
        if first and not run.resume:
            _make_way(run, console)
        _start(run)
    except KeyboardInterrupt:
        console.show_cursor(True)  # the rank that drew the bar may not have had the time
        console.print("\ninterrupted; what was done so far is kept")
        return 130
    except zf.ZfuncError as error:
        return print_error(error)
    finally:
        if first:
            write_curve(run, corpus, console)
    return 0


def _start(run: Run) -> None:
    if run.ranks > 1 and "RANK" not in os.environ:
        zf.launch(train_rank, run, nprocs=run.ranks)
        return
    if "RANK" in os.environ or torch.cuda.is_available():
        zf.init()
    train_rank(run)


def _make_way(run: Run, console: Console) -> None:
    """Before a run that begins afresh: rows of an earlier one go, its checkpoints step aside.

    Those that have stepped aside before stay until the run behind them has one of its own.

    Raises:
        CheckpointError: the earlier run is still there.
    """
    results = [path for name in ("metrics.jsonl", LOW_BIT) if (path := run.out / name).exists()]
    if run.checkpoints.exists():
        hold(run.checkpoints)
        if list_steps(run.checkpoints):
            shutil.rmtree(run.set_aside, ignore_errors=True)
            run.checkpoints.rename(run.set_aside)
            for path in results:
                path.rename(run.set_aside / path.name)
            told = f"without --resume: the run before this one steps aside, to {run.set_aside}"
            console.print(escape(told), soft_wrap=True)
            return
    for path in results:
        path.unlink()


def write_curve(run: Run, corpus: Corpus, console: Console) -> None:
    """Draw ``loss.png`` from the rows on disk, and say where the results are."""
    rows = read_rows(run.out / "metrics.jsonl")
    levels, unit = {}, "token"
    if run.folder is None:
        own, unit = entropies(corpus.heldout), "byte"
        levels = {"held-out unigram entropy": own.unigram, "held-out bigram entropy": own.bigram}
    problem = draw_curve(rows, run.out / "loss.png", levels, unit)
    console.print(escape(problem or f"curve: {run.out / 'loss.png'}"), soft_wrap=True)
    if rows:
        console.print(escape(f"metrics: {run.out / 'metrics.jsonl'}"), soft_wrap=True)
