"""A replay holds hardly more than its largest leaf."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.unit.live_bytes import Peak
from tests.unit.replay_models import GPT, check, parameters
from zfunc.initialisation.recorder import record


def peak_and_sizes(make_state: Callable[[], Any]) -> tuple[int, int, int]:
    """Peak of a replay, the largest leaf, and the sum of leaves, in bytes."""
    recording, sizes = record(make_state), []
    with Peak() as peak:
        recording.replay(lambda i, leaf: sizes.append(leaf.numel() * leaf.element_size()))
    return peak.bytes, max(sizes), sum(sizes)


def adam(params: dict[str, Tensor]) -> dict[str, Any]:
    zeros = {name: torch.zeros_like(p) for name, p in params.items()}
    return {
        "m": zeros,
        "v": {n: torch.zeros_like(p) for n, p in params.items()},
        "t": torch.tensor(0),
    }


def with_optimizer() -> Any:
    params = parameters(GPT())
    return {"params": params, "opt": adam(params)}


def with_master_copies() -> Any:
    params = parameters(GPT().to(torch.bfloat16))
    masters = {name: p.float().clone() for name, p in params.items()}
    return {"params": params, "masters": masters, "opt": adam(masters)}


def with_truncated_normals() -> Any:
    module = GPT()
    for p in module.parameters():
        nn.init.trunc_normal_(p, std=0.02)
    return parameters(module)


@pytest.mark.parametrize(
    ("make_state", "times"),
    [
        (lambda: parameters(GPT()), 1.0),
        (with_optimizer, 1.0),
        (with_master_copies, 3.0),  # a weight, its 16-bit cast, and the master in the making
        (with_truncated_normals, 4.0),  # the draw, its comparisons, the next draw
    ],
    ids=["params", "optimizer", "masters", "truncated"],
)
def test_peak_is_near_the_largest_leaf(make_state: Callable[[], Any], times: float) -> None:
    plain, (peak, largest, total) = Peak(), peak_and_sizes(make_state)
    with plain:
        kept = make_state()
    assert plain.bytes >= total > 10 * largest, "the measure sees a plain call hold everything"
    assert largest <= peak <= times * largest + 4096
    del kept
    check(make_state)


def test_values_of_the_constructor_are_not_kept() -> None:
    """The first draws must run, for the generator's sake, but only as scratch."""

    def make_state() -> list[Tensor]:
        weights = [torch.randn(1000) for _ in range(10)]
        return [w.normal_() for w in weights]

    assert peak_and_sizes(make_state)[0] == 4000


def test_dead_work_is_left_out() -> None:
    def make_state() -> Tensor:
        torch.randn(500, 500, generator=torch.Generator().manual_seed(0)) @ torch.ones(500, 500)
        return torch.randn(10)

    recording = check(make_state)
    with Peak() as peak:
        recording.replay(lambda i, leaf: None)
    assert peak.bytes <= 500 * 500 * 4 + 40
