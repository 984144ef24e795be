"""Training into low bits against full precision: held-out loss of a byte-level GPT.

The same GPT trains on the corpus that every Python ships, in full precision and under `quantize`;
what is scored is the exported low-bit model, beside the full model rounded after training.

    python -m benchmarks.low_bit_training
    python -m benchmarks.low_bit_training --steps 2800
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import zfunc as zf
from zfunc import optim, quant
from zfunc.language import gpt
from zfunc.language.corpus import batch_at, read_corpus, windows
from zfunc.language.gpt import GPTConfig

CONTEXT, BATCH = 64, 16


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


def train(config: GPTConfig, text: torch.Tensor, steps: int, how: dict[str, Any]) -> Any:
    """The parameters after training: exported in low bits if ``how`` says so."""
    tx = optim.adamw(2e-3)
    step: Any = zf.train_step(lambda p, batch: gpt.loss(p, batch, config), tx)
    step = zf.donate(zf.quantize(step, **how) if how else step)
    state = step.place(zf.TrainState.create(gpt.init(config, zf.random.key(0)), tx))
    for i in range(steps):
        state, _ = step(state, batch_at(i, text, BATCH, CONTEXT, 0))
    return quant.exported(step, state) if how else state.params


def score(params: Any, config: GPTConfig, heldout: torch.Tensor) -> float:
    """Mean loss on held-out text, in nats per byte."""
    ids, targets = windows(heldout, CONTEXT)
    rows = torch.cat([ids, targets[:, -1:]], dim=1)[:500]  # whole windows only
    params = quant.dequantize_tree(params)
    with torch.no_grad():
        return sum(float(gpt.loss(params, part, config)) for part in rows.split(100)) / 5


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--depth", type=int, default=2)
    given = parser.parse_args()
    config = GPTConfig(width=given.width, depth=given.depth, heads=2)
    corpus = read_corpus(context=CONTEXT)
    full = train(config, corpus.train, given.steps, {})
    base = score(full, config, corpus.heldout)
    rows = [("full precision", "32", base, 0.0)]
    for bits, size in ((8, None), (4, 32)):
        low = quant.quantize_tree(full, bits=bits, group_size=size)
        rows.append(("rounded after training", str(bits), score(low, config, corpus.heldout), 0.0))
    for name, how in schedules(given.steps).items():
        start = time.perf_counter()
        low = train(config, corpus.train, given.steps, how)
        found = {x.format.bits for x in zf.tree.leaves(low) if isinstance(x, quant.QTensor)}
        loss, seconds = score(low, config, corpus.heldout), time.perf_counter() - start
        rows.append((name, str(sorted(found)), loss, seconds))
    table = Table(title=f"held-out nats per byte after {given.steps} steps, {corpus.name}")
    for head in ("training", "bits", "loss", "to full precision", "seconds"):
        table.add_column(head)
    for name, text, loss, seconds in rows:
        table.add_row(name, text, f"{loss:.4f}", f"{loss / base - 1:+.2%}", f"{seconds:.0f}")
    Console().print(table)


if __name__ == "__main__":
    main()
