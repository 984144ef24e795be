"""One rank of the training steps that :mod:`benchmarks.gpu_step` compares.

Contestants follow one another in this process, each from the same weights and over the same data. A
line of JSON for each goes to ``rank<number>.jsonl`` as soon as it is known.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.gpu_trace import exposure, kernels_of
from benchmarks.models import GPT, LEARNING_RATE, WEIGHT_DECAY, Size, batches, loss_of
from benchmarks.peers import fused_adamw

__all__ = ["CONTESTANTS", "GPU_SIZES", "measure"]

ROOT = Path(__file__).resolve().parents[1]
WARMUP, STEPS, PROFILED = 5, 20, 2
LONGEST = 25  # kernels that are told
GPU_SIZES = {
    "tiny": Size(layers=2, width=64, heads=2, vocab=256, tokens=32, batch=2),
    "100M": Size(layers=12, width=768, heads=12, vocab=16384, tokens=1024, batch=4),
    "370M": Size(layers=24, width=1024, heads=16, vocab=32768, tokens=1024, batch=8),
}
Step = Callable[[Tensor], Tensor]


def by_torch(module: nn.Module, *, wrap: str = "", half: bool = False) -> Step:
    """``loss.backward()`` and a fused AdamW, alone, under DDP or under FSDP2."""
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
    device = next(module.parameters()).device
    model: nn.Module = module
    if wrap == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        low = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        how: dict[str, Any] = {"mesh": mesh} | ({"mp_policy": low} if half else {})
        for block in module.blocks:
            fully_shard(block, **how)
        fully_shard(module, **how)
    elif half:
        autocast = partial(torch.autocast, device.type, torch.bfloat16)
    if wrap == "ddp":
        model = nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=True)
    optimizer = fused_adamw(model.parameters())

    def step(ids: Tensor) -> Tensor:
        with autocast():
            loss = loss_of(model(ids), ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def by_zfunc(module: nn.Module, *, captured: bool = False, **how: Any) -> Step:
    """The same through zfunc, donated."""
    import zfunc as zf

    step, state = step_and_state(module, **how)
    if captured and next(module.parameters()).is_cuda:  # else there is no graph
        step = zf.captured(step)
    state = step.place(state)

    def advance(ids: Tensor) -> Tensor:
        nonlocal state
        state, metrics = step(state, ids)
        return metrics["loss"].detach()

    return advance


def step_and_state(
    module: nn.Module, *, stage: int, half: bool = False, offload: bool = False
) -> tuple[Any, Any]:
    """The step of zfunc's, and the state to place."""
    import zfunc as zf
    from zfunc import optim

    model = zf.functionalize(module)
    tx = optim.adamw(LEARNING_RATE, weight_decay=WEIGHT_DECAY)

    def loss_fn(params: Any, ids: Tensor) -> Tensor:
        return loss_of(model.apply(params, ids), ids)

    step: Any = zf.train_step(loss_fn, tx)
    if half:
        step = zf.precision(step)
    if offload:
        step = zf.offload(step)
    return zf.donate(zf.shard(step, stage=stage)), zf.TrainState.create(model.params, tx)


# zfunc first: with one rank it needs no process group, which the others are given then.
CONTESTANTS: dict[str, Callable[[nn.Module], Step]] = {
    **{f"zfunc{stage}": partial(by_zfunc, stage=stage) for stage in range(4)},
    "zfunc3 offload": partial(by_zfunc, stage=3, offload=True),
    "zfunc0 bf16": partial(by_zfunc, stage=0, half=True),
    "zfunc3 bf16": partial(by_zfunc, stage=3, half=True),
    "zfunc0 bf16 captured": partial(by_zfunc, stage=0, half=True, captured=True),
    "zfunc3 bf16 captured": partial(by_zfunc, stage=3, half=True, captured=True),
    "zfunc3 offload bf16": partial(by_zfunc, stage=3, half=True, offload=True),
    "torch": by_torch,
    "torch bf16": partial(by_torch, half=True),
    "ddp": partial(by_torch, wrap="ddp"),
    "ddp bf16": partial(by_torch, wrap="ddp", half=True),
    "fsdp2": partial(by_torch, wrap="fsdp2"),
    "fsdp2 bf16": partial(by_torch, wrap="fsdp2", half=True),
}


def joined(name: str) -> None:
    """A process group for the contestant, if it needs one and there is none."""
    if name.startswith("zfunc"):
        import zfunc as zf

        zf.init()
    elif not name.startswith("torch") and not dist.is_initialized():
        store = dist.FileStore(tempfile.mkstemp()[1], 1)
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=store, rank=0, world_size=1)


