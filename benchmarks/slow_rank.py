"""One end of a link: every contestant trains on it, taking turns, and what was seen is written.

All contestants run in the same two processes, a step of each in turn, so whatever else the
machine does meanwhile falls on all of them alike. They start from the same weights and see
the same text.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import zfunc as zf
from benchmarks.models import GPT, Size
from zfunc import optim
from zfunc.language.corpus import batch_at, read_corpus

MODEL = Size(layers=4, width=128, heads=4, vocab=256, tokens=64)
RATE, DECAY, BETAS = 2e-3, 0.01, (0.9, 0.95)

Step = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Plan:
    """What both ends must know.

    Attributes:
        names: the contestants, in the order of their turns.
        batch: sequences per rank and step.
        freeze: plain steps before compression begins, PowerSGD's too.
    """

    names: tuple[str, ...]
    steps: int
    freeze: int
    batch: int


@dataclass
class Runner:
    """A contestant ready to step, and what it has done so far.

    Attributes:
        ledger: its own account of the bytes it sends, if it keeps one.
    """

    step: Step
    ledger: Callable[[], AbstractContextManager[Any]]
    losses: list[float]
    seconds: list[float]
    wire_bytes: list[int]
    ledger_bytes: list[int]


def model() -> GPT:
    torch.manual_seed(0)
    return GPT(MODEL)


def loss_of(logits: Tensor, ids: Tensor) -> Tensor:
    """Mean cross-entropy of the next byte; ``ids`` are ``[batch, tokens + 1]``."""
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def ours(plan: Plan, method: str | None) -> Step:
    net = zf.functionalize(model())
    tx = optim.adamw(RATE, *BETAS, weight_decay=DECAY)

    def loss_fn(params: Any, ids: Tensor) -> Tensor:
        return loss_of(net.apply(params, ids[:, :-1]), ids)

    step: Any = zf.donate(zf.shard(zf.train_step(loss_fn, tx), stage=0))
    if method is not None:
        step = zf.compress_grads(step, method=method, freeze_step=plan.freeze)
    state = step.place(zf.TrainState.create(net.params, tx))

    def advance(ids: Tensor) -> Tensor:
        nonlocal state
        state, metrics = step(state, ids)
        return metrics["loss"]

    return advance


def ddp(plan: Plan, hooked: bool) -> Step:
    # PowerSGD's hook starts collectives from callbacks: with two buckets over gloo their order
    # may differ between ranks, which ends the run. One bucket holds this model.
    net = nn.parallel.DistributedDataParallel(
        model(), gradient_as_bucket_view=True, bucket_cap_mb=256 if hooked else None
    )
    if hooked:
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=2, start_powerSGD_iter=max(plan.freeze, 2)
        )
        net.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    adamw = torch.optim.AdamW(net.parameters(), RATE, BETAS, weight_decay=DECAY, fused=True)

    def advance(ids: Tensor) -> Tensor:
        loss = loss_of(net(ids[:, :-1]), ids)
        loss.backward()
        adamw.step()
        adamw.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        return mean / dist.get_world_size()

    return advance


def contestants(plan: Plan) -> dict[str, Runner]:
    builds: dict[str, Callable[[], Step]] = {
        "zfunc": lambda: ours(plan, None),
        "zfunc onebit": lambda: ours(plan, "onebit"),
        "zfunc int8": lambda: ours(plan, "int8"),
        "zfunc powersgd": lambda: ours(plan, "powersgd"),
        "DDP": lambda: ddp(plan, hooked=False),
        "DDP PowerSGD": lambda: ddp(plan, hooked=True),
    }
    return {
        name: Runner(
            builds[name](),
            zf.comm.ledger if name.startswith("zfunc") else nullcontext,
            *([], [], [], []),
        )
        for name in plan.names
    }


def sent_bytes(device: str) -> int:
    """Bytes that left this namespace through a network device, headers included."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next(int(x.split()[9]) for x in lines if x.strip().startswith(f"{device}:"))


def measure(plan: Plan, device: str, tell: bool) -> dict[str, Any]:
    """All steps of all contestants, as one rank."""
    text = read_corpus("topics", context=MODEL.tokens).train
    rank, ranks = dist.get_rank(), dist.get_world_size()
    runners = contestants(plan)
    for n in range(plan.steps):
        batch = batch_at(n, text, plan.batch * ranks, MODEL.tokens, seed=0)
        mine = batch[rank * plan.batch : (rank + 1) * plan.batch]
        for runner in runners.values():
            dist.barrier()
            before, start = sent_bytes(device), time.perf_counter()
            with runner.ledger() as led:
                runner.losses.append(float(runner.step(mine)))
            runner.seconds.append(time.perf_counter() - start)
            runner.wire_bytes.append(sent_bytes(device) - before)
            runner.ledger_bytes.append(0 if led is None else led.total_bytes)
        if tell and (n + 1) % 10 == 0:
            print(f"{n + 1}/{plan.steps}", flush=True)
    return {
        name: {
            "losses": r.losses,
            "seconds": r.seconds,
            "wire_bytes": r.wire_bytes,
            "ledger_bytes": r.ledger_bytes if any(r.ledger_bytes) else None,
        }
        for name, r in runners.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plan", required=True, help="a Plan as JSON")
    parser.add_argument("--device", required=True, help="network device that leads to the peer")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    raw = json.loads(args.plan)
    torch.set_num_threads(1)
    zf.init(timeout=120)
    seen = measure(Plan(**{**raw, "names": tuple(raw["names"])}), args.device, zf.rank() == 0)
    (args.out / f"rank{os.environ['RANK']}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
