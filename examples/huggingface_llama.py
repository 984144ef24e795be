"""An unmodified Hugging Face Llama, trained with its parameters cut over two processes.

`zf.functionalize` reads the module as a function of its parameters. Its decoder layers become the
units that stage 3 gathers one at a time; the model's code is not touched. Here Llama learns to
repeat: the second half of each sequence is the first half again.

    python examples/huggingface_llama.py --ranks 2
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import zfunc as zf
from zfunc import optim

CONFIG = LlamaConfig(
    vocab_size=32,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=32,
)


def sequences(key: Tensor, n: int, half: int = 8) -> Tensor:
    """``[n, 2 * half]`` token ids, the second half like the first."""
    first = zf.random.randint(key, 0, CONFIG.vocab_size, (n, half))
    return torch.cat([first, first], dim=1)


def train(steps: int) -> tuple[list[float], dict[str, Any]]:
    """What every rank runs: losses, and what this rank held and sent."""
    torch.manual_seed(0)
    model = zf.functionalize(LlamaForCausalLM(CONFIG))
    if zf.rank() == 0:
        print(model)

    def loss_fn(params: Any, ids: Tensor) -> Tensor:
        labels = ids.clone()
        labels[:, : ids.shape[1] // 2] = -100  # the first half cannot be known
        return model.apply(params, ids, labels=labels).loss

    tx = optim.adamw(optim.warmup_cosine(3e-3, warmup=10, steps=steps))
    # Layers of less than an eighth of this would travel together: these are tiny.
    step = zf.shard(zf.donate(zf.train_step(loss_fn, tx)), stage=3, unit_bytes=1 << 20)
    state = step.place(zf.TrainState.create(model.params, tx))
    losses = []
    for n in range(steps):
        batch = zf.local_batch(sequences(zf.random.key(n), 64))
        with zf.comm.ledger() as sent:
            state, metrics = step(state, batch)
        losses.append(metrics["loss"].item())
        if zf.rank() == 0 and (n + 1) % 20 == 0:
            print(f"step {n + 1:4d}  loss {losses[-1]:.4f}")
    return losses, {"state": zf.tree.size_bytes(state), "sent": sent.total_bytes}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2, help="local processes (%(default)s)")
    parser.add_argument("--steps", type=int, default=80, help="optimizer steps (%(default)s)")
    flags = parser.parse_args()
    for rank, (_, held) in enumerate(zf.launch(train, flags.steps, nprocs=flags.ranks)):
        print(f"rank {rank}: {held['state']:,} bytes of state, {held['sent']:,} sent per step")
