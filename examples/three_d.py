"""Three dimensions of parallelism on an unmodified Hugging Face Llama: data, tensor and pipe.

Ranks along `pipe` have different layers, ranks along `tensor` share each layer, and ranks along
`data` have other rows of a batch; what each of them then holds is cut over `data` (ZeRO). Neither
the model nor the loss knows of it. Tensor ranks are neighbours, since they send most; stages are
farthest apart, since they send least.

    python examples/three_d.py                                # 8 simulated ranks: 2 x 2 x 2
    python examples/three_d.py --data 1 --tensor 1 --pipe 1   # one: the same losses
    torchrun --nproc-per-node 8 examples/three_d.py           # a cluster's way to start
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import zfunc as zf
from zfunc import optim

CONFIG = LlamaConfig(
    vocab_size=32,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=32,
    tie_word_embeddings=True,
)


def train(model: zf.Functional, mesh: zf.Mesh, schedule: str, steps: int) -> dict[str, Any]:
    """What every rank runs: losses, how much state it held, and what it sent along each axis."""

    def loss_fn(params: Any, ids: Tensor) -> Tensor:
        return model.apply(params, ids, labels=ids).loss

    tx = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-2))
    step = zf.split(zf.donate(zf.train_step(loss_fn, tx)), model)
    step = zf.shard(zf.pipeline(step, microbatches=4, schedule=schedule), stage=1, mesh=mesh)
    state = step.place(zf.TrainState.create(model.params, tx))
    losses = []
    for n in range(steps):
        ids = zf.random.randint(zf.random.key(n), 0, CONFIG.vocab_size, (16, 1)) + torch.arange(8)
        with zf.comm.ledger() as sent:
            state, metrics = step(state, step.local_batch(ids % CONFIG.vocab_size))
        losses.append(metrics["loss"].item())
    return {"losses": losses, "state": zf.tree.size_bytes(state), "sent": dict(sent.by_axis)}


def report(rank: int, found: dict[str, Any]) -> None:
    """A line of what a rank held and sent."""
    sent = ", ".join(f"{axis} {count:,}" for axis, count in sorted(found["sent"].items()))
    print(f"rank {rank}: {found['state']:,} bytes of state; sent per step: {sent or 'nothing'}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for axis in ("data", "tensor", "pipe"):
        parser.add_argument(f"--{axis}", type=int, default=2, help="ranks along it (%(default)s)")
    parser.add_argument("--schedule", default="1f1b", help="of the pipeline (%(default)s)")
    parser.add_argument("--steps", type=int, default=10, help="optimizer steps (%(default)s)")
    flags = parser.parse_args()
    torch.manual_seed(0)
    functional = zf.functionalize(LlamaForCausalLM(CONFIG))
    grid = zf.mesh(data=flags.data, tensor=flags.tensor, pipe=flags.pipe)
    how = functional, grid, flags.schedule, flags.steps
    if "RANK" in os.environ:  # torchrun has started this process and its neighbours
        zf.init()
        runs = [train(*how)]
    else:
        runs = zf.simulate(grid.world_size)(train)(*how)
    if zf.rank() == 0:
        for n, value in enumerate(runs[0]["losses"]):
            print(f"step {n + 1:4d}  loss {value:.4f}")
    for k, run in enumerate(runs):
        report(zf.rank() + k, run)
