"""``zfunc plan``: how to write the training step of a model for a cluster that you may not have."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape

import zfunc as zf
from zfunc.commands.arguments import positive, there
from zfunc.commands.report import print_error
from zfunc.commands.text_models import causal_module
from zfunc.errors import ZfuncError
from zfunc.foresight.choices import PlanRow
from zfunc.foresight.clusters import Cluster
from zfunc.foresight.presets import PRESETS
from zfunc.foresight.texts import seconds_text

__all__ = ["add_plan"]


def add_plan(commands: Any) -> None:
    """Add the subcommand."""
    command = commands.add_parser(
        "plan",
        help="find the fastest way to train a model on a cluster, before you rent it",
        description="Try stages, sizes of a mesh, microbatches and remat for a causal language "
        "model of Hugging Face under AdamW in bfloat16. Each is foreseen on the cluster: the real "
        "step runs as one rank of it, on tensors without memory. Prints a table, the best first, "
        "and the line to write. The exit status is 1 if nothing fits.",
    )
    text = "a folder with the model's config.json; neither weights nor a tokenizer are read"
    command.add_argument("--model", type=there, required=True, metavar="DIR", help=text)
    text = f"a JSON file (zfunc calibrate, Cluster.save), or one of {', '.join(PRESETS)}"
    command.add_argument("--cluster", required=True, metavar="FILE", help=text)
    text = "devices in all; by default as many as the file says"
    command.add_argument("--gpus", type=positive, metavar="N", help=text)
    text = "sequences of a step, all ranks together"
    command.add_argument("--batch", type=positive, required=True, metavar="N", help=text)
    text = "tokens of a sequence"
    command.add_argument("--seq", type=positive, required=True, metavar="N", help=text)
    text = "steps to try at most (%(default)s); a large model takes up to a minute each"
    command.add_argument("--trials", type=positive, default=24, metavar="N", help=text)
    command.add_argument("--json", type=Path, metavar="FILE", help="write the rows there, too")
    command.set_defaults(command=_plan_command)


def _plan_command(found: argparse.Namespace) -> int:
    console = Console(highlight=False)
    try:
        if found.json is not None:  # before minutes are spent
            found.json.parent.mkdir(parents=True, exist_ok=True)
        cluster = _cluster(found.cluster, found.gpus)
        with torch.device("meta"):
            model = zf.functionalize(causal_module(found.model, None))
        ids = torch.empty(found.batch, found.seq, dtype=torch.int64, device="meta")
        with console.status("foreseeing the first step") as status:
            tried: list[PlanRow] = []

            def tell(row: PlanRow) -> None:
                tried.append(row)
                best = min(tried, key=lambda x: x.cost)
                done = f"{len(tried)} of at most {found.trials} steps foreseen"
                so_far = f"; best so far {seconds_text(best.seconds)}" if best.fits else ""
                status.update(done + so_far)

            plan = zf.plan(model=model, batch=ids, cluster=cluster, trials=found.trials, tell=tell)
    except (ZfuncError, ValueError, OSError) as error:
        return print_error(error)
    console.print(plan.table())
    console.print(escape(plan.verdict), soft_wrap=True)
    for note in plan.assumed:
        console.print(escape(f"assumed: {note}"), soft_wrap=True)
    if found.json is not None:
        plan.save(found.json)
    return int(plan.best is None)


def _cluster(name: str, gpus: int | None) -> Cluster:
    if name in PRESETS:
        if gpus is None:
            raise ValueError(f"--cluster {name} is a device: say how many with --gpus.")
        return Cluster.preset(name, gpus)
    if not Path(name).is_file():
        raise ValueError(f"--cluster {name}: no such file, and none of {', '.join(PRESETS)}.")
    return Cluster.load(name, **({} if gpus is None else {"gpus": gpus}))
