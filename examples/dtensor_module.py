"""A sharded step as an `nn.Module`, for other people's loops: accelerate, Lightning.

Such a loop knows a module with parameters, a loss with `backward`, and an optimizer of torch. Here
the parameters are this rank's flats of stage 3, as `DTensor(Shard(0))`: an optimizer updates what
the rank has, and `clip_grad_norm_` finds the norm of the whole. `forward` runs the step of zfunc,
gradients included, and returns the loss; `backward` hands these gradients out.

    python examples/dtensor_module.py --ranks 2 --loop torch accelerate
    python examples/dtensor_module.py --ranks 2 --loop lightning  # pip install lightning

Limits:

- `forward` returns the loss alone. What a loop computes of a model's outputs is not reached.
- It takes the time of forward and backward wherever gradients are enabled; under `no_grad` it only
  evaluates.
- A flat holds many leaves. So an optimizer cannot treat them apart: no weight decay by name, no
  rate by layer, no update by matrix (Muon). Optimizers of `zf.optim` can.
- Transforms that act on the update (`donate`, `offload`, `compress_grads`, `precision`'s masters)
  have none to act on.
- Buffers that training changes (BatchNorm) are left as they are.
- Every rank calls it as often as the others.
- Hugging Face's Trainer looks at the model's class, and counts shifted labels or does not.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import zfunc as zf

Batches = list[list[Tensor]]  # the microbatches of each update

CONFIG = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)


class ShardedLoss(nn.Module):
    """The loss of a module as a function of the batch; its parameters are this rank's flats.

    Args:
        module: any; frozen parameters stay frozen.
        loss_fn: from what the module returns to the loss, a 0-d tensor.
        transforms: from a step to a step that shards at stage 3.
    """

    _is_accelerate_prepared = True  # accelerate is not to wrap it in DDP

    def __init__(
        self,
        module: nn.Module,
        loss_fn: Callable[..., Tensor],
        transforms: Callable[[Any], Any] = lambda step: zf.shard(step, stage=3),
    ) -> None:
        super().__init__()
        self.model, self.calls = zf.functionalize(module), 0

        def loss(params: Any, args: Any, kwargs: Any) -> Tensor:
            return loss_fn(self.model.apply(params, *args, train=self.training, **kwargs))

        def gradients(state: Any, args: Any, kwargs: Any) -> Any:
            return state, zf.value_and_grad(loss)(state["params"], args, kwargs)

        self.loss, self.step = loss, transforms(gradients)
        placed = self.step.place(self._state(self.model.params))["params"]
        self.layout = placed.layout
        self.mesh = init_device_mesh(placed.flats[0].device.type, (zf.world_size(),))
        self.flats = nn.ParameterList(
            nn.Parameter(self._distributed(i, x), requires_grad=self.layout.flats[i].trainable)
            for i, x in enumerate(placed.flats)
        )

    def _state(self, params: Any) -> dict[str, Any]:
        """``step`` and ``key`` decide the dropout of a call."""
        return {"params": params, "step": torch.tensor(self.calls), "key": zf.random.key(0)}

    def _distributed(self, flat: int, local: Tensor) -> DTensor:
        whole = self.layout.flats[flat].whole  # small ones may be on all ranks
        placements = [Replicate() if whole else Shard(0)]
        return DTensor.from_local(local, self.mesh, placements, run_check=False)

    @property
    def params(self) -> zf.Sharded:
        """The parameters as zfunc's functions take them; they share memory with the flats."""
        return zf.Sharded(self.layout, [p.detach().to_local() for p in self.flats])

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The mean of the loss over the ranks, each of which gives its own rows."""
        if not torch.is_grad_enabled():
            mean: Tensor = zf.pmean(zf.evaluate(self.loss)(self.params, args, kwargs))
            return mean
        self.calls += 1
        loss: Tensor = _Handed.apply(self, (args, kwargs), *self.flats)
        return loss

    def to_module(self) -> nn.Module:
        """The module with the trained weights; a collective."""
        return self.model.to_module(zf.full(self.params))


class _Handed(torch.autograd.Function):
    """A loss whose gradients are known already."""

    @staticmethod
    def forward(ctx: Any, owner: ShardedLoss, batch: Any, *flats: DTensor) -> Tensor:
        with torch.enable_grad():
            _, (loss, grads) = owner.step(owner._state(owner.params), *batch)
        ctx.owner, ctx.grads = owner, grads.flats
        return loss.detach().clone()

    @staticmethod
    def backward(ctx: Any, seed: Tensor) -> Any:
        handed = [
            None if g is None else ctx.owner._distributed(i, g * seed)
            for i, g in enumerate(ctx.grads)
        ]
        return None, None, *handed


# Loops that know nothing of zfunc


def by_torch(model: nn.Module, batches: Batches) -> list[tuple[float, float]]:
    """AdamW, a schedule, microbatches, clipping: the loss and the norm of each update."""
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, len(batches))
    found = []
    for parts in batches:
        losses = [model(part, labels=part) for part in parts]
        (sum(losses) / len(parts)).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        opt.step()
        schedule.step()
        opt.zero_grad()
        found.append((sum(loss.item() for loss in losses) / len(parts), value(norm)))
    return found


def by_accelerate(model: nn.Module, batches: Batches) -> list[tuple[float, float]]:
    """The same, as accelerate writes it."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=len(batches[0]))
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, len(batches))
    model, opt = accelerator.prepare(model, opt)
    found = []
    for parts in batches:
        losses = []
        for part in parts:
            with accelerator.accumulate(model):
                losses.append(model(part, labels=part))
                accelerator.backward(losses[-1])
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
                opt.step()
                opt.zero_grad()
        schedule.step()
        found.append((sum(loss.item() for loss in losses) / len(parts), value(norm)))
    return found


