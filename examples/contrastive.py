"""A contrastive loss over all ranks: each row's image against the texts of the whole batch.

Each rank encodes its rows. `zf.all_gather` brings the features of all others, and its gradient goes
back to the ranks that they came from: so two ranks have the loss and the gradients of one process.

    python examples/contrastive.py --ranks 2

Source: Radford et al., Learning Transferable Visual Models From Natural Language Supervision, 2021
(figure 3).
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
tx = optim.adam(3e-3)


def init(key: Tensor, width: int = 32, depth: int = 2) -> Params:
    def tower(key: Tensor) -> Any:
        keys = zf.random.split(key, depth)
        return zf.Layers({"w": zf.random.normal(k, (width, width)) * width**-0.5} for k in keys)

    images, texts = zf.random.split(key, 2)
    return {"images": tower(images), "texts": tower(texts), "scale": torch.tensor(2.0)}


def encode(tower: Any, x: Tensor) -> Tensor:
    """``[rows, width]`` features of length one."""
    return F.normalize(zf.scan(lambda p, x: x + torch.tanh(x @ p["w"]), tower, x), dim=1)


def loss_fn(params: Params, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The mean over this rank's rows, which the step averages over ranks."""
    images, texts = encode(params["images"], batch[0]), encode(params["texts"], batch[1])
    every_image, every_text = zf.all_gather((images, texts), "data", tiled=True)
    labels = zf.axis_index("data") * len(images) + torch.arange(len(images))
    scale = params["scale"].exp()
    by_image = F.cross_entropy(scale * images @ every_text.T, labels)
    return (by_image + F.cross_entropy(scale * texts @ every_image.T, labels)) / 2


def pairs(seed: int, rows: int = 16, width: int = 32) -> tuple[Tensor, Tensor]:
    """Two noisy views of the same thing."""
    same, *noise = zf.random.split(zf.random.key(seed), 3)
    x = zf.random.normal(same, (rows, width))
    views = [x + 0.5 * zf.random.normal(key, (rows, width)) for key in noise]
    return views[0], views[1]


def train(steps: int, ranks: int) -> tuple[list[float], Tensor]:
    """What every rank runs: losses, and the gradient of the first step's first weight."""
    params = init(zf.random.key(0))
    step = zf.train_step(loss_fn, tx)
    step = zf.shard(step, stage=3) if ranks > 1 else step
    state, losses = step.place(zf.TrainState.create(params, tx)), []
    for i in range(steps):
        state, metrics = step(state, step.local_batch(pairs(i)))
        losses.append(float(metrics["loss"]))

    def differentiate(state: Params, batch: Any) -> tuple[Params, Any]:
        return state, zf.value_and_grad(loss_fn)(state["params"], batch)[1]

    first = zf.shard(differentiate, stage=0) if ranks > 1 else zf.Step(differentiate)
    _, grads = first(first.place({"params": params}), first.local_batch(pairs(0)))
    return losses, zf.tree.get(grads, "images.0.w")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2, help="processes (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=60, help="default: %(default)s")
    args = parser.parse_args()

    alone, gradient = train(args.steps, 1)
    losses, theirs = zf.launch(train, args.steps, args.ranks, nprocs=args.ranks)[0]
    for i in range(0, args.steps, 10):
        print(f"step {i:3d}  loss {losses[i]:.4f}  of one process {alone[i]:.4f}")
    apart = max(abs(a - b) for a, b in zip(losses, alone, strict=True))
    print(f"losses differ by at most {apart:.1e}")
    print(f"gradients differ by at most {(gradient - theirs).abs().max().item():.1e}")


if __name__ == "__main__":
    main()
