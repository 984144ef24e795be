"""Training into low bits against full precision: held-out loss of a byte-level GPT.

The same GPT trains on the corpus that every Python ships, in full precision and under `quantize`;
what is scored is the exported low-bit model, beside the full model rounded after training.

    python -m benchmarks.low_bit_training
    python -m benchmarks.low_bit_training --steps 2800 --seeds 0 1 2
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from statistics import fmean
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import zfunc as zf
from zfunc import optim, quant
from zfunc.language import gpt
from zfunc.language.corpus import batch_at, read_corpus, windows
from zfunc.language.gpt import GPTConfig

CONTEXT, BATCH, PEAK = 64, 16, 2e-3


def schedules(steps: int) -> dict[str, dict[str, Any]]:
    """Settings whose last bit falls well before the end: n drops take 2**(n-1) periods.

    From 16 bits to 4 they take 2048, so a run of fewer than 2731 steps begins at fewer bits.
    """
    short, most = max(1, steps // 300), max(1, steps * 3 // 4)
    first = min(16, 4 + most.bit_length())
    return {
        "16 to 8 bits, 8 groups": {"target_bits": 8, "period": short, "groups": 8},
        "16 to 8 bits, 1 group": {"target_bits": 8, "period": short},
        f"{first} to 4 bits, groups of 32": {
            "start_bits": first,
            "target_bits": 4,
            "period": most >> (first - 5),
            "group_size": 32,
        },
    }


def train(config: GPTConfig, text: torch.Tensor, steps: int, how: dict[str, Any], seed: int) -> Any:
    """The parameters after training: exported in low bits if ``how`` says so."""
    tx = optim.adamw(optim.warmup_cosine(PEAK, steps // 20, steps, end=PEAK / 20))
    step: Any = zf.train_step(lambda p, batch: gpt.loss(p, batch, config), tx)
    step = zf.donate(zf.quantize(step, **how) if how else step)
    state = step.place(zf.TrainState.create(gpt.init(config, zf.random.key(seed)), tx))
    for i in range(steps):
        state, _ = step(state, batch_at(i, text, BATCH, CONTEXT, seed))
    return quant.exported(step, state) if how else state.params


def score(params: Any, config: GPTConfig, heldout: torch.Tensor) -> float:
    """Mean loss on held-out text, in nats per byte."""
    ids, targets = windows(heldout, CONTEXT)
    rows = torch.cat([ids, targets[:, -1:]], dim=1)  # whole windows only
    params = quant.dequantize_tree(params)
    with torch.no_grad():
        parts = [(len(part), float(gpt.loss(params, part, config))) for part in rows.split(100)]
    return sum(n * loss for n, loss in parts) / len(rows)


def runs(
    config: GPTConfig, steps: int, seed: int, progress: Callable[[str], None]
) -> dict[str, tuple[str, float]]:
    """Bits and held-out loss of each way to a model, from the same weights and batches."""
    corpus = read_corpus(context=CONTEXT)
    progress("full precision")
    full = train(config, corpus.train, steps, {}, seed)
    found = {"full precision": ("32", score(full, config, corpus.heldout))}
    for bits, size in ((8, None), (4, 32)):
        low = quant.quantize_tree(full, bits=bits, group_size=size)
        loss = score(low, config, corpus.heldout)
        found[f"rounded to {bits} bits after training"] = (str(bits), loss)
    for name, how in schedules(steps).items():
        progress(name)
        low = train(config, corpus.train, steps, how, seed)
        held = {x.format.bits for x in zf.tree.leaves(low) if isinstance(x, quant.QTensor)}
        found[name] = (", ".join(map(str, sorted(held))), score(low, config, corpus.heldout))
    return found


def arguments(about: str | None) -> argparse.ArgumentParser:
    """How large the GPT is and how long it trains, for benchmarks that train one."""
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    return parser


def main() -> None:
    given = arguments(__doc__).parse_args()
    config = GPTConfig(width=given.width, depth=given.depth, heads=2)
    console, found = Console(), []
    for seed in given.seeds:
        with console.status("") as status:

            def progress(what: str, status: Any = status, seed: int = seed) -> None:
                status.update(f"{what}, {seed=}")

            found.append(runs(config, given.steps, seed, progress))
    table = Table(title=f"held-out nats per byte after {given.steps} steps, seeds {given.seeds}")
    for head in ("training", "bits", "loss", "to full precision", "each seed"):
        table.add_column(head)
    for name in found[0]:
        over = [each[name][1] / each["full precision"][1] - 1 for each in found]
        table.add_row(
            name,
            found[0][name][0],
            f"{fmean(each[name][1] for each in found):.4f}",
            f"{fmean(over):+.2%}",
            " ".join(f"{x:+.2%}" for x in over),
        )
    console.print(table)


if __name__ == "__main__":
    main()
