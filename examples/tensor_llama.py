"""An unmodified Hugging Face Llama whose layers several processes share: tensor parallelism.

`zf.split` probes the model once and finds which of its weights can be split: attention by heads,
the MLP by its hidden features, the table and the head by the vocabulary. `zf.shard` cuts what each
process then has over those with other rows (ZeRO). The model's code is not touched. It learns to
repeat: the second half of each sequence is the first half again.

    python examples/tensor_llama.py                           # 2 processes share each layer
    python examples/tensor_llama.py --ranks 4                 # the same twice, with other rows
    python examples/tensor_llama.py --ranks 1 --tensor 1      # one process: the same losses
    torchrun --nproc-per-node 2 examples/tensor_llama.py      # a cluster's way to start
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
from zfunc.probing.texts import text_of

CONFIG = LlamaConfig(
    vocab_size=32,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=32,
)


def sequences(key: Tensor, n: int, half: int = 2) -> Tensor:
    """``[n, 2 * half]`` token ids, the second half like the first."""
    first = zf.random.randint(key, 0, CONFIG.vocab_size, (n, half))
    return torch.cat([first, first], dim=1)


def train(steps: int, tensor: int) -> dict[str, Any]:
    """What every rank runs; how much it held, and what it sent along which axis."""
    torch.manual_seed(0)
    model = zf.functionalize(LlamaForCausalLM(CONFIG))

    def loss_fn(params: Any, ids: Tensor) -> Tensor:
        labels = ids.clone()
        labels[:, : ids.shape[1] // 2] = -100  # the first half cannot be known
        return model.apply(params, ids, labels=labels).loss

    tx = optim.adamw(optim.warmup_cosine(1e-2, warmup=5, steps=steps))
    step = zf.train_step(loss_fn, tx)
    step = zf.shard(zf.split(step, model, tensor=tensor), stage=3, unit_bytes=1 << 20)
    state = step.place(zf.TrainState.create(model.params, tx))
    if zf.rank() == 0:
        print(text_of(zf.split.plan(model, tensor)))
    for n in range(steps):
        with zf.comm.ledger() as sent:
            state, metrics = step(state, step.local_batch(sequences(zf.random.key(n), 64)))
        if zf.rank() == 0 and (n + 1) % 10 == 0:
            print(f"step {n + 1:4d}  loss {metrics['loss'].item():.4f}")
    return {"state": zf.tree.size_bytes(state), "sent": dict(sent.by_axis)}


def report(rank: int, held: dict[str, Any]) -> None:
    """A line of what a rank held and sent."""
    sent = ", ".join(f"{axis} {count:,}" for axis, count in sorted(held["sent"].items()))
    print(f"rank {rank}: {held['state']:,} bytes of state; sent per step: {sent or 'nothing'}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2, help="local processes (%(default)s)")
    parser.add_argument("--tensor", type=int, default=2, help="share each layer (%(default)s)")
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps (%(default)s)")
    flags = parser.parse_args()
    if "RANK" in os.environ:  # torchrun has started this process and its neighbours
        zf.init()
        report(zf.rank(), train(flags.steps, flags.tensor))
    elif flags.ranks == 1:
        report(0, train(flags.steps, flags.tensor))
    else:
        ranks = zf.launch(train, flags.steps, flags.tensor, nprocs=flags.ranks)
        for rank, held in enumerate(ranks):
            report(rank, held)
