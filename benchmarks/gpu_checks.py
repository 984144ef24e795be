"""What has to be right on a GPU before anything is timed: gradients, kernels beside twins."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zfunc import kernels
from zfunc.kernels import dispatch

__all__ = ["correctness", "transforms"]

Add = Callable[..., None]
SEEDS = 4  # samples of each kernel, of other lengths


def fused(w: Tensor) -> Callable[[Tensor], Tensor]:
    """A loss through two operators with gradients of their own."""

    def loss(x: Tensor) -> Tensor:
        y = kernels.skinny_mm(kernels.fake_quant(x, bits=4), w, None, x)
        return y.float().square().sum()

    return loss


def plain(w: Tensor) -> Callable[[Tensor], Tensor]:
    """The same in torch operations, straight through the rounding."""

    def loss(x: Tensor) -> Tensor:
        y = (x + (kernels.fake_quant(x.detach(), bits=4) - x.detach())) @ w.t() + x
        return y.float().square().sum()

    return loss


def transforms(add: Add, backend: str, device: torch.device, deadline: float) -> None:
    """Gradients by every road that torch has: versions differ in which of them lose one."""
    x, w = (torch.randn(8, 256, device=device).bfloat16() for _ in range(2))
    w = torch.randn(256, 256, device=device).bfloat16() / 16
    f = fused(w)
    asked = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(plain(w)(asked), asked)
    quick = partial(torch.compile, fullgraph=True, backend=backend)
    roads: dict[str, Callable[[], Tensor]] = {
        "backward": lambda: torch.autograd.grad(f(asked), asked)[0],
        "func.grad": lambda: torch.func.grad(f)(x),
        "vmap(grad)": lambda: torch.vmap(torch.func.grad(f))(x[None])[0],
        "checkpoint": lambda: torch.autograd.grad(checkpointed(f, asked), asked)[0],
        "compile(func.grad)": lambda: quick(torch.func.grad(f))(x),
        "compile, backward": lambda: torch.autograd.grad(quick(f)(asked), asked)[0],
    }
    for name, road in roads.items():
        if time.monotonic() > deadline:
            add("transforms", name, skipped="no time left")
            continue
        try:
            found = road()
        except Exception as error:
            add("transforms", name, error=f"{type(error).__name__}: {error}"[:500])
            continue
        distance = float((found - expected).float().norm() / expected.float().norm())
        add("transforms", name, right=distance < 2e-2, distance=distance)


def checkpointed(f: Callable[[Tensor], Tensor], x: Tensor) -> Any:
    return torch.utils.checkpoint.checkpoint(f, x, use_reentrant=False)


def correctness(add: Add, device: torch.device, deadline: float) -> None:
    """Every kernel beside its twin on several samples, and beside itself: two runs are the same,
    bit for bit."""
    for name in dispatch.KERNELS:
        if time.monotonic() > deadline:
            add("correctness", name, skipped="no time left")
            continue
        try:
            verdicts = [kernels.verify([name], device, seed=seed)[0] for seed in range(SEEDS)]
            again = repeated(name, device)
        except Exception as error:
            add("correctness", name, error=f"{type(error).__name__}: {error}"[:500])
            continue
        verdict = next((v for v in verdicts if not v.right), verdicts[0])
        if not again:
            add("correctness", name, right=False, note="two runs differ")
        elif verdict.ran:
            add("correctness", name, right=verdict.right, note=str(verdict), samples=SEEDS)
        else:
            add("correctness", name, skipped=f"only the twin ran: {verdict.note}")


def repeated(name: str, device: torch.device) -> bool:
    """Whether two runs, the memory in between full of NaN, give the same bits."""
    from zfunc.kernels.verification import SAMPLES

    sample = SAMPLES[name](torch.Generator().manual_seed(1), device)
    before = sample()
    junk = torch.full((1 << 20,), torch.nan, device=device)
    del junk
    pairs = zip(before, sample(), strict=True)
    return all(torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in pairs)
