"""Peak memory that torchtitan has published for Llama 3 on H100, beside what ``zf.foresee`` says.

The stand-in is Hugging Face's Llama with zfunc's schedule: stage 3, masters and moments in float32,
layers in bfloat16, fused attention; ``split(sequence=True)`` where torchtitan has tensor ranks. Not
in it are compiled blocks, float8, and what an allocator holds beyond tensors; and each rank has the
logits of all words here, where torchtitan cuts them over its tensor ranks. Where layers are
recomputed by a selection of its own, the truth is between all layers recomputed and none, and both
are told. Peaks of 3 and 4 layers are continued.

    python -m benchmarks.foresight_titan
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

import zfunc as zf

__all__ = ["Row", "rows", "table"]

FILE = Path(__file__).parent / "published" / "published_torchtitan_h100_202412.csv"
FEW = (3, 4)
VOCAB = 128256
SHAPES: dict[str, dict[str, int]] = {
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
           "num_attention_heads": 32, "num_key_value_heads": 8},
    "70B": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
            "num_attention_heads": 64, "num_key_value_heads": 8},
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """A published figure, and what is foreseen in its place.

    Attributes:
        what: in words.
        published: GiB.
        recomputed, kept: GiB with all layers recomputed and with none; None where not foreseen.
        why: what lacks, if nothing is foreseen.
    """

    what: str
    published: float
    recomputed: float | None = None
    kept: float | None = None
    why: str = ""


def rows() -> Iterator[Row]:
    """All of them."""
    for row in csv.DictReader(FILE.read_text().splitlines()):
        ways = " x ".join(
            f"{name} {row[name]}" for name in ("fsdp", "tp", "pp", "cp") if row[name] != "1"
        )
        what = f"{row['model']}, {ways}, {row['local_batch']} x {row['seq']}, {row['techniques']}"
        published = float(row["memory_GiB"])
        if row["cp"] != "1":
            yield Row(what, published, why="context parallelism")
        elif row["pp"] != "1":
            yield Row(what, published, why="how many microbatches is not published")
        else:
            case = row["model"], int(row["gpus"]), int(row["tp"]), int(row["local_batch"])
            found = [
                peak(*case, int(row["seq"]), remat) if remat or row["ac"] != "full" else None
                for remat in (True, False)
            ]
            yield Row(what, published, *found)


@cache
def peak(model: str, gpus: int, tensor: int, batch: int, length: int, remat: bool) -> float:
    """GiB at the peak of a rank's steady step."""
    of = [_peak(model, gpus, tensor, batch, length, remat, layers) for layers in FEW]
    more = SHAPES[model]["num_hidden_layers"] - FEW[1]
    return (of[1] + more * (of[1] - of[0])) / 2**30


def _peak(
    model: str, gpus: int, tensor: int, batch: int, length: int, remat: bool, layers: int
) -> int:
    step, state = step_and_state(SHAPES[model] | {"num_hidden_layers": layers}, gpus, tensor, remat)
    ids = torch.empty(batch, length, dtype=torch.int64, device="meta")
    return zf.foresee(step, state, ids, ranks=gpus).peak_bytes


def step_and_state(
    shape: dict[str, int], gpus: int, tensor: int, remat: bool
) -> tuple[Any, Callable[[], Any]]:
    """What a user would write."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=VOCAB, use_cache=False, **shape)
    with torch.device("meta"):
        module = LlamaForCausalLM(config)
    model = zf.functionalize(module)
    tx = zf.optim.adamw(3e-4)

    def loss(params: Any, ids: Tensor) -> Tensor:
        out: Tensor = model.apply(params, input_ids=ids, labels=ids).loss
        return out

    mesh = zf.mesh(data=gpus // tensor, tensor=tensor)
    step: Any = zf.train_step(loss, tx)
    if tensor > 1:
        step = zf.split(step, model, mesh=mesh, sequence=True)
    step = zf.precision(zf.donate(zf.shard(step, stage=3, mesh=mesh)), compute=torch.bfloat16)
    return zf.remat(step) if remat else step, lambda: zf.TrainState.create(model.params, tx)


def table(found: list[Row]) -> Table:
    """For people."""
    shown = Table(
        box=box.SIMPLE_HEAD, title="torchtitan's peak memory, GiB; no promise is made of it"
    )
    shown.add_column("Llama 3")
    for name in ("published", "layers recomputed", "kept"):
        shown.add_column(name, justify="right")
    for row in found:
        told = [row.why, ""] if row.why else [
            "" if x is None else f"{x:.1f}" for x in (row.recomputed, row.kept)
        ]  # fmt: skip
        shown.add_row(row.what, f"{row.published:.1f}", *told)
    return shown


def main() -> None:
    torch.set_num_threads(1)
    Console(width=120).print(table(list(rows())))


if __name__ == "__main__":
    main()
