"""A device's constants, measured on it in a minute or two: what ``zfunc calibrate`` writes.

Each measurement is replayed on the clocks' own formulas, and a constant is what makes them say what
was measured. Several ranks measure at the same time, as they compute at the same time.
"""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zfunc.engine.differentiation import value_and_grad
from zfunc.engine.state import TrainState
from zfunc.engine.step import Step
from zfunc.errors import DeviceError
from zfunc.foresight.clusters import Cluster, peak_name
from zfunc.foresight.operation_times import OperationTimes
from zfunc.foresight.prediction import foresee
from zfunc.foresight.presets import PRESETS, preset_of
from zfunc.foresight.rows import StepRow
from zfunc.modules.functional import functionalize
from zfunc.optim.adaptive import adamw
from zfunc.optim.updates import apply_updates
from zfunc.ranks.axes import group
from zfunc.ranks.world import current
from zfunc.transforms.donation import donate
from zfunc.trees.nodes import Tree

__all__ = ["measure"]

# Rows, columns and length of the sums of products, in units of 128 on a CPU and 1,024 on a GPU.
PRODUCTS = (
    *((1, 1, 1), (1, 4, 1), (4, 1, 1), (1, 1, 4), (2, 2, 2), (2, 8, 2), (2, 2, 8), (4, 4, 1)),
    *((4, 4, 4), (4, 3, 1), (8, 2, 2), (1, 4, 4), (4, 1, 4), (1, 8, 1), (8, 1, 1), (1, 1, 8)),
    *((2, 4, 1), (4, 2, 1), (3, 3, 3), (4, 4, 2)),
)
RAMPS = (0, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
KEYS = (512, 1024, 4096)  # of attention
STREAMS = (1 << 23, 1 << 24, 1 << 25)  # elements: beyond caches
MESSAGES = (1 << 12, 1 << 18, 1 << 22, 1 << 24)  # bytes that are gathered
PATIENCE = 0.6  # seconds for one number

Timed = tuple[StepRow, float]


def _device_name(device: torch.device) -> str:
    """What a cluster calls a device: torch's name of a GPU, the model of a CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    told = Path("/proc/cpuinfo")
    lines = told.read_text().splitlines() if told.exists() else []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.processor() or platform.machine())


def measure(device: torch.device) -> Cluster:
    """Measure this rank's device, and the links to the other ranks, which measure as well.

    Args:
        device: what to measure.

    Returns:
        A cluster of as many devices as there are ranks, ``calibrated``.

    Raises:
        DeviceError: the machine is too busy to measure.
    """
    ranks = current().size
    cluster = _known(device, ranks)
    floats = [torch.float32] if device.type == "cpu" else [torch.float32, torch.bfloat16]
    dispatch, gap = _launches(device)
    cluster = replace(cluster, dispatch=dispatch, gap=gap)
    products = {dtype: _products(device, dtype) for dtype in floats}
    cluster = _with_peaks(cluster, products)
    cluster = _fitted(cluster, [x for timed in products.values() for x in timed], "product")
    rate = max(map(_rate, (_stream(device, n) for n in STREAMS)))
    if "memory_bandwidth" in _preset(device):
        cluster = replace(cluster, stream=min(1.0, rate / cluster.memory_bandwidth))
    else:
        cluster = replace(cluster, memory_bandwidth=rate, stream=1.0)
    attention = [_attention(device, n, floats[-1]) for n in KEYS]
    cluster = _fitted(cluster, attention, "attention")
    if ranks > 1:
        cluster = _with_links(cluster, device)
    when = f"{datetime.now(UTC):%Y-%m-%d}, torch {torch.__version__}, {ranks} rank(s)"
    return replace(cluster, calibrated=when)


def _preset(device: torch.device) -> dict[str, Any]:
    return PRESETS.get(preset_of(_device_name(device)), {})


def _known(device: torch.device, ranks: int) -> Cluster:
    """What nobody has to measure; the rest is overwritten."""
    common: dict[str, Any] = {
        "device": _device_name(device),
        "gpus": ranks,
        "peak_flops": {"float32": 1.0},
        "memory_bandwidth": 1.0,
        "multiprocessors": 1,
        **dict.fromkeys(("nvlink", "nic", "pcie"), 0.0),
    }
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        mine = {"memory": found.total_memory, "multiprocessors": found.multi_processor_count}
        preset = _preset(device)
        node = {} if preset else {"gpus_per_node": ranks}  # else those of its usual node
        cluster = Cluster(**{**common, **node, **preset, **mine})
        return replace(cluster, gpus_per_node=max(ranks, cluster.gpus_per_node))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks
    return Cluster(**common, memory=memory, kind="cpu", gpus_per_node=ranks)


def _seconds(call: Callable[[], Any], device: torch.device) -> float:
    """The least of as many calls as patience allows: others on the machine only add to it."""
    call()
    found: list[float] = []
    end = time.perf_counter() + PATIENCE
    while len(found) < 3 or (time.perf_counter() < end and len(found) < 50):
        found.append(_once(call, device, 1))
    return min(found)


def _once(call: Callable[[], Any], device: torch.device, times: int) -> float:
    if device.type != "cuda":
        begun = time.perf_counter()
        for _ in range(times):
            call()
        return (time.perf_counter() - begun) / times
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(times):
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / times


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def _tiny_step(device: torch.device, layers: int) -> tuple[int, Callable[[], None]]:
    """How many operations a step of AdamW on some layers has, and a call that takes one."""
    model = functionalize(nn.Sequential(*(_Block() for _ in range(layers))).to(device))
    tx, x = adamw(1e-3), torch.ones(4, 8, device=device)

    def loss(params: Tree, x: Tensor) -> Tensor:
        return cast(Tensor, model.apply(params, x)).square().mean()

    def update(state: TrainState, x: Tensor) -> tuple[TrainState, Tensor]:
        value, grads = value_and_grad(loss)(state.params, x)
        updates, after = tx.update(grads, state.opt_state, state.params)
        return state.replace(params=apply_updates(state.params, updates), opt_state=after), value

    step, state = donate(Step(update)), TrainState.create(model.params, tx)
    told = foresee(step, state, x, ranks=1, device=device.type)
    state = step.place(state)

    def run() -> None:
        nonlocal state
        state, value = step(state, x)
        float(value)

    return sum(row.kind == "compute" for row in told.rows), run


def _launches(device: torch.device) -> tuple[float, float]:
    """Host seconds for an operation of a step, and device seconds between two.

    What a step of tiny layers takes is the host's: modules and autograd between operations cost it
    more than these do. Twice as many layers tell what is each operation's; what a step takes once
    cancels out. Both take turns, so that others on the machine slow down both.

    Raises:
        DeviceError: the machine is too busy to tell.
    """
    (few, short), (many, long) = (_tiny_step(device, layers) for layers in (8, 16))
    begun = time.perf_counter()
    found: list[tuple[float, float]] = []
    while len(found) < 10 or time.perf_counter() - begun < 2 * PATIENCE:
        found.append((_wall(short), _wall(long)))
    least, most = map(min, zip(*found, strict=True))
    if most <= least:
        raise DeviceError(
            f"calibrate: a step of {many} operations took {most:.2g} s, no longer than one of "
            f"{few}: other programs keep the machine busy. Measure while it is quiet."
        )
    host = (most - least) / (many - few)
    if device.type != "cuda":
        return host, 0.0
    small = torch.ones(8, device=device)
    torch.cuda.synchronize(device)
    torch.cuda._sleep(50_000_000)  # the host gets ahead, so that the device alone is measured
    gap = _once(lambda: small.mul_(1.0), device, 500)
    return host, gap


def _products(device: torch.device, dtype: torch.dtype) -> list[Timed]:
    unit = 1024 if device.type == "cuda" else 128
    found = []
    for m, n, k in PRODUCTS:
        a = torch.ones(m * unit, k * unit, device=device, dtype=dtype)
        b = torch.ones(k * unit, n * unit, device=device, dtype=dtype)
        out = a @ b
        seconds = _seconds(partial(torch.mm, a, b, out=out), device)
        row = StepRow(
            *("compute", "mm"),
            flops=2 * a.shape[0] * a.shape[1] * b.shape[1],
            read=a.nbytes + b.nbytes,
            written=out.nbytes,
            shapes=(tuple(a.shape), tuple(b.shape)),
            dtype=dtype,
        )
        found.append((row, seconds))
    return found


def _with_peaks(cluster: Cluster, products: dict[torch.dtype, list[Timed]]) -> Cluster:
    """The best rates measured, where nobody has published a peak."""
    if cluster.peak_flops["float32"] > 1:
        return cluster
    best = {
        peak_name(dtype): max(row.flops / seconds for row, seconds in timed)
        for dtype, timed in products.items()
    }
    return replace(cluster, peak_flops=best)


def _fitted(cluster: Cluster, timed: Sequence[Timed], name: str) -> Cluster:
    """The share of the peak, and its ramp, with which formulas say best what was measured."""
    best, least = cluster, math.inf
    for ramp in RAMPS:
        how: dict[str, Any] = {name: 1.0, f"{name}_ramp": float(ramp)}
        tried = replace(cluster, memory_bandwidth=1e18, **how)
        times = OperationTimes(tried)
        ratios = [
            (times.of(row) - tried.gap) / max(seconds - tried.gap, 1e-9) for row, seconds in timed
        ]
        share = min(1.0, median(ratios))
        missed = sum(abs(math.log(ratio / share)) for ratio in ratios)
        if missed < least:
            best, least = replace(cluster, **{**how, name: share}), missed
    return best


def _rate(timed: Timed) -> float:
    row, seconds = timed
    return (row.read + row.written) / seconds


def _stream(device: torch.device, n: int) -> Timed:
    a, b = torch.ones(n, device=device), torch.ones(n, device=device)
    row = StepRow("compute", "add", read=2 * a.nbytes, written=a.nbytes)
    return row, _seconds(lambda: a + b, device)


def _attention(device: torch.device, keys: int, dtype: torch.dtype) -> Timed:
    heads = 16 if device.type == "cuda" else 2
    q = torch.ones(1, heads, keys, 64, device=device, dtype=dtype)
    row = StepRow(
        *("compute", "_scaled_dot_product_flash_attention"),
        flops=4 * heads * keys * keys * 64,
        shapes=(tuple(q.shape),) * 3,
        dtype=dtype,
        causal=True,
    )

    def call() -> Tensor:
        return F.scaled_dot_product_attention(q, q, q, is_causal=True)

    return row, _seconds(call, device)


def _wall(call: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def _with_links(cluster: Cluster, device: torch.device) -> Cluster:
    """The rate and the latency with which gathers of each size take what they took."""
    over = group(None, "data")
    found = []
    for nbytes in MESSAGES:
        each = nbytes // 4 // over.size
        full = torch.ones(each * over.size, device=device)
        shard = full[over.rank * each : (over.rank + 1) * each]
        count = 20 if nbytes < 1 << 20 else 4
        over.barrier()

        def call(full: Tensor = full, shard: Tensor = shard) -> None:
            over.all_gather(full, shard, label="calibrate").wait()
            if device.type == "cuda":
                torch.cuda.synchronize(device)

        call()
        found.append((full.nbytes, min(_wall(call) for _ in range(count))))
    latency, (large, longest) = found[0][1], found[-1]
    share = (over.size - 1) / over.size
    rate = large * share / max(longest - latency, 1e-9)
    # What is reached of other links (``link_share``) has not been measured.
    return replace(cluster, nvlink=rate / cluster.link_share, latency=latency, hop=0.0)
