"""Leaves that are split, and a function of them on ranks beside the one of full leaves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

import zfunc as zf
from zfunc.layout.splits import Cut, Part, Split, mark

Leaves = dict[str, Tensor]
Splits = Mapping[str, Split | None]
Model = Callable[[Leaves, Tensor], Tensor]
WAYS = (1, 2, 3, 4)
EXACT = {"rtol": 1e-9, "atol": 1e-9}


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def leaves_of(**shapes: tuple[int, ...]) -> Leaves:
    return {name: drawn(*shape, seed=i + 1) for i, (name, shape) in enumerate(shapes.items())}


def cut(full: Leaves, ways: int, **cuts: Cut) -> Splits:
    return {
        name: cuts[name].split(x.shape, ways) if name in cuts else None for name, x in full.items()
    }


def marked(x: Tensor, split: Split | None) -> Tensor:
    """This rank's part of a leaf, as the layout hands it to a loss."""
    ways = zf.world_size()
    own = x if split is None else split.local(x, zf.rank())
    own = own.detach().clone().requires_grad_(x.is_floating_point())
    return mark(own, Part(split, zf.mesh(tensor=ways), "tensor"))


@dataclass
class Result:
    out: Tensor
    x: Tensor | None
    leaves: Leaves
    calls: dict[str, int]
    sent: dict[str, int]


def run(model: Model, leaves: Leaves, x: Tensor) -> Result:
    x = x.detach().clone()
    wrt = dict(leaves)
    if x.is_floating_point():
        x.requires_grad_()
        wrt["x"] = x * 1.0  # as in a model, no leaf
        stream = wrt.pop("x")
    else:
        stream = x
    with zf.comm.ledger() as led:
        out = model(leaves, stream)
        probe = torch.linspace(0.5, 1.5, out.numel(), dtype=out.dtype).view(out.shape)
        named = list(leaves)
        ends = [leaves[k] for k in named] + ([x] if x.requires_grad else [])
        grads = torch.autograd.grad((out * probe).sum(), ends)
    of_x = grads[-1] if x.requires_grad else None
    found = dict(zip(named, grads[: len(named)], strict=True))
    return Result(out.detach(), of_x, found, dict(led.calls_by_label), dict(led.by_label))


def same(
    model: Model, full: Leaves, splits: Splits, x: Tensor, ways: int, **tol: float
) -> list[Result]:
    """A model on split leaves against itself on full ones, which is plain torch."""
    want = run(model, {k: v.clone().requires_grad_() for k, v in full.items()}, x)

    def on_a_rank() -> Result:
        return run(model, {k: marked(v, splits[k]) for k, v in full.items()}, x)

    results: list[Result] = zf.simulate(ways)(on_a_rank)()
    limits = tol or EXACT
    for rank, got in enumerate(results):
        torch.testing.assert_close(got.out, want.out, **limits)
        assert torch.equal(got.out, results[0].out)
        if want.x is not None:
            torch.testing.assert_close(got.x, want.x, **limits)
            assert torch.equal(got.x, results[0].x)
        for name, split in splits.items():
            expected = want.leaves[name] if split is None else split.local(want.leaves[name], rank)
            torch.testing.assert_close(
                got.leaves[name], expected, **limits, msg=lambda m, n=name: f"{n}: {m}"
            )
            if split is None:
                assert torch.equal(got.leaves[name], results[0].leaves[name]), name
        if ways == 1:
            assert torch.equal(got.out, want.out)
            assert all(torch.equal(got.leaves[k], want.leaves[k]) for k in full)
            assert sum(got.calls.values()) == 0
    return results


def mlp(p: Leaves, x: Tensor) -> Tensor:
    h = F.layer_norm(x, x.shape[-1:])
    gate, up = zf.column(h, p["gate"], p.get("gate_b")), zf.column(h, p["up"])
    return x + zf.row(F.silu(gate) * up, p["down"], p.get("down_b"))


MLP = {"gate": (7, 6), "up": (7, 6), "down": (6, 7)}
MLP_CUTS = {"gate": Cut(0), "up": Cut(0), "down": Cut(1)}
