"""A small GAN: two models and two optimizers in one state, taking turns in one step.

`roles` tells `zf.shard` which entries of the state are parameters and which belong to an
optimizer. Each model is differentiated by itself, and the other one, passed as a further
argument, enters without gradients. The ranks are simulated: threads of this process.

    python examples/gan.py --ranks 2
"""

from __future__ import annotations

import argparse
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import zfunc as zf
from zfunc import optim

Params = dict[str, Any]
State = dict[str, Any]

NOISE = 2
ROLES = {"generator": "params", "critic": "params", "g_opt": "opt_state", "c_opt": "opt_state"}
tx = optim.adam(1e-2, b1=0.5)


def init_mlp(key: Tensor, sizes: list[int]) -> Params:
    keys = zf.random.split(key, len(sizes) - 1)
    return {
        "layers": zf.Layers(
            {"w": zf.random.normal(k, (i, o)) * i**-0.5, "b": torch.zeros(o)}
            for k, (i, o) in zip(keys, pairwise(sizes), strict=True)
        )
    }


def mlp(params: Params, x: Tensor) -> Tensor:
    *hidden, last = params["layers"]
    for layer in hidden:
        x = zf.layer(lambda p, x: F.leaky_relu(x @ p["w"] + p["b"], 0.2), layer, x)
    return zf.layer(lambda p, x: x @ p["w"] + p["b"], last, x)


def critic_loss(critic: Params, generator: Params, real: Tensor, noise: Tensor) -> Tensor:
    """Tell the real from the made; the generator gets no gradient."""
    made = mlp(generator, noise)
    return F.softplus(-mlp(critic, real)).mean() + F.softplus(mlp(critic, made)).mean()


def generator_loss(generator: Params, critic: Params, noise: Tensor) -> Tensor:
    """Be taken for real; the critic gets no gradient."""
    return F.softplus(-mlp(critic, mlp(generator, noise))).mean()


def train_step(state: State, real: Tensor) -> tuple[State, dict[str, Tensor]]:
    key = zf.random.fold_in(zf.random.fold_in(state["key"], state["step"]), zf.axis_index("data"))
    noise = zf.random.normal(key, (len(real), NOISE))
    critic, generator = state["critic"], state["generator"]

    c_loss, grads = zf.value_and_grad(critic_loss)(critic, generator, real, noise)
    updates, c_opt = tx.update(grads, state["c_opt"], critic)
    critic = optim.apply_updates(critic, updates)

    g_loss, grads = zf.value_and_grad(generator_loss)(generator, critic, noise)
    updates, g_opt = tx.update(grads, state["g_opt"], generator)
    generator = optim.apply_updates(generator, updates)

    models = {"critic": critic, "generator": generator, "c_opt": c_opt, "g_opt": g_opt}
    return {**state, **models, "step": state["step"] + 1}, {"critic": c_loss, "generator": g_loss}


def ring(key: Tensor, n: int) -> Tensor:
    """Points near a circle of radius 2."""
    angle, blur = zf.random.split(key)
    turn = zf.random.uniform(angle, (n,), high=2 * torch.pi)
    circle = torch.stack([turn.cos(), turn.sin()], dim=1)
    return 2 * circle + 0.1 * zf.random.normal(blur, (n, 2))


def train(steps: int, stage: int) -> Tensor:
    """What every rank runs; returns 1000 points that the generator makes."""
    g_key, c_key, key = zf.random.split(zf.random.key(0), 3)
    generator, critic = init_mlp(g_key, [NOISE, 64, 64, 2]), init_mlp(c_key, [2, 64, 64, 1])
    models = {"generator": generator, "critic": critic}
    opts = {"g_opt": tx.init(generator), "c_opt": tx.init(critic)}
    step = zf.donate(zf.shard(train_step, stage=stage, roles=ROLES))
    state = step.place({**models, **opts, "step": torch.tensor(0), "key": key})
    for n in range(steps):
        state, losses = step(state, zf.local_batch(ring(zf.random.key(n), 256)))
        if zf.rank() == 0 and (n + 1) % (steps // 4) == 0:
            shown = "  ".join(f"{name} {loss:.3f}" for name, loss in losses.items())
            print(f"step {n + 1:4d}  {shown}")
    noise = zf.random.normal(zf.random.key(-1), (1000, NOISE))
    return zf.evaluate(mlp)(state["generator"], noise)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2, help="simulated ranks (%(default)s)")
    parser.add_argument("--stage", type=int, default=3, choices=range(4), help="ZeRO (%(default)s)")
    parser.add_argument("--steps", type=int, default=500, help="optimizer steps (%(default)s)")
    flags = parser.parse_args()
    torch.set_num_threads(1)
    points = zf.simulate(flags.ranks)(train)(flags.steps, flags.stage)[0]
    radius, turn = points.norm(dim=1), torch.atan2(points[:, 1], points[:, 0])
    seen = (turn.histc(bins=12, min=-torch.pi, max=torch.pi) > 10).sum()
    print(f"radius {radius.mean():.2f} ± {radius.std():.2f} (2.00 ± 0.10), {seen} of 12 directions")
