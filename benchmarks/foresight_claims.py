"""Published rates of other software: what can be foreseen of them, and what lacks for the rest.

Azure 2022 and Narayanan et al. 2021 (https://arxiv.org/abs/2104.04473) give the model, the ranks
and the rows of each; the stand-in is that of ``foresight_mpt.py`` with recomputation, at stage 3.
Nothing is tuned on them: what separates them from the prediction is the software of their day.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.foresight_mpt import Case

__all__ = ["Claim", "claims"]

VOCAB = 51200
SHAPES = {"174.6": (12288, 96), "529.6": (20480, 105)}  # width and blocks, by billions
TITAN = "Llama 3 under FSDP2 with selective recomputation, compile or float8: no stand-in for time"
LACKS = {
    "published_torchtitan_h100_202412.csv": TITAN,
    "published_torchtitan_a100_2024.csv": TITAN,
    "published_seqpar_2205.05198.csv": "sequence parallelism of Megatron-LM: no stand-in",
}


@dataclass(frozen=True)
class Claim:
    """A published rate.

    Attributes:
        what: in words.
        case: what is foreseen in its place, or ``None``.
        seconds: of a step, by the published formula of its operations.
        why: nothing is foreseen, or what is not in it.
    """

    what: str
    case: Case | None
    seconds: float
    why: str


def claims(folder: Path) -> Iterator[Claim]:
    """All rows of the tables that are not of MPT."""
    for row in _rows(folder / "published_deepspeed_azure_2022.csv"):
        what = f"Azure, {row['model']} on {row['gpus']}, micro {row['micro']}, seq {row['seq']}"
        if not (row["micro"].isdigit() and row["tflops_per_gpu"]):
            why = row["certainty"] or row["use"]
            yield Claim(what, None, 0.0, f"{row['tflops_per_gpu'] or 'no rate'}: {why}")
            continue
        yield _claim(what, row, (int(row["hidden"]), int(row["layers"])), 1, "offload to the host")
    for row in _rows(folder / "published_megatron_sc21_table2.csv"):
        what = f"SC21, {row['scheme']}, {row['params_B']} B on {row['gpus']}, micro {row['micro']}"
        if row["scheme"] != "ZeRO-3":
            yield Claim(what, None, 0.0, "tensor and pipeline axes of Megatron-LM: no stand-in")
            continue
        count = int(row["batch"]) // (int(row["gpus"]) * int(row["micro"]))
        yield _claim(what, row, SHAPES[row["params_B"]], count, "software of 2021; from memory")
    for row in _rows(folder / "published_seed_claims.csv"):
        found = f"{row['what']}: {row['value']} {row['unit']} ({row['device']})"
        yield Claim(found, None, 0.0, f"{row['certainty']}; {row['use']}")
    for name, why in LACKS.items():
        yield Claim(f"{name}, {len(list(_rows(folder / name)))} rows", None, 0.0, why)


def _claim(what: str, row: dict[str, str], shape: tuple[int, int], count: int, why: str) -> Claim:
    (width, depth), seq, micro = shape, int(row["seq"]), int(row["micro"])
    gpus = int(row["gpus"])
    case = Case("a100-80", width, depth, gpus, seq, micro, count, remat=True)
    return Claim(what, case, _flops(case) / (1e12 * float(row["tflops_per_gpu"])), why)


def _flops(case: Case) -> float:
    """Of one rank: Narayanan et al., equation 3, which counts recomputation."""
    rows, w, seq = case.micro * case.count, case.width, case.seq
    inner = 1 + seq / (6 * w) + VOCAB / (16 * case.depth * w)
    return 96 * rows * seq * case.depth * w * w * inner


def _rows(path: Path) -> Iterator[dict[str, str]]:
    yield from csv.DictReader(path.read_text().splitlines())