def measure(step: Step, size: Size, rank: int, device: torch.device) -> dict[str, Any]:
    """Losses; and on a GPU milliseconds of a step, bytes, what waits, what communication costs."""
    data = batches(size, rank)
    ids = [x.to(device) for x in islice(data, 4)]
    losses = [step(ids[i % 4]) for i in range(WARMUP)]
    if device.type != "cuda":
        return {"losses": [float(x) for x in losses]}
    found: dict[str, Any] = {"losses": [float(x) for x in losses]}
    found["set_up"] = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(STEPS + 1)]
    torch.cuda.synchronize()
    start = time.perf_counter()
    marks[0].record()
    for i in range(STEPS):
        step(ids[i % 4])
        marks[i + 1].record()
    host = time.perf_counter() - start
    torch.cuda.synchronize()
    each = [a.elapsed_time(b) for a, b in pairwise(marks)]
    found |= {"milliseconds": median(each), "least": min(each), "host": 1e3 * host / STEPS}
    found["peak"] = torch.cuda.max_memory_allocated()
    found |= traced(step, ids)
    found["waits"] = waits(step, ids[0])  # last: a step that raised has spent its state
    return found


def foreseen(name: str, size: Size, ranks: int, gpu: str) -> dict[str, float]:
    """What ``zf.foresee`` says of a contestant of zfunc's on this GPU.

    Args:
        gpu: its name, as torch tells it.

    Returns:
        Bytes at the peak, the module's own beside; milliseconds, where the GPU has a preset.
    """
    import zfunc as zf
    from zfunc.foresight.presets import preset_of

    how = {k: v for k, v in CONTESTANTS[name].keywords.items() if k != "captured"}  # type: ignore[attr-defined]
    with torch.device("meta"):
        module = GPT(size)
    ids = torch.empty(size.batch, size.tokens, dtype=torch.int64, device="meta")
    told = zf.foresee(*step_and_state(module, **how), ids, ranks=ranks)
    own = sum(p.numel() * p.element_size() for p in module.parameters())
    found: dict[str, float] = {"foreseen_peak": told.peak_bytes + own}
    if preset := preset_of(gpu):
        cluster = zf.Cluster.preset(preset, gpus=ranks)
        found["foreseen_milliseconds"] = 1e3 * told.time(cluster).seconds
    return found


def traced(step: Step, ids: list[Tensor]) -> dict[str, Any]:
    """Milliseconds of a step that communication and nothing else ran, and that nothing ran; and
    those of the kernels that took longest."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for i in range(PROFILED):
            step(ids[i])
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        kernels = [*kernels_of(json.loads(path.read_text()))]
    found: dict[str, Any] = {key: x / PROFILED for key, x in exposure(kernels).items()}
    took = Counter[str]()
    for kernel, start, end in kernels:
        took[kernel[:80]] += (end - start) / 1e3 / PROFILED
    return found | {"kernels": {key: round(x, 3) for key, x in took.most_common(LONGEST)}}


def waits(step: Step, ids: Tensor) -> str:
    """What torch says of the first wait for the device in a steady step; empty if there is none."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(ids)
    except RuntimeError as error:
        frame = error.__traceback__
        while frame is not None and frame.tb_next is not None:
            frame = frame.tb_next
        if frame is None:
            return str(error)
        path = Path(frame.tb_frame.f_code.co_filename)
        where = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path.name
        return f"{where}:{frame.tb_lineno}: {error}"[:300]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return ""


def main() -> None:
    given = json.loads(sys.argv[1])
    rank, size = int(os.environ.get("RANK", "0")), GPU_SIZES[given["size"]]
    device = torch.device(given["device"])
    if device.type == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")  # TF32, for everybody
    else:
        torch.set_num_threads(1)
    with (Path(given["out"]) / f"rank{rank}.jsonl").open("a") as file:
        for name in given["names"]:
            joined(name)
            torch.manual_seed(0)
            with device:
                module = GPT(size)
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            step = CONTESTANTS[name](module)
            found = measure(step, size, rank, device)
            del step, module
            if device.type == "cuda" and name.startswith("zfunc"):
                ranks = int(os.environ.get("WORLD_SIZE", "1"))
                found |= foreseen(name, size, ranks, torch.cuda.get_device_name(device))
            file.write(json.dumps({"name": name} | found) + "\n")
            file.flush()
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
    if dist.is_initialized() and dist.get_world_size() == 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
