"""What existed before, and what cannot be replayed."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.unit.replay_models import GPT, check, parameters, replayed
from zfunc.errors import PlacementError
from zfunc.initialisation.recorder import record


def test_tensors_that_existed_before() -> None:
    table, weight = torch.arange(6.0), nn.Parameter(torch.ones(2))

    def make_state(x: Tensor) -> list[Tensor]:
        return [table, x * 2 + table, weight, x.view(2, 3).clone().zero_(), table.view(2, 3)]

    taken = replayed(check(make_state, torch.rand(6)))
    assert taken[0] is table and taken[2] is weight


def changes_an_argument(x: Tensor) -> Tensor:
    return x.add_(1)


def converts_a_module() -> Tensor:
    module = EXISTING.half()
    return module.weight


def on_meta() -> dict[str, Tensor]:
    with torch.device("meta"):
        return {"w": nn.Linear(2, 2).weight}


def from_meta() -> Tensor:
    return torch.ones(3).copy_(torch.ones(3, device="meta"))


EXISTING = nn.Linear(2, 2)
REFUSED: list[tuple[Callable[..., Any], str]] = [
    (lambda: changes_an_argument(EXISTING.weight.data), "add_.*existed before.*clone.*step.place"),
    (converts_a_module, "data.*existed before"),
    (on_meta, "leaf w is on the meta device.*Leave out"),
    (from_meta, "copy_.*meta device"),
    (lambda: {"net": nn.Linear(2, 2)}, "leaf net is a Linear.*functionalize"),
    (lambda: torch.ones(3).data_ptr(), "data_ptr.*memory.*step.place"),
    (lambda: torch.get_rng_state() if torch.rand(2) is not None else None, "get_rng_state"),
    (lambda: torch.ops._c10d_functional.all_reduce(torch.ones(2), "sum", "0"), "all_reduce.*ranks"),
    (lambda: torch.eye(3).to_sparse().coalesce(), "dense"),
]


@pytest.mark.parametrize(("make_state", "message"), REFUSED)
def test_refusals(make_state: Callable[[], Any], message: str) -> None:
    start = torch.get_rng_state()
    with pytest.raises(PlacementError, match="(?s)" + message):
        record(make_state)
    assert torch.equal(torch.get_rng_state(), start)
    assert EXISTING.weight.dtype == torch.float32


def test_threads_do_not_see_each_other() -> None:
    """Ranks of a simulated world initialise at once; what they seed themselves is theirs."""

    def make_state(seed: int) -> Any:
        torch.manual_seed(seed)
        return [torch.randn(100), parameters(GPT(8, 2)), nn.init.trunc_normal_(torch.empty(99))]

    def rank(seed: int) -> list[Tensor]:
        return list(replayed(record(make_state, seed)).values())

    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(rank, range(9)))
    for seed, result in enumerate(results):
        expected = replayed(record(make_state, seed)).values()
        assert all(torch.equal(a, b) for a, b in zip(result, expected, strict=True))
        assert torch.equal(result[0], make_state(seed)[0])


def test_an_error_of_the_users_stays_theirs() -> None:
    def make_state() -> Tensor:
        torch.rand(3)
        return torch.ones(2) @ torch.ones(3)

    start = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="size") as caught:
        record(make_state)
    assert "step.place" in "".join(caught.value.__notes__)
    assert torch.equal(torch.get_rng_state(), start)


def test_arrays_read_on_the_way_are_read_only() -> None:
    def make_state() -> Tensor:
        x = torch.ones(3)
        x.numpy()[0] = 5
        return x

    with pytest.raises(ValueError, match="read-only"):
        record(make_state)


def test_a_tensor_that_was_not_returned_says_so() -> None:
    kept = []
    record(lambda: kept.append(torch.ones(2)))
    with pytest.raises(PlacementError, match="did not return"):
        kept[0] + 1
