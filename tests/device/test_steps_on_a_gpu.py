"""Steps on a real GPU: captured, compiled, profiled, foreseen, split, in a pipeline, by Trainer."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import zfunc as zf
from benchmarks.gpu_rank import GPU_SIZES
from benchmarks.models import Size, batches, build, loss_of
from tests.gpu.test_captured import CASES, STEPS, down, made, same
from tests.gpu.test_captured import batch as given
from tests.gpu.training import gpt_model, trained
from zfunc import optim
from zfunc.foresight.calibration import measure
from zfunc.language import gpt

DEVICE = torch.device("cuda", 0)
TINY = GPU_SIZES["tiny"]
MIDDLE = Size(layers=6, width=512, heads=8, vocab=8192, tokens=256, batch=4)
Wrap = Callable[[Any], Any]


def run(wrap: Wrap, tx: Any) -> tuple[list[Any], Any]:
    step, state = made(wrap, tx)
    metrics = []
    for i in range(STEPS):
        state, out = step(state, given(i))
        metrics.append(down(out))
    return metrics, down(step.unplace(state))


@pytest.mark.parametrize("name", CASES)
def test_a_captured_step_is_the_step(name: str) -> None:
    """Its graph replays the eager step, bit for bit."""
    wrap, tx = CASES[name]
    eager, captured = run(wrap, tx), run(lambda f: zf.captured(wrap(f)), tx)
    same(
        {str(i): x for i, x in enumerate(eager[0])}, {str(i): x for i, x in enumerate(captured[0])}
    )
    same(eager[1], captured[1])


WRAPS: dict[str, Wrap] = {
    "donate": zf.donate,
    **{f"stage {n}": lambda f, n=n: zf.donate(zf.shard(f, stage=n)) for n in range(4)},  # type: ignore[misc]
    "stage 3, remat": lambda f: zf.donate(zf.remat(zf.shard(f, stage=3))),
    "stage 3, bf16": lambda f: zf.donate(zf.precision(zf.shard(f, stage=3))),
    "stage 1, bf16, remat": lambda f: zf.donate(zf.remat(zf.precision(zf.shard(f, stage=1)))),
    "stage 2, accumulate": lambda f: zf.donate(zf.accumulate(zf.shard(f, stage=2), 2)),
    "stage 3, offload": lambda f: zf.donate(zf.offload(zf.shard(f, stage=3))),
}


def step_and_state(size: Size, wrap: Wrap) -> tuple[Any, Any]:
    """What a user would write; the model is on the GPU."""
    torch.manual_seed(0)
    model = zf.functionalize(build(size).to(DEVICE))
    tx = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-3))
    plain = zf.train_step(lambda p, ids: loss_of(model.apply(p, ids), ids), tx)
    return wrap(plain), zf.TrainState.create(model.params, tx)


@pytest.mark.parametrize("name", WRAPS)
def test_peak_memory_and_flops_are_those_foreseen(name: str) -> None:
    """Bytes of tensors at the peak of a steady step, by the allocator; FLOPs by the profile."""
    step, full = step_and_state(MIDDLE, WRAPS[name])
    ids = next(batches(MIDDLE, 0)).to(DEVICE)
    told = zf.foresee(step, zf.tree.map(lambda x: x.cpu(), full), ids.cpu(), ranks=1)
    found = zf.profile(step, full, ids)
    assert found.flops.by_phase == told.flops.by_phase
    step, full = step_and_state(MIDDLE, WRAPS[name])
    state = step.place(full)
    del full
    state, _ = step(state, ids)
    gc.collect()
    torch.cuda.synchronize()
    # The module, and whatever else of this process is there; a state that is offloaded is not.
    outside = torch.cuda.memory_allocated() - on_device(state)
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        state, _ = step(state, ids)
    torch.cuda.synchronize()
    seen = torch.cuda.max_memory_allocated() - outside
    assert told.peak_bytes == pytest.approx(seen, rel=0.05)


def on_device(state: Any) -> int:
    """Bytes of a state's storages on the GPU."""
    pieces = [x for x in zf.tree.leaves(state) if isinstance(x, Tensor) and x.is_cuda]
    return sum(
        {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in pieces}.values()
    )


def test_a_plan_of_this_gpu() -> None:
    """A calibrated cluster of this one device, and times that are within a factor of two."""
    cluster = measure(DEVICE)
    step, state = step_and_state(MIDDLE, zf.donate)
    ids = next(batches(MIDDLE, 0)).to(DEVICE)
    told = zf.foresee(step, zf.tree.map(lambda x: x.cpu(), state), ids.cpu(), ranks=1)
    state = step.place(state)
    seconds = []
    for _ in range(8):
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        marks[0].record()
        state, _ = step(state, ids)
        marks[1].record()
        torch.cuda.synchronize()
        seconds.append(marks[0].elapsed_time(marks[1]) / 1e3)
    assert 0.5 < told.time(cluster).seconds / sorted(seconds)[4] < 2


def losses(model: Any, wrap: Wrap, device: torch.device) -> list[float]:
    """Of four steps."""
    tx = optim.adamw(1e-3)
    step = wrap(zf.train_step(lambda p, ids: loss_of(model.apply(p, ids), ids), tx))
    state = step.place(zf.TrainState.create(model.params, tx, key=2))
    found = []
    for _, ids in zip(range(4), batches(TINY, 0), strict=False):
        state, metrics = step(state, ids.to(device))
        found.append(float(metrics["loss"]))
    return found


