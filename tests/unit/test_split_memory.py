"""A step of split leaves holds its state, one set of gradients, and no copy of any of them."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import zfunc as zf
from tests.laws.cases import assert_same
from tests.laws.split_steps import RULES, loss_of, ranks_of, run
from tests.unit.live_bytes import Peak
from tests.unit.peaks import measured, needs_peaks
from zfunc import optim
from zfunc.buffers import heap
from zfunc.layout.cutting import make_layout
from zfunc.ranks.world import current
from zfunc.transforms import splitting

WIDTH, INNER, DEPTH, RANKS, ITEM = 512, 2048, 2, 2, 4
LEAF = INNER // RANKS * WIDTH * ITEM  # bytes of a rank's part of each matrix
BESIDE = LEAF // 2  # bytes for all activations of a batch of two rows, and what the update works in


def params() -> Any:
    wide, narrow = torch.full((INNER, WIDTH), 0.01), torch.full((WIDTH, INNER), 0.01)
    layers = [{"norm": torch.ones(WIDTH), "up": wide, "down": narrow} for _ in range(DEPTH)]
    return {"blocks": zf.Layers(layers)}


def layer(p: Any, x: Tensor) -> Tensor:
    inner = torch.tanh(zf.column(F.layer_norm(x, (WIDTH,), p["norm"]), p["up"]))
    return x + zf.row(inner, p["down"])


def loss(params: Any, x: Tensor) -> Tensor:
    return zf.scan(layer, params["blocks"], x).square().mean()


def peak_of_a_step(microbatches: int) -> tuple[int, int]:
    """The peak of a second step, and what the state and one set of gradients take."""
    tx = optim.adamw(0.1)
    rules = {"*up": zf.Cut(0), "*down": zf.Cut(1)}
    step = zf.split(zf.donate(zf.train_step(loss, tx)), rules=rules, tensor=RANKS)
    if microbatches > 1:
        step = zf.accumulate(step, microbatches)
    state = step.place(zf.TrainState.create(params(), tx))
    x = torch.ones(2 * microbatches, WIDTH)
    state, _ = step(state, x)
    gc.collect()
    one = sum(x.nbytes for x in state.params.held())
    with Peak() as peak:
        step(state, x)
    return peak.bytes, 4 * one  # parameters, two moments, gradients


def peaks_of_steps() -> list[tuple[int, int]]:
    return [peak_of_a_step(1), peak_of_a_step(2)]


def test_no_gradient_is_copied_beside_the_others() -> None:
    # Real ranks: among simulated ones what one holds depends on who comes last.
    for one, two in zf.launch(peaks_of_steps, nprocs=RANKS):
        peak, held = one
        assert held <= peak < held + BESIDE
        peak, held = two  # the second microbatch's are added to the first one's
        assert peak < held + held // 4 + BESIDE


def test_a_large_leaf_is_a_flat_of_its_own() -> None:
    """Units stay what they are, and what is small lies together."""
    whole, apart = make_layout(params()), make_layout(params(), alone=LEAF)
    assert [unit.slots for unit in apart.units] == [unit.slots for unit in whole.units]
    rows = [[slot.path.rpartition(".")[2] for slot in row] for row in apart.by_flat]
    assert rows == [["down"], ["norm"], ["up"]] * DEPTH
    none = make_layout(params(), alone=INNER * WIDTH * ITEM + 1)
    assert none == whole and all(len(row) == 3 for row in whole.by_flat)


@pytest.mark.parametrize("bytes_", [0, 1 << 8])
def test_how_leaves_lie_changes_no_bit(bytes_: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def three_steps() -> Any:
        return run(zf.train_step(loss_of, TX), lambda f: zf.split(f, rules=RULES, tensor=2), tx=TX)

    TX = optim.chain(optim.clip_by_global_norm(0.5), optim.adamw(0.02, weight_decay=0.1))
    usual = ranks_of(2, 1, three_steps)
    monkeypatch.setattr(splitting, "ALONE", bytes_)
    for mine, theirs in zip(ranks_of(2, 1, three_steps), usual, strict=True):
        assert_same(mine, theirs, f"leaves from {bytes_} bytes alone")


def test_what_forward_left_free_is_given_back_before_gradients_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    noted: dict[int, list[str]] = {0: [], 1: []}

    def note(what: str) -> None:
        noted[current().rank].append(what)

    def noting(p: Any, x: Any) -> Tensor:
        loss = loss_of(p, x)
        note("forward")
        if loss.requires_grad:
            loss.register_hook(lambda grad: note("backward"))
        return loss

    def step(state: Any, x: Any) -> Any:
        metrics = {"before": zf.evaluate(noting)(state.params, x)}
        metrics["loss"], _ = zf.value_and_grad(noting)(state.params, x)
        return state, metrics

    monkeypatch.setattr(heap, "return_freed", lambda: note("given back"))
    ranks_of(2, 1, lambda: run(step, lambda f: zf.split(f, rules=RULES, tensor=2), steps=1))
    assert noted[0] == noted[1] == ["forward", "forward", "given back", "backward"]


FREEING = """
from zfunc.buffers.heap import return_freed
kept = [torch.zeros(4096) for _ in range(6000)]  # 16 KiB each
full = held()
kept = kept[::100]  # what is kept lies all over what is free
lying = mark("VmRSS")
return_freed()
print(full, lying, mark("VmRSS"))
"""


@needs_peaks
def test_what_lies_free_between_small_blocks_is_given_back() -> None:
    full, lying, left = measured(FREEING)
    every = 6000 * 4096 * ITEM
    assert full - lying < every // 10  # by itself glibc keeps it
    assert full - left > every * 9 // 10