def by_lightning(model: nn.Module, batches: Batches) -> list[tuple[float, float]]:
    """The same in Lightning's Trainer, told that there is one device: it shares nothing."""
    import pytorch_lightning as lightning  # heavy, and for this loop alone
    from pytorch_lightning.strategies import SingleDeviceStrategy

    class Loop(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.losses, self.norms = model, [], []

        def training_step(self, part: Tensor) -> Tensor:
            loss: Tensor = self.model(part, labels=part)
            self.losses.append(loss.item())
            return loss

        def configure_gradient_clipping(self, opt: Any, *how: Any, **limits: Any) -> None:
            self.norms.append(value(nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)))

        def configure_optimizers(self) -> Any:
            opt = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, len(batches))
            return [opt], [{"scheduler": schedule, "interval": "step"}]

    loop, count = Loop(), len(batches[0])
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    lightning.Trainer(
        max_epochs=1,
        strategy=SingleDeviceStrategy(torch.device("cpu")),
        accumulate_grad_batches=count,
        enable_model_summary=False,
        **quiet,
    ).fit(loop, DataLoader([part for parts in batches for part in parts], batch_size=None))
    sums = [sum(loop.losses[i : i + count]) / count for i in range(0, len(loop.losses), count)]
    return list(zip(sums, loop.norms, strict=True))


LOOPS = {"torch": by_torch, "accelerate": by_accelerate, "lightning": by_lightning}


def value(norm: Any) -> float:
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


class Loss(nn.Module):
    """What the loops are given on one process."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.module(ids, labels=labels).loss
        return loss


def compare(loop: str, updates: int) -> dict[str, float]:
    """What every rank runs: the loop on shards, and torch's on the whole in this process."""
    torch.manual_seed(0)
    module = LlamaForCausalLM(CONFIG)
    numbers = torch.Generator().manual_seed(1)

    def part() -> Tensor:  # counting from somewhere on
        return (torch.randint(64, (4, 1), generator=numbers) + torch.arange(16)) % 64

    batches = [[part(), part()] for _ in range(updates)]
    sharded = ShardedLoss(module, lambda out: out.loss)
    own = [[zf.local_batch(part) for part in parts] for parts in batches]
    ours = LOOPS[loop](sharded, own)
    whole = Loss(copy.deepcopy(module))
    theirs = by_torch(whole, batches)
    with torch.no_grad():
        evaluated = float(sharded(own[0][0], labels=own[0][0]))
        expected = float(whole(batches[0][0], labels=batches[0][0]))
    pairs = zip(sharded.to_module().parameters(), whole.parameters(), strict=True)
    return {
        "first loss": ours[0][0],
        "last loss": ours[-1][0],
        "losses apart by": max(abs(a[0] - b[0]) for a, b in zip(ours, theirs, strict=True)),
        "norms apart by": max(abs(a[1] - b[1]) for a, b in zip(ours, theirs, strict=True)),
        "evaluation apart by": abs(evaluated - expected),
        "weights apart by": max(float((a - b).detach().abs().max()) for a, b in pairs),
        "elements of this rank": sum(p.to_local().numel() for p in sharded.flats),
        "elements in all": sum(p.numel() for p in whole.parameters()),
    }


def main(loops: list[str], updates: int) -> dict[str, dict[str, float]]:
    return {loop: compare(loop, updates) for loop in loops}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2, help="local processes (%(default)s)")
    parser.add_argument("--loop", choices=LOOPS, nargs="+", default=["torch"], help="whose")
    parser.add_argument("--updates", type=int, default=6, help="of the optimizer (%(default)s)")
    flags = parser.parse_args()
    for loop, found in zf.launch(main, flags.loop, flags.updates, nprocs=flags.ranks)[0].items():
        for what, number in found.items():
            print(f"{loop}: {what} {number:.6g}")
