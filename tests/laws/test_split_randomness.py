"""Dropout of a split module: tensor ranks stay alike, and masks on different heads differ."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import zfunc as zf
from tests.laws.cases import assert_near, assert_same
from tests.laws.plans_by_hand import gpt2
from tests.laws.split_steps import TX, Batch, on_mesh, run

RATES = {"resid_pdrop": 0.2, "embd_pdrop": 0.2, "attn_pdrop": 0.2}
Masks = list[tuple[int, Tensor]]


class Watch(TorchFunctionMode):
    """Masks of functional dropout, and of how many dimensions its input is."""

    def __init__(self, seen: Masks, failing: bool = False) -> None:
        super().__init__()
        self.seen, self.failing = seen, failing

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is F.dropout:
            x = args[0].detach()
            self.seen.append((x.dim(), (out.detach() == 0)[x != 0]))
            if self.failing and x.dim() == 4:
                raise RuntimeError("between a column and its row")
        return out


@cache
def dropping() -> tuple[Any, int]:
    module = gpt2(**RATES, attn_implementation="eager")
    return zf.functionalize(module, train=True), module.config.vocab_size


def trained(
    stage: int | None = None,
    beside: Callable[[Any], Any] = lambda f: f,
    failing: bool = False,
    ways: int = 2,
) -> list[tuple[Any, Masks]]:
    """Of each rank the result of 3 steps of GPT-2 with 4 heads, and its masks."""
    model, words = dropping()
    start = model.params

    def body() -> tuple[Any, Masks]:
        seen: Masks = []

        def loss(params: Any, batch: Batch) -> Tensor:
            with Watch(seen, failing):
                logits = model.apply(params, batch["ids"]).logits[:, :-1]
            return F.cross_entropy(logits.flatten(0, 1), batch["ids"][:, 1:].flatten())

        step, wrap = zf.train_step(loss, TX), on_mesh(ways, 1, stage, model=model)
        return run(step, lambda f: beside(wrap(f)), lambda: start, words=words), seen

    return zf.simulate(ways)(body)()


@pytest.mark.parametrize("stage", [None, 3])
def test_masks_of_heads_differ_and_those_of_the_stream_do_not(stage: int | None) -> None:
    (mine, masks), (theirs, others) = trained(stage)
    assert_same(mine, theirs)
    assert {dims for dims, _ in masks} == {3, 4}
    for (dims, a), (_, b) in zip(masks, others, strict=True):
        assert torch.equal(a, b) == (dims == 3)


def test_recomputed_masks_are_those_of_the_forward() -> None:
    want, found = trained(3), trained(3, zf.remat)
    for (mine, _), (theirs, _) in zip(found, want, strict=True):
        assert_near(mine, theirs, 1e-12)


def test_a_step_that_raises_between_them_leaves_the_generator() -> None:
    dropping()  # made before: that draws, too
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="between a column and its row"):
        trained(failing=True)
    assert torch.equal(before, torch.get_rng_state())
    assert_same(*(mine for mine, _ in trained()))
