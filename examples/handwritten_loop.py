"""A training loop from nothing: functions, a dict for a state, and two processes.

Nothing here subclasses anything, and nothing knows how many ranks there are. The step is a
function from state to state; `zf.shard` is what cuts that state over the ranks (ZeRO stage 3).

    python examples/handwritten_loop.py --ranks 2 --stage 3
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import zfunc as zf
from zfunc import optim

Params = dict[str, Any]
State = dict[str, Any]

tx = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(optim.cosine(3e-3, steps=150)))


def init(key: Tensor, width: int = 64, depth: int = 4) -> Params:
    inner, outer, *blocks = zf.random.split(key, 2 + depth)
    return {
        "embed": zf.random.normal(inner, (2, width)),
        "blocks": zf.Layers([init_block(k, width) for k in blocks]),
        "head": zf.random.normal(outer, (width, 2)) * width**-0.5,
    }


def init_block(key: Tensor, width: int) -> Params:
    up = zf.random.normal(key, (width, 2 * width)) * width**-0.5
    return {"up": up, "bias": torch.zeros(2 * width), "down": torch.zeros(2 * width, width)}


def block(params: Params, x: Tensor) -> Tensor:
    return x + F.gelu(x @ params["up"] + params["bias"]) @ params["down"]


def apply(params: Params, x: Tensor) -> Tensor:
    """Points ``[n, 2]`` to logits ``[n, 2]``."""
    h = zf.scan(block, params["blocks"], torch.sin(x @ params["embed"]))
    return h @ params["head"]


def loss_fn(params: Params, batch: tuple[Tensor, Tensor]) -> Tensor:
    points, labels = batch
    return F.cross_entropy(apply(params, points), labels)


def train_step(state: State, batch: tuple[Tensor, Tensor]) -> tuple[State, Tensor]:
    loss, grads = zf.value_and_grad(loss_fn)(state["params"], batch)
    updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
    params = optim.apply_updates(state["params"], updates)
    return {"params": params, "opt_state": opt_state, "step": state["step"] + 1}, loss


def spirals(key: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Points on two interleaved spirals, and which of the two each lies on."""
    where, which, blur = zf.random.split(key, 3)
    labels = zf.random.randint(which, 0, 2, (n,))
    turn = zf.random.uniform(where, (n,), low=0.5, high=3.0)
    angle = 2 * torch.pi * turn + torch.pi * labels
    points = torch.stack([turn * angle.cos(), turn * angle.sin()], dim=1)
    return points + 0.05 * zf.random.normal(blur, (n, 2)), labels


def train(stage: int, steps: int) -> float:
    """What every rank runs; returns the accuracy on points not trained on."""
    step = zf.donate(zf.shard(train_step, stage=stage))
    params = init(zf.random.key(0))
    state = step.place({"params": params, "opt_state": tx.init(params), "step": 0})
    data = zf.random.key(1)
    for n in range(steps):
        batch = zf.local_batch(spirals(zf.random.fold_in(data, n), 256))
        state, loss = step(state, batch)
        if zf.rank() == 0 and (n + 1) % 30 == 0:
            print(f"step {n + 1:4d}  loss {loss:.4f}")
    if zf.rank() == 0:
        print(f"rank 0 holds {zf.tree.size_bytes(state):,} bytes of state")
    points, labels = spirals(zf.random.key(2), 1000)
    guess = zf.evaluate(apply)(state["params"], points).argmax(dim=1)
    return (guess == labels).float().mean().item()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2, help="local processes (%(default)s)")
    parser.add_argument("--stage", type=int, default=3, choices=range(4), help="ZeRO (%(default)s)")
    parser.add_argument("--steps", type=int, default=150, help="optimizer steps (%(default)s)")
    flags = parser.parse_args()
    accuracy = zf.launch(train, flags.stage, flags.steps, nprocs=flags.ranks)[0]
    print(f"accuracy {accuracy:.1%}")
