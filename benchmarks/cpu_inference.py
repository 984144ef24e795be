"""Low-bit weights on the CPU: products, and decoding, against plain ones in the same run.

Contenders take turns, so what the machine does meanwhile falls on all of them; the figure of each
is its fastest turn (others on the machine only add), given as a ratio to fp32's. First one linear
layer at several numbers of rows, beside an fp32 layer of a quarter of its rows: as many bytes as
8-bit weights are, so what it takes to read them. Then tokens per second of a Llama with random
weights, with bytes and agreement with fp32.

    python -m benchmarks.cpu_inference
    python -m benchmarks.cpu_inference --threads 2 --turns 30 --out cpu_inference.json
    python -m benchmarks.cpu_inference --compile       # beside torch.compile, and torchao
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

import zfunc as zf
from benchmarks.meters import hardware, versions
from zfunc import quant
from zfunc.quant.grids import Format
from zfunc.quant.qtensor import QTensor

FORMATS = {
    "int8 W8A8, per row": Format(8, None, True, dynamic=True),
    "int8, per row": Format(8, None),
    "int8, groups of 128": Format(8, 128),
    "int4, groups of 128": Format(4, 128),
    "int4, groups of 32, asymmetric": Format(4, 32, symmetric=False),
}
Runs = dict[str, Callable[[], Any]]


def race(runs: Runs, turns: int) -> dict[str, float]:
    """The least seconds of each, all taking turns."""
    seen: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(turns + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if turn:  # the first one packs weights and warms up
                seen[name].append(time.perf_counter() - start)
    return {name: min(times) for name, times in seen.items()}


def compiled(w: Tensor) -> Runs:
    """torchao's low-bit layers, where it is installed, under torch.compile as it recommends."""
    try:
        from torchao.quantization import (
            Int8DynamicActivationInt8WeightConfig,
            Int8WeightOnlyConfig,
            quantize_,
        )
    except ImportError:
        return {}
    configs = {
        "torchao W8A8, compiled": Int8DynamicActivationInt8WeightConfig(),
        "torchao int8, compiled": Int8WeightOnlyConfig(),
    }
    layers: Runs = {}
    for name, config in configs.items():
        layer = torch.nn.Linear(w.shape[1], w.shape[0], bias=False)
        layer.weight = torch.nn.Parameter(w.clone(), requires_grad=False)
        quantize_(layer, config)
        layers[name] = torch.compile(layer)
    return layers


def linear(n: int, k: int, m: int, turns: int, peers: bool) -> dict[str, dict[str, float]]:
    """One layer: seconds, ratio to fp32, and the error against the fp32 product."""
    torch.manual_seed(0)
    w, x = torch.randn(n, k) / k**0.5, torch.randn(m, k)
    lows = {name: QTensor.quantize(w, form) for name, form in FORMATS.items()}
    runs: Runs = {"fp32": lambda: F.linear(x, w)}
    runs.update({name: (lambda q=q: F.linear(x, q)) for name, q in lows.items()})
    if peers:
        layers = compiled(w)
        runs.update({name: (lambda layer=layer: layer(x)) for name, layer in layers.items()})
    quarter = w[: n // 4].clone()
    reading = {"fp32, a quarter of the layer": lambda: F.linear(x, quarter)}
    times, expected = race(runs | reading, turns), F.linear(x, w)
    found = {name: {"seconds": t, "ratio": times["fp32"] / t} for name, t in times.items()}
    for name, run in runs.items():
        found[name]["error"] = float((run() - expected).norm() / expected.norm())
    return found


def llama(width: int, depth: int) -> Any:
    """A Llama of random weights, its head not tied to its embedding."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16000,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=depth,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 64,
        max_position_embeddings=512,
    )
    return LlamaForCausalLM(config).eval()


def decoding(
    width: int, depth: int, tokens: int, turns: int, peers: bool
) -> dict[str, dict[str, float]]:
    """Greedy decoding of one text: tokens per second, ratios, bytes, equal tokens."""
    module = llama(width, depth)
    model = zf.functionalize(module)
    ids = torch.randint(16000, (1, 16))
    trees = {"fp32": model.params}
    for name, form in FORMATS.items():
        how = form.bits, form.group_size, form.symmetric
        trees[name] = quant.quantize_tree(model.params, *how, dynamic=form.dynamic, model=model)

    how_many: dict[str, Any] = {"max_new_tokens": tokens, "do_sample": False, "eos_token_id": None}

    @torch.no_grad()
    def plain() -> Tensor:
        return module.generate(ids, **how_many)

    runs: Runs = {"transformers, fp32": plain}
    if peers:
        twin = copy.deepcopy(module)
        twin.forward = torch.compile(twin.forward)

        @torch.no_grad()
        def traced() -> Tensor:
            return twin.generate(ids, cache_implementation="static", **how_many)

        runs["transformers, fp32, torch.compile"] = traced
    for name, params in trees.items():
        runs[name] = lambda p=params: zf.generate(model, p, ids, max_new_tokens=tokens)
    times, expected = race(runs, turns), plain()
    bytes_of = {name: zf.tree.size_bytes(params) for name, params in trees.items()}
    return {
        name: {
            "tokens/s": tokens / seconds,
            "to fp32": times["fp32"] / seconds,
            "to transformers": times["transformers, fp32"] / seconds,
            "MiB": bytes_of.get(name, bytes_of["fp32"]) / 2**20,
            "equal tokens": float((runs[name]()[:, 16:] == expected[:, 16:]).float().mean()),
        }
        for name, seconds in times.items()
    }


def show(console: Console, title: str, rows: dict[str, dict[str, float]]) -> None:
    table = Table(title=title)
    table.add_column("weights")
    names = list(next(iter(rows.values())))
    for name in names:
        table.add_column(name, justify="right")
    for name, row in rows.items():
        table.add_row(name, *(f"{row[key]:.4g}" if key in row else "" for key in names))
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--shape", type=int, nargs=2, default=(11008, 4096), metavar=("N", "K"))
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 4, 16])
    parser.add_argument("--width", type=int, default=1024, help="of the model, 0 for none")
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--out", type=Path, help="JSON with all figures")
    parser.add_argument(
        "--compile",
        action="store_true",
        help="also torch.compile, and torchao where it is installed (minutes; needs a compiler)",
    )
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    console, found = Console(), {}
    for m in given.rows:
        title = f"linear {given.shape[0]} x {given.shape[1]}, {m} row(s), {given.threads} threads"
        found[title] = linear(*given.shape, m, given.turns, given.compile)
        show(console, title, found[title])
    if given.width:
        title = f"greedy decoding, Llama of width {given.width} and depth {given.depth}"
        turns = max(3, given.turns // 4)
        shape = given.width, given.depth, given.tokens
        found[title] = decoding(*shape, turns, given.compile)
        show(console, title, found[title])
    if given.out:
        facts = {"hardware": hardware(), "versions": versions(), "figures": found}
        given.out.write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()
