"""A transform of your own: `watch` adds the size of each layer's output to the metrics.

A transform is a frozen dataclass that overrides some of the hooks of `zf.Transform`. This one
needs two: `layer` surrounds each layer's compute, `finish` sees what the step returns. It knows
nothing of the model (here torch's own encoder) or of the other transforms, and works with all.

    python examples/own_transform.py
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

import zfunc as zf
from zfunc import optim
from zfunc.ranks import world


@dataclass(frozen=True)
class Watch(zf.Transform):
    """The root mean square of every layer's output, over all ranks: ``rms/0``, ``rms/1``, ..."""

    position: ClassVar[int] = 600

    def layer(self, call: Callable[..., Any], info: zf.LayerInfo) -> Callable[..., Any]:
        def watched(*xs: Any, **kw: Any) -> Any:
            out = call(*xs, **kw)
            # Ranks may be threads: what a transform notes down belongs to its rank's world.
            noted = world.current().memo.setdefault(self, {})
            noted[f"rms/{info.index}"] = out.detach().square().mean()
            return out

        return watched

    def finish(self, old: Any, out: Any) -> Any:
        (state, metrics), noted = out, zf.pmean(world.current().memo.pop(self, {}))
        return state, metrics | {name: square.sqrt() for name, square in noted.items()}


watch = zf.transform_of(Watch)

torch.manual_seed(0)
LAYER = nn.TransformerEncoderLayer(
    32, nhead=2, dim_feedforward=64, dropout=0.0, batch_first=True, norm_first=True
)
MODEL = zf.functionalize(nn.TransformerEncoder(LAYER, num_layers=3, enable_nested_tensor=False))


def loss_fn(params: Any, x: Tensor) -> Tensor:
    """Every position is to say what the mean over all positions is."""
    return (MODEL.apply(params, x) - x.mean(dim=1, keepdim=True)).square().mean()


def train(steps: int = 8) -> list[dict[str, float]]:
    """What every rank runs; returns the metrics of each step."""
    tx = optim.adamw(1e-2)
    step = watch(zf.shard(zf.train_step(loss_fn, tx), stage=3))
    state, rows = step.place(zf.TrainState.create(MODEL.params, tx)), []
    for n in range(steps):
        batch = zf.local_batch(zf.random.normal(zf.random.key(n), (16, 8, 32)))
        state, metrics = step(state, batch)
        rows.append({name: float(value) for name, value in metrics.items()})
    return rows


if __name__ == "__main__":
    for row in zf.simulate(2)(train)()[0]:
        print("  ".join(f"{name} {value:.3f}" for name, value in row.items()))