@pytest.mark.parametrize("name", ["donate", "stage 3", "stage 3, remat", "stage 3, bf16"])
def test_compiled_layers_train_as_eager_ones(name: str) -> None:
    torch.manual_seed(0)
    eager = losses(zf.functionalize(build(TINY).to(DEVICE)), WRAPS[name], DEVICE)
    torch.manual_seed(0)
    module = build(TINY).to(DEVICE)
    compiled = losses(zf.functionalize(module, compile=True), WRAPS[name], DEVICE)
    assert compiled == pytest.approx(eager, rel=2e-2 if "bf16" in name else 1e-5)


AXES: dict[str, Wrap] = {
    "split": lambda f: zf.split(
        f, rules=gpt.rules(gpt.GPTConfig(vocab=48, width=16, depth=3, heads=2)), tensor=1
    ),
    "pipeline": lambda f: zf.pipeline(f, 2, pipe=1),
    "pipeline, zb": lambda f: zf.pipeline(f, 2, pipe=1, schedule="zb"),
}


@pytest.mark.parametrize("name", AXES)
def test_axes_of_one_rank_change_nothing(name: str) -> None:
    model = gpt_model(dtype=torch.float64)
    tx = optim.adamw(1e-3)
    plain = trained(zf.donate, tx, model)
    mine = trained(lambda f: zf.donate(zf.shard(AXES[name](f), stage=3)), tx, model)
    for a, b in zip(mine.metrics, plain.metrics, strict=True):
        assert float(a["loss"]) == pytest.approx(float(b["loss"]), abs=1e-9)


def test_checkpoints_move_between_a_gpu_and_the_host(tmp_path: Any) -> None:
    """Bitwise, whichever writes."""
    step, state = step_and_state(TINY, WRAPS["stage 3"])
    state = step.place(state)
    state, _ = step(state, next(batches(TINY, 0)).to(DEVICE))
    zf.save(tmp_path / "there", state)
    torch.manual_seed(0)
    model = zf.functionalize(build(TINY))
    tx = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-3))
    plain = zf.train_step(lambda p, ids: loss_of(model.apply(p, ids), ids), tx)
    host = zf.restore(tmp_path / "there", zf.TrainState.create(model.params, tx))
    same(down(step.unplace(state)).params, host.params)
    zf.save(tmp_path / "back", plain.place(host))
    again = zf.restore(tmp_path / "back", state)
    same(down(step.unplace(again)).params, host.params)


def test_half_precision_by_trainer(tmp_path: Any) -> None:
    """fp16 with a scaled loss, and bf16, beside Trainer's own on the same GPU."""
    transformers = pytest.importorskip("transformers")
    from tests.dist.trainer_runs import Tokens, model_of

    def trained(kind: Any, **how: Any) -> list[float]:
        arguments = transformers.TrainingArguments(
            str(tmp_path), max_steps=6, per_device_train_batch_size=4, logging_steps=1,
            report_to=[], save_strategy="no", seed=3, learning_rate=1e-3, **how,
        )  # fmt: skip
        trainer = kind(model_of("llama"), arguments, train_dataset=Tokens("llama", 64, 0))
        trainer.train()
        return [row["loss"] for row in trainer.state.log_history if "loss" in row]

    for how in ({}, {"bf16": True}, {"fp16": True}):
        expected = trained(transformers.Trainer, **how)
        assert trained(zf.hf.Trainer, **how) == pytest.approx(expected, rel=1e-2 if how else 1e-4)


@pytest.mark.usefixtures("cold")  # CUDA does not survive a fork
def test_nccl_moves_what_one_rank_sends_itself() -> None:
    """Every collective of the transport over real NCCL, by one process."""
    found = zf.launch(_alone, nprocs=1)
    assert found == [["all_gather", "all_reduce", "all_to_all", "broadcast", "reduce_scatter"]]


def _alone() -> list[str]:
    import tempfile

    import torch.distributed as dist

    from zfunc.ranks import world
    from zfunc.ranks.distributed import DistributedWorld

    torch.cuda.set_device(0)
    store = dist.FileStore(tempfile.mkstemp()[1], 1)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
    here = DistributedWorld(60.0)
    world.adopt(here)
    group = here.connect("data", (0,))
    x = torch.arange(12.0, device=DEVICE)
    torch.cuda.synchronize()
    done: list[str] = []

    def sure(name: str, out: Tensor, expected: Tensor) -> None:
        assert torch.equal(out, expected), (name, out)
        done.append(name)

    transport = group._transport  # what short cuts of a lone rank leave out

    def moved(kind: str, data: Tensor, *args: Any) -> Any:
        call = group._call(kind, "test", (), data)
        steps = transport.start(call, data, args)
        next(steps)
        try:
            next(steps)
        except StopIteration as end:
            return end.value
        raise AssertionError(f"{kind} does not end")

    sure("all_gather", moved("all_gather", x, x.clone(), [0, 12]), x)
    sure("all_reduce", moved("all_reduce", x, x.clone()), x)
    (back,) = moved("all_to_all", x, [x], [12])
    sure("all_to_all", back, x)
    sure("broadcast", moved("broadcast", x, x.clone(), 0), x)
    sure("reduce_scatter", moved("reduce_scatter", x, x.clone(), [0, 12], None), x)
    transport.settle()
    torch.cuda.synchronize()
    world.adopt(None)
    dist.destroy_process_group()
    return done


@pytest.mark.usefixtures("cold")
def test_more_ranks_than_gpus_are_refused() -> None:
    ranks = torch.cuda.device_count() + 1
    with pytest.raises(zf.DeviceError, match=rf"shares cuda:\d+ with|sees {ranks - 1} GPU"):
        zf.launch(zf.rank, nprocs=ranks)
