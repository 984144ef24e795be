"""``zfunc convert``: from one kind of checkpoint to another, in one process."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from zfunc.commands.report import print_error
from zfunc.errors import CheckpointError, ZfuncError
from zfunc.files.conversion import KINDS, convert

__all__ = ["add_convert"]


def add_convert(commands: Any) -> None:
    """Add the subcommand."""
    command = commands.add_parser(
        "convert",
        help="turn a checkpoint into safetensors, and back",
        description="Write a checkpoint in another form, a tensor at a time. SRC may be a folder "
        "of zf.save (its newest good checkpoint is taken) or Hugging Face's safetensors, which is "
        "found out; or torch.distributed.checkpoint or DeepSpeed's universal form, which are "
        "partly pickle and have to be named by --from. safetensors hold the parameters alone. Of "
        "a pickle nothing but tensors and numbers is taken.",
    )
    command.add_argument("source", metavar="SRC", type=Path, help="the checkpoint")
    command.add_argument("target", metavar="DST", type=Path, help="the folder to write")
    text = "what to write; by default zfunc for safetensors, and safetensors for anything else"
    command.add_argument("--to", choices=KINDS, help=text)
    text = "what SRC is; found out for zfunc and safetensors"
    command.add_argument("--from", dest="kind", choices=(*KINDS, "deepspeed"), help=text)
    command.set_defaults(command=_convert_command)


def _convert_command(found: argparse.Namespace) -> int:
    try:
        if not found.source.exists():
            raise CheckpointError(f"{found.source}: no such file or folder.")
        said = convert(found.source, found.target, found.to, found.kind)
    except ZfuncError as error:
        return print_error(error)
    Console(highlight=False).print(escape(said), soft_wrap=True)
    return 0
