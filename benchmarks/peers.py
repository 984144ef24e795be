"""The contestants: how each library turns one model into a training step on this rank.

A contestant's ``build`` takes the full model and returns what one step is: ids in, loss out.
Everything else (weights, data, optimizer, threads, allocator, transport) is the same for all:
AdamW in torch's fused form, gloo, one thread per rank.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.models import LEARNING_RATE, WEIGHT_DECAY, loss_of


def join_torch() -> None:
    dist.init_process_group("gloo")


@dataclass(frozen=True)
class Running:
    """A contestant ready to step: its step, and its own account of bytes sent if it keeps one."""

    step: Callable[[Tensor], Tensor]
    ledger: Callable[[], AbstractContextManager[Any]] = nullcontext


@dataclass(frozen=True)
class Contestant:
    """How to start one library: what it imports, how it joins the group, how it builds its step."""

    build: Callable[[nn.Module], Running]
    imports: tuple[str, ...] = ()  # loaded before the memory baseline is read
    join: Callable[[], None] = join_torch

    def missing(self) -> str | None:
        """The first package that is not installed here, if any."""
        tops = (name.split(".")[0] for name in self.imports)
        return next((top for top in tops if find_spec(top) is None), None)


def fused_adamw(params: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(params, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True)


def plain_loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> Running:
    def step(ids: Tensor) -> Tensor:
        loss = loss_of(model(ids), ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Running(step)


def ddp(module: nn.Module) -> Running:
    model = nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=True)
    return plain_loop(model, fused_adamw(model.parameters()))


def fsdp2(module: nn.Module) -> Running:
    from torch.distributed.fsdp import fully_shard

    for block in module.blocks:
        fully_shard(block)
    fully_shard(module)
    return plain_loop(module, fused_adamw(module.parameters()))


def deepspeed(module: nn.Module, stage: int) -> Running:
    import deepspeed as ds

    config = {
        "train_micro_batch_size_per_gpu": 1,  # only bookkeeping: the loop below passes tensors
        "gradient_clipping": 0.0,  # its default is 1.0, which would be another training run
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    optimizer = fused_adamw(module.parameters())
    model, *_ = ds.initialize(model=module, optimizer=optimizer, config=config)

    def step(ids: Tensor) -> Tensor:
        loss = loss_of(model(ids), ids)
        model.backward(loss)
        model.step()
        return loss.detach()

    return Running(step)


def join_deepspeed() -> None:
    import deepspeed as ds

    ds.init_distributed("gloo", verbose=False)


def zfunc_step(module: nn.Module, stage: int) -> tuple[Any, Any]:
    """Our own step, in README's lines, and the full state that it begins with."""
    import zfunc as zf
    from zfunc import optim

    model = zf.functionalize(module)
    tx = optim.adamw(LEARNING_RATE, weight_decay=WEIGHT_DECAY)

    def loss_fn(params: Any, ids: Tensor) -> Tensor:
        return loss_of(model.apply(params, ids), ids)

    step = zf.donate(zf.shard(zf.train_step(loss_fn, tx), stage=stage))
    return step, zf.TrainState.create(model.params, tx)


def zfunc(module: nn.Module, stage: int) -> Running:
    import zfunc as zf

    step, full = zfunc_step(module, stage)
    state = step.place(full)
    del full

    def advance(ids: Tensor) -> Tensor:
        nonlocal state
        state, metrics = step(state, ids)
        return metrics["loss"]

    return Running(advance, zf.comm.ledger)


def join_zfunc() -> None:
    import zfunc as zf

    zf.init()


# DeepSpeed chooses its accelerator when it is imported, and would take a missing GPU for an error.
os.environ.setdefault("DS_ACCELERATOR", "cpu")

CONTESTANTS: dict[str, Contestant] = {
    "ddp": Contestant(ddp),
    "fsdp2": Contestant(fsdp2, imports=("torch.distributed.fsdp",)),
    **{
        f"deepspeed{stage}": Contestant(
            partial(deepspeed, stage=stage), imports=("deepspeed",), join=join_deepspeed
        )
        for stage in (1, 2, 3)
    },
    **{
        f"zfunc{stage}": Contestant(
            partial(zfunc, stage=stage),
            # llvmlite compiles its kernels.
            imports=("zfunc", "zfunc.optim", "zfunc.transforms", "llvmlite.binding"),
            join=join_zfunc,
        )
        for stage in (0, 1, 2, 3)
    },
}


def load(name: str) -> Contestant:
    """The contestant, with everything imported that it will need."""
    chosen = CONTESTANTS[name]
    for module in ("torch._dynamo", *chosen.imports):  # torch.optim would import dynamo later
        import_module(module)
    return chosen
